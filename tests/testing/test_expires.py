"""The time to live of a message meets retries, actions and keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from django_delayq import (
    Delivered,
    OnConflict,
    cancel_message,
    handler,
    requeue_message,
    reschedule_message,
    run_message,
    schedule_message,
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
