"""A handler fares in the transaction of a TestCase as it does without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import IntegrityError, connections, transaction
from django.test import TestCase

from django_delayq import handler, schedule_message, signals
from django_delayq.models import Message
from django_delayq.project.registry import Delivered
from django_delayq.testing import Delayq, DelayqMixin, Ran, UnknownTopic
from tests.app.models import Effect
from tests.support.receivers import heard
from tests.support.record_of import path_of

CONSUMED, RETRIED = ("consumed", "consumed"), ("retried", "scheduled")

either_database = pytest.mark.usefixtures("either_database")


@pytest.fixture
def deliver(delayq: Delayq) -> Callable[..., Ran]:
    """Delivers a message to a function that is the handler."""

    def deliver(function: Callable[[], object], *, transactional: bool = False) -> Ran:
        @handler("l.handler", retry=["1h"], transactional=transactional)
        def handle(message: Delivered) -> None:
            function()

        schedule_message("l.handler")
        return delayq.drain(raise_errors=False)[0]

    return deliver


def insert_again() -> None:
    first = Effect.objects.create(message_id=1, delivery=1)
    Effect(pk=first.pk, message_id=2, delivery=1).save(force_insert=True)


def insert_many_again() -> None:
    first = Effect.objects.create(message_id=1, delivery=1)
    Effect.objects.bulk_create([Effect(pk=first.pk, message_id=2, delivery=1)])


@either_database
@pytest.mark.parametrize("fail", [insert_again, insert_many_again])
@pytest.mark.parametrize(
    "go_on",
    [
        Effect.objects.count,
        transaction.atomic(Effect.objects.count),
        Effect.objects.filter(message_id=2).delete,
        lambda: schedule_message("t.ok"),
    ],
    ids=["query", "block", "deletion", "message"],
)
def test_a_database_error_that_a_handler_catches_hinders_nothing_after_it(
    deliver: Any, fail: Callable[[], None], go_on: Callable[[], object]
) -> None:
    def handle() -> None:
        with pytest.raises(IntegrityError):
            fail()
        go_on()

    assert deliver(handle).outcome == "consumed"
    assert Effect.objects.get().message_id == 1


@either_database
def test_a_block_that_asks_for_no_savepoint_is_undone_by_an_error(deliver: Any) -> None:
    called: list[None] = []

    def handle() -> None:
        Effect.objects.create(message_id=1, delivery=1)
        with pytest.raises(ZeroDivisionError), transaction.atomic(savepoint=False):
            transaction.on_commit(lambda: called.append(None))
            Effect.objects.create(message_id=2, delivery=1)
            raise ZeroDivisionError

    assert deliver(handle).outcome == "consumed"
    assert (Effect.objects.get().message_id, called) == (1, [])


def leave_and_close() -> None:
    Effect.objects.create(message_id=1, delivery=1)
    connections.close_all()


@either_database
@pytest.mark.parametrize(
    ("handle", "transactional", "outcome", "effects"),
    [
        (leave_and_close, False, "consumed", 1),
        # A transaction whose connection is closed is rolled back.
        (transaction.atomic(leave_and_close), False, "consumed", 0),
        (leave_and_close, True, "retried", 0),
    ],
    ids=["outside of a transaction", "in a block", "transactional"],
)
def test_a_handler_that_closes_its_connections_closes_none_of_the_test(
    deliver: Any, handle: Callable[[], None], outcome: str, effects: int, *, transactional: bool
) -> None:
    assert deliver(handle, transactional=transactional).outcome == outcome
    assert Effect.objects.count() == effects


@either_database
@pytest.mark.parametrize("transactional", [False, True])
def test_a_function_on_commit_that_fails_has_the_message_retried_unless_it_is_recorded(
    deliver: Any, caplog: pytest.LogCaptureFixture, *, transactional: bool
) -> None:
    called: list[None] = []

    @transaction.atomic
    def handle() -> None:
        transaction.on_commit(insert_again)
        transaction.on_commit(lambda: called.append(None))

    with heard(signals.message_failed) as failures:
        ran = deliver(handle, transactional=transactional)
    assert (ran.outcome, ran.message.state) == (CONSUMED if transactional else RETRIED)
    assert isinstance(ran.error, IntegrityError)
    assert [type(failure["exception"]) for failure in failures] == ([] if transactional else [IntegrityError])
    assert ("After the commit of its handler" in caplog.text) == transactional
    assert (Effect.objects.get().message_id, called) == (1, [])


class TestWithAFunctionOnCommitOfTheClass(DelayqMixin, TestCase):
    @classmethod
    def setUpTestData(cls) -> None:
        transaction.on_commit(lambda: schedule_message("t.ok"))

    def test_it_is_called_in_the_first_test(self) -> None:
        self.delayq.assert_scheduled("t.ok", count=1)
        assert len(self.delayq.drain()) == 1

    def test_it_is_called_in_the_second_test(self) -> None:
        self.test_it_is_called_in_the_first_test()


@pytest.mark.django_db(databases=["default", "other"])
def test_an_immediate_message_runs_in_the_database_that_it_is_in(immediate: None) -> None:
    @handler("l.handler")
    def handle(message: Delivered) -> None:
        schedule_message("t.ok", using="other")
        schedule_message("t.ok")

    schedule_message("l.handler")
    assert [path_of(message)[-1] for message in Message.objects.using("default")] == ["consumed"] * 2
    assert Message.objects.using("other").get().state == "consumed"


@either_database
def test_a_topic_without_a_handler_is_an_error_when_the_handler_that_schedules_it_has_ended(immediate: None) -> None:
    @handler("l.handler")
    def handle(message: Delivered) -> None:
        schedule_message("t.efect")

    with pytest.raises(UnknownTopic, match=r"did you mean 't\.effect'"):
        schedule_message("l.handler")
    assert list(Message.objects.order_by("pk").values_list("topic", "state")) == [
        ("l.handler", "consumed"),
        ("t.efect", "scheduled"),
    ]
