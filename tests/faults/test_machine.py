"""Random sequences of events for a few messages, on real servers. The test sets the broker's clock.

The machine plays producers, two workers that may die or freeze at any point, people who cancel, reschedule and restore,
and a Redis that forgets. Effects are rows in the database, those of a transactional handler in the transaction of its
report; at the end everything is healed, and record and effects have to add up. Two windows excuse a second effect of a
handler that is not transactional: W1, death after the effect and before the report; W2, an effect after the lease ran
out.

DELAYQ_MODEL_EXAMPLES says how many sequences to try.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import wraps
from typing import Any

import pytest
import redis
from django.db import connection, transaction
from django.test import override_settings
from django.utils import timezone
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from django_delayq import schedule_message
from django_delayq.broker.base import Entry
from django_delayq.broker.keys import BAND
from django_delayq.broker.redis import RedisBroker
from django_delayq.core import actors
from django_delayq.core.clock import SECOND, from_tenths, to_tenths
from django_delayq.core.exceptions import BrokerUnavailable
from django_delayq.core.states import FINAL, State
from django_delayq.core.verdicts import Verdict
from django_delayq.models import Message, Transition
from django_delayq.models.messages import Lease, LogRow, Place
from django_delayq.project.registry import handlers
from django_delayq.record import crashes, transitions
from django_delayq.record.sql.rows import Claimed, Failure, Span, Success, Ticket
from django_delayq.restore import reading
from django_delayq.worker.shared.broker_switch import BrokerSwitch
from django_delayq.worker.upkeep.loader import Loader
from django_delayq.worker.upkeep.sweeper import Sweeper
from django_delayq.worker.upkeep.upkeep_tuning import UpkeepTuning
from tests.app.models import Effect
from tests.support.clocks import stopped_at
from tests.support.limits import claim_limited
from tests.support.record_of import log_of
from tests.support.rows import unguarded

from .oracle import no_path

EXAMPLES = int(os.environ.get("DELAYQ_MODEL_EXAMPLES", "25"))
QUEUE = "default"
TOPIC = "model.any"
# So many messages of the queue may run at once. The machine has up to six.
LIMIT = 3
UNIQUES = st.sampled_from(["live", "scheduled", "1h"])
# Messages in a page of a restore. Other steps may come between two pages.
PAGE = 1
# After one full scan, no other begins during a test.
NEVER = 1e9


@dataclass
class Fate:
    """The knowledge of the machine about one message."""

    transactional: bool
    # What the last accepted failure that left a payload left.
    payload: Any = None
    cancelled: bool = False
    # True when a success was accepted.
    consumed: bool = False
    # The number of effects within a window, each of which may come again.
    excuses: int = 0
    # How long it holds its key; None: it has none.
    unique: str | None = None
    # The number of deliveries up to which a message with unique="scheduled" holds its key. A requeue sets it anew.
    holds_until: int = 0
    # The message that its handler has scheduled under its key, or has found there. A requeue begins anew.
    next_pk: int | None = None


@dataclass
class Worker:
    """A worker process, with the ids that it has taken and not claimed yet."""

    name: str
    tickets: list[Ticket] = field(default_factory=list)


@dataclass
class Held:
    """A delivery that a worker holds, and that it begins no earlier than its id was to be ready."""

    row: Claimed
    worker: Worker
    ready_tenths: int = 0
    done: bool = False
    # True when the lease has run out without the holder's knowledge.
    expired: bool = False


@dataclass
class Restoring:
    """A restore that has read a page and has not put it yet."""

    pages: Iterator[list[Entry]]
    page: list[Entry] = field(default_factory=list)


def holding(machine: Machine) -> bool:
    """Tell whether a worker holds a delivery: without one, many steps would change nothing."""
    return any(not held.done for held in machine.held)


def when(condition: Callable[[Any], object]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Have a step do nothing unless a condition is met.

    A precondition of Hypothesis would not do: with the same choices it must always hold or never, and here clocks have
    a say in what workers hold.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def step(self: Machine, *args: Any, **options: Any) -> None:
            if condition(self):
                function(self, *args, **options)

        return step

    return decorate


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        with connection.cursor() as cursor:
            for model in (Place, LogRow, Message):
                cursor.execute(f"DELETE FROM {model._meta.db_table}")
        Effect.objects.all().delete()
        self.client = redis.Redis.from_url(os.environ["REDIS_URL"])
        self.client.flushall()
        self.logs: dict[int, list[tuple[Any, ...]]] = {}
        self.start = timezone.now()
        self.elapsed = 0
        self.fates: dict[int, Fate] = {}
        self.workers = [Worker("one"), Worker("two")]
        self.held: list[Held] = []
        self.restores: dict[int, Restoring] = {}
        self.snapshot: dict[bytes, bytes] | None = None
        # The messages that the last sweep found, with their due times and priorities.
        self.swept: set[tuple[int, datetime, int]] = set()
        with self.with_redis():
            brokers = BrokerSwitch("default", handlers)
            assert isinstance(brokers.redis, RedisBroker)
            self.broker = brokers.redis
            self.brokers = brokers
            self.loaders = [Loader("default", brokers, worker.name) for worker in self.workers]
            self.sweeper = self.new_sweeper()
        self.set_time()

    # --- helpers ------------------------------------------------------------------------------------------------------

    @staticmethod
    def with_redis() -> Any:
        return override_settings(DELAYQ={"REDIS": os.environ["REDIS_URL"], "HORIZON": 30})

    def new_sweeper(self) -> Sweeper:
        """Return a sweeper whose first round alone begins at the very beginning."""
        tuning = UpkeepTuning(claiming=0.0, parts_of_time=NEVER)
        return Sweeper("default", self.brokers, lambda: (QUEUE,), lambda: [TOPIC], tuning)

    def set_time(self) -> None:
        self.broker.now = stopped_at(to_tenths(self.start + timedelta(seconds=self.elapsed)))

    def pick(self, number: int) -> int:
        ids = sorted(self.fates)
        return ids[number % len(ids)]

    def started(self, row: Claimed) -> None:
        assert not self.fates[row.id].cancelled, "a delivery started after its cancel was confirmed"
        assert to_tenths(row.due_at) <= self.broker.now_tenths(), "a delivery started early"

    def announce(self, pk: int) -> None:
        message = Message.objects.get(pk=pk)
        self.hint(lambda: self.broker.put(message.queue, [Entry.at(pk, message.due_at, message.priority)]))

    @staticmethod
    def hint(call: Callable[[], object]) -> None:
        try:
            call()
        except BrokerUnavailable:
            pass

    # --- producers and people -----------------------------------------------------------------------------------------

    @initialize(later=st.booleans(), now=st.lists(st.booleans(), min_size=2, max_size=3), unique=UNIQUES)
    def begin(self, later: bool, now: list[bool], unique: str) -> None:
        """Begin with two restores in progress and two workers that hold deliveries, which chance would seldom reach."""
        self.load(0)
        self.schedule(20, later, pushed=True)
        for which in range(2):
            self.restore_a_page(which)
        self.schedule_with_a_key(unique, now[0])
        for transactional in now[1:]:
            self.schedule(0, transactional, pushed=True)
        for which in range(2):
            self.work(which, limit=1)

    @rule(delay=st.integers(0, 60), transactional=st.booleans(), pushed=st.booleans())
    @when(lambda self: len(self.fates) < 6)
    def schedule(self, delay: int, transactional: bool, pushed: bool) -> None:
        due = self.start + timedelta(seconds=self.elapsed + delay)
        message = schedule_message(TOPIC, due_at=due)
        self.fates[message.pk] = Fate(transactional)
        if pushed:
            self.announce(message.pk)

    @rule(unique=UNIQUES, transactional=st.booleans())
    @when(lambda self: len(self.fates) < 6)
    def schedule_with_a_key(self, unique: str, transactional: bool) -> None:
        self.schedule_beside(self.in_the_way(), unique, transactional)

    def schedule_beside(self, others: set[int], unique: str, transactional: bool) -> int:
        """Schedule a message with the key; it is made when none of ``others`` is there. Return its id."""
        due = self.start + timedelta(seconds=self.elapsed)
        message = schedule_message(TOPIC, due_at=due, key="k", unique=unique, on_conflict="keep")
        assert message.existed == bool(others), "a key was given away twice, or to nobody"
        if message.existed:
            assert message.pk in others, "another message is in the way than the one that was returned"
        else:
            self.fates[message.pk] = Fate(transactional, unique=unique)
            self.announce(message.pk)
        return message.pk

    def in_the_way(self) -> set[int]:
        """Return the messages that keep others with the key out."""
        return {pk for pk, fate in self.fates.items() if fate.unique is not None and self.keeps_out(pk, fate)}

    @staticmethod
    def keeps_out(pk: int, fate: Fate) -> bool:
        message = Message.objects.get(pk=pk)
        if fate.next_pk is not None:
            return False
        if message.state in FINAL:
            return fate.unique == "1h"
        if fate.unique == "scheduled":
            waits_again = message.state == State.SCHEDULED and message.deliveries == message.reported
            return waits_again or (message.deliveries <= fate.holds_until and message.state == State.SCHEDULED)
        return True

    @invariant()
    def no_key_has_two_holders(self) -> None:
        holders = [row for row in Message.objects.filter(key="k") if row.holds_key]
        assert len(holders) <= 1, f"{holders} hold one key"

    @rule(number=st.integers(0, 5), told=st.booleans())
    def cancel(self, number: int, told: bool) -> None:
        pk = self.pick(number)
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
        due = self.start + timedelta(seconds=self.elapsed + delay)
        if transitions.reschedule("default", [pk], transitions.DueTimes(due))[0] and pushed:
            self.announce(pk)

    @rule(number=st.integers(0, 5), pushed=st.booleans())
    def requeue(self, number: int, pushed: bool) -> None:
        pk = self.pick(number)
        fate = self.fates[pk]
        taken = fate.unique is not None and bool(self.in_the_way() - {pk})
        answer = transitions.requeue("default", [pk])[0]
        assert answer.verdict != Verdict.REQUEUED or not taken, "requeued although another message has its key"
        assert answer.verdict != Verdict.KEY_TAKEN or taken, "not requeued although its key is free"
        if not answer:
            return
        # A person decided that it shall run again.
        fate.cancelled, fate.next_pk = False, None
        fate.holds_until = Message.objects.get(pk=pk).deliveries
        if pushed:
            self.announce(pk)

    # --- workers ------------------------------------------------------------------------------------------------------

    @rule(seconds=st.integers(1, 40))
    def advance(self, seconds: int) -> None:
        self.elapsed += seconds
        self.set_time()

    @rule(which=st.integers(0, 1), limit=st.integers(1, 4), lost=st.booleans(), early=st.sampled_from([0, 0, 5]))
    def take(self, which: int, limit: int, lost: bool, early: int) -> None:
        """Take what is ready or due within ``early`` seconds: no worker looks so far, but no step is so short."""
        taken = self.broker.take(QUEUE, limit, early).tickets
        if not lost:
            self.workers[which].tickets += taken

    @rule(which=st.integers(0, 1), lost=st.booleans())
    @when(lambda self: any(worker.tickets for worker in self.workers))
    def claim(self, which: int, lost: bool) -> None:
        worker = self.workers[which]
        tickets, worker.tickets = worker.tickets, []
        ready = {ticket.id: ticket.ready_tenths or 0 for ticket in tickets}
        # The record's clock stands still here, and must not refuse what is due by the clock of Redis.
        admitted = claim_limited("default", tickets, {TOPIC: 3600.0}, worker.name, ahead=self.elapsed + 3600.0)
        claimed = admitted.claimed
        assert len({row.id for row in claimed}) == len(claimed)
        for row in claimed:
            assert not self.alive(row.id), "claimed while another delivery has the lease"
            assert not self.fates[row.id].consumed, "claimed after its success was accepted"
        if not lost:
            self.held += [Held(row, worker, ready[row.id]) for row in claimed]

    @invariant()
    def the_limit_is_kept(self) -> None:
        assert len(self.running()) <= LIMIT, "more run than the limit"

    def alive(self, pk: int) -> list[Held]:
        """Return the deliveries of a message that run and have their lease."""
        return [held for held in self.held if held.row.id == pk and not held.done and not held.expired]

    @rule(which=st.integers(0, 1), limit=st.integers(1, 4))
    def work(self, which: int, limit: int) -> None:
        """Take and claim in one step, as consumers do all the time, so that longer sequences come about."""
        self.take(which, limit, lost=False, early=5)
        self.claim(which, lost=False)

    @rule(number=st.integers(0, 5))
    def bring_back(self, number: int) -> None:
        """Make an id ready once more that is running, finished or cancelled: Redis may hold anything."""
        place = {str(self.pick(number)): 100 * BAND + self.broker.now_tenths()}
        self.client.zadd(self.broker.keys(QUEUE).ready, place)

    @rule(which=st.integers(0, 1))
    @when(holding)
    def steal(self, which: int) -> None:
        """Freeze a worker past its leases; the other one takes over what it holds."""
        frozen = self.workers[which]
        stolen = {pk for pk in self.running() if any(held.worker is frozen for held in self.alive(pk))}
        self.run_out(stolen)
        self.reap()
        for pk in stolen:
            self.client.zadd(self.broker.keys(QUEUE).ready, {str(pk): 100 * BAND + self.broker.now_tenths()})
        self.work(1 - which, limit=10)

    @rule(which=st.integers(0, 1), shutdown=st.booleans())
    @when(holding)
    def die(self, which: int, shutdown: bool) -> None:
        """Kill a worker process; its supervisor notices and releases what it held."""
        dead = self.workers[which]
        dead.tickets = []
        for held in self.held:
            held.done = held.done or held.worker is dead
        moved = crashes.release_worker("default", dead.name, actor="model", shutdown=shutdown)
        assert not any(self.alive(row.id) for row in moved), "given back though it is another worker's"
        assert not Message.objects.filter(state=State.RUNNING, worker=dead.name).exists()

    @rule(
        number=st.integers(0, 9),
        steps=st.sampled_from(["success", "twice", "failure", "change", "crash", "effect, crash"]),
    )
    @when(holding)
    def run(self, number: int, steps: str) -> None:
        waiting = [h for h in self.held if not h.done]
        held = waiting[number % len(waiting)]
        if held.ready_tenths > self.broker.now_tenths():
            # Claimed early: the worker waits for the due time.
            self.advance(5)
        held.done = True
        row, fate = held.row, self.fates[held.row.id]
        if row.deliveries == Message.objects.get(pk=row.id).deliveries:
            # An older delivery started before all that has happened since.
            self.started(row)
            assert row.payload == fate.payload, "a delivery has another payload than the one that was left"
        if steps in ("failure", "change"):
            self.fail(held, payload=str(row.deliveries) if steps == "change" else None)
        elif steps != "crash":
            run = self.run_transactional if fate.transactional else self.run_plain
            run(held, times={"success": 1, "twice": 2, "effect, crash": 0}[steps])

    def run_plain(self, held: Held, times: int) -> None:
        """Run a plain handler: its effect, then the report, so many times."""
        self.affect(held)
        # W2, or W1.
        self.fates[held.row.id].excuses += held.expired or not times
        for _ in range(times):
            self.succeed(held)

    def run_transactional(self, held: Held, times: int) -> None:
        """Run a transactional handler so many times; with 0, up to its report."""
        for _ in range(times or 1):
            with transaction.atomic():
                self.affect(held)
                if not times or not self.succeed(held):
                    transaction.set_rollback(True)

    @staticmethod
    def affect(held: Held) -> None:
        Effect.objects.create(message_id=held.row.id, delivery=held.row.deliveries)

    @rule(number=st.integers(0, 9), unique=UNIQUES)
    @when(lambda self: len(self.fates) < 6 and any(h.row.key and not h.done for h in self.held))
    def schedule_the_next(self, number: int, unique: str) -> None:
        """Let a handler that runs schedule the next message under its own key; what becomes of the handler is open."""
        running = [held for held in self.held if held.row.key and not held.done]
        row = running[number % len(running)].row
        fate = self.fates[row.id]
        now = Message.objects.get(pk=row.id)
        over = now.state in FINAL
        cancelled = now.cancel_requested or now.state == State.CANCELLED
        # Only the message that holds the key is in the way, and that not if it is the handler's own.
        others = {other.pk for other in Message.objects.filter(key="k") if other.holds_key}
        if fate.next_pk is not None:
            others = {fate.next_pk}
        elif cancelled:
            # A cancel ends the chain: the handler's own message stands for the next one.
            others = {row.id}
        elif not over:
            others.discard(row.id)
        with actors.handling("default", TOPIC, "k", row.id):
            pk = self.schedule_beside(others, unique, fate.transactional)
        if not over and not cancelled:
            fate.next_pk = pk

    def succeed(self, held: Held) -> bool:
        fate = self.fates[held.row.id]
        accepted = transitions.succeed("default", [Success(held.row.id, held.row.deliveries, held.worker.name)])
        assert not (accepted and fate.consumed), "a second success was accepted"
        fate.consumed = fate.consumed or bool(accepted)
        return bool(accepted)

    def fail(self, held: Held, payload: str | None) -> None:
        row = held.row
        before = Message.objects.get(pk=row.id)
        failure = Failure(
            *(row.id, row.deliveries, held.worker.name),
            dead=row.attempts >= 2,
            delay=timedelta(0),
            error="no",
            payload=payload,
        )
        for _ in range(2):
            transitions.fail("default", [failure])
        after = Message.objects.get(pk=row.id)
        current = before.state == State.RUNNING and before.deliveries == row.deliveries
        assert after.attempts - before.attempts == int(current), "a failure counts once, and for the current delivery"
        if current and payload is not None:
            self.fates[row.id].payload = row.deliveries

    @rule()
    @when(holding)
    def leases_run_out(self) -> None:
        """End the lease of everything that runs."""
        self.run_out(self.running())
        self.reap()

    @rule(number=st.integers(0, 5))
    @when(holding)
    def a_lease_runs_out(self, number: int) -> None:
        running = self.running()
        if running:
            self.run_out([running[number % len(running)]])

    def run_out(self, running: Collection[int]) -> None:
        """End the leases of these. A holder that is alive does not know."""
        for held in self.held:
            held.expired = held.expired or held.row.id in running
        unguarded(Message).filter(pk__in=running).update(leased_until=timezone.now() - timedelta(seconds=1))

    @rule()
    def reap(self) -> None:
        reaped = {row.id for row in crashes.reap("default", actor="model")}
        assert not any(self.alive(pk) for pk in reaped), "taken for dead though it has its lease"
        left = Message.objects.filter(state=State.RUNNING, leased_until__lt=timezone.now())
        assert not left.exists(), "not taken for dead though its lease has run out"

    @staticmethod
    def running() -> list[int]:
        return list(Message.objects.filter(state=State.RUNNING).order_by("pk").values_list("pk", flat=True))

    # --- the roles around Redis, and Redis itself ---------------------------------------------------------------------

    @rule(which=st.integers(0, 1))
    def load(self, which: int) -> None:
        with self.with_redis():
            self.hint(lambda: list(self.loaders[which].check() or ()))

    @rule()
    def sweep(self) -> None:
        with self.with_redis():
            overdue_since = self.start + timedelta(seconds=self.elapsed - 2)
            self.hint(lambda: self.sweeper.sweep(overdue_since))
        # A round finds again what the one before it found. What came back since then with an older due time is left to
        # the next round that starts at the very beginning.
        rows = Message.objects.filter(
            state=State.SCHEDULED, due_at__lte=overdue_since, due_at__gte=self.sweeper.began_at[0]
        )
        found = set(rows.values_list("pk", "due_at", "priority"))
        horizon = self.broker.read_meta().horizon_tenths
        if horizon is None:
            self.swept = set()
            return
        # A loader finds out how far the test's clock is ahead of the record's, and corrects it: then a message that is
        # overdue here may be due beyond the horizon.
        again = [Entry.at(*row) for row in sorted(found & self.swept) if to_tenths(row[1]) <= horizon]
        assert not self.broker.missing({QUEUE: again})[QUEUE], "a sweep forgot a part of the backlog"
        self.swept = found

    @rule(times=st.integers(1, 2))
    def restore(self, times: int) -> None:
        for _ in range(times):
            for page in self.pages():
                self.fill(page)

    @rule(which=st.integers(0, 1))
    def restore_a_page(self, which: int) -> None:
        """Let one of two restores put the page that it read in its last step, and read the next."""
        there = self.restores.setdefault(which, Restoring(self.pages(PAGE)))
        self.fill(there.page)
        there.page = next(there.pages, [])
        if not there.page:
            del self.restores[which]

    def pages(self, limit: int = 1000) -> Iterator[list[Entry]]:
        end = from_tenths(self.broker.now_tenths() + 30 * SECOND)
        return (batch.by_queue[QUEUE] for batch in reading.merged("default", [QUEUE], Span(end, limit=limit)))

    def fill(self, page: list[Entry]) -> None:
        before = self.places(page)
        put = self.broker.fill({QUEUE: page})[QUEUE]
        for entry, was, place in zip(page, before, self.places(page), strict=True):
            assert place <= was, "a restore made it later"
            assert put.beyond or place < to_tenths(entry.due_at) + 1, "a restore left it out"

    def places(self, page: list[Entry]) -> list[float]:
        """Return when each id is due by Redis, in tenths of a ms: 0 when it is ready, infinite when it is nowhere."""
        keys = self.broker.keys(QUEUE)
        places = []
        for entry in page:
            score = self.client.zscore(keys.delayed, str(entry.id))
            ready = self.client.zscore(keys.ready, str(entry.id)) is not None
            places.append(0 if ready else math.inf if score is None else score)
        return places

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
    @when(lambda self: self.snapshot)
    def roll_back(self) -> None:
        assert self.snapshot is not None
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
        self.brokers.close()
        self.client.close()

    def heal(self) -> None:
        self.elapsed += 3600
        self.set_time()
        for worker in self.workers:
            worker.tickets = []
        self.run_out(self.running())
        # A delivery that ran on when an earlier one had ended its message keeps its place until its lease is over.
        Lease.objects.filter(delivery__lt=0).update(until=timezone.now() - timedelta(seconds=1))
        self.reap()
        self.load(0)
        # Another process leads now, whose sweep begins at the very beginning.
        self.sweeper = self.new_sweeper()
        self.sweep()
        self.work(0, limit=100)
        while any(not held.done for held in self.held):
            self.run(number=0, steps="success")

    def check(self) -> None:
        for pk, fate in self.fates.items():
            message = Message.objects.get(pk=pk)
            assert message.state in FINAL, f"{message} is stuck in {message.state}"
            if fate.cancelled:
                assert message.state == State.CANCELLED
            assert fate.consumed == (message.state == State.CONSUMED)
            assert message.payload == fate.payload
            self.check_effects(message, fate)
            assert no_path(message, log_of(message)) == []

    @staticmethod
    def check_effects(message: Message, fate: Fate) -> None:
        effects = list(Effect.objects.filter(message_id=message.pk).order_by("pk").values_list("delivery", flat=True))
        recorded = [row.delivery for row in message.transitions.filter(to_state=State.CONSUMED)]
        if fate.transactional:
            assert effects == recorded, "a transactional effect happens with its report, and once"
        else:
            assert set(recorded) <= set(effects), f"{message} was consumed without an effect"
            assert len(effects) <= 1 + fate.excuses, f"{message} had unexplained effects: {effects}"

    @invariant()
    def the_log_only_grows(self) -> None:
        now: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
        columns = ("at", "from_state", "to_state", "delivery", "due_at", "ready_at", "actor", "reason", "error")
        for row in Transition.objects.values_list("message_id", "number", *columns):
            now[row[0]].append(row)
        for pk, rows in self.logs.items():
            assert now[pk][: len(rows)] == rows, f"the log of #{pk} has changed"
        self.logs = now


@pytest.mark.django_db(transaction=True)
@pytest.mark.timeout(0)
def test_whatever_happens_every_message_ends_and_nothing_happens_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    # The server of the tests has just been started, and the grace after a restart must not apply.
    monkeypatch.setattr(crashes, "may_reap", lambda _using: True)
    with override_settings(DELAYQ={"REDIS": None, "LIMITS": {QUEUE: {"limit": LIMIT}}}):
        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=50,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                print_blob=True,
            ),
        )
