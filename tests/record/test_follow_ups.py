"""The messages that follow when another one ends dead or expired: ``on_dead`` and ``on_expired``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from django_delayq import (
    InvalidMessage,
    MessageDict,
    cancel_message,
    handler,
    requeue_message,
    schedule_message,
    schedule_messages,
)
from django_delayq.core.states import State
from django_delayq.models import Message, Transition
from django_delayq.record import crashes, transitions
from django_delayq.record.crashes import Death
from tests.support.rows import unguarded
from tests.support.steps import TOPIC, ago, claim, due, fail, log, message

pytestmark = pytest.mark.django_db

AFTER = "follow.up"


def followed(topic: str = AFTER) -> list[Message]:
    return list(Message.objects.filter(topic=topic).order_by("pk"))


def payloads(topic: str = AFTER) -> list[Any]:
    return [one.payload for one in followed(topic)]


def nothing(message: object) -> None:
    """Handle a message."""


# --- the ends ---------------------------------------------------------------------------------------------------------


def give_up(pk: int) -> str:
    (row,) = claim(pk)
    error = {"error": "ValueError: it broke", "exception": "builtins.ValueError"}
    assert fail(pk, row.deliveries, dead=True, leads_on=True, **error)
    return ""


def crash(pk: int) -> str:
    unguarded(Message).filter(pk=pk).update(deliveries=9, reported=0, excused=0)
    claim(pk, worker="w/alone")
    assert crashes.release_worker("default", "w", actor="s", shutdown=False, death=Death([pk]))
    return f"worker process died; it ran alone; {message(pk).deliveries} deliveries crashed"


def lose_at_most_once(pk: int) -> str:
    handler(TOPIC, redeliver=False)(nothing)
    claim(pk, worker="w")
    unguarded(Message).filter(pk=pk).update(leased_until=ago())
    assert crashes.reap("default", actor="reaper")
    return "lease ran out; its handler has redeliver=False"


def end_by_hand(pk: int) -> str:
    assert transitions.give_up("default", [pk], reason="too old")[0]
    return "too old"


def expire(pk: int) -> str:
    unguarded(Message).filter(pk=pk).update(expires_at=ago())
    assert transitions.expire("default", actor="w")
    return "not started in time"


ENDS: dict[str, tuple[State, Callable[[int], str]]] = {
    "out of retries": (State.DEAD, give_up),
    "crashed too often": (State.DEAD, crash),
    "crashed once, and is not delivered again": (State.DEAD, lose_at_most_once),
    "given up by a person": (State.DEAD, end_by_hand),
    "expired": (State.EXPIRED, expire),
}


@pytest.mark.parametrize(("state", "end"), ENDS.values(), ids=ENDS)
def test_one_message_that_says_what_ended_and_why_follows_each_end(state: State, end: Callable[[int], str]) -> None:
    chosen: Any = {f"on_{state}": AFTER, "headers": {"tenant": "acme"}, "key": "k"}
    pk, other = due({"order": 5}, **chosen).pk, due({"order": 6}, **chosen | {"key": "l"}).pk
    reason = end(pk)
    ended = message(pk)
    assert (ended.state, message(other).state) == (state, State.SCHEDULED)
    (new,) = followed()
    assert new.payload == {
        "id": pk,
        "topic": TOPIC,
        "queue": ended.queue,
        "key": "k",
        "payload": {"order": 5},
        "state": state.value,
        "reason": reason,
        "error": "" if reason else "ValueError: it broke",
        "exception": "" if reason else "builtins.ValueError",
        "attempts": ended.attempts,
        "deliveries": ended.deliveries,
    }
    # The headers travel on, and none of them makes a message follow this one.
    assert (new.state, new.key, new.headers) == (State.SCHEDULED, None, {"tenant": "acme"})
    assert ended.finished_at is not None
    assert new.due_at >= ended.finished_at
    assert [row.actor for row in log(new.pk)] == [log(pk)[-1].actor]
    # Each end has one of its own.
    unguarded(Message).filter(pk=pk).update(expires_at=None)
    assert requeue_message(pk)
    end(pk)
    assert len(followed()) == 2


def test_nothing_follows_another_end() -> None:
    both: Any = {"on_dead": AFTER, "on_expired": AFTER}
    cancelled, stopped, retried, expired = (due(**both if n < 3 else {"on_dead": AFTER}).pk for n in range(4))
    assert cancel_message(cancelled)
    claim(stopped, retried)
    assert cancel_message(stopped)
    assert fail(stopped, dead=True, leads_on=True)
    assert fail(retried)
    expire(expired)
    assert [message(pk).state for pk in (cancelled, stopped, retried, expired)] == [
        *(State.CANCELLED, State.CANCELLED, State.SCHEDULED, State.EXPIRED)
    ]
    assert followed() == []


# --- who chooses ------------------------------------------------------------------------------------------------------


def test_the_handler_chooses_for_messages_that_do_not() -> None:
    handler(TOPIC, on_dead=AFTER, on_expired="follow.expired")(lambda message: None)
    own, none, usual, late = due(on_dead="follow.own"), due(on_dead=False), due(), due(on_dead=AFTER)
    for one in (own, none, usual):
        give_up(one.pk)
    expire(late.pk)
    assert [payload["id"] for payload in payloads("follow.own")] == [own.pk]
    assert [payload["id"] for payload in payloads()] == [usual.pk]
    assert [payload["id"] for payload in payloads("follow.expired")] == [late.pk]


def test_what_follows_has_the_queue_the_priority_and_the_time_of_its_handler() -> None:
    def refuse(message: object) -> None:
        raise AssertionError

    handler(AFTER, queue="ends", priority=7, expires="1h", limit=1, limit_key=refuse)(nothing)
    handler(TOPIC, limit=1)(lambda message: None)
    pk = due(on_dead=AFTER, limit_key="acme").pk
    give_up(pk)
    (new,) = followed()
    assert (new.queue, new.priority, new.limit_key) == ("ends", 7, "acme")
    assert new.expires_at is not None
    assert (new.expires_at - new.due_at).total_seconds() == 3600


def test_one_of_many_is_chosen_for_in_bulk() -> None:
    rows: list[MessageDict] = [{"topic": TOPIC, "payload": n, "due_at": ago()} for n in range(6)]
    for row in rows[1::2]:
        row["on_dead"] = AFTER
    for one in schedule_messages(rows):
        give_up(one.pk)
    assert sorted(payload["payload"] for payload in payloads()) == [1, 3, 5]


def test_a_message_that_is_replaced_has_the_new_choice() -> None:
    due(key="k", on_dead=AFTER)
    pk = due(key="k", on_conflict="replace").pk
    give_up(pk)
    assert followed() == []


def test_headers_that_a_handler_passes_on_make_nothing_follow() -> None:
    first = message(due(on_dead=AFTER, headers={"tenant": "acme"}).pk)
    second = message(due(headers=first.headers).pk)
    assert second.headers == {"tenant": "acme"}
    give_up(second.pk)
    assert followed() == []


@pytest.mark.parametrize("own", [5, "x", {"on_dead": 5}, {"on_dead": "no topic!"}, {"on_dead": ["x"]}, [], None])
def test_a_header_that_somebody_else_wrote_ends_no_recording(own: object) -> None:
    pk = due().pk
    unguarded(Message).filter(pk=pk).update(headers={"delayq": own})
    give_up(pk)
    assert message(pk).state == State.DEAD
    assert followed() == []


@pytest.mark.parametrize("option", ["on_dead", "on_expired"])
def test_the_topic_that_follows_is_checked(option: Any) -> None:
    wrong: Any = {option: "no topic!"}
    with pytest.raises(InvalidMessage, match="topic must be"):
        schedule_message(TOPIC, **wrong)
    with pytest.raises(ValueError, match="topic must be"):
        handler("follow.never", **wrong)
    wrong = {option: "follow.self"}
    with pytest.raises(ValueError, match=r"'follow\.self' would follow itself without end"):
        handler("follow.self", **wrong)
    assert not Transition.objects.exists()
