"""The only code that changes a state. Every move writes its log row in the same transaction; none reaches Redis.

Zero rows changed is an ordinary answer, not an error: somebody else was first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from functools import cache
from typing import Literal

from django.db import IntegrityError, connections, transaction
from django.db.models import Exists, OuterRef, Q

from . import actors, failpoints
from .clock import ceil_tenth
from .models import Message, Transition
from .sql import Statements, statements
from .sql.portable import Change, move, moved
from .sql.rows import Claimed, Failure, Holding, Inserted, Moved, NewMessage, Success, Ticket
from .states import LIVE, REQUEUEABLE, State
from .validation import FARTHEST

# Rows locked by one transaction of a bulk verb.
BATCH = 1000
# After a restart of PostgreSQL, holders of leases have this long to report before the reaper takes them for dead.
GRACE_AFTER_RESTART = 5.0


class Verdict(StrEnum):
    """What a cancel, reschedule, run-now or requeue came to."""

    # No delivery is running or ended unreported, and none will start.
    CANCELLED = "cancelled"
    # It is running, or claimed and begins within 10 ms: the handler can see the request, and no retry follows.
    REQUESTED = "requested"
    # No new delivery will start, but one that died without a word may have had its effect.
    OUTCOME_UNKNOWN = "outcome unknown"
    # The message is in a state from which this cannot be done any more.
    TOO_LATE = "too late"
    # There is no such message (or no live one with this topic and key).
    NOT_FOUND = "not found"
    RESCHEDULED = "rescheduled"
    REQUEUED = "requeued"
    # Requeue: another live message has the topic and key.
    KEY_TAKEN = "key taken"


DONE = frozenset({Verdict.CANCELLED, Verdict.REQUESTED, Verdict.OUTCOME_UNKNOWN, Verdict.RESCHEDULED, Verdict.REQUEUED})


@dataclass(frozen=True, slots=True)
class Answer:
    """What happened to one message, and the state it is in now. True when something was done."""

    id: int | None
    verdict: Verdict
    state: State | None = None
    moved: Moved | None = None

    def __bool__(self) -> bool:
        return self.verdict in DONE

    def __str__(self) -> str:
        if self.verdict == Verdict.TOO_LATE and self.state is not None:
            return f"{self.verdict}: {self.state.value}"
        return str(self.verdict)


@cache
def _statements(using: str) -> Statements:
    return statements(using)


def now(using: str) -> datetime:
    """The record's clock."""
    return _statements(using).now()


# --- schedule ---------------------------------------------------------------------------------------------------------


def insert(using: str, new: NewMessage, actor: str) -> Inserted | None:
    """Write one message; None when a live message has its key."""
    failpoints.reach("before_insert")
    inserted = _statements(using).insert(new, actor)
    failpoints.reach("after_insert")
    return inserted


def insert_many(using: str, new: Sequence[NewMessage], actor: str) -> Iterator[tuple[NewMessage, Inserted]]:
    """Write messages without keys, in a transaction; yields each on its way, and is done when it is exhausted."""
    failpoints.reach("before_insert")
    yield from _statements(using).insert_many(new, actor)
    failpoints.reach("after_insert")


def live_with_key(using: str, topic: str, key: str) -> Message | None:
    """The live message that holds a key."""
    return Message.objects.using(using).filter(topic=topic, key=key, state__in=LIVE).first()


def replace(using: str, message_id: int, new: NewMessage, *, due_only: bool, actor: str) -> Answer:
    """Give a scheduled message the content and due time of ``new``; with ``due_only``, just the later due time."""

    def change(message: Message, at: datetime) -> Change | None:
        # A delivery that ended without a word may still come with its success, which would stand for the new content.
        if message.state != State.SCHEDULED or message.deliveries > message.reported:
            return None
        due = ceil_tenth(new.due or at + new.delay)
        if due_only:
            due = max(due, message.due_at)
            return Change(State.SCHEDULED, _moved_due(message, due), reason="debounced")
        values = {
            "queue": new.queue,
            "priority": new.priority,
            "payload": json.loads(new.payload),
            "headers": json.loads(new.headers),
            "due_at": due,
            "expires_at": None if new.expires is None else due + new.expires,
            "retry": None if new.retry is None else json.loads(new.retry),
            "max_attempts": new.max_attempts,
            "attempts": 0,
        }
        return Change(State.SCHEDULED, values, reason="replaced")

    return _one(move(using, Q(pk=message_id), change, actor=actor), State.SCHEDULED, Verdict.RESCHEDULED)


