"""Ids whose topics this worker does not know: for how long they are parked, and when they are fetched."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import pytest
from django.utils import timezone

from django_delayq import schedule_message
from django_delayq.broker.keys import BAND
from django_delayq.broker.redis import RedisBroker
from django_delayq.core.clock import SECOND
from django_delayq.models import Worker
from django_delayq.project import conf
from django_delayq.record.sql.rows import Ticket
from django_delayq.worker.claim import consumer, unknown_topics
from django_delayq.worker.claim.unknown_topics import LONGEST_HAND_OVER, NewTopics
from django_delayq.worker.processes.assembly import Parts
from django_delayq.worker.upkeep.loader import Loader
from tests.support.claims import DB
from tests.support.workers import PATIENCE, eventually

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("puts_are_flushed")]

NEW = "t.unheard_of"


def redis_of(parts: Parts) -> RedisBroker:
    assert isinstance(parts.brokers.redis, RedisBroker)
    return parts.brokers.redis


@pytest.fixture
def stray(parts: Parts) -> int:
    """A message that is ready in Redis and whose topic has no handler here."""
    message = schedule_message(NEW)
    make_ready(parts, message.pk)
    return message.pk


def make_ready(parts: Parts, pk: int) -> None:
    broker = redis_of(parts)
    k = broker.keys("default")
    broker.client.zrem(k.delayed, str(pk))
    broker.client.zadd(k.ready, {str(pk): 100 * BAND + broker.now_tenths()})


def load(parts: Parts) -> None:
    Loader(DB, parts.brokers, "w").tick()


def live_worker(*topics: str, queue: str = "default", seen: float = 0.0) -> None:
    now = timezone.now()
    Worker.objects.create(
        name="another",
        host="h",
        pid=1,
        queues=[queue],
        topics=list(topics),
        started_at=now,
        seen_at=now - timedelta(seconds=seen),
    )


@pytest.fixture
def parked(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds for which the consumer parks ids, which it really does."""
    broker = redis_of(parts)
    park, times = broker.park, list[float]()

    def note(queue: str, tickets: Sequence[Ticket], seconds: float) -> None:
        times.append(seconds)
        park(queue, tickets, seconds)

    monkeypatch.setattr(broker, "park", note)
    return times


def is_parked(parts: Parts, pk: int) -> bool:
    """Have the consumer take the id, and tell whether it is delayed again."""
    parts.consumer.turn()
    return redis_of(parts).places("default", [pk])[0].delayed_tenths is not None


def test_an_id_is_parked_for_a_moment_that_grows_while_another_worker_knows_its_topic(
    parts: Parts, stray: int, parked: list[float]
) -> None:
    live_worker(NEW)
    for _time in range(12):
        assert is_parked(parts, stray)
        make_ready(parts, stray)
    assert parked == [0, 0.05, 0.1, 0.2, 0.4, 0.8] + [LONGEST_HAND_OVER] * 6


@pytest.mark.parametrize(
    "known",
    [{}, {"seen": 60.0}, {"queue": "elsewhere"}, {"topics": "t.other"}],
    ids=["nobody", "dead", "queue", "topic"],
)
def test_an_id_is_parked_for_long_while_no_live_worker_of_the_queue_knows_its_topic(
    parts: Parts, stray: int, parked: list[float], known: dict[str, object]
) -> None:
    if known:
        topics = str(known.get("topics", NEW))
        live_worker(topics, queue=str(known.get("queue", "default")), seen=float(str(known.get("seen", 0))))
    for _time in range(4):
        assert is_parked(parts, stray)
        make_ready(parts, stray)
    assert parked == [30, 60, 120, 120]


def test_a_worker_that_sleeps_hears_of_an_id_that_is_handed_over(parts: Parts, stray: int) -> None:
    live_worker(NEW)
    broker = redis_of(parts)
    assert is_parked(parts, stray)
    assert broker.client.llen(broker.keys("default").wake) == 1


def test_an_id_is_left_to_the_worker_that_gets_the_wake_up(
    parts: Parts, stray: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This test is the other worker, and comes late. The consumer would take the id again only after a minute."""
    monkeypatch.setattr(consumer, "LEFT_TO_OTHERS", 60.0)
    live_worker(NEW)
    other = RedisBroker(conf.get(), DB, timeout=PATIENCE)
    wake = other.keys("").wake_all
    parts.consumer.start()
    try:
        eventually(lambda: parts.consumer.unknown_topics._times and other.client.llen(wake), "there is a wake-up")
        assert other.listen(None, PATIENCE)
        assert [ticket.id for ticket in other.take("default", 10).tickets] == [stray]
        assert parts.consumer.unknown_topics._times == {stray: 0}
    finally:
        other.close()
        parts.consumer.stop()
        parts.consumer.join()


def test_ids_beyond_those_that_are_remembered_begin_anew(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unknown_topics, "MOST_REMEMBERED", 2)
    strays = parts.consumer.unknown_topics
    assert [strays._time(pk, is_known=True) for pk in (1, 2, 1, 3, 1, 2)] == [0, 0, 0.05, 0, 0.1, 0]


def test_a_new_worker_fetches_the_parked_ids_of_a_topic_that_only_it_knows(parts: Parts) -> None:
    broker = redis_of(parts)
    load(parts)
    message = schedule_message("t.ok")
    k = broker.keys("default")

    def park() -> None:
        broker.client.zrem(k.ready, str(message.pk))
        broker.client.zadd(k.delayed, {str(message.pk): broker.now_tenths() + 600 * SECOND})

    def is_ready() -> bool:
        broker.promote("default")
        return broker.places("default", [message.pk])[0].ready_tenths is not None

    service = NewTopics(DB, parts.brokers, lambda: ("default",), "w")
    for _tick in range(2):
        # Another worker may have parked it by an answer from before this one's start.
        park()
        service.tick()
        assert is_ready()
    park()
    service.tick()
    assert not is_ready()


def test_a_worker_leaves_the_ids_of_topics_that_others_know_where_they_are(parts: Parts) -> None:
    broker = redis_of(parts)
    load(parts)
    live_worker("t.ok")
    message = schedule_message("t.ok")
    broker.remove("default", [message.pk])
    NewTopics(DB, parts.brokers, lambda: ("default",), "w").tick()
    assert broker.size("default").total == 0
