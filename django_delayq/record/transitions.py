"""The only code that changes a state. It writes the log row of each move in the same transaction, and reaches no Redis.

A move that changes no row is not an error: another move was first.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from typing import Any, TypeVar

from django.db import IntegrityError, connections, transaction
from django.db.models import Exists, OuterRef, Q, QuerySet

from ..core import actors, failpoints
from ..core.clock import ceil_tenth, to_us
from ..core.record_clock import record_clock
from ..core.states import FINAL, LIVE, REQUEUEABLE, State
from ..core.verdicts import DONE, Verdict
from ..models import Message
from ..models.record import HOLDS_KEY, WAITS_AGAIN, Lease, LogRow, lease_is_over
from ..project.validation import FARTHEST
from .low_water import LowWater
from .sql import statements
from .sql.moves import LEFT_ALONE, Decide, Decision, locked, move, moved, writing
from .sql.rows import (
    BEGINNING,
    Claimed,
    Facts,
    Failure,
    Inserted,
    LeaseRenewal,
    Moved,
    NewMessage,
    Seen,
    Spot,
    Success,
    Ticket,
)
from .sql.sessions import own_transaction

T = TypeVar("T")

# Rows that one transaction locks and moves at most.
MOVES_PER_TRANSACTION = 1000
# A message with this many crashes runs alone in its process, or after one less than MAX_CRASHES if that is fewer.
SUSPECT_CRASHES = 2
# When a whole worker dies, the messages that it held are not accused. But a message may be what kills it: each such end
# counts whose number, among all deliveries of the message that did not report, can be divided by this.
WORKERS_PER_CRASH = 5
# A message that crashed alone is delivered again after this time, which doubles with each further crash: other suspects
# go first, and who kills processes from outside kills another one meanwhile. Seconds.
FIRST_RETREAT = 1.0
# It never waits longer than this. Seconds.
LONGEST_RETREAT = 30.0
# ``Message.worker`` ends with this while a delivery runs alone in its process.
ALONE = "/alone"
# The error of a message that crashed then ends with this.
RAN_ALONE = "; it ran alone"
# After a restart of PostgreSQL, holders of leases have this long to report before the reaper takes them for dead.
# Seconds.
GRACE_AFTER_RESTART = 5.0

NO_TIME = timedelta(0)

# The id of a message, and the number of one of its deliveries.
Held = tuple[int, int]
# A topic and a key.
Key = tuple[str, str]

# Decisions that leave a message as it is.
TOO_LATE = Decision(verdict=Verdict.TOO_LATE)
KEY_TAKEN = Decision(verdict=Verdict.KEY_TAKEN)


@dataclass(frozen=True, slots=True)
class Answer:
    """The verdict of an action on one message, and the state of the message now. True when the action was done."""

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


def now(using: str) -> datetime:
    """Return the time by the record's clock. This process knows it afterwards."""
    asked = time.monotonic()
    shown = statements(using).now()
    record_clock(using).learn(asked, shown)
    return shown


# --- schedule ---------------------------------------------------------------------------------------------------------


def insert(using: str, new: NewMessage, actor: str) -> Inserted | None:
    """Write one message; return None when another one is in its way (``in_the_way``, ``next_of``)."""
    failpoints.reach("before_insert")
    asked = time.monotonic()
    inserted = statements(using).insert(new, actor) if new.own is None else _insert_next(using, new, new.own, actor)
    if inserted is not None:
        record_clock(using).learn(asked, inserted.created_at)
    failpoints.reach("after_insert")
    return inserted


def _insert_next(using: str, new: NewMessage, own: int, actor: str) -> Inserted | None:
    """Write the next message of ``own``, whose handler schedules it under its own key, and hand the key over to it.

    Both or neither: return None, and leave ``own`` as it is, when that has its next message already, or when a third
    message holds the key.
    """
    with writing(using):
        row = Message._base_manager.using(using).filter(pk=own)
        # It gives the key up before the next one takes it, in one transaction, so that nobody else gets it in between.
        # The lock on the row makes deliveries of one message take turns.
        gave_up = row.filter(state__in=LIVE, next_id=None).update(next_id=own)
        if not gave_up and row.filter(next_id__isnull=False).exists():
            return None
        inserted = statements(using).insert(new, actor)
        if inserted is None:
            transaction.set_rollback(True, using=using)
        elif gave_up:
            row.update(next_id=inserted.id)
    return inserted


