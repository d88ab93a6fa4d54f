"""Other programs schedule and cancel in SQL: with the rows, the checks, the log and the answers of the calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from django.core.management import call_command
from django.db import DatabaseError, IntegrityError, ProgrammingError, connection, connections, transaction
from django.utils import timezone
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from django_delayq import InvalidMessage, cancel_message, schedule_message
from django_delayq.core.retry import RetryPolicy
from django_delayq.core.states import State
from django_delayq.models import Message
from django_delayq.models.messages import LogRow, Unannounced
from django_delayq.project import validation
from django_delayq.record import unannounced
from django_delayq.record.sql.postgresql import FRESH, GIVEN
from django_delayq.testing import Delayq
from tests.support.from_sql import cancel, schedule
from tests.support.rows import unguarded
from tests.support.steps import TOPIC, at_once, bring, claim, claimed, due, fail, later, succeed
from tests.support.transactions import unfinished
from tests.support.workers import eventually

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.postgresql("SQLite has no functions")]

DUE = datetime.now(UTC).replace(microsecond=123_456) + timedelta(days=3)


def row(pk: int) -> dict[str, Any]:
    """Return a row of messages as text, without what differs for each: its id, its clock and its author."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT * FROM delayq_message WHERE id = %s", [pk])
        names = [column.name for column in cursor.description]
        cast = ", ".join(f"{name}::text" for name in names)
        cursor.execute(f"SELECT {cast} FROM delayq_message WHERE id = %s", [pk])
        found = dict(zip(names, cursor.fetchone(), strict=True))
    return {name: value for name, value in found.items() if name not in ("id", "created_at", "created_by")}


# --- the row ----------------------------------------------------------------------------------------------------------

SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "a payload": ({"payload": {"b": [1, 2.5, None, "ä"], "a": {"c": True}}},) * 2,
    "a list": ({"payload": [1]},) * 2,
    "a queue": ({"queue": "mail.high"},) * 2,
    "a priority": ({"priority": -7},) * 2,
    "a key": ({"key": "order 5"},) * 2,
    "unique while scheduled": ({"key": "k", "unique": "scheduled"},) * 2,
    "unique while live": ({"key": "k", "unique": "live"},) * 2,
    "unique for an hour": ({"key": "k", "unique": "1h"}, {"key": "k", "unique": "1 hour"}),
    "unique as the call writes it": ({"key": "k", "unique": "1h30m"},) * 2,
    "kept": ({"key": "k", "on_conflict": "keep"},) * 2,
    "expires": ({"expires": timedelta(days=1, microseconds=1)},) * 2,
    "attempts": ({"max_attempts": 3},) * 2,
    "delays": ({"retry": [60, 0.25, 600.125, 0]},) * 2,
    "never": ({"retry": False},) * 2,
    "a timeout": ({"timeout": timedelta(seconds=2.5)},) * 2,
    "no timeout": ({"timeout": False}, {"timeout": timedelta(0)}),
    "a lease": ({"lease": timedelta(minutes=3)},) * 2,
    "headers": ({"headers": {"traceparent": "00-1"}},) * 2,
    "a limit key": ({"limit_key": "acme"},) * 2,
}


@pytest.mark.parametrize("name", SAME)
def test_the_row_is_that_of_the_call_column_by_column(name: str) -> None:
    for_call, for_sql = ({"due_at": DUE, **options} for options in SAME[name])
    first = schedule_message(TOPIC, for_call.pop("payload", None), **for_call)
    expected = row(first.pk)
    cancel_message(first)
    unguarded(Message).filter(pk=first.pk).update(key=None)
    pk = schedule(TOPIC, **for_sql)
    assert row(pk) == expected
    message = Message.objects.get(pk=pk)
    assert message.created_at <= timezone.now()
    with connection.cursor() as cursor:
        cursor.execute("SELECT current_user")
        role = cursor.fetchone()[0]
    as_call, as_sql = (list(one.transitions.values()) for one in (later(), message))
    assert as_sql[0]["actor"] == f"sql:{role}"
    same = ("pk", "message_id", "at", "due_at", "actor")
    assert [{k: v for k, v in move.items() if k not in same} for move in as_sql] == [
        {k: v for k, v in move.items() if k not in same} for move in as_call
    ]
    assert (as_sql[0]["at"], as_sql[0]["due_at"]) == (message.created_at, message.due_at)


