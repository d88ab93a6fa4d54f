"""Limits that are changed at run time, claimed step by step."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_delayq import (
    InvalidMessage,
    aoverride_limit,
    areset_limit,
    override_limit,
    reset_limit,
    schedule_message,
    signals,
)
from django_delayq.core.states import State
from django_delayq.inspector import stats
from django_delayq.models import LimitOverride, Message
from django_delayq.record import admission, overrides, transitions
from django_delayq.record.sql.rows import Ticket
from tests.support.limits import DB, LEASES, Declare, admit, refused, states, succeed
from tests.support.receivers import heard
from tests.support.rows import unguarded

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _known() -> Iterator[None]:
    """This process knows what a worker has read; a test begins and ends without."""
    yield
    overrides._known.clear()


def due(number: int, topic: str = "l.free", **options: Any) -> list[Message]:
    past = timezone.now() - timedelta(seconds=1)
    return [schedule_message(topic, due_at=past, **options) for _ in range(number)]


def look() -> None:
    """Do as a worker that reads the overrides."""
    overrides.read(DB)


def test_an_answer_that_is_late_hides_no_newer_one() -> None:
    """Several threads of a process read: those of the worker, and those of pages beside it."""
    later = iter([look])

    def be_late(execute: Any, *given: Any) -> Any:
        answer = execute(*given)
        for act in later:
            override_limit(topic="l.free", limit=2)
            act()
        return answer

    with connection.execute_wrapper(be_late):
        look()
    assert [*overrides.known(DB).in_force] == ["topic l.free"]


def test_a_question_that_is_late_has_the_newer_answer() -> None:
    earlier = iter([look])

    def be_late(execute: Any, *given: Any) -> Any:
        for act in earlier:
            act()
            # Another process changes it.
            LimitOverride.objects.create(name="topic l.free", limit=2)
        return execute(*given)

    with connection.execute_wrapper(be_late):
        look()
    assert [*overrides.known(DB).in_force] == ["topic l.free"]


def test_a_worker_that_has_not_read_a_change_claims_nothing(declare: Declare) -> None:
    declare("l.free")
    made = due(3)
    override_limit(topic="l.free", limit=2)
    assert transitions.claim(DB, [Ticket(row.pk) for row in made], LEASES, "w") == []
    look()
    assert len(admit(*made)) == 2


def test_the_code_is_the_default_and_what_is_not_given_stays(declare: Declare) -> None:
    declare("l.both", limit=5, rate="10/s", burst=3)
    override_limit(topic="l.both", rate="100/m")
    look()
    (limit,) = admission.limits_of("l.both", "default", None).values()
    assert (limit.count, limit.interval, limit.burst) == (5, timedelta(seconds=0.6), 1)
    assert reset_limit(topic="l.both")
    assert not reset_limit(topic="l.both")
    look()
    (limit,) = admission.limits_of("l.both", "default", None).values()
    assert (limit.count, limit.burst) == (5, 3)


@pytest.mark.parametrize("options", [{}, {"limit_key": "a"}])
def test_a_limit_of_zero_pauses_a_topic_with_all_its_keys(declare: Declare, options: dict[str, str]) -> None:
    declare("l.one", limit=5)
    (message,) = due(1, "l.one", **options)
    override_limit(topic="l.one", limit=0)
    override_limit(topic="l.one", limit_key="a", limit=9)
    look()
    assert admit(message) == []
    assert set(refused(message).values()) == {"topic l.one" + (" key a" if options else "")}
    reset_limit(topic="l.one")
    look()
    assert admit(message) == [message.pk]


def test_a_limit_of_zero_pauses_one_customer(declare: Declare) -> None:
    declare("l.one", limit=1, limit_key=lambda message: message.payload)
    past = timezone.now() - timedelta(seconds=1)
    one, other = (schedule_message("l.one", key, limit_key=key, due_at=past) for key in ("a", "b"))
    override_limit(topic="l.one", limit_key="a", limit=0)
    look()
    assert admit(one, other) == [other.pk]


def test_the_override_of_a_queue_counts_all_its_topics(declare: Declare) -> None:
    declare("l.free")
    declare("l.one")
    made = due(2, queue="mail") + due(2, "l.one", queue="mail") + due(1)
    override_limit(queue="mail", limit=1)
    look()
    assert len(admit(*made)) == 2
    assert states(made[-1]) == [State.RUNNING]


def test_what_runs_already_counts(declare: Declare, django_capture_on_commit_callbacks: Any) -> None:
    declare("l.free")
    made = due(3)
    assert len(admit(*made[:2])) == 2
    with django_capture_on_commit_callbacks(execute=True):
        override_limit(topic="l.free", limit=2)
    look()
    assert admit(made[2]) == []
    succeed(made[0])
    assert admit(made[2]) == [made[2].pk]


def test_an_override_ends_by_itself(declare: Declare) -> None:
    declare("l.free")
    made = due(1)
    override_limit(topic="l.free", limit=0, duration="1h")
    look()
    assert admit(*made) == []
    # SQLite's clock counts whole ms.
    LimitOverride.objects.update(until=timezone.now() - timedelta(seconds=1), since=timezone.now() - timedelta(hours=1))
    look()
    assert admit(*made) == [made[0].pk]


def test_a_change_tells_who_made_it_and_why(django_capture_on_commit_callbacks: Any) -> None:
    with heard(signals.operator_action) as told, django_capture_on_commit_callbacks(execute=True):
        made = override_limit(topic="l.free", limit=1, reason="the provider asks for it")
    assert (made.limit, made.rate, made.burst, made.until) == (1, "", None, None)
    assert made.reason == "the provider asks for it"
    assert made.set_by
    assert [(one["action"], one["target"], one["reason"]) for one in told] == [
        ("override", "topic l.free", made.reason)
    ]


@pytest.mark.parametrize(
    "terms",
    [
        {},
        {"topic": "t"},
        {"topic": "t", "queue": "q", "limit": 1},
        {"queue": "q", "limit_key": "a", "limit": 1},
        {"topic": "t", "limit": -1},
        {"topic": "t", "limit": True},
        {"topic": "t", "limit": "3"},
        {"topic": "t", "rate": ""},
        {"topic": "t", "rate": "often"},
        {"topic": "t", "rate": "0/s"},
        {"topic": "t", "burst": 0},
        {"topic": "no topic", "limit": 1},
        {"topic": "t", "rate": "1/" + "1h" * 30},
        {"topic": "t", "limit": 1, "duration": 0},
        {"topic": "t", "limit": 1, "duration": "1h", "until": timezone.now() + timedelta(hours=1)},
    ],
)
def test_impossible_overrides_are_refused(terms: dict[str, Any]) -> None:
    with pytest.raises(InvalidMessage):
        override_limit(**terms)
    assert not LimitOverride.objects.exists()


def test_the_calls_have_async_twins() -> None:
    async_to_sync(aoverride_limit)(topic="l.free", limit=1)
    assert async_to_sync(areset_limit)(topic="l.free")


def test_no_claim_costs_a_statement_more(declare: Declare) -> None:
    """A process without overrides claims by one statement, whatever was overridden and reset before."""
    declare("l.free")
    made = due(1)
    override_limit(topic="l.free", limit=1)
    reset_limit(topic="l.free")
    look()
    with CaptureQueriesContext(connection) as asked:
        assert transitions.claim(DB, [Ticket(made[0].pk)], LEASES, "w")
    assert len([one for one in asked if "SAVEPOINT" not in one["sql"]]) <= (
        1 if connection.vendor == "postgresql" else 4
    )


def test_statistics_count_what_waits_for_a_paused_topic_as_limited(declare: Declare) -> None:
    declare("l.one", limit=5)
    for options in ({"limit_key": "a"}, {}):
        due(1, "l.one", **options)
    unguarded(Message).update(due_at=timezone.now() - timedelta(minutes=1))
    override_limit(topic="l.one", limit=0)
    found = stats.collect(DB, None)
    assert found.snapshot.limited.count == 2
    assert found.snapshot.overdue.count == 0
    assert {line.name for line in found.lines.longest} == {"topic l.one"}
    assert [*found.overrides] == ["topic l.one"]