def next_of(using: str, own: int) -> Message | None:
    """Return the next message of ``own``; None when its handler has scheduled none.

    If that message has been purged, ``own`` stands for it: its step was made, and must not be made again.
    """
    rows = Message.objects.using(using)
    message = _one(rows.filter(pk=own))
    if message is None or message.next_id is None:
        return None
    return _one(rows.filter(pk=message.next_id)) or message


def note_next(using: str, own: int, message_id: int) -> None:
    """Note that a message which somebody else has scheduled is the next one of ``own``, unless there is one already."""
    row = Message._base_manager.using(using).filter(pk=own, state__in=LIVE, next_id=None)
    row.exclude(pk=message_id).update(next_id=message_id)


def insert_many(using: str, new: Sequence[NewMessage], actor: str) -> Iterator[tuple[NewMessage, Inserted]]:
    """Write messages in the caller's transaction. Raises ``IntegrityError`` when another one holds the key of one.

    Yields each message while the database works on those before it; all are written when the iterator is exhausted.
    """
    failpoints.reach("before_insert")
    yield from statements(using).insert_many(new, actor)
    failpoints.reach("after_insert")


def in_the_way(using: str, topic: str, key: str, *, but: int | None = None) -> Message | None:
    """Return the message that keeps others with its key out: the one that holds it, or one that waits again.

    The message ``but`` is not in its own way.
    """
    rows = Message.objects.using(using).filter(~Q(pk=but), topic=topic, key=key).order_by()
    return _one(rows.filter(HOLDS_KEY)) or _one(rows.filter(WAITS_AGAIN))


def lock_keys(
    using: str, keys: Iterable[tuple[str, str]], changing: Collection[tuple[str, str]]
) -> set[tuple[str, str]]:
    """Return those of the keys (topics and keys) for which a message is in the way.

    The messages that may change, as those of the keys in ``changing`` and finished ones, are locked until the end of
    the transaction, in the order of their ids, as each action on many messages locks them.
    """
    by_topic: dict[str, set[str]] = {}
    for topic, key in keys:
        by_topic.setdefault(topic, set()).add(key)
    taken: set[Key] = set()
    to_lock: set[int] = set()
    for topic, some in by_topic.items():
        for part in _parts(sorted(some)):
            for where in (HOLDS_KEY, WAITS_AGAIN):
                rows = Message.objects.using(using).filter(where, topic=topic, key__in=part).order_by()
                for message in rows.only("key", "state"):
                    held = (topic, message.key or "")
                    taken.add(held)
                    if held in changing or message.state in FINAL:
                        to_lock.add(message.pk)
    for ids in _parts(sorted(to_lock)):
        found = Message.objects.using(using).filter(pk__in=ids).order_by("pk")
        list(locked(using, found, wait=True).values_list("pk"))
    return taken


def _parts(all_of_them: Sequence[T]) -> Iterator[Sequence[T]]:
    return (
        all_of_them[start : start + MOVES_PER_TRANSACTION]
        for start in range(0, len(all_of_them), MOVES_PER_TRANSACTION)
    )


def holder(using: str, topic: str, key: str) -> Message | None:
    """Return the message that holds a key: only that is in the way of a handler that schedules under its own key."""
    return _one(Message.objects.using(using).filter(HOLDS_KEY, topic=topic, key=key).order_by())


def _one(rows: QuerySet[Message]) -> Message | None:
    """Return any of the rows; None when there is none."""
    return next(iter(rows[:1]), None)


def named(using: str, topic: str, key: str) -> Message | None:
    """Return the live message that a topic and a key name: the one that holds the key, else the youngest one."""
    live = Message.objects.using(using).filter(topic=topic, key=key, state__in=LIVE).order_by()
    return max(live, key=lambda message: (message.holds_key, message.pk), default=None)


