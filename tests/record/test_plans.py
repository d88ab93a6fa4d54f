"""PostgreSQL keeps the plans of the hot moves, for one message as for many, and they find rows by id."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import DataError, connection, transaction

from django_delayq import schedule_message, schedule_messages
from django_delayq.record import crashes, reads, transitions
from django_delayq.record.sql import statements
from django_delayq.record.sql.postgresql_base import MOST_ROWS_KEPT
from django_delayq.record.sql.rows import BEGINNING, LeaseRenewal
from django_delayq.record.sql.sessions import known_session
from tests.support.limits import Declare, admit_rows
from tests.support.steps import TOPIC, ago, claim, claimed, due, fail, succeed

pytestmark = pytest.mark.django_db

# The server plans five times for given values before it considers keeping a plan for all: each move runs more often.
ROUNDS = 16

KEPT = "SELECT coalesce(sum(generic_plans), 0) FROM pg_prepared_statements WHERE strpos(statement, %s) > 0"


def kept(words: str) -> int:
    """Return how often this connection used a kept plan of the statements with these words."""
    with connection.cursor() as cursor:
        cursor.execute(KEPT, [words])
        return int(cursor.fetchone()[0])


def plan(words: str) -> str:
    """Return the plan that is kept for the statement with these words."""
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL plan_cache_mode = force_generic_plan")
        cursor.execute(
            "SELECT name, cardinality(parameter_types) FROM pg_prepared_statements WHERE strpos(statement, %s) > 0",
            [words],
        )
        name, parameters = cursor.fetchone()
        given = f"({', '.join(['NULL'] * parameters)})" if parameters else ""
        cursor.execute(f"EXPLAIN EXECUTE {name}{given}")
        return "\n".join(row[0] for row in cursor.fetchall())


def succeed_current(pk: int) -> int | None:
    return transitions.succeed_current("default", "default", pk, "a")


CLAIM, SUCCEED, FAIL = "AS t(id, ready)", "AS o(id, delivery, place)", "AS o(id, delivery, actor"
EXTEND, CURRENT = "AS o(id, delivery, lease)", "consumed_by = $"
OVERDUE, OVER = "x ORDER BY priority DESC, due_at, id OFFSET 0", "ORDER BY leased_until LIMIT 1"


@pytest.mark.parametrize("batch", [1, 20])
@pytest.mark.parametrize("words", [CLAIM, SUCCEED, FAIL])
@pytest.mark.postgresql
def test_claims_and_their_ends_are_not_planned_each_time(words: str, batch: int) -> None:
    # In a table of a few pages all plans cost the same.
    schedule_messages([{"topic": TOPIC, "delay": "1h"}] * 3_000)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE delayq_message")
    before = kept(words)
    for number in range(ROUNDS):
        for row in claim(*(due().pk for _ in range(batch))):
            assert fail(row.id, dead=True) if number % 2 else succeed(row.id)
    assert kept(words) > before


@pytest.mark.parametrize(("words", "call"), [
    ("t AS MATERIALIZED", lambda: transitions.claim_due("default", "default", 1, 60.0, "pull:tests")),
    (OVERDUE, lambda: statements("default").due("default", [TOPIC], 10)),
    ("AS is_candidate", lambda: statements("default").find_candidates({"default": BEGINNING}, None)),
    (CURRENT, lambda: succeed_current(claimed().id)),
])  # fmt: skip
@pytest.mark.postgresql
def test_searches_in_a_backlog_are_not_planned_each_time(words: str, call: Callable[[], object]) -> None:
    schedule_messages([{"topic": TOPIC, "due_at": ago()}] * 3_000)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE delayq_message")
    before = kept(words)
    assert all(call() for _ in range(ROUNDS))
    assert kept(words) > before


@pytest.mark.postgresql
def test_claims_within_limits_are_never_planned_anew(declare: Declare) -> None:
    declare("l.one", limit=2)
    for _ in range(ROUNDS):
        (row,) = admit_rows(schedule_message("l.one"))
        assert succeed(row.id)
    with connection.cursor() as cursor:
        # What looks at places and rates, and what takes them.
        cursor.execute("SELECT custom_plans FROM pg_prepared_statements WHERE strpos(statement, 'delayq_rate') > 0")
        assert cursor.fetchall() == [(0,), (0,)]


@pytest.mark.postgresql
def test_rows_are_found_by_id_although_nothing_was_scheduled_at_the_last_analyze() -> None:
    for message in schedule_messages([{"topic": TOPIC}] * 100):
        (row,) = claim(message.pk)
        assert succeed(row.id)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE delayq_message")
    schedule_messages([{"topic": TOPIC, "delay": "1h"}] * 3_000)
    for end in (fail, succeed, succeed_current):
        (row,) = claim(due().pk)
        assert statements("default").extend([LeaseRenewal(row.id, row.deliveries, 60.0)], wait=False)
        assert end(row.id)
    for words in (CLAIM, SUCCEED, CURRENT, FAIL, EXTEND):
        found = plan(words)
        assert "delayq_message_pkey" in found
        assert "delayq_todo" not in found
        assert "delayq_leased" not in found


@pytest.mark.parametrize(("words", "searched"), [(OVERDUE, {"due_at"}), (OVER, {"leased_until", "expires_at"})])
@pytest.mark.postgresql
def test_a_search_for_what_is_due_or_over_reads_no_other_rows(words: str, searched: set[str]) -> None:
    schedule_messages([{"topic": TOPIC, "delay": "1h", "expires": "1h"}] * 20_000)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE delayq_message")
    for _ in range(2):
        assert statements("default").due("default", [TOPIC], 10, ()) == []
        assert crashes.anything_expired("default") == (False, False)
    found = plan(words)
    assert "Seq Scan on delayq_message" not in found
    conditions = [line for line in found.splitlines() if "Index Cond:" in line]
    # What a subquery yields is "$3", and "(InitPlan 3).col1" from PostgreSQL 17 on.
    bounded = rf"\b({'|'.join(searched)}) [<>]=? (?:\$|\(InitPlan)"
    assert {found[1] for line in conditions for found in re.finditer(bounded, line)} == searched


def cursors() -> list[Any]:
    """Return the cursors that this connection keeps for its next statement."""
    session = known_session(connection)
    assert session is not None
    return list(session.cursors.values())


@pytest.mark.postgresql
def test_a_cursor_is_kept_unless_it_holds_many_rows_or_its_statement_failed() -> None:
    ids = [due().pk for _ in range(MOST_ROWS_KEPT + 1)]
    (first,) = cursors()
    assert [row.id for row in claim(ids[0])] == ids[:1]
    assert cursors() == [first]
    assert len(claim(*ids[1:], due().pk)) == len(ids)
    assert cursors() == []
    reads.now("default")
    assert len(cursors()) == 1
    with pytest.raises(DataError), transaction.atomic():
        claim(2**63)
    assert cursors() == []


@pytest.mark.postgresql
def test_times_are_utc_after_the_time_zone_of_the_session_has_changed() -> None:
    due()
    for zone in ("Europe/Berlin", "UTC", "Asia/Tokyo", "Europe/Berlin"):
        with connection.cursor() as cursor:
            cursor.execute("SELECT set_config('TimeZone', %s, true)", [zone])
        now = reads.now("default")
        assert now.tzinfo == UTC
        assert abs(now - datetime.now(UTC)) < timedelta(minutes=1)
