"""Limits: how many deliveries run at once, and how many begin in a time. This module decides, and reads nothing.

A limit counts the messages of a topic, of a key of a topic, or of a queue. Its ``name`` says which.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from . import values
from .durations import brief, seconds

# "topic … key …", with the longest topic and the longest key.
NAME_LENGTH = 320
# The greatest numbers of a declaration.
MOST = 1_000_000
# Messages get their slots under a rate so long ahead, as due times: they begin on time although lines are looked at
# only once a second.
AHEAD = timedelta(seconds=2)
# A place is kept so long, from its slot on, for a message that leaves the line, until a worker takes the message.
KEPT_FOR = timedelta(seconds=10)
# A delivery that begins so late after its due time counts as punctual: else each delay of a millisecond would push all
# later slots away.
PUNCTUAL = timedelta(seconds=0.1)
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
            parts.append(f"one in {brief(self.interval.total_seconds())}, {self.burst} together")
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


def _whole(name: str, value: Any) -> None:
    try:
        values.whole(value, 1, MOST)
    except ValueError as error:
        raise ValueError(f"{name} {error}") from None


def _interval(rate: Any) -> timedelta:
    match = _RATE.fullmatch(rate) if isinstance(rate, str) else None
    if match is not None:
        number, per = int(match[1][:9]), match[2].strip()
        try:
            span = seconds("1" + per if per in _UNITS else per)
        except ValueError:
            span = 0.0
        if 1 <= number <= MOST and 1 <= span <= 366 * 86_400 and len(match[1]) < 9:
            return timedelta(seconds=span / number)
    raise ValueError("rate must be text such as '100/m': a number, and s, m, h, d or a duration of 1 second or more")


def topic_name(topic: str, key: str | None) -> str:
    """Return the name of the limit that counts a topic, or a key of it."""
    return f"topic {topic}" if key is None else f"topic {topic} key {key}"


def queue_name(queue: str) -> str:
    """Return the name of the limit that counts a queue."""
    return f"queue {queue}"


def topic_of(name: str) -> str | None:
    """Return the topic that the limit of this name counts, or counts a key of; None when it counts a queue."""
    kind, what = name.split(" ", 2)[:2]
    return what if kind == "topic" else None


class LinePlace(NamedTuple):
    """The place of a message in a line: the highest priority first, then the earliest due time."""

    rank: int
    due_at: datetime
    id: int


@dataclass(slots=True)
class Line:
    """One limit at a moment: what runs, what is kept, and who waits first. ``begin`` and ``keep`` count on.

    ``kept`` counts messages that left the line a moment ago, and that a worker has not taken yet.
    """

    name: str
    limit: Limit
    now: datetime
    running: int = 0
    kept: int = 0
    first: LinePlace | None = None
    # The time at which the whole burst is left again.
    full_at: datetime | None = None
    # True when ``begin`` changed ``full_at``.
    is_charged: bool = False

    def __post_init__(self) -> None:
        if self.full_at is not None and self.limit.interval is not None:
            # After a step of the clock nobody waits longer than after a burst.
            latest = self.now + AHEAD + self.limit.interval * self.limit.burst
            self.full_at = min(self.full_at, latest)

    def refusal(self, place: LinePlace, *, is_kept: bool) -> str:
        """Return why a message must not begin now, in words; "" when it may.

        A message for which a place is kept does not count what is kept for others: they may come much later.
        """
        count, kept = self.limit.count, 0 if is_kept else self.kept
        if count is not None and self.running + kept >= count:
            return f"{self.name}: {min(self.running + kept, count)} of {count} places are taken"
        if self.limit.interval is not None and self._moment(place.due_at) + ROUNDING < self._slot(kept):
            return f"{self.name}: the rate is used up"
        if not is_kept and self.first is not None and self.first < place:
            return f"{self.name}: others wait longer"
        return ""

    def begin(self, place: LinePlace, *, is_kept: bool) -> None:
        """Count a delivery that begins."""
        self.running += 1
        if is_kept:
            self.kept = max(0, self.kept - 1)
        if self.limit.interval is not None:
            moment = self._moment(place.due_at)
            self.full_at = max(moment, self.full_at or moment) + self.limit.interval
            self.is_charged = True

    def slot(self) -> datetime | None:
        """Return when one more message of the line may begin; None: not soon."""
        if self.limit.count is not None and self.running + self.kept >= self.limit.count:
            return None
        if self.limit.interval is None:
            return self.now
        slot = max(self.now, self._slot(self.kept))
        return slot if slot <= self.now + AHEAD else None

    def room(self, most: int) -> int:
        """Return how many more messages of the line may begin soon, up to ``most``."""
        if self.limit.count is not None:
            most = min(most, self.limit.count - self.running - self.kept)
        if self.limit.interval is not None and most > 0:
            used_up = max(self.full_at or self.now, self.now) + self.limit.interval * self.kept
            most = min(most, (self.now + AHEAD + self.limit.tolerance - used_up) // self.limit.interval + 1)
        return max(0, most)

    def keep(self) -> None:
        """Count a message for which a place is kept from now on."""
        self.kept += 1

    def _slot(self, kept: int) -> datetime:
        """Return the earliest moment for a delivery after those that are kept."""
        interval = self.limit.interval
        assert interval is not None
        if kept:
            return max(self.full_at or self.now, self.now) + interval * kept - self.limit.tolerance
        return (self.full_at or self.now - PUNCTUAL) - self.limit.tolerance

    def _moment(self, due: datetime) -> datetime:
        """Return the moment for which a delivery counts that is due at this time."""
        return due if due >= self.now - PUNCTUAL else self.now
