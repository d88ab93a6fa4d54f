"""The statements of limits, by the database's vendor. A claim runs them while it holds the locks of its limits."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, timedelta
from typing import NamedTuple

from django.db.models import Exists, OuterRef, Q, QuerySet

from ...core.limits import parts, topic_name
from ...core.states import State
from ...models import LimitOverride, Message
from ...models.messages import Lease, LogRow, Place, Rate, lease_is_over
from .moves import clock
from .portable import Portable, may_claim
from .rows import Claimed, Claiming

# Locks that the names of all limits share: the server's table of locks has room for some thousands.
STRIPES = 64
# The first of the two numbers that name an advisory lock of this package in PostgreSQL; the second is the stripe.
LOCKS = int.from_bytes(b"delq")
# A process that freezes in a transaction would keep all others from these limits: the server ends its session.
LONGEST_PAUSE = "5s"


class Candidate(NamedTuple):
    """A message that a claim would take, if its limits allow."""

    id: int
    topic: str
    queue: str
    limit_key: str | None
    priority: int
    due_at: datetime

    @property
    def kind(self) -> tuple[str, str, str | None]:
        """What decides under which limits the message stands."""
        return self.topic, self.queue, self.limit_key


class Count(NamedTuple):
    """What the record says about a limit ``now``. ``ended`` counts the permits of deliveries that have ended."""

    now: datetime
    running: int = 0
    ended: int = 0
    full_at: datetime | None = None


class Taking(NamedTuple):
    """What a claim takes of limits: a permit of each limit for each message, and the rates after it.

    A claim also deletes the permits of ended deliveries under the limits ``with_dead_permits``.
    """

    names: Mapping[int, Collection[str]]
    rates: Mapping[str, datetime]
    with_dead_permits: Collection[str]


def stripes(names: Iterable[str] | None) -> list[int]:
    """Return the numbers of the locks of these limits, in the one order in which all transactions take them."""
    return [*range(STRIPES)] if names is None else sorted({zlib.crc32(name.encode()) % STRIPES for name in names})


class PortableLimits:
    """The statements in Django's ORM. A transaction that writes waits for those before it, so nothing is locked.

    ``PostgreSQLLimits`` overrides them.
    """

    def __init__(self, using: str) -> None:
        self.using = using

    def lock(self, names: Collection[str] | None) -> None:
        """Keep other transactions from these limits (None: from all) until this one ends."""
        # The one writer holds the lock of the whole database.

    def read_candidates(self, names: Collection[str], asked: Claiming) -> tuple[dict[str, Count], list[Candidate]]:
        """Return what the record says about these limits, and those messages that a claim would take.

        The messages are locked; those that another transaction has locked are left out.
        """
        latest = clock(self.using) + timedelta(seconds=asked.ahead)
        rows = Message.objects.using(self.using).filter(may_claim(self.using, asked), due_at__lte=latest)
        found = rows.order_by("pk").values_list(*Candidate._fields)
        return self.counts(names), [Candidate._make(row) for row in found]

    def counts(self, names: Collection[str]) -> dict[str, Count]:
        """Return what the record says about these limits."""
        return self._counts(names)

    def _counts(self, names: Collection[str], since: timedelta | None = None) -> dict[str, Count]:
        """Return what the record says about these limits now, or with ``since`` what it would have said then."""
        now = clock(self.using)
        permits = Place.objects.using(self.using).filter(name__in=list(names))
        of_all = Counter(permits.values_list("name", flat=True))
        counting = self._runs(now) if since is None else self._ran(now - since)
        running = Counter(permits.filter(counting).values_list("name", flat=True))
        full = dict(Rate.objects.using(self.using).filter(name__in=list(names)).values_list("name", "full_at"))
        return {name: Count(now, running[name], of_all[name] - running[name], full.get(name)) for name in names}

    def used(self, limit: int, since: timedelta | None = None) -> dict[str, Count]:
        """Return what the record says about the limits of which something is used up, ``limit`` of them at most.

        With ``since`` (a time span) the answer is for that moment in the past: a delivery counts if it ran then within
        its lease, and a rate if it was in use then.
        """
        permits = Place.objects.using(self.using).order_by("name").values_list("name", flat=True).distinct()[:limit]
        moment = clock(self.using) - (since or timedelta())
        rates = Rate.objects.using(self.using).filter(full_at__gt=moment).values_list("name", flat=True)
        return self._counts({*permits, *rates[:limit]}, since)

    def claim_limited(self, taking: Taking, asked: Claiming) -> list[Claimed]:
        """Claim as ``Portable.claim`` does, and take what the messages need of their limits."""
        claimed = Portable(self.using).claim(asked)
        self._drop(Place.objects.using(self.using).filter(name__in=list(taking.with_dead_permits)))
        Place.objects.using(self.using).bulk_create(
            [
                Place(name=name, message_id=row.id, delivery=row.deliveries)
                for row in claimed
                for name in taking.names[row.id]
            ],
            update_conflicts=True,
            unique_fields=["name", "message_id"],
            update_fields=["delivery"],
        )
        Rate.objects.using(self.using).bulk_create(
            [Rate(name=name, full_at=full_at) for name, full_at in taking.rates.items()],
            update_conflicts=True,
            unique_fields=["name"],
            update_fields=["full_at"],
        )
        return claimed

    def lock_overrides(self) -> None:
        """Keep other transactions from changing limits until this one ends: ids are committed in their order."""

    def take_permits(self, override: LimitOverride) -> None:
        """Have the deliveries that run under an overridden limit count: they may have begun without one."""
        kind, what, key = parts(override.name)
        rows = Message.objects.using(self.using).filter(**{kind: what}, state=State.RUNNING)
        found = (rows if key is None else rows.filter(limit_key=key)).values_list("pk", "deliveries", "limit_key")
        names = ((topic_name(what, of) if kind == "topic" else override.name, pk, number) for pk, number, of in found)
        places = [Place(name=name, message_id=pk, delivery=number) for name, pk, number in names]
        Place.objects.using(self.using).bulk_create(places, ignore_conflicts=True)

    def drop_permits(self) -> None:
        """Delete all permits whose deliveries have ended."""
        self._drop(Place.objects.using(self.using))

    def _drop(self, permits: QuerySet[Place]) -> None:
        permits.filter(~self._runs(clock(self.using))).delete()

    @staticmethod
    def _runs(at: datetime) -> Q:
        rows = Message.objects.filter(pk=OuterRef("message_id"), deliveries=OuterRef("delivery"), state=State.RUNNING)
        return Q(Exists(rows)) | _is_kept(at)

    @staticmethod
    def _ran(since: datetime) -> Q:
        """Return the condition that the delivery of a permit ran at ``since`` or later, within its lease."""
        message = Message.objects.filter(pk=OuterRef("message_id"))
        runs = message.filter(~lease_is_over(since), deliveries=OuterRef("delivery"), state=State.RUNNING)
        ended = LogRow.objects.filter(message_id=OuterRef("message_id"), delivery=OuterRef("delivery"))
        ended = ended.filter(from_state=State.RUNNING, at__gte=since)
        ran = Q(Exists(runs)) | Q(Exists(message.filter(finished_at__gte=since))) | Q(Exists(ended))
        return ran | _is_kept(since)

    def drop_rates(self, since: timedelta) -> None:
        """Delete rates of which nothing has been used up for the time ``since``."""
        Rate.objects.using(self.using).filter(full_at__lt=clock(self.using) - since).delete()


def _is_kept(at: datetime) -> Q:
    """Return the condition that the delivery of a permit ran on at this time though its message was over."""
    rows = Lease.objects.filter(message_id=OuterRef("message_id"), delivery=-OuterRef("delivery"), until__gte=at)
    return Q(Exists(rows))