def _one(rows: list[tuple[Message, Change | None]], before: State, verdict: Verdict) -> Answer:
    for message, change in rows:
        state = State(message.state)
        if change is None:
            return Answer(message.pk, Verdict.TOO_LATE, state)
        return Answer(message.pk, verdict, state, moved(message, before, change.reason))
    return Answer(None, Verdict.NOT_FOUND)


def _moved_due(message: Message, due: datetime) -> dict[str, datetime | None]:
    """A new due time; the time to live after it stays as long as it was."""
    expires = None if message.expires_at is None else message.expires_at - message.due_at + due
    return {"due_at": due, "expires_at": expires}


# --- deliver ----------------------------------------------------------------------------------------------------------


def exclusively(using: str) -> AbstractContextManager[object]:
    """Keeps rows found by ``due`` locked until they are claimed, where the database can lock rows."""
    if connections[using].features.has_select_for_update_skip_locked:
        return transaction.atomic(using=using)
    return nullcontext()


def due(using: str, queue: str, topics: Iterable[str], limit: int) -> list[Ticket]:
    """What is due now by the record's clock, most overdue first."""
    return _statements(using).due(queue, topics, limit)


def queues(using: str) -> list[str]:
    """The queues that hold scheduled messages, by name."""
    return _statements(using).queues()


def until_due(using: str, queue: str, topics: Iterable[str]) -> float | None:
    """Seconds until the next scheduled message of a queue falls due, 0 or less when one waits.

    None: there is none, or the queue is paused.
    """
    return _statements(using).until_due(queue, topics)


def claiming(using: str) -> set[str]:
    """The transactions that may be claiming at this moment."""
    return _statements(using).claiming()


def anything_overdue(using: str) -> tuple[bool, bool]:
    """Whether a lease has run out, and whether a scheduled message has expired: one cheap look."""
    return _statements(using).anything_overdue()


def claim(
    using: str, tickets: Sequence[Ticket], leases: dict[str, float], worker: str, *, queue: str | None = None
) -> list[Claimed]:
    """``scheduled → running`` for those that may start, of the topics in ``leases`` (topic → seconds).

    Here every race is decided. An id that is cancelled, finished, running, not due, expired, in another queue than
    the one that is served (None: in any), in a paused one, or locked by somebody else's move returns no row.
    """
    unique = {ticket.id: ticket for ticket in tickets}
    return _statements(using).claim(list(unique.values()), leases, worker, queue) if unique else []


def succeed(using: str, successes: Iterable[Success], *, wait: bool = True) -> set[int]:
    """``→ consumed``, from whoever comes with it while the message is live. Returns the ids that moved; idempotent.

    ``wait=False``, here and below, passes over rows that another transaction has locked; ``still`` tells them from
    the others.
    """
    unique = {success.id: success for success in successes}
    return _statements(using).succeed(list(unique.values()), wait=wait) if unique else set()


def fail(using: str, failures: Iterable[Failure], *, wait: bool = True) -> list[Moved]:
    """``running → scheduled | dead | cancelled``, from the current delivery only; idempotent."""
    # Of two deliveries of one message only the later can be the current one.
    unique: dict[int, Failure] = {}
    for failure in sorted(failures, key=lambda f: f.delivery):
        unique[failure.id] = failure
    return _statements(using).fail(list(unique.values()), wait=wait) if unique else []


def extend(using: str, holdings: Sequence[Holding], *, wait: bool = True) -> dict[int, bool]:
    """Lengthen leases. Returns id → whether a cancel was requested; an id that is absent has lost its lease."""
    return _statements(using).extend(holdings, wait=wait) if holdings else {}


def still(using: str, ids: Iterable[int]) -> dict[int, tuple[State, int]]:
    """The state and the number of the last delivery of those that are live."""
    rows = Message.objects.using(using).filter(pk__in=list(ids), state__in=LIVE)
    return {pk: (State(state), delivery) for pk, state, delivery in rows.values_list("pk", "state", "deliveries")}


def is_settled(using: str) -> bool:
    """Whether the database has been up long enough for holders of leases to report after a restart of it."""
    return _statements(using).settled(GRACE_AFTER_RESTART)


