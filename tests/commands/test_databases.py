"""Databases that cannot keep messages, and errors of databases that can: each is told in a sentence of its own."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.db import DatabaseError, OperationalError, connection, connections

from django_delayq import schedule_message
from django_delayq.record import sql
from django_delayq.record.sql.troubles import Trouble, in_words, trouble
from testproject.servers import PostgresServer
from tests.support.commands import run
from tests.support.workers import ROOT

REFUSAL = (
    "django-delayq keeps messages in PostgreSQL or SQLite, and the database 'default' is MySQL:"
    " give the app delayq a database of its own with a database router."
)
Manage = Callable[..., subprocess.CompletedProcess[str]]


# --- another vendor ---------------------------------------------------------------------------------------------------


@pytest.fixture
def on_mysql(tmp_path: Path) -> Manage:
    """Run a command in a project whose database calls itself MySQL."""
    file = str(tmp_path / "database")

    def manage(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "DJANGO_SETTINGS_MODULE": "tests.support.other_vendor.settings",
            "DELAYQ_TEST_OTHER_VENDOR": file,
        }
        command = [sys.executable, "-m", "django", *arguments]
        answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        with sqlite3.connect(file) as database:
            names = {row[0] for row in database.execute("SELECT name FROM sqlite_master")}
        database.close()
        assert not [name for name in names if name.startswith("delayq_")], "something was made"
        return answer

    return manage


@pytest.mark.parametrize(
    "arguments",
    [("migrate", "delayq", "--skip-checks"), ("run_delayq", "--skip-checks"), ("delayq_stats",)],
    ids=" ".join,
)
def test_each_command_refuses_another_vendor_in_one_sentence(on_mysql: Manage, arguments: tuple[str, ...]) -> None:
    answer = on_mysql(*arguments)
    assert answer.stderr.strip().splitlines()[-1] in (REFUSAL, f"CommandError: {REFUSAL}")
    assert "Traceback" not in answer.stderr
    assert answer.returncode == (1 if arguments[0] == "migrate" else 78)


def test_the_system_check_refuses_another_vendor(on_mysql: Manage) -> None:
    answer = on_mysql("check", "--tag", "delayq")
    assert answer.returncode == 1
    assert "(delayq.E011) django-delayq keeps messages in PostgreSQL or SQLite, and the database" in answer.stderr
    assert "HINT: Give the app delayq a database of its own with a database router." in answer.stderr


@pytest.mark.django_db
def test_a_call_refuses_another_vendor_and_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sql.statements.cache_clear()
    monkeypatch.setattr(type(connection._connections["default"]), "vendor", "oracle")  # type: ignore[attr-defined]
    try:
        with pytest.raises(ImproperlyConfigured, match="keeps messages in PostgreSQL or SQLite"):
            schedule_message("t.ok")
    finally:
        sql.statements.cache_clear()


# --- errors of a database that can ------------------------------------------------------------------------------------


@pytest.fixture
def connect(postgres_server: PostgresServer, transactional_db: None) -> Iterator[Callable[..., None]]:
    """A function that has this process use an empty database, with other settings of its connection.

    There is a user "guest" who may do nothing in it.
    """
    given = connection.settings_dict
    own = dict(given)

    def use(**changed: Any) -> None:
        connection.close()
        given.update({**own, "NAME": "fresh", **changed})

    with psycopg.connect(postgres_server.url, autocommit=True) as owner:
        owner.execute("CREATE DATABASE fresh")
        owner.execute("CREATE ROLE guest LOGIN")
        try:
            yield use
        finally:
            use(NAME=own["NAME"])
            owner.execute("DROP DATABASE fresh WITH (FORCE)")
            owner.execute("DROP ROLE guest")


def test_a_command_tells_missing_tables_rights_and_servers_apart(connect: Callable[..., None], settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": None}
    connect()
    missing = run("delayq_stats")
    assert (missing.code, missing.err.startswith("The tables are missing or out of date: run migrate")) == (78, True)
    call_command("migrate", verbosity=0)
    schedule_message("t.ok")
    connect(USER="guest")
    for words in (["delayq_stats"], ["run_delayq", "--once"], ["delayq_act", "cancel", "1"]):
        forbidden = run(*words)
        assert forbidden.code == 78, forbidden.err
        assert "The user of the database lacks a right: grant it: permission denied for table" in forbidden.err
    connect(OPTIONS={"options": "-c default_transaction_read_only=on"})
    for words in (["delayq_queue", "pause", "default"], ["run_delayq", "--once"]):
        refused = run(*words)
        assert refused.code == 1, refused.out
        assert refused.err.startswith("The database takes no writes: cannot execute")
    connect(PORT=1)
    for words in (["delayq_stats"], ["run_delayq", "--once"]):
        nowhere = run(*words)
        assert (nowhere.code, nowhere.err.startswith("The database does not answer: ")) == (69, True)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("SELECT * FROM there_is_none", Trouble.OUTDATED),
        ("SELECT there_is_none FROM delayq_message", Trouble.OUTDATED),
        ("INSERT INTO delayq_identity (id, value) VALUES (2, '00000000000000000000000000000000')", Trouble.REFUSED),
    ],
)
def test_an_error_of_a_statement_is_not_told_as_a_database_that_is_away(statement: str, expected: Trouble) -> None:
    with pytest.raises(DatabaseError) as caught, connection.cursor() as cursor:
        cursor.execute(statement)
    assert trouble(caught.value) == expected
    assert in_words(caught.value).startswith(f"{expected}: ")


@pytest.mark.django_db(transaction=True)
def test_a_database_that_ends_its_connections_is_away(postgres_server: PostgresServer) -> None:
    with psycopg.connect(postgres_server.url, autocommit=True) as killer, connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        killer.execute("SELECT pg_terminate_backend(%s, 5000)", cursor.fetchone())
        with pytest.raises(OperationalError) as caught:
            cursor.execute("SELECT 1")
    connections.close_all()
    assert trouble(caught.value) == Trouble.AWAY
