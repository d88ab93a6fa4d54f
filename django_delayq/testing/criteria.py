"""What a test looks for among messages, and how far a message is from it, in words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any, NamedTuple, TypedDict

from ..core import names
from ..core.clock import iso
from ..core.durations import Duration, brief, seconds
from ..core.values import same_json
from ..models import Message
from ..project import validation

# Characters of a payload that a failure shows.
SHOWN = 300
# A message may be due this much earlier or later than a test says. Seconds.
WITHIN = 5.0


# The value of a criterion that was not given: every value will do.
ANYTHING: Any = object()

# The criteria that a message has exactly, as the record has them, and what checks their values.
_EXACT = {"key": validation.key, "queue": validation.queue, "priority": validation.priority}


class Sought(TypedDict, total=False):
    """What a test may look for, besides the topic. What it leaves out may have any value."""

    payload: Any
    payload__contains: Any
    due: Duration | datetime | None
    within: Duration
    key: str | None
    queue: str
    priority: int


class Criteria(NamedTuple):
    """The values that a message must have. ``payload`` and ``contained`` are JSON, as the record has them."""

    topic: str | None
    payload: Any
    contained: Any
    due: datetime | None
    within: timedelta
    key: Any
    queue: Any
    priority: Any

    @classmethod
    def of(cls, now: datetime, topic: str | None, wanted: Sought) -> Criteria:
        """Check what was given, and bring it into the form of the record. A duration ``due`` counts from ``now``.

        Raises ``TypeError`` for a criterion that there is not, and ``ValueError`` for a value that cannot be.
        """
        known, given = Sought.__annotations__, dict[str, Any](wanted)
        if unknown := wanted.keys() - known.keys():
            raise TypeError(f"there is no criterion {names.unknown(unknown, known, {})}")
        due = wanted.get("due")
        if due is not None and not isinstance(due, datetime):
            due = now + timedelta(seconds=seconds(due))
        if due is not None and due.utcoffset() is None:
            raise ValueError("due has no time zone; use an aware datetime or a duration")
        return cls(
            topic,
            _json(wanted.get("payload", ANYTHING)),
            _json(wanted.get("payload__contains", ANYTHING)),
            due,
            validation.delay(wanted.get("within", WITHIN), "within"),
            *(check(given[name]) if name in given else ANYTHING for name, check in _EXACT.items()),
        )

    def differences(self, message: Message) -> list[str]:
        """Return how a message differs, one line of text for each difference; none when it matches."""
        return [*self._differences(message)]

    def _differences(self, message: Message) -> Iterator[str]:
        for name in _EXACT:
            wanted, found = getattr(self, name), getattr(message, name)
            if wanted is not ANYTHING and found != wanted:
                yield f"{name} is {found!r}, not {wanted!r}"
        if self.due is not None and abs(message.due_at - self.due) > self.within:
            off = (message.due_at - self.due).total_seconds()
            yield f"it is due {_span(abs(off))} {'later' if off > 0 else 'earlier'}"
        if self.payload is not ANYTHING:
            yield from _missing("payload", self.payload, message.payload, is_exact=True)
        if self.contained is not ANYTHING:
            yield from _missing("payload", self.contained, message.payload, is_exact=False)

    def __str__(self) -> str:
        """Return what a message must have, in words; "" when every message will do."""
        parts = [f"topic {self.topic!r}"] if self.topic is not None else []
        parts += [f"{name} {wanted!r}" for name in _EXACT if (wanted := getattr(self, name)) is not ANYTHING]
        if self.due is not None:
            parts.append(f"due at {iso(self.due)} (± {brief(self.within.total_seconds())})")
        if self.payload is not ANYTHING:
            parts.append(f"payload {_shown(self.payload)}")
        if self.contained is not ANYTHING:
            parts.append(f"a payload that contains {_shown(self.contained)}")
        return ", ".join(parts)


def _json(value: Any) -> Any:
    return value if value is ANYTHING else json.loads(validation.payload(value))


def _missing(place: str, wanted: Any, found: Any, *, is_exact: bool) -> Iterator[str]:
    """Yield what ``found`` lacks of ``wanted``: names of dicts, items of lists. ``is_exact``: or has besides."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        for name, value in wanted.items():
            inside = f"{place}[{name!r}]"
            if name not in found:
                yield f"{place} has no {name!r}"
            else:
                yield from _missing(inside, value, found[name], is_exact=is_exact)
        if is_exact:
            yield from (f"{place} has {name!r} besides" for name in found if name not in wanted)
    elif isinstance(wanted, list) and isinstance(found, list) and not is_exact:
        for item in wanted:
            if not any(not [*_missing(place, item, one, is_exact=False)] for one in found):
                yield f"{place} does not contain {_shown(item)}"
    elif not same_json(wanted, found):
        yield f"{place} is {_shown(found)}, not {_shown(wanted)}"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, sort_keys=True)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} …"


def _span(span: float) -> str:
    """Return a span of seconds for people, rounded."""
    return brief(round(span) if span >= 10 else span)


def described(message: Message, now: datetime) -> str:
    """Return one line about a message for people to read."""
    wait = (message.due_at - now).total_seconds()
    due = f"due in {_span(wait)}" if wait > 0 else "due"
    facts = [f"#{message.pk} {message.topic}", due, f"payload {_shown(message.payload)}"]
    if message.key is not None:
        facts.insert(2, f"key {message.key!r}")
    return ", ".join(facts)
