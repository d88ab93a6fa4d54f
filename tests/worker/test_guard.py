"""The worker recognises in a handler's SQL what ends a transaction or changes the session, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection
from psycopg.sql import SQL, Identifier, Literal

from django_delayq.worker.shared import guard
from django_delayq.worker.shared.guard import LONG


def read(sql: Any) -> guard.Words:
    return guard.read(sql, connection)


@pytest.mark.parametrize(
    "sql",
    [
        "COMMIT",
        " commit work ;",
        "END",
        "Abort",
        "ROLLBACK",
        "rollback work",
        "ROLLBACK AND CHAIN",
        "COMMIT AND CHAIN",
        "COMMIT PREPARED 'x'",
        "PREPARE TRANSACTION 'x'",
        "/* a */ -- b\n COMMIT",
        "SELECT 1; COMMIT",
        "SELECT 'it''s'; COMMIT; SELECT 'x'",
        "SELECT E'it\\'s'; COMMIT; SELECT 'x'",
        "SELECT 'C:\\'; COMMIT; SELECT 'x'",
        """UPDATE "it's" SET a = 1; COMMIT; SELECT 'x'""",
        "CREATE TABLE a (b int); COMMIT",
        "CREATE FUNCTION a() RETURNS int BEGIN ATOMIC SELECT 1; END; COMMIT",
        "SELECT " + "1, " * LONG + "1; COMMIT",
    ],
    ids=lambda sql: sql[:30],
)
def test_the_end_of_a_transaction_is_seen(sql: str) -> None:
    assert read(sql).ends_transaction


@pytest.mark.parametrize(
    "sql",
    [
        "ROLLBACK TO SAVEPOINT a",
        "rollback work to a",
        "ROLLBACK TRANSACTION TO SAVEPOINT a",
        "RELEASE SAVEPOINT a",
        "SAVEPOINT a",
        "SELECT CASE WHEN true THEN 1 ELSE 2\nEND",
        "UPDATE a SET b = 'x; COMMIT' WHERE c",
        "INSERT INTO commit VALUES (1)",
        "SELECT 1 -- ; COMMIT",
        "SELECT /* ; COMMIT */ 1",
        "DO $$ BEGIN PERFORM 1; END $$",
        "DO $body$ BEGIN PERFORM 1; END; $body$",
        "CREATE TRIGGER t AFTER INSERT ON a BEGIN SELECT 1; END",
        "CREATE FUNCTION a() RETURNS int BEGIN ATOMIC SELECT CASE WHEN true THEN 1 END; SELECT 2; END",
        """UPDATE "a;COMMIT" SET b = 1""",
        "ENDING",
        "BEGIN",
        "",
        ";;",
    ],
)
def test_sql_that_only_looks_like_an_end_of_transaction_is_left_alone(sql: str) -> None:
    assert not read(sql).ends_transaction


@pytest.mark.parametrize(
    "sql",
    [
        "SET search_path TO a",
        "set session time zone 'UTC'",
        "SET ROLE nobody",
        'SET "a"."b" = 1',
        "RESET ALL",
        "DISCARD ALL",
        "LISTEN a",
        "PREPARE a AS SELECT 1",
        "DEALLOCATE ALL",
        "CREATE TEMP TABLE a (b int)",
        "create local temporary table a (b int)",
        "CREATE OR REPLACE TEMP VIEW a AS SELECT 1",
        "CREATE TEMP TRIGGER t AFTER INSERT ON a BEGIN SELECT 1; END",
        "CREATE TABLE pg_temp.a (b int)",
        "SELECT 1 INTO TEMP a",
        "SELECT 1 INTO TEMPORARY TABLE a",
        "DO $$ BEGIN EXECUTE 'SET a.b = 1'; END $$",
        "SELECT set_config('a.b', 'c', false)",
        "SELECT set_config('a.b', ', true)', false)",
        "SELECT set_config('a.b', %s, %s)",
        "WITH a AS (SELECT pg_catalog.set_config('a.b', 'c', false)) SELECT 1",
        "SELECT pg_advisory_lock(1)",
        "SELECT pg_try_advisory_lock_shared(1)",
        "PRAGMA foreign_keys = 0",
        "SELECT 1; SET a.b = 1",
    ],
)
def test_a_change_of_the_session_is_seen(sql: str) -> None:
    assert read(sql).changes_session


@pytest.mark.parametrize(
    "sql",
    [
        "SET LOCAL search_path TO a",
        "SET   LOCAL search_path TO a, pg_temp",
        "SELECT set_config('a.b', %s, true)",
        "SET TRANSACTION ISOLATION LEVEL SERIALIZABLE",
        "SET CONSTRAINTS ALL IMMEDIATE",
        "UPDATE a SET b = 1",
        "SELECT 'SET a'",
        "CREATE TABLE temp (a int)",
        "INSERT INTO temperature VALUES (1)",
        "INSERT INTO a VALUES (1) ON CONFLICT DO NOTHING",
        "SELECT pg_advisory_xact_lock(1)",
        "SETTING",
        "PREPARE TRANSACTION 'x'",
        "INSERT INTO a (settings) VALUES ('reset')",
    ],
)
def test_a_setting_that_ends_with_the_transaction_costs_no_connection(sql: str) -> None:
    assert not read(sql).changes_session


@pytest.mark.parametrize("form", [str.encode, SQL, lambda text: SQL("{}{}").format(SQL(text), SQL(""))])
def test_bytes_and_composed_sql_are_read_like_text(form: Any) -> None:
    assert read(form("COMMIT")) == (True, False)
    assert read(form("SET search_path TO a")) == (False, True)
    assert read(form("SELECT 'COMMIT; SET a = 1'")) == (False, False)


def test_what_composed_sql_puts_in_is_no_word() -> None:
    text = "; COMMIT; SET a = 1"
    assert read(SQL("UPDATE {} SET a = {}").format(Identifier(text), Literal(text))) == (False, False)
    assert read(SQL("SET search_path TO {}").format(Identifier(text))) == (False, True)


def test_bytes_in_another_encoding_are_read() -> None:
    assert read("SELECT 'é'; COMMIT".encode("latin-1")) == (True, False)


@pytest.mark.parametrize("sql", [None, 1, ["COMMIT"]], ids=repr)
def test_a_form_that_is_not_known_costs_the_connection(sql: object) -> None:
    assert read(sql) == (False, True)


def test_a_text_of_megabytes_is_read_in_no_time() -> None:
    for sql in ("SELECT " + "'a', " * 2**18 + "1", "SELECT '" + "a" * 2**20, "/*" * 2**16, "$a$" * 2**16):
        read(sql)
