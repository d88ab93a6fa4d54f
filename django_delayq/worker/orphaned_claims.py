"""Claims that may have been committed, though their answer was lost with the connection."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from .. import conf, transitions
from ..sql.rows import Claimed, Moved


class OrphanedClaims:
    """Gives back what this process claimed without knowing it: nobody runs that, and its lease would have to run out.

    One thread claims, one claim at a time: whatever is newer than all claims that were answered was not.
    """

    def __init__(self, using: str, worker: str) -> None:
        self.using = using
        self.worker = worker
        self._ids: set[int] = set()
        # The newest claim that was answered, by the record's clock.
        self._newest: datetime | None = None

    def answered(self, claimed: Sequence[Claimed]) -> None:
        if claimed:
            # In the database's time zone an hour may come twice, and its clock may be set back.
            newest = max(row.claimed_at.astimezone(UTC) for row in claimed)
            self._newest = newest if self._newest is None else max(newest, self._newest)

    def missed(self, ids: Iterable[int]) -> None:
        """The database was asked to claim these and did not answer."""
        self._ids.update(ids)

    def give_back(self) -> list[Moved]:
        """What of these turns out to be claimed. Before the next claim, or one that is answered may be among them."""
        if not self._ids:
            return []
        moved = transitions.release_orphaned(
            self.using,
            self._ids,
            self.worker,
            since=self._newest,
            max_crashes=conf.get().MAX_CRASHES,
            actor=f"worker:{self.worker}",
        )
        self._ids.clear()
        return moved
