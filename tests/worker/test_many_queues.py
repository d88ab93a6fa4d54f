"""Many queues are loaded, swept and served as well as one."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import pairwise
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import redis
from django.db import OperationalError, transaction
from django.db.models import F
from django.utils import timezone

from django_delayq import schedule_message, schedule_messages
from django_delayq.broker.base import Entry
from django_delayq.broker.redis import RedisBroker
from django_delayq.core import in_tests
from django_delayq.models import Message
from django_delayq.project import conf
from django_delayq.record import reads, transitions
from django_delayq.record.reads import identity
from django_delayq.record.sql.rows import Claiming, Span, Success
from django_delayq.restore import reading
from django_delayq.worker.claim.consumer import Consumer
from django_delayq.worker.claim.tuning import Tuning
from django_delayq.worker.shared.broker_switch import BrokerSwitch
from django_delayq.worker.upkeep.loader import Loader
from django_delayq.worker.upkeep.sweeper import Sweeper
from django_delayq.worker.upkeep.upkeep_tuning import UpkeepTuning
from tests.support.assembled import Assemble
from tests.support.claims import DB
from tests.support.rows import unguarded
from tests.support.workers import PATIENCE
from tests.worker.bench import redis_of, turn

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("puts_are_flushed")]

QUEUES = [f"tenant{number}" for number in range(60)]
TOPIC = "t.ok"


class Upkeep(NamedTuple):
    """The services of one process that keep Redis filled, its broker, and their numbers."""

    loader: Loader
    sweeper: Sweeper
    broker: RedisBroker
    tuning: UpkeepTuning

    def held(self) -> set[int]:
        """Return the ids that Redis has."""
        return {pk for queue in QUEUES for batch in self.broker.ids(queue) for pk in batch}

    def lose(self, messages: list[Message]) -> None:
        """Have Redis lose the ids of messages."""
        for message in messages:
            self.broker.remove(message.queue, [message.pk])

    def begin_load(self, lease: float) -> None:
        """Have another process begin a load, and go no further."""
        self.broker.load(
            ahead=600, worker="other", lease=lease, identity=identity(DB), server=self.broker.server(), lost=False
        )


@pytest.fixture
def parts_of_time() -> float:
    """Only the first round of a sweep begins at the very beginning."""
    return 1e9


@pytest.fixture
def upkeep(redis_client: redis.Redis, parts_of_time: float) -> Iterator[Upkeep]:
    brokers = BrokerSwitch(DB, dict)
    tuning = UpkeepTuning(claiming=0.0, parts_of_time=parts_of_time)
    sweeper = Sweeper(DB, brokers, lambda: tuple(QUEUES), lambda: [TOPIC], tuning)
    yield Upkeep(Loader(DB, brokers, "host/1", tuning), sweeper, redis_of(brokers), tuning)
    brokers.close()


def schedule(each: int, *, due_in: float = 60.0) -> list[Message]:
    """Schedule so many messages for each queue, in turns; the later ones are due later."""
    now = timezone.now()
    return schedule_messages(
        {"topic": TOPIC, "queue": QUEUES[n % len(QUEUES)], "due_at": now + timedelta(seconds=due_in, milliseconds=n)}
        for n in range(each * len(QUEUES))
    )


def overdue(each: int = 1) -> list[Message]:
    messages = schedule(each)
    unguarded(Message).update(due_at=F("due_at") - timedelta(seconds=3660))
    return messages


def ids(messages: list[Message]) -> set[int]:
    return {message.pk for message in messages}


# --- loading ----------------------------------------------------------------------------------------------------------


def test_redis_keeps_nothing_of_a_queue_that_has_run_empty(upkeep: Upkeep) -> None:
    upkeep.loader.tick()
    before = set(upkeep.broker.client.keys())
    overdue()
    upkeep.broker.client.hdel(upkeep.broker.keys("").meta, "loaded")
    Loader(DB, upkeep.loader.brokers, "host/2").tick()
    for queue in QUEUES:
        assert len(upkeep.broker.take(queue, 10).tickets) == 1
    left = {key for key in upkeep.broker.client.scan_iter() if upkeep.broker.client.ttl(key) == -1}
    assert left == before


def test_a_lost_message_is_put_in_good_time_before_twice_the_grace(
    upkeep: Upkeep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the sweeps fall: half a second is left for a busy machine, the claim, and the services beside it."""
    upkeep.loader.tick()
    grace = conf.get().GRACE
    began = timezone.now() + timedelta(seconds=60)
    due = schedule_messages(
        {"topic": TOPIC, "queue": QUEUES[0], "due_at": began + grace * timedelta(seconds=n / 20)} for n in range(20)
    )
    upkeep.lose(due)
    late: dict[int, float] = {}
    at = began
    monkeypatch.setattr(in_tests, "clock", lambda: at)
    while len(late) < len(due):
        wait = upkeep.sweeper.tick()
        ends = at + timedelta(seconds=UpkeepTuning().claiming)
        for message in due:
            if message.pk in upkeep.held():
                late.setdefault(message.pk, (ends - message.due_at).total_seconds())
        at += timedelta(seconds=wait)
    assert max(late.values()) < 2 * grace - 0.5


