"""Declarations of limits, and what is used up of one."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_delayq import handler
from django_delayq.core.bounds import LENGTHS
from django_delayq.core.limits import (
    LEAD,
    PUNCTUAL,
    ROUNDING,
    Limit,
    Usage,
    declare,
    parts,
    queue_name,
    topic_name,
)
from django_delayq.project import conf, registry

NOW = datetime(2030, 1, 1, tzinfo=UTC)


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
    with pytest.raises(ValueError, match="rate must be text such as '100/m'") as refused:
        declare(rate=rate)
    assert str(refused.value).endswith(f", not {rate!r}")


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
    assert len(topic_name("t" * LENGTHS.topic, "k" * LENGTHS.key)) <= LENGTHS.limit


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
        usage = Usage("l", limit, now, full_at=full)
        due = now - timedelta(seconds=late[number])
        if usage.admits(due):
            usage.begin(due)
            full = usage.full_at
            begun.append(now)
    assert limit.interval is not None
    for first, at in enumerate(begun):
        for last in range(first, len(begun)):
            span = begun[last] - at + PUNCTUAL + ROUNDING * (last - first + 1)
            assert last - first + 1 <= burst + span / limit.interval + 1e-6


def test_a_backlog_begins_at_its_rate_although_each_look_is_a_little_late() -> None:
    limit = Limit(None, timedelta(milliseconds=10), 1)
    now, full, begun = NOW, None, 0
    while now < NOW + timedelta(seconds=10):
        usage = Usage("l", limit, now, full_at=full)
        while usage.admits(NOW - timedelta(hours=1)):
            usage.begin(NOW - timedelta(hours=1))
            begun += 1
        full = usage.full_at
        now += timedelta(milliseconds=13)
    assert 998 <= begun <= 1002


def test_after_a_quiet_time_the_burst_is_left_and_no_more() -> None:
    limit = Limit(None, timedelta(seconds=1), 3)
    usage = Usage("l", limit, NOW, full_at=NOW - timedelta(days=1))
    begun = 0
    while usage.admits(NOW) and begun < 100:
        usage.begin(NOW)
        begun += 1
    assert begun == 3
    assert usage.is_full
    assert usage.opens_in == 1.0


def test_a_slot_that_was_missed_is_not_made_up_for() -> None:
    long_ago = NOW - timedelta(seconds=30)
    usage = Usage("l", Limit(None, timedelta(seconds=1)), NOW, full_at=long_ago)
    assert usage.admits(long_ago)
    usage.begin(long_ago)
    assert not usage.admits(long_ago)


def test_a_message_that_is_claimed_ahead_counts_for_its_due_time() -> None:
    soon = NOW + timedelta(milliseconds=50)
    usage = Usage("l", Limit(None, timedelta(seconds=1)), NOW, full_at=soon)
    assert not usage.admits(NOW)
    assert usage.admits(soon)
    usage.begin(soon)
    assert usage.full_at == soon + timedelta(seconds=1)


def test_one_may_begin_when_more_is_used_up_than_a_burst() -> None:
    """The clock was set back, or the rate was lower before."""
    limit = Limit(None, timedelta(seconds=1), 3)
    usage = Usage("l", limit, NOW, full_at=NOW + timedelta(days=1))
    assert usage.admits(NOW)
    usage.begin(NOW)
    assert not usage.admits(NOW)
    assert usage.full_at == NOW + timedelta(seconds=3)
    assert Usage("l", limit, NOW, full_at=NOW + LEAD + timedelta(seconds=3)).opens_in == 2


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (topic_name("l.one", None), ("topic", "l.one", None)),
        (topic_name("l.one", "key key b"), ("topic", "l.one", "key key b")),
        (queue_name("key"), ("queue", "key", None)),
    ],
)
def test_a_name_tells_what_a_limit_counts(name: str, told: tuple[str, str, str | None]) -> None:
    assert parts(name) == told
