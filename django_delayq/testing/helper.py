"""``Delayq``: all that tests do with the queue. The pytest fixture and the mixin of ``TestCase`` give out one."""

from __future__ import annotations

import contextvars
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypedDict, Unpack

from django.db import connections, router
from django.utils import timezone

from ..api import pausing
from ..core import in_tests, names
from ..core.clock import ceil_tenth, iso
from ..core.durations import Duration, brief, seconds
from ..core.outcomes import Ack
from ..core.states import State
from ..core.twins import async_twin
from ..core.values import same_json
from ..models import Message, Transition
from ..project import registry, validation
from ..record.sql.rows import Claimed
from ..worker.run.delivery import Delivery
from ..worker.run.executor import call, outcome_of
from .deliverer import MOST, Deliverer, Ran, at_work, check_topic, must_be_raised, raise_error
from .transactions import call_on_commit_functions, is_in_own_transaction, notice_calls
from .without_redis import use_no_redis

if TYPE_CHECKING:
    from unittest import TestCase, TestResult
else:
    TestCase = object

# Messages that a failure shows.
MOST_SHOWN = 5


class QueueClock:
    """Follows Python's clock, also when freezegun or time-machine move that, and adds the time travelled.

    It is rounded up as due times are, so that a message without a delay is due at once also while Python's clock stands
    still. It never goes back by itself.
    """

    def __init__(self) -> None:
        self._travelled = timedelta(0)
        # While the clock stands still: its time.
        self._still: datetime | None = None

    def now(self) -> datetime:
        """Return the time."""
        return self._still or ceil_tenth(timezone.now().astimezone(UTC) + self._travelled)

    def moment(self, when: Duration | datetime) -> datetime:
        """Return a time from now on: after a duration, or an aware datetime. Raises ``ValueError`` for the past."""
        now = self.now()
        if not isinstance(when, datetime):
            when = now + timedelta(seconds=seconds(when))
        elif when.utcoffset() is None:
            raise ValueError("the time has no time zone; use an aware datetime, e.g. django.utils.timezone.now()")
        if when < now:
            raise ValueError(f"the queue's clock does not go back: it is {now.isoformat()} already")
        return ceil_tenth(when.astimezone(UTC))

    def move_to(self, moment: datetime) -> None:
        """Go to a time, unless it is over."""
        ahead = moment - self.now()
        if ahead > timedelta(0):
            self._travelled += ahead
            if self._still is not None:
                self._still = moment

    def stand_still(self) -> None:
        """Stop the clock: which messages are due must not depend on the speed of the machine."""
        self._still = self.now()

    def go_on(self) -> None:
        """Let the clock run on, from the time that it shows."""
        still, self._still = self._still, None
        if still is not None:
            self.move_to(still)


# --- what a test looks for among messages, and how far a message is from it, in words ---------------------------------

# Characters of a payload that a failure shows.
SHOWN = 300
# A message may be due this much earlier or later than a test says. Seconds.
WITHIN = 5.0


# The value of a criterion that was not given: every value will do.
ANYTHING: Any = object()

# The criteria that are columns of a message, each with the function that checks its value.
_EXACT = {"key": validation.key, "queue": validation.queue, "priority": validation.priority}


# The names of the criteria in other queues and in ``schedule_message``.
_MEANT = {
    **dict.fromkeys((*names.DELAYS, *names.DUE_TIMES, "delay", "due_at"), "due"),
    **dict.fromkeys(("args", "kwargs", "data", "body"), "payload"),
    **dict.fromkeys(("times", "n", "number"), "count"),
}


class Sought(TypedDict, total=False):
    """The criteria by which a test may look for messages, besides the topic. Those left out match any value."""

    payload: Any
    payload__contains: Any
    due: Duration | datetime | None
    within: Duration
    key: str | None
    queue: str
    priority: int


