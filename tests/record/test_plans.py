"""PostgreSQL keeps the plans of the hot moves, for one message as for many."""

from __future__ import annotations

import pytest
from django.db import connection

from django_delayq import schedule_messages

from .steps import TOPIC, claim, due, fail, succeed

pytestmark = pytest.mark.django_db

# The server makes five plans for given values before it considers to keep one for all: each move more often than that.
ROUNDS = 16

KEPT = "SELECT coalesce(sum(generic_plans), 0) FROM pg_prepared_statements WHERE strpos(statement, %s) > 0"


def kept(words: str) -> int:
    """How often this connection used a plan that is kept, for the statements with these words."""
    with connection.cursor() as cursor:
        cursor.execute(KEPT, [words])
        return int(cursor.fetchone()[0])


@pytest.mark.parametrize("batch", [1, 20])
@pytest.mark.parametrize("words", ["AS t(id, ready, part", "AS o(id, delivery, place)", "AS o(id, delivery, actor"])
def test_claims_and_their_ends_are_not_planned_each_time(words: str, batch: int) -> None:
    if connection.vendor != "postgresql":
        pytest.skip("needs PostgreSQL")
    # In a table of a few pages every plan is as good.
    schedule_messages([{"topic": TOPIC, "delay": "1h"}] * 3_000)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE delayq_message")
    before = kept(words)
    for number in range(ROUNDS):
        for row in claim(*(due().pk for _ in range(batch))):
            assert fail(row.id, dead=True) if number % 2 else succeed(row.id)
    assert kept(words) > before
