"""The clocks of Redis and the record differ: the record's clock decides, and the clock of Redis is corrected.

Each test runs against a Redis whose clock is set by libfaketime, and with a clock of Redis that the broker is given.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from django.db import OperationalError

from django_delayq import schedule_message
from django_delayq.broker.base import Entry
from django_delayq.broker.redis import RedisBroker
from django_delayq.core.clock import SECOND, to_tenths
from django_delayq.core.findings import Finding, Level
from django_delayq.core.states import State
from django_delayq.inspector import diagnostics
from django_delayq.models import Message, Transition
from django_delayq.project import conf
from django_delayq.record import transitions
from django_delayq.worker.claim.consumer import Consumer
from django_delayq.worker.processes.assembly import Parts
from django_delayq.worker.upkeep import loader as loading
from django_delayq.worker.upkeep.loader import Loader
from tests.support.assembled import Assemble
from tests.support.skewed import SkewedRedis
from tests.support.workers import eventually

pytestmark = pytest.mark.django_db(transaction=True)

DB, QUEUE, OTHER = "default", "default", "other"
HOUR = 3600.0
# A measurement is as exact as its round trips are short. A busy machine may make them so many seconds long.
ERROR = 12


class GivenClock(RedisBroker):
    """A broker that gives Redis the time, so many seconds ahead of this host's clock."""

    ahead = 0.0

    @property
    def now(self) -> int:
        return int((time.time() + self.ahead) * SECOND)

    @now.setter
    def now(self, value: object) -> None:
        pass


class Skewed:
    """A worker of two queues, assembled but not running, with the Redis that it uses and a way to set its clock."""

    def __init__(self, parts: Parts, broker: RedisBroker, set_ahead: Callable[[float], None]) -> None:
        self.parts = parts
        self.broker = broker
        self.set_ahead = set_ahead
        parts.brokers.redis = broker
        self.loader = Loader(DB, parts.brokers, "w")

    @property
    def consumer(self) -> Consumer:
        return self.parts.consumer

    def load(self) -> None:
        """Tick the loader as after its interval."""
        self.loader._measured = -loading.SKEW_INTERVAL
        self.loader.tick()

    def put(self, message: Message) -> None:
        self.broker.put(message.queue, [Entry.at(message.pk, message.due_at, message.priority)])

    def correction(self) -> float:
        """Return by how many seconds Redis corrects its clock."""
        return self.broker.read_meta().skew_tenths / SECOND

    def due_there(self, message: Message) -> int | None:
        """Return the due tenth at which the message waits in Redis."""
        return self.broker.places(message.queue, [message.pk])[0].delayed_tenths


@pytest.fixture(params=["libfaketime", "given"])
def skewed(
    request: pytest.FixtureRequest, redis_client: redis.Redis, assembled: Assemble, settings: Any
) -> Iterator[Skewed]:
    if request.param == "libfaketime":
        with SkewedRedis() as server:
            settings.DELAYQ = {**settings.DELAYQ, "REDIS": server.url}
            broker = RedisBroker(conf.get(), DB, timeout=5)
            yield Skewed(assembled(threads=10, queues=(QUEUE, OTHER)), broker, server.set_ahead)
    else:
        given = GivenClock(conf.get(), DB, timeout=5)

        def set_ahead(seconds: float) -> None:
            given.ahead = seconds

        yield Skewed(assembled(threads=10, queues=(QUEUE, OTHER)), given, set_ahead)


def state(message: Message) -> State:
    return State(Message.objects.get(pk=message.pk).state)


def claims(message: Message) -> list[Transition]:
    return list(message.transitions.filter(to_state=State.RUNNING))


@pytest.mark.parametrize("ahead", [HOUR, -30.0])
def test_a_loader_corrects_the_clock_of_redis_to_that_of_the_record(skewed: Skewed, ahead: float) -> None:
    skewed.set_ahead(ahead)
    skewed.load()
    skewed.load()
    before = to_tenths(transitions.now(DB))
    now = skewed.broker.now_tenths()
    assert skewed.correction() == pytest.approx(-ahead, abs=ERROR)
    assert before - ERROR * SECOND <= now <= to_tenths(transitions.now(DB)) + ERROR * SECOND


