"""Counts queues, limits, lateness and what Redis holds. Fast on a table of any size: nothing is counted past a cap."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime
from operator import attrgetter
from typing import Any, NamedTuple

from django.db.models import QuerySet

from ..api import limiting, pausing
from ..broker import RedisBroker, describe
from ..broker.base import ServerInfo
from ..core import bounds
from ..core.clock import from_tenths
from ..core.exceptions import BrokerFailing, BrokerUnavailable, UnusableBroker
from ..core.limits import Limit, Usage, parts, queue_name, topic_name
from ..core.states import FINAL, State
from ..models import LimitOverride, Message, Queue, Transition, Worker
from ..models.messages import Place
from ..models.workers import WorkerList, seen_lately
from ..project import conf, pulled, registry
from ..record import admission, overrides, reads
from ..record.sql import limit_statements, statements
from ..record.sql.limited import Count
from ..record.sql.sessions import without_jit
from ..restore.horizon import refuse_foreign
from .coming import Coming, TopicDue, due_by_topic, due_soon
from .numbers import CAPS, NONE, Capped, Caps, capped, total
from .waiting import Due, count_waiting, heads, may_be_more, overdue_heads, read_due
from .worker_list import list_workers

# --- queues: one walk along the index of scheduled messages -----------------------------------------------------------


class QueueSnapshot(NamedTuple):
    """One queue in the record. ``ready`` messages are due, but not yet overdue, and wait for no limit.

    Messages of a paused queue count as if it were not paused; ``Snapshot.without_paused`` moves them to ``held``.
    """

    # All waiting messages.
    scheduled: Capped = NONE
    ready: Capped = NONE
    overdue: Capped = NONE
    oldest_overdue: datetime | None = None
    next_due: datetime | None = None
    limited: Capped = NONE
    # The earliest due time of its limited messages, which are neither ready nor overdue.
    oldest_limited: datetime | None = None
    # Messages that are due and wait only for the end of a pause: they are neither ready nor overdue.
    held: Capped = NONE

    def without_overdue(self) -> QueueSnapshot:
        """Return the same queue, with its overdue messages as *ready* ones."""
        return self._replace(ready=total([self.ready, self.overdue]), overdue=NONE, oldest_overdue=None)


class Snapshot(NamedTuple):
    """All queues in the record, at one moment of its clock."""

    at: datetime
    queues: dict[str, QueueSnapshot]
    running: Capped
    # They include the messages that wait for limits.
    scheduled: Capped
    # The messages that wait for limits, as far as they were read.
    lines: tuple[Due, ...] = ()

    @property
    def limited(self) -> Capped:
        return total(queue.limited for queue in self.queues.values())

    @property
    def ready(self) -> Capped:
        return total(queue.ready for queue in self.queues.values())

    @property
    def held(self) -> Capped:
        return total(queue.held for queue in self.queues.values())

    @property
    def overdue(self) -> Capped:
        return total(queue.overdue for queue in self.queues.values())

    @property
    def oldest_overdue(self) -> datetime | None:
        return min((q.oldest_overdue for q in self.queues.values() if q.oldest_overdue is not None), default=None)

    @property
    def next_due(self) -> datetime | None:
        return min((q.next_due for q in self.queues.values() if q.next_due is not None), default=None)

    def without_paused(self, paused: Collection[str]) -> Snapshot:
        """Return the snapshot, with the due messages of paused queues as *held*: they are meant to wait."""
        queues = dict(self.queues)
        for name in sorted(paused):
            queue = queues.get(name, QueueSnapshot())
            waiting = total([queue.ready, queue.overdue])
            queues[name] = queue._replace(held=waiting, ready=NONE, overdue=NONE, oldest_overdue=None)
        return self._replace(queues=queues)


def take_snapshot(using: str, caps: Caps = CAPS) -> Snapshot:
    """Count the waiting messages of each queue."""
    cap = caps.counted
    now = reads.now(using)
    found, running = _queues(using, now, cap)
    queues = dict.fromkeys(sorted(pulled.without(registry.queues())), QueueSnapshot()) | found
    lines = _take_limited_out(using, queues, now, caps)
    scheduled = total(queue.scheduled for queue in queues.values())
    # Where the count stopped at the cap, the estimated number of entries in the partial index is shown.
    guess = (statements(using).estimated_rows("delayq_todo") or 0) if scheduled.more else 0
    if guess > scheduled.count:
        scheduled = Capped(guess, about=True)
    return Snapshot(now, queues, running, scheduled, lines)


def overdue_cutoff(now: datetime) -> datetime:
    """Return the moment OVERDUE_AFTER ago: scheduled messages that were due by then are overdue."""
    return now - bounds.OVERDUE_AFTER


def _queues(using: str, now: datetime, cap: int) -> tuple[dict[str, QueueSnapshot], Capped]:
    """Return the queues by name, and the number of all running messages."""
    rows, running = count_waiting(using, now=now, overdue_since=overdue_cutoff(now), limit=cap + 1)
    found = {
        queue: QueueSnapshot(capped(scheduled, cap), capped(ready, cap), capped(overdue, cap), oldest, following)
        for queue, scheduled, ready, overdue, oldest, following in rows
    }
    served = set(pulled.without(found))
    # Programs take what is due in a pulled queue whenever they want to.
    queues = {name: queue if name in served else queue.without_overdue() for name, queue in found.items()}
    return queues, capped(running, cap)


def _take_limited_out(using: str, queues: dict[str, QueueSnapshot], now: datetime, caps: Caps) -> tuple[Due, ...]:
    """Move the messages that wait for limits into a count of their own, and return them."""
    if not (closed := admission.full_lately(using)):
        return ()
    due: defaultdict[str, list[Due]] = defaultdict(list)
    for each in read_due(using, closed, now=now, overdue_since=overdue_cutoff(now), caps=caps):
        due[each.queue].append(each)
    oldest = {name: min((each.oldest for each in some if each.is_late), default=None) for name, some in due.items()}
    # Where all that were read wait for limits, late ones may stand behind them.
    if any(oldest[name] is None and may_be_more(some, caps) for name, some in due.items()):
        oldest = {head.queue: head.due_at for head in overdue_heads(using, closed, overdue_cutoff(now))}
    for name, some in due.items():
        # A message may have come since the queues were counted, and limited messages may stand behind those that were
        # read.
        more = may_be_more(some, caps)
        if name in queues and (more or any(each.limit is not None for each in some)):
            queues[name] = _without_limited(queues[name], some, oldest.get(name), more=more)
    return tuple(each for some in due.values() for each in some if each.limit is not None)


def _without_limited(queue: QueueSnapshot, due: Sequence[Due], oldest: datetime | None, *, more: bool) -> QueueSnapshot:
    """Return the numbers of a queue without the messages that wait for limits, which have a count of their own.

    ``due`` has the due messages that were read; ``more``: others may stand behind them. ``oldest`` is the due time of
    the message that is overdue for the longest time and waits for no limit.
    """
    limited = [each for each in due if each.limit is not None]
    others = [each for each in due if each.limit is None]
    late = sum(each.overdue for each in others)
    return queue._replace(
        ready=Capped(sum(each.number for each in others) - late, more),
        overdue=NONE if oldest is None else Capped(max(1, late), more),
        oldest_overdue=oldest,
        limited=Capped(sum(each.number for each in limited), more),
        oldest_limited=min((each.oldest for each in limited), default=None),
    )


# --- limits: what runs under them, and the lines of messages that wait for them ---------------------------------------


class LimitState(NamedTuple):
    """One limit at a moment."""

    name: str
    # The limit that the code of this process declares; None: it declares none of this name.
    limit: Limit | None
    # False when this process has no handler of the limit's topic, and so cannot tell its limit.
    is_known: bool = True
    waiting: Capped = NONE
    # The earliest due time of the messages that wait.
    oldest: datetime | None = None
    running: int = 0
    # The override that is in force.
    override: LimitOverride | None = None
    # When one more message may begin by the rate. None: at once.
    slot: datetime | None = None

    @property
    def is_full(self) -> bool:
        """True when all permits are taken."""
        return self.limit is not None and self.limit.count is not None and self.running >= self.limit.count

    def waited(self, now: datetime) -> float:
        """Return for how many seconds the oldest message has waited; zero where two clocks differ."""
        return 0.0 if self.oldest is None else max(0.0, (now - self.oldest).total_seconds())


class Lines(NamedTuple):
    """The longest lines, those whose messages wait longest, and the number of all."""

    number: Capped = NONE
    longest: tuple[LimitState, ...] = ()
    oldest: tuple[LimitState, ...] = ()


def longest_lines(using: str, most: int, caps: Caps = CAPS) -> Lines:
    """Return the longest lines, the longest first, and as many lines with the oldest messages, the oldest first."""
    closed = admission.full_lately(using)
    if not closed:
        return Lines()
    now = reads.now(using)
    due = [*read_due(using, closed, now=now, overdue_since=now, caps=caps)]
    return lines_of(using, due, most, more=may_be_more(due, caps))


def lines_of(using: str, all_due: Iterable[Due], most: int, *, more: bool) -> Lines:
    """Return the lines in which these messages wait; ``more``: others may stand behind them."""
    numbers: Counter[str] = Counter()
    oldest: dict[str, datetime] = {}
    for due in all_due:
        if due.limit is not None:
            numbers[due.limit] += due.number
            oldest[due.limit] = min(due.oldest, oldest.get(due.limit, due.oldest))
    longest = sorted(numbers, key=lambda name: (-numbers[name], oldest[name], name))[:most]
    first = sorted(oldest, key=lambda name: (oldest[name], name))[:most]
    states = {
        state.name: state._replace(waiting=Capped(numbers[state.name], more), oldest=oldest[state.name])
        for state in read_limits(using, {*longest, *first})
    }
    return Lines(Capped(len(numbers), more), *(tuple(states[name] for name in names) for names in (longest, first)))


def lines_in(using: str, seen: Snapshot | None, most: int) -> Lines:
    """Return what ``longest_lines`` does, as a snapshot has seen it, if there is one."""
    if seen is None:
        return longest_lines(using, most)
    return lines_of(using, seen.lines, most, more=seen.limited.more)


def all_limits(using: str, seen: Snapshot | None, most: int) -> Lines:
    """Return the longest lines, after them limits that are overridden, and then those that are declared or in use."""
    return with_others(using, lines_in(using, seen, most), known_limits(using), most)


def with_others(using: str, lines: Lines, known: set[str], most: int) -> Lines:
    """Return lines, and after them limits for which nothing waits: first those that are overridden."""
    others = known - {line.name for line in lines.longest}
    overridden = overrides.known(using).in_force.keys() & others
    rest = sorted(others - overridden, key=lambda name: (parts(name)[2] is not None, name))
    names = (*sorted(overridden), *rest)
    states = read_limits(using, names[: max(0, most - len(lines.longest))])
    return Lines(lines.number, (*lines.longest, *states))


def known_limits(using: str) -> set[str]:
    """Return the names of limits that are declared or under which messages run.

    Those of single keys are known only while messages run under them.
    """
    found = {queue_name(queue) for queue in conf.get().LIMITS or {}} | overrides.known(using).in_force.keys()
    found |= {topic_name(h.topic, None) for h in registry.handlers().values() if h.limit and not h.limit_key}
    return found.union(Place.objects.using(using).order_by("name").values_list("name", flat=True)[: CAPS.rows])


def waits_for(using: str, messages: Iterable[Message], now: datetime) -> dict[int, str]:
    """Return the limit for which each of the messages waits, by its id; the others are left out."""
    due = [message for message in messages if message.state == State.SCHEDULED and message.due_at <= now]
    closed = admission.full_lately(using) if due else set()
    found = {each.pk: admission.refusing(closed, each.topic, each.queue, each.limit_key, using) for each in due}
    return {pk: name for pk, name in found.items() if name is not None}


def read_limits(using: str, names: Collection[str]) -> list[LimitState]:
    """Return these limits as they are now, in this order, without the messages that wait for them."""
    if not names:
        return []
    counts = limit_statements(using).counts(names)
    return [_state(using, name, counts[name]) for name in names]


def of_all_keys(using: str, topic: str, keys: Sequence[LimitState], now: datetime) -> LimitState:
    """Return what each key of a topic may use, with what runs and what waits under these keys."""
    state = _state(using, topic_name(topic, None), Count(now, sum(each.running for each in keys)))
    oldest = min((each.oldest for each in keys if each.oldest is not None), default=None)
    return state._replace(waiting=total(each.waiting for each in keys), oldest=oldest)


def _state(using: str, name: str, count: Count) -> LimitState:
    try:
        limit, is_known = admission.limit_of(using, name), True
    except KeyError:
        limit, is_known = None, False
    override = overrides.known(using).in_force.get(name)
    return LimitState(name, limit, is_known, override=override, running=count.running, slot=_slot(limit, count))


def _slot(limit: Limit | None, count: Count) -> datetime | None:
    """Return when one more message may begin by the rate; None: at once."""
    slot = None if limit is None else Usage("", limit, count.now, full_at=count.full_at).slot
    return None if slot is None or slot <= count.now else slot


def limit_facts(limit: Limit | None) -> dict[str, Any] | None:
    """Return a limit for ``--json``; ``interval`` is in seconds."""
    if limit is None:
        return None
    if limit.interval is None:
        return {"count": limit.count, "interval": None, "burst": None}
    return {"count": limit.count, "interval": limit.interval.total_seconds(), "burst": limit.burst}


# --- the statistics of delayq_stats -----------------------------------------------------------------------------------

# The caps of ``delayq_stats``: a person who types a command has the time to wait for a count of a million.
EXACT = Caps(counted=1_000_000, lines=20)


class Lateness(NamedTuple):
    """The time from the due time to the first claim, in seconds, of the last ``of`` finished messages."""

    of: int
    p50: float | None = None
    p95: float | None = None


class QueueInRedis(NamedTuple):
    """One queue in Redis: how many ids are delayed and ready, and its horizon (None: it is not loaded)."""

    delayed: int | None
    ready: int | None
    horizon: datetime | None


class RedisStats(NamedTuple):
    """The state of Redis, as this process sees it: its own report, or the error; both if it answers and cannot be used.

    With neither, no Redis is configured.
    """

    where: str
    health: ServerInfo | None = None
    error: str | None = None
    # True: it answers, but with errors only, such as that it wants a password.
    refuses: bool = False

    @property
    def reachable(self) -> bool | None:
        """Whether Redis answers. None: no Redis is configured."""
        if self.health is None and self.error is None:
            return None
        return self.health is not None


class Stats(NamedTuple):
    """The statistics that ``delayq_stats`` shows, among them a snapshot of the waiting messages."""

    snapshot: Snapshot
    # The final states of the messages that finished last.
    finished: dict[State, Capped]
    # The database's estimate of the rows in the table of messages; None where there is none.
    estimate: int | None
    lateness: Lateness
    workers: WorkerList
    redis: RedisStats
    # By the name of the queue; empty unless Redis answers.
    in_redis: dict[str, QueueInRedis]
    # The messages that wait for limits.
    lines: Lines
    # The paused queues, whose due messages the snapshot calls *held*.
    paused: dict[str, Queue]
    # The overrides that are in force, by the names of their limits.
    overrides: dict[str, LimitOverride]
    # The due messages of each topic, the topics with most first.
    topics: dict[str, TopicDue]
    # The messages that fall due soon, by queue and by the name of the span.
    coming: dict[str, dict[str, Coming]]

    @property
    def at(self) -> datetime:
        """The moment of the snapshot, by the record's clock."""
        return self.snapshot.at

    @property
    def states(self) -> dict[State, Capped]:
        """The number of messages in each state."""
        return {State.SCHEDULED: self.snapshot.scheduled, State.RUNNING: self.snapshot.running, **self.finished}


