"""``--queue a=3 --queue b=1``: the places are shared by weight, and no queue starves."""

from __future__ import annotations

from collections import Counter

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError

from django_delayq import schedule_message, schedule_messages
from django_delayq.core.states import State
from django_delayq.models import Message, Transition
from django_delayq.worker.processes.assembly import Parts
from tests.support.assembled import Assemble

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("loaded", "puts_are_flushed")]

WITH_REDIS = pytest.mark.parametrize("with_redis", [True, False], ids=["Redis", "no Redis"])


def flood(queue: str, number: int, topic: str = "t.ok") -> None:
    schedule_messages([{"topic": topic, "queue": queue}] * number)


def turn(parts: Parts) -> Counter[str]:
    """Make a turn, end what it claimed, and return how many of each queue that were."""
    parts.consumer.turn()
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
        claimed += turn(parts)
        assert abs(claimed["a"] - 3 * claimed["b"]) <= 3
    assert claimed == {"a": 48, "b": 16}


@WITH_REDIS
def test_a_message_of_the_light_queue_waits_for_few_of_a_flood(assembled: Assemble, with_redis: bool) -> None:
    parts = shared(assembled, 1, with_redis)
    flood("a", 30)
    for _ in range(2):
        for _ in range(5):
            assert turn(parts) == {"a": 1}
        flood("b", 1)
        assert Counter(queue for _ in range(4) for queue in turn(parts)) == {"a": 3, "b": 1}


@WITH_REDIS
def test_a_queue_with_nothing_due_gives_its_share_away(assembled: Assemble, with_redis: bool) -> None:
    parts = shared(assembled, 4, with_redis)
    flood("b", 20)
    # In the first turn, the other queue may be asked too late.
    assert turn(parts)["b"] >= 1
    for _ in range(3):
        assert turn(parts) == {"b": 4}
    flood("a", 20)
    assert turn(parts) == {"a": 3, "b": 1}


def test_a_queue_with_nothing_due_saves_nothing_up(assembled: Assemble) -> None:
    parts = shared(assembled, 1)
    flood("b", 20)
    turns = [turn(parts) for _ in range(10)]
    assert sum(turns, Counter[str]())["b"] >= 9
    flood("a", 20)
    assert sum((turn(parts) for _ in range(8)), Counter[str]()) == {"a": 6, "b": 2}


def test_shares_after_a_time_with_nothing_left_are_as_at_the_beginning(assembled: Assemble) -> None:
    parts = shared(assembled, 4)
    for _ in range(5):
        flood("b", 1)
        assert turn(parts) == {"b": 1}
    flood("a", 20)
    flood("b", 20)
    assert turn(parts) == {"a": 3, "b": 1}


def test_a_queue_whose_lane_is_full_does_not_starve_the_other_one(assembled: Assemble) -> None:
    parts = shared(assembled, 1, tasks=4)
    flood("a", 40)
    parts.consumer.turn()
    (sync,) = parts.pool.held()
    flood("b", 10, topic="t.async")
    for _ in range(20):
        parts.consumer.turn()
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
            parts.consumer.turn()
        busy = parts.pool.held()
        assert len(busy) <= threads
        for _ in range(3):
            parts.consumer.turn()
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
    assert [[*turn(parts)] for _ in range(6)] == [[queue] for queue in ("default", "z", "a") * 2]


@WITH_REDIS
def test_the_default_queue_goes_first_again_when_there_is_room_for_all(assembled: Assemble, with_redis: bool) -> None:
    parts = assembled(queues=(), redis=with_redis)
    flood("default", 2)
    flood("z", 1)
    parts.queues.search()
    assert [[*turn(parts)] for _ in range(4)] == [["default"], ["z"], ["default"], []]
    flood("a", 1)
    flood("default", 1)
    assert [[*turn(parts)] for _ in range(3)] == [["default"], ["a"], []]
