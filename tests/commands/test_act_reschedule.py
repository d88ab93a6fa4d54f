"""delayq_act reschedule and delayq_act run: other due times for scheduled messages."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from django.utils import timezone

from django_delayq.core.states import State
from django_delayq.models import Message, Transition
from django_delayq.project import conf
from django_delayq.record import reads
from tests.support.commands import claim, due_tenths, held, run, schedule

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("puts_are_flushed")]


def in_words(value: Any) -> str | None:
    """Name a test by the words of its call."""
    return " ".join(map(str, value)) if isinstance(value, list) else None


def dues(*ids: int) -> list[datetime]:
    found = {message.pk: message.due_at for message in Message.objects.filter(pk__in=ids)}
    return [found[pk] for pk in ids]


def waits(*ids: int) -> list[float]:
    """Return the seconds from now to the due times."""
    now = reads.now("default")
    return [(due - now).total_seconds() for due in dues(*ids)]


def rescheduled() -> set[int]:
    """Return the messages that have another due time than at first."""
    moves = Transition.objects.filter(from_state=State.SCHEDULED, to_state=State.SCHEDULED)
    return set(moves.values_list("message_id", flat=True))


# --- the due time -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["reschedule", "--due-at", "2h"], [7200, 7200, 7200]),
        (["reschedule", "--due-at", "HOUR"], [3600, 3600, 3600]),
        (["reschedule", "--shift", "1h"], [4200, 4200, 4200]),
        (["reschedule", "--shift=-5m"], [300, 300, 300]),
        # Never before now.
        (["reschedule", "--shift=-1d"], [0, 0, 0]),
        (["reschedule", "--due-at", "1h", "--spread", "30m"], [3600, 4200, 4800]),
        (["reschedule", "--shift", "0", "--spread", "30m"], [600, 1200, 1800]),
        # Never later than 100 years from now.
        (["reschedule", "--due-at", "36524d", "--spread", "36525d"], [36524 * 86400, *[36525 * 86400] * 2]),
        (["run"], [0, 0, 0]),
        (["run", "--spread", "30m"], [0, 600, 1200]),
    ],
    ids=in_words,
)
def test_messages_get_the_due_times_that_were_asked_for(words: list[str], expected: list[float]) -> None:
    ids = schedule(3, due=600)
    run("delayq_restore")
    hour = (timezone.now() + timedelta(hours=1)).isoformat()
    words = [hour if word == "HOUR" else word for word in words]
    ran = run("delayq_act", *words, *map(str, ids), "--yes", "--json")
    assert (ran.code, ran.json["answers"]) == (0, {"rescheduled": 3})
    assert waits(*ids) == pytest.approx(expected, abs=30)
    # Redis knows each that is due within the horizon.
    near = [pk for pk, wait in zip(ids, expected, strict=True) if wait < conf.get().HORIZON]
    places = held()
    assert all(places.get(pk, 0) in (0, tenths) for pk, tenths in due_tenths(*near).items())
    assert set(near) <= places.keys()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "one of the arguments --due-at --shift is required"),
        (["--due-at", "1h", "--shift", "1h"], "not allowed with argument"),
        (["--due-at", "2020-01-01T00:00:00Z"], "is in the past"),
        (["--due-at", "2199-01-01T00:00:00Z"], "more than 100 years"),
        (["--due-at", "2050-01-01T00:00:00"], "has no time zone; write 2050-01-01T00:00:00Z, or +02:00 for Z"),
        (["--due-at", "2050-01-01"], "has no time zone; write 2050-01-01T00:00:00Z"),
        (["--due-at", "tomorrow"], "not a duration"),
        (["--due-at", "tomorrow"], "; write a moment as 2030-01-31T12:00:00Z"),
        (["--due-at=-1h"], "is negative"),
        (["--due-at", "9999999w"], "between 0 and 100 years"),
        (["--shift=--1h"], "is negative"),
        (["--due-at", "1h", "--spread=9999999w"], "between 0 and 100 years"),
    ],
    ids=in_words,
)
def test_an_impossible_time_is_refused(words: list[str], problem: str) -> None:
    [pk] = schedule(due=600)
    ran = run("delayq_act", "reschedule", str(pk), *words)
    assert ran.code != 0
    assert problem in ran.err
    assert not rescheduled()


# --- the selection, the question and the answer -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "when"),
    [
        (["reschedule", "--due-at", "2h"], "due in 2 h"),
        (["reschedule", "--due-at", "2031-05-01T12:00:00+02:00"], "due at 2031-05-01T10:00:00.000Z"),
        (["reschedule", "--shift", "1h", "--spread", "10m"], "later by 1 h, spread over 10 m"),
        (["reschedule", "--shift=-30m"], "earlier by 30 m, but not before now"),
        (["run"], "due now"),
        (["run", "--spread", "10m"], "due over 10 m from now on"),
    ],
    ids=in_words,
)
def test_the_question_and_the_preview_say_when_messages_will_be_due(words: list[str], when: str) -> None:
    words = ["delayq_act", *words, "--topic", "t.ok"]
    done = "rescheduled" if "reschedule" in words else "due now"
    schedule(3)
    claim(*schedule(due=-1))
    would = run(*words, "--dry-run")
    assert (would.code, would.out) == (0, f"3 would be {done}\n{when}\n")
    asked = run(*words)
    assert asked.code == 2
    assert f"This will {words[1]} 3 messages: {when}." in asked.err
    assert not rescheduled()
    assert run(*words, "--yes").out == f"3 {done}\n"
