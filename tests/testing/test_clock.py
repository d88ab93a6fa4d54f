"""The queue's clock in tests: Python's clock, and the time travelled."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import freezegun
import pytest
import time_machine
from django.utils import timezone

from django_delayq import pause_queue, resume_queue, schedule_message
from django_delayq.core import in_tests
from django_delayq.models import Queue
from django_delayq.record import reads
from django_delayq.testing import Delayq

HOUR = timedelta(hours=1)
LOCAL = datetime(2300, 1, 1, tzinfo=UTC).replace(tzinfo=None)


def test_travelling_moves_the_clock_of_the_queue_and_not_that_of_python(delayq: Delayq) -> None:
    before = timezone.now()
    assert delayq.travel("2h") - before >= 2 * HOUR
    assert delayq.travel(before + 3 * HOUR) - before == pytest.approx(3 * HOUR, abs=timedelta(minutes=1))
    assert timezone.now() - before < HOUR


@pytest.mark.parametrize("to", ["-1h", -1, "yesterday", datetime(2020, 1, 1, tzinfo=UTC), LOCAL])
def test_the_clock_goes_only_ahead(delayq: Delayq, to: str | int | datetime) -> None:
    before = delayq.now
    with pytest.raises(ValueError):
        delayq.travel(to)
    assert delayq.now - before < HOUR


@pytest.mark.django_db
def test_every_time_of_the_record_is_that_of_the_clock(delayq: Delayq) -> None:
    delayq.travel("365d")
    message = schedule_message("t.ok", delay="15m", expires="1h")
    assert message.created_at - timezone.now() > timedelta(days=364)
    assert message.due_at - message.created_at == pytest.approx(HOUR / 4, abs=timedelta(milliseconds=1))
    pause_queue("default", duration="5m")
    assert Queue.objects.filter(Queue.PAUSED).exists()
    delayq.travel("6m")
    assert not Queue.objects.filter(Queue.PAUSED).exists()
    assert not resume_queue("default")
    [ran] = delayq.drain("10m")
    times = [row.at for row in ran.message.transitions.all()]
    assert times == sorted(times)
    assert times[-1] - times[0] > HOUR / 5
    assert ran.message.finished_at is not None
    assert ran.message.finished_at - timezone.now() > timedelta(days=364)


@pytest.mark.django_db
def test_the_record_has_its_own_clock_again_after_the_test() -> None:
    with Delayq() as outer:
        outer.travel("1h")
        with Delayq() as inner:
            assert inner.now < outer.now
        assert reads.now("default") - timezone.now() > HOUR / 2
    assert in_tests.clock is None
    assert abs(reads.now("default") - timezone.now()) < HOUR / 2
    assert schedule_message("t.ok").created_at - timezone.now() < HOUR / 2


@pytest.mark.usefixtures("either_database")
@pytest.mark.parametrize("library", ["freezegun", "time-machine"])
def test_the_queue_follows_a_clock_that_is_frozen(delayq: Delayq, library: str) -> None:
    start = datetime(2031, 5, 6, 7, 8, 9, 123456, tzinfo=UTC)
    frozen: Any = freezegun.freeze_time(start) if library == "freezegun" else time_machine.travel(start, tick=False)
    with frozen as time:
        schedule_message("t.tx")
        later = schedule_message("t.async", delay="15m")
        assert later.due_at - start == timedelta(minutes=15, microseconds=44)
        exact = schedule_message("t.ok", due_at=start + HOUR)
        assert [ran.message.topic for ran in delayq.drain()] == ["t.tx"]
        time.tick(15 * 60) if library == "freezegun" else time.shift(15 * 60)
        assert [ran.message for ran in delayq.drain()] == [later]
        [ran] = delayq.drain("45m")
        assert ran.message == exact
        assert ran.message.finished_at == exact.due_at


def test_a_frozen_clock_that_ticks_by_more_than_a_lease_takes_no_message_back(db: None) -> None:
    with freezegun.freeze_time("2031-01-01 12:00:00", auto_tick_seconds=3600), Delayq() as delayq:
        schedule_message("t.ok")
        [ran] = delayq.drain()
    assert ran.outcome == "consumed"