def keep_waiting(using: str, message_id: int) -> bool:
    """Keep a waiting message from being claimed before the caller's transaction ends. Tell whether it waits."""
    return statements(using).keep_waiting(message_id)


def free_key(using: str, holder: Message) -> bool:
    """Free the key of a finished message if the time for which it held it is over. Tell whether the key may be free."""
    assert holder.finished_at is not None
    assert holder.key_for is not None
    if holder.finished_at + timedelta(seconds=holder.key_for) > now(using):
        return False
    with writing(using):
        # A message that was requeued meanwhile is not finished.
        rows = Message._base_manager.using(using).filter(pk=holder.pk, moves=holder.moves)
        rows.update(key_for=None)
    return True


def replace(using: str, message_id: int, new: NewMessage, *, actor: str) -> Answer:
    """Give a waiting message the content and due time of ``new``."""

    def decide(message: Message, at: datetime) -> Decision:
        if not _is_replaceable(message):
            return TOO_LATE
        due = ceil_tenth(new.due_at or at + new.delay)
        values = {
            "queue": new.queue,
            "priority": new.priority,
            "payload": json.loads(new.payload),
            "headers": json.loads(new.headers),
            "due_at": due,
            "expires_at": None if new.expires is None else due + new.expires,
            "retry": None if new.retry is None else json.loads(new.retry),
            "max_attempts": new.max_attempts,
            "timeout": new.timeout,
            "lease": new.lease,
            "limit_key": new.limit_key,
            "key_deliveries": None if new.key_deliveries is None else message.deliveries,
            "key_for": new.key_for,
            "attempts": 0,
            "conflicts": 0,
        }
        return Decision(State.SCHEDULED, values, "replaced", Verdict.RESCHEDULED)

    answers = _answers(using, [message_id], decide, actor)
    return answers.get(message_id, Answer(None, Verdict.NOT_FOUND))


def debounce(using: str, message_id: int, new: NewMessage, *, actor: str) -> Answer:
    """Give a waiting message the due time of ``new`` when that is the later one; its content stays."""

    def decide(message: Message, at: datetime) -> Decision:
        if not _is_replaceable(message):
            return TOO_LATE
        due = max(ceil_tenth(new.due_at or at + new.delay), message.due_at)
        return Decision(State.SCHEDULED, _moved_due(message, due), "debounced", Verdict.RESCHEDULED)

    answers = _answers(using, [message_id], decide, actor)
    return answers.get(message_id, Answer(None, Verdict.NOT_FOUND))


def _is_replaceable(message: Message) -> bool:
    """Tell whether the message can get new content.

    It cannot while a crashed delivery may still succeed, which would stand for the new content, nor when its next
    message has been scheduled: what the new content is to do has begun.
    """
    return message.state == State.SCHEDULED and message.deliveries == message.reported and message.next_id is None


def _moved_due(message: Message, due: datetime) -> dict[str, datetime | None]:
    """Return the values for a new due time; the time to live after it stays as long as it was."""
    expires = None if message.expires_at is None else message.expires_at - message.due_at + due
    return {"due_at": due, "expires_at": expires}


# --- deliver ----------------------------------------------------------------------------------------------------------


def exclusively(using: str) -> AbstractContextManager[object]:
    """Return a context that keeps rows found by ``due`` locked until they are claimed, where rows can be locked."""
    if connections[using].features.has_select_for_update_skip_locked:
        return own_transaction(using)
    return nullcontext()


def due(
    using: str,
    queue: str,
    topics: Iterable[str],
    limit: int,
    closed: Collection[str] = (),
    after: Spot = BEGINNING,
) -> list[Ticket]:
    """Return messages that are due by the record's clock: the most overdue ones, the highest priority first.

    Those are left out that stand under one of the limits ``closed``, or before the spot ``after``.
    """
    return statements(using).due(queue, topics, limit, closed, after)


def look(
    using: str, begins: Mapping[str, Spot], topics: Iterable[str], closed: Collection[str] = ()
) -> dict[str, Seen]:
    """Look at queues, behind a spot in each, for the first message that may begin once it is due."""
    return {seen.queue: seen for seen in statements(using).look(begins, topics, closed)}


