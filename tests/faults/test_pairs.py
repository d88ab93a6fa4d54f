"""Features that meet: two or three of them and some hundred messages, drawn at random and delivered by real workers.

A handler of a limited topic waits at a gate until all messages have ended that have nothing to do with it: nobody is
late for others. The times after which workers look by themselves, and sweep, are longer than a test waits. So an id
that was lost, or a wake-up that went astray, is not healed before the test has seen it.

DELAYQ_PAIRS_EXAMPLES says how many cases to try.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import redis
from django.conf import settings as django_settings
from django.core.management import call_command
from django.db import connections
from django.test import override_settings
from django.utils import timezone
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from django_delayq import (
    Reject,
    RetryLater,
    aschedule_message,
    cancel_message,
    handler,
    move_message,
    override_limit,
    pause_queue,
    reschedule_message,
    reset_limit,
    resume_queue,
    schedule_message,
    schedule_messages,
)
from django_delayq.broker import publisher
from django_delayq.broker.redis import RedisBroker
from django_delayq.core.known_record import doubt_identity
from django_delayq.core.states import FINAL, State
from django_delayq.core.worker_options import Options
from django_delayq.models import LimitOverride, Message
from django_delayq.project.registry import Delivered
from django_delayq.record import admission, overrides, transitions
from django_delayq.recurring import create_schedule, delete_schedule
from django_delayq.worker.claim.tuning import Tuning
from django_delayq.worker.processes.process import OnceProcess, Parts, WorkerProcess
from django_delayq.worker.upkeep.upkeep_tuning import UpkeepTuning
from tests.support import limits_oracle
from tests.support.in_redis import held
from tests.support.workers import PATIENCE, eventually

pytestmark = pytest.mark.django_db(transaction=True)

# On the second database a few show whether its statements do the same.
USUAL = "40" if os.environ.get("DELAYQ_TEST_DATABASE") == "sqlite" else "200"
EXAMPLES = int(os.environ.get("DELAYQ_PAIRS_EXAMPLES", USUAL))
# The examples are drawn in so many tests, for a case waits more than it works.
PARTS = 4
FEATURES = (
    "async",
    "batch",
    "cancel while running",
    "chain",
    "debounce",
    "ends",
    "expires",
    "full lane",
    "key",
    "limit",
    "move",
    "no Redis",
    "once",
    "override",
    "pause",
    "rate",
    "recurring",
    "Redis emptied",
    "uncounted retry",
    "unknown topic",
    "weights",
)
QUEUES = ("default", "other", "paused")
# What handlers do under two limits. But for the refusals, only in the first delivery.
WAYS = ("fail", "later", "reject", "return", "run past the timeout")
# A chain has so many messages.
LINKS = 3
# Handlers that wait at the gate leave at least one of so many threads to others.
THREADS = 6
DELIVERED = (
    *("free", "later", "limit", "key a", "key b", "hog", "rate", "paused", "ends", "late ends", "chain"),
    *("batch", "late batch"),
)
DB = "default"


@dataclass(frozen=True)
class Case:
    """What meets, and how many messages there are of each kind."""

    features: tuple[str, ...]
    messages: int
    workers: int

    def has(self, *features: str) -> bool:
        return any(feature in self.features for feature in features)


CASES = st.builds(
    Case,
    st.sets(st.sampled_from(FEATURES), min_size=2, max_size=3).map(lambda found: tuple(sorted(found))),
    st.integers(1, 60),
    st.integers(1, 2),
)


@dataclass
class Stage:
    """What the handlers of one case share with the test."""

    gate: threading.Event = field(default_factory=threading.Event)
    # The messages whose handlers have begun, and those whose work was done, in this order.
    begun: list[int] = field(default_factory=list)
    done: list[int] = field(default_factory=list)


STAGE = Stage()


def go_through(message: Delivered) -> None:
    STAGE.begun.append(message.id)
    STAGE.done.append(message.id)


async def go_through_async(message: Delivered) -> None:
    await asyncio.sleep(0)
    go_through(message)


def wait_at_the_gate(message: Delivered) -> None:
    stage = STAGE
    stage.begun.append(message.id)
    stage.gate.wait()
    stage.done.append(message.id)


async def wait_at_the_gate_async(message: Delivered) -> None:
    stage = STAGE
    stage.begun.append(message.id)
    while not stage.gate.is_set():
        await asyncio.sleep(0.005)
    stage.done.append(message.id)


def ask_twice_for_later(message: Delivered) -> None:
    if message.deliveries < 3:
        raise RetryLater(0, counts=False)
    go_through(message)


def end(message: Delivered) -> None:
    """Return, or raise as the payload says."""
    if message.payload == "reject":
        raise Reject("no")
    if message.deliveries == 1 and message.payload != "return":
        raise RetryLater(0) if message.payload == "later" else ValueError("at first")


def end_variously(message: Delivered) -> None:
    while message.payload == "run past the timeout" and message.deliveries == 1:
        time.sleep(0.01)
    end(message)
    message.extend("1m")
    go_through(message)


async def end_variously_async(message: Delivered) -> None:
    if message.payload == "run past the timeout" and message.deliveries == 1:
        await asyncio.sleep(PATIENCE)
    end(message)
    await message.aextend("1m")
    go_through(message)


def go_through_together(messages: list[Delivered]) -> None:
    for message in messages:
        go_through(message)


def end_together(messages: list[Delivered]) -> None:
    """Answer each message as its payload says."""
    for message in messages:
        try:
            end(message)
        except (Reject, RetryLater, ValueError) as answer:
            message.fail(answer)
        else:
            go_through(message)


def hand_over(message: Delivered) -> None:
    if message.payload > 1:
        schedule_message(message.topic, message.payload - 1, key=message.key)
    if message.deliveries == 1:
        raise ValueError("after it has scheduled the next one")
    go_through(message)


async def hand_over_async(message: Delivered) -> None:
    if message.payload > 1:
        await aschedule_message(message.topic, message.payload - 1, key=message.key)
    if message.deliveries == 1:
        raise ValueError("after it has scheduled the next one")
    go_through(message)


def work_until_cancelled(message: Delivered) -> None:
    stage = STAGE
    stage.begun.append(message.id)
    while not message.cancel_requested and not stage.gate.is_set():
        threading.Event().wait(0.01)
    raise RuntimeError("stopped")


async def work_until_cancelled_async(message: Delivered) -> None:
    stage = STAGE
    stage.begun.append(message.id)
    while not stage.gate.is_set():
        await asyncio.sleep(0.01)
    raise RuntimeError("stopped")


@pytest.fixture(autouse=True)
def _handlers() -> None:
    handler("p.free")(go_through)
    handler("p.async")(go_through_async)
    handler("p.hog")(wait_at_the_gate)
    handler("p.limit", limit=2)(wait_at_the_gate)
    handler("p.limit_async", limit=2)(wait_at_the_gate_async)
    handler("p.key", limit=1)(wait_at_the_gate)
    handler("p.key_async", limit=1)(wait_at_the_gate_async)
    handler("p.rate", rate="50/s", burst=2)(go_through)
    handler("p.rate_async", rate="50/s", burst=2)(go_through_async)
    handler("p.batch", batch=5)(go_through_together)
    handler("p.batch_rate", batch=5, linger=0.3, rate="50/s", burst=2)(go_through_together)
    handler("p.batch_ends", batch=5, linger=0.1, limit=4, retry=[0] * 9)(end_together)
    handler("p.batch_transactional", batch=5, limit=3, retry=[0] * 9, transactional=True)(end_together)
    handler("p.later")(ask_twice_for_later)
    handler("p.ends", limit=2, retry=[0] * 9)(end_variously)
    handler("p.ends_async", limit=2, retry=[0] * 9)(end_variously_async)
    handler("p.ends_transactional", limit=1, retry=[0] * 9, transactional=True)(end_variously)
    handler("p.chain", limit=1, retry=[0] * 9)(hand_over)
    handler("p.chain_async", limit=1, retry=[0] * 9)(hand_over_async)
    handler("p.cancel", retry=False)(work_until_cancelled)
    handler("p.cancel_async", retry=False)(work_until_cancelled_async)


@pytest.fixture(autouse=True)
def _no_override_is_left() -> Iterator[None]:
    yield
    LimitOverride.objects.all().delete()
    overrides.read(DB)


@pytest.fixture(autouse=True)
def _nobody_looks_by_himself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Parts, "upkeep", UpkeepTuning(repeat_interval=10 * PATIENCE))


# Many cases take longer than a test may. One that hangs is given up by its own waits.
@pytest.mark.timeout(300 + 60 * EXAMPLES // PARTS)
@pytest.mark.parametrize("_part", range(PARTS))
@given(case=CASES)
@settings(
    max_examples=max(1, EXAMPLES // PARTS),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_features_that_meet_keep_what_each_promises(_part: int, case: Case) -> None:
    with redis.Redis.from_url(os.environ["REDIS_URL"]) as client:
        Run(case, client).run()


def test_each_run_draws_other_cases_and_says_how_to_repeat_one() -> None:
    """Also in CI, where Hypothesis has other habits."""
    assert settings.default is not None
    assert (settings.default.derandomize, settings.default.print_blob) == (False, True)


class Run:
    """One case from its first message to the last look."""

    def __init__(self, case: Case, client: redis.Redis) -> None:
        global STAGE  # noqa: PLW0603
        STAGE = self.stage = Stage()
        self.case = case
        self.client = client
        # By kind: the ids of messages.
        self.made: defaultdict[str, list[int]] = defaultdict(list)

    def run(self) -> None:
        call_command("flush", verbosity=0, interactive=False)
        self.client.flushall()
        doubt_identity(DB)
        # The workers of the case before were in this process.
        overrides.read(DB)
        url = None if self.case.has("no Redis") else os.environ["REDIS_URL"]
        delayq = {**django_settings.DELAYQ, "REDIS": url, "GRACE": 10 * PATIENCE, "POLL_INTERVAL": 0.1}
        if self.case.has("ends"):
            delayq["LIMITS"] = {"other": {"limit": 3}}
        # Only what another process has freed, or blocked, has to be looked for.
        look = 10 * PATIENCE if self.case.workers == 1 else 0.2
        tuning = Tuning(idle_wait=10 * PATIENCE, look_interval=look, pause_check_interval=0.1)
        with override_settings(DELAYQ=delayq), patch.object(Parts, "tuning", tuning):
            if self.case.has("pause"):
                pause_queue("paused")
            self.schedule(self.case.messages)
            with self.workers():
                self.play()
            self.judge()

    # --- messages -----------------------------------------------------------------------------------------------------

    def schedule(self, number: int) -> None:
        """Schedule so many messages of each kind; those that have to meet first come first."""
        case = self.case
        of_lane = self.of_lane
        if case.has("full lane"):
            self.add("hog", "p.hog", THREADS * case.workers + 2)
        if case.has("limit"):
            self.add("limit", f"p.limit{of_lane}", number)
        if case.has("key"):
            for key in ("a", "b"):
                self.add(f"key {key}", f"p.key{of_lane}", number, limit_key=key)
        if case.has("unknown topic"):
            self.add("unknown", "p.unknown", number)
        if case.has("expires"):
            self.add("expired", "p.free", number, due_at=timezone.now() - timedelta(seconds=30), expires=1)
        if case.has("pause"):
            self.add("paused", self.free("p.free"), number, queue="paused")
        if case.has("rate"):
            self.add("rate", f"p.rate{of_lane}", min(number, 20))
        if case.has("uncounted retry"):
            self.add("later", self.free("p.later"), number)
        if case.has("ends"):
            self.add_ends(f"p.ends{of_lane}", number)
            # These wait until the lane has room.
            self.add_ends("p.ends_transactional", number, "late " if case.has("full lane") else "")
        if case.has("chain"):
            for link in range(min(number, 5)):
                self.add("chain", f"p.chain{of_lane}", 1, key=f"{len(self.made['chain'])} {link}", payload=LINKS)
        if case.has("batch"):
            self.add_batches(number)
        self.add("free", self.free("p.free"), number)
        self.add("free", self.free("p.free"), number, queue="other")
        if case.has("async", "full lane"):
            self.add("free", "p.async", number)
        self.schedule_singles(number)

    @property
    def of_lane(self) -> str:
        """How the topics of handlers end that may not wait for a full lane."""
        return "_async" if self.case.has("async", "full lane") else ""

    def free(self, topic: str) -> str:
        """Return a topic that runs in a lane which is not full."""
        return "p.async" if self.case.has("full lane") else topic

    def add(self, kind: str, topic: str, number: int, **options: Any) -> None:
        begin = timezone.now() - timedelta(seconds=1)
        # No two of them have the same place in the order.
        each: list[Any] = [
            {"topic": topic, "due_at": begin + timedelta(milliseconds=place), "priority": place % 3, **options}
            for place in range(number)
        ]
        self.made[kind] += [message.pk for message in schedule_messages(each)]

    def add_batches(self, number: int) -> None:
        """Schedule messages that begin together. With a full lane they wait until it has room."""
        late = "late " if self.case.has("full lane") else ""
        self.add(f"{late}batch", "p.batch", number)
        if self.case.has("rate"):
            self.add(f"{late}batch", "p.batch_rate", min(number, 20))
        if self.case.has("ends"):
            self.add_ends("p.batch_ends", number, late)
            self.add_ends("p.batch_transactional", number, late)

    def add_ends(self, topic: str, number: int, when: str = "") -> None:
        for way in WAYS:
            kind, few = ("rejected" if way == "reject" else "ends"), (2 if way == WAYS[-1] else 5)
            # At the timeout of a batch all its messages fail, also those that have gone through.
            timeout = 0.3 if way == WAYS[-1] and "batch" not in topic else None
            self.add(when + kind, topic, min(number, few), queue="other", payload=way, timeout=timeout)

    def schedule_singles(self, number: int) -> None:
        case = self.case
        if case.has("cancel while running") and not self.made["cancel"]:
            self.add("cancel", f"p.cancel{self.of_lane}", 1)
        if case.has("debounce") and not self.made["debounce"]:
            topic = self.free("p.free")
            calls = [schedule_message(topic, key="one", on_conflict="debounce", delay=0.5) for _ in range(number)]
            self.made["debounce"] = [calls[-1].pk]
        if case.has("recurring") and not self.made["recurring"]:
            create_schedule("p", self.free("p.free"), every="1s")
            self.made["recurring"] = list(Message.objects.filter(headers__schedule="p").values_list("pk", flat=True))

    # --- workers ------------------------------------------------------------------------------------------------------

    @property
    def options(self) -> Options:
        named = {"queues": QUEUES, "weights": (3, 1, 1)} if self.case.has("weights") else {}
        return Options(DB, threads=THREADS, async_concurrency=20, graceful_timeout=0, **named)  # type: ignore[arg-type]

    @contextmanager
    def workers(self) -> Iterator[None]:
        """Run the workers in threads. With "once" they run again and again: each run ends by itself."""
        self.over = threading.Event()
        running: list[WorkerProcess] = []
        self.codes: list[int | BaseException] = []
        kind = OnceProcess if self.case.has("once") else WorkerProcess

        def work() -> None:
            try:
                while not self.over.is_set():
                    process = kind(self.options)
                    running.append(process)
                    if self.over.is_set():
                        # Nobody would stop it.
                        break
                    self.codes.append(process.run())
                    running.remove(process)
                    if kind is WorkerProcess:
                        break
            except BaseException as error:  # noqa: BLE001
                self.codes.append(error)
            connections.close_all()

        threads = [threading.Thread(target=work) for _ in range(self.case.workers)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self.over.set()
            self.stage.gate.set()
            for process in [*running]:
                process.stop()
            for thread in threads:
                thread.join()

    # --- the play -----------------------------------------------------------------------------------------------------

    def play(self) -> None:
        case, stage = self.case, self.stage
        self.schedule(case.messages)
        if case.has("move"):
            move_message(Message.objects.filter(pk__in=self.of("free", "limit", "unknown")[::2]), queue="other")
        if case.has("override"):
            # What the code declares already, and a pause of a queue that ends at once.
            override_limit(topic=f"p.limit{self.of_lane}", limit=2)
            override_limit(queue="other", limit=0)
            reset_limit(queue="other")
        if case.has("Redis emptied"):
            self.wait(lambda: stage.done, "something is delivered")
            self.client.flushall()
        for pk in self.of("ends", "rejected", "late ends", "late rejected")[::3]:
            reschedule_message(pk, delay=0)
        self.wait_for("free", "later", "debounce", "recurring", "rate", "ends", "batch")
        self.wait(partial(are_all, self.made["rejected"], State.DEAD), "what was rejected is dead")
        self.wait(self.are_chains_over, "all links of chains are delivered")
        for pk in self.made["cancel"]:
            self.wait(partial(stage.begun.count, pk), "what will be cancelled runs")
            cancel_message(pk)
            self.wait(partial(are_all, [pk], State.CANCELLED), "what was cancelled ends")
        assert not set(stage.done) & set(self.of("paused", "limit", "key a", "key b", "hog", "unknown", "expired"))
        assert self.most_begun() == []
        if case.has("pause"):
            resume_queue("paused")
            self.wait_for("paused")
        if case.has("recurring"):
            delete_schedule("p")
        stage.gate.set()
        self.wait_for("limit", "key a", "key b", "hog", "late ends", "late batch")
        self.wait(partial(are_all, self.made["late rejected"], State.DEAD), "what was rejected late is dead")

    def are_chains_over(self) -> bool:
        links = Message.objects.filter(topic=f"p.chain{self.of_lane}", state=State.CONSUMED).count()
        return links == LINKS * len(self.made["chain"])

    def most_begun(self) -> list[str]:
        """Return what more began at the gate than its limit allows."""
        most = {"limit": 2, "key a": 1, "key b": 1}
        begun = set(self.stage.begun)
        return [kind for kind, limit in most.items() if len(begun & set(self.made[kind])) > limit]

    def of(self, *kinds: str) -> list[int]:
        return [pk for kind in kinds for pk in self.made[kind]]

    def wait_for(self, *kinds: str) -> None:
        for kind in kinds:
            self.wait(partial(are_all, self.made[kind], State.CONSUMED), f"all {kind} are delivered")

    def wait(self, look: Callable[[], Any], what: str) -> None:
        """Wait until it is true. Give up when nothing was delivered meanwhile: the links of chains run one by one."""
        while True:
            done = len(self.stage.done)
            try:
                eventually(look, what)
            except AssertionError as error:
                if done == len(self.stage.done):
                    raise AssertionError(f"{error}\n{self.case}\n{self.picture()}") from None
            else:
                return

    def picture(self) -> str:
        """Describe where all messages are."""
        lines = [f"{kind}: {dict(counted(pks))}" for kind, pks in self.made.items()]
        lines += [f"{queue} in Redis: {len(held(self.client, queue))}" for queue in QUEUES]
        return "\n".join([*lines, f"blocked: {self.client.hgetall('{delayq}:asides')!r}", f"ended: {self.codes}"])

    # --- the end ------------------------------------------------------------------------------------------------------

    def judge(self) -> None:
        case = self.case
        assert not any(self.codes), f"each worker ends in order: {self.codes}"
        done = Counter(self.stage.done)
        assert max(done.values()) == 1, "each message is delivered once"
        assert done.keys() >= set(self.of(*DELIVERED))
        assert limits_oracle.faults(admission.limits_of) == []
        assert list(Message.objects.filter(key="one").values_list("pk", flat=True)) == self.made["debounce"]
        # A claim that meets a new override claims nothing: its ids come again 0.25 s later, after others.
        if case.workers == 1 and not case.has("Redis emptied", "once", "override"):
            self.judge_order("key a")
            self.judge_order("key b")
        transitions.expire(DB, actor="test")
        assert counted(self.made["expired"]).keys() <= {State.EXPIRED}
        assert counted(self.made["unknown"]).keys() <= {State.SCHEDULED}
        cancel_message(Message.objects.filter(pk__in=self.made["unknown"]))
        assert not Message.objects.exclude(state__in=FINAL).exists(), "nothing is left over"
        if not case.has("no Redis"):
            self.judge_redis()

    def judge_order(self, kind: str) -> None:
        """Those that waited at the moment when the gate was opened began by priority and due time."""
        expected = Message.objects.filter(pk__in=self.made[kind]).order_by("-priority", "due_at", "pk")
        begun = [pk for pk in self.stage.begun if pk in set(self.made[kind])]
        assert begun[1:] == [pk for pk in expected.values_list("pk", flat=True) if pk != begun[0]]

    def judge_redis(self) -> None:
        there = publisher.get(DB)
        assert there is not None
        broker = there.broker
        assert isinstance(broker, RedisBroker)
        broker.flush()
        for queue in QUEUES:
            # A worker would drop those that have expired with its next look at them, and the one that a schedule made
            # while it was deleted.
            left = {pk for some in broker.ids(queue) for pk in some} - set(self.made["expired"])
            left -= set(
                Message.objects.filter(headers__schedule="p", state=State.CANCELLED).values_list("pk", flat=True)
            )
            assert left == set(), f"{queue} has ids of {dict(counted(left))}"
        assert broker.blocked() == {}


def are_all(pks: Sequence[int], state: State) -> bool:
    return counted(pks)[state] == len(pks)


def counted(pks: Collection[int]) -> Counter[str]:
    return Counter(Message.objects.filter(pk__in=pks).values_list("state", flat=True))
