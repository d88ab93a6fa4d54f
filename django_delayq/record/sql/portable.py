"""The statements of the queue in Django's ORM. A vendor may have quicker ones: ``PostgreSQL`` overrides these."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from django.db import connections
from django.db.models import Exists, Q, QuerySet

from ...core.clock import ceil_tenth, from_tenths, to_us
from ...core.limits import queue_name
from ...core.states import LIVE, State
from ...models import Message
from ...models.limit_overrides import LimitOverride
from ...models.messages import HOLDS_KEY, IN_THE_WAY, WAITS_AGAIN, Lease, LogRow, lease_is_over, not_expired
from ...models.queue import RecordNow, in_paused_queue
from .expressions import QUEUES, After, UnderLimits, UpTo
from .holders import Holder
from .log_in_row import add_to_log, first_row
from .moves import LEFT_ALONE, Decision, clock, locked, move, moved, writing
from .rows import (
    ALL_CHANGES,
    BEGINNING,
    ROWS_PASSED,
    Claimed,
    Claiming,
    Expired,
    Facts,
    Failure,
    IndexPosition,
    Inserted,
    LeaseRenewal,
    Moved,
    NewMessage,
    QueueLook,
    Reference,
    Span,
    Success,
    Ticket,
    ToAnnounce,
)


def may_claim(using: str, asked: Claiming) -> Q:
    """Return the condition of a claim on a message, besides its due time."""
    where = Q(
        not_expired(RecordNow()),
        pk__in=[ticket.id for ticket in asked.tickets],
        state=State.SCHEDULED,
        topic__in=list(asked.leases),
    )
    where &= ~in_paused_queue(using)
    where &= ~Q(Exists(LimitOverride.objects.using(using).filter(pk__gt=asked.overrides)))
    return where if asked.queue is None else where & Q(queue=asked.queue)


class Portable:
    """The statements on one database alias. Each move is atomic, and writes its log rows with it."""

    # The tables and columns, quoted as SQL needs them. SQLite: its own tables know their foreign keys. It follows by
    # itself those with another action.
    REFERENCES = """
    SELECT printf('"%w"', t.name), printf('"%w"', k."from")
      FROM sqlite_master t JOIN pragma_foreign_key_list(t.name) k
     WHERE t.type = 'table' AND k."table" = 'delayq_message' AND k.on_delete IN ('NO ACTION', 'RESTRICT')
     ORDER BY t.name, k."from"
    """

    # The first scheduled messages ``m`` of each queue, of those that a condition chooses, up to a number.
    FIRST_OF_EACH = f"""({QUEUES}) q JOIN delayq_message m ON m.id IN (
        SELECT m.id FROM delayq_message m WHERE m.state = 'scheduled' AND m.queue = q.queue AND {{chosen}}
         ORDER BY m.due_at, m.id LIMIT {{limit}}
    )"""  # noqa: S608

    def __init__(self, using: str) -> None:
        self.using = using

    def _rows(self, sql: str) -> list[tuple[Any, ...]]:
        """Run a statement without parameters."""
        with connections[self.using].cursor() as cursor:
            cursor.execute(sql)
            rows: list[tuple[Any, ...]] = cursor.fetchall()
        return rows

    def now(self) -> datetime:
        """Return the time by the database's clock."""
        return clock(self.using)

    def unannounced(self, limit: int) -> ToAnnounce:
        """Return the time, and messages of which Redis was not told: no vendor has them but PostgreSQL."""
        return ToAnnounce(self.now())

    def insert(self, new: NewMessage, actor: str) -> Inserted | None:
        """Write one message; return None when another message has its key, or waits again after it gave the key up."""
        with writing(self.using):
            if new.key is not None:
                rows = Message.objects.using(self.using).filter(topic=new.topic, key=new.key)
                if rows.filter(HOLDS_KEY).exists() or (new.own is None and rows.filter(WAITS_AGAIN).exists()):
                    return None
            [(_new, inserted)] = self.insert_many([new], actor)
            return inserted

    def keep_waiting(self, ids: Sequence[int], *, is_next: bool) -> set[int]:
        """Keep waiting messages from being claimed before the caller's transaction ends.

        Return those that wait, and are in the way of others with their key or ``is_next`` of the handler that calls.
        """
        # A transaction that writes keeps all others from claiming.
        waiting = Message.objects.using(self.using).filter(pk__in=ids, state=State.SCHEDULED)
        return set((waiting if is_next else waiting.filter(IN_THE_WAY)).values_list("pk", flat=True))

    def insert_many(self, new: Sequence[NewMessage], actor: str) -> Iterator[tuple[NewMessage, Inserted]]:
        """Write messages without keys, in the caller's transaction; all are written when the iterator is exhausted."""
        now = self.now()
        log = []
        for one in new:
            due = ceil_tenth(one.due_at or now + one.delay)
            message = Message(**one.columns(due), created_at=now)
            message.save_base(using=self.using, force_insert=True)
            log.append(first_row(message, actor))
            yield one, Inserted(message.pk, due, now)
        add_to_log(self.using, log)

    def facts(self, ids: Sequence[int]) -> dict[int, Facts]:
        """Return what decides where these ids belong, by id. Locks nothing."""
        rows = Message.objects.using(self.using).filter(pk__in=list(ids))
        return {row[0]: Facts._make(row) for row in rows.values_list(*Facts._fields)}

    def queues(self, known: Collection[str] = ()) -> list[str]:
        """Return the queues that hold scheduled messages, by name. With ``known``: other ones, in no order."""
        return [queue for (queue,) in self._rows(QUEUES) if queue not in known]

    def heads(self, queues: Sequence[str], span: Span) -> Iterable[tuple[str, int, int, int]]:
        """Yield queue, id, due time (microseconds since 1970) and priority of the first messages of each queue."""
        rows = Message.objects.using(self.using).filter(After(*span.after), state=State.SCHEDULED)
        if span.end is not None:
            rows = rows.filter(due_at__lte=span.end)
        if span.topics is not None:
            rows = rows.filter(topic__in=span.topics)
        for queue in queues:
            for place in self.places(rows.filter(queue=queue).order_by("due_at", "id")[: span.limit]):
                yield (queue, *place)

    def find_candidates(
        self, begins: Mapping[str, IndexPosition], topics: Iterable[str] | None, closed: Collection[str] = ()
    ) -> dict[str, QueueLook]:
        """Find the first message of each queue, behind a position in it, that may begin once it is due.

        That is one of these topics (None: of any), under none of the limits ``closed``, which is not expired. In a
        queue that is paused, or under one of these limits, there is none.
        """
        found = {}
        for queue, begin in begins.items():
            first = self._behind(begin, queue).values_list("due_at", "id").first()
            last, rows = self._open(queue, topics, closed, begin)
            position = rows.values_list("due_at", "id").first()
            found[queue] = QueueLook(queue, self.now(), first, position or last, position is not None)
        return found

    def anything_expired(self, leased_from: datetime, waiting_from: datetime) -> Expired:
        """Tell whether a lease has run out, and whether a waiting message has expired, from these times on."""
        now = self.now()
        rows = Message.objects.using(self.using).order_by()
        return Expired(
            rows.filter(lease_is_over(now)).exists(),
            rows.filter(state=State.SCHEDULED, expires_at__isnull=False, expires_at__lte=now).exists(),
            now,
        )

    def _behind(self, position: IndexPosition, queue: str) -> QuerySet[Message]:
        """Return the scheduled messages of a queue behind a position, in their order."""
        rows = Message.objects.using(self.using).filter(After(*position), state=State.SCHEDULED, queue=queue)
        return rows.order_by("due_at", "id")

    def _open(
        self, queue: str, topics: Iterable[str] | None, closed: Collection[str], after: IndexPosition
    ) -> tuple[IndexPosition | None, QuerySet[Message]]:
        """Return the position of the last of ``ROWS_PASSED`` messages behind ``after``, and the candidates up to it."""
        rows = self._behind(after, queue).exclude(in_paused_queue(self.using))
        if queue_name(queue) in closed:
            rows = rows.none()
        last = rows.values_list("due_at", "id")[ROWS_PASSED - 1 : ROWS_PASSED].first()
        if last is not None:
            rows = rows.filter(UpTo(*last))
        chosen = Q() if topics is None else Q(topic__in=list(topics))
        return last, rows.filter(chosen, not_expired(self.now()), ~Q(UnderLimits(closed)))

    def due(
        self,
        queue: str,
        topics: Iterable[str],
        limit: int,
        closed: Collection[str] = (),
        after: IndexPosition = BEGINNING,
    ) -> list[Ticket]:
        """Return due messages of a queue behind a position, of the thousand most overdue, the highest priority first.

        Those that stand under one of the limits ``closed`` are left out, and so is what stands behind ``ROWS_PASSED``
        others.
        """
        return self._due(self._open(queue, topics, closed, after)[1], limit)

    def _due(self, rows: QuerySet[Message], limit: int) -> list[Ticket]:
        rows = rows.filter(due_at__lte=self.now())
        head = rows.values_list("priority", "due_at", "pk")[:1000]
        return [Ticket(pk) for _priority, _due, pk in sorted(head, key=lambda row: (-row[0], row[1], row[2]))[:limit]]

    def claim_due(self, queue: str, limit: int, lease: float, worker: str) -> list[Claimed]:
        """Claim due messages of a queue, of any topic, in no order: those that ``due`` returns."""
        with writing(self.using):
            tickets = self._due(self._open(queue, None, (), BEGINNING)[1], limit)
            topics = Message.objects.using(self.using).filter(pk__in=[ticket.id for ticket in tickets])
            leases = dict.fromkeys(topics.values_list("topic", flat=True), lease)
            return self.claim(Claiming(tickets, leases, worker, queue, 0.0, ALL_CHANGES)) if tickets else []

    def claims_under_way(self) -> set[str]:
        """Return the transactions that may be claiming at this moment."""
        # A transaction that writes waits for those before it, so none is under way beside it.
        return set()

    def claim(self, asked: Claiming) -> list[Claimed]:
        """Move ``scheduled → running`` the messages that may start."""
        by_id = {ticket.id: ticket for ticket in asked.tickets}
        # The time that the log rows get.
        claimed_at: datetime

        def decide(message: Message, now: datetime) -> Decision:
            nonlocal claimed_at
            claimed_at = now
            ticket = by_id[message.pk]
            ready_at = None if ticket.ready_tenths is None else from_tenths(ticket.ready_tenths)
            latest = now + timedelta(seconds=asked.ahead)
            if message.due_at > min(ready_at or latest, latest):
                return LEFT_ALONE
            values = {
                "deliveries": message.deliveries + 1,
                "worker": asked.worker,
                "leased_until": now + timedelta(seconds=message.lease or asked.leases[message.topic]),
            }
            return Decision(
                State.RUNNING,
                values,
                actor=f"worker:{asked.worker}",
                delivery=message.deliveries + 1,
                ready_at=ready_at,
            )

        where = may_claim(self.using, asked)
        return [
            # The time is in the row of the log.
            Claimed._make(getattr(m, name) for name in Claimed._fields)._replace(claimed_at=claimed_at)
            for m, decision in move(self.using, where, decide, actor=asked.worker, wait=False, with_content=True)
            if decision.to is not None
        ]

    def succeed(self, successes: Sequence[Success], *, wait: bool) -> set[int]:
        """Move messages to *consumed* while they are live; return the ids that moved."""
        by_id = {success.id: success for success in successes}

        def decide(message: Message, now: datetime) -> Decision:
            success = by_id[message.pk]
            reported = min(message.reported + 1, message.deliveries - message.excused)
            values: dict[str, Any] = {"reported": reported}
            if success.result is not None:
                values["result"] = json.loads(success.result)
            if message.state == State.RUNNING and success.delivery < message.deliveries:
                # The later delivery runs on, and keeps its permits.
                until = message.lease_ends_at
                assert until is not None
                rows = Lease.objects.using(self.using)
                rows.create(message_id=message.pk, delivery=-message.deliveries, until=until)
            return Decision(State.CONSUMED, values, actor=success.actor, delivery=success.delivery)

        where = Q(pk__in=list(by_id), state__in=LIVE)
        return {m.pk for m, _decision in move(self.using, where, decide, actor="", wait=wait)}

    def succeed_current(self, queue: str, message_id: int, actor: str) -> int | None:
        """Move a message of a queue ``running → consumed`` by its current delivery; return the number of that."""
        running = Message.objects.using(self.using).filter(pk=message_id, queue=queue, state=State.RUNNING)
        for delivery in running.values_list("deliveries", flat=True):
            if self.succeed([Success(message_id, delivery, actor)], wait=True):
                return delivery
        return None

    def commit_success(self, success: Success, thread: int | None) -> bool:
        """Record a success as the last statement of the transaction that is open in this thread, which may commit it.

        The block that has opened the transaction then finds nothing to commit. Returns whether the message moved: if
        not, the transaction is still open.
        """
        return bool(self.succeed([success], wait=True))

    def begin(self) -> None:
        """Have the transaction that Django has just opened in this thread begin now, not with its first statement."""
        # SQLite has begun it; another vendor begins it with the first statement.

    def fail(self, failures: Sequence[Failure], *, wait: bool) -> list[Moved]:
        """Move ``running → scheduled | dead | cancelled`` for the current delivery."""
        by_id = {failure.id: failure for failure in failures}

        def decide(message: Message, now: datetime) -> Decision:
            failure = by_id[message.pk]
            if message.deliveries != failure.delivery:
                return LEFT_ALONE
            to, reason = State.DEAD if failure.dead else State.SCHEDULED, failure.reason
            if message.cancel_requested:
                to, reason = State.CANCELLED, f"cancel requested; {failure.reason}"
            values: dict[str, Any] = {
                "reported": message.reported + 1,
                "attempts": message.attempts + failure.counts,
                "conflicts": message.conflicts + failure.conflict,
            }
            if failure.payload is not None:
                values["payload"] = json.loads(failure.payload)
            if to == State.SCHEDULED and failure.delay is not None:
                # A message that was claimed a moment early and released falls due no earlier than before.
                values["due_at"] = max(message.due_at, ceil_tenth(now + failure.delay))
            return Decision(
                to,
                values,
                reason,
                error=failure.error,
                traceback=failure.traceback,
                exception=failure.exception,
                actor=failure.actor,
            )

        where = Q(pk__in=list(by_id), state=State.RUNNING)
        return [
            moved(m, decision)
            for m, decision in move(self.using, where, decide, actor="", wait=wait, insert=self.insert_many)
            if decision.to is not None
        ]

    def extend(self, renewals: Sequence[LeaseRenewal], *, wait: bool = True) -> dict[int, bool]:
        """Extend leases. Return id → whether a cancel was requested; a delivery whose id is missing has lost its lease.

        With no renewals this waits for the same locks on tables as a renewal would. ``wait=False`` waits for no row
        that another transaction has locked, and extends its lease all the same.
        """
        answers = {}
        with writing(self.using):
            now = self.now()
            for renewal in renewals:
                rows = Message._base_manager.using(self.using).filter(
                    pk=renewal.id, deliveries=renewal.delivery, state=State.RUNNING
                )
                for requested in rows.values_list("cancel_requested", flat=True):
                    answers[renewal.id] = requested
                    if renewal.lease > 0 or (renewal.lease < 0 and rows.filter(lease_is_over(now)).exists()):
                        self._renew(renewal, now + timedelta(seconds=abs(renewal.lease)))
        return answers

    def _renew(self, renewal: LeaseRenewal, until: datetime) -> None:
        """Write the new end of a lease, unless it ends later already."""
        lease = {"message_id": renewal.id, "delivery": renewal.delivery}
        rows = Lease.objects.using(self.using)
        if not rows.filter(**lease).exists():
            rows.create(**lease, until=until)
        else:
            rows.filter(**lease, until__lt=until).update(until=until)

    def delete(self, ids: Sequence[int]) -> None:
        """Delete messages, which the caller's transaction has locked, with their log."""
        # PostgreSQL knows no empty list.
        marks = ", ".join(["%s"] * len(ids)) or "NULL"
        with connections[self.using].cursor() as cursor:
            # By SQL: Django would delete rows of the project that refer to a message, too.
            cursor.execute(f"DELETE FROM {LogRow._meta.db_table} WHERE message_id IN ({marks})", [*ids])  # noqa: S608
            cursor.execute(f"DELETE FROM {Message._meta.db_table} WHERE id IN ({marks})", [*ids])  # noqa: S608

    def deletion(self, rows: QuerySet[Message]) -> Callable[[int], int]:
        """Return a function that deletes the next of these finished messages with their log, the oldest first.

        It takes how many to delete at most, and returns how many it deleted: fewer when there are no more. Each call is
        a transaction, and passes over messages that another transaction has locked.
        """
        after: tuple[datetime | None, int] | None = None

        def delete(size: int) -> int:
            nonlocal after
            chosen = rows.order_by("finished_at", "id")
            if after is not None:
                at, pk = after
                chosen = chosen.filter(Q(finished_at__gte=at) & (Q(finished_at__gt=at) | Q(pk__gt=pk)))
            with writing(self.using):
                mine = locked(self.using, chosen, wait=False, to_delete=True)
                places = list(mine.values_list("finished_at", "id")[:size])
                self.delete([pk for _at, pk in places])
            after = places[-1] if places else after
            return len(places)

        return delete

    def references(self) -> list[Reference]:
        """Return the foreign keys because of which the database refuses to delete a message that a row refers to."""
        return [Reference(table, column) for table, column in self._rows(self.REFERENCES)]

    def places(self, rows: QuerySet[Message]) -> Iterable[tuple[int, int, int]]:
        """Return the id, the due time (microseconds since 1970) and the priority of rows: all that Redis gets."""
        return ((pk, to_us(due), priority) for pk, due, priority in rows.values_list("id", "due_at", "priority"))

    def has_been_up_for(self, seconds: float) -> bool:
        """Return whether the database has been up for a number of seconds."""
        # The uptime is not known: the database counts as having been up for ever.
        return True

    def takes_writes(self) -> bool:
        """Return whether transactions may write; a standby lets none."""
        return True

    def most_connections(self) -> tuple[int, bool] | None:
        """Return how many connections the user of this one may have at once, and whether a pooler shares them out.

        None where nothing limits them.
        """
        return None

    def row_security(self, tables: Collection[str]) -> list[tuple[str, str, bool]]:
        """Return those of the tables whose rows policies may hide from the role of this connection.

        Each with the role, and whether some policy shows rows: without one all are hidden.
        """
        return []

    def snapshot_holders(self) -> list[Holder] | None:
        """Return who holds snapshots, those first that keep the most rows; None where snapshots keep no rows."""
        return None

    def estimated_rows(self, relation: str) -> int | None:
        """Return how many rows the planner believes a table or index has; None where there is no estimate."""
        # There is no estimate but a count of the rows.
        return None
