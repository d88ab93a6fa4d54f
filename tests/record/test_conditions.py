"""Conditions that stand in more than one text choose the same rows, for every combination of the columns they read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
from django.db import transaction
from django.utils import timezone

from django_delayq.core.clock import to_tenths
from django_delayq.core.states import FINAL, State
from django_delayq.models import Message, Queue
from django_delayq.models.messages import HOLDS_KEY, WAITS_AGAIN, Lease
from django_delayq.record.sql import limit_statements, statements
from django_delayq.record.sql.limited import PortableLimits
from django_delayq.record.sql.portable import Portable
from django_delayq.record.sql.rows import BEGINNING, Claiming, NewMessage, Ticket
from tests.support.rows import unguarded

DB = "default"

pytestmark = pytest.mark.django_db


def write(*rows: dict[str, Any]) -> list[Message]:
    """Write rows with any values, also those that no move makes."""
    now = timezone.now()
    common = {"topic": "t.ok", "queue": "q", "due_at": now}
    by_state: dict[str, dict[str, Any]] = {
        **{state: {"finished_at": now} for state in FINAL},
        State.RUNNING: {"leased_until": now + timedelta(seconds=600)},
        State.SCHEDULED: {},
    }
    return unguarded(Message).bulk_create([Message(**common | by_state[row["state"]] | row) for row in rows])


def with_keys(states: Any) -> Iterator[dict[str, Any]]:
    """Yield the values of all columns that say who has a key."""
    numbers = range(3)
    rows = product(states, (None, "k"), (None, 1), (None, 60.0), (None, *numbers), numbers, numbers)
    for number, (state, key, next_id, key_for, key_deliveries, deliveries, reported) in enumerate(rows):
        if reported > deliveries:
            continue
        yield {
            "state": state,
            "key": key and f"{key}{number}",
            "next_id": next_id,
            "key_for": key_for,
            "key_deliveries": key_deliveries,
            "deliveries": deliveries,
            "reported": reported,
        }


def test_a_message_says_of_itself_what_the_record_says_about_its_key() -> None:
    rows = write(*with_keys(State))
    assert {row.pk for row in rows if row.holds_key} == set(rows_with(HOLDS_KEY))


def rows_with(condition: Any) -> set[int]:
    return set(Message.objects.filter(condition).values_list("pk", flat=True))


def test_a_waiting_message_is_kept_waiting_exactly_when_it_is_in_the_way() -> None:
    rows = write(*with_keys((State.SCHEDULED, State.RUNNING)))
    with transaction.atomic():
        kept = statements(DB).keep_waiting([row.pk for row in rows], is_next=False)
    assert kept == {pk for pk in rows_with(HOLDS_KEY | WAITS_AGAIN) if Message.objects.get(pk=pk).state == "scheduled"}
    assert 0 < len(kept) < len(rows)


@pytest.mark.parametrize("waits", [True, False])
def test_a_new_message_is_kept_out_exactly_by_one_that_is_in_the_way(waits: bool) -> None:
    rows = write(*[row for row in with_keys(State) if row["key"]])
    in_the_way = rows_with(HOLDS_KEY | WAITS_AGAIN if waits else HOLDS_KEY)
    own = None if waits else rows[0].pk
    for row in rows:
        assert row.key is not None
        new = NewMessage("null", None, None, row.key, "t.ok", "q", own=own)
        inserted = statements(DB).insert(new, "test")
        assert (inserted is None) == (row.pk in in_the_way), row.__dict__


# --- what may begin ---------------------------------------------------------------------------------------------------

# A claim may be early by this. Seconds.
AHEAD = 30.0


def that_wait() -> list[Message]:
    """Write messages with every combination of what decides whether one may begin."""
    now = timezone.now()
    Queue.objects.create(name="paused")
    Queue.objects.create(name="resumed", resumes_at=now - timedelta(seconds=60))
    Queue.objects.create(name="paused for a while", resumes_at=now + timedelta(seconds=600))
    dues = [now + timedelta(seconds=seconds) for seconds in (-60, AHEAD / 2, 600)]
    ends = [None, now - timedelta(seconds=30), now + timedelta(seconds=600)]
    queues = ("q", "paused", "resumed", "paused for a while")
    columns = product(State, dues, ends, queues, ("t.ok", "t.other"), (None, "k"))
    names = ("state", "due_at", "expires_at", "queue", "topic", "limit_key")
    return write(*[dict(zip(names, row, strict=True)) for row in columns])


@contextmanager
def undone() -> Iterator[None]:
    """Undo what the block writes."""
    with transaction.atomic():
        yield
        transaction.set_rollback(True)


def both() -> list[Portable]:
    """Return the statements of PostgreSQL, and those in Django's ORM."""
    return [statements(DB), Portable(DB)]


@pytest.mark.postgresql
@pytest.mark.parametrize("queue", [None, "q"])
def test_both_statements_claim_the_same_messages(queue: str | None) -> None:
    rows = that_wait()
    for seconds, is_due in ((None, True), (-120, False), (-1, True), (600, True)):
        ready = None if seconds is None else to_tenths(timezone.now() + timedelta(seconds=seconds))
        asked = Claiming([Ticket(row.pk, ready) for row in rows], {"t.ok": 60.0}, "w", queue, AHEAD, 0)
        claimed = []
        for one in both():
            with undone():
                claimed.append({row.id for row in one.claim(asked)})
        assert claimed[0] == claimed[1]
        assert bool(claimed[0]) == is_due


@pytest.mark.postgresql
@pytest.mark.parametrize("queue", [None, "q"])
def test_both_statements_with_limits_see_the_same_messages(queue: str | None) -> None:
    rows = that_wait()
    asked = Claiming([Ticket(row.pk) for row in rows], {"t.ok": 60.0}, "w", queue, AHEAD, 0)
    (_, ours), (_, orm) = [
        one.read_candidates(["topic t.ok"], asked) for one in (limit_statements(DB), PortableLimits(DB))
    ]
    assert ours == orm
    assert 0 < len(ours) < len(rows)


@pytest.mark.postgresql
@pytest.mark.parametrize("closed", [[], ["topic t.ok"], ["topic t.ok key k"], ["queue q"]])
def test_both_queries_find_the_same_messages_due(closed: list[str]) -> None:
    that_wait()
    found = 0
    for queue in Message.objects.values_list("queue", flat=True).distinct():
        ours, orm = [one.due(queue, ["t.ok"], 1000, closed) for one in both()]
        assert ours == orm
        found += len(ours)
        seen, orm_seen = [one.find_candidates({queue: BEGINNING}, ["t.ok"], closed)[queue] for one in both()]
        assert seen._replace(now=orm_seen.now) == orm_seen
    assert found == {"": 8, "topic t.ok": 4, "topic t.ok key k": 4, "queue q": 4}["".join(closed)]


@pytest.mark.postgresql
def test_both_queries_find_the_same_leases_over() -> None:
    now = timezone.now()
    past, future = (now + timedelta(seconds=seconds) for seconds in (-60, 600))
    times = (None, past, future)
    leased = [(*row, None) for row in product(State, times, times, times)]
    waiting = [(state, None, None, None, expires) for state in State for expires in times]
    for state, until, first, second, expires in leased + waiting:
        with undone():
            (row,) = write({"state": state, "leased_until": until, "expires_at": expires, "deliveries": 2})
            for delivery, renewed in ((1, first), (2, second)):
                if renewed is not None:
                    Lease.objects.create(message_id=row.pk, delivery=delivery, until=renewed)
            ours, orm = [one.anything_expired(past, past)[:2] for one in both()]
            assert ours == orm, (state, until, first, second, expires)
