"""Random sequences of everything that can happen to a few messages, on real servers, with the broker's time given.

The machine plays producers, two workers that may die or freeze at any point, people who cancel and reschedule, and a
Redis that forgets. It knows what each delivery did; at the end everything is healed and the record has to add up.
Two windows excuse a second effect of a handler that is not transactional: W1, death after the effect and before the
report; W2, a lease that ran out while its holder was alive.

DELAYQ_MODEL_EXAMPLES says how many sequences to try; with DELAYQ_MODEL_QUICK a failure is not shrunk.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.db import transaction
from django.test import override_settings
from django.utils import timezone
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from django_delayq import restore, transitions
from django_delayq.broker.base import Entry
from django_delayq.broker.keys import BAND
from django_delayq.broker.redis import RedisBroker
from django_delayq.client import schedule_message
from django_delayq.clock import to_ms
from django_delayq.exceptions import BrokerUnavailable
from django_delayq.models import Message, Transition
from django_delayq.registry import handlers
from django_delayq.sql.rows import Claimed, Failure, Success, Ticket
from django_delayq.states import FINAL, State, is_legal
from django_delayq.transitions import Verdict
from django_delayq.worker.loader import Loader
from django_delayq.worker.source import Source
from django_delayq.worker.sweeper import Sweeper

EXAMPLES = int(os.environ.get("DELAYQ_MODEL_EXAMPLES", "60"))
# To shrink a failure to its essence takes minutes: not when it only matters that there is one.
PHASES = [phase for phase in Phase if phase != Phase.shrink or "DELAYQ_MODEL_QUICK" not in os.environ]
QUEUE = "default"
TOPIC = "model.any"


@dataclass
class Fate:
    """What the machine knows of one message."""

    transactional: bool
    effects: list[int] = field(default_factory=list)
    cancelled: bool = False
    # Deliveries whose effect a named window may double.
    excuses: int = 0


@dataclass
class Held:
    """A delivery in the hands of a worker."""

    row: Claimed
    done: bool = False
    # Its lease has run out; it does not know.
    expired: bool = False


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        Transition.objects.all()._raw_delete("default")
        Message.objects.all()._raw_delete("default")
        self.client = redis.Redis.from_url(os.environ["REDIS_URL"])
        self.client.flushall()
        self.start = timezone.now()
        self.elapsed = 0
        self.fates: dict[int, Fate] = {}
        self.tickets: list[Ticket] = []
        self.held: list[Held] = []
        self.snapshot: dict[bytes, bytes] | None = None
        with self.with_redis():
            source = Source("default", handlers)
            assert source.redis is not None
            self.broker: RedisBroker = source.redis
            self.source = source
            self.loaders = [Loader("default", source, lambda: (QUEUE,), name) for name in ("one", "two")]
            self.sweeper = Sweeper("default", source, lambda: (QUEUE,), lambda: [TOPIC])
        self.set_time()

    # --- helpers ------------------------------------------------------------------------------------------------------

    @staticmethod
    def with_redis() -> Any:
        return override_settings(DELAYQ={"REDIS": os.environ["REDIS_URL"], "HORIZON": 30})

    def set_time(self) -> None:
        self.broker.now = to_ms(self.start + timedelta(seconds=self.elapsed))

    def pick(self, number: int) -> int | None:
        ids = sorted(self.fates)
        return ids[number % len(ids)] if ids else None

    def started(self, row: Claimed) -> None:
        assert not self.fates[row.id].cancelled, "a delivery started after its cancel was confirmed"
        assert to_ms(row.due_at) <= int(self.broker.now), "a delivery started early"

    def announce(self, pk: int) -> None:
        message = Message.objects.get(pk=pk)
        self.hint(lambda: self.broker.put(message.queue, [Entry(pk, message.due_at, message.priority)]))

    @staticmethod
    def hint(call: Callable[[], object]) -> None:
        try:
            call()
        except BrokerUnavailable:
            pass

    # --- producers and people -----------------------------------------------------------------------------------------

    @initialize()
    def begin_loaded(self) -> None:
        self.load(0)

    @rule(delay=st.integers(0, 60), transactional=st.booleans(), pushed=st.booleans())
    def schedule(self, delay: int, transactional: bool, pushed: bool) -> None:
        if len(self.fates) >= 6:
            return
        due = self.start + timedelta(seconds=self.elapsed + delay)
        message = schedule_message(TOPIC, due=due)
        self.fates[message.pk] = Fate(transactional)
        if pushed:
            self.announce(message.pk)

    @rule(number=st.integers(0, 5), told=st.booleans())
    def cancel(self, number: int, told: bool) -> None:
        pk = self.pick(number)
        if pk is None:
            return
        alive = bool(self.alive(pk)) and Message.objects.get(pk=pk).state == State.RUNNING
        answer = transitions.cancel("default", [pk])[0]
        assert not alive or answer.verdict == Verdict.REQUESTED, "what runs can only be asked to stop"
        if answer.verdict == Verdict.CANCELLED:
            self.fates[pk].cancelled = True
            unreported = [h for h in self.held if h.row.id == pk and not h.done]
            assert all(h.row.deliveries <= self.reported(pk) for h in unreported)
        if told and answer:
            self.hint(lambda: self.broker.remove(QUEUE, [pk]))

    def reported(self, pk: int) -> int:
        return Message.objects.get(pk=pk).reported

    @rule(number=st.integers(0, 5), delay=st.integers(0, 60), pushed=st.booleans())
    def reschedule(self, number: int, delay: int, pushed: bool) -> None:
        pk = self.pick(number)
        if pk is None:
            return
        due = self.start + timedelta(seconds=self.elapsed + delay)
        if transitions.reschedule("default", [pk], due=due)[0] and pushed:
            self.announce(pk)

    @rule(number=st.integers(0, 5), pushed=st.booleans())
    def requeue(self, number: int, pushed: bool) -> None:
        pk = self.pick(number)
        if pk is None or not transitions.requeue("default", [pk])[0]:
            return
        # Somebody decided that it shall run again.
        self.fates[pk].cancelled = False
        self.fates[pk].excuses += 1
        if pushed:
            self.announce(pk)

    # --- workers ------------------------------------------------------------------------------------------------------

    @rule(seconds=st.integers(1, 40))
    def advance(self, seconds: int) -> None:
        self.elapsed += seconds
        self.set_time()

    @rule(limit=st.integers(1, 4), lost=st.booleans())
    def take(self, limit: int, lost: bool) -> None:
        taken = self.broker.take(QUEUE, limit).tickets
        if not lost:
            self.tickets += [Ticket(t.id, t.ready_ms, t.partition) for t in taken]

    @rule(lost=st.booleans())
    def claim(self, lost: bool) -> None:
        tickets, self.tickets = self.tickets, []
        claimed = transitions.claim("default", tickets, {TOPIC: 3600.0}, "model")
        assert len({row.id for row in claimed}) == len(claimed)
        for row in claimed:
            assert not self.alive(row.id), "claimed while another delivery has the lease"
        if not lost:
            self.held += [Held(row) for row in claimed]

    def alive(self, pk: int) -> list[Held]:
        """Deliveries of a message that run and have their lease."""
        return [held for held in self.held if held.row.id == pk and not held.done and not held.expired]

    @rule(limit=st.integers(1, 4))
    def work(self, limit: int) -> None:
        """What consumers do all the time, in one step, so that longer stories come about."""
        self.take(limit, lost=False)
        self.claim(lost=False)

    @rule(number=st.integers(0, 5))
    def bring_back(self, number: int) -> None:
        """Redis may hold anything: an id that is running, finished or cancelled is ready once more."""
        pk = self.pick(number)
        if pk is not None:
            self.client.zadd(self.broker.keys(QUEUE).ready, {str(pk): 100 * BAND + int(self.broker.now)})

    @rule()
    def steal(self) -> None:
        """Whoever holds something freezes past its lease, and another takes over."""
        self.leases_run_out()
        for pk in {held.row.id for held in self.held if held.expired and not held.done}:
            self.client.zadd(self.broker.keys(QUEUE).ready, {str(pk): 100 * BAND + int(self.broker.now)})
        self.work(limit=10)

    @rule()
    def reap_what_is_alive(self) -> None:
        assert transitions.reap("default", max_crashes=4, actor="model") == []

    @rule(number=st.integers(0, 9), steps=st.sampled_from(["success", "twice", "failure", "crash", "effect, crash"]))
    def run(self, number: int, steps: str) -> None:
        waiting = [h for h in self.held if not h.done]
        if not waiting:
            return
        held = waiting[number % len(waiting)]
        held.done = True
        row, fate = held.row, self.fates[held.row.id]
        if row.deliveries == Message.objects.get(pk=row.id).deliveries:
            # An older delivery started before whatever happened since.
            self.started(row)
        if fate.transactional:
            self.run_transactional(row, fate, steps)
        elif steps in ("success", "twice"):
            fate.effects.append(row.deliveries)
            for _ in range(2 if steps == "twice" else 1):
                transitions.succeed("default", [Success(row.id, row.deliveries, "model")])
        elif steps == "failure":
            self.fail(row)
        elif steps == "effect, crash":
            fate.effects.append(row.deliveries)
            fate.excuses += 1  # W1
        # "crash": nothing at all happens

    def run_transactional(self, row: Claimed, fate: Fate, steps: str) -> None:
        if steps == "failure":
            self.fail(row)
        if steps in ("success", "twice"):
            with transaction.atomic():
                # The effect would stand here; it is rolled back with the rest when the record refuses.
                if transitions.succeed("default", [Success(row.id, row.deliveries, "model")]):
                    fate.effects.append(row.deliveries)
                else:
                    transaction.set_rollback(True)

    def fail(self, row: Claimed) -> None:
        before = Message.objects.get(pk=row.id)
        failure = Failure(row.id, row.deliveries, "model", dead=row.attempts >= 2, delay=timedelta(0), error="no")
        for _ in range(2):
            transitions.fail("default", [failure])
        after = Message.objects.get(pk=row.id)
        current = before.state == State.RUNNING and before.deliveries == row.deliveries
        assert after.attempts - before.attempts == int(current), "a failure counts once, and for the current delivery"

    @rule()
    def leases_run_out(self) -> None:
        """The lease of everything that runs ends; holders that are alive do not know (W2)."""
        for held in self.held:
            if not held.done and not held.expired:
                held.expired = True
                self.fates[held.row.id].excuses += 1
        Message.objects.filter(state=State.RUNNING).update(leased_until=timezone.now() - timedelta(seconds=1))
        self.reap()

    def reap(self) -> None:
        transitions.reap("default", max_crashes=4, actor="model")

    # --- the roles around Redis, and Redis itself ---------------------------------------------------------------------

    @rule(which=st.integers(0, 1))
    def load(self, which: int) -> None:
        with self.with_redis():
            self.hint(lambda: self.loaders[which]._look(QUEUE))

    @rule()
    def sweep(self) -> None:
        with self.with_redis():
            now = self.start + timedelta(seconds=self.elapsed)
            self.hint(lambda: self.sweeper._sweep(QUEUE, now - timedelta(seconds=2)))

    @rule(times=st.integers(1, 2))
    def restore(self, times: int) -> None:
        until = int(self.broker.now) + 30_000
        for _ in range(times):
            for page in restore.pages("default", QUEUE, start_ms=None, end_ms=until):
                self.broker.put(QUEUE, page, fill=True)

    @rule()
    def wipe(self) -> None:
        self.client.flushall()

    @rule(number=st.integers(0, 3))
    def drop_a_key(self, number: int) -> None:
        keys = self.broker.keys(QUEUE)
        self.client.delete([keys.delayed, keys.ready, keys.meta, keys.wake][number])

    @rule()
    def keep_a_snapshot(self) -> None:
        self.snapshot = {key: self.client.dump(key) or b"" for key in self.client.scan_iter()}

    @rule()
    def roll_back(self) -> None:
        if self.snapshot is not None:
            self.client.flushall()
            for key, value in self.snapshot.items():
                self.client.restore(key, 0, value)

    # --- the end ------------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        for _round in range(12):
            if not Message.objects.exclude(state__in=FINAL).exists():
                break
            self.heal()
        self.check()
        self.source.close()
        self.client.close()

    def heal(self) -> None:
        self.elapsed += 3600
        self.set_time()
        self.tickets = []
        self.leases_run_out()
        self.load(0)
        self.sweep()
        self.take(limit=100, lost=False)
        self.claim(lost=False)
        while any(not held.done for held in self.held):
            self.run(number=0, steps="success")

    def check(self) -> None:
        for pk, fate in self.fates.items():
            message = Message.objects.get(pk=pk)
            assert message.state in FINAL, f"{message} is stuck in {message.state}"
            if fate.cancelled:
                assert message.state == State.CANCELLED
            if message.state == State.CONSUMED:
                assert fate.effects, f"{message} was consumed without an effect"
            if fate.transactional and not self.was_requeued(message):
                assert len(fate.effects) == (message.state == State.CONSUMED), "a transactional effect happens once"
            if not fate.transactional:
                assert len(fate.effects) <= 1 + fate.excuses, f"{message} had unexplained effects: {fate.effects}"
            self.check_log(message)

    @staticmethod
    def was_requeued(message: Message) -> bool:
        return message.transitions.filter(from_state__in=FINAL).exists()

    @staticmethod
    def check_log(message: Message) -> None:
        state: State | None = None
        rows = list(message.transitions.all())
        assert [row.number for row in rows] == list(range(1, message.moves + 1))
        for row in rows:
            assert row.from_state == state, "the log is a path"
            assert is_legal(state, State(row.to_state)), f"{state} → {row.to_state}"
            state = State(row.to_state)
        assert state == message.state


@pytest.mark.django_db(transaction=True)
@pytest.mark.timeout(0)
def test_whatever_happens_every_message_ends_and_nothing_happens_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("django_delayq.worker.sweeper.CLAIMING", 0.0)
    # Hours pass in a moment here: every round is a full one.
    monkeypatch.setattr("django_delayq.worker.sweeper.FULL_ROUND", 0.0)
    # The server of the tests has just been started.
    monkeypatch.setattr("django_delayq.transitions.GRACE_AFTER_RESTART", 0.0)
    with override_settings(DELAYQ={"REDIS": None}):
        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=40,
                deadline=None,
                phases=PHASES,
                suppress_health_check=list(HealthCheck),
                print_blob=True,
            ),
        )
