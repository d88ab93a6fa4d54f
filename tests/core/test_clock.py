"""Moments are converted to whole numbers that never stand for an earlier moment."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

from hypothesis import given
from hypothesis import strategies as st

from django_delayq.core.clock import SECOND, ceil_tenth, from_tenths, from_us, to_tenths, to_us, us_to_tenths

ZONES = [UTC, timezone(timedelta(hours=-9.5))]
moments = st.builds(
    lambda micros, zone: (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)).astimezone(zone),
    st.integers(10**15, 7 * 10**15),
    st.sampled_from(ZONES),
)
TENTH = timedelta(microseconds=100)


@given(moments)
def test_a_moment_is_rounded_up_by_less_than_a_tenth(moment: datetime) -> None:
    for rounded in (from_tenths(to_tenths(moment)), ceil_tenth(moment)):
        assert timedelta(0) <= rounded - moment < TENTH
        assert rounded.microsecond % 100 == 0


@given(st.integers(0, 2**46))
def test_to_tenths_and_from_tenths_are_inverse(tenths: int) -> None:
    assert to_tenths(from_tenths(tenths)) == tenths


@given(moments)
def test_microseconds_keep_the_moment_and_are_rounded_up_alike(moment: datetime) -> None:
    assert from_us(to_us(moment)) == moment
    assert us_to_tenths(to_us(moment)) == to_tenths(moment)


def test_the_zone_of_a_moment_makes_no_difference() -> None:
    berlin = datetime(2026, 7, 1, 12, 0, 0, 1, tzinfo=ZoneInfo("Europe/Berlin"))
    assert to_tenths(berlin) == to_tenths(berlin.astimezone(UTC)) == 17_829_000_000_001


def test_both_hours_of_a_clock_set_back_are_told_apart() -> None:
    first = datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"))
    assert to_tenths(first.replace(fold=1)) - to_tenths(first) == 3_600 * SECOND
