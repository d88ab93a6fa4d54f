"""Changes the states of messages, as nothing else does. It reaches no Redis.

The row of a move in the log is written in the same transaction. A move that changes no row is not an error: another
move was first.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from operator import attrgetter
from typing import Any, Literal

from django.db import IntegrityError, OperationalError, connections, transaction
from django.db.models import Q

from ..core import actors, failpoints
from ..core.chunks import chunks
from ..core.clock import NO_TIME, ceil_tenth
from ..core.exceptions import InvalidMessage
from ..core.known_record import record_clock
from ..core.states import LIVE, REQUEUEABLE, State
from ..core.verdicts import DONE, Verdict
from ..models import Message, Transition
from ..models.messages import IN_THE_WAY
from ..project import registry, validation
from ..project.message_options import OnConflict
from ..project.validation import FARTHEST
from . import overrides, reads
from .held_keys import CANCELLED, ROWS_TOGETHER, Key, all_in_the_way, free_keys
from .sql import limit_statements, statements
from .sql.limited import Taking
from .sql.moves import Decide, Decision, Look, move, moved, writing
from .sql.rows import Claimed, Claiming, Failure, Inserted, Moved, NewMessage, Success, Ticket, urgency
from .sql.sessions import is_deadlock, own_transaction

# The most rows that one transaction locks and moves.
MOVES_PER_TRANSACTION = ROWS_TOGETHER

# The condition that is true of each message.
ANY = Q()

# Decisions that leave a message as it is.
TOO_LATE = Decision(verdict=Verdict.TOO_LATE)
KEY_TAKEN = Decision(verdict=Verdict.KEY_TAKEN)


@dataclass(frozen=True, slots=True)
class DueTimes:
    """The due times that an action gives to its messages; cancel and purge give none. A move gives what stands last.

    The new due time is that of ``dues``, by the id of the message, or ``due_at``, or ``delay`` from now, or the old due
    time moved by ``shift``. With none of them it is now; but a requeue then leaves a due time that is still to come as
    it is. ``spread`` distributes ``number`` messages evenly over that time; ``rank`` returns how many of them are due
    before the one with an id.
    """

    due_at: datetime | None = None
    dues: Mapping[int, datetime] | None = None
    delay: timedelta | None = None
    shift: timedelta | None = None
    spread: timedelta = NO_TIME
    rank: Callable[[int], int] | None = None
    number: int = 0
    # How long after it a requeued message may start; False: for ever; None: for as long as before.
    expires: timedelta | Literal[False] | None = None
    # None: as it is.
    queue: str | None = None
    priority: int | None = None

    @property
    def name_none(self) -> bool:
        """True when they name neither a due time nor a delay."""
        return self.due_at is None and self.dues is None and self.delay is None

    def due(self, message: Message, at: datetime) -> datetime:
        """Return the new due time of a message, by the time now: none is farther away than ``FARTHEST``.

        A spread makes no message due later than after the whole time.
        """
        if self.shift is not None:
            start = max(message.due_at + self.shift, at)
        elif self.dues is not None:
            start = self.dues[message.pk]
        else:
            start = self.due_at or at + (self.delay or NO_TIME)
        share = NO_TIME if self.rank is None else self.spread * min(1.0, self.rank(message.pk) / max(1, self.number))
        return ceil_tenth(min(start + share, at + FARTHEST))


NO_TIMES = DueTimes()


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

    Both or neither: return None, and leave ``own`` as it is, when that has its next message already, when somebody has
    cancelled it, which ends the chain, or when a third message holds the key.
    """
    with writing(using):
        row = Message._base_manager.using(using).filter(pk=own)
        # It gives the key up before the next one takes it, in one transaction, so that nobody else gets it in between.
        # The lock on the row makes deliveries of one message take turns.
        gave_up = row.filter(state__in=LIVE, next_id=None, cancel_requested=False).update(next_id=own)
        if not gave_up and row.filter(Q(next_id__isnull=False) | CANCELLED).exists():
            return None
        inserted = statements(using).insert(new, actor)
        if inserted is None:
            transaction.set_rollback(True, using=using)
        elif gave_up:
            row.update(next_id=inserted.id)
    return inserted


def insert_many(using: str, new: Sequence[NewMessage], actor: str) -> Iterator[tuple[NewMessage, Inserted]]:
    """Write messages in the caller's transaction. Raises ``IntegrityError`` when another one holds the key of one.

    Yields each message while the database works on those before it; all are written when the iterator is exhausted.
    """
    failpoints.reach("before_insert")
    yield from statements(using).insert_many(new, actor)
    failpoints.reach("after_insert")