def collect(using: str, broker: RedisBroker | None, caps: Caps = EXACT) -> Stats:
    """Read the record, then Redis. While Redis is away or foreign, ``redis`` says so and ``in_redis`` is empty."""
    with without_jit(using):
        paused, in_force = pausing.paused(using), limiting.in_force(using)
        snapshot = take_snapshot(using, caps).without_paused(paused)
        lines = lines_in(using, snapshot, caps.lines)
        topics = due_by_topic(using, snapshot.at, overdue_cutoff(snapshot.at), paused)
        coming = due_soon(using, snapshot.at, snapshot.queues)
        estimate = statements(using).estimated_rows("delayq_message")
        in_record = (snapshot, finished(using, caps), estimate, lateness(using), list_workers(using, snapshot.at))
    redis = ask_redis(broker)
    in_redis: dict[str, QueueInRedis] = {}
    if broker is not None and redis.reachable:
        try:
            meta = broker.read_meta()
            refuse_foreign(using, meta)
            horizon = None if meta.horizon_tenths is None else from_tenths(meta.horizon_tenths)
            for queue, held in broker.sizes(list(snapshot.queues)).items():
                in_redis[queue] = QueueInRedis(held.delayed, held.ready, horizon)
        except BrokerUnavailable as error:
            redis = RedisStats(redis.where, redis.health if isinstance(error, UnusableBroker) else None, str(error))
    return Stats(*in_record, redis, in_redis, lines, paused, in_force, topics, coming)


