"""How many messages of each kind and of each queue are claimed: the room for sync and async handlers, and shares."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError

from django_delayq import schedule_message, schedule_messages
from django_delayq.broker import index
from django_delayq.core import in_tests
from django_delayq.core.exceptions import BrokerUnavailable
from django_delayq.core.states import State
from django_delayq.models import Message, Transition
from django_delayq.record.sql.rows import Ticket
from django_delayq.worker.processes.process import Parts
from django_delayq.worker.run.event_loop import EventLoop
from tests.support.assembled import Assemble
from tests.support.claims import DB
from tests.support.workers import eventually
from tests.worker.bench import running, turn

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("loaded", "puts_are_flushed")]


WITH_REDIS = pytest.mark.parametrize("with_redis", [True, False], ids=["Redis", "no Redis"])
SYNC, ASYNC = "t.ok", "t.async"


def held(parts: Parts) -> list[str]:
    return sorted(delivery.topic for delivery in parts.pool.held())


def scheduled() -> set[int]:
    return set(Message.objects.filter(state=State.SCHEDULED).values_list("pk", flat=True))


def ready() -> set[int]:
    """Return the ids in Redis."""
    broker = index(DB)
    assert broker is not None
    return {pk for some in broker.ids("default") for pk in some}


@WITH_REDIS
def test_no_more_messages_of_a_kind_are_claimed_than_there_is_room_for(assembled: Assemble, with_redis: bool) -> None:
    parts = assembled(2, tasks=5, redis=with_redis)
    schedule_messages({"topic": topic} for topic in [SYNC] * 8 + [ASYNC] * 8)
    for _ in range(12):
        turn(parts)
        assert held(parts).count(SYNC) <= 2
        assert held(parts).count(ASYNC) <= 5
    assert held(parts) == [ASYNC] * 5 + [SYNC] * 2
    if with_redis:
        assert ready() == scheduled()


@WITH_REDIS
@pytest.mark.parametrize(("full", "other"), [(SYNC, ASYNC), (ASYNC, SYNC)], ids=["threads full", "loop full"])
def test_a_full_lane_does_not_hold_up_the_other_one(
    assembled: Assemble, full: str, other: str, with_redis: bool
) -> None:
    parts = assembled(3, tasks=3, redis=with_redis)
    schedule_messages([{"topic": full}] * 5)
    for _ in range(4):
        turn(parts)
    assert held(parts) == [full] * 3
    schedule_message(other)
    turn(parts)
    assert held(parts) == sorted([full] * 3 + [other])


@WITH_REDIS
def test_a_place_that_becomes_free_amid_a_turn_is_kept_for_the_higher_queue(
    assembled: Assemble, monkeypatch: pytest.MonkeyPatch, with_redis: bool
) -> None:
    parts = assembled(1, tasks=5, queues=("high", "low"), redis=with_redis)
    schedule_message(SYNC, queue="high")
    turn(parts)
    high, low = schedule_message(SYNC, queue="high"), schedule_message(SYNC, queue="low")
    beside = schedule_message(ASYNC, queue="low")

    def end_the_step(place: str) -> None:
        # The step of the higher queue is over.
        if place == "after_claim":
            monkeypatch.setattr(in_tests, "failpoint", None)
            (delivery,) = parts.pool.threads.held.all()
            parts.pool.threads.held.remove(delivery)

    monkeypatch.setattr(in_tests, "failpoint", end_the_step)
    parts.consumer.run_round()
    assert {delivery.id for delivery in parts.pool.held()} <= {beside.pk}
    turn(parts)
    turn(parts)
    assert {delivery.id for delivery in parts.pool.held()} == {high.pk, beside.pk}
    assert scheduled() == {low.pk}


def test_a_lost_reply_while_ids_are_blocked_orphans_no_claim(
    assembled: Assemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = assembled(1, tasks=5)
    schedule_message(SYNC)
    turn(parts)
    waiting, beside = schedule_message(SYNC), schedule_message(ASYNC)
    broker = parts.brokers.current()
    block = broker.block

    def lose(queue: str, tickets: Mapping[str, Sequence[Ticket]]) -> None:
        block(queue, tickets)
        raise BrokerUnavailable("the reply is lost")

    monkeypatch.setattr(broker, "block", lose)
    turn(parts)
    assert parts.brokers.current() is parts.brokers.database
    assert held(parts) == sorted([SYNC, ASYNC])
    assert beside.pk in {delivery.id for delivery in parts.pool.held()}
    assert scheduled() == {waiting.pk}


def test_ids_for_a_full_lane_are_taken_once(assembled: Assemble, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = assembled(1, tasks=20)
    schedule_messages([{"topic": SYNC}] * 60)
    taken: list[int] = []
    broker = parts.brokers.current()
    block = broker.block

    def count(queue: str, tickets: Mapping[str, Sequence[Ticket]]) -> None:
        taken.extend(ticket.id for some in tickets.values() for ticket in some)
        block(queue, tickets)

    monkeypatch.setattr(broker, "block", count)
    for _ in range(10):
        turn(parts)
    assert held(parts) == [SYNC]
    assert sorted(taken) == sorted(scheduled())
    assert ready() == scheduled()


def test_a_process_takes_as_many_ids_as_its_last_messages_suggest(assembled: Assemble) -> None:
    parts = assembled(4, tasks=100)
    assert isinstance(parts.pool.loop, EventLoop)
    # A loop that has shown that it can.
    parts.pool.loop._taken_on = 100
    only = parts.consumer.wanted
    only.see()
    for _ in range(60):
        only.learn([ASYNC] * 5)
    assert only.messages == 100
    assert only.usual == only.lanes[1:]
    for _ in range(60):
        only.learn([SYNC] * 5)
    assert only.messages == 4
    assert only.usual == only.lanes[:1]
    for _ in range(60):
        only.learn([SYNC, ASYNC])
    assert only.messages in (7, 8)
    assert only.usual == only.lanes


def test_a_consumer_is_woken_when_the_full_lane_has_room_again(
    assembled: Assemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = assembled(1, tasks=5)
    woken: list[float] = []
    monkeypatch.setattr(parts.brokers, "wake", lambda: woken.append(time.monotonic()))
    schedule_message(SYNC)
    turn(parts)
    assert not woken
    with running(parts.pool):
        eventually(lambda: woken, "the end of the message")
    assert len(woken) == 1


# --- shares: --queue a=3 --queue b=1 ----------------------------------------------------------------------------------


def flood(queue: str, number: int, topic: str = "t.ok") -> None:
    schedule_messages([{"topic": topic, "queue": queue}] * number)


def served(parts: Parts) -> Counter[str]:
    """Make a turn, end what it claimed, and return how many of each queue that were."""
    parts.consumer.run_round()
    claimed = Counter[str]()
    for lane in parts.pool.lanes:
        for delivery in lane.held.all():
            claimed[delivery.queue] += 1
            lane.held.remove(delivery)
    return claimed


def shared(assembled: Assemble, threads: int, redis: bool = True, **options: int) -> Parts:
    return assembled(threads, queues=("a", "b"), weights=(3, 1), redis=redis, **options)


@WITH_REDIS
@pytest.mark.parametrize("threads", [1, 2, 8])
def test_two_full_queues_are_served_by_their_weights(assembled: Assemble, threads: int, with_redis: bool) -> None:
    parts = shared(assembled, threads, with_redis)
    flood("a", 60)
    flood("b", 60)
    claimed = Counter[str]()
    while claimed.total() < 64:
        claimed += served(parts)
        assert abs(claimed["a"] - 3 * claimed["b"]) <= 3
    assert claimed == {"a": 48, "b": 16}


@WITH_REDIS
def test_a_message_of_the_light_queue_waits_for_few_of_a_flood(assembled: Assemble, with_redis: bool) -> None:
    parts = shared(assembled, 1, with_redis)
    flood("a", 30)
    for _ in range(2):
        for _ in range(5):
            assert served(parts) == {"a": 1}
        flood("b", 1)
        assert Counter(queue for _ in range(4) for queue in served(parts)) == {"a": 3, "b": 1}


@WITH_REDIS
def test_a_queue_with_nothing_due_gives_its_share_away(assembled: Assemble, with_redis: bool) -> None:
    parts = shared(assembled, 4, with_redis)
    flood("b", 20)
    # In the first turn, the other queue may be asked too late.
    assert served(parts)["b"] >= 1
    for _ in range(3):
        assert served(parts) == {"b": 4}
    flood("a", 20)
    assert served(parts) == {"a": 3, "b": 1}


def test_a_queue_with_nothing_due_saves_nothing_up(assembled: Assemble) -> None:
    parts = shared(assembled, 1)
    flood("b", 20)
    turns = [served(parts) for _ in range(10)]
    assert sum(turns, Counter[str]())["b"] >= 9
    flood("a", 20)
    assert sum((served(parts) for _ in range(8)), Counter[str]()) == {"a": 6, "b": 2}


def test_shares_after_a_time_with_nothing_left_are_as_at_the_beginning(assembled: Assemble) -> None:
    parts = shared(assembled, 4)
    for _ in range(5):
        flood("b", 1)
        assert served(parts) == {"b": 1}
    flood("a", 20)
    flood("b", 20)
    assert served(parts) == {"a": 3, "b": 1}


def test_a_queue_whose_lane_is_full_does_not_starve_the_other_one(assembled: Assemble) -> None:
    parts = shared(assembled, 1, tasks=4)
    flood("a", 40)
    parts.consumer.run_round()
    (sync,) = parts.pool.held()
    flood("b", 10, topic="t.async")
    for _ in range(20):
        parts.consumer.run_round()
        loop = parts.pool.lanes[1]
        for delivery in loop.held.all():
            loop.held.remove(delivery)
    assert parts.pool.held() == [sync]
    assert not Message.objects.filter(queue="b", state=State.SCHEDULED).exists()


@WITH_REDIS
@pytest.mark.parametrize("threads", [1, 4])
def test_shares_hold_while_sync_handlers_keep_the_threads_busy_beside_a_free_event_loop(
    assembled: Assemble, threads: int, with_redis: bool
) -> None:
    """A process with async handlers looks for their messages meanwhile. What it finds are sync ones."""
    parts = shared(assembled, threads, with_redis, tasks=4)
    flood("a", 160)
    flood("b", 160)
    claimed = Counter[str]()
    while claimed.total() < 80:
        while not parts.pool.held():
            parts.consumer.run_round()
        busy = parts.pool.held()
        assert len(busy) <= threads
        for _ in range(3):
            parts.consumer.run_round()
        # One handler ends.
        claimed[busy[0].queue] += 1
        parts.pool.threads.held.remove(busy[0])
        assert abs(claimed["a"] - 3 * claimed["b"]) <= 3 * threads + 3
    assert abs(claimed["b"] - 20) <= 2


def test_run_delayq_serves_queues_by_weight() -> None:
    flood("a", 60)
    flood("b", 60)
    schedule_message("t.ok", queue="other")
    call_command("run_delayq", "--once", "--queue", "a=3", "--queue", "b=1", "--threads", "1", "-v", "0")
    claims = Transition.objects.filter(to_state=State.RUNNING).order_by("at").values_list("message__queue", flat=True)
    order = "".join(claims)
    assert Counter(order) == {"a": 60, "b": 60}
    assert 15 <= order.rindex("a") + 1 - 60 <= 40
    assert Message.objects.get(queue="other").state == State.SCHEDULED


@pytest.mark.parametrize(
    ("queues", "text"),
    [
        ("a=3,b", "Give all queues a weight"),
        ("a=0,b=1", "from 1 to 9999"),
        ("a=10000,b=1", "from 1 to 9999"),
        ("a=²,b=1", "from 1 to 9999"),
        ("a=3,a=1", "names a queue twice"),
        ("a =3,=1", "queue"),
    ],
)
def test_a_wrong_weight_is_refused(queues: str, text: str) -> None:
    with pytest.raises(CommandError, match=text):
        call_command("run_delayq", "--once", *(word for queue in queues.split(",") for word in ("--queue", queue)))


@WITH_REDIS
@pytest.mark.parametrize("threads", [1, 4])
def test_full_queues_take_turns_when_nobody_put_them_in_order(
    assembled: Assemble, threads: int, with_redis: bool
) -> None:
    parts = assembled(threads, queues=(), redis=with_redis)
    for queue in ("default", "a", "z"):
        flood(queue, 60)
    parts.queues.search()
    # The default queue first, and then by name in a circle.
    assert [[*served(parts)] for _ in range(6)] == [[queue] for queue in ("default", "z", "a") * 2]


@WITH_REDIS
def test_the_default_queue_goes_first_again_when_there_is_room_for_all(assembled: Assemble, with_redis: bool) -> None:
    parts = assembled(queues=(), redis=with_redis)
    flood("default", 2)
    flood("z", 1)
    parts.queues.search()
    assert [[*served(parts)] for _ in range(4)] == [["default"], ["z"], ["default"], []]
    flood("a", 1)
    flood("default", 1)
    assert [[*served(parts)] for _ in range(3)] == [["default"], ["a"], []]
