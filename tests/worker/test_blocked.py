"""Ids that are blocked, because no process could begin their messages: who serves them, and when."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest

from django_delayq import cancel_message, handler, schedule_message, schedule_messages
from django_delayq.broker.base import IDS_PER_CALL, Entry
from django_delayq.broker.redis import RedisBroker
from django_delayq.core import in_tests, limits
from django_delayq.core.chunks import chunks
from django_delayq.core.outcomes import Ack, Outcome, Retry
from django_delayq.core.states import State
from django_delayq.project import conf
from django_delayq.worker.claim.blocked_names import HANDLER, names_in_redis
from django_delayq.worker.claim.queues import QueueFinder
from django_delayq.worker.claim.tuning import Tuning
from django_delayq.worker.processes.process import Parts
from django_delayq.worker.run import recorder
from django_delayq.worker.run.reporting import publish_scheduled
from django_delayq.worker.upkeep.mover import Mover
from tests.support.assembled import Assemble
from tests.support.claims import DB
from tests.support.limits import Declare
from tests.support.record_of import states
from tests.support.steps import ago
from tests.support.workers import PATIENCE, eventually
from tests.worker.bench import held, redis_of, running, turn

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("loaded", "puts_are_flushed")]

# Like the name of a known topic.
NEW = "t.deadlok"


@pytest.fixture
def broker(parts: Parts) -> RedisBroker:
    return redis_of(parts.brokers)


def hear_of_it() -> None:
    """Have a handler for the topic, as in a worker of the next version of the code."""
    handler(NEW)(lambda payload: None)


def no_look() -> Tuning:
    """Have a worker hear of permits that became free, or never learn of them."""
    return Tuning(look_interval=10 * PATIENCE)


@pytest.fixture
def of_one_permit(assembled: Assemble, declare: Declare) -> Parts:
    """A worker with two threads, and a limit of one message."""
    declare("l.one", limit=1)
    return assembled(2, name="worker", tuning=no_look())


def end(parts: Parts, *ids: int, outcome: Outcome = Ack()) -> None:
    """Record how messages ended that a worker holds."""
    ended = [delivery for delivery in parts.pool.held() if delivery.id in ids]
    for delivery in ended:
        parts.recorder.submit(delivery, outcome, f"worker:{parts.name}")
    assert parts.recorder.flush(PATIENCE)
    for delivery in ended:
        parts.pool.threads.held.remove(delivery)


def test_an_id_whose_topic_is_unknown_is_blocked_and_costs_nothing_more(
    parts: Parts, broker: RedisBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    strays = [schedule_message(NEW).pk for _ in range(3)]
    turn(parts)
    (name,) = names_in_redis(HANDLER + NEW)
    assert broker.blocked() == {"default": {name: 3}}
    assert [location.blocked for location in broker.locations("default", strays)] == [name] * 3
    taken: list[int] = []
    take = broker.take

    def note(*arguments: object, **how: bool) -> object:
        answer = take(*arguments, **how)  # type: ignore[arg-type]
        taken.extend(ticket.id for ticket in answer.tickets)
        return answer

    monkeypatch.setattr(broker, "take", note)
    mine = schedule_message("t.ok")
    for _ in range(5):
        turn(parts)
    assert held(parts) == taken == [mine.pk]
    # The log tells it once, and asks whether the known topic was meant.
    (told,) = [record.getMessage() for record in caplog.records if NEW in record.getMessage()]
    left = f"No handler for topic {NEW} here; its messages are left for another worker"
    assert told == f"{left}. Did you mean t.deadlock?"


def test_blocked_ids_that_redis_has_lost_are_unblocked_once(parts: Parts, broker: RedisBroker) -> None:
    """Redis may evict a key by itself."""
    schedule_message(NEW)
    turn(parts)
    broker.client.delete(f"{broker.keys(DB).blocked}:{names_in_redis(HANDLER + NEW)[0]}")
    hear_of_it()

    def is_forgotten() -> bool:
        turn(parts)
        return broker.blocked() == {}

    eventually(is_forgotten, "nothing is blocked")


def test_a_wake_up_goes_on_until_it_finds_the_worker_that_can_use_it(
    assembled: Assemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This test is the worker that knows the topic. It listens only after another one has had the wake-up."""
    without = assembled(1, queues=(), name="without", tuning=Tuning(left_to_others=PATIENCE))
    waiting = without.consumer
    passed_on = threading.Event()
    pass_on = waiting.wake_ups.pass_on

    def note(current: object) -> None:
        # One that comes before the message is that of a database which was locked for a moment.
        is_blocked = bool(other.blocked())
        pass_on(current)  # type: ignore[arg-type]
        if is_blocked:
            passed_on.set()

    other = RedisBroker(conf.get(), DB, timeout=PATIENCE)
    monkeypatch.setattr(waiting.wake_ups, "pass_on", note)
    with running(waiting):
        schedule_message(NEW)
        assert passed_on.wait(PATIENCE)
        assert other.listen(None, PATIENCE)
        assert other.blocked() == {"default": {names_in_redis(HANDLER + NEW)[0]: 1}}
    other.close()