def count_capped(rows: QuerySet[Message], cap: int) -> Capped:
    """Count rows, but not past the cap."""
    return capped(rows.order_by()[: cap + 1].count(), cap)


def oldest_overdue(using: str, now: datetime, without: Collection[str] = ()) -> list[Message]:
    """Return the overdue message of each queue that waits longest, the oldest first, ``without`` some queues.

    Those that wait for limits are not overdue, nor are those of queues that are pulled: ``oldest_pulled``.
    """
    found = overdue_heads(using, admission.full_lately(using), overdue_cutoff(now))
    return sorted((head for head in found if head.queue not in without), key=attrgetter("due_at"))


def oldest_pulled(using: str, now: datetime) -> list[Message]:
    """Return the due message of each pulled queue that waits longest for a program to take it, the oldest first."""
    due = [head for head in heads(using) if head.due_at <= now and pulled.terms(head.queue) is not None]
    return sorted(due, key=attrgetter("due_at"))


def finished(using: str, caps: Caps = CAPS) -> dict[State, Capped]:
    """Count the final states of the messages that finished last. The numbers are exact when no more have finished."""
    rows = Message.objects.using(using).filter(finished_at__isnull=False).order_by("-finished_at", "-id")
    counts = dict.fromkeys((state for state in State if state in FINAL), 0)
    for state in rows.values_list("state", flat=True)[: caps.rows + 1]:
        counts[State(state)] += 1
    more = sum(counts.values()) > caps.rows
    return {state: Capped(min(count, caps.rows), more) for state, count in counts.items()}


