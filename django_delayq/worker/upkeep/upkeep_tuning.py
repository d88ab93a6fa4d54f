"""The numbers of the upkeep. ``Parts`` hands one ``UpkeepTuning`` to each of its services."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from ...broker.base import IDS_PER_CALL


@dataclass(slots=True)
class UpkeepTuning:
    """Times are seconds."""

    # --- the leader ---------------------------------------------------------------------------------------------------

    # The duty of a leader that died, hangs or was cut off is free after this time.
    leader_lease: float = 4.0
    # A process that is not the leader asks after this time whether the duty is free.
    standby_interval: float = 2.5

    # --- signs of life ------------------------------------------------------------------------------------------------

    # The time between two signs of life that a process leaves in its row.
    heartbeat_interval: float = 10.0
    # The janitor deletes the row of a worker that has shown no sign of life for this long.
    dead_worker_retention: timedelta = timedelta(days=1)

    # --- the janitor --------------------------------------------------------------------------------------------------

    prune_interval: float = 60.0
    # The number of messages that one transaction deletes.
    prune_batch: int = 200
    # Where rules are for names, the janitor searches this number of ended messages at a time.
    walked_together: int = 10_000
    # It searches for this time before it rests.
    walk: float = 0.1
    # After this time it searches from the first ended message again: some messages had to stay.
    walk_anew: float = 86_400.0
    # After a batch the janitor rests for this many times as long as the batch took: messages that fall due meanwhile
    # need the same disk, the same interpreter and the same processors.
    rest: float = 8.0

    # --- the reaper ---------------------------------------------------------------------------------------------------

    # This interval and the time for a confirmation add up to the 5 seconds after which the messages of a dead host are
    # free.
    reap_interval: float = 3.0
    # A lease that ran out is ended when it is still over after this time. The lease renewer tries again sooner.
    confirm_after: float = 2.0
    # A look at the leases that takes longer has waited for a lock on a table, and renewals have waited too.
    longest_look: float = 0.5

    # --- the loader and the sweeper -----------------------------------------------------------------------------------

    # The number of messages that a load or a sweep reads at a time.
    page: int = IDS_PER_CALL

    # --- the loader ---------------------------------------------------------------------------------------------------

    # The time between two checks of the meta.
    meta_interval: float = 1.0
    # The time between two queries for the server's identity; one comes at once after a connection error.
    identity_interval: float = 5.0
    # The time between two checks of a Redis that must not be used.
    unusable_interval: float = 10.0
    # A process brings a horizon that is too far away nearer once in this time: workers with different HORIZON would
    # otherwise fight over it.
    nearer_interval: float = 60.0
    # When Redis is full, this many batches of a thousand due ids of each queue are dropped at a time.
    batches_dropped: int = 100
    # One tick loads this many pages. The other services of the thread run between two ticks.
    pages_per_tick: int = 10

    # --- the mover ----------------------------------------------------------------------------------------------------

    # The longest sleep: a message that is scheduled meanwhile may be due earlier than the next one known.
    move_interval: float = 0.5
    # Beside a consumer the mover only repeats wake-ups that got lost.
    repeat_interval: float = 2.0

    # --- the sweeper --------------------------------------------------------------------------------------------------

    # One tick handles this many rows of a round.
    rows_per_tick: int = 5 * IDS_PER_CALL
    # The first pages of rounds that start at the very beginning take 1/10 of the time. The rounds between start at the
    # low-water mark, which lags behind by ``late_commit`` for transactions that committed late.
    parts_of_time: float = 10.0
    late_commit: timedelta = timedelta(minutes=1)
    # A consumer needs a few ms between taking ids and claiming their messages. The sweep allows it this time.
    claiming: float = 0.3
    # One tick tells Redis of this many messages that SQL has scheduled.
    announced_together: int = IDS_PER_CALL

    @property
    def leader_interval(self) -> float:
        """The leader asks Redis twice within its lease whether it still leads."""
        return self.leader_lease / 2

    @property
    def new_pages(self) -> int:
        """Beside a long round, a tick handles as many rows that have become overdue meanwhile as rows of the round."""
        return -(-self.rows_per_tick // IDS_PER_CALL)


USUAL = UpkeepTuning()
