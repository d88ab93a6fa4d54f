"""Moments as whole milliseconds: nothing is ever early."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

from hypothesis import given
from hypothesis import strategies as st

from django_delayq.clock import ceil_ms, from_ms, to_ms

ZONES = [UTC, timezone(timedelta(hours=-9.5))]
moments = st.builds(
    lambda micros, zone: (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)).astimezone(zone),
    st.integers(10**15, 7 * 10**15),
    st.sampled_from(ZONES),
)
MS = timedelta(milliseconds=1)


@given(moments)
def test_a_moment_is_rounded_up_by_less_than_a_millisecond(moment: datetime) -> None:
    for rounded in (from_ms(to_ms(moment)), ceil_ms(moment)):
        assert timedelta(0) <= rounded - moment < MS
        assert rounded.microsecond % 1000 == 0


@given(st.integers(0, 2**43))
def test_to_ms_and_from_ms_are_inverse(ms: int) -> None:
    assert to_ms(from_ms(ms)) == ms


@given(moments)
def test_rounding_twice_is_rounding_once(moment: datetime) -> None:
    assert ceil_ms(ceil_ms(moment)) == ceil_ms(moment)
    assert to_ms(ceil_ms(moment)) == to_ms(moment)


def test_the_zone_of_a_moment_makes_no_difference() -> None:
    berlin = datetime(2026, 7, 1, 12, 0, 0, 1, tzinfo=ZoneInfo("Europe/Berlin"))
    assert to_ms(berlin) == to_ms(berlin.astimezone(UTC)) == 1_782_900_000_001


def test_both_hours_of_a_clock_set_back_are_told_apart() -> None:
    first = datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"))
    assert to_ms(first.replace(fold=1)) - to_ms(first) == 3_600_000