def replace(using: str, news: Mapping[int, NewMessage]) -> list[Answer]:
    """Give waiting messages the content and due time of new ones, which are given by their ids.

    Here and in ``join`` a message is not found when it is not in the way of the new one any more.
    """

    def decide(message: Message, at: datetime) -> Decision:
        if not _is_replaceable(message):
            return TOO_LATE
        new = news[message.pk]
        due = ceil_tenth(new.due_at or at + new.delay)
        values = new.columns(due) | {"attempts": 0, "conflicts": 0, "error": ""}
        if new.key_deliveries is not None:
            values["key_deliveries"] = message.deliveries
        return Decision(State.SCHEDULED, values, "replaced", Verdict.RESCHEDULED)

    return _act(using, [*news], decide, _in_the_way_of(news))


def join(using: str, news: Mapping[int, NewMessage]) -> list[Answer]:
    """Join new messages to waiting ones, as their ``on_conflict`` says: debounce, merge, or both.

    A debounce gives a message the due time of the new one when that is the later one. A merge joins the payloads, and
    raises ``InvalidMessage`` for those that cannot be joined, or that do not fit the handler together, and
    ``PayloadTooLarge`` when both are too large for one message: then the waiting messages stay as they are.
    """
    moved_due = _due_mover(using, [*news])
    merges = any(OnConflict(new.on_conflict).merges for new in news.values())

    def decide(message: Message, at: datetime) -> Decision:
        if not _is_replaceable(message):
            return TOO_LATE
        new = news[message.pk]
        choice, due, values = OnConflict(new.on_conflict), message.due_at, {}
        if choice.merges:
            values["payload"] = _joined(message, new)
        if choice != OnConflict.MERGE:
            due = max(ceil_tenth(new.due_at or at + new.delay), due)
        text = "merged" if choice.merges else "debounced"
        return Decision(State.SCHEDULED, values | moved_due(message, due, at), text, Verdict.RESCHEDULED)

    return _act(using, [*news], decide, _in_the_way_of(news), with_content=merges)


def _joined(message: Message, new: NewMessage) -> Any:
    """Return both payloads as one, which fits into a message and its handler."""
    both, handler = new.join(message.payload, new.content), registry.find(new.topic)
    try:
        text = validation.payload(both)
        if handler is not None and handler.payload is not None:
            # A copy: the function of a project may change what it gets.
            handler.payload.check(json.loads(text))
    except InvalidMessage as error:
        error.add_note(f"the payload is that of the call joined to that of message {message.pk}")
        raise
    return both


def _in_the_way_of(news: Mapping[int, NewMessage]) -> Q:
    """Return the condition that messages that were in the way of new ones still are."""
    # The next message of a handler's own, which comes alone, stays that, whatever becomes of its key.
    return IN_THE_WAY if all(new.own is None for new in news.values()) else ANY


def _is_replaceable(message: Message) -> bool:
    """Tell whether the message can get new content.

    It cannot while a crashed delivery may still succeed, which would stand for the new content, nor when its next
    message has been scheduled: what the new content is to do has begun.
    """
    return message.state == State.SCHEDULED and message.deliveries == message.reported and message.next_id is None


def due_times_given(using: str, ids: Sequence[int]) -> dict[int, datetime]:
    """Return the due time that a call gave last to each of these messages: no retry moves it."""
    rows = Transition.objects.using(using).filter(message_id__in=ids, to_state=State.SCHEDULED).order_by("number")
    found: dict[int, datetime] = {}
    last: dict[int, datetime] = {}
    for id_, before, due in rows.values_list("message_id", "from_state", "due_at"):
        # An action that kept the due time of a retry gave none.
        if before != State.RUNNING and due != last.get(id_):
            found[id_] = due
        last[id_] = due
    return found


def _due_mover(using: str, ids: Sequence[int]) -> Callable[[Message, datetime, datetime], dict[str, datetime | None]]:
    """Return a function from one of these messages, a due time and the time now to the values that the message gets.

    Its time to live stays as long as it was. That counts from the due time that a call gave: no retry moves it.
    """

    # The log is read in parts, each when the first of its messages needs it: those that one transaction locks.
    parts = {pk: part for part in chunks(tuple(ids), MOVES_PER_TRANSACTION) for pk in part}

    @lru_cache(maxsize=1)
    def given(part: Sequence[int]) -> dict[int, datetime]:
        return due_times_given(using, part)

    def moved_due(message: Message, due: datetime, at: datetime) -> dict[str, datetime | None]:
        if due == message.due_at and not message.is_expired(at):
            return {}
        former = given(parts[message.pk]).get(message.pk) if message.expires_at and message.deliveries else None
        expires = message.expires_at and message.expires_at - (former or message.due_at) + due
        return {"due_at": due, "expires_at": expires}

    return moved_due