@pytest.mark.parametrize("delay", ["0", "15 minutes", "250 ms", "1 day", "36525 days"])
def test_a_delay_counts_from_now_and_a_day_has_24_hours(delay: str) -> None:
    with connection.cursor() as cursor:
        # On the last Sunday of March and of October, days there have 23 and 25 hours.
        cursor.execute("SET TIME ZONE 'Europe/Berlin'")
        try:
            message = Message.objects.get(pk=schedule(TOPIC, delay=delay))
            cursor.execute("SELECT extract(epoch FROM %s::interval)", [delay])
            seconds = float(cursor.fetchone()[0])
        finally:
            cursor.execute("SET TIME ZONE 'UTC'")
    late = message.due_at - message.created_at - timedelta(seconds=seconds)
    assert timedelta(0) <= late <= timedelta(microseconds=99)
    assert message.due_at.microsecond % 100 == 0


def test_the_function_writes_all_columns_that_the_insert_of_the_package_writes() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT prosrc FROM pg_proc WHERE proname = 'delayq_schedule'")
        source = cursor.fetchone()[0]
    found = re.search(r"INSERT INTO delayq_message \(([^)]*)\)", source)
    assert found is not None
    # A new one needs a migration that makes the function anew, and an argument for its value.
    assert set(re.split(r",\s*", found[1].strip())) == {*FRESH, *GIVEN}


def test_a_call_without_names_is_as_short_as_that_in_python() -> None:
    with connection.cursor() as cursor:
        cursor.execute("""SELECT delayq_schedule('orders.close', '{"order": 5}', '15 minutes')""")
        message = Message.objects.get(pk=cursor.fetchone()[0])
    assert (message.topic, message.payload, message.queue) == ("orders.close", {"order": 5}, "default")


# --- what is refused --------------------------------------------------------------------------------------------------

