"""The database refuses illegal rows by itself, and the migrations can be applied and taken back."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from importlib import import_module
from typing import Any

import pytest
from django.apps import apps
from django.core.management import call_command
from django.db import IntegrityError, connection, connections, transaction
from django.db.models import Q
from django.utils import timezone

from django_delayq import schedule_message
from django_delayq.core.states import State
from django_delayq.inspector.consistency import inconsistent
from django_delayq.models import Message, Transition, log_view
from django_delayq.models.messages import Identity, LogRow
from django_delayq.record import transitions
from django_delayq.record.reads import identity
from django_delayq.record.sql.rows import Ticket
from tests.support.rows import unguarded
from tests.support.steps import TOPIC, bring, later

pytestmark = pytest.mark.django_db

NOW = timezone.now()

ILLEGAL: dict[str, tuple[State, dict[str, Any]]] = {
    "a state that is none": (State.SCHEDULED, {"state": "asleep"}),
    "consumed without an end": (State.SCHEDULED, {"state": "consumed"}),
    "scheduled with an end": (State.SCHEDULED, {"finished_at": NOW}),
    "running with an end": (State.RUNNING, {"finished_at": NOW}),
    "finished without an end": (State.DEAD, {"finished_at": None}),
    "running without a lease": (State.RUNNING, {"leased_until": None}),
    "scheduled with a lease": (State.SCHEDULED, {"leased_until": NOW}),
    "consumed with a lease": (State.CONSUMED, {"leased_until": NOW}),
    "a consumed one back to scheduled": (State.CONSUMED, {"state": "scheduled"}),
    "more attempts than reports": (State.SCHEDULED, {"attempts": 1}),
    "negative attempts": (State.SCHEDULED, {"attempts": -1}),
    "more reports than deliveries": (State.RUNNING, {"reported": 2}),
    "more excused than delivered": (State.RUNNING, {"excused": 2}),
    "negative excusedess": (State.RUNNING, {"excused": -1}),
    "no move at all": (State.SCHEDULED, {"moves": 0}),
    "too good a priority": (State.SCHEDULED, {"priority": 101}),
    "too bad a priority": (State.SCHEDULED, {"priority": -101}),
    "due too early": (State.SCHEDULED, {"due_at": datetime(1999, 12, 31, tzinfo=UTC)}),
    "due too late": (State.SCHEDULED, {"due_at": datetime(2200, 1, 2, tzinfo=UTC)}),
    "no topic": (State.SCHEDULED, {"topic": None}),
}


# Each of these is a row that contradicts itself: no statement of ours writes one, and no constraint costs each of them.
CONTRADICTORY = [
    name for name, (_state, values) in ILLEGAL.items() if not {"priority", "due_at", "topic"}.intersection(values)
]


@pytest.mark.parametrize("name", [name for name in ILLEGAL if name not in CONTRADICTORY])
def test_an_illegal_row_is_refused_by_the_database_itself(name: str) -> None:
    where, values = ILLEGAL[name]
    id_ = bring(where)
    with pytest.raises(IntegrityError), transaction.atomic():
        unguarded(Message).filter(pk=id_).update(**values)
    assert Message.objects.get(pk=id_).state == where


@pytest.mark.postgresql("SQLite has a constraint still")
@pytest.mark.parametrize("name", CONTRADICTORY)
def test_a_row_that_contradicts_itself_is_found(name: str) -> None:
    where, values = ILLEGAL[name]
    id_, _good = bring(where), [bring(state) for state in State]
    unguarded(Message).filter(pk=id_).update(**values)
    found = inconsistent("default")
    # The test leaves no such row behind: each test is asked.
    unguarded(Message).filter(pk=id_)._raw_delete("default")
    assert (found.count, found.examples) == (1, [id_])


@pytest.mark.postgresql("SQLite keeps the constraints")
@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_the_way_back_gives_the_table_its_constraints_again() -> None:
    def checks() -> set[str]:
        with connections["other"].cursor() as cursor:
            cursor.execute(
                "SELECT conname FROM pg_constraint WHERE conrelid = 'delayq_message'::regclass AND contype = 'c'"
                " AND convalidated"
            )
            return {name for (name,) in cursor.fetchall()}

    later(using="other")
    terms: dict[str, Any] = {"database": "other", "verbosity": 0, "interactive": False}
    assert checks() == {"delayq_due", "delayq_priority"}
    try:
        call_command("migrate", "delayq", "0001", **terms)
        assert checks() == {"delayq_counts", "delayq_due", "delayq_priority", "delayq_state"}
        assert later(using="other").pk
    finally:
        call_command("migrate", **terms)
    assert checks() == {"delayq_due", "delayq_priority"}


@pytest.mark.postgresql("only PostgreSQL knows infinity")
def test_an_infinite_due_time_is_refused() -> None:
    id_ = later().pk
    with pytest.raises(IntegrityError), transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("UPDATE delayq_message SET due_at = 'infinity' WHERE id = %s", [id_])


def test_two_live_messages_of_one_key_are_refused() -> None:
    later(key="k")
    other = later()
    with pytest.raises(IntegrityError), transaction.atomic():
        unguarded(Message).filter(pk=other.pk).update(key="k")


def test_a_log_has_each_number_once() -> None:
    id_ = later().pk
    with pytest.raises(IntegrityError), transaction.atomic():
        for _again in range(2):
            LogRow(message_id=id_, number=9, at=NOW, to_state=State.SCHEDULED, due_at=NOW).save_base(force_insert=True)


def test_a_second_identity_is_refused() -> None:
    assert identity("default") == identity("default")
    with pytest.raises(IntegrityError), transaction.atomic():
        Identity.objects.create(id=2)


def test_the_farthest_due_time_that_is_accepted_can_be_stored() -> None:
    row = schedule_message(TOPIC, delay=timedelta(days=36_525))
    assert Message.objects.get(pk=row.pk).due_at == row.due_at


def test_live_messages_are_read_along_partial_indexes() -> None:
    with connection.cursor() as cursor:
        constraints = connection.introspection.get_constraints(cursor, Message._meta.db_table)
    indexes = {name for name, found in constraints.items() if found["index"]}
    assert {"delayq_todo", "delayq_leased", "delayq_expiring", "delayq_finished", "delayq_key"} <= indexes
    assert all(index.condition is not None for index in Message._meta.indexes)


def test_the_labels_of_the_apps_are_of_one_family() -> None:
    """Permissions, addresses of the admin and migrations have them in their names: ``delayq.cancel_message``."""
    ours = {config.name: config.label for config in apps.get_app_configs() if config.name.startswith("django_delayq")}
    assert ours == {name: name.removeprefix("django_").replace(".contrib", "").replace(".", "_") for name in ours}


def test_the_migrations_agree_with_the_models() -> None:
    call_command("makemigrations", check=True, dry_run=True, verbosity=0)


@pytest.mark.postgresql("only PostgreSQL keeps statistics by itself")
def test_no_statistics_are_kept_of_columns_by_which_nobody_searches() -> None:
    initial = import_module("django_delayq.migrations.0001_initial")
    columns = {field.column for field in Message._meta.local_fields}
    # A new column needs a decision.
    assert set(initial.SEARCHED) ^ set(initial.UNSEARCHED) == columns
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT attname, attstattarget FROM pg_attribute WHERE attrelid = 'delayq_message'::regclass AND attnum > 0"
        )
        kept = dict(cursor.fetchall())
    assert kept == {**dict.fromkeys(initial.SEARCHED, 50), **dict.fromkeys(initial.UNSEARCHED, 0)}
    searched = {name for index in Message._meta.indexes for name in _columns_of(index)}
    assert searched <= set(initial.SEARCHED)


@pytest.mark.postgresql("only PostgreSQL has autovacuum")
def test_autovacuum_does_not_wait_for_a_fifth_of_a_long_history() -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT relname, reloptions FROM pg_class WHERE relname LIKE 'delayq%' AND reloptions IS NOT NULL"
        )
        given = {table: {*options} for table, options in cursor.fetchall()}
    # The other tables have what the server gives: nobody reads them from the beginning of an index.
    assert given == {
        "delayq_message": {
            "autovacuum_vacuum_scale_factor=0.01",
            "autovacuum_vacuum_threshold=1000",
            "fillfactor=40",
        }
    }


def _columns_of(index: Any) -> set[str]:
    """Return the columns of an index, and those of its condition."""
    return {name.removeprefix("-") for name in index.fields} | (index.condition or Q()).referenced_base_fields


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_the_migrations_can_be_taken_back_and_applied_again() -> None:
    def tables() -> set[str]:
        return {name for name in connections["other"].introspection.table_names() if name.startswith("delayq_")}

    terms: dict[str, Any] = {"database": "other", "verbosity": 0, "interactive": False}
    before = tables()
    later(using="other")
    try:
        call_command("migrate", "delayq", "zero", **terms)
        assert tables() == set()
    finally:
        call_command("migrate", **terms)
    assert tables() == before
    assert not Message.objects.using("other").exists()
    assert later(using="other").pk


@pytest.mark.postgresql("only PostgreSQL keeps plans")
@pytest.mark.django_db(transaction=True)
def test_a_column_of_another_type_does_not_stop_a_connection_that_has_claimed_before() -> None:
    def claimed() -> int:
        pk = schedule_message(TOPIC).pk
        return len(transitions.claim("default", [Ticket(pk)], {TOPIC: 60.0}, "w"))

    def alter(length: int) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"ALTER TABLE delayq_message ALTER COLUMN queue TYPE varchar({length})")

    assert claimed() == 1
    try:
        alter(300)
        assert claimed() == 1
    finally:
        alter(Message._meta.get_field("queue").max_length or 100)
    assert claimed() == 1


def test_the_log_can_be_read_where_the_tables_were_made_without_migrations() -> None:
    migrations = import_module("django_delayq.migrations.0001_initial")
    assert log_view.CREATE == migrations.TRANSITIONS
    schedule_message("t.ok")
    with connection.cursor() as cursor:
        cursor.execute("DROP VIEW delayq_transition")
    call_command("migrate", verbosity=0)
    assert [move.to_state for move in Transition.objects.all()] == ["scheduled"]
