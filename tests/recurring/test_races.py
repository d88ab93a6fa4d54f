"""Several processes that make the occurrences of one schedule at the same moment: each time has one message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from django.db import DatabaseError, OperationalError, connection, transaction
from django.utils import timezone

from django_delayq.models import Message
from django_delayq.recurring import Schedule, create_schedule, delete_schedule, pause_schedule, schedules
from django_delayq.recurring.models import Occurrence
from django_delayq.recurring.schedule_tuning import tuning
from django_delayq.recurring.services import Scheduler
from tests.support.rows import unguarded
from tests.support.together import Together
from tests.support.transactions import unfinished

from .conftest import DB

pytestmark = pytest.mark.django_db(transaction=True)


def rounds() -> range:
    return range(10 if connection.vendor == "postgresql" else 3)


def overdue(name: str) -> None:
    """Create a schedule with five occurrences to make, and one in the future."""
    create_schedule(name, "t.ok", every="1m", missed="all", starts_at=timezone.now() + timedelta(days=1))
    unguarded(Message).all().delete()
    Occurrence.objects.all().delete()
    now = timezone.now().replace(second=30, microsecond=0)
    unguarded(Schedule).filter(pk=name).update(last_at=now - timedelta(minutes=5), starts_at=None)


def assert_each_time_has_one_message(name: str) -> None:
    rows = list(Occurrence.objects.filter(schedule=name).order_by("at"))
    assert len(rows) in (6, 7)
    assert {after.at - before.at for before, after in pairwise(rows)} == {timedelta(minutes=1)}
    said = Counter(message.headers["occurrence"] for message in Message.objects.filter(headers__schedule=name))
    assert set(said.values()) == {1}
    assert len(said) == len(rows)
    assert {row.message_id for row in rows} == set(
        Message.objects.filter(headers__schedule=name).values_list("pk", flat=True)
    )


@pytest.mark.parametrize("is_locked", [True, False], ids=["with the lock", "by the row of the occurrence alone"])
def test_processes_that_advance_one_schedule_make_each_time_once(
    together: Together, monkeypatch: pytest.MonkeyPatch, *, is_locked: bool
) -> None:
    if not is_locked:
        monkeypatch.setattr(schedules, "locked", lambda using, rows, wait: rows)
    lost = 0
    for number in rounds():
        overdue(f"s{number}")
        answers = together(*[lambda n=number: schedules.advance(DB, f"s{n}")] * 4)
        assert not [answer for answer in answers if not isinstance(answer, DatabaseError | None)]
        lost += sum(answer is not None for answer in answers)
        assert_each_time_has_one_message(f"s{number}")
    if is_locked:
        assert lost == 0
    elif connection.vendor == "postgresql":
        assert lost, "no two processes ever met"


@pytest.mark.postgresql("SQLite locks the whole database")
@pytest.mark.usefixtures("without_redis")
def test_schedules_that_a_long_transaction_has_locked_hold_up_no_other(tuned: Callable[..., None]) -> None:
    tuned(advanced_together=2)
    for name in "abs":
        overdue(name)
    unguarded(Schedule).filter(pk="s").update(last_at=timezone.now() - timedelta(minutes=1))
    scheduler = Scheduler(DB, "w")
    with unfinished(lambda: [pause_schedule(name) for name in "ab"]):
        scheduler.tick()
        assert Occurrence.objects.filter(schedule="s").exists()
        # It does not ask again and again.
        assert scheduler.tick() > tuning.after_due


@pytest.mark.parametrize("end", [pause_schedule, delete_schedule])
def test_an_end_beside_an_advance_leaves_no_waiting_message(together: Together, end: Callable[[str], Any]) -> None:
    for number in rounds():
        name = f"s{number}"
        overdue(name)
        together(lambda n=name: schedules.advance(DB, n), lambda n=name: end(n))
        schedules.advance(DB, name)
        assert not Message.objects.filter(headers__schedule=name, state="scheduled").exists()
        assert not Occurrence.objects.filter(schedule=name).exists()


def test_two_that_create_one_schedule_at_the_same_moment_have_one(together: Together) -> None:
    for number in rounds():
        made = together(
            *[lambda n=number: create_schedule(f"s{n}", "t.ok", every="1h", on_conflict="replace")] * 4,
        )
        assert {schedule.pk for schedule in made} == {f"s{number}"}
        assert Message.objects.filter(headers__schedule=f"s{number}").count() == 1


@pytest.mark.postgresql("SQLite has one writer at a time")
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_transaction_that_cannot_see_a_schedule_is_to_be_repeated(together: Together, level: str) -> None:
    with pytest.raises(OperationalError, match="could not serialize"), transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
        assert not Schedule.objects.exists()
        together(lambda: create_schedule("s", "t.ok", every="1h"))
        create_schedule("s", "t.ok", every="2h", on_conflict="replace")