# --- deliver ----------------------------------------------------------------------------------------------------------


def exclusively(using: str) -> AbstractContextManager[object]:
    """Return a context that keeps rows found by ``due`` locked until they are claimed, where rows can be locked."""
    return own_transaction(using) if connections[using].features.has_select_for_update_skip_locked else nullcontext()


def claim(
    using: str,
    tickets: Sequence[Ticket],
    leases: dict[str, float],
    worker: str,
    *,
    queue: str | None = None,
    ahead: float = 0.0,
    known: int | None = None,
) -> list[Claimed]:
    """Move ``scheduled → running`` the messages that may start, of the topics in ``leases`` (topic → seconds).

    This statement decides every race. It returns no row for a message that is cancelled, finished, running, not due,
    expired, in a paused queue, in another queue than ``queue`` (None: any queue), or locked by another move. By the
    record's clock a message is claimed ``ahead`` seconds before its due time at most, whatever due time Redis had for
    it. The rows come in the order of the tickets: the most urgent first. It returns none while a limit was changed
    after ``known``, the last change by which the caller goes (None: the last one that this process has read).
    """
    last = overrides.known(using).last if known is None else known
    return claim_asked(using, Claiming(tickets, leases, worker, queue, ahead, last))


def claim_asked(using: str, asked: Claiming, taking: Taking | None = None) -> list[Claimed]:
    """Claim as ``claim`` does. ``taking`` is what the messages take of their limits."""
    unique = {ticket.id: ticket for ticket in asked.tickets}
    if not unique:
        return []
    began, asked = time.monotonic(), asked._replace(tickets=[*unique.values()])
    claimed = statements(using).claim(asked) if taking is None else limit_statements(using).claim_limited(taking, asked)
    if claimed:
        record_clock(using).learn(began, claimed[0].claimed_at)
    rows = {row.id: row for row in claimed}
    return [rows[pk] for pk in unique if pk in rows]


def claim_due(using: str, queue: str, limit: int, lease: float, worker: str) -> list[Claimed]:
    """Move ``scheduled → running`` due messages of a pulled queue as ``claim`` does, whatever their topics are.

    The most urgent come first. ``lease`` (seconds) is for those that have none of their own.
    """
    began = time.monotonic()
    rows = statements(using).claim_due(queue, limit, lease, worker)
    if rows:
        record_clock(using).learn(began, rows[0].claimed_at)
    return sorted(rows, key=urgency)


def succeed(using: str, successes: Iterable[Success], *, wait: bool = True) -> set[int]:
    """Move messages to *consumed*, by any delivery that succeeds while they are live. Return the ids that moved.
    Idempotent.

    ``wait=False``, here and below, passes over rows that another transaction has locked; ``reads.live_deliveries`` then
    shows which of the others are live.
    """
    unique = {success.id: success for success in successes}
    return statements(using).succeed(list(unique.values()), wait=wait) if unique else set()


def succeed_current(using: str, queue: str, message_id: int, actor: str) -> int | None:
    """Move a message of a queue ``running → consumed`` by its current delivery. Return the number of that, if any."""
    return statements(using).succeed_current(queue, message_id, actor)


def commit_success(using: str, success: Success, thread: int | None) -> bool:
    """Move a message to *consumed* as ``succeed`` does, as the last statement of its handler's own transaction, which
    may be committed with it.

    ``thread`` is the number of the worker's thread that is the actor; None for another actor, or when the transaction
    has begun before the handler, as that of a test case. Then nothing is committed, and neither is it when the message
    is no longer live: that returns False.
    """
    return statements(using).commit_success(success, thread)


def fail(using: str, failures: Iterable[Failure], *, wait: bool = True) -> list[Moved]:
    """Move ``running → scheduled | dead | cancelled``, for the current delivery only. Idempotent.

    A cancel that was requested wins: the message is neither tried again nor dead.
    """
    # Only the later of two deliveries of one message can be the current one.
    unique = {failure.id: failure for failure in sorted(failures, key=attrgetter("delivery"))}
    return statements(using).fail(list(unique.values()), wait=wait) if unique else []


