"""The selection of a restore, its position, and its report."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import NamedTuple

from django.db.models import Q, QuerySet, TextField, Value
from django.db.models.functions import Concat
from django.db.models.lookups import Exact

from ..core.states import State
from ..models import Message

# The condition that a message, which is found by its id, is scheduled. With a plain one the planner might read all
# scheduled messages to find a few: IS_SCHEDULED in record/sql/postgresql_base.py is written for the same reason.
IS_SCHEDULED = Q(Exact(Concat("state", Value(""), output_field=TextField()), Value(State.SCHEDULED.value)))


class Overdue(StrEnum):
    """The choices for messages that should have started already."""

    RUN = "run"
    CANCEL = "cancel"
    DEAD = "dead"
    SPREAD = "spread"


class Selection(NamedTuple):
    """The messages to restore; empty means all scheduled ones. Due from ``due_after`` on, and before ``due_before``."""

    queues: tuple[str, ...] = ()
    topics: tuple[str, ...] = ()
    ids: tuple[int, ...] = ()
    due_after: datetime | None = None
    due_before: datetime | None = None

    @property
    def is_everything(self) -> bool:
        """True when all scheduled messages are selected."""
        return not (self.queues or self.topics or self.ids or self.due_after or self.due_before)

    def where(self, queue: str) -> Q:
        """Return the condition for the messages of a queue; the ids are left out."""
        where = Q(queue=queue)
        if self.topics:
            where &= Q(topic__in=self.topics)
        if self.due_after is not None:
            where &= Q(due_at__gte=self.due_after)
        if self.due_before is not None:
            where &= Q(due_at__lt=self.due_before)
        return where

    def rows(self, using: str, queue: str) -> QuerySet[Message]:
        """Return the scheduled messages of a queue. The caller filters by the selected ids, a batch at a time."""
        rows = Message.objects.using(using).filter(self.where(queue))
        if not self.ids:
            return rows.filter(state=State.SCHEDULED)
        return rows.filter(IS_SCHEDULED)


class Stage(StrEnum):
    """The parts of a restore, in their order: it expires messages, changes overdue ones, and puts all into Redis."""

    EXPIRE = "expire"
    OVERDUE = "overdue"
    PUT = "put"


class Position(NamedTuple):
    """The position between two batches at which a restore stopped and can go on. A report has it as JSON."""

    stage: Stage
    queue: str
    # The due time (microseconds; None when reading by id) and the id of the last message of the last batch.
    due_us: int | None
    id: int
    # When the restore began, by the record's clock (microseconds). Messages that were overdue then are overdue for it.
    began_us: int
    # The number of overdue messages that were ended or spread, and the number of all overdue ones.
    done: int
    total: int
    # When the time of the spread begins (microseconds): when the restore began, or later if it stood still meanwhile.
    base_us: int


@dataclass(slots=True)
class Tally:
    """The numbers of one queue: messages that a restore found, put, gave up, and so on."""

    # Selected messages in the record: scheduled; overdue, and the oldest due time of those; due beyond the horizon;
    # running.
    found: int = 0
    overdue: int = 0
    oldest: datetime | None = None
    beyond: int = 0
    running: int = 0
    # Ids in Redis when the restore began.
    held: int = 0
    # Messages that were put into Redis, and messages that Redis had already.
    put: int = 0
    present: int = 0
    # Overdue messages that were given up, cancelled, spread, or spread to a time beyond the horizon (a worker puts them
    # in time); messages that expired.
    dead: int = 0
    cancelled: int = 0
    spread: int = 0
    later: int = 0
    expired: int = 0

    def count(self, name: str, number: int) -> None:
        """Add to one of the numbers, by its name."""
        setattr(self, name, getattr(self, name) + number)

    def add(self, other: Tally) -> None:
        """Add the numbers of another tally."""
        for name in self.__slots__:
            if name != "oldest":
                self.count(name, getattr(other, name))
        self.oldest = min((t for t in (self.oldest, other.oldest) if t is not None), default=None)


@dataclass(slots=True)
class Report:
    """The report of a restore so far. ``position`` says where it stopped; None when it is complete."""

    queues: dict[str, Tally] = field(default_factory=dict)
    position: str | None = None
    seconds: float = 0.0

    def total(self) -> Tally:
        """Return the sum over all queues."""
        total = Tally()
        for tally in self.queues.values():
            total.add(tally)
        return total

    def expected(self) -> int:
        """Return how many messages a restore handles, as its preview found them."""
        total = self.total()
        return total.found - total.beyond
