"""Waits for wake-ups: which process takes them, and how one that came to the wrong process gets to another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from ...broker.base import Broker
from ...core.exceptions import BrokerUnavailable
from ..shared.broker_switch import BrokerSwitch
from .tuning import Tuning


class WakeUps:
    """Waits for wake-ups, and passes them on. Used by the thread that makes the consumer's rounds, except ``wake``.

    ``queues`` returns those whose wake-ups are for this process (None: those of all queues), ``may_go_on`` whether the
    process could take ids now.
    """

    def __init__(
        self,
        brokers: BrokerSwitch,
        queues: Callable[[], Sequence[str] | None],
        may_go_on: Callable[[], bool],
        stopping: threading.Event,
        tuning: Tuning,
    ) -> None:
        self.tuning = tuning
        self._brokers = brokers
        self._queues = queues
        self._may_go_on = may_go_on
        self._stopping = stopping
        # True when the last wait ended with a wake-up.
        self._is_woken = False
        # When a wake-up that was of no use here is to be passed on (monotonic); None: there is no such wake-up.
        self._pass_at: float | None = None
        self._pause = tuning.first_pause
        self._is_called = threading.Event()

    def wake(self) -> None:
        """End the wait, or the next one. Any thread may call this."""
        self._is_called.set()
        self._brokers.wake()

    def note_round(self, *, claimed: bool, any_blocked: bool) -> None:
        """Take note of the result of a round: its blocked ids may be for other processes."""
        if claimed or not any_blocked:
            self._pause, self._pass_at = self.tuning.first_pause, None
        elif self._is_woken and self._pass_at is None:
            self._pass_at = time.monotonic() + self._pause
            self._pause = min(self.tuning.longest_pause, 2 * self._pause)
        self._is_woken = False

    def wait(self, seconds: float) -> None:
        """Wait until ``seconds`` have passed or a message may be due."""
        broker = self._brokers.current()
        queues = self._queues()
        if queues == ():
            self._stopping.wait(seconds)
            return
        try:
            if self._pass_at is not None:
                left = self._pass_at - time.monotonic()
                if left <= 0:
                    self._pass_at = None
                    self.pass_on(broker)
                    self._stopping.wait(self.tuning.left_to_others)
                    return
                seconds = min(seconds, left)
            self._is_woken = broker.listen(queues, seconds)
            if self._is_woken and not self._may_go_on():
                # The wake-up was meant for a process with room: pass it on, and do not take the next one either.
                broker.notify(queues)
                self._poll_for_room(seconds)
        except BrokerUnavailable as error:
            self._brokers.report_failure(error)

    def wait_for_room(self, seconds: float) -> None:
        """Wait as ``wait`` does while ids are ready, and this process has work left: until it may take many at once.

        It leaves wake-ups to others: each take sends one while ids are left, and this process would take a few of them.
        """
        broker = self._brokers.current()
        try:
            if broker.stop_listening():
                broker.notify(self._queues())
        except BrokerUnavailable as error:
            self._brokers.report_failure(error)
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self._is_called.wait(min(left, self.tuning.longest_unheard)) or self._may_go_on():
                break
        self._is_called.clear()

    def _poll_for_room(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._may_go_on() and not self._stopping.is_set() and time.monotonic() < deadline:
            time.sleep(0.005)

    def pass_on(self, broker: Broker) -> None:
        """Leave wake-ups to other processes for a while. Repeat one for each queue: it may just have come here."""
        broker.stop_listening()
        broker.notify(self._queues())

    def stand_back(self, seconds: float) -> None:
        """Wait, and leave wake-ups to other processes; only a stop cuts this short."""
        try:
            self.pass_on(self._brokers.current())
        except BrokerUnavailable as error:
            self._brokers.report_failure(error)
        self._stopping.wait(seconds)
