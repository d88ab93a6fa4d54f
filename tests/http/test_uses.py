"""When a token was last used: who counts, when it is written, and that no call waits for it or fails with it."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from django.core.management import call_command
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_delayq.http import tokens
from django_delayq.http.models import Token
from tests.http.conftest import Wire
from tests.http.servers import Server
from tests.support.broken_statements import broken
from tests.support.commands import run
from tests.support.rows import columns
from tests.support.transactions import lock_table, unfinished
from tests.support.workers import eventually

WRITES = 'UPDATE "delayq_token"'
needs_postgresql = pytest.mark.skipif(connection.vendor != "postgresql", reason="needs locks of tables")


def used_at(text: str) -> datetime | None:
    return Token.objects.get(digest=tokens.digest_of(text)).used_at


def publish(wire: Wire, token: str) -> int:
    return wire("PUT", "/api/ns1/q1", b"x", X_Token=token)[0]


def test_a_call_is_written_and_the_next_ones_are_not(wire: Wire) -> None:
    assert used_at(wire.token) is None
    before = timezone.now()
    assert publish(wire, wire.token) == 201
    at = used_at(wire.token)
    assert at is not None
    assert before - timedelta(seconds=1) <= at <= timezone.now()
    with CaptureQueriesContext(connection) as captured:
        assert [publish(wire, wire.token) for _time in range(3)] == [201] * 3
    assert not [query for query in captured if WRITES in query["sql"]]
    assert used_at(wire.token) == at


def test_it_is_written_again_after_some_minutes(wire: Wire) -> None:
    publish(wire, wire.token)
    before = timezone.now()
    Token.objects.update(used_at=before - tokens.USE_WRITTEN_EVERY)

    def is_written() -> bool:
        publish(wire, wire.token)
        at = used_at(wire.token)
        return at is not None and at >= before

    # A process reads a token again after a second.
    eventually(is_written, "the use is written")


def test_a_call_that_is_refused_counts_too(wire: Wire) -> None:
    made = {
        "other": tokens.make("ns2")[1],
        "over": tokens.make("ns1", lasts=timedelta(days=-1))[1],
        "no right": tokens.make("ns1", ["consume"])[1],
    }
    assert [publish(wire, text) for text in made.values()] == [401, 401, 403]
    assert [name for name, text in made.items() if used_at(text)] == [*made]


def test_a_call_under_asgi_is_written(asgi_server: Server) -> None:
    assert asgi_server.ask("PUT", "/api/ns1/q1", b"x")[0] == 201
    eventually(lambda: used_at(asgi_server.token) is not None, "the use is written")


def test_a_poll_that_waits_is_written_meanwhile(asgi_server: Server) -> None:
    with asgi_server.poll():
        eventually(lambda: used_at(asgi_server.token) is not None, "the use is written")


@needs_postgresql
def test_a_locked_table_holds_up_no_call(wire: Wire) -> None:
    with unfinished(lambda: lock_table("delayq_token", "SHARE ROW EXCLUSIVE")):
        assert publish(wire, wire.token) == 201
    assert used_at(wire.token) is None


def test_a_use_that_cannot_be_written_fails_no_call(wire: Wire) -> None:
    with broken(WRITES):
        assert [publish(wire, wire.token) for _time in range(2)] == [201, 201]
    assert used_at(wire.token) is None


def test_the_command_tells_when_a_token_was_used(wire: Wire) -> None:
    assert f"{wire.token[:8]}… of ns1: publish,consume,manage, never used" in run("delayq_token", "list").out
    publish(wire, wire.token)
    at = used_at(wire.token)
    assert at is not None
    assert f", last used {at:%Y-%m-%dT%H:%M:%S}." in run("delayq_token", "list").out


def test_the_column_comes_and_goes_and_tokens_of_before_count_as_used(wire: Wire) -> None:
    newest = columns("delayq_token")
    call_command("migrate", "delayq_http", "0002", verbosity=0)
    try:
        assert newest - columns("delayq_token") == {"used_at"}
        with CaptureQueriesContext(connection) as captured:
            call_command("migrate", "delayq_http", "0003", verbosity=0)
    finally:
        call_command("migrate", "delayq_http", verbosity=0)
    changes = [query["sql"] for query in captured if 'ALTER TABLE "delayq_token"' in query["sql"]]
    assert len(changes) == 1
    assert "ADD COLUMN" in changes[0]
    assert "NOT NULL" not in changes[0]
    assert used_at(wire.token) is not None
    # A process of before names no such column.
    old = {field.name for field in Token._meta.fields} - {"id", "used_at"}
    values = {name: value for name, value in Token.objects.values().get().items() if name in old} | {"digest": "old"}
    names, holes = ", ".join(values), ", ".join(["%s"] * len(values))
    with connection.cursor() as cursor:
        cursor.execute(f"INSERT INTO delayq_token ({names}) VALUES ({holes})", [*values.values()])
    assert Token.objects.get(digest="old").used_at is None
