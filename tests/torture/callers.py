"""``python -m tests.torture.callers WHAT SEED SECONDS``: what an application and its operators do beside the producers.

``locks``
    transactions that lock messages which run, for 3 to 10 s, and are committed or rolled back;
``keys``
    cancel, reschedule, run and requeue by key, from afar, while chains hand their keys over;
``single``
    messages of a limit of one, of which the first begins twice because its worker is frozen meanwhile;
``extends``
    handlers that ask for more time in their transactions.

All that is asked and answered is noted. The exit code is ``DID_NOTHING`` when there was nothing to act on.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import django

from tests.torture.journal import Journal
from tests.torture.sizes import DELAYQ

DID_NOTHING = 2

AUDIT = "INSERT INTO torture.sched (id, due, kind) VALUES (%s, %s, 'plain')"
STATE = "SELECT state, deliveries FROM delayq_message WHERE id = %s"
PLAIN: dict[str, Any] = {"work": 0.0, "fails": 0, "dies": 0, "late": False}
RELAY = "torture.relay"
LEASE = float(DELAYQ["LEASE"])

# A message that is due runs in so many seconds, if it does.
PATIENCE = 20.0
# Messages that callers lock, and handlers that lock their own.
LASTING, OWN = 12, 4
# Chains at once whose keys are acted on, and the messages that each has at most.
CHAINS, STEPS = 10, 20


def for_long(chance: random.Random) -> float:
    """Return 3 to 10 s, more often long ones: for how long a transaction keeps its locks."""
    return chance.triangular(3, 10, 10)


class Undo(Exception):
    """Rolls back the transaction that it leaves."""


class Callers:
    """Has a method for each kind of callers, which returns when their time is over."""

    def __init__(self, seed: str, seconds: float) -> None:
        self.random = random.Random(seed)
        self.seed = seed
        self.until = time.time() + seconds
        self.journal = Journal.of("callers")
        self.acts = 0

    def side_by_side(self, calls: list[Callable[[random.Random], None]]) -> None:
        """Make these calls in a thread each, with a source of chance of its own."""

        def run(call: Callable[[random.Random], None], chance: random.Random) -> None:
            from django.db import connection

            try:
                call(chance)
            finally:
                connection.close()

        threads = [threading.Thread(target=run, args=(call, random.Random(self.random.random()))) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Note that an answer is not known when the database fails, and take a new connection then."""
        from django.db import Error, connection

        try:
            yield
        except Error as error:
            self.journal.write("unknown", error=f"{type(error).__name__}: {error}")
            connection.close()
            time.sleep(0.2)

    def schedule(self, topic: str, payload: dict[str, Any], **options: Any) -> int:
        """Schedule a message and audit it in the same transaction; return its id."""
        from django.db import connection, transaction

        from django_delayq import schedule_message

        due = datetime.now(UTC)
        with transaction.atomic():
            message = schedule_message(topic, {**PLAIN, **payload}, delay=0, **options)
            with connection.cursor() as cursor:
                cursor.execute(AUDIT, [message.pk, due])
        return int(message.pk)

    def state(self, pk: int) -> tuple[str, int]:
        """Return the state of a message and the number of its deliveries."""
        from django.db import connection

        with connection.cursor() as cursor:
            cursor.execute(STATE, [pk])
            state, deliveries = cursor.fetchone()
        return state, deliveries

    # --- locks --------------------------------------------------------------------------------------------------------

    def locks(self) -> None:
        """Lock messages that run for longer than their leases have left, and let handlers lock their own."""
        while time.time() < self.until:
            own = [self.begin_own] * OWN
            self.side_by_side([*own, *[self.lock] * LASTING])

    def begin_own(self, chance: random.Random) -> None:
        """Begin a chain of two messages, of which the first stays in the transaction that schedules the second."""
        with self.asking():
            terms = {"turn": 1, "steps": 2, "stays": for_long(chance)}
            self.schedule("torture.own", terms, key=f"own-{chance.random()}")
            self.acts += 1

    def lock(self, chance: random.Random) -> None:
        """Schedule a message that runs for some leases, and lock it as soon as it runs."""
        with self.asking():
            pk = self.schedule("torture.lasting", {"work": 2.8 * LEASE})
            while self.state(pk)[0] != "running":
                if time.time() > self.until + PATIENCE:
                    return
                time.sleep(0.1)
            time.sleep(chance.uniform(0.5, 2.5))
            self.hold(pk, chance)

    def hold(self, pk: int, chance: random.Random) -> None:
        """Act on a message that runs, and stay in the transaction."""
        from django.db import transaction

        from django_delayq import Verdict, cancel_message, reschedule_message

        cancels, commits = chance.random() < 0.5, chance.random() < 0.5
        verdict = ""
        self.journal.write("locks", id=pk)
        try:
            with transaction.atomic():
                answer = cancel_message(pk) if cancels else reschedule_message(pk, delay=60)
                if answer.verdict not in (Verdict.REQUESTED, Verdict.TOO_LATE):
                    # It waits, because its process was killed: nobody keeps that from starting.
                    raise Undo
                self.acts += 1
                time.sleep(for_long(chance))
                if not commits:
                    raise Undo
                verdict = str(answer.verdict) if cancels else ""
        except Undo:
            verdict = ""
        finally:
            self.journal.write("frees", id=pk)
        if verdict:
            self.journal.write("answered", id=pk, verdict=verdict)

    # --- keys ---------------------------------------------------------------------------------------------------------

    def keys(self) -> None:
        """Act on chains by their keys."""
        self.side_by_side([self.act_on_chains] * CHAINS)

    def act_on_chains(self, chance: random.Random) -> None:
        """Begin one chain after another, and act on each until it has ended."""
        while time.time() < self.until:
            key = f"chain-{chance.random()}"
            terms = {"turn": 1, "steps": STEPS, "work": chance.uniform(0, 0.3)}
            terms |= {"fails": chance.choice((0, 1, 2)), "stays": chance.choice((0.0, 0.0, 0.2))}
            with self.asking():
                self.schedule(RELAY, terms, key=key)
                while time.time() < self.until and not self.act(key, chance):
                    pass

    def act(self, key: str, chance: random.Random) -> bool:
        """Act on a chain, and tell whether it has ended."""
        from django_delayq import Verdict, cancel_message, reschedule_message, run_message

        time.sleep(chance.uniform(0, 0.8))
        which: Any = {"topic": RELAY, "key": key}
        verb = chance.choice(("cancel", "cancel", "reschedule", "run"))
        if verb == "cancel":
            ended = self.ask(verb, key, lambda: cancel_message(**which))
        elif verb == "run":
            ended = self.ask(verb, key, lambda: run_message(**which))
        else:
            ended = self.ask(verb, key, lambda: reschedule_message(**which, delay=chance.uniform(0.1, 1)))
        if verb == "cancel" and ended not in (Verdict.NOT_FOUND, Verdict.TOO_LATE):
            return not (chance.random() < 0.5 and self.takes_back(key, chance))
        return bool(ended == Verdict.NOT_FOUND)

    def takes_back(self, key: str, chance: random.Random) -> bool:
        """Requeue the message of a chain that was cancelled; tell whether the chain goes on."""
        from django_delayq import Verdict, requeue_message

        time.sleep(chance.uniform(0.2, 1))
        return bool(self.ask("requeue", key, lambda: requeue_message(topic=RELAY, key=key)) == Verdict.REQUEUED)

    def ask(self, verb: str, key: str, call: Callable[[], Any]) -> Any:
        """Act by a key and note the answer."""
        asked = time.time()
        answer = call()
        self.journal.write("acted", verb=verb, key=key, asked=asked, id=answer.id, verdict=str(answer.verdict))
        self.acts += 1
        return answer.verdict

    # --- limits and poolers -------------------------------------------------------------------------------------------

    def single(self) -> None:
        """Begin a message whose place is the only one, and let others wait for it once it is delivered again."""
        with self.asking():
            key = f"single-{self.random.random()}"
            first = self.schedule("torture.single", {"work": LEASE}, limit_key=key)
            while (state := self.state(first))[1] < 2 or state[0] == "scheduled":
                if time.time() > self.until or state[0] == "consumed":
                    # Its process died before it was frozen, say.
                    break
                time.sleep(0.1)
            self.acts += 1
            for _ in range(3):
                self.schedule("torture.single", {"work": 0.5}, limit_key=key)

    def extends(self) -> None:
        """Have some handlers at a time ask for more time."""
        while time.time() < self.until:
            with self.asking():
                for _ in range(6):
                    self.schedule("torture.extending", {"work": 0.5})
                    self.acts += 1
            time.sleep(1.5)


def main(what: str, seed: str, seconds: str) -> int:
    callers = Callers(seed, float(seconds))
    {"locks": callers.locks, "keys": callers.keys, "single": callers.single, "extends": callers.extends}[what]()
    return 0 if callers.acts else DID_NOTHING


if __name__ == "__main__":
    django.setup()
    sys.exit(main(*sys.argv[1:]))