def reap(using: str, *, max_crashes: int, limit: int = BATCH, actor: str) -> list[Moved]:
    """End the deliveries whose lease ran out: back to *scheduled*, or *dead* after too many deaths without a word."""
    where = Q(state=State.RUNNING, leased_until__lt=now(using))
    return _unreported(using, where, max_crashes, limit, actor, "lease ran out")


def release_worker(using: str, worker: str, *, max_crashes: int, actor: str, shutdown: bool) -> list[Moved]:
    """Give back what a worker process held that is certainly dead. An ordered ``shutdown`` is held against nobody."""
    where = Q(state=State.RUNNING, worker__startswith=worker)
    reason = "worker was shut down" if shutdown else "worker process died"
    return _unreported(using, where, max_crashes, None, actor, reason, counted="excused" if shutdown else None)


def release_orphaned(
    using: str, ids: Iterable[int], worker: str, *, since: datetime | None, max_crashes: int, actor: str
) -> list[Moved]:
    """Give back those of ``ids`` that ``worker`` claimed after ``since`` (None: ever) and does not know of.

    Nobody ran them, which is as good as a report.
    """
    claims = Transition.objects.filter(
        message=OuterRef("pk"), attempt=OuterRef("deliveries"), from_state=State.SCHEDULED, to_state=State.RUNNING
    )
    if since is not None:
        claims = claims.filter(at__gt=since)
    where = Q(Exists(claims), pk__in=list(ids), state=State.RUNNING, worker=worker)
    return _unreported(using, where, max_crashes, None, actor, "the answer to its claim was lost", counted="reported")


def _unreported(
    using: str,
    where: Q,
    max_crashes: int,
    limit: int | None,
    actor: str,
    reason: str,
    *,
    counted: Literal["reported", "excused"] | None = None,
) -> list[Moved]:
    """``counted``: among which deliveries this one is from now on; None: among those that ended without a word."""

    def change(message: Message, at: datetime) -> Change | None:
        crashes = message.deliveries - message.reported - message.excused - (counted is not None)
        values: dict[str, int] = {} if counted is None else {counted: getattr(message, counted) + 1}
        if crashes >= max_crashes:
            return Change(State.DEAD, values, reason=f"{reason}; {crashes} deliveries ended without a word")
        if message.cancel_requested:
            return Change(State.CANCELLED, values, reason=f"cancel requested; {reason}")
        return Change(State.SCHEDULED, values, reason=reason)

    rows = move(using, where, change, actor=actor, limit=limit, wait=False)
    return [moved(m, State.RUNNING, done.reason) for m, done in rows if done is not None]


def expire(using: str, *, limit: int = BATCH, actor: str, among: Q | None = None) -> list[Moved]:
    """``scheduled → expired`` for what was not started in its time."""
    where = Q(state=State.SCHEDULED, expires_at__isnull=False, expires_at__lte=now(using)) & (among or Q())

    def change(message: Message, at: datetime) -> Change:
        return Change(State.EXPIRED, reason="not started in time")

    rows = move(using, where, change, actor=actor, limit=limit, wait=False, order_by=("expires_at",))
    return [moved(m, State.SCHEDULED, done.reason) for m, done in rows if done is not None]


# --- steer ------------------------------------------------------------------------------------------------------------


def cancel(using: str, ids: Sequence[int], *, reason: str = "", actor: str | None = None) -> list[Answer]:
    """Cancel messages. The answers say which of the verdicts of ``Verdict`` it came to for each."""

    def change(message: Message, at: datetime) -> Change | None:
        if message.state == State.SCHEDULED:
            return Change(State.CANCELLED, reason=reason)
        if message.state == State.RUNNING and not message.cancel_requested:
            return Change(State.RUNNING, {"cancel_requested": True}, reason=reason or "cancel requested")
        return None

    def verdict(message: Message, change: Change | None) -> Verdict:
        if message.state == State.RUNNING:
            return Verdict.REQUESTED
        if change is None:
            return Verdict.TOO_LATE
        return Verdict.OUTCOME_UNKNOWN if message.deliveries > message.reported else Verdict.CANCELLED

    return _steer(using, ids, change, verdict, State.SCHEDULED, actor)


