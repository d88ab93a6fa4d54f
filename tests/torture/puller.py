"""``python -m tests.torture.puller SEED`` takes messages of the pulled queue, and answers them until it is killed.

It writes lines as the handlers do. ``start``: it has a message; ``end``: its work is done; ``told``: its success was
acknowledged.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import django

from tests.torture.app.lines import note
from tests.torture.sizes import PULLED

T = TypeVar("T")

# The leases that it asks for. Seconds.
LEASES = (1, 2, 3)


class Puller:
    """Takes a few messages at a time. Some it answers late, or as failures; with some it dies."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)

    def run(self) -> None:
        """Take and answer until somebody kills it."""
        while True:
            lease = self.random.choice(LEASES)
            receipts = self.take(self.random.choice((1, 5, 20)), lease)
            for receipt in receipts:
                self.note("start", receipt)
            for receipt in receipts:
                self.answer(receipt, lease)

    def take(self, most: int, lease: float) -> list[str]:
        """Return the receipts of up to ``most`` messages."""
        from django_delayq.pull import take

        return [message.receipt for message in self.ask(lambda: take(PULLED, max=most, wait=1, lease=lease))]

    def answer(self, receipt: str, lease: float) -> None:
        """Answer a message, one in many otherwise than at once by its success."""
        from django_delayq.pull import ack, extend, reject, release, retry

        chance = self.random.random()
        if chance < 0.02:
            os.kill(os.getpid(), signal.SIGKILL)
        elif chance < 0.06:
            self.ask(lambda: retry(receipt, 0.2, error="as ordered"))
        elif chance < 0.09:
            self.ask(lambda: release(receipt))
        elif chance < 0.11:
            self.ask(lambda: reject(receipt, "as ordered"))
        else:
            if chance < 0.13:
                # Its lease runs out, and its success comes late.
                time.sleep(lease + self.random.random())
            elif chance < 0.17:
                self.ask(lambda: extend(receipt, 5))
            self.note("end", receipt)
            if self.ask(lambda: ack(receipt)):
                self.note("told", receipt)

    def ask(self, call: Callable[[], T]) -> T:
        """Make a call until the database answers: a repeated answer does no harm."""
        from django.db import Error, connection

        while True:
            try:
                return call()
            except Error:
                connection.close()
                time.sleep(0.1)

    def note(self, what: str, receipt: str) -> None:
        pk, delivery, _rest = receipt.split("-", 2)
        note(what, int(pk), int(delivery))


if __name__ == "__main__":
    django.setup()
    Puller(sys.argv[1]).run()
