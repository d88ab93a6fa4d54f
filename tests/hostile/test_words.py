"""The worker recognises in a handler's SQL the statements that change its session, and only those."""

from __future__ import annotations

import pytest

from django_delayq.worker.guard import LONG, read


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
        "COMMIT PREPARED 'x'",
        "PREPARE TRANSACTION 'x'",
        "/* a */ -- b\n COMMIT",
        "SELECT 1; COMMIT",
        "SELECT 'it''s'; COMMIT; SELECT 'x'",
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
        "RESET ALL",
        "DISCARD ALL",
        "LISTEN a",
        "PREPARE a AS SELECT 1",
        "DEALLOCATE ALL",
        "CREATE TEMP TABLE a (b int)",
        "create local temporary table a (b int)",
        "CREATE OR REPLACE TEMP VIEW a AS SELECT 1",
        "SELECT set_config('a.b', 'c', false)",
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
        "SET TRANSACTION ISOLATION LEVEL SERIALIZABLE",
        "SET CONSTRAINTS ALL IMMEDIATE",
        "UPDATE a SET b = 1",
        "SELECT 'SET a'",
        "CREATE TABLE temp (a int)",
        "SELECT pg_advisory_xact_lock(1)",
        "SETTING",
        "PREPARE TRANSACTION 'x'",
        "INSERT INTO a (settings) VALUES ('reset')",
    ],
)
def test_a_setting_that_ends_with_the_transaction_costs_no_connection(sql: str) -> None:
    assert not read(sql).changes_session


@pytest.mark.parametrize("sql", [None, 1, b"COMMIT", ["COMMIT"]], ids=repr)
def test_a_statement_that_is_no_text_is_left_to_the_database(sql: object) -> None:
    assert read(sql) == (False, False)


def test_a_text_of_megabytes_is_read_in_no_time() -> None:
    for sql in ("SELECT " + "'a', " * 2**18 + "1", "SELECT '" + "a" * 2**20, "/*" * 2**16, "$a$" * 2**16):
        read(sql)
