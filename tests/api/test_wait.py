"""A message is waited for: until it has ended, and no longer than the caller wants."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import connection, connections, transaction
from django.db.transaction import TransactionManagementError
from django.test.utils import CaptureQueriesContext

from django_delayq import cancel_message, schedule_message
from django_delayq.core.states import FINAL, State
from django_delayq.models import Message
from django_delayq.record import purge
from tests.support.processes import Start
from tests.support.steps import TOPIC, bring, claimed, fail, later, message, succeed

pytestmark = pytest.mark.django_db(transaction=True)

WAYS: list[Callable[[Message, Any], Message]] = [
    lambda message, timeout: message.wait(timeout),
    lambda message, timeout: async_to_sync(message.await_end)(timeout),
]
ways = pytest.mark.parametrize("wait", WAYS, ids=["sync", "async"])


@ways
@pytest.mark.parametrize("state", sorted(FINAL))
def test_a_message_that_has_ended_is_read_again_in_two_statements(
    wait: Callable[[Message, Any], Message], state: State
) -> None:
    row = message(bring(state))
    old = Message(pk=row.pk, topic=row.topic)
    with transaction.atomic(), CaptureQueriesContext(connection) as statements:
        found = wait(old, 0)
    assert (found is old, old.state, old.finished_at) == (True, state, row.finished_at)
    assert len(statements) == 2


@ways
def test_a_wait_ends_with_the_message_and_not_with_a_retry(wait: Callable[[Message, Any], Message]) -> None:
    row = claimed()
    seen: list[State] = []

    def other() -> None:
        try:
            seen.append(State(wait(message(row.id), "60s").state))
        finally:
            connections.close_all()

    waiting = threading.Thread(target=other)
    waiting.start()
    assert fail(row.id)
    assert succeed(row.id)
    waiting.join()
    assert seen == [State.CONSUMED]


@ways
def test_a_wait_that_takes_too_long_names_the_message_and_its_state(wait: Callable[[Message, Any], Message]) -> None:
    waits = later()
    for timeout in (0, timedelta(milliseconds=30)):
        with pytest.raises(TimeoutError, match=f"message {waits.pk} of topic '{TOPIC}' has not ended: it is scheduled"):
            wait(waits, timeout)


@ways
def test_within_a_transaction_nobody_waits_for_what_it_may_never_see(wait: Callable[[Message, Any], Message]) -> None:
    with transaction.atomic():
        waits = later()
        with pytest.raises(TransactionManagementError, match="wait for it after the commit"):
            wait(waits, "60s")
        assert cancel_message(waits)
        assert wait(waits, "60s").state == State.CANCELLED


@ways
def test_a_message_that_was_purged_is_not_waited_for(wait: Callable[[Message, Any], Message]) -> None:
    waits = message(bring(State.DEAD))
    purge.purge_ids("default", [waits.pk])
    with pytest.raises(Message.DoesNotExist):
        wait(waits, "60s")


@ways
@pytest.mark.parametrize("timeout", [-1, "soon", True, None])
def test_an_impossible_time_is_refused(wait: Callable[[Message, Any], Message], timeout: Any) -> None:
    with pytest.raises(ValueError, match="timeout"):
        wait(message(bring(State.DEAD)), timeout)


@pytest.mark.usefixtures("timed_by")
def test_what_a_worker_consumes_is_waited_for(start: Start) -> None:
    start()
    for wait in WAYS:
        assert wait(schedule_message("t.ok"), "60s").state == State.CONSUMED
