"""Ends leases that ran out in pulled queues, and messages that nobody took in time, where no worker does."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from .. import signals
from ..api.actions import publish_follow_ups
from ..broker import publisher
from ..broker.base import Entry
from ..core import actors
from ..core.commits import on_commit
from ..core.forks import after_fork
from ..core.states import State
from ..models import Message
from ..project import pulled
from ..record import crashes, transitions
from ..record.low_water import LowWater
from ..record.sql.rows import Moved

logger = logging.getLogger("django_delayq")

# The time between two looks of a process for leases that ran out. Seconds.
UPKEEP_INTERVAL = 1.0


class _Upkeep:
    """The looks of this process at one database. The lock keeps threads from looking at once."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.next_at = 0.0
        self.marks = LowWater(), LowWater()


_all: defaultdict[str, _Upkeep] = defaultdict(_Upkeep)
after_fork(_all.clear)


def end_what_is_over(using: str) -> None:
    """End leases that ran out and messages that expired, unless this process has looked a moment ago."""
    upkeep = _all[using]
    if time.monotonic() < upkeep.next_at or not upkeep.lock.acquire(blocking=False):
        return
    try:
        upkeep.next_at = time.monotonic() + UPKEEP_INTERVAL
        leased, expiring = crashes.anything_expired(using, *upkeep.marks)
        actor = actors.current()
        if leased:
            report(using, crashes.reap(using, actor=actor, pulled=True))
        if expiring:
            # A worker ends those of its own queues.
            report(using, transitions.expire(using, actor=actor, among=pulled.rows()))
    finally:
        upkeep.lock.release()


def report(using: str, moves: Sequence[Moved], errors: Mapping[int, str] = MappingProxyType({})) -> None:
    """Report messages that have moved: to callers that wait, to the log, and to the receivers of signals."""
    publish_follow_ups(using, moves)
    if moves:
        on_commit(using, _tell, using, moves, errors)


def _tell(using: str, moves: Sequence[Moved], errors: Mapping[int, str]) -> None:
    waiting = [(m.queue, Entry.at(m.id, m.due_at, m.priority)) for m in moves if m.after == State.SCHEDULED]
    publisher.announce(using, waiting)
    for m in moves:
        word, error = m.after.value, errors.get(m.id, "")
        if m.after == State.SCHEDULED:
            word = "retried" if m.id in errors else "released"
        level = logging.ERROR if m.after == State.DEAD else logging.INFO
        # The text of an error may hold secrets.
        logger.log(level, "message %s id=%d topic=%s delivery=%d", word, m.id, m.topic, m.deliveries)
        if word == "retried":
            facts = {"delivery": m.deliveries, "due_at": m.due_at, "error": error}
            signals.emit(signals.message_retried, Message, **signals.message_arguments(m, using), **facts)
        signals.emit_end(Message, m, using, error)
