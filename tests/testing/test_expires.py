"""The time to live of a message meets retries, actions and keys."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_delayq import (
    Delivered,
    InvalidMessage,
    OnConflict,
    aschedule_message,
    cancel_message,
    handler,
    requeue_message,
    reschedule_message,
    run_message,
    schedule_message,
    schedule_messages,
)
from django_delayq.core.states import State
from django_delayq.core.verdicts import Verdict
from django_delayq.models import Message
from django_delayq.testing import Delayq
from tests.support.steps import log, message

pytestmark = pytest.mark.django_db


@pytest.fixture
def failing() -> list[bool]:
    """Have the handler of a topic fail, which is retried after 20 minutes, until the list is empty."""
    fails = [True]

    @handler("t.bank", retry=["20m"])
    def ask(message: object) -> None:
        if fails:
            raise RuntimeError("the bank is down")

    return fails


@pytest.mark.parametrize("after", ["12m", "1h"], ids=["due time to come", "due time over"])
def test_a_message_that_expired_before_its_retry_runs_when_it_is_requeued(
    delayq: Delayq, failing: list[bool], after: str
) -> None:
    pk = schedule_message("t.bank", expires="10m").pk
    delayq.drain(after, raise_errors=False)
    assert message(pk).state == State.EXPIRED
    failing.clear()
    assert requeue_message(pk).verdict == Verdict.REQUEUED
    assert [ran.outcome for ran in delayq.drain("1h")] == ["consumed"]


@pytest.mark.parametrize(
    "act", [run_message, lambda pk: reschedule_message(pk, delay="1m")], ids=["run now", "reschedule"]
)
def test_a_message_that_waits_for_its_retry_may_be_made_due_earlier(
    delayq: Delayq, failing: list[bool], act: Callable[[int], Any]
) -> None:
    pk = schedule_message("t.bank", expires="10m").pk
    delayq.drain(raise_errors=False)
    failing.clear()
    assert act(pk).verdict == Verdict.RESCHEDULED
    assert [ran.outcome for ran in delayq.drain("5m")] == ["consumed"]


@pytest.mark.parametrize("act", ["debounce", "run now", "requeue"])
def test_an_action_that_moves_no_due_time_moves_no_expiry(delayq: Delayq, failing: list[bool], act: str) -> None:
    pk = schedule_message("t.bank", expires="1h", key="a").pk
    delayq.drain(raise_errors=False)
    before = message(pk)
    if act == "debounce":
        assert schedule_message("t.bank", delay="1m", key="a", on_conflict=OnConflict.DEBOUNCE).pk == pk
    elif act == "run now":
        delayq.travel("21m")
        assert run_message(pk)
    else:
        assert cancel_message(pk)
        assert requeue_message(pk)
    after = message(pk)
    assert after.moves > before.moves
    assert (after.due_at, after.expires_at) == (before.due_at, before.expires_at)


@pytest.mark.parametrize("unique", ["live", "scheduled"])
@pytest.mark.parametrize("on_conflict", OnConflict)
def test_a_message_that_can_start_no_more_keeps_nobody_out(
    delayq: Delayq, unique: str, on_conflict: OnConflict
) -> None:
    """No worker has swept it yet: there was none for an hour."""
    seen = []

    @handler("t.index")
    def index(message: Delivered[Any]) -> None:
        seen.append(message.id)

    def change() -> Message:
        return schedule_message("t.index", key="5", unique=unique, on_conflict=on_conflict, expires="10m")

    first = change()
    delayq.travel("59m")
    second = change()
    assert not second.existed
    delayq.travel("1m")
    delayq.drain()
    assert seen == [second.pk]
    assert message(first.pk).state == State.EXPIRED
    assert log(first.pk)[-1].reason == "not started in time"


# --- the time of a handler, and of a requeue --------------------------------------------------------------------------


@pytest.fixture
def code() -> list[int]:
    """Return the ids of the messages that a handler with a time to start has got."""
    seen: list[int] = []
    handler("t.code", expires="10m")(lambda message: seen.append(message.id))
    return seen


def life(pk: int) -> timedelta | None:
    row = message(pk)
    return None if row.expires_at is None else row.expires_at - row.due_at


def test_messages_of_a_handler_with_a_time_to_start_expire_however_they_are_scheduled(
    delayq: Delayq, code: list[int]
) -> None:
    rows = [
        schedule_message("t.code", delay="1h"),
        async_to_sync(aschedule_message)("t.code", delay="1h"),
        *schedule_messages([{"topic": "t.code", "delay": "1h"}, {"topic": "t.code", "key": "a", "expires": None}]),
    ]
    # As a handler schedules, and with the key of a message that waits.
    rows.append(schedule_message("t.code", key="a", on_conflict="replace", delay="1h"))
    assert {life(row.pk) for row in rows} == {timedelta(minutes=10)}
    assert rows[0].expires_at == message(rows[0].pk).expires_at
    delayq.travel("1h10m")
    delayq.drain()
    assert (code, {message(row.pk).state for row in rows}) == ([], {State.EXPIRED})


def test_a_call_names_another_time_to_start_than_the_handler_or_none(delayq: Delayq, code: list[int]) -> None:
    longer, never = schedule_messages([{"topic": "t.code", "expires": expires} for expires in ("1h", False)])
    assert (life(longer.pk), life(never.pk)) == (timedelta(hours=1), None)
    delayq.travel("30m")
    delayq.drain()
    assert code == [longer.pk, never.pk]


def test_a_time_to_start_of_the_handler_costs_no_statement(code: list[int]) -> None:
    with CaptureQueriesContext(connection) as one:
        schedule_message("t.ok")
    with CaptureQueriesContext(connection) as other:
        schedule_message("t.code")
    assert len(one) == len(other)


@pytest.mark.parametrize("expires", [0, -1, True, "soon", "40000d"])
def test_an_impossible_time_to_start_is_refused_at_the_call(delayq: Delayq, expires: Any) -> None:
    pk = schedule_message("t.ok", expires="1m", delay="1m").pk
    with pytest.raises(InvalidMessage, match="expires"):
        handler("t.never", expires=expires)
    with pytest.raises(InvalidMessage, match="expires"):
        requeue_message(pk, expires=expires)


@pytest.mark.parametrize(
    ("expires", "expected"), [("1h", timedelta(hours=1)), (False, None), (None, timedelta(minutes=10))], ids=str
)
def test_a_requeue_gives_another_time_to_start(
    delayq: Delayq, code: list[int], expires: Any, expected: timedelta | None
) -> None:
    pks = [schedule_message("t.code").pk for _ in range(2)]
    delayq.travel("10m")
    delayq.drain()
    assert requeue_message(pks[0], delay="5m", expires=expires)
    assert requeue_message(Message.objects.filter(pk=pks[1]), expires=expires)[Verdict.REQUEUED] == 1
    assert [life(pk) for pk in pks] == [expected] * 2
    delayq.drain("6m")
    assert sorted(code) == pks


def test_a_requeue_that_keeps_the_due_time_counts_from_that(delayq: Delayq) -> None:
    pk = schedule_message("t.ok", delay="1h").pk
    assert cancel_message(pk)
    assert requeue_message(pk, expires="5m")
    assert life(pk) == timedelta(minutes=5)
