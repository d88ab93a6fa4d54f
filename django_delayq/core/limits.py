"""Limits: how many deliveries run at once, and how many begin in a time. This module decides, and reads nothing.

A limit counts the messages of a topic, of a key of a topic, or of a queue. Its ``name`` says which.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from . import values
from .durations import brief, seconds
from .text import shown

# The greatest numbers of a declaration.
MOST = 1_000_000
# A delivery that begins up to this time after its slot counts as punctual. Otherwise each delay of a millisecond would
# move all later slots.
PUNCTUAL = timedelta(seconds=0.1)
# The longest time before its due time at which a message is claimed.
LEAD = timedelta(seconds=1)
# Due times are rounded up.
ROUNDING = timedelta(milliseconds=1)

_RATE = re.compile(r"(\d+)/(.+)")
_UNITS = ("s", "m", "h", "d")


@dataclass(frozen=True, slots=True)
class Limit:
    """At most ``count`` deliveries at once (None: any number), with ``interval`` between them (None: any)."""

    count: int | None = None
    interval: timedelta | None = None
    # The number of deliveries that may begin together after a quiet time.
    burst: int = 1

    @property
    def tolerance(self) -> timedelta:
        """How much earlier than by the interval a delivery may begin, thanks to the burst."""
        return (self.interval or timedelta(0)) * (self.burst - 1)

    def __str__(self) -> str:
        parts = [] if self.count is None else [f"{self.count} at once"]
        if self.interval is not None:
            parts.append(f"one in {brief(self.interval.total_seconds())}, burst {self.burst}")
        return "; ".join(parts)


def declare(limit: Any = None, rate: Any = None, burst: Any = None) -> Limit | None:
    """Return the limit that a handler or a setting declares; None for no limit. Raises ``ValueError``."""
    if limit is not None:
        _whole("limit", limit)
    if burst is not None:
        _whole("burst", burst)
        if rate is None:
            raise ValueError("burst needs a rate: it says how many of it may begin together")
    if limit is None and rate is None:
        return None
    return Limit(limit, None if rate is None else _interval(rate), burst or 1)


def override(declared: Limit | None, limit: int | None, rate: str, burst: int | None) -> Limit:
    """Return the limit that an override makes of what the code declares: what it does not say stays as declared.

    Raises ``ValueError`` for what no override may say. A ``limit`` of 0 lets no delivery begin.
    """
    code = declared or Limit()
    if limit is not None:
        _whole("limit", limit, least=0)
    if burst is not None:
        _whole("burst", burst)
    interval = _interval(rate) if rate else code.interval
    return Limit(code.count if limit is None else limit, interval, burst or (1 if rate else code.burst))


def _whole(name: str, value: Any, least: int = 1) -> None:
    try:
        values.whole(value, least, MOST)
    except ValueError as error:
        raise ValueError(f"{name} {error}") from None


def _interval(rate: Any) -> timedelta:
    """Return the time from one delivery to the next at a rate such as ``"100/m"``."""
    match = _RATE.fullmatch(rate) if isinstance(rate, str) else None
    if match is not None:
        number, per = int(match[1][:9]), match[2].strip()
        try:
            span = seconds("1" + per if per in _UNITS else per)
        except ValueError:
            span = 0.0
        if 1 <= number <= MOST and 1 <= span <= 366 * 86_400 and len(match[1]) < 9:
            return timedelta(seconds=span / number)
    raise ValueError(
        "rate must be text such as '100/m': a number, and s, m, h, d or a duration of 1 second or more,"
        f" not {shown(rate)}"
    )


def rate(limit: Limit, factor: float) -> str:
    """Return the rate of a limit, times a factor, as declarations write it; empty for none that is a whole number."""
    if limit.interval is None:
        return ""
    for unit in _UNITS:
        number = factor * seconds(f"1{unit}") / limit.interval.total_seconds()
        # The interval is rounded to microseconds.
        if 0.5 < number <= MOST and abs(number - round(number)) < number / 1000:
            return f"{round(number)}/{unit}"
    return ""


def topic_name(topic: str, key: str | None) -> str:
    """Return the name of the limit that counts a topic, or a key of it."""
    return f"topic {topic}" if key is None else f"topic {topic} key {key}"


def any_key(topic: str) -> str:
    """Return what stands, among the names of closed limits, for a topic that may not begin with any key."""
    return f"topic {topic} *"


def queue_name(queue: str) -> str:
    """Return the name of the limit that counts a queue."""
    return f"queue {queue}"


def parts(name: str) -> tuple[str, str, str | None]:
    """Return what a limit counts, from its name: "topic" or "queue", its name, and the limit key or None."""
    kind, what, *rest = name.split(" ", 3)
    return kind, what, rest[1] if kind == "topic" and len(rest) == 2 else None


@dataclass(slots=True)
class Usage:
    """What is used up of one limit at a moment. ``begin`` adds a delivery to it."""

    name: str
    limit: Limit
    now: datetime
    running: int = 0
    # The time at which the whole burst is available again; None: it is available now.
    full_at: datetime | None = None
    # True when ``begin`` changed ``full_at``.
    is_charged: bool = False
    # ``is_full`` is about the moment that lies this far in the past.
    since: timedelta = timedelta(0)

    def __post_init__(self) -> None:
        most = self.now + LEAD + (self.limit.interval or timedelta(0)) * self.limit.burst
        if self.full_at is not None and self.full_at > most:
            # The limit cannot have used up that much: the clock was set back, or the rate was lower then. One delivery
            # may begin.
            self.full_at = self.now + self.limit.tolerance

    @property
    def has_permits(self) -> bool:
        """True when fewer deliveries run than the limit allows."""
        return self.limit.count is None or self.running < self.limit.count

    @property
    def slot(self) -> datetime | None:
        """The earliest time for the next delivery under the rate; None: any time."""
        if self.limit.interval is None or self.full_at is None:
            return None
        return self.full_at - self.limit.tolerance

    @property
    def opens_in(self) -> float:
        """The seconds until the next slot of the rate; 0 when it has come."""
        return 0.0 if self.slot is None else max(0.0, (self.slot - self.now).total_seconds())

    @property
    def is_full(self) -> bool:
        """True when no message that is due may begin."""
        return not self.has_permits or not self._has_slot(self.now - self.since)

    def admits(self, due: datetime) -> bool:
        """Tell whether a message may begin now, or at its due time where that is a moment ahead."""
        return self.has_permits and self._has_slot(max(self.now, due))

    def _has_slot(self, at: datetime) -> bool:
        return self.slot is None or self.slot <= at + ROUNDING

    def begin(self, due: datetime) -> None:
        """Count a delivery that begins."""
        self.running += 1
        if self.limit.interval is None:
            return
        # The moment at which the delivery could have begun, unless that is long ago.
        moment = due if self.slot is None else max(due, self.slot)
        if moment < self.now - PUNCTUAL:
            moment = self.now
        self.full_at = max(moment, self.full_at or moment) + self.limit.interval
        self.is_charged = True
