"""perform() calls one handler with a made delivery, without a database."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from django.utils import translation

from django_delayq import InvalidMessage, MessageCancelled, Reject, handler
from django_delayq.project.registry import Delivered
from django_delayq.testing import Delayq


@pytest.fixture
def seen() -> list[Any]:
    """What the handlers of two topics, one sync and one async, got."""
    seen: list[Any] = []

    @handler("p.sync", timeout="1m", queue="mail")
    def sync(message: Delivered) -> None:
        seen.append(message)

    @handler("p.async", transactional=True)
    async def asynchronous(message: Delivered) -> None:
        seen.append(message)
        await message.aextend("5m")

    return seen


def test_the_handler_gets_what_it_gets_in_life(delayq: Delayq, seen: list[Any]) -> None:
    number = uuid.uuid4()
    delayq.perform(
        "p.sync", {"id": number, "pair": (1, 2)}, attempt=2, key="k", headers={"h": 1}, cancel_requested=True
    )
    [message] = seen
    assert (message.topic, message.queue, message.key, message.priority) == ("p.sync", "mail", "k", 0)
    assert message.payload == {"id": str(number), "pair": [1, 2]}
    assert message.headers == {"h": 1}
    assert (message.attempt, message.deliveries, message.cancel_requested) == (2, 2, True)
    assert message.due_at <= delayq.now
    before = message.deadline
    assert message.extend("1h") > before


def test_an_async_handler_is_awaited(delayq: Delayq, seen: list[Any]) -> None:
    delayq.perform("p.async", attempt=1, deliveries=4, message_id=9)
    assert [(message.id, message.attempt, message.deliveries) for message in seen] == [(9, 1, 4)]


def test_what_the_handler_activates_ends_with_it(delayq: Delayq) -> None:
    handler("d.german")(lambda message: translation.activate("de"))
    before = translation.get_language()
    assert before != "de"
    delayq.perform("d.german")
    assert translation.get_language() == before


def test_the_error_of_the_handler_is_raised(delayq: Delayq) -> None:
    with pytest.raises(Reject, match="not wanted"):
        delayq.perform("t.reject")
    with pytest.raises(RuntimeError, match="not yet"):
        delayq.perform("t.second_time", attempt=1)


def test_a_handler_that_is_asked_to_stop_raises(delayq: Delayq) -> None:
    @handler("p.stop")
    def stop(message: Delivered) -> None:
        message.raise_if_cancelled()

    delayq.perform("p.stop")
    with pytest.raises(MessageCancelled):
        delayq.perform("p.stop", cancel_requested=True)


def test_what_no_message_can_hold_is_refused(delayq: Delayq, seen: list[Any]) -> None:
    with pytest.raises(InvalidMessage, match="is not JSON"):
        delayq.perform("p.sync", {"order": object()})
    for attempt, deliveries in ((0, None), (2, 1)):
        with pytest.raises(ValueError, match="attempt counts from 1"):
            delayq.perform("p.sync", attempt=attempt, deliveries=deliveries)
    assert seen == []
