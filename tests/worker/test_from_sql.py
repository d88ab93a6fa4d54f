"""Messages that other programs schedule in SQL are delivered: exactly those that were committed, once, and on time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
import redis
from django.db import connection

from django_delayq.core.states import State
from django_delayq.models import Message
from django_delayq.models.messages import Unannounced
from django_delayq.worker.shared.broker_switch import BrokerSwitch
from django_delayq.worker.upkeep.loader import Loader
from django_delayq.worker.upkeep.sweeper import Sweeper
from django_delayq.worker.upkeep.upkeep_tuning import UpkeepTuning
from testproject.binaries import PGBOUNCER_ADVICE
from testproject.servers import PgBouncerServer, PostgresServer, find_pgbouncer
from tests.support.claims import DB
from tests.support.from_sql import cancel, schedule
from tests.support.in_redis import held
from tests.support.processes import Gate, Start
from tests.support.record_of import effects_per_message, is_early, log_of, once_each, wait_until, wait_until_all

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.postgresql("SQLite has no functions"),
    pytest.mark.usefixtures("redis_client"),
]

TRIGGER = """
CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY, status text DEFAULT 'new');
CREATE FUNCTION close_later() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM delayq_schedule('t.tx', jsonb_build_object('order', NEW.id), delay => '2 seconds');
    RETURN NEW;
END $$;
CREATE TRIGGER close_later AFTER INSERT ON orders FOR EACH ROW EXECUTE FUNCTION close_later();
"""


@pytest.fixture
def elsewhere() -> Iterator[Any]:
    """The connection of a program that knows neither Django nor us, with a table whose trigger schedules."""
    with psycopg.connect(**connection.get_connection_params() | {"cursor_factory": None, "context": None}) as other:
        other.execute(TRIGGER)
        other.commit()
        yield other
        other.rollback()
        other.execute("DROP TABLE orders; DROP FUNCTION close_later")


def test_a_trigger_schedules_exactly_what_its_transaction_commits(start: Start, timed_by: str, elsewhere: Any) -> None:
    worker = start()
    elsewhere.execute("INSERT INTO orders DEFAULT VALUES")
    elsewhere.rollback()
    elsewhere.execute("INSERT INTO orders SELECT FROM generate_series(1, 50)")
    elsewhere.execute("SAVEPOINT s")
    elsewhere.execute("INSERT INTO orders DEFAULT VALUES")
    elsewhere.execute("ROLLBACK TO s")
    elsewhere.commit()
    wait_until_all(State.CONSUMED, 50)
    messages = list(Message.objects.all())
    assert effects_per_message() == once_each(messages)
    for message in messages:
        [created, claim, _end] = log_of(message)
        assert re.fullmatch(r"sql:\w+", created.actor)
        assert not is_early(claim)
    # They were announced in time, and no sweep found them overdue.
    assert worker.count("that Redis had lost") == 0
    assert worker.stop() == 0
    assert timed_by == "no-redis" or not Unannounced.objects.exists()


def test_a_worker_is_told_of_a_cancel_from_sql(start: Start, gate: Gate) -> None:
    worker = start()
    waiting = schedule("t.tx", delay="1 hour", key="k")
    running = gate.running("t.gate")
    assert cancel(topic="t.tx", key="k") == "cancelled"
    assert cancel(running.pk) == "requested"
    gate.open()
    wait_until(running, State.CONSUMED)
    assert wait_until(Message.objects.get(pk=waiting), State.CANCELLED).deliveries == 0
    assert worker.stop() == 0


def test_a_pooler_in_transaction_mode_is_no_matter(start: Start, postgres_server: PostgresServer) -> None:
    if find_pgbouncer() is None:
        pytest.skip(f"no pgbouncer found. {PGBOUNCER_ADVICE}")
    worker = start()
    with PgBouncerServer(postgres_server) as pooler, psycopg.connect(pooler.url, prepare_threshold=0) as other:
        for number in range(5):
            other.execute("SELECT delayq_schedule('t.tx', %s)", [psycopg.types.json.Jsonb({"number": number})])
            other.commit()
    wait_until_all(State.CONSUMED, 5)
    assert worker.stop() == 0


# --- the sweeper ------------------------------------------------------------------------------------------------------


class Upkeep:
    """The services of a process that tell Redis."""

    def __init__(self, brokers: BrokerSwitch) -> None:
        self.loader = Loader(DB, brokers, "host/1")
        self.sweeper = Sweeper(DB, brokers, lambda: ("default",), lambda: ["t.tx"])


@pytest.fixture
def upkeep() -> Iterator[Upkeep]:
    brokers = BrokerSwitch(DB, dict)
    yield Upkeep(brokers)
    brokers.close()


def test_the_next_tick_tells_redis_of_what_is_due_later(upkeep: Upkeep, redis_client: redis.Redis) -> None:
    upkeep.loader.tick()
    soon, other = schedule("t.tx", delay="1 minute"), schedule("t.tx", delay="1 minute", queue="mail")
    far, gone = schedule("t.tx", delay="1 year"), schedule("t.tx", delay="1 minute")
    cancel(gone)
    upkeep.sweeper.tick()
    assert held(redis_client) == {soon}
    assert held(redis_client, "mail") == {other}
    assert Message.objects.get(pk=far).state == State.SCHEDULED
    assert not Unannounced.objects.exists()


def test_more_than_one_tick_can_tell_come_at_once(upkeep: Upkeep, redis_client: redis.Redis) -> None:
    upkeep.sweeper.tuning = UpkeepTuning(announced_together=2)
    upkeep.loader.tick()
    ids = {schedule("t.tx", delay="1 minute") for _ in range(5)}
    waits = [upkeep.sweeper.tick() for _ in range(3)]
    assert waits[:2] == [0.0, 0.0] < waits[2:]
    assert held(redis_client) == ids


def test_before_a_load_nothing_is_told_and_the_load_tells_it(upkeep: Upkeep, redis_client: redis.Redis) -> None:
    pk = schedule("t.tx", delay="1 minute")
    upkeep.sweeper.tick()
    assert [one.pk for one in Unannounced.objects.all()] == [pk]
    upkeep.loader.tick()
    upkeep.sweeper.tick()
    assert held(redis_client) == {pk}
    assert not Unannounced.objects.exists()


def test_a_redis_that_is_away_is_told_later(
    upkeep: Upkeep, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    upkeep.loader.tick()
    pk = schedule("t.tx", delay="1 minute")
    with monkeypatch.context() as away:
        away.setattr("django_delayq.broker.redis.RedisBroker.fill", refuse)
        upkeep.sweeper.tick()
    assert Unannounced.objects.filter(pk=pk).exists()
    upkeep.loader.tick()
    upkeep.sweeper.tick()
    assert held(redis_client) == {pk}
    assert not Unannounced.objects.exists()


def refuse(*_arguments: Any) -> None:
    from django_delayq.core.exceptions import BrokerUnavailable

    raise BrokerUnavailable("away")