def facts(using: str, ids: Sequence[int]) -> dict[int, Facts]:
    """Return what decides where these ids belong, by id. Locks nothing."""
    return {row.id: row for row in statements(using).facts(ids)} if ids else {}


def queues(using: str, known: Collection[str] = ()) -> list[str]:
    """Return the queues that hold scheduled messages, by name. With ``known``: other ones, in no order."""
    return statements(using).queues(known)


def waits(using: str, queues: Sequence[str], topics: Sequence[str]) -> dict[str, float]:
    """Return the seconds until the next message of each queue falls due; a queue without messages is left out."""
    heads = statements(using).heads(queues, after=BEGINNING, end=None, limit=1, topics=topics)
    now_us = to_us(now(using))
    return {queue: (due_us - now_us) / 1_000_000 for queue, _id, due_us, _priority in heads}


def claims_under_way(using: str) -> set[str]:
    """Return the transactions that may be claiming at this moment."""
    return statements(using).claims_under_way()


def anything_expired(using: str, leases: LowWater | None = None, waiting: LowWater | None = None) -> tuple[bool, bool]:
    """Tell whether a lease has run out, and whether a waiting message has expired, with one cheap query.

    Whoever looks again and again gives the marks of both.
    """
    marks = (leases or LowWater(), waiting or LowWater())
    begins = [BEGINNING if mark.begin_anew() else mark.mark for mark in marks]
    asked = time.monotonic()
    found = statements(using).anything_expired(begins[0][0], begins[1][0])
    took = time.monotonic() - asked
    for mark, begin, first in zip(marks, begins, (found.first_leased, found.first_waiting), strict=True):
        mark.note(begin, None if first is None else (first, 0), found.now, took)
        mark.end()
    return found.leased, found.waiting


def claim(
    using: str,
    tickets: Sequence[Ticket],
    leases: dict[str, float],
    worker: str,
    *,
    queue: str | None = None,
    ahead: float = 0.0,
) -> list[Claimed]:
    """Move ``scheduled → running`` the messages that may start, of the topics in ``leases`` (topic → seconds).

    This statement decides every race. It returns no row for a message that is cancelled, finished, running, not due,
    expired, in a paused queue, in another queue than ``queue`` (None: any queue), or locked by another move. By the
    record's clock a message is claimed ``ahead`` seconds before its due time at most, whatever the clock of Redis says.
    The rows come in the order of the tickets: the most urgent first.
    """
    unique = {ticket.id: ticket for ticket in tickets}
    asked = time.monotonic()
    claimed = statements(using).claim(list(unique.values()), leases, worker, queue, ahead) if unique else []
    if claimed:
        record_clock(using).learn(asked, claimed[0].claimed_at)
    rows = {row.id: row for row in claimed}
    return [rows[pk] for pk in unique if pk in rows]


def succeed(using: str, successes: Iterable[Success], *, wait: bool = True) -> set[int]:
    """Move messages to *consumed*, by any delivery that succeeds while they are live. Return the ids that moved.
    Idempotent.

    ``wait=False``, here and below, passes over rows that another transaction has locked; ``live_deliveries`` then shows
    which of the others are live.
    """
    unique = {success.id: success for success in successes}
    return statements(using).succeed(list(unique.values()), wait=wait) if unique else set()


def fail(using: str, failures: Iterable[Failure], *, wait: bool = True) -> list[Moved]:
    """Move ``running → scheduled | dead | cancelled``, for the current delivery only. Idempotent.

    A cancel that was requested wins: the message is neither tried again nor dead.
    """
    # Only the later of two deliveries of one message can be the current one.
    unique: dict[int, Failure] = {}
    for failure in sorted(failures, key=lambda f: f.delivery):
        unique[failure.id] = failure
    return statements(using).fail(list(unique.values()), wait=wait) if unique else []


def begin(using: str) -> None:
    """Have the transaction that Django has just opened begin now, and not with its first statement."""
    statements(using).begin()


