"""Seconds are seconds, whatever time zone the database session has and whenever its clocks are changed."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any, cast
from uuid import uuid4
from zoneinfo import ZoneInfo

import pytest
from django.db import connections
from django.utils import timezone

from django_delayq import pause_queue, requeue_message, reschedule_message, schedule_message, schedule_messages
from django_delayq.core.clock import to_us
from django_delayq.core.states import State
from django_delayq.models import Message
from django_delayq.record import reads, transitions
from django_delayq.record.purge import finished as finished_messages
from django_delayq.record.purge import purge
from django_delayq.record.sql.rows import Failure
from tests.support.rows import unguarded
from tests.support.steps import TOPIC, ago, claimed, due

pytestmark = pytest.mark.django_db(transaction=True)

# From any day of the year one of these spans begins in winter time and ends in summer time, or the other way round.
DAYS = range(60, 301, 60)
ZONES = ["Europe/Berlin", "Australia/Lord_Howe"]


def use(zone: str | None) -> None:
    """Connect anew with DATABASES["default"]["TIME_ZONE"]."""
    connection = connections["default"]
    connection.close()
    connection.settings_dict["TIME_ZONE"] = zone
    for name in ("timezone", "timezone_name"):
        vars(connection).pop(name, None)


@pytest.fixture(params=ZONES)
def zone(request: pytest.FixtureRequest) -> Iterator[str]:
    use(request.param)
    yield request.param
    use(None)


def after(start: datetime, end: datetime | None) -> int:
    """Return the microseconds from one moment to another."""
    assert end is not None
    return to_us(end) - to_us(start)


def us(days: int) -> int:
    return days * 86_400 * 1_000_000


def row(pk: int) -> Message:
    return Message.objects.get(pk=pk)


@pytest.fixture(params=["one", "with a key", "many"])
def schedule(request: pytest.FixtureRequest) -> Any:
    """Schedule a message alone, or as bulk."""
    if request.param == "many":
        return lambda **options: schedule_messages([cast(Any, {"topic": TOPIC, **options})])[0]
    if request.param == "with a key":
        return lambda **options: schedule_message(TOPIC, key=str(uuid4()), **options)
    return lambda **options: schedule_message(TOPIC, **options)


@pytest.mark.parametrize("days", DAYS)
def test_a_delay_and_a_time_to_live_of_days_are_exact(zone: str, schedule: Any, days: int) -> None:
    span = timedelta(days=days)
    message = row(schedule(delay=span, expires=span).pk)
    # Due times are rounded up to 100 µs. The time of creation is read a moment later.
    assert us(days) - 60_000_000 < after(message.created_at, message.due_at) < us(days) + 100
    assert after(message.due_at, message.expires_at) == us(days)
    moment = (timezone.now() + timedelta(days=20)).astimezone(ZoneInfo(zone))
    message = row(schedule(due_at=moment, expires=span).pk)
    assert after(message.due_at, message.expires_at) == us(days)


@pytest.mark.parametrize("days", DAYS)
def test_a_message_moved_by_days_moves_by_so_many_seconds_and_lives_as_long(zone: str, days: int) -> None:
    before = row(schedule_message(TOPIC, key="k", delay=1000, expires="60d").pk)
    span = timedelta(days=days)
    assert transitions.reschedule("default", [before.pk], transitions.DueTimes(shift=span))[0]
    moved = row(before.pk)
    assert us(days) <= after(before.due_at, moved.due_at) < us(days) + 100
    assert after(moved.due_at, moved.expires_at) == us(60)
    for act, lives in (
        (lambda: reschedule_message(before.pk, delay=span), 60),
        (lambda: schedule_message(TOPIC, key="k", delay=span, expires=span, on_conflict="replace"), days),
    ):
        assert act()
        moved = row(before.pk)
        assert us(days) <= after(moved.transitions.latest("number").at, moved.due_at) < us(days) + 100
        assert after(moved.due_at, moved.expires_at) == us(lives)


@pytest.mark.parametrize("days", DAYS)
def test_a_retry_in_days_is_due_in_so_many_seconds(zone: str, days: int) -> None:
    taken = claimed(expires="400d")
    failure = Failure(taken.id, 1, "worker:a", delay=timedelta(days=days), error="it broke")
    (moved,) = transitions.fail("default", [failure])
    at = row(taken.id).transitions.latest("number").at
    # The time of the log row is read a moment after that of the due time.
    assert us(days) - 60_000_000 < after(at, moved.due_at) < us(days) + 100
    assert moved.due_at == row(taken.id).due_at


@pytest.mark.parametrize("days", DAYS)
def test_a_requeued_message_lives_as_long_as_before(zone: str, days: int) -> None:
    pk = schedule_message(TOPIC, due_at=ago(), expires=timedelta(days=days)).pk
    transitions.cancel("default", [pk])
    assert requeue_message(pk)
    message = row(pk)
    assert after(message.due_at, message.expires_at) == us(days)


@pytest.mark.parametrize("days", DAYS)
def test_a_pause_of_days_lasts_so_many_seconds(zone: str, days: int) -> None:
    queue = pause_queue("default", duration=timedelta(days=days))
    queue.refresh_from_db()
    assert after(queue.paused_at, queue.resumes_at) == us(days)


@pytest.mark.parametrize("days", DAYS)
def test_a_purge_spares_what_finished_a_second_later(zone: str, days: int) -> None:
    old, young = due().pk, due().pk
    transitions.cancel("default", [old, young])
    now = reads.now("default")
    for pk, margin in ((old, -60), (young, 60)):
        finished = now - timedelta(days=days) + timedelta(seconds=margin)
        unguarded(Message).filter(pk=pk).update(finished_at=finished)
    assert sum(purge(finished_messages("default", [State.CANCELLED], timedelta(days=days).total_seconds()))) == 1
    assert list(Message.objects.values_list("pk", flat=True)) == [young]


def test_times_are_read_in_utc(zone: str) -> None:
    taken = claimed(expires="1d")
    message = row(taken.id)
    read = [taken.due_at, taken.expires_at, taken.claimed_at, message.due_at, message.leased_until]
    read += [reads.now("default"), message.transitions.latest("number").at]
    read += Message.objects.values_list("created_at", flat=True)
    assert all(moment is not None and moment.utcoffset() == timedelta(0) for moment in read)
    assert {moment.tzname() for moment in read if moment} == {"UTC"}