def test_a_message_beside_a_thousand_for_nobody_is_found_in_one_round(assembled: Assemble) -> None:
    two_lanes = assembled(1, tasks=1, name="two")
    schedule_messages([{"topic": NEW, "priority": 10}] * 1500)
    mine = schedule_message("t.ok")
    turn(two_lanes)
    assert held(two_lanes) == [mine.pk]


def test_a_worker_that_is_the_first_to_block_an_id_soon_looks_again(assembled: Assemble, declare: Declare) -> None:
    """Another worker frees the permit, and does not know that somebody waits for it."""
    declare("l.one", limit=1)
    one, other = assembled(1, name="one"), assembled(1, name="other")
    first = schedule_message("l.one")
    turn(one)
    assert held(one) == [first.pk]
    schedule_message("l.one")
    while (wait := other.consumer.run_round()) == 0:
        pass
    assert held(other) == []
    assert wait <= Tuning().look_interval


def test_the_opening_of_a_rate_that_nobody_needs_keeps_no_worker_busy(assembled: Assemble, declare: Declare) -> None:
    declare("l.rate", rate="1/s")
    rated = assembled(4, name="rated")
    begun, waiting = schedule_message("l.rate"), schedule_message("l.rate")
    turn(rated)
    assert held(rated) == [begun.pk]
    cancel_message(waiting.pk)
    redis_of(rated.brokers).flush()
    known = rated.consumer.limits
    eventually(lambda: known.seconds_to_opening in (0.0, None), "the rate is open again")
    waits = [rated.consumer.run_round() for _ in range(3)]
    assert waits[-1] > 0


def test_ids_that_are_put_back_for_want_of_room_go_to_whoever_has_a_slot_next(
    parts: Parts, broker: RedisBroker
) -> None:
    """Most ids of the take before were blocked, so the worker takes more than it has room for."""
    parts.consumer.tuning.idle_wait = 10 * PATIENCE
    schedule_messages([{"topic": "t.ok"}] * 5)
    broker.flush()
    wakes = [broker.keys("default").wake, broker.keys("default").wake_all]
    broker.client.delete(*wakes)
    parts.consumer.blocked.are_most = True
    parts.consumer.run_round()
    assert broker.sizes(["default"])["default"].ready == 4
    # Another worker, and this one when its handler ends.
    assert [broker.client.llen(wake) for wake in wakes] == [1, 1]
    broker.client.delete(*wakes)
    with running(parts.pool, parts.consumer):
        eventually(lambda: states() == {State.CONSUMED: 5}, "all are delivered")


@pytest.mark.parametrize("queue", ["default", "low"], ids=["of the same queue", "of a lower queue"])
def test_a_newcomer_does_not_wait_for_a_backlog_to_be_blocked(
    assembled: Assemble, declare: Declare, queue: str
) -> None:
    declare("l.one", limit=1)
    worker = assembled(4, name="worker", queues=("default", "low"))
    schedule_messages([{"topic": "l.one"}] * (4 * IDS_PER_CALL))
    newcomer = schedule_message("t.ok", queue=queue)
    broker = redis_of(worker.brokers)
    broker.flush()
    # Learns that the limit is full, and makes more of them ready.
    worker.consumer.run_round()
    worker.consumer.run_round()
    assert newcomer.pk in held(worker)
    assert broker.sizes(["default"])["default"].ready > 0