def test_a_sweep_costs_nobody_else_a_put(upkeep: Upkeep, caplog: pytest.LogCaptureFixture) -> None:
    """A transaction that has written its message is open while the sweep finds what Redis has lost."""
    upkeep.loader.tick()
    put = []
    for _ in range(4):
        lost = overdue()
        upkeep.lose(lost)
        with transaction.atomic():
            put.append(schedule_message(TOPIC, delay=60, queue=QUEUES[0]).pk)
            upkeep.sweeper.tick()
        assert ids(lost) <= upkeep.held()
    assert set(put) <= upkeep.held()
    assert not [record for record in caplog.records if record.levelno > logging.WARNING]


@pytest.mark.parametrize("head", [1, 3, 50])
def test_messages_of_many_queues_are_read_in_the_order_of_their_due_times(head: int) -> None:
    sizes = reading.Pages(head, queues=7)
    messages = [*schedule(5), *schedule_messages({"topic": TOPIC, "queue": QUEUES[3], "delay": 60} for _ in range(90))]
    unguarded(Message).filter(pk__in=[message.pk for message in messages[-40:]]).update(due_at=messages[200].due_at)
    end = timezone.now() + timedelta(seconds=3600)

    def read(**bounds: Any) -> list[int]:
        pages = list(reading.merged(DB, QUEUES, Span(end, limit=100, **bounds), sizes))
        assert all(page.size == 100 for page in pages[:-1])
        for before, after in pairwise(pages):
            assert before.end < (after.first, 2**63)
        rows = [(entry.due_us, entry.id) for page in pages for entries in page.by_queue.values() for entry in entries]
        for page in pages:
            assert page.end == max((e.due_at, e.id) for entries in page.by_queue.values() for e in entries)
        return [pk for _due, pk in sorted(rows)]

    expected = list(Message.objects.order_by("due_at", "id").values_list("pk", flat=True))
    assert read() == expected
    middle = Message.objects.get(pk=expected[250])
    assert read(after=(middle.due_at, middle.pk)) == expected[251:]
    assert read(topics=["another"]) == []


