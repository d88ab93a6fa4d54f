"""What follows the ends of messages, as tests of a project see it: every kind of handler, delivered in the test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from django_delayq import Reject, RetryLater, RetryPolicy, handler, schedule_message, signals
from django_delayq.models import Message
from django_delayq.project import registry
from django_delayq.recurring import create_schedule, run_schedule
from django_delayq.testing import Delayq
from tests.support.receivers import heard

TOPIC = "f.ending"

pytestmark = pytest.mark.usefixtures("either_database")


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the payloads of what followed, as the handler that follows gets them."""
    monkeypatch.setattr(registry, "declared", dict(registry.declared))
    seen: list[Any] = []
    handler("f.follows")(lambda message: seen.append(message.payload))
    return seen


def fails(message: Any) -> None:
    raise RuntimeError("it broke")


async def fails_async(message: Any) -> None:
    raise RuntimeError("it broke")


def rejects(message: Any) -> None:
    raise Reject("it broke")


def asks_for_more(message: Any) -> None:
    raise RetryLater("1h", "it broke", payload={"left": 1})


def fails_in_batches(messages: list[Any]) -> None:
    for message in messages:
        message.reject("it broke")


ONCE = RetryPolicy.exponential(max_attempts=1)
KINDS: dict[str, tuple[Callable[[Any], Any], dict[str, Any], str]] = {
    "plain": (fails, {"retry": False}, "RuntimeError: it broke"),
    "transactional": (fails, {"retry": False, "transactional": True}, "RuntimeError: it broke"),
    "async": (fails_async, {"retry": False}, "RuntimeError: it broke"),
    "that rejects": (rejects, {}, "Reject: it broke"),
    "that may ask no more": (
        asks_for_more,
        {"retry": RetryPolicy.exponential(max_attempts=1)},
        "RetryLater: it broke (attempt 1 of 1)",
    ),
    "of batches": (fails_in_batches, {"batch": 5}, "Reject: it broke"),
    "with a limit": (fails, {"retry": False, "limit": 1, "rate": "100/s"}, "RuntimeError: it broke"),
}


@pytest.mark.parametrize(("function", "options", "error"), KINDS.values(), ids=KINDS)
def test_the_end_of_each_kind_of_handler_leads_on(
    function: Callable[[Any], Any], options: Any, error: str, delayq: Delayq, told: list[Any]
) -> None:
    handler(TOPIC, on_dead="f.follows", **options)(function)
    with heard(signals.message_scheduled) as seen:
        made = [schedule_message(TOPIC, {"n": n}, key=f"k{n}").pk for n in range(2)]
        delayq.drain(raise_errors=False)
    assert sorted((ended["id"], ended["state"], ended["error"]) for ended in told) == [
        (pk, "dead", error) for pk in made
    ]
    assert [ended["payload"] for ended in told] == [{"left": 1}] * 2 if "more" in error else [{"n": 0}, {"n": 1}]
    topics = [arguments["topic"] for arguments in seen]
    assert (topics.count(TOPIC), topics.count("f.follows")) == (2, 2)


def test_an_expired_message_leads_on(delayq: Delayq, told: list[Any]) -> None:
    handler(TOPIC, expires="1m", on_expired="f.follows")(fails)
    made = schedule_message(TOPIC, {"n": 1}, delay="1h")
    delayq.drain("2h", queue="other")
    delayq.drain()
    assert [(ended["id"], ended["state"], ended["reason"]) for ended in told] == [
        (made.pk, "expired", "not started in time")
    ]


def test_a_message_that_another_call_expires_to_get_its_key_leads_on(delayq: Delayq, told: list[Any]) -> None:
    with heard(signals.message_scheduled) as seen:
        old = schedule_message("f.elsewhere", key="k", expires="1m", on_expired="f.follows")
        delayq.drain("1h", queue="other")
        schedule_message("f.elsewhere", key="k", delay="1d")
        delayq.drain()
    assert [ended["id"] for ended in told] == [old.pk]
    assert [arguments["topic"] for arguments in seen] == ["f.elsewhere", "f.follows", "f.elsewhere"]


@pytest.mark.usefixtures("immediate")
def test_what_follows_runs_at_the_call_where_messages_do(told: list[Any]) -> None:
    handler(TOPIC, retry=False, on_dead="f.follows")(fails)
    with pytest.raises(RuntimeError, match="it broke"):
        schedule_message(TOPIC)
    handler("f.rejects", on_dead="f.follows")(rejects)
    schedule_message("f.rejects")
    assert [ended["topic"] for ended in told] == ["f.rejects"]


def test_what_follows_may_fail_too_and_nothing_follows_that(delayq: Delayq, told: list[Any]) -> None:
    handler("f.fails", retry=False)(fails)
    schedule_message("f.fails", on_dead="f.fails")
    delayq.drain(raise_errors=False)
    assert [message.state for message in Message.objects.filter(topic="f.fails")] == ["dead", "dead"]
    assert told == []


def test_what_a_recurring_schedule_makes_leads_on(delayq: Delayq, told: list[Any]) -> None:
    handler(TOPIC, retry=False, on_dead="f.follows")(fails)
    create_schedule("nightly", TOPIC, cron="0 3 * * *")
    made = run_schedule("nightly")
    delayq.drain(raise_errors=False)
    assert [(ended["id"], ended["topic"]) for ended in told] == [(made.pk, TOPIC)]


def test_a_chain_goes_on_beside_what_follows(delayq: Delayq, told: list[Any]) -> None:
    @handler(TOPIC, retry=False, on_dead="f.follows")
    def next_one(message: Any) -> None:
        schedule_message(TOPIC, delay="1d", key=message.key)
        raise RuntimeError("it broke")

    schedule_message(TOPIC, key="k")
    delayq.drain(raise_errors=False)
    assert len(told) == 1
    (waiting,) = Message.objects.filter(state="scheduled")
    assert (waiting.topic, waiting.key, waiting.headers) == (TOPIC, "k", {})
