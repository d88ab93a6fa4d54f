"""What a process knows of the record's clock: this host's clock, as far as no answer has proven it wrong."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import pytest

from django_delayq.core import in_tests
from django_delayq.core.known_record import RecordClock

HOUR = 3600.0


@pytest.fixture
def known() -> RecordClock:
    return RecordClock()


def shown(ahead: float) -> datetime:
    """Return what a record shows whose clock is so many seconds ahead of this host's."""
    return datetime.fromtimestamp(time.time() + ahead, UTC)


def is_ahead_by(known: RecordClock, seconds: float, *, error: float = 0.0) -> bool:
    before = time.time()
    found = known.seconds()
    after = time.time()
    # The clock that runs on evenly and the one that NTP corrects go apart by a little.
    error += 0.001
    return before + seconds - error <= found <= after + seconds + error


def ahead_of_monotonic(known: RecordClock) -> float:
    """Return by how many seconds it is ahead, read when this thread was not stopped between the two readings."""
    while True:
        before = time.monotonic()
        found = known.seconds()
        if time.monotonic() - before < 0.0005:
            return found - before


def test_it_begins_as_the_clock_of_this_host_and_is_not_sure(known: RecordClock) -> None:
    assert is_ahead_by(known, 0.0)
    assert not known.is_sure


@pytest.mark.parametrize("ahead", [HOUR, -HOUR, 0.5])
def test_an_answer_corrects_it_as_far_as_it_proves(known: RecordClock, ahead: float) -> None:
    asked = time.monotonic()
    moment = shown(ahead)
    known.learn(asked, moment)
    assert is_ahead_by(known, ahead, error=time.monotonic() - asked)
    assert known.is_sure


def test_answers_that_agree_change_nothing(known: RecordClock) -> None:
    asked = time.monotonic()
    known.learn(asked, shown(HOUR))
    first = ahead_of_monotonic(known)
    for early, late in ((1.0, 0.0), (0.5, 0.5), (0.0, 1.0)):
        # The answer took a second in all, and was read so long after the question.
        now = time.monotonic()
        moment = datetime.fromtimestamp(now + first - late, UTC)
        known.learn(now - early - late, moment)
    assert ahead_of_monotonic(known) == pytest.approx(first, abs=0.001)


def test_a_slow_answer_corrects_it_no_farther_than_a_quick_one_allows(known: RecordClock) -> None:
    known.learn(time.monotonic() - 10.0, shown(HOUR - 10.0))
    assert is_ahead_by(known, HOUR - 10.0, error=1.0)


def test_it_is_no_longer_sure_when_the_record_has_not_answered_for_long(
    known: RecordClock,
) -> None:
    forgetful = RecordClock(sure_for=0.0)
    for clock in (known, forgetful):
        clock.learn(time.monotonic(), shown(0.0))
    assert known.is_sure
    assert not forgetful.is_sure


def test_the_clock_of_a_test_teaches_it_nothing(known: RecordClock, monkeypatch: pytest.MonkeyPatch) -> None:
    future = datetime(2050, 1, 1, tzinfo=UTC)
    monkeypatch.setattr(in_tests, "clock", lambda: future)
    known.learn(time.monotonic(), future)
    assert is_ahead_by(known, 0.0)
    assert not known.is_sure
