"""The checks of single values, for settings, calls, commands, schedules and forms.

Each returns the value as it is kept. Each raises ``ValueError`` with words that follow the name of the value: *must be
a whole number from 1 to 9, not 'x'*. The caller adds the name, and raises its own error.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any, get_type_hints

from .clock import MICROSECOND
from .durations import Duration, seconds
from .text import plain, shown

WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]*")
TOPIC = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/\-]*")

DAY = 86_400.0
YEAR = 365.25 * DAY
CENTURY = 100 * YEAR
# The shortest span that a database keeps. Seconds.
SHORTEST = MICROSECOND.total_seconds()

_UNITS = (("year", YEAR), ("day", DAY), ("hour", 3600.0), ("minute", 60.0), ("second", 1.0))


def checks_of(fields: Any) -> dict[str, Callable[[Any], Any]]:
    """Return the function that checks each field of a class: it stands beside the type, in ``Annotated``.

    The keyword arguments of the check may stand behind it, in a dict.
    """
    hints = get_type_hints(fields, include_extras=True)
    found = {}
    for name, hint in hints.items():
        check, *bounds = hint.__metadata__
        found[name] = partial(check, **bounds[0]) if bounds else check
    return found


def whole(value: Any, lowest: int, highest: int | None = None) -> int:
    """Check a whole number, bounds included; True and False are none."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if is_whole and lowest <= value and (highest is None or value <= highest):
        return int(value)
    bounds = f"of {lowest} or more" if highest is None else f"from {lowest} to {highest}"
    raise ValueError(f"must be a whole number {bounds}, not {shown(value)}")


def span(value: Duration, lowest: float = 0.0, highest: float = CENTURY) -> float:
    """Check a length of time, bounds included. Return seconds."""
    try:
        found = seconds(value)
    except ValueError as error:
        raise ValueError(f"is {error}") from None
    if lowest <= found <= highest:
        return found
    between = f"between {_in_words(lowest)} and" if lowest != SHORTEST else "more than 0 and at most"
    raise ValueError(f"must be {between} {_in_words(highest)}, not {shown(value)}")


def _in_words(bound: float) -> str:
    """Return a bound in its largest whole unit: ``"30 days"``."""
    for unit, size in _UNITS:
        if bound >= size and not bound % size:
            return f"{bound / size:g} {unit}{'' if bound == size else 's'}"
    return f"{bound * 1000:g} ms" if bound else "0"


def word(value: Any, limit: int) -> str:
    """Check a name of at most ``limit`` characters, such as that of a queue."""
    return _spelled(value, limit, WORD, "_ . -")


def topic(value: Any, limit: int) -> str:
    """Check the name of a topic: a word in which ``:`` and ``/`` may be, too."""
    if callable(value):
        own = getattr(value, "topic", "")
        raise ValueError(f"must be text, not a function{own and f'; write {own!r}'}")
    return _spelled(value, limit, TOPIC, "_ . : / -")


def _spelled(value: Any, limit: int, pattern: re.Pattern[str], signs: str) -> str:
    if isinstance(value, str) and len(value) <= limit and pattern.fullmatch(value):
        return plain(value)
    raise ValueError(
        f"must be 1 to {limit} of the characters A-Z a-z 0-9 {signs} and begin with a letter or digit,"
        f" not {shown(value)}"
    )


def key(value: Any, limit: int) -> str:
    """Check an exact text: 1 to ``limit`` printable characters, without a space at either end."""
    is_fit = isinstance(value, str) and 1 <= len(value) <= limit and value.isprintable() and value == value.strip()
    if is_fit:
        return plain(value)
    needs = "" if isinstance(value, str) else "text, such as str(order.pk): "
    raise ValueError(
        f"must be {needs}1 to {limit} printable characters without a space at either end, not {shown(value)}"
    )


def text(value: Any, limit: int) -> str:
    """Check a text for people: at most ``limit`` printable characters, or none at all."""
    if isinstance(value, str) and len(value) <= limit and (value.isprintable() or not value):
        return plain(value)
    raise ValueError(f"must be text of at most {limit} printable characters, not {shown(value)}")


def row_id(value: str) -> int:
    """Read the id of a row, as addresses and command lines have it."""
    digits = value.lstrip("0")
    # Python reads no number of more than some thousand digits.
    if digits.isascii() and digits.isdigit() and len(digits) < 20 and int(digits) < 2**63:
        return int(digits)
    raise ValueError(f"must be the id of a row, not {shown(value)}")


def flag(value: Any) -> bool:
    """Check a switch: True or False."""
    if isinstance(value, bool):
        return value
    raise ValueError(f"must be True or False, not {shown(value)}")


def moment(value: Any) -> datetime:
    """Check an aware datetime. Return it in UTC: no change to or from summer time affects what is computed from it."""
    if not isinstance(value, datetime):
        raise ValueError(f"must be an aware datetime, not {shown(value)}")
    if value.tzinfo is UTC:
        return value
    if value.utcoffset() is None:
        raise ValueError("has no time zone; use an aware datetime, e.g. django.utils.timezone.now()")
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise ValueError(f"is out of range: {value.isoformat()}") from None


def same_json(one: Any, other: Any) -> bool:
    """Tell whether two values are the same as JSON: 1 is 1.0, but not true, as it is in Python."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_json(value, other[name]) for name, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_json, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)