DEEP: Any = 1
for _level in range(65):
    DEEP = [DEEP]

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no topic": ({"topic": None}, "topic must be 1 to 100 .*, not NULL"),
    "an empty topic": ({"topic": ""}, "topic must be 1 to 100 "),
    "a topic with a space": ({"topic": "a b"}, "topic must be 1 to 100 .*, not 'a b'"),
    "a topic with a newline": ({"topic": "ab\n"}, "topic must be 1 to 100 "),
    "a topic of other letters": ({"topic": "größe"}, "topic must be 1 to 100 "),
    "a long topic": ({"topic": "t" * 101}, "topic must be 1 to 100 "),
    "a queue with a slash": ({"queue": "a/b"}, "queue must be 1 to 64 .*, not 'a/b'"),
    "a long queue": ({"queue": "q" * 65}, "queue must be 1 to 64 "),
    "a high priority": ({"priority": 101}, "priority must be a whole number from -100 to 100, not 101"),
    "an empty key": ({"key": ""}, "key must be 1 to 200 "),
    "a long key": ({"key": "k" * 201}, "key must be 1 to 200 "),
    "a key with a space": ({"key": "k "}, "key must be 1 to 200 "),
    "a key with a tab": ({"key": "a\tb"}, "key must be 1 to 200 "),
    "a long limit key": ({"limit_key": "k" * 201}, "limit_key must be 1 to 200 "),
    "both times": ({"delay": "1s", "due_at": DUE}, "give delay or due_at, not both"),
    "a delay below 0": ({"delay": "-1 s"}, "delay must be between 0 and 100 years, not -00:00:01"),
    "a long delay": ({"delay": "36526 days"}, "delay must be between 0 and 100 years"),
    "a delay without end": ({"delay": "200000 years"}, "delay must be between 0 and 100 years"),
    "a past time": ({"due_at": datetime(2020, 1, 1, tzinfo=UTC)}, "due_at is in the past: 2020-01-01"),
    "a far time": ({"due_at": datetime(2199, 1, 1, tzinfo=UTC)}, "due_at is more than 100 years ahead"),
    "an infinite time": ({"due_at": "infinity"}, "due_at is more than 100 years ahead"),
    "an infinite past": ({"due_at": "-infinity"}, "due_at is in the past"),
    "expires at once": ({"expires": "0"}, "expires must be more than 0 and at most 100 years"),
    "expires too late": ({"expires": "103 years"}, "expires must be more than 0 and at most 100 years"),
    "no attempts": ({"max_attempts": 0}, "max_attempts must be a whole number from 1 to 10000, not 0"),
    "a short timeout": ({"timeout": "1 ms"}, "timeout must be between 10 ms and 30 days"),
    "a short lease": ({"lease": "1 ms"}, "lease must be between 1 second and 1 day"),
    "a policy in words": ({"retry": ["10s"]}, "retry must be an array of delays in seconds"),
    "a nested policy": ({"retry": [[1]]}, "retry must be an array of delays in seconds"),
    "a negative retry": ({"retry": [-1]}, "retry must be an array of delays in seconds"),
    "true as a policy": ({"retry": True}, "retry must be an array of delays in seconds"),
    "a merge": ({"key": "k", "on_conflict": "merge"}, "on_conflict is one of error, keep, not 'merge'"),
    "another choice": ({"key": "k", "on_conflict": "replace"}, "on_conflict is one of error, keep, not 'replace'"),
    "no choice": ({"key": "k", "on_conflict": None}, "on_conflict is one of error, keep, not NULL"),
    "unique for no time": ({"key": "k", "unique": "soon"}, "unique must be live, scheduled, or .*, not 'soon'"),
    "unique for nothing": ({"key": "k", "unique": "0"}, "unique must be live, scheduled, or "),
    "unique as nothing": ({"key": "k", "unique": None}, "unique must be live, scheduled, or "),
    "a choice without a key": ({"on_conflict": "keep"}, "on_conflict needs a key"),
    "unique without a key": ({"unique": "scheduled"}, "unique needs a key"),
    "a large payload": ({"payload": "x" * 262_144}, "payload has more than 262144 bytes of JSON"),
    "a deep payload": ({"payload": DEEP}, "payload is nested too deep"),
    "a large number": ({"payload": {"n": [2**63]}}, "payload or headers hold a number of more than 64 bits"),
    "a list of headers": ({"headers": ["a"]}, "headers must be an object"),
    "large headers": ({"headers": {"a": "x" * 16_384}}, "headers have more than 16384 bytes"),
    "deep headers": ({"headers": {"a": {"b": {"c": {"d": {}}}}}}, "headers are nested too deep"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_call_refuses_is_refused_and_the_error_names_the_argument(name: str) -> None:
    options, words = REFUSED[name]
    with pytest.raises(DatabaseError, match=f"^delayq_schedule: {words}") as refused:
        schedule(**{"topic": TOPIC, **options})
    assert refused.value.__cause__ is not None
    # invalid_parameter_value
    assert getattr(refused.value.__cause__, "sqlstate", None) == "22023"
    assert not Message.objects.exists()


def refuses(act: Callable[[], object]) -> bool:
    """Tell whether a call refuses its arguments. What it writes is rolled back."""
    try:
        with transaction.atomic():
            act()
            transaction.set_rollback(True)
    except (InvalidMessage, DatabaseError):
        return True
    return False


# Characters that Unicode gave a meaning after this Python was made are unprintable for it, and not for the function.
ASSIGNED = st.characters(exclude_categories=["Cn", "Cs"], exclude_characters="\x00")


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(st.text(ASSIGNED, max_size=4))
def test_a_key_is_refused_exactly_when_the_call_refuses_it(key: str) -> None:
    expected = refuses(lambda: validation.key(key))
    assert refuses(lambda: schedule(TOPIC, key=key)) == expected
    assert refuses(lambda: schedule(TOPIC, limit_key=key)) == expected


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(st.text(st.sampled_from("aZ0_.:/- \nä"), max_size=4))
def test_a_name_is_refused_exactly_when_the_call_refuses_it(name: str) -> None:
    assert refuses(lambda: schedule(name)) == refuses(lambda: validation.topic(name))
    assert refuses(lambda: schedule(TOPIC, queue=name)) == refuses(lambda: validation.queue(name))


def test_the_deepest_payload_of_the_call_is_taken() -> None:
    deepest = DEEP[0]
    assert Message.objects.get(pk=schedule(TOPIC, deepest)).payload == deepest == later(deepest).payload
    headers: Any = {"a": {"b": {"c": {}}}}
    assert Message.objects.get(pk=schedule(TOPIC, headers=headers)).headers == later(headers=headers).headers


def test_numbers_of_64_bits_are_taken() -> None:
    payload = [2**63 - 1, -(2**63), 0.1]
    assert Message.objects.get(pk=schedule(TOPIC, payload)).payload == payload


def test_a_policy_of_the_row_is_one_that_a_worker_reads() -> None:
    message = Message.objects.get(pk=schedule(TOPIC, retry=[60, 0.5]))
    assert RetryPolicy.from_json(message.retry) == RetryPolicy.fixed([60, 0.5])


# --- keys -------------------------------------------------------------------------------------------------------------


def test_a_taken_key_is_the_violation_of_the_one_index() -> None:
    first = later(key="k")
    with pytest.raises(IntegrityError, match=rf"message {first.pk} of topic '{TOPIC}' has this key") as refused:
        schedule(TOPIC, key="k")
    cause = refused.value.__cause__
    assert isinstance(cause, psycopg.errors.UniqueViolation)
    assert cause.diag.constraint_name == "delayq_held_key"
    assert schedule(TOPIC, key="other") != schedule("t.other", key="k")


def test_keep_returns_the_message_that_has_the_key_and_leaves_it_as_it_is() -> None:
    first = later({"n": 1}, key="k")
    before = row(first.pk)
    assert schedule(TOPIC, {"n": 2}, key="k", on_conflict="keep") == first.pk
    assert row(first.pk) == before
    assert Message.objects.count() == 1


def test_one_of_many_at_once_gets_the_key() -> None:
    def add(_number: int) -> int:
        return schedule(TOPIC, key="k", on_conflict="keep")

    assert len(set(at_once(8, add))) == 1
    assert Message.objects.count() == 1


def test_the_key_of_a_message_that_outlived_its_hold_is_free() -> None:
    id_ = claimed(key="k", unique="1h").id
    assert succeed(id_)
    with pytest.raises(IntegrityError):
        schedule(TOPIC, key="k")
    unguarded(Message).filter(pk=id_).update(finished_at=timezone.now() - timedelta(hours=2))
    assert schedule(TOPIC, key="k") != id_
    assert Message.objects.get(pk=id_).key_for is None


def test_a_message_whose_time_to_start_is_over_expires_as_the_call_has_it_expire() -> None:
    ids = [due(key=key, expires=0.01).pk for key in ("a", "b")]
    eventually(lambda: all(one.is_expired(timezone.now()) for one in Message.objects.all()))
    schedule(TOPIC, key="a")
    schedule_message(TOPIC, key="b")
    by_sql, by_call = (Message.objects.get(pk=pk) for pk in ids)
    assert by_sql.state == by_call.state == State.EXPIRED
    moves = [
        [(move.number, move.from_state, move.to_state, move.reason) for move in one.transitions.order_by("number")]
        for one in (by_sql, by_call)
    ]
    assert moves[0] == moves[1]


def test_a_message_that_waits_again_keeps_others_with_its_key_out() -> None:
    id_ = due(key="k", unique="scheduled").pk
    claim(id_)
    fail(id_, delay=timedelta(hours=1))
    assert schedule(TOPIC, key="k", on_conflict="keep") == id_
    assert Message.objects.get(pk=id_).state == State.SCHEDULED


def test_a_kept_message_that_is_unique_while_scheduled_begins_after_the_callers_transaction() -> None:
    id_ = due(key="k", unique="scheduled").pk
    with unfinished(lambda: schedule(TOPIC, key="k", unique="scheduled", on_conflict="keep")):
        assert claim(id_) == []
    assert [one.id for one in claim(id_)] == [id_]
    # A worker may have passed over it meanwhile: Redis is to be told of it again.
    assert list(Unannounced.objects.values_list("pk", flat=True)) == [id_]


# --- cancel -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", State)
def test_a_cancel_answers_and_writes_as_the_call_does(state: State) -> None:
    by_call, by_sql = bring(state), bring(state)
    assert cancel(by_sql, reason="why") == str(cancel_message(by_call, reason="why"))
    check_same(by_call, by_sql)
    # And once more.
    assert cancel(by_sql) == str(cancel_message(by_call))
    check_same(by_call, by_sql)


def check_same(by_call: int, by_sql: int) -> None:
    apart = {"finished_at", "due_at", "expires_at", "leased_until", "claimed_at", "ready_at"}
    rows = [{k: v for k, v in row(pk).items() if k not in apart} for pk in (by_call, by_sql)]
    assert rows[0] == rows[1]
    moves = [
        list(
            Message.objects.get(pk=pk)
            .transitions.order_by("number")
            .values_list("number", "from_state", "to_state", "delivery", "reason", "error", "exception")
        )
        for pk in (by_call, by_sql)
    ]
    assert moves[0] == moves[1]
    logged = [list(LogRow.objects.filter(message_id=pk).values_list("number", flat=True)) for pk in (by_call, by_sql)]
    assert logged[0] == logged[1]
    finished = [Message.objects.get(pk=pk).finished_at is None for pk in (by_call, by_sql)]
    assert finished[0] == finished[1]


def test_a_cancel_after_a_crash_tells_that_the_outcome_is_unknown() -> None:
    ids = [due().pk for _ in range(2)]
    unguarded(Message).filter(pk__in=ids).update(deliveries=1)
    assert cancel(ids[0]) == str(cancel_message(ids[1])) == "outcome unknown"


def test_a_cancel_by_key_means_the_message_that_the_call_means() -> None:
    id_ = later(key="k").pk
    assert cancel(topic=TOPIC, key="no such") == "not found"
    assert cancel(topic=TOPIC, key="k") == "cancelled"
    assert Message.objects.get(pk=id_).state == State.CANCELLED
    assert cancel(topic=TOPIC, key="k") == "not found"
    assert cancel(999_999) == "not found"


@pytest.mark.parametrize("options", [{}, {"topic": "t"}, {"key": "k"}, {"id_": 1, "topic": "t", "key": "k"}])
def test_a_cancel_needs_an_id_or_a_topic_and_a_key(options: dict[str, Any]) -> None:
    if not options:
        options = {"reason": "no reason"}
    with pytest.raises(DatabaseError, match=r"^delayq_cancel: name the message by its id, or by topic and key"):
        cancel(**options)


# --- transactions, roles, schemas -------------------------------------------------------------------------------------


def test_a_transaction_that_rolls_back_leaves_nothing() -> None:
    with transaction.atomic():
        schedule(TOPIC)
        transaction.set_rollback(True)
    assert not Message.objects.exists()
    assert not Unannounced.objects.exists()


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_strict_transaction_gets_a_serialization_failure_and_no_second_message(level: str) -> None:
    with connections["default"].cursor() as cursor:
        cursor.execute(f"BEGIN ISOLATION LEVEL {level}")
        cursor.execute("SELECT count(*) FROM delayq_message")
        at_once(1, lambda _number: later(key="k"))
        with pytest.raises(DatabaseError) as refused:
            schedule(TOPIC, key="k", on_conflict="keep")
        cursor.execute("ROLLBACK")
    assert getattr(refused.value.__cause__, "sqlstate", None) == "40001"
    assert Message.objects.count() == 1


@contextmanager
def acting(role: str) -> Iterator[None]:
    with connection.cursor() as cursor:
        cursor.execute(f"SET ROLE {role}")
        try:
            yield
        finally:
            cursor.execute("RESET ROLE")


@pytest.fixture
def billing() -> Iterator[Callable[..., None]]:
    """A role without rights, and a function that gives it some."""

    def grant(*rights: str) -> None:
        with connection.cursor() as cursor:
            for right in rights:
                cursor.execute(f"GRANT {right} TO billing")

    with connection.cursor() as cursor:
        cursor.execute("CREATE ROLE billing")
        yield grant
        cursor.execute("DROP OWNED BY billing")
        cursor.execute("DROP ROLE billing")


def test_a_role_without_rights_is_told_which_it_lacks(billing: Callable[..., None]) -> None:
    with acting("billing"), pytest.raises(ProgrammingError, match="permission denied for table delayq_message"):
        schedule(TOPIC)
    with acting("billing"), pytest.raises(ProgrammingError, match="permission denied for table delayq_message"):
        cancel(1)


def test_an_upgraded_function_comes_and_goes_with_its_migration() -> None:
    terms: dict[str, Any] = {"verbosity": 0, "interactive": False}
    names = "SELECT proname FROM pg_proc WHERE proname LIKE 'delayq%%' ORDER BY 1"
    try:
        call_command("migrate", "delayq", "0002", **terms)
        with connection.cursor() as cursor:
            cursor.execute(names)
            assert cursor.fetchall() == []
        assert later().pk
    finally:
        call_command("migrate", **terms)
    with connection.cursor() as cursor:
        cursor.execute(names)
        assert cursor.fetchall() == [("delayq_cancel",), ("delayq_move",), ("delayq_schedule",)]
    assert schedule(TOPIC)


def test_the_functions_find_their_tables_whatever_the_callers_path_is() -> None:
    with connection.cursor() as cursor:
        # A table of this name in the session's own schema must not get the message.
        cursor.execute("CREATE TEMPORARY TABLE delayq_message (LIKE public.delayq_message)")
        try:
            cursor.execute("SET search_path TO pg_temp")
            cursor.execute("SELECT public.delayq_schedule(%s)", [TOPIC])
            pk = cursor.fetchone()[0]
            cursor.execute("SELECT public.delayq_cancel(%s)", [pk])
            assert cursor.fetchone()[0] == "cancelled"
        finally:
            cursor.execute("RESET search_path")
            cursor.execute("DROP TABLE pg_temp.delayq_message")
    assert Message.objects.get().pk == pk


def test_rows_that_nobody_reads_are_deleted_after_a_while() -> None:
    old, new = schedule(TOPIC), schedule(TOPIC)
    Unannounced.objects.filter(pk=old).update(at=timezone.now() - unannounced.USELESS_AFTER - timedelta(seconds=1))
    unannounced.drop_useless("default")
    assert [one.pk for one in Unannounced.objects.all()] == [new]


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_another_database_has_functions_of_its_own() -> None:
    pk = schedule(TOPIC, key="k", using="other")
    assert Message.objects.using("other").get().pk == pk
    assert not Message.objects.exists()
    assert cancel(topic=TOPIC, key="k", using="other") == "cancelled"


class Elsewhere:
    """A router that keeps the app's tables out of this database, though its functions were asked for."""

    def allow_migrate(self, db: str, app_label: str, model_name: str | None = None, **hints: Any) -> bool | None:
        return None if model_name is None or app_label != "delayq" else False


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_where_a_router_makes_no_tables_the_migration_makes_no_functions(settings: Any) -> None:
    terms: dict[str, Any] = {"database": "other", "verbosity": 0, "interactive": False}
    with connections["other"].cursor() as cursor:
        try:
            call_command("migrate", "delayq", "0002", **terms)
            # As if the tables had never been made here.
            cursor.execute("ALTER TABLE delayq_message RENAME TO hidden")
            settings.DATABASE_ROUTERS = [Elsewhere()]
            call_command("migrate", "delayq", "0003", **terms)
            cursor.execute("SELECT count(*) FROM pg_proc WHERE proname LIKE 'delayq%'")
            assert cursor.fetchone() == (0,)
            call_command("migrate", "delayq", "0002", **terms)
        finally:
            settings.DATABASE_ROUTERS = []
            cursor.execute("ALTER TABLE IF EXISTS hidden RENAME TO delayq_message")
            call_command("migrate", **terms)
    assert schedule(TOPIC, using="other")


def test_in_a_test_what_sql_has_scheduled_is_delivered_like_any_other() -> None:
    with Delayq() as delayq:
        schedule("t.ok", {"n": 1})
        schedule("t.ok", delay="1 hour")
        delayq.assert_scheduled("t.ok", payload={"n": 1})
        delayq.drain()
        assert Message.objects.filter(state=State.CONSUMED).count() == 1
        delayq.travel("61m")
        delayq.drain()
    assert Message.objects.filter(state=State.CONSUMED).count() == 2