class Criteria(NamedTuple):
    """The values that a message must have. ``payload`` and ``contained`` are JSON, as the record has them."""

    topic: str | None
    payload: Any
    contained: Any
    due: datetime | None
    within: timedelta
    key: Any
    queue: Any
    priority: Any

    @classmethod
    def of(cls, now: datetime, topic: str | None, wanted: Sought) -> Criteria:
        """Check what was given, and bring it into the form of the record. A duration ``due`` counts from ``now``.

        Raises ``TypeError`` for an unknown criterion, and ``ValueError`` for an impossible value.
        """
        known, given = Sought.__annotations__, dict[str, Any](wanted)
        if wanted.keys() - known.keys():
            raise TypeError(f"there is no criterion {names.unknown(given, known, _MEANT)}")
        due = wanted.get("due")
        if due is not None and not isinstance(due, datetime):
            due = now + timedelta(seconds=seconds(due))
        if due is not None and due.utcoffset() is None:
            raise ValueError("due has no time zone; use an aware datetime or a duration")
        return cls(
            topic,
            _json(wanted.get("payload", ANYTHING)),
            _json(wanted.get("payload__contains", ANYTHING)),
            due,
            validation.delay(wanted.get("within", WITHIN), "within"),
            *(check(given[name]) if name in given else ANYTHING for name, check in _EXACT.items()),
        )

    def differences(self, message: Message) -> Iterator[str]:
        """Yield how a message differs, one line of text for each difference; none when it matches."""
        for name in _EXACT:
            wanted, found = getattr(self, name), getattr(message, name)
            if wanted is not ANYTHING and found != wanted:
                yield f"{name} is {found!r}, not {wanted!r}"
        if self.due is not None and abs(message.due_at - self.due) > self.within:
            off = (message.due_at - self.due).total_seconds()
            yield f"it is due {_span(abs(off))} {'later' if off > 0 else 'earlier'}"
        if self.payload is not ANYTHING:
            yield from _missing("payload", self.payload, message.payload, is_exact=True)
        if self.contained is not ANYTHING:
            yield from _missing("payload", self.contained, message.payload, is_exact=False)

    def __str__(self) -> str:
        """Return what a message must have, in words; "" when every message will do."""
        parts = [f"topic {self.topic!r}"] if self.topic is not None else []
        parts += [f"{name} {wanted!r}" for name in _EXACT if (wanted := getattr(self, name)) is not ANYTHING]
        if self.due is not None:
            parts.append(f"due at {iso(self.due)} (± {brief(self.within.total_seconds())})")
        if self.payload is not ANYTHING:
            parts.append(f"payload {_shown(self.payload)}")
        if self.contained is not ANYTHING:
            parts.append(f"a payload that contains {_shown(self.contained)}")
        return ", ".join(parts)


def _json(value: Any) -> Any:
    return value if value is ANYTHING else json.loads(validation.payload(value))


