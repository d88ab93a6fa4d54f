"""DELAYQ["TESTING"]: "immediate" runs a handler at the call, "manual" runs none; neither uses Redis."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from django.db import transaction

from django_delayq import (
    MessageDict,
    RetryLater,
    handler,
    pause_queue,
    requeue_message,
    run_message,
    schedule_message,
    schedule_messages,
)
from django_delayq.models import Message
from django_delayq.project.registry import Delivered
from django_delayq.testing import Delayq, UnknownTopic
from tests.support.record_of import effects_per_message, path_of

pytestmark = pytest.mark.usefixtures("either_database")


@pytest.fixture
def ran(immediate: None) -> list[str]:
    """The order in which handlers began and ended: one that schedules another, and one that asks to wait."""
    order: list[str] = []

    @handler("i.outer", transactional=True)
    def outer(message: Delivered) -> None:
        order.append("outer begins")
        schedule_message("i.inner")
        order.append("outer ends")

    @handler("i.inner")
    def inner(message: Delivered) -> None:
        order.append("inner")
        if message.deliveries == 1:
            raise RetryLater(0, counts=False)

    return order


def test_a_due_message_runs_at_the_call_and_a_later_one_waits(immediate: None) -> None:
    with transaction.atomic():
        message, later = schedule_message("t.tx"), schedule_message("t.tx", delay="1h")
        assert effects_per_message() == {message.pk: 1}
    assert path_of(message) == ["scheduled", "running", "consumed"]
    assert path_of(later) == ["scheduled"]
    assert run_message(later)
    assert path_of(later)[-1] == "consumed"
    assert len(schedule_messages([{"topic": "t.tx"}, {"topic": "t.tx", "queue": "mail"}])) == 2
    assert sum(effects_per_message().values()) == 4


def test_a_message_that_a_handler_schedules_runs_when_the_handler_has_ended(ran: list[str]) -> None:
    schedule_message("i.outer")
    assert ran == ["outer begins", "outer ends", "inner", "inner"]


def test_functions_on_commit_that_a_capture_calls_are_called_once(
    ran: list[str], django_capture_on_commit_callbacks: Any
) -> None:
    with django_capture_on_commit_callbacks(execute=True), transaction.atomic():
        for _number in range(2):
            transaction.on_commit(lambda: schedule_message("i.outer"))
    assert ran == 2 * ["outer begins", "outer ends", "inner", "inner"]


def test_the_error_of_a_handler_is_raised_at_the_call_and_recorded(immediate: None) -> None:
    with pytest.raises(RuntimeError, match="it never works"):
        schedule_message("t.fail", retry=["1h"])
    failed = Message.objects.get()
    assert (failed.state, failed.attempts) == ("scheduled", 1)


def test_an_error_leaves_all_messages_of_one_call(immediate: None) -> None:
    many: list[MessageDict] = [
        {"topic": "t.tx"},
        {"topic": "t.tx", "key": "k"},
        {"topic": "t.fail", "retry": ["1h"]},
        {"topic": "t.ok"},
    ]
    with pytest.raises(RuntimeError, match="it never works"):
        schedule_messages(many)
    # The messages after it wait, as in a drain.
    states = [(row.topic, row.state, row.attempts) for row in Message.objects.order_by("topic", "pk")]
    assert states == [
        ("t.fail", "scheduled", 1),
        ("t.ok", "scheduled", 0),
        ("t.tx", "consumed", 0),
        ("t.tx", "consumed", 0),
    ]


def test_an_answer_is_not_raised(immediate: None) -> None:
    message = schedule_message("t.reject")
    assert path_of(message)[-1] == "dead"
    assert requeue_message(message)
    assert path_of(message)[-3:] == ["scheduled", "running", "dead"]


def test_a_paused_queue_waits(immediate: None) -> None:
    pause_queue("default")
    assert path_of(schedule_message("t.ok")) == ["scheduled"]


def test_a_topic_without_a_handler_is_an_error(immediate: None) -> None:
    with pytest.raises(UnknownTopic, match=r"did you mean 't\.effect'"):
        schedule_message("t.efect")
    with Delayq() as delayq:
        delayq.handled_elsewhere("t.efect")
        schedule_message("t.efect")


def test_the_helper_works_in_both_modes(immediate: None, delayq: Delayq) -> None:
    schedule_message("t.ok")
    later = schedule_message("t.ok", delay="1h")
    delayq.assert_scheduled("t.ok", count=1)
    assert [ran.message for ran in delayq.drain("1h")] == [later]


def test_manual_messages_wait_and_no_byte_reaches_redis(settings: Any, redis_client: redis.Redis) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "TESTING": "manual"}
    before = redis_client.info("stats")["total_commands_processed"]
    assert path_of(schedule_message("t.ok")) == ["scheduled"]
    assert redis_client.info("stats")["total_commands_processed"] == before + 1
