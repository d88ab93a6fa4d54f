"""The statements of limits, by the database's vendor. They run in a transaction that holds the locks of its limits."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import islice
from typing import NamedTuple, Protocol

from django.db.models import Exists, OuterRef, Q, QuerySet

from ...core.limits import AHEAD, KEPT_FOR, queue_name, topic_name
from ...core.states import State
from ...models import Message
from ...models.queues import in_paused_queue
from ...models.record import Place, Rate, not_expired
from .moves import LEFT_ALONE, Decision, clock, move, moved
from .rows import Moved

# The names of limits share this many locks: the table of locks of the server has room for some thousands.
STRIPES = 64
# The first number of PostgreSQL's advisory locks of this package.
LOCKS = 0x64656C71
# A process that freezes in a transaction would keep all others from these limits: the server ends its session.
LONGEST_PAUSE = "5s"
# A place that is kept for longer was kept by another clock.
LONGEST_KEPT = AHEAD + KEPT_FOR


class Candidate(NamedTuple):
    """A message that may begin, or that waits for a limit. ``is_kept``: a place was kept for its next delivery."""

    id: int
    topic: str
    queue: str
    limit_key: str | None
    priority: int
    due_at: datetime
    deliveries: int
    is_kept: bool = False
    limited_by: str | None = None


class Count(NamedTuple):
    """What the record says about a limit ``now``. ``first``: priority, due time and id of its first waiting message,
    without those of paused queues.
    """

    now: datetime
    running: int
    kept: int
    full_at: datetime | None
    first: tuple[int, datetime, int] | None


class Refused(NamedTuple):
    """A message that has to wait for the limit ``name``."""

    id: int
    before: State
    name: str
    reason: str


class Promoted(NamedTuple):
    """A message that leaves its line, due at ``due_at``."""

    id: int
    due_at: datetime
    reason: str


class TakenPlace(NamedTuple):
    """A place that is taken by a delivery, or kept for one until ``kept_until``."""

    name: str
    message_id: int
    delivery: int
    kept_until: datetime | None = None


class LimitStatements(Protocol):
    """The statements of limits on one database alias."""

    def lock(self, names: Collection[str] | None, *, hastily: bool = False) -> None:
        """Keep other transactions from these limits (None: from all) until this one ends.

        ``hastily``: the commit need not reach the disk before others see it.
        """

    def now(self) -> datetime:
        """Return the time by the database's clock."""

    def topics_of(self, ids: Sequence[int]) -> list[tuple[int, str, str, str | None]]:
        """Return the id, topic, queue and limit key of those messages that are scheduled. Locks nothing."""

    def claimable(
        self, ids: Sequence[int], topics: Collection[str], queue: str | None, ahead: float
    ) -> list[Candidate]:
        """Return those messages that a claim would take, and lock them; locked ones are left out."""

    def waiting(self, rooms: Mapping[str, int], full: Collection[str]) -> list[Candidate]:
        """Return the first messages of each line, as many as there is room for, and lock them.

        Those that also stand under one of the ``full`` limits are left out, and those of paused queues.
        """

    def counts(self, names: Collection[str]) -> dict[str, Count]:
        """Return what the record says about these limits."""

    def write(self, places: Sequence[TakenPlace], rates: Mapping[str, datetime]) -> None:
        """Write places, and what is used up of rates."""

    def limit(self, refused: Sequence[Refused], actor: str) -> None:
        """Move ``scheduled | limited → limited``."""

    def promote(self, promoted: Sequence[Promoted], actor: str) -> list[Moved]:
        """Move ``limited → scheduled``."""

    def drop_places(self, names: Collection[str]) -> list[str]:
        """Delete the places of these limits whose deliveries have ended. Return those for which messages wait."""

    def drop_all_places(self) -> None:
        """Delete all places whose deliveries have ended."""

    def drop_rates(self) -> None:
        """Delete rates of which nothing is used up."""

    def names_of(self, ids: Collection[int]) -> set[str]:
        """Return the limits under which these messages have places."""

    def lines(self, after: str, limit: int) -> list[str]:
        """Return the names of limits for which messages wait, in their order, after a name."""


def stripes(names: Iterable[str] | None) -> list[int]:
    """Return the numbers of the locks of these limits, in the one order in which all transactions take them."""
    return [*range(STRIPES)] if names is None else sorted({zlib.crc32(name.encode()) % STRIPES for name in names})