def extend(using: str, renewals: Sequence[LeaseRenewal], *, wait: bool = True) -> dict[int, bool]:
    """Extend leases. Return id → whether a cancel was requested; a delivery whose id is missing has lost its lease.

    With no renewals this waits for the same locks on tables as a renewal would.
    """
    return statements(using).extend(renewals, wait=wait)


def live_deliveries(using: str, ids: Iterable[int]) -> dict[int, tuple[State, int]]:
    """Return the state and the number of the last delivery of each message that is live."""
    rows = Message.objects.using(using).filter(pk__in=list(ids), state__in=LIVE)
    return {pk: (State(state), delivery) for pk, state, delivery in rows.values_list("pk", "state", "deliveries")}


def may_reap(using: str) -> bool:
    """Tell whether the database has been up long enough for holders of leases to report after a restart of it."""
    return statements(using).has_been_up_for(GRACE_AFTER_RESTART)


@dataclass(frozen=True, slots=True)
class Death:
    """The traces of a worker process that died: evidence for and against the messages that it held."""

    # The messages whose handlers ran; None: not known, so that all messages count as running.
    running: Collection[int] | None = None
    # True when somebody else may have killed the process: the operating system does not say who sent a SIGKILL.
    by_kill: bool = True
    # True when all processes of the worker died together.
    of_all: bool = False


# A death of which nothing else is known.
UNSEEN = Death()


@dataclass(frozen=True, slots=True)
class Judgement:
    """The judgement on a message whose delivery crashed: whether that counts as a crash, and what follows."""

    counts: bool
    is_dead: bool = False
    retreat: float = 0.0


def suspect_crashes(max_crashes: int) -> int:
    """Return after how many crashes a message runs alone in its process."""
    return min(SUSPECT_CRASHES, max_crashes - 1)


def judge(crashes: int, max_crashes: int, *, was_alone: bool, by_kill: bool) -> Judgement:
    """Judge a message whose handler ran when its process died, for the ``crashes``-th time if this one counts.

    Only a message that ran alone can become dead: after ``max_crashes`` crashes if its process died of itself, and if
    the process was killed, which somebody else may have done, after as many more as make a suspect. A message that ran
    beside others becomes a suspect at most: its further crashes do not count.
    """
    suspect = suspect_crashes(max_crashes)
    if not was_alone:
        return Judgement(counts=crashes <= suspect)
    if crashes >= max_crashes + (suspect if by_kill else 0):
        return Judgement(counts=True, is_dead=True)
    retreat = min(LONGEST_RETREAT, FIRST_RETREAT * 2.0 ** (crashes - suspect)) if crashes >= suspect else 0.0
    return Judgement(counts=True, retreat=retreat)


def mark_alone(using: str, message_id: int, delivery: int, worker: str) -> None:
    """Note in the row that a delivery runs alone in its process, for the case that nobody sees the process die."""
    rows = Message._base_manager.using(using).filter(pk=message_id, state=State.RUNNING, deliveries=delivery)
    rows.filter(worker=worker).update(worker=worker + ALONE, claimed_by=worker)


def expired_leases(using: str, *, limit: int = MOVES_PER_TRANSACTION) -> set[Held]:
    """Return deliveries whose lease ran out, those first whose lease ended first."""
    rows = Message.objects.using(using).filter(lease_is_over(now(using))).order_by("leased_until")
    return set(rows.values_list("pk", "deliveries")[:limit])


def reap(
    using: str,
    *,
    max_crashes: int,
    limit: int = MOVES_PER_TRANSACTION,
    actor: str,
    among: Collection[Held] | None = None,
) -> list[Moved]:
    """End the deliveries whose lease ran out. The message is *scheduled* again. ``among`` (None: all) says which.

    A supervisor would have seen the death of a single process: the whole worker died, or stood still. That is no fault
    of its messages, except for every fifth time (``WORKERS_PER_CRASH``).
    """
    at = now(using)
    where = lease_is_over(at)
    if among is not None:
        where &= Q(pk__in=[pk for pk, _delivery in among])

    @cache
    def renewed() -> set[Held]:
        # Read when the rows are locked, so that no further renewal can be made: one that was made between the look at
        # the leases and the lock on its row counts.
        rows = Lease.objects.using(using).filter(until__gte=at)
        return set(rows.values_list("message_id", "delivery"))

    def decide(message: Message, at: datetime) -> Decision:
        held = (message.pk, message.deliveries)
        if held in renewed() or (among is not None and held not in among):
            return LEFT_ALONE
        return _of_a_worker(message, at, "lease ran out", max_crashes)

    return _end_unreported(using, where, decide, actor, limit)


