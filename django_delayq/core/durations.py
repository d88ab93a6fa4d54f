"""Reads durations as people write them: "90s", "15m", "2h", "7d", "1y", "1h30m", and writes them for people."""

from __future__ import annotations

import math
import re
from datetime import timedelta

from .text import shown

_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800, "y": 31_557_600}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhdwy])")

Duration = timedelta | int | float | str


def seconds(value: Duration) -> float:
    """Return the seconds in a timedelta, a number of seconds, or a text such as ``"10m"``.

    Raises ``ValueError`` for anything else, and for a number that is not finite.

    >>> seconds("1h30m"), seconds("250ms"), seconds(5), seconds(timedelta(minutes=1))
    (5400.0, 0.25, 5.0, 60.0)
    """
    if isinstance(value, timedelta):
        return value.total_seconds()
    number = None
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
    elif isinstance(value, str):
        text = value.strip().lower()
        parts = _PART.findall(text)
        if re.fullmatch(r"\d+(?:\.\d+)?", text):
            number = float(text)
        elif parts and "".join(amount + unit for amount, unit in parts) == text:
            number = sum(float(amount) * _UNITS[unit] for amount, unit in parts)
    if number is None:
        negative = " is negative" if isinstance(value, str) and value.lstrip().startswith("-") else ""
        raise ValueError(
            f"not a duration: {shown(value)}{negative}; write seconds, a timedelta, or text such as '90s', '15m',"
            " '1h30m'"
        )
    if not math.isfinite(number):
        raise ValueError(f"not a finite duration: {number!r}")
    return number


def brief(span: float) -> str:
    """Write a span of seconds for people: ``"4 m 10 s"``.

    >>> brief(0.012), brief(3.04), brief(250), brief(90000)
    ('12 ms', '3.0 s', '4 m 10 s', '1 d 1 h')
    """
    if span < 0:
        return "-" + brief(-span)
    if span < 1:
        return f"{span * 1000:.0f} ms"
    if span < 60:
        return f"{span:.1f} s"
    for big, small, size, step in (("m", "s", 60, 1), ("h", "m", 3600, 60), ("d", "h", 86400, 3600)):
        if span < size * {"m": 60, "h": 24, "d": 1e9}[big]:
            whole, rest = divmod(int(span), size)
            return f"{whole} {big} {rest // step} {small}" if rest // step else f"{whole} {big}"
    return f"{span:.0f} s"
