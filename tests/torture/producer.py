"""``python -m tests.torture.producer TERMS`` schedules messages and audits each in the same transaction."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import django

from tests.torture.journal import Journal
from tests.torture.sizes import KEYS, PULLED

# No long handler begins so many seconds before the end: one killed twice is put off for 30 s, to run alone.
CALM = 36.0
# Half of the topics are transactional.
TOPICS = (
    *("torture.row", "torture.row", "torture.row", "torture.row"),
    *("torture.line", "torture.async", "torture.limited", "torture.rated"),
)
OTHER_TOPICS = {"blocking": "torture.block", "hanging": "torture.hang", "refused": "torture.refuse"}
# A transaction that takes so many seconds is noted, with the put that follows it.
LONG = 1.0
AUDIT = """
INSERT INTO torture.sched (id, due, kind, key, holds, cancel_at)
VALUES (%s, %s, %s, %s, %s, %s::timestamptz + %s * interval '1 s')
"""


class RunIsOver(Exception):
    """The time of the run ended while a transaction was open that must not be committed later."""


class Producer:
    """Schedules until its time is over, or until it dies between a commit and the put that follows it."""

    def __init__(self, seed: str, rate: float, spread: float, poison: int, queues: int, until: float) -> None:
        self.random = random.Random(seed)
        self.rate = rate
        self.spread = spread
        self.poison = poison
        self.queues = queues
        self.until = until
        # Whether the chain has surely begun.
        self.chained = False
        self.journal = Journal.of("producer")

    def run(self) -> None:
        from django.db import Error, connection

        while time.time() < self.until:
            time.sleep(self.random.expovariate(self.rate))
            try:
                self.produce()
            except RunIsOver:
                break
            except Error as error:
                # The audit table tells whether it was committed.
                self.journal.write("unknown", error=type(error).__name__)
                connection.close()
                time.sleep(0.1)

    def produce(self) -> None:
        from django.db import transaction

        began = time.time()
        dies = self.random.random() < 0.005
        with transaction.atomic():
            if not self.chained:
                self.begin_chain()
            if dies:
                # Called before the put, which is registered later.
                transaction.on_commit(self.die)
            ids = [self.schedule() for _ in range(self.random.choice([1] * 7 + [6]))]
            ids = [pk for pk in ids if pk is not None]
            if dies:
                self.journal.write("dies", ids=ids)
        self.chained = True
        self.journal.write("acked", ids=ids)
        if time.time() - began > LONG:
            self.journal.write("long call", began=began)

    def begin_chain(self) -> None:
        """Schedule the first message of the chain, unless another producer has done so."""
        from django.db import connection

        from django_delayq import schedule_message

        payload = {"work": 0.0, "fails": 0, "dies": 0, "late": False, "turn": 1}
        due = datetime.now(UTC)
        message = schedule_message("torture.chain", payload, key="chain", on_conflict="keep")
        if not message.existed and time.time() >= self.until:
            # The last message of the chain may have left the key free: this would be another chain.
            raise RunIsOver
        if not message.existed:
            with connection.cursor() as cursor:
                cursor.execute(AUDIT, [message.pk, due, "plain", None, None, None, 0])

    def schedule(self) -> int | None:
        from django.db import connection

        from django_delayq import schedule_message

        draw = self.random.random
        if draw() < 0.1:
            return self.schedule_pulled(round(self.spread * draw() ** 2, 3))
        kind, payload = self.draw()
        key = f"key-{self.random.randrange(5)}" if draw() < 0.03 else None
        holds = self.random.choice(("live", "scheduled", "scheduled", "3s"))
        delay = round(self.spread * draw() ** 2, 3) if draw() < 0.9 else 0
        when: dict[str, Any] = {"delay": delay}
        if draw() < 0.5:
            when = {"due_at": datetime.now(UTC) + timedelta(seconds=delay)}
        # The due time that it asks for, not the one in the record: a delay counts from the call at the earliest.
        due = when.get("due_at", datetime.now(UTC) + timedelta(seconds=delay))
        # A queue of its own, or that of the handler.
        lane = self.random.randrange(2 * self.queues)
        keyed: dict[str, Any] = {} if key is None else {"key": key, "unique": holds, "on_conflict": "keep"}
        topic = OTHER_TOPICS.get(kind) or self.random.choice(TOPICS)
        message = schedule_message(
            topic,
            payload,
            queue=f"lane-{lane}" if lane < self.queues else None,
            priority=self.random.choice((-10, 0, 0, 0, 10)),
            limit_key=f"c-{self.random.randrange(KEYS)}" if topic == "torture.limited" else None,
            **when,
            **keyed,
        )
        if message.existed:
            return None
        # One that is refused is for those who requeue and purge.
        cancel = message.due_at if draw() < 0.02 and kind != "refused" else None
        with connection.cursor() as cursor:
            cursor.execute(AUDIT, [message.pk, due, kind, key, holds, cancel, self.random.uniform(-1.0, 0.3)])
        return int(message.pk)

    def schedule_pulled(self, delay: float) -> int:
        """Schedule a message for programs that pull."""
        from django.db import connection

        from django_delayq import schedule_message

        due = datetime.now(UTC) + timedelta(seconds=delay)
        message = schedule_message("torture.pulled", queue=PULLED, delay=delay)
        with connection.cursor() as cursor:
            cursor.execute(AUDIT, [message.pk, due, "pulled", None, None, None, 0])
        return int(message.pk)

    def draw(self) -> tuple[str, dict[str, Any]]:
        """Draw what the handler is to do, with times in seconds."""
        chance = self.random.random()
        payload: dict[str, Any] = {"work": 0.0, "fails": 0, "dies": 0, "late": self.random.random() < 0.5}
        if self.poison:
            self.poison -= 1
            return "poison", {**payload, "dies": 10**6}
        if chance < 0.001:
            return "mortal", {**payload, "dies": 1}
        if chance < 0.0012:
            return "blocking", {**payload, "work": 0.5}
        if chance < 0.0017 and time.time() < self.until - CALM:
            return "hanging", payload
        if chance < 0.003 and time.time() < self.until - CALM:
            # The handler runs longer than its lease.
            return "long", {**payload, "work": 7.0}
        if chance < 0.03:
            return "slow", {**payload, "work": self.random.uniform(0.2, 1.2)}
        if chance < 0.13:
            left: dict[str, Any] = {"left": []} if self.random.random() < 0.5 else {}
            return "failing", {**payload, **left, "fails": self.random.randint(1, 3)}
        if chance < 0.15:
            return "refused", payload
        return "plain", {**payload, "work": self.random.choice((0.0, 0.002, 0.02))}

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    django.setup()
    Producer(**json.loads(sys.argv[1])).run()