def drop_leases(using: str) -> None:
    """Delete the leases of deliveries that have ended."""
    running = Message.objects.filter(pk=OuterRef("message_id"), deliveries=OuterRef("delivery"), state=State.RUNNING)
    Lease.objects.using(using).filter(~Exists(running)).delete()


def release_worker(
    using: str, worker: str, *, max_crashes: int, actor: str, shutdown: bool, death: Death = UNSEEN
) -> list[Moved]:
    """Release the messages of a worker process that is certainly dead. ``shutdown``: in order, so nothing crashed."""
    where = Q(state=State.RUNNING, worker__startswith=worker)
    held = set(Message.objects.using(using).filter(where).values_list("pk", flat=True))
    running = held if death.running is None else held.intersection(death.running)

    def decide(message: Message, at: datetime) -> Decision:
        if shutdown:
            return _ended(message, at, "worker was shut down", Judgement(counts=False))
        if death.of_all:
            return _of_a_worker(message, at, "all processes of the worker died", max_crashes)
        if message.pk not in running:
            return _ended(message, at, "worker process died; it was not running", Judgement(counts=False))
        was_alone = len(running) == 1
        judgement = judge(message.crashes + 1, max_crashes, was_alone=was_alone, by_kill=death.by_kill)
        return _ended(message, at, "worker process died" + RAN_ALONE * was_alone, judgement)

    return _end_unreported(using, where, decide, actor)


def _of_a_worker(message: Message, at: datetime, reason: str, max_crashes: int) -> Decision:
    """Decide on a message of a worker that died, or stood still, as a whole."""
    was_alone = message.worker.endswith(ALONE)
    judgement = Judgement(counts=False)
    if (message.deliveries - message.reported) % WORKERS_PER_CRASH == 0:
        judgement = judge(message.crashes + 1, max_crashes, was_alone=was_alone, by_kill=True)
    return _ended(message, at, reason + RAN_ALONE * was_alone, judgement)


def release_orphaned(using: str, ids: Iterable[int], worker: str, *, since: datetime | None, actor: str) -> list[Moved]:
    """Release those of ``ids`` that ``worker`` claimed after ``since`` (None: ever) without getting the answer.

    Nobody ran them, so the delivery counts as reported.
    """
    where = Q(pk__in=list(ids), state=State.RUNNING, worker=worker)
    if since is not None:
        # The claim is in the message's own row, or else in the log: see ``LogRow``. A join with the view of both would
        # read every message for each of these.
        claims = LogRow.objects.filter(message_id=OuterRef("pk"), delivery=OuterRef("deliveries"))
        claims = claims.filter(from_state=State.SCHEDULED, to_state=State.RUNNING, at__gt=since)
        where &= Q(claimed_at__gt=since) | Q(Exists(claims), claimed_at__isnull=True)

    def decide(message: Message, at: datetime) -> Decision:
        return _freed(message, "the answer to its claim was lost", {"reported": message.reported + 1})

    return _end_unreported(using, where, decide, actor)


def _ended(message: Message, at: datetime, reason: str, judgement: Judgement) -> Decision:
    """Decide on a message whose delivery ended without reporting."""
    if judgement.is_dead and not message.cancel_requested:
        return Decision(State.DEAD, reason=f"{reason}; {message.crashes + 1} deliveries crashed")
    values: dict[str, Any] = {} if judgement.counts else {"excused": message.excused + 1}
    if judgement.retreat:
        values["due_at"] = max(message.due_at, ceil_tenth(at + timedelta(seconds=judgement.retreat)))
    return _freed(message, reason, values)


