"""assert_scheduled() and its kind find messages, and say which others there were."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import time_machine
from django.db import transaction

from django_delayq import cancel_message, schedule_message
from django_delayq.testing import Delayq, UnknownTopic

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _time_stands_still() -> Iterator[None]:
    with time_machine.travel(datetime.now(UTC), tick=False):
        yield


def test_scheduled_messages_come_in_the_order_of_their_due_times(delayq: Delayq) -> None:
    schedule_message("t.ok", 2, delay="2h")
    schedule_message("t.effect", 1, delay="1h")
    assert cancel_message(schedule_message("t.ok", 0))
    assert [message.payload for message in delayq.scheduled()] == [1, 2]
    assert [message.payload for message in delayq.scheduled("t.ok")] == [2]


NUMBER = uuid.UUID("3f2c6a52-6c0b-4f4e-9d3d-0d8f3c6a7b11")
FACTS = {"order": {"id": NUMBER, "lines": [{"sku": "a", "n": 1}, {"sku": "b", "n": 2}]}, "by": "anna"}


@pytest.mark.parametrize(
    "criteria",
    [
        {},
        {"payload": FACTS},
        {"payload__contains": {}},
        {"payload__contains": {"by": "anna"}},
        {"payload__contains": {"order": {"id": NUMBER}}},
        {"payload__contains": {"order": {"lines": [{"sku": "b"}]}}},
        {"due": "15m"},
        {"due": timedelta(minutes=16), "within": "2m"},
        {"key": "k", "queue": "mail", "priority": 3},
        {"count": 1},
    ],
    ids=str,
)
def test_a_message_is_found_by_what_it_has(delayq: Delayq, criteria: dict[str, Any]) -> None:
    message = schedule_message("t.ok", FACTS, delay="15m", key="k", queue="mail", priority=3)
    assert delayq.assert_scheduled("t.ok", **criteria) == message
    criteria.pop("count", None)
    with pytest.raises(AssertionError, match=f"#{message.pk} t.ok, due in 15 m, key 'k', payload"):
        delayq.assert_not_scheduled("t.ok", **criteria)


@pytest.mark.parametrize(
    ("criteria", "difference"),
    [
        ({"payload": {"order": 5, "by": "eve"}}, 'payload[\'by\'] is "anna", not "eve"'),
        ({"payload": {"order": 5}}, "payload has 'by' besides"),
        ({"payload": None}, 'payload is {"by": "anna", "order": 5}, not null'),
        ({"payload__contains": {"order": 7}}, "payload['order'] is 5, not 7"),
        ({"payload__contains": {"order": True}}, "payload['order'] is 5, not true"),
        ({"payload__contains": {"price": 1}}, "payload has no 'price'"),
        ({"due": "1h"}, "it is due 45 m earlier"),
        ({"due": "14m59s", "within": "0.5s"}, "it is due 1.0 s later"),
        ({"key": None}, "key is 'k', not None"),
        ({"queue": "mail"}, "queue is 'default', not 'mail'"),
        ({"priority": 1}, "priority is 0, not 1"),
        ({"key": "x", "priority": 1}, "key is 'k', not 'x'; priority is 0, not 1"),
    ],
    ids=str,
)
def test_a_failure_says_how_a_message_differs(delayq: Delayq, criteria: dict[str, Any], difference: str) -> None:
    schedule_message("t.ok", {"order": 5, "by": "anna"}, delay="15m", key="k")
    with pytest.raises(AssertionError) as caught:
        delayq.assert_scheduled("t.ok", **criteria)
    assert difference in str(caught.value)
    delayq.assert_not_scheduled("t.ok", **criteria)


@pytest.mark.parametrize("criterion", ["payload", "payload__contains"])
@pytest.mark.parametrize(
    ("sent", "other", "same"), [(1, True, 1.0), (False, 0, False), ([{"n": [1]}], [{"n": [True]}], [{"n": [1.0]}])]
)
def test_true_is_no_number(delayq: Delayq, criterion: str, sent: Any, other: Any, same: Any) -> None:
    schedule_message("t.ok", {"paid": sent})
    differs: Any = {criterion: {"paid": other}}
    is_like: Any = {criterion: {"paid": same}}
    delayq.assert_not_scheduled("t.ok", **differs)
    delayq.assert_scheduled("t.ok", **is_like)


def test_a_failure_lists_the_nearest_messages_first_and_then_the_others(delayq: Delayq) -> None:
    far = schedule_message("t.ok", {"order": 1, "by": "anna"}, delay="15m")
    near = schedule_message("t.ok", {"order": 2, "by": "eve"}, delay="20m")
    assert cancel_message(schedule_message("t.ok", {"order": 2, "by": "anna"}))
    schedule_message("t.effect")
    with pytest.raises(AssertionError) as caught:
        delayq.assert_scheduled("t.ok", payload__contains={"order": 3, "by": "eve"})
    both = "payload['order'] is 1, not 3; payload['by'] is \"anna\", not \"eve\""
    assert str(caught.value).splitlines() == [
        'No scheduled message has topic \'t.ok\', a payload that contains {"by": "eve", "order": 3}.',
        "Scheduled of this topic, the nearest first:",
        f'  #{near.pk} t.ok, due in 20 m, payload {{"by": "eve", "order": 2}}: payload[\'order\'] is 2, not 3',
        f'  #{far.pk} t.ok, due in 15 m, payload {{"by": "anna", "order": 1}}: {both}',
        "Of this topic, not scheduled any more: 1 cancelled",
        "Scheduled of other topics: 1 × t.effect",
    ]


def test_a_failure_without_any_message_says_so(delayq: Delayq) -> None:
    with pytest.raises(AssertionError, match="No message was scheduled at all"):
        delayq.assert_scheduled("t.ok")


def test_another_count_is_a_failure(delayq: Delayq) -> None:
    for number in range(7):
        schedule_message("t.ok", number)
    delayq.assert_scheduled("t.ok", count=7)
    with pytest.raises(AssertionError) as caught:
        delayq.assert_scheduled("t.ok", count=2)
    assert str(caught.value).startswith("2 scheduled message(s) were to have topic 't.ok', and 7 have:")
    assert str(caught.value).endswith("… and 2 more")
    with pytest.raises(ValueError, match="assert_not_scheduled"):
        delayq.assert_scheduled("t.ok", count=0)


def test_nothing_is_scheduled(delayq: Delayq) -> None:
    delayq.assert_not_scheduled()
    schedule_message("t.ok")
    with pytest.raises(AssertionError, match="No message was to be scheduled, and 1 are"):
        delayq.assert_not_scheduled()


def test_a_message_that_waits_for_a_commit_is_found(delayq: Delayq) -> None:
    with transaction.atomic():
        transaction.on_commit(lambda: schedule_message("t.ok"))
        delayq.assert_not_scheduled()
    delayq.assert_scheduled("t.ok", count=1)
    delayq.assert_scheduled("t.ok", count=1)


def test_a_message_that_was_rolled_back_is_not_found(delayq: Delayq) -> None:
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        transaction.on_commit(lambda: schedule_message("t.ok"))
        schedule_message("t.ok")
        raise ZeroDivisionError
    delayq.assert_not_scheduled()


def test_a_misspelt_topic_is_an_error_with_the_nearest_name(delayq: Delayq) -> None:
    for call in (delayq.scheduled, delayq.assert_scheduled, delayq.assert_not_scheduled, delayq.perform):
        with pytest.raises(UnknownTopic, match=r"'t\.efect'; did you mean 't\.effect'"):
            call("t.efect")
    delayq.handled_elsewhere("billing.charge")
    schedule_message("billing.charge")
    delayq.assert_scheduled("billing.charge")


def test_criteria_that_cannot_be_are_refused(delayq: Delayq) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        delayq.scheduled("t.ok", due="soon")
    with pytest.raises(ValueError, match="no time zone"):
        delayq.scheduled("t.ok", due=delayq.now.replace(tzinfo=None))
    with pytest.raises(ValueError, match="is not JSON"):
        delayq.scheduled("t.ok", payload=object())
    wrong: dict[str, Any]
    for wrong in ({"key": 5}, {"queue": None}, {"priority": "0"}, {"within": -1}):
        with pytest.raises(ValueError, match="^" + next(iter(wrong))):
            delayq.assert_not_scheduled("t.ok", **wrong)
    with pytest.raises(TypeError, match="payloud"):
        delayq.scheduled("t.ok", payloud={})  # type: ignore[call-arg]
