"""A message is inserted with the same result whatever the server has kept of the statement, and in any transaction."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import psycopg
import pytest
from django.db import DataError, IntegrityError, connection, connections, transaction
from django.utils import timezone
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from psycopg.pq import TransactionStatus

from django_delayq import schedule_message
from django_delayq.api.scheduling import checked
from django_delayq.models import Message
from django_delayq.project import validation
from django_delayq.record import transitions
from django_delayq.record.reads import identity
from django_delayq.record.sql.postgresql import COPY_MESSAGES, GIVEN
from django_delayq.record.sql.rows import NewMessage
from django_delayq.record.sql.sessions import IDLE
from tests.support.steps import TOPIC
from tests.support.transactions import lock_table, unfinished, waits_for_a_lock
from tests.support.workers import eventually

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _needs_postgresql() -> None:
    if connection.vendor != "postgresql":
        pytest.skip("needs PostgreSQL")


@pytest.fixture(autouse=True)
def _kept_by_the_server(_needs_postgresql: None) -> Iterator[None]:
    """Insert until the server keeps the plan of the statement, on a connection that no other test has used."""
    identity("default")
    connections.close_all()
    for _ in range(3):
        schedule(0)
    yield
    connections.close_all()


def schedule(number: int, **options: Any) -> Message:
    return schedule_message(TOPIC, {"number": number}, due_at=DUE, **options)


DUE = timezone.now() + timedelta(days=1)


def test_every_column_of_a_new_message_is_in_both_statements() -> None:
    columns = NewMessage("{}", None).columns(DUE).keys()
    copied = COPY_MESSAGES.partition("(")[2].partition(")")[0].replace(",", " ").split()
    assert (columns - GIVEN.keys(), columns - copied) == (set(), set())


def numbers() -> list[int]:
    return list(Message.objects.order_by("pk").values_list("payload__number", flat=True))


def test_a_rollback_costs_no_later_message() -> None:
    for number in (1, 2):
        with transaction.atomic():
            schedule(1)
            transaction.set_rollback(True)
        schedule(number)
        schedule(number)
    assert numbers() == [0, 0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("words", ["DISCARD ALL", "DEALLOCATE ALL"])
def test_a_statement_that_the_server_lost_is_sent_again(words: str) -> None:
    # Past psycopg, as a pooler does it.
    connection.connection.pgconn.exec_(words.encode())
    schedule(1)
    assert numbers() == [0, 0, 0, 1]


def test_a_connection_with_another_encoding_gets_its_texts_in_that() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET client_encoding = 'LATIN1'")
    messages = [schedule_message(TOPIC, {"text": "é"}, due_at=DUE) for _ in range(3)]
    connections.close_all()
    for message in messages:
        message.refresh_from_db()
        assert message.payload == {"text": "é"}


def test_a_message_is_inserted_in_a_pipeline() -> None:
    connection.ensure_connection()
    with connection.connection.pipeline():
        schedule(1)
    assert numbers() == [0, 0, 0, 1]


def test_an_error_is_the_same_when_the_statement_is_kept() -> None:
    new = checked(TOPIC, {"number": 1}, {"due_at": DUE})
    errors = []
    for _ in range(2):
        with pytest.raises(IntegrityError, match="delayq_priority") as caught:
            transitions.insert("default", new._replace(priority=101), "")
        assert isinstance(caught.value.__cause__, psycopg.errors.CheckViolation)
        assert caught.value.__cause__.diag.constraint_name == "delayq_priority"
        errors.append(str(caught.value).splitlines()[0])
        # A new connection keeps no statement.
        connections.close_all()
    assert errors[0] == errors[1]
    with pytest.raises(DataError), transaction.atomic():
        transitions.insert("default", new._replace(topic="x" * 200), "")
    schedule(2)
    assert numbers() == [0, 0, 0, 2]


def lock() -> None:
    lock_table("delayq_message")


def wait_until_it_waits(pid: int) -> None:
    """Return when a server process waits for a lock. Called in another thread."""
    try:
        eventually(lambda: waits_for_a_lock(pid), "the statement waits")
    finally:
        connections.close_all()


@pytest.mark.parametrize("in_transaction", [False, True])
def test_a_statement_that_waits_for_a_lock_can_be_interrupted(in_transaction: bool) -> None:
    main, connected = threading.get_ident(), connection.connection
    pid = connected.info.backend_pid
    assert threading.main_thread().ident == main

    def interrupt() -> None:
        # Nothing but the interrupt ends the call from then on. At any other moment it would end the whole run.
        wait_until_it_waits(pid)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    with unfinished(lock):
        thread.start()
        with pytest.raises(KeyboardInterrupt), transaction.atomic() if in_transaction else nullcontext():
            schedule(1)
        thread.join()
        assert connected.info.transaction_status in (IDLE, TransactionStatus.UNKNOWN)
        if is_left := connected.closed:
            # psycopg gives the server five seconds to stop the statement, which a busy machine may need for other work.
            connection.close()
    schedule(2)
    assert is_left or numbers() == [0, 0, 0, 2]
    assert 2 in numbers()


texts = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=20)
spans = st.timedeltas(timedelta(microseconds=1), timedelta(days=36_500))
news = st.builds(
    partial(NewMessage, value=None, topic=TOPIC, queue="default", headers="{}", key=None, retry=None),
    payload=st.dictionaries(texts, texts | st.integers(-(2**63), 2**63 - 1), max_size=3).map(validation.payload),
    due_at=st.none()
    | st.timedeltas(timedelta(0), timedelta(days=36_500)).map(datetime(2000, 1, 2, tzinfo=UTC).__add__),
    priority=st.integers(-100, 100),
    delay=spans,
    expires=st.none() | spans,
    max_attempts=st.none() | st.integers(1, 10_000),
    timeout=st.none() | st.floats(0, 1e6),
    lease=st.none() | st.floats(1, 86_400),
    limit_key=st.none() | texts,
)


@hypothesis_settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(new=news)
def test_a_kept_statement_writes_the_same_row(new: NewMessage) -> None:
    rows = []
    # The second time at the latest the server has kept the statement.
    for _ in range(3):
        inserted = transitions.insert("default", new, "é")
        assert inserted is not None
        message = Message.objects.get(pk=inserted.id)
        assert (message.due_at, message.created_at) == inserted[1:]
        assert inserted.due_at.tzinfo is UTC
        row = {name: getattr(message, name) for name in COMPARED}
        due = message.due_at if new.due_at else None
        expires = message.expires_at and message.expires_at - message.due_at
        rows.append((row, due, expires))
    assert rows[0] == rows[1] == rows[2]


# What does not depend on the moment.
COMPARED = [
    field.attname
    for field in Message._meta.concrete_fields
    if field.attname not in ("id", "due_at", "created_at", "expires_at")
]