def expire(using: str, *, limit: int = MOVES_PER_TRANSACTION, actor: str, among: Q | None = None) -> list[Moved]:
    """Move ``scheduled → expired`` the messages that did not start in time."""
    where = Q(state=State.SCHEDULED, expires_at__isnull=False, expires_at__lte=reads.now(using)) & (among or Q())

    def decide(message: Message, at: datetime) -> Decision:
        return Decision(State.EXPIRED, reason="not started in time")

    return move_unlocked(using, where, decide, actor=actor, limit=limit, order_by=("expires_at",))


def move_unlocked(
    using: str, where: Q, decide: Decide, *, actor: str, limit: int | None = None, order_by: Sequence[str] = ("id",)
) -> list[Moved]:
    """Move rows as ``decide`` says. Those that another transaction has locked wait for the next time."""
    insert = statements(using).insert_many
    rows = move(using, where, decide, actor=actor, limit=limit, wait=False, order_by=order_by, insert=insert)
    return [moved(message, decision) for message, decision in rows if decision.to is not None]


# --- act --------------------------------------------------------------------------------------------------------------


def cancel(
    using: str, ids: Sequence[int], times: DueTimes = NO_TIMES, reason: str = "", among: Q = ANY
) -> list[Answer]:
    """Cancel messages, and ask running ones to stop. ``Verdict`` lists the possible answers.

    Here and below, a message is not found unless it is ``among`` those that a condition names when its row is locked.
    """

    def decide(message: Message, at: datetime) -> Decision:
        return cancel_decision(message, reason)

    return _act(using, ids, decide, among)


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
    using: str, ids: Sequence[int], times: DueTimes = NO_TIMES, reason: str = "", among: Q = ANY
) -> list[Answer]:
    """Move the due time of waiting messages. A shift moves none to before now.

    A message that is due, may start and is to be due at once keeps its due time: it stays before those of its limit
    that became due later.
    """
    moved_due = _due_mover(using, ids)
    is_named = any(given is not None for given in (times.due_at, times.dues, times.shift))
    is_at_once = not (is_named or times.delay or times.spread)

    def decide(message: Message, at: datetime) -> Decision:
        if message.state != State.SCHEDULED:
            return TOO_LATE
        moment = times.due(message, at)
        if is_at_once and message.due_at <= at and not message.is_expired(at):
            moment = message.due_at
        return Decision(State.SCHEDULED, moved_due(message, moment, at), reason, Verdict.RESCHEDULED)

    return _act(using, ids, decide, among)


# The text in the log for a move to another queue, another priority, or both; the given reason follows.
_TRANSFERRED = re.compile(r"(?:queue ([\w.-]+) → [\w.-]+)?(?:, )?(?:priority (-?\d+) → -?\d+)?(?:: (.*))?", re.DOTALL)


def times_before(transferred: str, reason: str) -> DueTimes | None:
    """Return what moves a message back that ``transfer`` moved for a reason, by what the log says of that move."""
    found = _TRANSFERRED.fullmatch(transferred)
    if found is None or (found[3] or "") != reason:
        return None
    return DueTimes(queue=found[1], priority=None if found[2] is None else int(found[2]))


def transfer(
    using: str, ids: Sequence[int], times: DueTimes = NO_TIMES, reason: str = "", among: Q = ANY
) -> list[Answer]:
    """Have waiting messages wait in another queue or with another priority. Those that do already stay as they are."""
    given = {name: value for name in ("queue", "priority") if (value := getattr(times, name)) is not None}

    def decide(message: Message, at: datetime) -> Decision:
        if message.state != State.SCHEDULED:
            return TOO_LATE
        former = {name: getattr(message, name) for name in given}
        changed = {name: value for name, value in given.items() if value != former[name]}
        if not changed:
            return Decision(verdict=Verdict.MOVED)
        told = ", ".join(f"{name} {former[name]} → {value}" for name, value in changed.items())
        text = f"{told}: {reason}" if reason else told
        left = message.queue if "queue" in changed else ""
        return Decision(State.SCHEDULED, changed, text, Verdict.MOVED, left=left)

    return _act(using, ids, decide, among)


