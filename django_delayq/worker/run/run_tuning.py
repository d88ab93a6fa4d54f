"""The numbers by which a worker process runs handlers. The recorder has them, and hands them to lanes and watches."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from ...broker.base import IDS_PER_CALL


@dataclass(slots=True)
class RunTuning:
    """Times are seconds."""

    # --- how many messages are claimed, and how early -----------------------------------------------------------------

    # A message is claimed up to this time before its due time, so that its handler begins on time.
    claim_ahead: float = 0.05
    # The same where an early claim would take a permit or a thread that due messages need.
    claim_ahead_limited: float = 0.01
    # Messages that fall due within this time are claimed together. A claim for each would cost more, and with a longer
    # time one process would take what several could share.
    together: float = 0.005
    # A lane holds the claimed messages of this time beside those that run. With fewer, handlers wait for claims.
    queued_time: float = 0.05
    # But it holds no more than this number: it ends them in a tenth of a second if handlers do nothing.
    most_queued: int = 1500
    # When a delivery has waited for a slot for this time, all that wait are released: the handlers before them turned
    # out slow, and other processes may be idle.
    longest_queued: float = 1.0
    # A delivery whose handler the worker failed to begin is tried again after this time.
    retry_failed_after: timedelta = timedelta(seconds=10)

    # --- timeouts and leases ------------------------------------------------------------------------------------------

    # The time between two checks of timeouts, of leases and of the event loop. A check needs no query.
    check_interval: float = 0.25
    # A handler that runs on for this long after its timeout is stuck: its process is replaced.
    stuck_after: float = 5.0
    # Async handlers that are cancelled because their process ends have this time to clean up.
    cancel_time: float = 2.0
    # The time between two queries about each handler that has run for at least this long: was a cancel requested, and
    # is its lease still ours? A handler that extends its lease waits for the record's answer for as long at most.
    renewal_interval: float = 1.0

    # --- a message that runs isolated ---------------------------------------------------------------------------------

    # An isolated message first waits this long for the other handlers of its process to end, and twice as long each
    # next time, up to some minutes. The process takes nothing meanwhile; the supervisor soon replaces it.
    isolation_wait: float = 5.0
    # A message that has waited in vain is postponed by this time.
    postponed: float = 30.0
    # While another process of this worker isolates a message, further suspects are put off: if every process isolated
    # one, nothing else would be delivered. A suspect comes back after a random time, up to ``postponed``. The longest
    # time is ``detour`` for each suspect put off lately, or ``detour_part`` of the time for which the isolated one has
    # run: so a suspect comes back soon after that one has ended, and seldom before.
    detour: float = 0.2
    detour_part: float = 1 / 4

    # --- handler threads ----------------------------------------------------------------------------------------------

    # A thread that has had nothing to do for this long closes its connections: others may need them.
    idle_closed_after: float = 60.0
    # The same while the database refuses a connection to another thread.
    short_closed_after: float = 1.0
    # A thread that the database gave no transaction rests for this long, after the next refusal for twice that, and so
    # on, up to the longest rest.
    first_rest: float = 5.0
    longest_rest: float = 60.0
    # The log says so when handlers have had all threads for this long.
    all_taken_for: float = 60.0
    # Handlers of a topic are quick while their mean run time is below this.
    quick: float = 0.00015
    # A run counts with this time at most: Python may keep a thread waiting for longer than the handler takes.
    longest_run: float = 0.001
    # The weight of the newest run in the mean. Quick handlers that had to wait for others, some of them in a row, must
    # not count as slow: side by side they would take longer, and stay so.
    run_weight: float = 0.02
    # A quick handler that turns out slow keeps others waiting for up to twice this time.
    longest_baton: float = 0.002

    # --- the event loop -----------------------------------------------------------------------------------------------

    # The loop begins with this number of slots. While it keeps its appointments with itself, the number doubles, up to
    # the greatest. When it is late the number halves: on a machine that is busy with other work it may often be late.
    first_tasks: int = 8
    # The time between two appointments, and the lateness from which on handlers keep each other waiting.
    pace_interval: float = 0.02
    # A loop that is late by this time, or still in the same step of the same task after this time, is blocked.
    blocked_after: float = 0.1
    # While the loop stays blocked, the log says so again after this time, then after twice that, and so on.
    say_again_after: float = 10.0
    # The end of the loop waits this long for functions with ``@worker_started``.
    loop_end_time: float = 5.0
    # Threads for calls that are not thread-sensitive, such as those of ``asyncio.to_thread``, and for name look-ups.
    other_threads: int = 32

    # --- outcomes -----------------------------------------------------------------------------------------------------

    # The least time between the beginnings of two batches: each costs a commit, and claims wait behind it for the disk.
    # An outcome after a pause or after a batch of one is written at once: nothing gathers while they come one by one,
    # and a limit may wait for the permit.
    gather_time: float = 0.005
    # When this number of outcomes wait, a batch begins earlier.
    enough_outcomes: int = IDS_PER_CALL // 10
    # Outcomes of rows that another transaction has locked are tried again after this time.
    rewrite_locked_after: float = 0.1
    # A recorder hangs that has made no step for this time and does not wait for the database.
    hangs_after: float = 10.0
    # The time between two lines of a queue in the log.
    counts_interval: float = 60.0
    # While this number of signals and failures wait, the process takes no messages: receivers that are slower than
    # handlers must not fill the memory. The number is larger than a batch of outcomes, all of which wait for a moment
    # even behind quick receivers.
    most_untold: int = 2 * IDS_PER_CALL

    def rest(self, refusals: int) -> float:
        """Return the seconds for which a thread rests after this number of refusals in a row."""
        return min(self.longest_rest, self.first_rest * 2.0 ** min(refusals - 1, 20))


USUAL = RunTuning()
