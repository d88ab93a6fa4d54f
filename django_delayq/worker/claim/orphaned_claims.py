"""Orphaned claims, which may have been committed although their answer was lost with the connection."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from ...record import transitions
from ...record.sql.rows import Claimed, Moved


class OrphanedClaims:
    """Releases messages that this process claimed without learning of it: otherwise their leases would have to run out.

    One thread claims, one claim at a time (it alone uses this object). So a claim that is newer than every claim whose
    answer came is an orphan.
    """

    def __init__(self, using: str, worker: str) -> None:
        self.using = using
        self.worker = worker
        self._ids: set[int] = set()
        # The time of the newest claim whose answer came, by the record's clock.
        self._newest: datetime | None = None

    def note_answered(self, claimed: Sequence[Claimed]) -> None:
        """Take note of a claim whose answer came."""
        if claimed:
            # The clock of the database may be set back.
            newest = max([row.claimed_at for row in claimed])
            self._newest = newest if self._newest is None else max(newest, self._newest)

    def note_unanswered(self, ids: Iterable[int]) -> None:
        """Take note of ids that the database was asked to claim, without an answer."""
        self._ids.update(ids)

    def release(self) -> list[Moved]:
        """Release the noted ids that turn out to be claimed, and return their moves.

        Call this before the next claim: messages that it claims could be among them otherwise.
        """
        if not self._ids:
            return []
        moved = transitions.release_orphaned(
            self.using,
            self._ids,
            self.worker,
            since=self._newest,
            actor=f"worker:{self.worker}",
        )
        self._ids.clear()
        return moved
