"""Declarations of limits, and the decisions of one line."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_delayq import handler
from django_delayq.core.bounds import KEY_LENGTH, TOPIC_LENGTH
from django_delayq.core.limits import (
    AHEAD,
    NAME_LENGTH,
    PUNCTUAL,
    ROUNDING,
    Limit,
    Line,
    LinePlace,
    declare,
    topic_name,
)
from django_delayq.project import conf, registry

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def place(number: int = 1, after: timedelta = timedelta(0)) -> LinePlace:
    return LinePlace(0, NOW + after, number)


@pytest.mark.parametrize(
    ("rate", "interval"),
    [
        ("100/m", 0.6),
        ("1/s", 1.0),
        ("1000/s", 0.001),
        ("2/h", 1800.0),
        ("1/d", 86_400.0),
        ("5/10s", 2.0),
        ("1/1h30m", 5400.0),
    ],
)
def test_a_rate_is_a_number_and_a_time(rate: str, interval: float) -> None:
    assert declare(rate=rate) == Limit(None, timedelta(seconds=interval), 1)


@pytest.mark.parametrize(
    "rate", ["", "100", "100/", "/m", "0/m", "1.5/m", "-1/m", "1/0s", "1/y", "1/m/s", "1/100ms", "9999999/s", 5, True]
)
def test_an_impossible_rate_is_refused(rate: Any) -> None:
    with pytest.raises(ValueError, match="rate must be text such as '100/m'"):
        declare(rate=rate)


@pytest.mark.parametrize("terms", [{"limit": 0}, {"limit": "5"}, {"limit": True}, {"limit": 1.0}, {"limit": 10**7}])
def test_an_impossible_limit_is_refused(terms: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="limit must be a whole number"):
        declare(**terms)


def test_what_a_handler_declares_must_make_sense() -> None:
    with pytest.raises(ValueError, match="burst needs a rate"):
        handler("l.wrong", burst=5)
    with pytest.raises(ValueError, match="limit_key needs a limit or a rate"):
        handler("l.wrong", limit_key=lambda message: "a")
    with pytest.raises(ValueError, match="limit_key is a function"):
        handler("l.wrong", limit=1, limit_key="customer")  # type: ignore[arg-type]
    assert registry.find("l.wrong") is None


@pytest.mark.parametrize(
    "limits",
    [5, ["a"], {"a b": {"limit": 1}}, {"a": 5}, {"a": {}}, {"a": {"burst": 1}}, {"a": {"limit": 0}}, {"a": {"n": 1}}],
)
def test_impossible_limits_of_queues_are_a_problem_of_the_settings(limits: Any) -> None:
    assert [problem.id for problem in conf.parse({"LIMITS": limits})[1]] == ["E003"]


def test_the_longest_name_of_a_limit_fits_its_column() -> None:
    assert len(topic_name("t" * TOPIC_LENGTH, "k" * KEY_LENGTH)) <= NAME_LENGTH


def test_the_slots_of_a_line_follow_each_other_without_a_gap() -> None:
    line = Line("l", Limit(None, timedelta(milliseconds=100), 2), NOW)
    slots: list[datetime] = []
    while (slot := line.slot()) is not None and len(slots) < 100:
        slots.append(slot)
        line.keep()
    after = [round((slot - NOW).total_seconds(), 3) for slot in slots]
    assert after == [0, 0] + [round(0.1 * number, 3) for number in range(1, 21)]
    assert Line("l", line.limit, NOW).room(100) == len(slots)
    assert line.room(100) == 0


def test_kept_slots_can_all_be_taken_at_their_time() -> None:
    limit = Limit(None, timedelta(milliseconds=100), 1)
    kept = Line("l", limit, NOW)
    slots = []
    for _ in range(5):
        slot = kept.slot()
        assert slot is not None
        slots.append(slot)
        kept.keep()
    full: datetime | None = None
    for number, slot in enumerate(slots):
        # Each is taken a little late.
        line = Line("l", limit, slot + timedelta(milliseconds=50), kept=5 - number, full_at=full)
        at = LinePlace(0, slot, number)
        assert line.refusal(at, is_kept=True) == ""
        line.begin(at, is_kept=True)
        full = line.full_at


@given(
    waits=st.lists(st.floats(0, 0.5), min_size=1, max_size=60),
    late=st.lists(st.floats(0, 0.3), min_size=60, max_size=60),
    burst=st.integers(1, 10),
)
def test_no_more_deliveries_begin_in_any_time_than_the_rate_allows(
    waits: list[float], late: list[float], burst: int
) -> None:
    limit = Limit(None, timedelta(milliseconds=100), burst)
    now, full, begun = NOW, None, []
    for number, wait in enumerate(waits):
        now += timedelta(seconds=wait)
        line = Line("l", limit, now, full_at=full)
        one = LinePlace(0, now - timedelta(seconds=late[number]), number)
        if not line.refusal(one, is_kept=False):
            line.begin(one, is_kept=False)
            full = line.full_at
            begun.append(now)
    assert limit.interval is not None
    for first, at in enumerate(begun):
        for last in range(first, len(begun)):
            span = begun[last] - at + PUNCTUAL + ROUNDING * (last - first + 1)
            assert last - first + 1 <= burst + span / limit.interval + 1e-6


def test_after_a_quiet_time_the_burst_is_left_and_no_more() -> None:
    limit = Limit(None, timedelta(seconds=1), 3)
    line = Line("l", limit, NOW, full_at=NOW - timedelta(days=1))
    begun = 0
    while not line.refusal(place(), is_kept=False) and begun < 100:
        line.begin(place(), is_kept=False)
        begun += 1
    assert begun == 3


def test_what_is_used_up_lies_never_farther_ahead_than_the_burst() -> None:
    limit = Limit(None, timedelta(seconds=1), 3)
    line = Line("l", limit, NOW, full_at=NOW + timedelta(days=1))
    assert line.full_at == NOW + AHEAD + timedelta(seconds=3)
