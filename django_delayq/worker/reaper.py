"""Ends deliveries whose lease ran out, and messages that were not started in their time."""

from __future__ import annotations

from .. import conf, failpoints, transitions
from ..extensions import Service, WorkerExtensions
from ..sql.rows import Moved
from .reporting import report_moves


class Reaper(Service):
    """Takes messages back and expires messages every few seconds. A message taken back is due at once."""

    name = "reaper"
    interval = 5.0

    def __init__(self, using: str, actor: str, extensions: WorkerExtensions) -> None:
        self.using = using
        self.actor = actor
        self.extensions = extensions

    def tick(self) -> float:
        """End a batch of each kind; come back at once when there is more. One query while there is nothing to do."""
        leased, expiring = transitions.anything_expired(self.using)
        moved: list[Moved] = []
        if leased and transitions.may_reap(self.using):
            moved += transitions.reap(self.using, max_crashes=conf.get().MAX_CRASHES, actor=self.actor)
            failpoints.reach("after_reap")
        if expiring:
            moved += transitions.expire(self.using, actor=self.actor)
        self.extensions.ended(moved)
        report_moves(self.using, moved)
        return 0.0 if len(moved) >= transitions.MOVES_PER_TRANSACTION else self.interval
