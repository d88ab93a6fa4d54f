"""The actions on messages: cancel, reschedule, run now, move, requeue, purge. API, commands and console share them.

``ACTIONS`` lists all actions; the functions below it are the Python API.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Literal, Required, TypedDict, Unpack, overload

from django.conf import settings
from django.db import NotSupportedError, router
from django.db.models import Count, Exists, Max, Min, OuterRef, Q, QuerySet

from .. import signals
from ..broker import publisher
from ..broker.base import Entry
from ..core import actors, names
from ..core.chunks import chunks
from ..core.clock import NO_TIME
from ..core.commits import on_commit
from ..core.durations import Duration
from ..core.exceptions import InvalidMessage
from ..core.states import FINAL, REQUEUEABLE, State
from ..core.twins import async_twin
from ..core.verbs import VERBS, Verb
from ..core.verdicts import Verdict
from ..models import Message
from ..models.messages import HOLDS_KEY, WAITS_AGAIN, not_expired
from ..project import validation
from ..record import held_keys, purge, reads, transitions
from ..record.sql.expressions import HoldsKeyAt
from ..record.sql.rows import Moved
from ..record.transitions import ANY, MOVES_PER_TRANSACTION, NO_TIMES, Answer, DueTimes
from . import asking

# --- which messages a call means --------------------------------------------------------------------------------------

# The id may be text: that of a task's result is.
Target = int | str | Message


def id_of(target: Any) -> int:
    """Return the id of a message that is given as such or by its id. Raises ``InvalidMessage`` for anything else."""
    number = target.pk if isinstance(target, Message) else target
    if isinstance(number, str) and len(number) < 20 and number.isascii() and number.isdecimal():
        number = int(number)
    if isinstance(number, bool) or not isinstance(number, int) or not 0 < number < 2**63:
        hint = "; write a message or its id, or topic= and key="
        if isinstance(number, str):
            hint = "; to name a message by its key, write topic= and key="
        elif isinstance(number, Collection):
            hint = "; for several write a queryset: Message.objects.filter(pk__in=ids)"
        elif hasattr(target, "deliveries"):
            hint = "; write message.id"
        raise InvalidMessage(f"not the id of a message: {type(target).__name__}{hint}")
    return number


def find(using: str, topic: str, key: str | None, *, finished: bool) -> Message | None:
    """Return the message that holds a key, or else has it; with ``finished`` a finished one, if any.

    Raises ``InvalidMessage`` when the key is not given.
    """
    if key is None or not topic:
        raise InvalidMessage("name the message by its id, or by topic and key")
    topic, checked = validation.topic(topic), validation.key(key)
    assert checked is not None
    live = held_keys.named(using, topic, checked)
    if not finished or (live is not None and live.holds_key):
        return live
    rows = Message.objects.using(using).filter(topic=topic, key=checked, state__in=sorted(FINAL))
    return rows.defer("payload", "headers").order_by("-pk").first() or live


def selected(queryset: QuerySet[Message]) -> array[int]:
    """Return the ids of the messages that a queryset finds now, each once, in ascending order.

    An action reads its selection once, before it begins: its own moves may change what the queryset finds. A million
    ids take 8 MB. Raises ``InvalidMessage`` for a queryset that does not stand for messages.
    """
    refuse_others(queryset)
    return array("q", sorted(set(queryset.values_list("pk", flat=True))))


def refuse_others(queryset: QuerySet[Message]) -> None:
    """Raise ``InvalidMessage`` for a queryset that does not stand for messages."""
    if queryset.model._meta.concrete_model is not Message:
        raise InvalidMessage(f"not a queryset of messages: it is one of {queryset.model.__name__}")
    try:
        queryset.only("pk")
    except NotSupportedError:
        raise InvalidMessage(
            "not a plain queryset: it is a union, an intersection or a difference; give its messages by their ids"
        ) from None
    except TypeError:
        # Django refuses that after values(), values_list() and dates().
        raise InvalidMessage(
            "not a queryset of messages: it finds values; leave out values() and values_list()"
        ) from None


# --- the table --------------------------------------------------------------------------------------------------------


Move = Callable[[str, Sequence[int], DueTimes, str, Q], list[Answer]]
Foresee = Callable[[QuerySet[Message]], Counter[Verdict]]


@dataclass(frozen=True, slots=True)
class Action:
    """The functions of a verb on messages. It answers TOO_LATE for messages in none of the states of its verb."""

    verb: Verb
    move: Move
    # The verdict of a message in one of the states of the verb; where that depends on more, the function that counts
    # verdicts.
    done: Verdict | Foresee
    # What the log says where the call gives no reason.
    reason: str = ""

    @property
    def name(self) -> str:
        return self.verb.name

    @property
    def states(self) -> frozenset[State]:
        return self.verb.states

    def foresee(self, rows: QuerySet[Message]) -> Counter[Verdict]:
        """Count the verdicts that the action would have now for some messages. Writes nothing."""
        return _by_state(rows, self.states, self.done) if isinstance(self.done, Verdict) else self.done(rows)

    def apply(
        self, using: str, ids: Sequence[int], *, times: DueTimes = NO_TIMES, reason: str = "", among: Q = ANY
    ) -> list[Answer]:
        """Apply the action to messages. Return an answer for each, in the order of ``ids``.

        Each batch is a transaction. Redis and the receivers of signals are told on commit. A spread goes over those
        that get a new due time. A message is not found unless it is ``among`` those that a condition names when its row
        is locked.
        """
        # An impossible DELAYQ["REDIS"] raises before anything moves.
        publisher.get(using)
        answers = self.move(using, ids, self._spread(using, ids, times), reason or self.reason, among)
        publish_moves(using, [answer.moved for answer in answers])
        waiting = [pk for pk, answer in zip(ids, answers, strict=True) if answer and answer.state == State.SCHEDULED]
        publisher.run_at_once(using, waiting)
        return answers

    def apply_by_key(
        self, using: str, topic: str, key: str | None, *, times: DueTimes = NO_TIMES, reason: str = ""
    ) -> Answer:
        """Apply the action to the message that a topic and a key mean, and return the answer.

        That message may hand the key over to its next one before its row is locked. Then it stays as it is, and the
        call goes on with the one that the key means now: ``KEY_ROUNDS`` times at most, and then it is too late.
        """
        answer = Answer(None, Verdict.NOT_FOUND)
        for _round in range(held_keys.KEY_ROUNDS):
            meant = find(using, topic, key, finished=self.states <= FINAL)
            if meant is None:
                return Answer(None, Verdict.NOT_FOUND)
            as_found = Q(next_id=meant.next_id)
            [answer] = self.apply(using, [meant.pk], times=times, reason=reason, among=as_found)
            if answer.verdict != Verdict.NOT_FOUND:
                break
            answer = Answer(meant.pk, Verdict.TOO_LATE, State(meant.state))
        return answer

    def apply_in_batches(
        self,
        using: str,
        ids: Sequence[int],
        *,
        times: DueTimes = NO_TIMES,
        reason: str = "",
        among: Q = ANY,
        batch_size: int = MOVES_PER_TRANSACTION,
    ) -> Iterator[list[Answer]]:
        """Apply the action to messages. Yield the answers of each batch; a spread goes over all batches."""
        times = self._spread(using, ids, times)
        for batch in chunks(ids, batch_size):
            yield self.apply(using, list(batch), times=times, reason=reason, among=among)

    def _spread(self, using: str, ids: Sequence[int], times: DueTimes) -> DueTimes:
        """Return the times with the ranks of the messages that a spread goes over, unless these are known."""
        if not times.spread or times.rank is not None:
            return times
        rows = Message.objects.using(using).filter(state__in=self.states).order_by("pk")
        if self.verb.keeps_due_times:
            is_due = Q(due_at__lte=reads.now(using)) if times.name_none else Q()
            rows = rows.filter(~key_is_taken(using), is_due)
        among = array("q")
        for batch in chunks(sorted(ids), MOVES_PER_TRANSACTION):
            among.extend(rows.filter(pk__in=batch).values_list("pk", flat=True))
        return spread_among(times, among)


def spread_among(times: DueTimes, ids: Sequence[int], without: Sequence[int] = ()) -> DueTimes:
    """Return the times for a spread over these messages, in the order of their ids.

    Both sequences are in that order. Those that are left out are among the ``ids``.
    """

    def rank(pk: int) -> int:
        return bisect_left(ids, pk) - bisect_left(without, pk)

    return replace(times, rank=rank, number=len(ids) - len(without))


def make_way(using: str, others: Sequence[Message]) -> bool:
    """Take the keys from those of these messages that may hold them no longer; return whether one may be free.

    Such a message finished longer ago than it holds its key. Or its time to start is over, and no worker has expired it
    yet: then this call expires it.
    """
    is_free = held_keys.free_keys(using, others)
    late = [other.pk for other in others if other.state == State.SCHEDULED and other.expires_at is not None]
    if not late:
        return is_free
    gone = transitions.expire(using, limit=len(late), actor=actors.current(), among=Q(pk__in=late))
    publish_moves(using, gone)
    return is_free or bool(gone)


def _requeue(using: str, ids: Sequence[int], times: DueTimes, reason: str, among: Q) -> list[Answer]:
    return transitions.requeue(using, ids, times, reason, among, free=make_way)


def _purge(using: str, ids: Sequence[int], times: DueTimes, reason: str, among: Q) -> list[Answer]:
    verdicts = purge.purge_ids(using, ids)
    return [Answer(pk, verdicts.get(pk, Verdict.NOT_FOUND)) for pk in ids]


def publish_moves(using: str, moves: Iterable[Moved | None]) -> None:
    """Tell Redis and the receivers of signals, on commit, how messages moved, and what follows their ends."""
    waiting: defaultdict[str, list[Entry]] = defaultdict(list)
    gone: defaultdict[str, list[int]] = defaultdict(list)
    made = [moved for moved in moves if moved is not None]
    for moved in made:
        if moved.after == State.SCHEDULED:
            waiting[moved.queue].append(Entry.at(moved.id, moved.due_at, moved.priority))
            if moved.left:
                gone[moved.left].append(moved.id)
        elif moved.after in FINAL:
            gone[moved.queue].append(moved.id)
            on_commit(using, signals.emit_end, Message, moved, using)
    for queue, entries in waiting.items():
        publisher.announce_on_commit(using, queue, entries)
    for queue, ids in gone.items():
        publisher.remove_on_commit(using, queue, ids)
    publish_follow_ups(using, made)


def publish_follow_ups(using: str, moves: Iterable[Moved]) -> None:
    """Tell Redis and the receivers of signals, on commit, of the messages that follow the ends of others."""
    for new in [moved.follow_up for moved in moves if moved.follow_up is not None]:
        publisher.announce_on_commit(using, new.queue, [Entry.at(new.id, new.due_at, new.priority)], new=True)
        arguments = signals.message_arguments(new, using)
        signals.emit_on_commit(signals.message_scheduled, Message, **arguments, due_at=new.due_at)
        publisher.run_at_once(using, [new.id])


def _count(rows: QuerySet[Message], columns: Sequence[str], verdict: Callable[..., Verdict]) -> Counter[Verdict]:
    """Count the verdicts that an action would have now. ``verdict`` returns that of the messages with these columns."""
    counts: Counter[Verdict] = Counter()
    for *values, number in rows.order_by().values_list(*columns).annotate(Count("pk")):
        counts[verdict(*values)] += number
    return counts


def _by_state(rows: QuerySet[Message], states: Collection[State], done: Verdict) -> Counter[Verdict]:
    """Count the verdicts of an action that is ``done`` for each message in one of these states."""

    def verdict(state: str) -> Verdict:
        return done if state in states else Verdict.TOO_LATE

    return _count(rows, ("state",), verdict)


def foresee_cancel(rows: QuerySet[Message]) -> Counter[Verdict]:
    """Count the verdicts that a cancel of these messages would have now. Writes nothing."""

    def verdict(state: str, deliveries: int, reported: int) -> Verdict:
        found = transitions.cancel_decision(Message(state=state, deliveries=deliveries, reported=reported)).verdict
        assert found is not None
        return found

    return _count(rows, ("state", "deliveries", "reported"), verdict)


def foresee_requeue(rows: QuerySet[Message]) -> Counter[Verdict]:
    """Count the verdicts that a requeue of these messages would have now. Writes nothing.

    Of several messages with one key only the first will be requeued.
    """

    def verdict(state: str, taken: bool) -> Verdict:
        if state not in REQUEUEABLE:
            return Verdict.TOO_LATE
        return Verdict.KEY_TAKEN if taken else Verdict.REQUEUED

    return _count(rows.annotate(taken=key_is_taken(rows.db)), ("state", "taken"), verdict)


def foresee_purge(rows: QuerySet[Message]) -> Counter[Verdict]:
    """Count the verdicts that a purge of these messages would have now. Writes nothing."""
    counts = _by_state(rows, FINAL, Verdict.PURGED)
    finished = rows.filter(state__in=sorted(FINAL))
    counts[Verdict.REFERRED_TO] = counts[Verdict.PURGED] - purge.deletable(finished).count()
    counts[Verdict.PURGED] -= counts[Verdict.REFERRED_TO]
    return counts


def key_is_taken(using: str) -> Q:
    """Return the condition that another message has the key of a message now, and would not ``make_way``."""
    at = reads.now(using)
    others = Message.objects.using(using).filter(~Q(pk=OuterRef("pk")), topic=OuterRef("topic"), key=OuterRef("key"))
    still = Q(state=State.RUNNING) | Q(not_expired(at), state=State.SCHEDULED) | Q(HoldsKeyAt(at))
    return Q(Exists(others.filter(HOLDS_KEY, still))) | Q(Exists(others.filter(WAITS_AGAIN, still)))


CANCEL = Action(VERBS["cancel"], transitions.cancel, foresee_cancel)
RESCHEDULE = Action(VERBS["reschedule"], transitions.reschedule, Verdict.RESCHEDULED)
RUN = Action(VERBS["run"], transitions.reschedule, Verdict.RESCHEDULED, reason="run now")
MOVE = Action(VERBS["move"], transitions.transfer, Verdict.MOVED)
REQUEUE = Action(VERBS["requeue"], _requeue, foresee_requeue)
PURGE = Action(VERBS["purge"], _purge, foresee_purge)
ACTIONS = {action.name: action for action in (CANCEL, RESCHEDULE, RUN, MOVE, REQUEUE, PURGE)}


@dataclass(frozen=True, slots=True)
class ToCome:
    """The number of messages whose due time is still to come, and the first and last of these due times."""

    number: int = 0
    first: datetime | None = None
    last: datetime | None = None

    def __add__(self, other: ToCome) -> ToCome:
        firsts = [at for at in (self.first, other.first) if at is not None]
        lasts = [at for at in (self.last, other.last) if at is not None]
        return ToCome(self.number + other.number, min(firsts, default=None), max(lasts, default=None))


def to_come(rows: QuerySet[Message]) -> ToCome:
    """Count the messages whose due time is still to come: a requeue leaves their due times as they are."""
    rows = rows.filter(due_at__gt=reads.now(rows.db)).order_by()
    return ToCome(**rows.aggregate(number=Count("pk"), first=Min("due_at"), last=Max("due_at")))


# --- the API ----------------------------------------------------------------------------------------------------------

_MEANT = {
    **names.DELAYS,
    **names.DUE_TIMES,
    **dict.fromkeys(("id", "pk", "message", "message_id", "task_id", "job_id"), "target"),
    **dict.fromkeys(("terminate", "signal"), names.NOTHING),
}
_NO_TIMES = dict.fromkeys((*names.DELAYS, *names.DUE_TIMES, "delay", "due_at"), "reschedule_message()")


class Said(TypedDict, total=False):
    """The arguments of each call that acts on messages."""

    reason: str
    using: str | None


class At(Said, total=False):
    """The arguments of a call that gives a due time."""

    due_at: Required[datetime]
    delay: None


class Later(Said, total=False):
    """The arguments of a call that gives a time from now."""

    delay: Required[Duration]
    due_at: None


class Where(Said, total=False):
    """The arguments of a move."""

    queue: str | None
    priority: int | None


class Again(Said, total=False):
    """The arguments of a requeue."""

    delay: Duration | None
    expires: Duration | Literal[False] | None


class ManyAgain(Again, total=False):
    """The arguments of a requeue of many messages."""

    spread: Duration | None


@overload
def cancel_message(target: Target, **said: Unpack[Said]) -> Answer: ...
@overload
def cancel_message(*, topic: str, key: str, **said: Unpack[Said]) -> Answer: ...
@overload
def cancel_message(target: QuerySet[Message], **said: Unpack[Said]) -> Counter[Verdict]: ...
@names.with_hints({**_MEANT, **_NO_TIMES})
def cancel_message(
    target: Target | QuerySet[Message] | None = None,
    *,
    topic: str = "",
    key: str | None = None,
    reason: str = "",
    using: str | None = None,
) -> Answer | Counter[Verdict]:
    """Cancel a message, given by id, by ``topic`` and ``key``, or as a queryset of messages.

    ``topic`` and ``key`` name the live message that holds the key when its row is locked; if none does, the youngest
    live one that has it. One that hands the key over to its next message stays as it is, and that one is meant.

    The answer's ``verdict`` is true at the commit: CANCELLED (no delivery is running, none has crashed with an unknown
    result, and none will start), REQUESTED (a delivery is running or about to start: a handler that runs for another
    second can see the request, and no retry follows), OUTCOME_UNKNOWN (no delivery will start, but one that crashed may
    have had its effect), TOO_LATE (``answer.state`` says why), NOT_FOUND. An answer is true when something was done.
    For a queryset it acts on the messages that the queryset finds at the call, in batches with a transaction each, and
    returns the number of messages per verdict.
    """
    return _apply(CANCEL, target, topic, key, using, reason=reason)


@overload
def reschedule_message(target: Target, **said: Unpack[At]) -> Answer: ...
@overload
def reschedule_message(target: Target, **said: Unpack[Later]) -> Answer: ...
@overload
def reschedule_message(*, topic: str, key: str, **said: Unpack[At]) -> Answer: ...
@overload
def reschedule_message(*, topic: str, key: str, **said: Unpack[Later]) -> Answer: ...
@overload
def reschedule_message(target: QuerySet[Message], **said: Unpack[At]) -> Counter[Verdict]: ...
@overload
def reschedule_message(target: QuerySet[Message], **said: Unpack[Later]) -> Counter[Verdict]: ...
@names.with_hints(_MEANT)
def reschedule_message(
    target: Target | QuerySet[Message] | None = None,
    *,
    due_at: datetime | None = None,
    delay: Duration | None = None,
    topic: str = "",
    key: str | None = None,
    reason: str = "",
    using: str | None = None,
) -> Answer | Counter[Verdict]:
    """Give a waiting message another due time: ``due_at``, or ``delay`` from now. Targets as in ``cancel_message``.

    Answers RESCHEDULED, TOO_LATE (it runs or is finished: ``answer.state``) or NOT_FOUND. The time of expiry moves by
    as much. Raises ``InvalidMessage`` for an impossible time.
    """
    if (due_at is None) == (delay is None):
        raise InvalidMessage("reschedule_message needs either due_at or delay")
    at = None if due_at is None else validation.due(due_at)
    wait = NO_TIME if delay is None else validation.delay(delay)
    return _apply(RESCHEDULE, target, topic, key, using, times=DueTimes(due_at=at, delay=wait), reason=reason)


@overload
def run_message(target: Target, **said: Unpack[Said]) -> Answer: ...
@overload
def run_message(*, topic: str, key: str, **said: Unpack[Said]) -> Answer: ...
@overload
def run_message(target: QuerySet[Message], **said: Unpack[Said]) -> Counter[Verdict]: ...
@names.with_hints({**_MEANT, **_NO_TIMES})
def run_message(
    target: Target | QuerySet[Message] | None = None,
    *,
    topic: str = "",
    key: str | None = None,
    reason: str = "",
    using: str | None = None,
) -> Answer | Counter[Verdict]:
    """Make a waiting message due now. Targets and answers as in ``reschedule_message``.

    One that is due and may start keeps its due time, and with that its place among those that wait for the same limit.
    """
    return _apply(RUN, target, topic, key, using, reason=reason)


@overload
def move_message(target: Target, **said: Unpack[Where]) -> Answer: ...
@overload
def move_message(*, topic: str, key: str, **said: Unpack[Where]) -> Answer: ...
@overload
def move_message(target: QuerySet[Message], **said: Unpack[Where]) -> Counter[Verdict]: ...
@names.with_hints({**_MEANT, **_NO_TIMES, **dict.fromkeys(("to", "queue_name", "new_queue", "destination"), "queue")})
def move_message(
    target: Target | QuerySet[Message] | None = None,
    *,
    queue: str | None = None,
    priority: int | None = None,
    topic: str = "",
    key: str | None = None,
    reason: str = "",
    using: str | None = None,
) -> Answer | Counter[Verdict]:
    """Have a waiting message wait in another ``queue``, with another ``priority``, or both. Targets as in
    ``cancel_message``.

    It keeps its due time, and begins under the limits and pauses of the new queue, by a worker that serves it.

    Answers MOVED (also when it is there already), TOO_LATE (it runs or is finished: ``answer.state``) or NOT_FOUND.
    Raises ``InvalidMessage`` for an impossible queue or priority, and when neither is given.
    """
    if queue is None and priority is None:
        raise InvalidMessage("move_message needs a queue, a priority, or both")
    to = None if queue is None else validation.queue(queue)
    if to is not None and settings.DEBUG:
        asking.ask_about_queue("A message is moved to", to)
    times = DueTimes(queue=to, priority=None if priority is None else validation.priority(priority))
    return _apply(MOVE, target, topic, key, using, times=times, reason=reason)


@overload
def requeue_message(target: Target, **said: Unpack[Again]) -> Answer: ...
@overload
def requeue_message(*, topic: str, key: str, **said: Unpack[Again]) -> Answer: ...
@overload
def requeue_message(target: QuerySet[Message], **said: Unpack[ManyAgain]) -> Counter[Verdict]: ...
@names.with_hints({**_MEANT, **dict.fromkeys((*names.DUE_TIMES, "due_at"), "delay")})
def requeue_message(
    target: Target | QuerySet[Message] | None = None,
    *,
    delay: Duration | None = None,
    spread: Duration | None = None,
    expires: Duration | Literal[False] | None = None,
    topic: str = "",
    key: str | None = None,
    reason: str = "",
    using: str | None = None,
) -> Answer | Counter[Verdict]:
    """Schedule a dead, expired or cancelled message again; its attempts start anew. Targets as in ``cancel_message``.

    A message whose due time is still to come keeps it; any other is due now. With ``delay`` all are due after that time
    (0: now). ``spread`` distributes the messages of a queryset that get a new due time evenly over that time, in the
    order of their ids. With ``expires`` it does not start any more this long after its due time (False: it never
    expires); by default its time to live stays as long as it was.

    Answers REQUEUED, TOO_LATE (it is live, or was consumed: ``answer.state``), KEY_TAKEN (another message holds its
    topic and key) or NOT_FOUND. ``topic`` and ``key`` name the youngest finished message with that key, unless a live
    one holds the key.
    """
    wait = None if delay is None else validation.delay(delay)
    over = NO_TIME if spread is None else validation.delay(spread, "spread")
    life: timedelta | Literal[False] | None = False if expires is False else validation.expires(expires)
    times = DueTimes(delay=wait, spread=over, expires=life)
    return _apply(REQUEUE, target, topic, key, using, times=times, reason=reason)


def _apply(
    action: Action,
    target: Target | QuerySet[Message] | None,
    topic: str,
    key: str | None,
    using: str | None,
    *,
    times: DueTimes = NO_TIMES,
    reason: str,
) -> Answer | Counter[Verdict]:
    """Apply an action to what a call of the API names: one message, a queryset, or a topic and key."""
    if target is not None and (topic or key is not None):
        raise InvalidMessage("give either the messages themselves, or topic and key")
    reason = validation.reason(reason)
    if isinstance(target, QuerySet):
        return _apply_to_queryset(action, target, using, times, reason)
    # As save() does: what was read from a replica is written to the database behind it.
    hints = {"instance": target} if isinstance(target, Message) else {}
    using = using or router.db_for_write(Message, **hints)
    if target is not None:
        return action.apply(using, [id_of(target)], times=times, reason=reason)[0]
    answer = action.apply_by_key(using, topic, key, times=times, reason=reason)
    if answer.id is None and settings.DEBUG:
        asking.ask(f"There is no message to {action.name} with this key and", topic)
    return answer


def _apply_to_queryset(
    action: Action, queryset: QuerySet[Message], using: str | None, times: DueTimes, reason: str
) -> Counter[Verdict]:
    """Apply an action to the messages that a queryset finds now. Return the number of messages per verdict."""
    refuse_others(queryset)
    # The alias is the one that the caller has named, or else the router's alias for writing, which it gives to a
    # queryset that locks rows: its alias for reading may be a replica.
    using = using or queryset.select_for_update().db
    ids = selected(queryset.using(using))
    counts: Counter[Verdict] = Counter()
    for answers in action.apply_in_batches(using, ids, times=times, reason=reason):
        counts.update(answer.verdict for answer in answers)
    return counts


# --- the same for async code ------------------------------------------------------------------------------------------

acancel_message = async_twin(cancel_message)
areschedule_message = async_twin(reschedule_message)
arun_message = async_twin(run_message)
amove_message = async_twin(move_message)
arequeue_message = async_twin(requeue_message)
