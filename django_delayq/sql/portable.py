"""Moves in Django's ORM, for every database; and the hot moves for those that have no statement of their own."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.db import connections, transaction
from django.db.models import F, Q, QuerySet
from django.utils import timezone

from ..clock import ceil_tenth, from_tenths
from ..exceptions import InvalidTransition
from ..models import Message, Queue, Transition
from ..outcomes import kind, storable
from ..states import LIVE, State, is_legal
from .rows import Claimed, Failure, Holding, Inserted, Moved, NewMessage, Success, Ticket

# Up to so many groups of rows that become the same are written one by one.
FEW = 5


@dataclass(slots=True)
class Change:
    """What becomes of one row, and what the log says of it."""

    to: State
    values: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    error: str = ""
    traceback: str = ""
    actor: str | None = None
    attempt: int | None = None
    ready_at: datetime | None = None
    partition: int | None = None


def clock(using: str) -> datetime:
    """The database's clock; on a database without a clock of its own, the host's."""
    connection = connections[using]
    if connection.vendor != "postgresql":
        return timezone.now()
    with connection.cursor() as cursor:
        cursor.execute("SELECT clock_timestamp()")
        now: datetime = cursor.fetchone()[0]
        return now


@contextmanager
def writing(using: str) -> Iterator[None]:
    """A transaction that will write. SQLite refuses at once to let one that has begun by reading write after another.

    Inside of a transaction of the caller's this is only a savepoint: there OPTIONS["transaction_mode"] must help.
    """
    connection = connections[using]
    if connection.vendor != "sqlite" or connection.in_atomic_block:
        with transaction.atomic(using=using):
            yield
        return
    connection.ensure_connection()
    mode: str | None = vars(connection)["transaction_mode"]
    vars(connection)["transaction_mode"] = "IMMEDIATE"
    with ExitStack() as stack:
        try:
            stack.enter_context(transaction.atomic(using=using))
        finally:
            vars(connection)["transaction_mode"] = mode
        yield


def move(
    using: str,
    where: Q,
    change: Callable[[Message, datetime], Change | None],
    *,
    actor: str,
    limit: int | None = None,
    wait: bool = True,
    order_by: Sequence[str] = ("id",),
) -> list[tuple[Message, Change | None]]:
    """Lock the rows that match, ask ``change`` what becomes of each, move and log them: all in one transaction.

    ``change`` gets the row and the time, and answers None to leave it alone. Returns each row, as it is after the
    move, with its change. ``wait=False`` passes over rows that another transaction has locked.
    """
    with writing(using):
        rows = list(_locked(using, where, wait=wait, order_by=order_by, limit=limit))
        now = clock(using)
        decided = [(message, change(message, now)) for message in rows]
        plans = [_plan(message, made, now) for message, made in decided if made is not None]
        written = {plan.message.pk for plan in _write(using, plans)}
        Transition.objects.using(using).bulk_create(
            _logged(plan, actor, now) for plan in plans if plan.message.pk in written
        )
    return [(message, made) for message, made in decided if made is None or message.pk in written]


class _Plan(NamedTuple):
    message: Message
    change: Change
    before: State
    values: dict[str, Any]


def _locked(using: str, where: Q, *, wait: bool, order_by: Sequence[str], limit: int | None) -> QuerySet[Message]:
    rows = Message.objects.using(using).filter(where).order_by(*order_by)
    features = connections[using].features
    if features.has_select_for_update:
        rows = rows.select_for_update(
            skip_locked=not wait and features.has_select_for_update_skip_locked,
            no_key=features.has_select_for_no_key_update,
        )
    return rows if limit is None else rows[:limit]


def _plan(message: Message, change: Change, now: datetime) -> _Plan:
    before = State(message.state)
    if not is_legal(before, change.to):
        raise InvalidTransition(f"{before} → {change.to}")
    return _Plan(message, change, before, _values(message, change, now))


def _write(using: str, plans: list[_Plan]) -> list[_Plan]:
    """Update the rows, and the objects with them; returns the plans that came true."""
    if connections[using].features.has_select_for_update:
        _write_locked(using, plans)
        written = plans
    else:
        # The guard on `moves` stands in for the row lock.
        rows = Message.objects.using(using)
        written = [p for p in plans if rows.filter(pk=p.message.pk, moves=p.message.moves).update(**p.values)]
    for plan in written:
        for name, value in plan.values.items():
            setattr(plan.message, name, value)
    return written


def _write_locked(using: str, plans: list[_Plan]) -> None:
    """One statement for all rows that become the same; one for many rows that become each something else."""
    groups: dict[str, list[_Plan]] = {}
    for plan in plans:
        alike = {name: value for name, value in plan.values.items() if name != "moves"}
        groups.setdefault(repr(sorted(alike.items())), []).append(plan)
    rows = Message.objects.using(using)
    if len(groups) > FEW:
        # A column that only other plans name gets what it has: the rows are locked.
        copies = [_copy(plan) for plan in plans]
        rows.bulk_update(copies, sorted({name for plan in plans for name in plan.values}), batch_size=200)
        return
    for group in groups.values():
        values = {**group[0].values, "moves": F("moves") + 1}
        rows.filter(pk__in=[plan.message.pk for plan in group]).update(**values)


def _copy(plan: _Plan) -> Message:
    made = copy.copy(plan.message)
    for name, value in plan.values.items():
        setattr(made, name, value)
    return made


def _logged(plan: _Plan, actor: str, now: datetime) -> Transition:
    message, change = plan.message, plan.change
    return Transition(
        message_id=message.pk,
        number=message.moves,
        at=now,
        from_state=plan.before,
        to_state=change.to,
        attempt=message.deliveries if change.attempt is None else change.attempt,
        due_at=message.due_at,
        ready_at=change.ready_at,
        partition=change.partition,
        actor=change.actor or actor,
        reason=storable(change.reason),
        error=change.error,
        traceback=change.traceback,
    )


def _values(message: Message, change: Change, now: datetime) -> dict[str, Any]:
    values: dict[str, Any] = {"state": change.to, "moves": message.moves + 1}
    values["finished_at"] = None if change.to in LIVE else now
    if change.to != State.RUNNING:
        values["leased_until"] = None
        values["worker"] = ""
    # One that nobody reported is dead for the reason that the log gives.
    failure = kind(change.error or (change.reason if change.to == State.DEAD else ""))
    if failure:
        values["error"] = failure
    return {**values, **change.values}


class Portable:
    """The hot moves by way of ``move``."""

    def __init__(self, using: str) -> None:
        self.using = using

    def now(self) -> datetime:
        return clock(self.using)

    def insert(self, new: NewMessage, actor: str) -> Inserted | None:
        with writing(self.using):
            if new.key is not None:
                live = Message.objects.using(self.using).filter(topic=new.topic, key=new.key, state__in=LIVE)
                if live.exists():
                    return None
            [(_new, inserted)] = self.insert_many([new], actor)
            return inserted

    def insert_many(self, new: Sequence[NewMessage], actor: str) -> Iterator[tuple[NewMessage, Inserted]]:
        now = self.now()
        log = []
        for one in new:
            due = ceil_tenth(one.due or now + one.delay)
            message = Message(
                topic=one.topic,
                queue=one.queue,
                key=one.key,
                priority=one.priority,
                payload=json.loads(one.payload),
                headers=json.loads(one.headers),
                due_at=due,
                expires_at=None if one.expires is None else due + one.expires,
                created_at=now,
                retry=None if one.retry is None else json.loads(one.retry),
                max_attempts=one.max_attempts,
            )
            message.save(using=self.using, force_insert=True)
            log.append(
                Transition(message_id=message.pk, number=1, at=now, to_state=State.SCHEDULED, due_at=due, actor=actor)
            )
            yield one, Inserted(message.pk, due, now)
        Transition.objects.using(self.using).bulk_create(log)

    def queues(self) -> list[str]:
        scheduled = Message.objects.using(self.using).filter(state=State.SCHEDULED)
        found: list[str] = []
        while True:
            rows = scheduled.filter(queue__gt=found[-1]) if found else scheduled
            first = rows.order_by("queue").values_list("queue", flat=True).first()
            if first is None:
                return found
            found.append(first)

    def until_due(self, queue: str, topics: Iterable[str]) -> float | None:
        rows = Message.objects.using(self.using).filter(state=State.SCHEDULED, queue=queue, topic__in=list(topics))
        if self._paused().filter(name=queue).exists():
            return None
        first = rows.order_by("due_at", "id").values_list("due_at", flat=True).first()
        return None if first is None else (first - self.now()).total_seconds()

    def anything_overdue(self) -> tuple[bool, bool]:
        now = self.now()
        rows = Message.objects.using(self.using).order_by()
        return (
            rows.filter(state=State.RUNNING, leased_until__lt=now).exists(),
            rows.filter(state=State.SCHEDULED, expires_at__isnull=False, expires_at__lte=now).exists(),
        )

    def due(self, queue: str, topics: Iterable[str], limit: int) -> list[Ticket]:
        now = self.now()
        rows = (
            Message.objects.using(self.using)
            .filter(
                Q(expires_at__isnull=True) | Q(expires_at__gt=now),
                state=State.SCHEDULED,
                queue=queue,
                due_at__lte=now,
                topic__in=list(topics),
            )
            .exclude(queue__in=self._paused().values("name"))
        )
        head = rows.order_by("due_at", "id").values_list("priority", "due_at", "pk")[:1000]
        return [Ticket(pk) for _priority, _due, pk in sorted(head, key=lambda row: (-row[0], row[1], row[2]))[:limit]]

    def _paused(self) -> QuerySet[Queue]:
        return Queue.objects.using(self.using).filter(Queue.PAUSED)

    def claiming(self) -> set[str]:
        # Whoever writes waits for its turn.
        return set()

    def claim(
        self, tickets: Sequence[Ticket], leases: dict[str, float], worker: str, queue: str | None
    ) -> list[Claimed]:
        by_id = {ticket.id: ticket for ticket in tickets}
        # As in the log.
        claimed_at: datetime

        def change(message: Message, now: datetime) -> Change | None:
            nonlocal claimed_at
            claimed_at = now
            ticket = by_id[message.pk]
            ready_at = None if ticket.ready_tenths is None else from_tenths(ticket.ready_tenths)
            if message.due_at > (ready_at or now) or (message.expires_at and message.expires_at <= now):
                return None
            values = {
                "deliveries": message.deliveries + 1,
                "worker": worker,
                "leased_until": now + timedelta(seconds=leases[message.topic]),
            }
            return Change(
                State.RUNNING,
                values,
                actor=f"worker:{worker}",
                attempt=message.deliveries + 1,
                ready_at=ready_at or message.due_at,
                partition=ticket.partition,
            )

        where = Q(pk__in=list(by_id), state=State.SCHEDULED, topic__in=list(leases))
        where &= ~Q(queue__in=self._paused().values("name"))
        if queue is not None:
            where &= Q(queue=queue)
        return [
            Claimed(
                m.pk,
                m.topic,
                m.queue,
                m.key,
                m.priority,
                m.payload,
                m.headers,
                m.due_at,
                m.expires_at,
                m.retry,
                m.max_attempts,
                m.attempts,
                m.deliveries,
                m.reported,
                m.excused,
                claimed_at,
            )
            for m, change_ in move(self.using, where, change, actor=worker, wait=False)
            if change_ is not None
        ]

    def succeed(self, successes: Sequence[Success], *, wait: bool) -> set[int]:
        by_id = {success.id: success for success in successes}

        def change(message: Message, now: datetime) -> Change:
            success = by_id[message.pk]
            reported = min(message.reported + 1, message.deliveries - message.excused)
            return Change(State.CONSUMED, {"reported": reported}, actor=success.actor, attempt=success.delivery)

        where = Q(pk__in=list(by_id), state__in=LIVE)
        return {m.pk for m, _change in move(self.using, where, change, actor="", wait=wait)}

    def fail(self, failures: Sequence[Failure], *, wait: bool) -> list[Moved]:
        by_id = {failure.id: failure for failure in failures}

        def change(message: Message, now: datetime) -> Change | None:
            failure = by_id[message.pk]
            if message.deliveries != failure.delivery:
                return None
            to, reason = State.SCHEDULED, failure.reason
            if failure.dead:
                to = State.DEAD
            elif message.cancel_requested:
                to, reason = State.CANCELLED, f"cancel requested; {failure.reason}"
            values: dict[str, Any] = {
                "reported": message.reported + 1,
                "attempts": message.attempts + failure.counts,
            }
            if to == State.SCHEDULED and failure.delay is not None:
                # A message that was claimed a moment early and given back is due no earlier for that.
                values["due_at"] = max(message.due_at, ceil_tenth(now + failure.delay))
            return Change(to, values, reason, failure.error, failure.traceback, failure.actor)

        where = Q(pk__in=list(by_id), state=State.RUNNING)
        return [
            moved(m, State.RUNNING, done.reason)
            for m, done in move(self.using, where, change, actor="", wait=wait)
            if done is not None
        ]

    def extend(self, holdings: Sequence[Holding], *, wait: bool) -> dict[int, bool]:
        answers = {}
        with writing(self.using):
            now = self.now()
            for holding in holdings:
                rows = Message.objects.using(self.using).filter(
                    pk=holding.id, deliveries=holding.delivery, state=State.RUNNING
                )
                for requested, until in rows.values_list("cancel_requested", "leased_until"):
                    later = max(until or now, now + timedelta(seconds=holding.lease))
                    if rows.update(leased_until=later):
                        answers[holding.id] = requested
        return answers

    def settled(self, seconds: float) -> bool:
        return True


def moved(message: Message, before: State, reason: str = "") -> Moved:
    """A row after its move, without the row."""
    return Moved(
        message.pk,
        message.topic,
        message.queue,
        message.priority,
        before,
        State(message.state),
        message.due_at,
        message.deliveries,
        message.reported,
        reason,
    )