@pytest.mark.parametrize("ahead", [HOUR, -30.0])
def test_a_message_of_a_skewed_redis_is_claimed_when_due_and_not_before(skewed: Skewed, ahead: float) -> None:
    skewed.set_ahead(ahead)
    due = schedule_message("t.ok", expires="1m")
    later = schedule_message("t.ok", delay="5m")
    skewed.load()
    for message in (due, later):
        skewed.put(message)
    skewed.consumer.turn()
    assert (state(due), state(later)) == (State.RUNNING, State.SCHEDULED)
    skewed.consumer.turn()
    assert skewed.due_there(later) == to_tenths(later.due_at)
    assert state(later) == State.SCHEDULED


def test_a_claim_does_not_believe_a_redis_whose_clock_was_set_ahead(skewed: Skewed) -> None:
    skewed.load()
    skewed.set_ahead(HOUR)
    message = schedule_message("t.ok", delay="5m")
    skewed.put(message)
    assert skewed.broker.places(QUEUE, [message.pk])[0].ready_tenths is not None
    # The refused id goes to its true due time, and the clock is corrected at once: the id does not come back.
    skewed.consumer.turn()
    assert state(message) == State.SCHEDULED
    assert skewed.due_there(message) == to_tenths(message.due_at)
    assert skewed.correction() == pytest.approx(-HOUR, abs=ERROR)
    assert skewed.broker.take(QUEUE, 10).tickets == []


def test_a_put_with_a_clock_set_ahead_is_taken_when_due(skewed: Skewed) -> None:
    """Redis believed that the message was due. Its clock was corrected before the first take."""
    skewed.load()
    skewed.set_ahead(HOUR)
    message = schedule_message("t.ok", delay="5m")
    skewed.put(message)
    skewed.load()
    assert skewed.consumer.turn() > 0
    assert (claims(message), skewed.due_there(message)) == ([], to_tenths(message.due_at))


def test_a_clock_that_is_set_is_followed_by_the_next_measurement(skewed: Skewed) -> None:
    skewed.load()
    # A small step is followed without a load.
    for ahead in (HOUR, -HOUR, 0.0, 30.0, -30.0):
        skewed.set_ahead(ahead)
        skewed.load()
        assert skewed.correction() == pytest.approx(-ahead, abs=ERROR)
        message = schedule_message("t.ok")
        skewed.put(message)

        def begins(message: Message = message) -> bool:
            skewed.consumer.turn()
            return state(message) == State.RUNNING

        # Redis may still lag by what the measurement was out by. Each step is longer than this wait.
        eventually(begins, "it is claimed", timeout=25)


def test_clocks_that_agree_are_not_corrected(redis_client: redis.Redis, assembled: Assemble) -> None:
    parts = assembled()
    broker = parts.brokers.redis
    assert broker is not None
    loader = Loader(DB, parts.brokers, "w")
    for _tick in range(5):
        loader._measured = -loading.SKEW_INTERVAL
        loader.tick()
    assert broker.read_meta().skew_tenths == 0


def test_the_log_tells_once_that_clocks_differ_and_once_that_they_agree(
    skewed: Skewed, caplog: pytest.LogCaptureFixture
) -> None:
    def told() -> list[str]:
        lines = [record.getMessage() for record in caplog.records if "clock" in record.getMessage()]
        caplog.clear()
        return lines

    skewed.load()
    assert told() == []
    skewed.set_ahead(HOUR)
    skewed.load()
    skewed.load()
    (line,) = told()
    assert "ahead of the database's" in line
    skewed.set_ahead(0)
    skewed.load()
    assert told() == ["The clocks of Redis and the database agree again"]


def test_a_check_warns_of_clocks_that_differ(skewed: Skewed) -> None:
    def finding() -> Finding:
        found = diagnostics.check(DB, skewed.broker, diagnostics.Thresholds())
        return next(each for each in found if each.name == "Redis clock")

    assert finding().level == Level.OK
    skewed.set_ahead(-30)
    assert finding().level == Level.WARN
    assert "behind the database's" in finding().detail


def test_a_loader_goes_on_while_the_database_is_away(skewed: Skewed, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(using: str) -> Any:
        raise OperationalError

    skewed.load()
    monkeypatch.setattr(transitions, "now", fail)
    tick = skewed.broker.read_meta().tick
    skewed.load()
    skewed.load()
    assert skewed.broker.read_meta().tick > tick
    assert skewed.parts.brokers.current() is skewed.broker
