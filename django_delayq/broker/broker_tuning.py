"""The numbers by which brokers and publishers work. Tests give other ones."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class BrokerTuning:
    """Times are seconds."""

    # --- publishers ---------------------------------------------------------------------------------------------------

    # A call that schedules waits this time to be connected to Redis, and Redis counts as away when an answer is this
    # late. The message is safe without Redis: a sweep finds it.
    timeout: float = 0.25
    # After Redis failed to answer, no caller tries it again for this time.
    retry_after: float = 1.0
    # The clocks of hosts, of the database and of Redis may differ by nearly this time: a new message is announced if it
    # is due within HORIZON plus this time from now.
    clock_margin: float = 60.0

    # Programs that wait for messages of a pulled queue look again after this time, and then know what falls due before
    # the next look: they are only woken for messages that are due sooner. Seconds.
    pullers_look: float = 0.25

    # --- the database as the broker -----------------------------------------------------------------------------------

    # While a limit is full, a query looks for its messages again after this time.
    look_again: float = 0.25
    # A queue that is named nowhere is looked at for this time after it held a message.
    remembered: float = 600.0
    # Full looks, which begin before all rows, take 1 / ``parts_of_time`` of the time at most.
    parts_of_time: float = 10.0


USUAL = BrokerTuning()