def test_a_newcomer_does_not_wait_for_the_ids_of_messages_that_have_left(parts: Parts, broker: RedisBroker) -> None:
    # As in a Redis that went back to an old snapshot.
    left = [Entry.at(10**9 + number, ago(60), 0) for number in range(4 * IDS_PER_CALL)]
    for some in chunks(left, IDS_PER_CALL):
        broker.put("default", some)
    newcomer = schedule_message("t.ok")
    broker.flush()
    # Learns that the ids are nobody's, and makes more of them ready.
    parts.consumer.run_round()
    parts.consumer.run_round()
    assert newcomer.pk in held(parts)
    assert broker.sizes(["default"])["default"].ready > 0


@pytest.mark.postgresql("a claim and an outcome are written at the same moment")
def test_a_permit_that_becomes_free_while_a_claim_asks_for_it_is_used_at_once(
    of_one_permit: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = of_one_permit
    worker.consumer.tuning.idle_wait = 10 * PATIENCE
    first = schedule_message("l.one")
    ended: list[int] = []

    def end_the_first(place: str) -> None:
        if place == "before_limited_claim" and not ended:
            ended.append(first.pk)
            end(worker, first.pk)

    with running(worker.consumer):
        eventually(lambda: held(worker) == [first.pk], "the first one runs")
        monkeypatch.setattr(in_tests, "failpoint", end_the_first)
        second = schedule_message("l.one")
        eventually(lambda: held(worker) == [second.pk], "the second one runs")
    assert ended


def test_a_worker_with_too_little_room_for_all_queues_forgets_none_that_has_blocked_ids(assembled: Assemble) -> None:
    strays = {schedule_message(NEW, queue=queue).pk for queue in ("default", "one", "two")}
    turn(assembled(1, queues=(), name="old"))
    hear_of_it()
    new = assembled(1, queues=(), name="new", tuning=no_look())
    served = set()
    for _ in strays:
        turn(new)
        (pk,) = held(new)
        served.add(pk)
        end(new, pk)
    assert served == strays


@pytest.mark.parametrize("named", [False, True], ids=["all queues", "queues in a strict order"])
def test_a_blocked_id_has_the_turn_of_its_queue(assembled: Assemble, named: bool) -> None:
    queues = ("first", "second", "third", "fourth")
    stray = schedule_message(NEW, queue="second").pk
    turn(assembled(1, queues=queues, name="old"))
    hear_of_it()
    for queue in ("default", "third"):
        schedule_messages([{"topic": "t.ok", "queue": queue}] * 5)
    new = assembled(1, queues=queues if named else (), name="new")
    served = []
    for _ in range(3):
        turn(new)
        served += held(new)
        end(new, served[-1])
    # It hears of the stray only after its first take.
    assert stray in served[: 2 if named else 3]


def test_a_slot_that_becomes_free_in_the_middle_of_a_round_is_for_blocked_ids(
    assembled: Assemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = assembled(1, tasks=5, name="two lanes", tuning=no_look())
    first, second = schedule_message("t.ok"), schedule_message("t.ok")
    turn(worker)
    turn(worker)
    assert held(worker) == [first.pk]
    other = schedule_message("t.async")

    def end_the_first(place: str) -> None:
        if place == "after_claim":
            monkeypatch.setattr(in_tests, "failpoint", None)
            end(worker, first.pk)

    monkeypatch.setattr(in_tests, "failpoint", end_the_first)
    assert worker.consumer.run_round() < Tuning().look_interval
    assert held(worker) == [other.pk]
    turn(worker)
    assert sorted(held(worker)) == [second.pk, other.pk]


def test_the_best_of_all_blocked_ids_begins_first(
    parts: Parts, assembled: Assemble, declare: Declare, broker: RedisBroker
) -> None:
    """The ids of two limits may begin, and one slot is free."""
    for topic in ("l.one", "l.two"):
        declare(topic, limit=1)
    parts = assembled(3)

    def scheduled(topic: str, **options: Any) -> list[int]:
        made = [schedule_message(topic, **options).pk for _ in range(2)]
        turn(parts)
        return made

    (one, *_), (two, *_) = scheduled("l.one"), scheduled("l.two")
    scheduled("l.one")
    best, second = scheduled("l.two", priority=50)
    long = scheduled("t.sleep", priority=100)
    assert set(held(parts)) == {one, two, long[0]}

    end(parts, one, two)
    turn(parts)
    turn(parts)
    assert set(held(parts)) == {best, *long}
    end(parts, best)
    turn(parts)
    turn(parts)
    assert set(held(parts)) == {second, *long}


@pytest.mark.parametrize("topic", [NEW, "t.ok"])
def test_the_mover_wakes_a_worker_for_what_a_process_that_died_has_blocked_or_not_taken(
    parts: Parts, broker: RedisBroker, topic: str
) -> None:
    schedule_message(topic)
    broker.flush()
    if topic == NEW:
        turn(parts)
    keys = broker.keys("default")
    broker.client.delete(keys.wake_all, keys.wake)
    Mover(parts.brokers, QueueFinder(DB).named, beside_consumer=True).tick()
    assert broker.client.llen(keys.wake_all) == 1


@pytest.mark.parametrize("terms", [{"rate": "1/h"}, {"limit": 1}], ids=["rate", "limit"])
def test_a_newcomer_does_not_wait_until_each_limit_has_refused_a_message(
    assembled: Assemble, declare: Declare, terms: dict[str, Any]
) -> None:
    """Each of many keys is full in another worker, and has a further message."""
    declare("l.keyed", **terms)
    one, other = assembled(100, name="one"), assembled(2, name="other")
    schedule_messages({"topic": "l.keyed", "limit_key": str(key)} for key in range(100))
    turn(one)
    if "rate" in terms:
        end(one, *held(one))
    schedule_messages({"topic": "l.keyed", "limit_key": str(key)} for key in range(100))
    newcomer = schedule_message("t.ok")
    redis_of(other.brokers).flush()
    for _ in range(5):
        other.consumer.run_round()
    assert held(other) == [newcomer.pk]


def test_a_limit_that_had_been_full_is_open_after_one_look(assembled: Assemble, declare: Declare) -> None:
    declare("l.keyed", limit=1)
    tuning = Tuning(look_interval=0.0, most_names=10)
    one, other = (assembled(50, name=name, tuning=tuning) for name in ("one", "other"))
    schedule_messages({"topic": "l.keyed", "limit_key": str(key)} for key in range(50))
    turn(one)
    schedule_messages({"topic": "l.keyed", "limit_key": str(key)} for key in range(50))
    for _ in range(3):
        other.consumer.run_round()
    assert held(other) == []
    end(one, *held(one))
    while states()[State.SCHEDULED]:
        one.consumer.run_round()
        end(one, *held(one))
    last = schedule_message("l.keyed", limit_key="49")
    redis_of(other.brokers).flush()
    for _ in range(3):
        other.consumer.run_round()
    assert held(other) == [last.pk]


@pytest.mark.parametrize(
    ("of_queue", "of_topics"),
    [
        (None, [{"limit": 1, "rate": "10/s"}]),
        ({"limit": 2, "rate": "20/s"}, [{"rate": "10/s"}, {"limit": 1}]),
    ],
    ids=["one limit", "of queue and topics"],
)
def test_a_permit_that_a_rate_has_left_unused_is_free_for_the_next(
    assembled: Assemble, declare: Declare, settings: Any, of_queue: Any, of_topics: Any
) -> None:
    if of_queue is not None:
        settings.DELAYQ = {**settings.DELAYQ, "LIMITS": {"default": of_queue}}
    topics = [f"l.{place}" for place in range(len(of_topics))]
    for topic, terms in zip(topics, of_topics, strict=True):
        declare(topic, **terms)
    worker = assembled(4, name="worker", tuning=no_look())
    schedule_messages({"topic": topic} for topic in topics * 6)
    with running(worker.pool, worker.consumer):
        eventually(lambda: states() == {State.CONSUMED: 6 * len(topics)}, "all are delivered")


# --- names in Redis ---------------------------------------------------------------------------------------------------

KEYED = limits.topic_name("l.keyed", "a key")


@pytest.mark.parametrize("fallbacks", [[], ["a former secret"]], ids=["no fallback", "fallback"])
def test_who_has_another_secret_serves_what_was_blocked_before(
    assembled: Assemble, declare: Declare, settings: Any, fallbacks: list[str]
) -> None:
    """The project changes its secret, or another project serves the same queues."""
    declare("l.keyed", limit=1)
    settings.SECRET_KEY = "a former secret"
    one, other = (assembled(3, name=name, tuning=Tuning(look_interval=0.0)) for name in ("one", "other"))
    broker = redis_of(one.brokers)
    first, *rest = (schedule_message("l.keyed", limit_key="a key").pk for _ in range(3))
    one.consumer.run_round()
    ((former, number),) = broker.blocked()["default"].items()
    settings.SECRET_KEY, settings.SECRET_KEY_FALLBACKS = "another secret", fallbacks
    for _ in range(2):
        other.consumer.run_round()
    (name, *_) = names_in_redis(KEYED)
    assert broker.blocked() == {"default": {name: number}} != {"default": {former: 2}}
    # An older process beside it uses the former name. Who recognizes that leaves it alone while the limit is full.
    rest.append(schedule_message("l.keyed", limit_key="a key").pk)
    broker.block("default", {former: broker.take("default", 10).tickets})
    for _ in range(2):
        other.consumer.run_round()
    assert (former in broker.blocked()["default"]) is bool(fallbacks)
    end(one, first)
    for message in rest:
        for _ in range(2):
            other.consumer.run_round()
        assert held(other) == [message]
        end(other, message)


@pytest.mark.parametrize("name", [f"{HANDLER}l.keyed", "topic l.keyed", KEYED, "a kind of a later version"])
def test_what_another_version_has_blocked_is_served(
    assembled: Assemble, declare: Declare, broker: RedisBroker, name: str
) -> None:
    declare("l.keyed", limit=1)
    worker = assembled(1, name="worker")
    message = schedule_message("l.keyed", limit_key="a key")
    broker.block("default", {name: broker.take("default", 10).tickets})
    for _ in range(2):
        turn(worker)
    assert held(worker) == [message.pk]


@pytest.mark.parametrize("name", [f"{HANDLER}l.keyed", "topic l.keyed", KEYED, "queue default"])
def test_the_names_are_such_that_version_0_9_0_tries_them(name: str) -> None:
    """It takes a kind that it does not know for one that may have room, and a name of one word for rubbish."""
    for found in names_in_redis(name):
        kind, _space, rest = found.partition(" ")
        assert rest
        assert kind not in ("handler", "topic")


def test_a_limit_key_cannot_be_found_by_trying_all(settings: Any) -> None:
    before = names_in_redis(KEYED)
    assert names_in_redis(KEYED) == before
    settings.SECRET_KEY = "another secret"
    assert names_in_redis(KEYED) != before
    assert names_in_redis(limits.topic_name("l.other", "a key"))[0][-8:] != names_in_redis(KEYED)[0][-8:]
    # A worker may run without a secret.
    settings.SECRET_KEY = ""
    assert names_in_redis(KEYED) == names_in_redis(KEYED) != before


# --- permits that are left, and permits that are left unused ----------------------------------------------------------


def test_a_permit_for_whose_message_there_is_no_thread_waits_for_it(of_one_permit: Parts) -> None:
    worker = of_one_permit
    first, second = (schedule_message("l.one").pk for _ in range(2))
    turn(worker)
    assert held(worker) == [first]
    others = [schedule_message("t.ok", priority=1).pk for _ in range(2)]
    redis_of(worker.brokers).flush()
    end(worker, first)
    turn(worker)
    assert sorted(held(worker)) == others
    end(worker, *others)
    turn(worker)
    assert held(worker) == [second]


def test_a_retry_that_begins_before_anybody_heard_of_it_frees_its_permit_at_its_own_end(
    of_one_permit: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = of_one_permit
    first = schedule_message("l.one").pk
    turn(worker)

    def publish_and_run(*arguments: Any) -> None:
        publish_scheduled(*arguments)
        redis_of(worker.brokers).flush()
        turn(worker)

    monkeypatch.setattr(recorder, "publish_scheduled", publish_and_run)
    end(worker, first, outcome=Retry(timedelta(0), "later"))
    second = schedule_message("l.one").pk
    redis_of(worker.brokers).flush()
    turn(worker)
    assert held(worker) == [first]
    end(worker, first)
    turn(worker)
    assert held(worker) == [second]