def _missing(place: str, wanted: Any, found: Any, *, is_exact: bool) -> Iterator[str]:
    """Yield what ``found`` lacks of ``wanted``: names of dicts, items of lists. ``is_exact``: or has besides."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        for name, value in wanted.items():
            inside = f"{place}[{name!r}]"
            if name not in found:
                yield f"{place} has no {name!r}"
            else:
                yield from _missing(inside, value, found[name], is_exact=is_exact)
        if is_exact:
            yield from (f"{place} has {name!r} besides" for name in found if name not in wanted)
    elif isinstance(wanted, list) and isinstance(found, list) and not is_exact:
        for item in wanted:
            if not any(not [*_missing(place, item, one, is_exact=False)] for one in found):
                yield f"{place} does not contain {_shown(item)}"
    elif not same_json(wanted, found):
        yield f"{place} is {_shown(found)}, not {_shown(wanted)}"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, sort_keys=True)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} …"


def _span(span: float) -> str:
    """Return a span of seconds for people, rounded."""
    return brief(round(span) if span >= 10 else span)


def described(message: Message, now: datetime) -> str:
    """Return one line about a message for people to read."""
    wait = (message.due_at - now).total_seconds()
    due = f"due in {_span(wait)}" if wait > 0 else "due"
    facts = [f"#{message.pk} {message.topic}", due, f"payload {_shown(message.payload)}"]
    if message.key is not None:
        facts.insert(2, f"key {message.key!r}")
    return ", ".join(facts)


_used: list[Delayq] = []

# Called at the import: a class of tests, or a fixture, may call functions on commit before a helper begins.
notice_calls()


def elsewhere() -> Collection[str]:
    """Return the topics that the helper in use knows to be handled elsewhere."""
    return _used[-1].elsewhere if _used else ()


@names.refuse_attributes(
    "Delayq",
    {
        **dict.fromkeys(("run", "run_all", "run_due", "work", "execute", "process", "flush", "perform_all"), "drain()"),
        **dict.fromkeys(("advance", "forward", "shift", "sleep", "tick", "wait", "move_to"), 'travel("15m")'),
        **dict.fromkeys(("jobs", "messages", "queue", "tasks", "enqueued"), "scheduled()"),
        **dict.fromkeys(
            ("assert_enqueued", "assert_called", "assert_has_enqueued"), 'assert_scheduled("orders.close")'
        ),
    },
)
class Delayq:
    """The queue in a test: a context manager, which gives the queue a clock of the test's own and no Redis.

    ``using`` is the database alias of the messages (default: the router's). Each method that needs the database has an
    async twin, which does the same and is awaited.
    """

    def __init__(self, using: str | None = None) -> None:
        self.using = using or router.db_for_write(Message)
        # The topics of messages that another project handles.
        self.elsewhere: set[str] = set()
        self._clock = QueueClock()
        self._former: tuple[Any, bool] = (None, False)

    def __enter__(self) -> Self:
        self._former = (in_tests.clock, in_tests.without_redis)
        in_tests.clock = self._clock.now
        use_no_redis(True)
        _used.append(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        _used.remove(self)
        in_tests.clock, without_redis = self._former
        use_no_redis(without_redis)

    # --- time ---------------------------------------------------------------------------------------------------------

    @property
    def now(self) -> datetime:
        """The time by the queue's clock: Python's time, and the time travelled."""
        return self._clock.now()

    def travel(self, to: Duration | datetime) -> datetime:
        """Move the queue's clock ahead: by a duration such as ``"15m"``, or to an aware datetime. Return the time.

        Nothing runs. Python's clock stays as it is: the queue follows freezegun and time-machine, but they do not
        follow the queue.
        """
        self._clock.move_to(self._clock.moment(to))
        return self.now

    # --- deliver ------------------------------------------------------------------------------------------------------

    def drain(
        self,
        until: Duration | datetime | None = None,
        *,
        queue: str | None = None,
        raise_errors: bool = True,
        limit: int = MOST,
    ) -> list[Ran]:
        """Run the handlers of all messages that are due, in this thread and transaction. Return what ran, in order.

        With ``until``, a duration or an aware datetime, the queue's clock goes on to that time, and stops at every due
        time on the way: each message runs at its own time, retries too. During a drain the clock stands still
        otherwise. ``queue``: run the messages of this queue only.

        The first error of a handler is raised when its outcome is recorded; the messages after it wait.
        ``raise_errors=False`` goes on. ``RetryLater`` and ``Reject`` are answers, and no errors. Raises
        ``UnknownTopic`` for a due message that no handler receives, and ``RuntimeError`` after ``limit`` deliveries.
        """
        if in_tests.clock != self._clock.now:
            raise RuntimeError("Delayq is a context manager, and the innermost one drains: with Delayq() as delayq: …")
        if at_work() is not None:
            raise RuntimeError("a handler cannot drain: the messages that it schedules run when it has ended")
        if is_in_own_transaction(connections[self.using]):
            raise RuntimeError(
                "drain() was called inside of transaction.atomic(), where no worker would see the messages yet;"
                " call it when the block has ended"
            )
        if queue is not None:
            validation.queue(queue)
        if limit < 1:
            raise ValueError("limit is 1 or more")
        self._clock.stand_still()
        try:
            end = self.now if until is None else self._clock.moment(until)
            deliverer = Deliverer(self.using)
            with deliverer.working():
                return self._drain(deliverer, end, queue, raise_errors, limit)
        finally:
            self._clock.go_on()

    def _drain(
        self, deliverer: Deliverer, end: datetime, queue: str | None, raise_errors: bool, limit: int
    ) -> list[Ran]:
        ran: list[Ran] = []
        call_on_commit_functions()
        while True:
            claimed = deliverer.claim_next(queue, limit - len(ran)) if len(ran) < limit else []
            if claimed:
                made = deliverer.run(claimed)
                ran += made
                for one in made:
                    if raise_errors or must_be_raised(one.error):
                        raise_error(one)
                continue
            if deliverer.expire():
                # Receivers of signals may have scheduled messages.
                continue
            deliverer.check_topics(queue, self.elsewhere)
            moment = deliverer.next_event(queue, end)
            if len(ran) >= limit and (moment or self._is_any_due(queue)):
                raise RuntimeError(
                    f"drain() made {limit} deliveries, and more messages are due; the last was: {ran[-1]}"
                )
            if moment is None and self.now >= end:
                return ran
            self._clock.move_to(moment or end)

    # --- look ---------------------------------------------------------------------------------------------------------

    def handled_elsewhere(self, *names: str) -> None:
        """Name topics that another project handles, so that their messages may be scheduled and looked for here."""
        self.elsewhere.update(map(validation.topic, names))

    def scheduled(self, topic: str | None = None, **wanted: Unpack[Sought]) -> list[Message]:
        """Return the scheduled messages that match, the next due one first.

        ``payload`` is the whole payload, ``payload__contains`` a part of it: of a dict some names with their values, of
        a list some items, at any depth. ``due`` is a duration from now or an aware datetime; the due time may differ by
        ``within``, 5 seconds by default. ``key`` (None: no key), ``queue`` and ``priority`` are those of the message.
        What is left out may have any value. Messages that functions of ``transaction.on_commit`` schedule are among
        them: those that wait are called first.
        """
        return self._look(topic, wanted)[2]

    def assert_scheduled(self, topic: str, *, count: int | None = None, **wanted: Unpack[Sought]) -> Message:
        """Fail unless a scheduled message matches, as ``scheduled`` says. Return the first that does.

        ``count``: fail unless exactly this number match. The failure says which messages there were instead.
        """
        __tracebackhide__ = True
        if count is not None and count < 1:
            raise ValueError("count is 1 or more; for none there is assert_not_scheduled()")
        criteria, candidates, found = self._look(topic, wanted)
        if not found or (count is not None and len(found) != count):
            raise AssertionError(self._failure(criteria, candidates, found, count))
        return found[0]

    def assert_not_scheduled(self, topic: str | None = None, **wanted: Unpack[Sought]) -> None:
        """Fail when a scheduled message matches, as ``scheduled`` says; without a criterion when any is scheduled."""
        __tracebackhide__ = True
        criteria, _candidates, found = self._look(topic, wanted)
        if found:
            having = f" with {criteria}" if str(criteria) else ""
            raise AssertionError(_lines(f"No message{having} was to be scheduled, and {len(found)} are:", self, found))

    # --- call ---------------------------------------------------------------------------------------------------------

    def perform(
        self,
        topic: str,
        payload: Any = None,
        *,
        attempt: int = 1,
        deliveries: int | None = None,
        key: str | None = None,
        headers: Mapping[str, Any] | None = None,
        queue: str | None = None,
        priority: int | None = None,
        message_id: int = 1,
        due_at: datetime | None = None,
        cancel_requested: bool = False,
    ) -> list[BaseException | None] | None:
        """Call the handler of a topic, sync or async, with a made delivery: no message, no record, no query.

        A batch handler gets one for each payload of the list ``payload``, with ids from ``message_id`` on. Returns how
        it answered each: None for a success, else ``RetryLater``, ``Reject`` or the error; for any other handler None.

        What the handler raises is raised. The payload and the headers go through JSON, as in production. A
        transactional handler gets no transaction of its own, and no middleware surrounds the handler. ``deliveries`` is
        ``attempt`` by default.
        """
        handler = registry.handlers()[check_topic(topic, ())]
        if attempt < 1 or (deliveries is not None and deliveries < attempt):
            raise ValueError("attempt counts from 1, and deliveries is at least attempt")
        first = Claimed(
            id=message_id,
            topic=topic,
            queue=validation.queue(registry.default_queue(topic) if queue is None else queue),
            key=validation.key(key),
            priority=validation.priority(handler.priority if priority is None else priority),
            payload=None,
            headers=json.loads(validation.headers(headers)),
            due_at=self.now if due_at is None else due_at,
            expires_at=None,
            retry=None,
            max_attempts=None,
            attempts=attempt - 1,
            deliveries=attempt if deliveries is None else deliveries,
            reported=attempt - 1,
            excused=0,
            claimed_at=self.now,
        )
        made = self._make(first, payload, handler)
        for delivery in made:
            delivery.cancel_requested = cancel_requested
            delivery.begin()
        _perform(made)
        return None if handler.batch == 1 else [delivery.answer for delivery in made]

    # --- from async code ----------------------------------------------------------------------------------------------

    adrain = async_twin(drain)
    ascheduled = async_twin(scheduled)
    aassert_scheduled = async_twin(assert_scheduled)
    aassert_not_scheduled = async_twin(assert_not_scheduled)
    aperform = async_twin(perform)

    # --- the parts ----------------------------------------------------------------------------------------------------

    def _make(self, first: Claimed, payload: Any, handler: registry.Handler) -> list[_Made]:
        """Make a delivery of the payload, or one of each payload for a batch handler."""
        payloads = [payload] if handler.batch == 1 else payload
        if not (isinstance(payloads, list | tuple) and payloads):
            raise ValueError(f"the handler of {first.topic} takes batches: give perform() a list of payloads")
        rows = [
            first._replace(id=first.id + number, payload=json.loads(validation.payload(handler.stored(one)[0])))
            for number, one in enumerate(payloads)
        ]
        return [_Made(row, handler, self.using) for row in rows]

    def _look(self, topic: str | None, wanted: Sought) -> tuple[Criteria, list[Message], list[Message]]:
        """Return the criteria, all scheduled messages of the topic (None: of all), and those of them that match."""
        if topic is not None:
            check_topic(topic, self.elsewhere)
        criteria = Criteria.of(self.now, topic, wanted)
        call_on_commit_functions()
        rows = Message.objects.using(self.using).filter(state=State.SCHEDULED).order_by("due_at", "id")
        candidates = list(rows if topic is None else rows.filter(topic=topic))
        return criteria, candidates, [message for message in candidates if not [*criteria.differences(message)]]

    def _is_any_due(self, queue: str | None) -> bool:
        rows = Message.objects.using(self.using).filter(state=State.SCHEDULED, due_at__lte=self.now)
        rows = rows.exclude(topic__in=self.elsewhere).exclude(queue__in=pausing.paused(self.using))
        return (rows if queue is None else rows.filter(queue=queue)).exists()

    def _failure(self, criteria: Criteria, candidates: list[Message], found: list[Message], count: int | None) -> str:
        """Describe what was expected, and how the scheduled messages differ from it."""
        if found:
            head = f"{count} scheduled message(s) were to have {criteria}, and {len(found)} have:"
            text = _lines(head, self, found)
        else:
            text = f"No scheduled message has {criteria}."
        others = sorted(
            (([*criteria.differences(message)], message) for message in candidates if message not in found),
            key=lambda pair: len(pair[0]),
        )
        if others:
            told = [f"{described(message, self.now)}: {'; '.join(how)}" for how, message in others[:MOST_SHOWN]]
            text += "\nScheduled of this topic, the nearest first:" + "".join(f"\n  {line}" for line in told)
            text += _more(len(others))
        rows = Message.objects.using(self.using).order_by()
        ended = Counter(
            rows.filter(topic=criteria.topic).exclude(state=State.SCHEDULED).values_list("state", flat=True)
        )
        if ended:
            text += "\nOf this topic, not scheduled any more: "
            text += ", ".join(f"{number} {state}" for state, number in sorted(ended.items()))
        rest = Counter(rows.filter(state=State.SCHEDULED).exclude(topic=criteria.topic).values_list("topic", flat=True))
        if rest:
            text += "\nScheduled of other topics: "
            text += ", ".join(f"{number} × {topic}" for topic, number in rest.most_common(2 * MOST_SHOWN))
        if not (candidates or ended or rest):
            text += " No message was scheduled at all."
        return text


class _Made(Delivery):
    """A made delivery, without a message. It has no lease to extend, and keeps its handler's answer."""

    __slots__ = ("answer",)

    answer: BaseException | None

    @property
    def log(self) -> list[Transition]:
        """The moves that the message would have made by now, as far as a task asks for them: there is no record."""
        at = self.claimed.claimed_at
        claim = Transition(at=at, from_state=State.SCHEDULED, to_state=State.RUNNING, actor="worker:testing")
        return [Transition(at=at, to_state=State.SCHEDULED), *[claim] * self.deliveries]

    def _extend_lease(self, lease: float) -> None:
        pass


def _perform(made: list[_Made]) -> None:
    """Call the handler of made deliveries, and end them."""
    error: BaseException | None = None
    try:
        # A time zone or language that a handler activates ends with it.
        contextvars.copy_context().run(call, made[0], None if made[0].handler.batch == 1 else [*made])
    except BaseException as raised:
        error = raised
        raise
    finally:
        for delivery in made:
            delivery.answer = delivery.answered
            if delivery.on_end is not None:
                answered = error or delivery.answered
                delivery.on_end(Ack() if answered is None else outcome_of(delivery, answered))
            delivery.close()


def _lines(head: str, delayq: Delayq, messages: list[Message]) -> str:
    told = "".join(f"\n  {described(message, delayq.now)}" for message in messages[:MOST_SHOWN])
    return head + told + _more(len(messages))


def _more(number: int) -> str:
    return f"\n  … and {number - MOST_SHOWN} more" if number > MOST_SHOWN else ""


# --- for Django's test cases ------------------------------------------------------------------------------------------


@names.refuse_attributes("The test", {"delayq": "DelayqMixin before TestCase"})
class DelayqMixin(TestCase):
    """Gives each test ``self.delayq``. Write it before ``TestCase``, ``TransactionTestCase`` or ``SimpleTestCase``.

    ``delayq`` is there from before ``setUp`` until after the cleanups.
    """

    delayq: Delayq

    def run(self, result: TestResult | None = None) -> TestResult | None:
        with Delayq() as self.delayq:
            return super().run(result)

    def debug(self) -> None:
        with Delayq() as self.delayq:
            super().debug()
