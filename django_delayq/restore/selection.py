"""What a restore is asked for, where it has come to, and what it found."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple, cast

from django.db.models import Q, QuerySet, Value
from django.db.models.functions import Concat

from ..clock import from_us
from ..models import Message
from ..states import State


class Overdue(StrEnum):
    """What to do with messages that should have started already."""

    RUN = "run"
    SKIP = "skip"
    DEAD = "dead"
    SPREAD = "spread"


class InvalidPosition(ValueError):
    """This is not a position of this restore."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which of the scheduled messages; empty means all. Due times: from ``due_after`` on, before ``due_before``."""

    queues: tuple[str, ...] = ()
    topics: tuple[str, ...] = ()
    ids: tuple[int, ...] = ()
    due_after: datetime | None = None
    due_before: datetime | None = None

    @property
    def whole_queues(self) -> bool:
        return not (self.topics or self.ids or self.due_after or self.due_before)

    def where(self, queue: str) -> Q:
        """The same without the ids."""
        where = Q(queue=queue)
        if self.topics:
            where &= Q(topic__in=self.topics)
        if self.due_after is not None:
            where &= Q(due_at__gte=self.due_after)
        if self.due_before is not None:
            where &= Q(due_at__lt=self.due_before)
        return where

    def rows(self, using: str, queue: str) -> QuerySet[Message]:
        """The scheduled ones of a queue; its caller asks for the ids, a batch at a time."""
        rows = Message.objects.using(using).filter(self.where(queue))
        if not self.ids:
            return rows.filter(state=State.SCHEDULED)
        # Said plainly, the planner might read all that is scheduled to find these (IS_SCHEDULED in sql/postgresql.py).
        return rows.alias(said=Concat("state", Value(""))).filter(said=State.SCHEDULED)


class Stage(StrEnum):
    """The parts of a restore, in their order."""

    OVERDUE = "overdue"
    PUT = "put"


class Position(NamedTuple):
    """A place between two batches of a restore, to go on from."""

    stage: Stage
    queue: str
    due: datetime | None
    id: int
    # When the restore began, by the record's clock: what was overdue then is what it treats as overdue.
    began_us: int
    # Of the overdue ones, how many have been seen to, and how many there were.
    done: int
    total: int

    def text(self, print_: str) -> str:
        """The position as one word."""
        due = None if self.due is None else self.due.isoformat()
        packed = json.dumps([print_, *self._replace(due=cast(Any, due))], separators=(",", ":"))
        return base64.urlsafe_b64encode(packed.encode()).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str, print_: str) -> Position:
        """The inverse. Raises ``InvalidPosition`` if it is damaged, or another restore's."""
        try:
            packed = base64.b64decode(text.encode() + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
            owner, stage, queue, due, pk, began, done, total = json.loads(packed)
            position = cls(
                Stage(stage),
                str(queue),
                None if due is None else datetime.fromisoformat(due),
                int(pk),
                int(began),
                int(done),
                int(total),
            )
            from_us(position.began_us)
        except (ValueError, TypeError, OverflowError, RecursionError):
            raise InvalidPosition("not a position of delayq_restore") from None
        if owner != print_:
            raise InvalidPosition("this position belongs to a restore with other selectors")
        if position.due is not None and position.due.tzinfo is None:
            raise InvalidPosition("not a position of delayq_restore")
        return position


@dataclass(slots=True)
class Tally:
    """What was found in a queue, and what became of it."""

    # In the record, as selected: scheduled; of these overdue, since when; due beyond the horizon; running.
    found: int = 0
    overdue: int = 0
    oldest: datetime | None = None
    beyond: int = 0
    running: int = 0
    # In Redis when it began.
    held: int = 0
    # Put into Redis; there already.
    put: int = 0
    present: int = 0
    # Overdue ones that were given up, spread, or left alone.
    dead: int = 0
    spread: int = 0
    skipped: int = 0
    expired: int = 0

    def add(self, other: Tally) -> None:
        """Count another queue in."""
        for name in self.__slots__:
            if name != "oldest":
                setattr(self, name, getattr(self, name) + getattr(other, name))
        self.oldest = min((t for t in (self.oldest, other.oldest) if t is not None), default=None)


@dataclass(slots=True)
class Report:
    """A restore so far. ``position``: where it stopped; None when it is through."""

    queues: dict[str, Tally] = field(default_factory=dict)
    position: str | None = None
    seconds: float = 0.0

    def total(self) -> Tally:
        """All queues together."""
        total = Tally()
        for tally in self.queues.values():
            total.add(tally)
        return total

    def expected(self, overdue: Overdue) -> int:
        """Return how many messages a restore handles, as its preview found them: it handles some of them twice."""
        total = self.total()
        twice = total.overdue if overdue in (Overdue.DEAD, Overdue.SPREAD) else 0
        return total.found - total.beyond + twice