class PortableLimits:
    """The statements in Django's ORM. A transaction that writes waits for those before it, so nothing is locked."""

    def __init__(self, using: str) -> None:
        self.using = using

    def lock(self, names: Collection[str] | None, *, hastily: bool = False) -> None:
        # The one writer holds the lock of the whole database.
        return None

    def now(self) -> datetime:
        return clock(self.using)

    def topics_of(self, ids: Sequence[int]) -> list[tuple[int, str, str, str | None]]:
        rows = Message.objects.using(self.using).filter(pk__in=list(ids), state=State.SCHEDULED)
        return list(rows.values_list("pk", "topic", "queue", "limit_key"))

    def claimable(
        self, ids: Sequence[int], topics: Collection[str], queue: str | None, ahead: float
    ) -> list[Candidate]:
        now = self.now()
        rows = (
            Message.objects.using(self.using)
            .filter(
                not_expired(now),
                pk__in=list(ids),
                state=State.SCHEDULED,
                due_at__lte=now + timedelta(seconds=ahead),
                topic__in=list(topics),
                **({} if queue is None else {"queue": queue}),
            )
            .exclude(in_paused_queue(self.using))
            .order_by("pk")
        )
        kept = dict(
            Place.objects.using(self.using).filter(message_id__in=list(ids)).values_list("message_id", "delivery")
        )
        return [_candidate(row, kept.get(row.pk) == row.deliveries + 1) for row in rows]

    def waiting(self, rooms: Mapping[str, int], full: Collection[str]) -> list[Candidate]:
        now = self.now()
        found: list[Candidate] = []
        for name, room in rooms.items():
            rows = self._line(name).filter(not_expired(now))
            left = (row for row in rows if not {topic_name(row.topic, row.limit_key), queue_name(row.queue)} & {*full})
            found += [_candidate(row) for row in islice(left, room)]
        return found

    def _line(self, name: str) -> QuerySet[Message]:
        """Return the messages of a line in their order, without those of paused queues."""
        rows = Message.objects.using(self.using).filter(state=State.LIMITED, limited_by=name)
        return rows.exclude(in_paused_queue(self.using)).order_by("-priority", "due_at", "pk")

    def counts(self, names: Collection[str]) -> dict[str, Count]:
        now, found = self.now(), {}
        full = dict(Rate.objects.using(self.using).filter(name__in=list(names)).values_list("name", "full_at"))
        for name in names:
            places = list(Place.objects.using(self.using).filter(name=name))
            live = Message.objects.using(self.using).filter(pk__in=[place.message_id for place in places])
            rows = {pk: (state, number) for pk, state, number in live.values_list("pk", "state", "deliveries")}
            first = self._line(name).values_list("priority", "due_at", "pk").first()
            found[name] = Count(
                now,
                sum(rows.get(place.message_id) == (State.RUNNING, place.delivery) for place in places),
                sum(
                    rows.get(place.message_id) == (State.SCHEDULED, place.delivery - 1)
                    and place.kept_until is not None
                    and now < place.kept_until <= now + LONGEST_KEPT
                    for place in places
                ),
                full.get(name),
                first,
            )
        return found

    def write(self, places: Sequence[TakenPlace], rates: Mapping[str, datetime]) -> None:
        Place.objects.using(self.using).bulk_create(
            [Place(**place._asdict()) for place in places],
            update_conflicts=True,
            unique_fields=["name", "message_id"],
            update_fields=["delivery", "kept_until"],
        )
        Rate.objects.using(self.using).bulk_create(
            [Rate(name=name, full_at=full_at) for name, full_at in rates.items()],
            update_conflicts=True,
            unique_fields=["name"],
            update_fields=["full_at"],
        )

    def limit(self, refused: Sequence[Refused], actor: str) -> None:
        by_id = {row.id: row for row in refused}

        def decide(message: Message, now: datetime) -> Decision:
            row = by_id[message.pk]
            if message.state != row.before:
                return LEFT_ALONE
            return Decision(State.LIMITED, {"limited_by": row.name}, row.reason)

        move(self.using, Q(pk__in=list(by_id)), decide, actor=actor)

    def promote(self, promoted: Sequence[Promoted], actor: str) -> list[Moved]:
        by_id = {row.id: row for row in promoted}

        def decide(message: Message, now: datetime) -> Decision:
            row = by_id[message.pk]
            if message.state != State.LIMITED:
                return LEFT_ALONE
            return Decision(State.SCHEDULED, {"limited_by": None, "due_at": row.due_at}, row.reason)

        rows = move(self.using, Q(pk__in=list(by_id)), decide, actor=actor)
        return [moved(message, decision.reason) for message, decision in rows if decision.to is not None]

    def drop_places(self, names: Collection[str]) -> list[str]:
        self._free_places().filter(name__in=list(names))._raw_delete(self.using)
        waiting = Message.objects.using(self.using).filter(state=State.LIMITED, limited_by__in=list(names))
        return [name for name in waiting.order_by("limited_by").values_list("limited_by", flat=True).distinct() if name]

    def drop_all_places(self) -> None:
        self._free_places()._raw_delete(self.using)

    def _free_places(self) -> QuerySet[Place]:
        live = Message.objects.filter(
            Q(state=State.RUNNING, deliveries=OuterRef("delivery"))
            | Q(state=State.SCHEDULED, deliveries=OuterRef("delivery") - 1),
            pk=OuterRef("message_id"),
        )
        return Place.objects.using(self.using).filter(~Exists(live))

    def drop_rates(self) -> None:
        Rate.objects.using(self.using).filter(full_at__lt=self.now())._raw_delete(self.using)

    def names_of(self, ids: Collection[int]) -> set[str]:
        return set(Place.objects.using(self.using).filter(message_id__in=list(ids)).values_list("name", flat=True))

    def lines(self, after: str, limit: int) -> list[str]:
        rows = Message.objects.using(self.using).filter(state=State.LIMITED, limited_by__gt=after)
        names = rows.order_by("limited_by").values_list("limited_by", flat=True).distinct()[:limit]
        return [name for name in names if name is not None]


def _candidate(row: Message, is_kept: bool = False) -> Candidate:
    return Candidate(
        row.pk,
        row.topic,
        row.queue,
        row.limit_key,
        row.priority,
        row.due_at,
        row.deliveries,
        is_kept,
        row.limited_by,
    )
