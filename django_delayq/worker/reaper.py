"""Ends deliveries whose lease ran out, and messages that were not started in their time."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from .. import conf, failpoints, publisher, signals, transitions
from ..broker.base import Entry
from ..extensions import Service, WorkerExtensions
from ..models import Message
from ..sql.rows import Moved
from ..states import State

logger = logging.getLogger("django_delayq")


class Reaper(Service):
    """Every few seconds. What it takes back is due at once."""

    name = "reaper"
    interval = 5.0

    def __init__(self, using: str, actor: str, extensions: WorkerExtensions) -> None:
        self.using = using
        self.actor = actor
        self.extensions = extensions

    def tick(self) -> float:
        # One query while there is nothing to do.
        leased, expiring = transitions.anything_expired(self.using)
        moved: list[Moved] = []
        if leased and transitions.may_reap(self.using):
            moved += transitions.reap(self.using, max_crashes=conf.get().MAX_CRASHES, actor=self.actor)
            failpoints.reach("after_reap")
        if expiring:
            moved += transitions.expire(self.using, actor=self.actor)
        self.extensions.ended(moved)
        tell(self.using, moved)
        return 0.0 if len(moved) >= transitions.MOVES_PER_TRANSACTION else self.interval


def tell(using: str, moved: Sequence[Moved]) -> None:
    """Announce, log and signal what was taken back."""
    publisher.put(using, [(m.queue, Entry.at(m.id, m.due_at, m.priority)) for m in moved if m.after == State.SCHEDULED])
    for m in moved:
        level = logging.ERROR if m.after == State.DEAD else logging.WARNING
        logger.log(
            level,
            "message %s id=%d topic=%s delivery=%d reason=%r",
            "released" if m.after == State.SCHEDULED else m.after.value,
            m.id,
            m.topic,
            m.deliveries,
            m.reason,
            extra={"delayq_event": m.after.value, "delayq": {"id": m.id, "topic": m.topic}},
        )
        signals.emit_end(Message, m, using)