def _freed(message: Message, reason: str, values: dict[str, Any]) -> Decision:
    if message.cancel_requested:
        values.pop("due_at", None)
        return Decision(State.CANCELLED, values, f"cancel requested; {reason}")
    return Decision(State.SCHEDULED, values, reason)


def _end_unreported(using: str, where: Q, decide: Decide, actor: str, limit: int | None = None) -> list[Moved]:
    """End deliveries that did not report. Rows that another transaction has locked wait for the next time."""
    rows = move(using, where, decide, actor=actor, limit=limit, wait=False)
    return [moved(message, decision.reason) for message, decision in rows if decision.to is not None]


def expire(using: str, *, limit: int = MOVES_PER_TRANSACTION, actor: str, among: Q | None = None) -> list[Moved]:
    """Move ``scheduled → expired`` the messages that did not start in time."""
    where = Q(state=State.SCHEDULED, expires_at__isnull=False, expires_at__lte=now(using)) & (among or Q())

    def decide(message: Message, at: datetime) -> Decision:
        return Decision(State.EXPIRED, reason="not started in time")

    rows = move(using, where, decide, actor=actor, limit=limit, wait=False, order_by=("expires_at",))
    return [moved(message, decision.reason) for message, decision in rows]


# --- act --------------------------------------------------------------------------------------------------------------


def cancel(
    using: str,
    ids: Sequence[int],
    *,
    overdue_since: datetime | None = None,
    reason: str = "",
    actor: str | None = None,
) -> list[Answer]:
    """Cancel messages, and ask running ones to stop. ``Verdict`` lists the possible answers.

    ``overdue_since`` as in ``reschedule``: then running messages go on.
    """

    def decide(message: Message, at: datetime) -> Decision:
        if overdue_since is not None and not _waits(message, overdue_since):
            return TOO_LATE
        return cancel_decision(message, reason)

    return _act(using, ids, decide, actor)


def cancel_decision(message: Message, reason: str = "") -> Decision:
    """Decide what a cancel does to a message."""
    if message.state == State.SCHEDULED:
        has_crashed = message.deliveries > message.reported
        verdict = Verdict.OUTCOME_UNKNOWN if has_crashed else Verdict.CANCELLED
        return Decision(State.CANCELLED, reason=reason, verdict=verdict)
    if message.state != State.RUNNING:
        return TOO_LATE
    if message.cancel_requested:
        return Decision(verdict=Verdict.REQUESTED)
    return Decision(State.RUNNING, {"cancel_requested": True}, reason or "cancel requested", Verdict.REQUESTED)


def reschedule(
    using: str,
    ids: Sequence[int],
    *,
    due_at: datetime | None = None,
    delay: timedelta = NO_TIME,
    shift: timedelta | None = None,
    spread: timedelta = NO_TIME,
    begin: timedelta = NO_TIME,
    overdue_since: datetime | None = None,
    reason: str = "",
    actor: str | None = None,
) -> list[Answer]:
    """Move the due time of waiting messages: to ``due_at``, or ``delay`` from now; ``spread`` evenly over a time.

    The time ``spread`` begins ``begin`` after that. With ``shift`` each moves by that much from its own due time, but
    not to before now. With ``overdue_since`` only messages that were due by then move: a message that was rescheduled
    meanwhile stays as it is. A message that is due, and that is to be due at once, keeps its due time: it stays before
    those that wait for the same limit and became due later.
    """
    shares = _shares(ids, begin, spread)
    is_at_once = due_at is None and shift is None and not (delay or begin or spread)

    def decide(message: Message, at: datetime) -> Decision:
        if not _waits(message, overdue_since):
            return TOO_LATE
        start = due_at or at + delay
        if shift is not None:
            start = max(message.due_at + shift, at)
        moment = ceil_tenth(min(start + shares(message), at + FARTHEST))
        if is_at_once and message.due_at <= at:
            moment = message.due_at
        return Decision(State.SCHEDULED, _moved_due(message, moment), reason, Verdict.RESCHEDULED)

    return _act(using, ids, decide, actor)