def reschedule(
    using: str,
    ids: Sequence[int],
    *,
    due: datetime | None = None,
    delay: timedelta = timedelta(0),
    shift: timedelta | None = None,
    spread: timedelta = timedelta(0),
    overdue_since: datetime | None = None,
    reason: str = "",
    actor: str | None = None,
) -> list[Answer]:
    """Move the due time of scheduled messages: to ``due``, or ``delay`` from now; ``spread`` evenly over a time.

    With ``shift`` each moves by so much from its own due time, though not before now. With ``overdue_since`` only
    those that were due by then: one that somebody moves meanwhile is left alone.
    """
    place = {pk: number for number, pk in enumerate(ids)}

    def change(message: Message, at: datetime) -> Change | None:
        if message.state != State.SCHEDULED or (overdue_since is not None and message.due_at > overdue_since):
            return None
        start = due or at + delay
        if shift is not None:
            start = min(max(message.due_at + shift, at), at + FARTHEST)
        share = spread * place[message.pk] / max(1, len(ids))
        return Change(State.SCHEDULED, _moved_due(message, ceil_tenth(start + share)), reason=reason)

    def verdict(message: Message, change: Change | None) -> Verdict:
        return Verdict.TOO_LATE if change is None else Verdict.RESCHEDULED

    return _steer(using, ids, change, verdict, State.SCHEDULED, actor)


def requeue(
    using: str,
    ids: Sequence[int],
    *,
    delay: timedelta = timedelta(0),
    spread: timedelta = timedelta(0),
    reason: str = "",
    actor: str | None = None,
) -> list[Answer]:
    """``dead | expired | cancelled → scheduled``, with its attempts counted anew. Deliveries go on counting.

    Due ``delay`` from now, or from then on evenly over the time ``spread``.
    """
    taken: set[int] = set()
    place = {pk: number for number, pk in enumerate(ids)}

    def change(message: Message, at: datetime) -> Change | None:
        if message.state not in REQUEUEABLE:
            return None
        if message.key is not None and live_with_key(using, message.topic, message.key) is not None:
            taken.add(message.pk)
            return None
        values = {
            **_moved_due(message, ceil_tenth(at + delay + spread * place[message.pk] / max(1, len(ids)))),
            "attempts": 0,
            # The deaths without a word are excused too, or the next one would be the last.
            "excused": message.deliveries - message.reported,
            "cancel_requested": False,
        }
        return Change(State.SCHEDULED, values, reason=reason)

    def verdict(message: Message, change: Change | None) -> Verdict:
        if message.pk in taken:
            return Verdict.KEY_TAKEN
        return Verdict.TOO_LATE if change is None else Verdict.REQUEUED

    return _steer(using, ids, change, verdict, State.DEAD, actor)


def give_up(
    using: str, ids: Sequence[int], *, reason: str, actor: str, overdue_since: datetime | None = None
) -> list[Answer]:
    """``scheduled → dead`` without a delivery. ``overdue_since`` as in ``reschedule``."""

    def change(message: Message, at: datetime) -> Change | None:
        if message.state != State.SCHEDULED or (overdue_since is not None and message.due_at > overdue_since):
            return None
        return Change(State.DEAD, reason=reason)

    def verdict(message: Message, change: Change | None) -> Verdict:
        return Verdict.TOO_LATE if change is None else Verdict.CANCELLED

    return _steer(using, ids, change, verdict, State.SCHEDULED, actor)


def _steer(
    using: str,
    ids: Sequence[int],
    change: Callable[[Message, datetime], Change | None],
    verdict: Callable[[Message, Change | None], Verdict],
    before: State,
    actor: str | None,
) -> list[Answer]:
    answers: dict[int, Answer] = {}

    def settle(batch: Sequence[int]) -> None:
        for message, done in move(using, Q(pk__in=batch), change, actor=actor or actors.current()):
            state = State(message.state)
            what = None if done is None else moved(message, before, done.reason)
            answers[message.pk] = Answer(message.pk, verdict(message, done), state, what)

    for start in range(0, len(ids), BATCH):
        batch = ids[start : start + BATCH]
        try:
            settle(batch)
        except IntegrityError:
            # A key was taken meanwhile (requeue). The batch was rolled back as a whole: settle them one by one.
            for pk in batch:
                try:
                    settle([pk])
                except IntegrityError:
                    answers[pk] = Answer(pk, Verdict.KEY_TAKEN)
        # Rows that changed under us on a database without row locks: once more.
        again = [pk for pk in batch if pk not in answers]
        if again:
            settle(again)
    return [answers.get(pk, Answer(pk, Verdict.NOT_FOUND)) for pk in ids]
