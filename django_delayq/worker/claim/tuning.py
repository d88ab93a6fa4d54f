"""The numbers by which a consumer works. ``Parts`` hands one ``Tuning`` to all that claims."""

from __future__ import annotations

from dataclasses import dataclass

from ...broker.base import IDS_PER_CALL


@dataclass(slots=True)
class Tuning:
    """Times are seconds."""

    # --- when the next round begins -----------------------------------------------------------------------------------

    # While nothing is due, the consumer looks again after this time: for messages, for pauses that no message has
    # shown, and, in the leader, for new queues. It learns of all of these earlier, unless the process that got the
    # wake-up has died.
    idle_wait: float = 30.0
    # With ``--once`` the consumer looks again after this time while handlers still run: their end may free a slot.
    last_wait: float = 0.02
    # With ``--once`` this many rounds in a row may fail with an error of the database; the last one ends the process.
    last_tries: int = 5

    # A process that has messages for its threads, and knows of more, claims the next ones when half of its own have
    # run, or after this time: a claim of one costs as much as a claim of fifty, and another queue may wait for it.
    longest_unheard: float = 0.025
    # A process that passes a wake-up on takes none for this time, so that another process gets it.
    left_to_others: float = 0.01
    # A process that found nothing for itself passes its wake-up on after ``first_pause``: another one may know the
    # topics of blocked ids. If it gets the next one too, it waits for twice the time, up to ``longest_pause``.
    first_pause: float = 0.01
    longest_pause: float = 1.0

    # --- how many ids a round takes -----------------------------------------------------------------------------------

    # A round calls Redis this often at most to make further due ids ready, a thousand ids each. Other queues wait for
    # that: beside 100,000 messages that fall due at once, ten calls made them 75 ms late, and four make them 45.
    catch_up: int = 4
    # A worker that names more queues than this asks the index of queues first, instead of one queue after another.
    few_queues: int = 3
    # The index of queues counts ids until it has found this many, or as many as there is room for.
    enough_ids: int = IDS_PER_CALL // 10
    # A round takes this number of ids at most while messages of other queues come beside a backlog: the next ones wait
    # until its claim has ended.
    most_beside_others: int = 350
    # Such messages are expected for this long after the last one.
    others_expected: float = 10.0
    # When most taken ids cannot begin here, a take asks for this many, to get past them. A larger batch would delay
    # the next take, and with it messages for which a slot becomes free.
    looked_past: int = IDS_PER_CALL // 4
    # While one lane is full, at least this many ids are taken to find messages of the other one, but no more than four
    # times its room.
    fewest: int = 20
    # The weight of the last take in the estimate of the event loop's share of messages.
    share_weight: float = 1 / 8
    # A lane with a smaller share of the messages does not decide when the next ones are claimed.
    least_share: float = 1 / 16
    # A process that could not record outcomes for this long takes nothing: that work might have to be repeated.
    longest_behind: float = 5.0

    # --- what becomes of ids that are not claimed ---------------------------------------------------------------------

    # A process that knows of blocked ids reads their names after this time. Then it also asks the record
    # about limits that have been full for as long: other processes may have freed permits.
    look_interval: float = 1.0
    # One take unblocks this many names at most.
    most_names: int = 200
    # An id whose message another move has locked becomes ready again after this time.
    reclaim_locked_after: float = 0.25
    # Ids become ready again after this time when the database did not answer their claim.
    retry_unclaimed_after: float = 1.0
    # An early claim tolerates that this process is wrong about the record's clock by this time. The message waits in
    # the worker until it is due by the record's clock.
    clock_tolerance: float = 0.1
    # A process remembers the limits of this many deliveries. One whose lease was lost is never told to have ended, so
    # only this bound removes its entry.
    most_remembered: int = 10 * IDS_PER_CALL

    # --- which queues are served --------------------------------------------------------------------------------------

    # While a queue is known to be paused, the record is asked after this time whether it still is.
    pause_check_interval: float = 1.0
    # A queue that is named nowhere is served for this long after it held a message.
    remembered: float = 3600.0
