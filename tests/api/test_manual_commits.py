"""In a project that commits by hand, messages are published, and signals are sent, with ``connection.commit()``.

It commits by hand after ``set_autocommit(False)``, or everywhere because DATABASES has ``AUTOCOMMIT: False``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from django.db import connection, transaction

from django_delayq import (
    Verdict,
    cancel_message,
    pause_queue,
    requeue_message,
    reschedule_message,
    schedule_message,
    schedule_messages,
    signals,
)
from django_delayq.core.states import State
from django_delayq.models import Message
from django_delayq.record.sql.sessions import statement_timeout
from tests.broker.bench import redis_broker
from tests.support.in_redis import held
from tests.support.receivers import heard
from tests.support.steps import TOPIC

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("puts_are_flushed")]


@pytest.fixture(autouse=True)
def _horizon(redis_client: redis.Redis) -> None:
    redis_broker().close()


@pytest.fixture(autouse=True, params=["by a call", "by the settings"])
def _manual(_horizon: None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End transactions by hand in the test."""
    if request.param == "by the settings":
        monkeypatch.setitem(connection.settings_dict, "AUTOCOMMIT", False)
        connection.close()
    connection.ensure_connection()
    if request.param == "by a call":
        transaction.set_autocommit(False)
    assert not transaction.get_autocommit()
    yield
    transaction.rollback()
    transaction.set_autocommit(True)


def test_a_message_is_published_after_the_commit_and_not_before(redis_client: redis.Redis) -> None:
    first = schedule_message(TOPIC, delay=60).pk
    rest = [message.pk for message in schedule_messages([{"topic": TOPIC, "delay": 60}] * 3)]
    assert held(redis_client) == set()
    transaction.commit()
    assert held(redis_client) == {first, *rest}
    assert connection.run_on_commit == []
    assert "commit" not in vars(connection)


def test_a_message_that_is_rolled_back_is_not_published(redis_client: redis.Redis) -> None:
    schedule_message(TOPIC, delay=60)
    transaction.rollback()
    kept = schedule_message(TOPIC, delay=60).pk
    transaction.commit()
    assert held(redis_client) == {kept}


def test_only_the_messages_of_a_rolled_back_savepoint_are_not_published(redis_client: redis.Redis) -> None:
    kept = schedule_message(TOPIC, delay=60).pk
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        schedule_message(TOPIC, delay=60)
        raise ZeroDivisionError
    with transaction.atomic():
        inside = schedule_message(TOPIC, delay=60).pk
    assert held(redis_client) == set()
    transaction.commit()
    assert held(redis_client) == {kept, inside}


def test_every_verb_answers_and_takes_effect_with_the_commit(redis_client: redis.Redis) -> None:
    gone, moved = (schedule_message(TOPIC, delay=60).pk for _ in range(2))
    transaction.commit()
    assert cancel_message(gone).verdict == Verdict.CANCELLED
    assert reschedule_message(moved, delay="2h").verdict == Verdict.RESCHEDULED
    assert held(redis_client) == {gone, moved}
    transaction.commit()
    assert held(redis_client) == set()
    assert requeue_message(gone).verdict == Verdict.REQUEUED
    pause_queue("other")
    transaction.commit()
    assert held(redis_client) == {gone}
    assert Message.objects.get(pk=gone).state == State.SCHEDULED


def test_signals_are_sent_after_the_commit() -> None:
    with heard(signals.message_scheduled, signals.message_cancelled) as sent:
        pk = schedule_message(TOPIC, delay=60).pk
        assert cancel_message(pk)
        assert sent == []
        transaction.commit()
    assert [facts["message_id"] for facts in sent] == [pk, pk]


def test_a_function_of_the_project_waits_as_django_has_it_wait(redis_client: redis.Redis) -> None:
    called: list[str] = []
    with transaction.atomic():
        transaction.on_commit(lambda: called.append("theirs"))
        pk = schedule_message(TOPIC, delay=60).pk
    transaction.commit()
    assert held(redis_client) == {pk}
    assert called == []
    transaction.set_autocommit(True)
    assert called == ["theirs"]
    transaction.set_autocommit(False)


@pytest.mark.postgresql("SQLite has no such limit")
def test_a_limit_on_the_time_of_statements_ends_with_its_block_and_not_with_the_transaction() -> None:

    def limit() -> object:
        with connection.cursor() as cursor:
            cursor.execute("SHOW statement_timeout")
            return cursor.fetchone()

    before = limit()
    with statement_timeout("default", 12_345):
        assert limit() != before
    assert limit() == before