def lateness(using: str) -> Lateness:
    """Measure how late the messages that finished last were first claimed; a message claimed ahead counts as 0."""
    last = Message.objects.using(using).filter(finished_at__isnull=False).order_by("-finished_at", "-id")
    ids = list(last.values_list("pk", flat=True)[: CAPS.lateness])
    claims = Transition.objects.using(using).filter(message_id__in=ids, from_state=State.SCHEDULED)
    first: dict[int, float] = {}
    rows = claims.filter(to_state=State.RUNNING).order_by("message_id", "number")
    for pk, at, due in rows.values_list("message_id", "at", "due_at"):
        first.setdefault(pk, max(0.0, (at - due).total_seconds()))
    if not first:
        return Lateness(0)
    spans = sorted(first.values())
    return Lateness(len(spans), _percentile(spans, 50), _percentile(spans, 95))


def _percentile(ordered: Sequence[float], percent: int) -> float:
    """Return the smallest value that ``percent`` of the values do not exceed."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def alive(using: str, now: datetime) -> int:
    """Count the worker processes that are alive."""
    return Worker.objects.using(using).filter(seen_lately(now)).count()


def ask_redis(broker: RedisBroker | None) -> RedisStats:
    """Ask Redis whether it answers, and for its own report."""
    where = describe(conf.get())
    if broker is None:
        return RedisStats(where)
    try:
        health = broker.server_info()
        return RedisStats(where, health, health.refusal)
    except BrokerUnavailable as error:
        return RedisStats(where, error=str(error), refuses=isinstance(error, BrokerFailing))
