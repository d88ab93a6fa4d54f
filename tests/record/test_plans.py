"""PostgreSQL keeps the plans of the hot moves, for one message as for many, and they find rows by id."""

from __future__ import annotations

import pytest
from django.db import connection

from django_delayq import schedule_messages, transitions
from django_delayq.sql.rows import LeaseRenewal

from .steps import TOPIC, claim, due, fail, succeed

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
        cursor.execute(f"EXPLAIN EXECUTE {name}({', '.join(['NULL'] * parameters)})")
        return "\n".join(row[0] for row in cursor.fetchall())


CLAIM, SUCCEED, FAIL = "AS t(id, ready)", "AS o(id, delivery, place)", "AS o(id, delivery, actor"
EXTEND = "AS o(id, delivery, lease)"


@pytest.mark.parametrize("batch", [1, 20])
@pytest.mark.parametrize("words", [CLAIM, SUCCEED, FAIL])
def test_claims_and_their_ends_are_not_planned_each_time(words: str, batch: int) -> None:
    if connection.vendor != "postgresql":
        pytest.skip("needs PostgreSQL")
    # In a table of a few pages all plans cost the same.
    schedule_messages([{"topic": TOPIC, "delay": "1h"}] * 3_000)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE delayq_message")
    before = kept(words)
    for number in range(ROUNDS):
        for row in claim(*(due().pk for _ in range(batch))):
            assert fail(row.id, dead=True) if number % 2 else succeed(row.id)
    assert kept(words) > before


def test_rows_are_found_by_id_although_nothing_was_scheduled_at_the_last_analyze() -> None:
    if connection.vendor != "postgresql":
        pytest.skip("needs PostgreSQL")
    for message in schedule_messages([{"topic": TOPIC}] * 100):
        (row,) = claim(message.pk)
        assert succeed(row.id)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE delayq_message")
    schedule_messages([{"topic": TOPIC, "delay": "1h"}] * 3_000)
    for end in (fail, succeed):
        (row,) = claim(due().pk)
        assert transitions.extend("default", [LeaseRenewal(row.id, row.deliveries, 60.0)], wait=False)
        assert end(row.id)
    for words in (CLAIM, SUCCEED, FAIL, EXTEND):
        found = plan(words)
        assert "delayq_message_pkey" in found
        assert "delayq_todo" not in found
        assert "delayq_leased" not in found
