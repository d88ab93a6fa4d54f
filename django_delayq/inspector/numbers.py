"""Numbers that nobody counts to their end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from django.db import connections
from django.utils.dateparse import parse_datetime
from django.utils.translation import gettext as _


@dataclass(frozen=True, slots=True)
class Capped:
    """A number; ``more`` when there are more, or may be; ``about`` when it is the planner's guess."""

    count: int
    more: bool = False
    about: bool = False

    def __str__(self) -> str:
        if self.about:
            return _("about %(number)s") % {"number": f"{_rounded(self.count):,}"}
        return f"{self.count:,}+" if self.more else f"{self.count:,}"


NONE = Capped(0)


def capped(found: int, cap: int) -> Capped:
    """A count that ended one beyond the cap."""
    return Capped(min(found, cap), found > cap)


def total(numbers: Iterable[Capped]) -> Capped:
    """Their sum; as exact as the least exact of them."""
    all_ = list(numbers)
    more = any(number.more for number in all_)
    return Capped(sum(number.count for number in all_), more, not more and any(number.about for number in all_))


def _rounded(number: int) -> int:
    """Three digits and zeros: a guess is not better than that."""
    return int(float(f"{number:.3g}"))


def moment(using: str, value: datetime | str | None) -> datetime | None:
    """A moment that came out of raw SQL: some drivers give text."""
    if isinstance(value, str):
        value = parse_datetime(value)
    if value is None or value.tzinfo is not None:
        return value
    return value.replace(tzinfo=connections[using].timezone or UTC)
