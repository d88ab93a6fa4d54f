"""Durations are read in the forms in which people write them."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_delayq.core.durations import brief, seconds


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("250ms", 0.25),
        ("90s", 90.0),
        ("15m", 900.0),
        ("1.5h", 5400.0),
        ("1h30m", 5400.0),
        ("7d", 604_800.0),
        ("7y", 7 * 31_557_600.0),
        ("2w", 1_209_600.0),
        (" 10M ", 600.0),
        ("42", 42.0),
        ("0", 0.0),
        (5, 5.0),
        (-1, -1.0),
        (0.5, 0.5),
        (timedelta(minutes=1), 60.0),
    ],
)
def test_a_duration_means_what_people_expect(written: Any, meant: float) -> None:
    assert seconds(written) == meant


@pytest.mark.parametrize(
    "wrong",
    [
        *["", "soon", "-5m", "5 m", "1.5.5s", "5x", "m", "1h 30m", "nan", "inf", "1e3", "9" * 400, "9" * 400 + "w"],
        *[math.nan, math.inf, -math.inf, 10**400, True, False, None, [], b"5m"],
    ],
    ids=lambda value: repr(value)[:20],
)
def test_any_other_duration_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="not a"):
        seconds(wrong)


@given(st.text(max_size=20))
def test_no_text_gives_anything_but_a_finite_positive_number_or_an_error(text: str) -> None:
    try:
        span = seconds(text)
    except ValueError:
        return
    assert math.isfinite(span)
    assert span >= 0


@pytest.mark.parametrize(
    ("span", "shown"),
    [
        (0.0, "0 ms"),
        (0.012, "12 ms"),
        (3.04, "3.0 s"),
        (-3.04, "-3.0 s"),
        (60.0, "1 m"),
        (250.0, "4 m 10 s"),
        (3601.0, "1 h"),
        (5400.0, "1 h 30 m"),
        (90_000.0, "1 d 1 h"),
        (864_000.0, "10 d"),
    ],
)
def test_a_span_is_shown_briefly(span: float, shown: str) -> None:
    assert brief(span) == shown