@pytest.fixture
def filled(upkeep: Upkeep, monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """Have pages of 50 messages. Return the list of the ids that each call to Redis fills in."""
    calls: list[set[int]] = []

    def fill(self: RedisBroker, entries: dict[str, list[Entry]]) -> Any:
        calls.append({entry.id for some in entries.values() for entry in some})
        return filling(self, entries)

    filling = RedisBroker.fill
    monkeypatch.setattr(RedisBroker, "fill", fill)
    upkeep.tuning.page = 50
    return calls


def backlog(number: int = 200) -> list[Message]:
    """Schedule many messages of one queue, and make them overdue."""
    messages = schedule_messages({"topic": TOPIC, "queue": QUEUES[0]} for _number in range(number))
    unguarded(Message).update(due_at=F("due_at") - timedelta(minutes=10))
    return messages


def test_a_load_puts_what_falls_due_soon_first_and_then_gives_each_queue_its_turn_beside_a_backlog(
    upkeep: Upkeep, filled: list[set[int]]
) -> None:
    # The first rows of each queue are fewer.
    upkeep.tuning.page = 80
    late = [*backlog(), schedule_message(TOPIC, queue=QUEUES[1])]
    # It is overdue, and fell due after all of the backlog.
    unguarded(Message).filter(pk=late[-1].pk).update(due_at=F("due_at") - timedelta(minutes=5))
    urgent = schedule_message(TOPIC, queue=QUEUES[2], priority=100)
    soon = [urgent, *(schedule_message(TOPIC, queue=QUEUES[number % 3], delay=number) for number in range(1, 10))]
    upkeep.broker.client.flushall()
    upkeep.loader.tick()
    assert upkeep.held() == ids(late) | ids(soon)
    assert filled[0] == ids(soon)
    assert late[-1].pk in filled[1]
    # Its priority has come back with it.
    assert [ticket.id for ticket in upkeep.broker.take(urgent.queue, 1).tickets] == [urgent.pk]


def test_a_loader_that_ends_in_the_middle_is_followed_by_another(
    upkeep: Upkeep, filled: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    upkeep.tuning.pages_per_tick = 1
    # The loader renews its lease after each page.
    monkeypatch.setattr("django_delayq.restore.filling.RENEWAL_INTERVAL", 0.0)
    messages = schedule(4)
    assert [upkeep.loader.tick(), upkeep.loader.tick()] == [0.0, 0.0]
    assert upkeep.held() == filled[0] | filled[1] < ids(messages)
    upkeep.broker.client.hset(upkeep.broker.keys("").meta, "loader_until", 0)
    follower = Loader(DB, upkeep.loader.brokers, "host/2")
    while follower.tick() == 0.0:
        pass
    assert upkeep.held() == ids(messages)
    meta = upkeep.broker.read_meta()
    assert meta.loaded_tenths == meta.horizon_tenths


def test_a_load_that_the_database_ended_is_begun_by_another_one_at_once(
    upkeep: Upkeep, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = schedule(4)
    upkeep.broker.client.flushall()
    with monkeypatch.context() as patch, pytest.raises(OperationalError):
        patch.setattr(reading, "merged", Mock(side_effect=OperationalError("gone")))
        upkeep.loader.tick()
    Loader(DB, upkeep.loader.brokers, "host/2").tick()
    assert upkeep.held() == ids(messages)


def test_a_sweep_during_a_load_claims_no_loss(
    upkeep: Upkeep, filled: list[set[int]], caplog: pytest.LogCaptureFixture
) -> None:
    upkeep.tuning.pages_per_tick = 1
    messages = backlog()
    upkeep.broker.client.flushall()
    while upkeep.loader.tick() == 0.0:
        upkeep.sweeper.tick()
    assert upkeep.held() == ids(messages)
    # The loader put each message once, and the sweeper none.
    assert sum(map(len, filled)) == len(messages)
    assert not [record for record in caplog.records if "sweep" in record.getMessage()]


# --- sweeping ---------------------------------------------------------------------------------------------------------


def test_one_sweep_finds_what_sixty_queues_have_lost_with_one_pause(
    upkeep: Upkeep, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = overdue(2)
    upkeep.loader.tick()
    upkeep.broker.client.delete(
        *(key for queue in QUEUES for key in (upkeep.broker.keys(queue).ready, upkeep.broker.keys(queue).delayed))
    )
    upkeep.tuning.claiming = 0.123
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    upkeep.sweeper.tick()
    assert upkeep.held() == ids(messages)
    # Other threads may sleep too.
    assert pauses.count(0.123) == 1


def test_a_sweep_claims_no_loss_at_the_first_start_and_does_the_work_of_a_loader_that_died(
    upkeep: Upkeep, caplog: pytest.LogCaptureFixture
) -> None:
    messages = overdue()
    upkeep.sweeper.tick()
    upkeep.begin_load(lease=10)
    upkeep.sweeper.tick()
    assert upkeep.held() == set()
    upkeep.broker.loaded(worker="other", upto_tenths=None, lease=None)
    upkeep.loader.tick()
    upkeep.sweeper.tick()
    assert upkeep.held() == ids(messages)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    upkeep.broker.client.flushall()
    upkeep.begin_load(lease=0)
    upkeep.sweeper.tick()
    assert upkeep.held() == ids(messages)


def test_a_round_of_the_sweep_covers_the_backlog_that_the_round_before_it_found(upkeep: Upkeep) -> None:
    messages = overdue()
    upkeep.loader.tick()
    upkeep.sweeper.tick()
    lost = messages[: len(messages) // 2]
    upkeep.lose(lost)
    assert upkeep.held() == ids(messages) - ids(lost)
    upkeep.sweeper.tick()
    assert upkeep.held() == ids(messages)


def test_a_round_of_the_sweep_begins_where_the_last_one_came_to_however_long_that_is_ago(upkeep: Upkeep) -> None:
    upkeep.loader.tick()
    now = reads.now(DB)
    upkeep.sweeper.sweep(now - timedelta(days=2))
    # A machine that was suspended for a day: its clock that counts seconds stood still.
    messages = overdue()
    upkeep.lose(messages)
    upkeep.sweeper.sweep(now - timedelta(seconds=conf.get().GRACE))
    assert upkeep.held() == ids(messages)


def test_a_sweep_goes_on_where_the_last_tick_stopped(upkeep: Upkeep, filled: list[set[int]]) -> None:
    upkeep.tuning.rows_per_tick = 50
    upkeep.loader.tick()
    messages = overdue(2)
    upkeep.lose(messages)
    found = []
    for _tick in range(3):
        upkeep.sweeper.tick()
        found.append(len(upkeep.held()))
    assert found == [50, 100, 120]


@pytest.mark.parametrize("parts_of_time", [0.0])
@pytest.mark.parametrize("ticks", [0, 2])
@pytest.mark.usefixtures("filled")
def test_what_becomes_overdue_waits_for_no_round_over_a_backlog(upkeep: Upkeep, settings: Any, ticks: int) -> None:
    upkeep.tuning.rows_per_tick = 50
    settings.DELAYQ = {**settings.DELAYQ, "GRACE": 0.1}
    upkeep.loader.tick()
    upkeep.sweeper.tick()
    backlog()
    for _tick in range(ticks):
        upkeep.sweeper.tick()
    lost = schedule_message(TOPIC, queue=QUEUES[1])
    upkeep.lose([lost])
    time.sleep(0.2)
    upkeep.sweeper.tick()
    assert lost.pk in upkeep.held()


# --- delivering -------------------------------------------------------------------------------------------------------


@pytest.fixture
def consumer(upkeep: Upkeep, assembled: Assemble) -> Consumer:
    """A consumer of all queues whose threads do not run: it holds what it claims, up to a hundred deliveries."""
    upkeep.loader.tick()
    return assembled(100, queues=()).consumer


@pytest.fixture
def calls(consumer: Consumer, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Make the first turn of the consumer. Return the list of what is sent to Redis from then on, each time at once."""
    consumer.run_round()
    sent: list[object] = []
    send: Any = redis.Connection.send_packed_command

    def note(self: redis.Connection, command: Any, **options: Any) -> None:
        sent.append(command)
        send(self, command, **options)

    monkeypatch.setattr(redis.Connection, "send_packed_command", note)
    return sent


def held_by(consumer: Consumer) -> list[tuple[str, int]]:
    return [(delivery.queue, delivery.id) for delivery in consumer.pool.held()]


def end_all(consumer: Consumer) -> None:
    """End all deliveries of a consumer whose threads do not run, and have each message consumed."""
    deliveries = consumer.pool.held()
    transitions.succeed(DB, [Success(delivery.id, delivery.deliveries, "worker:w") for delivery in deliveries])
    for delivery in deliveries:
        consumer.pool.threads.held.remove(delivery)


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """Return the list of the ids that each claim asks for, from now on."""
    asked_for: list[set[int]] = []

    def claim(using: str, asked: Claiming, *args: Any) -> Any:
        asked_for.append({ticket.id for ticket in asked.tickets})
        return claiming(using, asked, *args)

    claiming = transitions.claim_asked
    monkeypatch.setattr(transitions, "claim_asked", claim)
    return asked_for


def test_a_turn_takes_from_sixty_queues_with_a_few_calls_and_one_claim(
    consumer: Consumer, calls: list[object], claims: list[set[int]]
) -> None:
    messages = [schedule_message(TOPIC, queue=queue) for queue in QUEUES]
    calls.clear()
    consumer.run_round()
    assert sorted(held_by(consumer)) == sorted((message.queue, message.pk) for message in messages)
    assert claims == [ids(messages)]
    # Some open another connection.
    assert len(calls) <= 12


def test_a_turn_asks_redis_once_while_sixty_queues_wait_and_ends_in_time_for_the_first_message(
    consumer: Consumer, calls: list[object]
) -> None:
    consumer.tuning.idle_wait = 10 * PATIENCE
    for number, queue in enumerate(QUEUES):
        schedule_message(TOPIC, queue=queue, delay=5 * PATIENCE + number)
    consumer.queues.finder.tick()
    assert set(consumer.queues.finder()) >= set(QUEUES)
    calls.clear()
    # Less than a turn that has nothing to wait for.
    assert 1 < consumer.run_round() <= 5 * PATIENCE
    assert len(calls) == 1


def test_the_first_message_of_a_new_queue_wakes_a_worker_and_is_taken_by_its_next_turn(consumer: Consumer) -> None:
    consumer.run_round()
    broker = consumer.brokers.current()
    broker.listen(None, 0)
    message = schedule_message(TOPIC, queue="brand-new")
    assert broker.listen(None, 30)
    consumer.run_round()
    assert held_by(consumer) == [("brand-new", message.pk)]
    assert "brand-new" in consumer.queues.finder()


def test_many_queues_that_a_worker_names_are_served_in_their_order_and_no_other(
    upkeep: Upkeep, assembled: Assemble
) -> None:
    upkeep.loader.tick()
    for queue in ("c", "default", "b", "other", "a", "b", "d"):
        schedule_message(TOPIC, queue=queue)
    for threads, served in ((4, ["a", "b", "b", "default"]), (50, ["c", "d"])):
        consumer = assembled(threads, queues=("default", "a", "b", "c", "d")).consumer
        consumer.run_round()
        assert sorted(queue for queue, _pk in held_by(consumer)) == served


def test_an_index_that_was_lost_is_made_again_by_the_sweep(upkeep: Upkeep, consumer: Consumer) -> None:
    message = schedule_message(TOPIC, queue=QUEUES[5])
    unguarded(Message).update(due_at=F("due_at") - timedelta(seconds=60))
    upkeep.broker.client.delete(upkeep.broker.keys("").queues, upkeep.broker.keys("").wake_all)
    consumer.run_round()
    assert held_by(consumer) == []
    upkeep.sweeper.tick()
    assert upkeep.broker.listen(None, 30)
    consumer.run_round()
    assert held_by(consumer) == [(QUEUES[5], message.pk)]


def test_a_queue_without_ids_leaves_the_index(upkeep: Upkeep, consumer: Consumer) -> None:
    upkeep.broker.client.zadd(upkeep.broker.keys("").queues, {"no such queue": 0})
    consumer.run_round()
    assert upkeep.broker.client.zcard(upkeep.broker.keys("").queues) == 0
    assert consumer.run_round() > 1


@pytest.mark.parametrize("with_redis", [True, False], ids=["Redis", "no Redis"])
@pytest.mark.parametrize("backlog", ["default", "a", "z"])
@pytest.mark.parametrize("others", [1, 3])
def test_messages_of_other_queues_are_claimed_before_those_of_a_backlog(
    upkeep: Upkeep, assembled: Assemble, claims: list[set[int]], with_redis: bool, backlog: str, others: int
) -> None:
    upkeep.loader.tick()
    parts = assembled(10, queues=(), redis=with_redis)
    consumer = parts.consumer
    little = ["b", "c", "d"][:others]
    for queue in little:
        schedule_message(TOPIC, queue=queue)
    consumer.run_round()
    schedule_messages({"topic": TOPIC, "queue": backlog} for _number in range(60))
    for _number in range(3):
        consumer.run_round()
        end_all(consumer)
        claims.clear()
        first = {schedule_message(TOPIC, queue=queue).pk for queue in little}
        turn(parts)
        rest = {pk for queue, pk in held_by(consumer) if queue == backlog}
        assert len(rest) == 10 - others
        # A query does not tell which queue has many.
        assert claims == ([first, rest] if with_redis else [first | rest])
        end_all(consumer)


@pytest.mark.parametrize("beside", [True, False], ids=["beside others", "alone"])
def test_a_claim_has_fewer_of_a_backlog_while_messages_of_other_queues_come(
    upkeep: Upkeep, assembled: Assemble, claims: list[set[int]], beside: bool
) -> None:
    upkeep.loader.tick()
    parts = assembled(20, queues=(), tuning=Tuning(most_beside_others=6))
    consumer = parts.consumer
    schedule_message(TOPIC, queue="other")
    consumer.run_round()
    schedule_messages({"topic": TOPIC} for _number in range(60))
    turn(parts)
    end_all(consumer)
    if beside:
        schedule_message(TOPIC, queue="other")
        turn(parts)
        end_all(consumer)
    claims.clear()
    turn(parts)
    assert list(map(len, claims)) == ([6, 6, 6, 2] if beside else [20])


@pytest.mark.postgresql("SQLite is asked for each queue")
def test_without_redis_a_poll_asks_for_all_queues_at_once(
    assembled: Assemble, django_assert_max_num_queries: Any
) -> None:
    parts = assembled(100, queues=(), redis=False)
    schedule(1)
    parts.queues.tick()
    with django_assert_max_num_queries(8):
        parts.consumer.run_round()
    messages = [schedule_message(TOPIC, queue=queue) for queue in ("default", *QUEUES)]
    parts.consumer.run_round()
    assert {pk for _queue, pk in held_by(parts.consumer)} == ids(messages)