def requeue(
    using: str,
    ids: Sequence[int],
    times: DueTimes = NO_TIMES,
    reason: str = "",
    among: Q = ANY,
    *,
    free: Callable[[str, Sequence[Message]], bool] = free_keys,
) -> list[Answer]:
    """Move ``dead | expired | cancelled → scheduled``. Attempts are counted anew, deliveries go on counting.

    Of several messages with one key the first moves. ``free`` frees the keys of messages that are in the way, and
    returns whether it could free one.
    """
    moved_due = _due_mover(using, ids)
    # The messages that have the keys of the rows that are locked now.
    having: dict[Key, list[Message]] = {}
    others: dict[int, Message] = {}

    def look(rows: Sequence[Message]) -> None:
        nonlocal having
        keyed = [(row.topic, row.key) for row in rows if row.key is not None and row.state in REQUEUEABLE]
        having = all_in_the_way(using, keyed)

    def decide(message: Message, at: datetime) -> Decision:
        if message.state not in REQUEUEABLE:
            return TOO_LATE
        if message.key is not None:
            same = having.setdefault((message.topic, message.key), [])
            other = next((each for each in same if each.pk != message.pk), None)
            if other is not None:
                others[other.pk] = other
                return KEY_TAKEN
            same.append(message)
        due = message.due_at
        if not times.name_none or due <= at:
            due = times.due(message, at)
        values: dict[str, Any] = {
            **moved_due(message, due, at),
            "attempts": 0,
            "conflicts": 0,
            # The crashes are excused too, or the next one would be the last.
            "excused": message.deliveries - message.reported,
            "cancel_requested": False,
            "key_deliveries": message.deliveries if message.unique == "scheduled" else None,
            "next_id": None,
        }
        if times.expires is not None:
            values["expires_at"] = due + times.expires if times.expires else None
        return Decision(State.SCHEDULED, values, reason, Verdict.REQUEUED)

    answers = _act(using, ids, decide, among, look=look)
    # Only now, when no row of a batch is locked any more: two batches could wait for each other's messages.
    if sum(free(using, some) for some in chunks([*others.values()], MOVES_PER_TRANSACTION)):
        refused = [pk for pk, each in zip(ids, answers, strict=True) if each.verdict == Verdict.KEY_TAKEN]
        again = iter(_act(using, refused, decide, among, look=look))
        answers = [next(again) if each.verdict == Verdict.KEY_TAKEN else each for each in answers]
    return answers


def give_up(
    using: str, ids: Sequence[int], times: DueTimes = NO_TIMES, reason: str = "", among: Q = ANY
) -> list[Answer]:
    """Move ``scheduled → dead`` without a delivery."""

    def decide(message: Message, at: datetime) -> Decision:
        if message.state != State.SCHEDULED:
            return TOO_LATE
        return Decision(State.DEAD, reason=reason, verdict=Verdict.GIVEN_UP)

    return _act(using, ids, decide, among)


def _act(
    using: str, ids: Sequence[int], decide: Decide, among: Q = ANY, *, with_content: bool = False, look: Look = None
) -> list[Answer]:
    """Decide on messages, in batches with a transaction each; return the answers in the order of ``ids``."""
    actor, insert = actors.current(), statements(using).insert_many

    def together(some: Sequence[int]) -> dict[int, Answer]:
        found, where = {}, Q(among, pk__in=some)
        rows = move(using, where, decide, actor=actor, with_content=with_content, look=look, insert=insert)
        for message, decision in rows:
            assert decision.verdict is not None
            made = None if decision.to is None else moved(message, decision)
            found[message.pk] = Answer(message.pk, decision.verdict, State(message.state), made)
        return found

    answers: dict[int, Answer] = {}
    for batch in chunks(ids, MOVES_PER_TRANSACTION):
        answers |= _in_halves(batch, together)
    return [answers.get(pk, Answer(pk, Verdict.NOT_FOUND)) for pk in ids]


def _in_halves(ids: Sequence[int], together: Callable[[Sequence[int]], dict[int, Answer]]) -> dict[int, Answer]:
    """Decide on messages in one transaction; return the answers for those that are found.

    When somebody has taken one of their keys meanwhile, all is rolled back, and each half gets a transaction of its
    own. The same happens after a deadlock: a batch takes keys in the order of its messages, and others in the order of
    keys.
    """
    try:
        return together(ids)
    except IntegrityError:
        if len(ids) == 1:
            return {ids[0]: Answer(ids[0], Verdict.KEY_TAKEN)}
    except OperationalError as error:
        if len(ids) == 1 or not is_deadlock(error):
            raise
    middle = len(ids) // 2
    return _in_halves(ids[:middle], together) | _in_halves(ids[middle:], together)