def requeue(
    using: str,
    ids: Sequence[int],
    *,
    delay: timedelta | None = None,
    spread: timedelta = NO_TIME,
    begin: timedelta = NO_TIME,
    reason: str = "",
    actor: str | None = None,
) -> list[Answer]:
    """Move ``dead | expired | cancelled → scheduled``. Attempts are counted anew, deliveries go on counting.

    The messages are due ``delay`` from now. Without a delay a message whose due time is still to come keeps it, and the
    others are due now. ``spread`` distributes those that get a new due time as in ``reschedule``.
    """
    shares = _shares(ids, begin, spread)

    def decide(message: Message, at: datetime) -> Decision:
        if message.state not in REQUEUEABLE:
            return TOO_LATE
        if message.key is not None and in_the_way(using, message.topic, message.key, but=message.pk) is not None:
            return KEY_TAKEN
        due = message.due_at
        if delay is not None or due <= at:
            due = ceil_tenth(at + (delay or NO_TIME) + shares(message))
        values = {
            **_moved_due(message, due),
            "attempts": 0,
            "conflicts": 0,
            # The crashes are excused too, or the next one would be the last.
            "excused": message.deliveries - message.reported,
            "cancel_requested": False,
            "key_deliveries": message.deliveries if message.unique == "scheduled" else None,
            "next_id": None,
        }
        return Decision(State.SCHEDULED, values, reason, Verdict.REQUEUED)

    return _act(using, ids, decide, actor)


def give_up(
    using: str, ids: Sequence[int], *, reason: str, actor: str, overdue_since: datetime | None = None
) -> list[Answer]:
    """Move ``scheduled → dead`` without a delivery. ``overdue_since`` as in ``reschedule``."""

    def decide(message: Message, at: datetime) -> Decision:
        if not _waits(message, overdue_since):
            return TOO_LATE
        return Decision(State.DEAD, reason=reason, verdict=Verdict.GIVEN_UP)

    return _act(using, ids, decide, actor)


def _waits(message: Message, overdue_since: datetime | None) -> bool:
    return message.state == State.SCHEDULED and (overdue_since is None or message.due_at <= overdue_since)


def _shares(ids: Sequence[int], begin: timedelta, spread: timedelta) -> Callable[[Message], timedelta]:
    """Return a function from a message to its share of the time ``spread`` after ``begin``, in the order of ``ids``."""
    places = {pk: place for place, pk in enumerate(ids)}
    return lambda message: begin + spread * places[message.pk] / max(1, len(ids))


def _act(using: str, ids: Sequence[int], decide: Decide, actor: str | None) -> list[Answer]:
    """Decide on messages, in batches with a transaction each; return the answers in the order of ``ids``."""
    answers: dict[int, Answer] = {}
    actor = actor or actors.current()
    for start in range(0, len(ids), MOVES_PER_TRANSACTION):
        batch = ids[start : start + MOVES_PER_TRANSACTION]
        try:
            answers |= _answers(using, batch, decide, actor)
        except IntegrityError:
            # Another message took a key meanwhile (requeue), and the whole batch was rolled back: decide one by one.
            for pk in batch:
                try:
                    answers |= _answers(using, [pk], decide, actor)
                except IntegrityError:
                    answers[pk] = Answer(pk, Verdict.KEY_TAKEN)
        # Rows changed meanwhile on a database without row locks: decide on them once more.
        again = [pk for pk in batch if pk not in answers]
        if again:
            answers |= _answers(using, again, decide, actor)
    return [answers.get(pk, Answer(pk, Verdict.NOT_FOUND)) for pk in ids]


def _answers(using: str, ids: Sequence[int], decide: Decide, actor: str) -> dict[int, Answer]:
    """Decide on messages in one transaction; return the answers for those that exist."""
    answers = {}
    for message, decision in move(using, Q(pk__in=ids), decide, actor=actor):
        assert decision.verdict is not None
        made = None if decision.to is None else moved(message, decision.reason)
        answers[message.pk] = Answer(message.pk, decision.verdict, State(message.state), made)
    return answers
