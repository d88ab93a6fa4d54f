"""``Delayq``: all that tests do with the queue. The pytest fixture and the mixin of ``TestCase`` give out one."""

from __future__ import annotations

import contextvars
import json
from collections import Counter
from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any, Self, Unpack

from django.db import connections, router

from ..api import pausing
from ..core import clock
from ..core.durations import Duration
from ..core.outcomes import Ack
from ..core.states import State
from ..core.twins import async_twin
from ..models import Message, Transition
from ..project import conf, registry, validation
from ..record.sql.rows import Claimed, LeaseRenewal
from ..worker.parts.delivery import Delivery
from ..worker.run.executor import call, outcome_of
from . import topics
from .criteria import Criteria, Sought, described
from .deliverer import Deliverer, Ran, at_work, must_be_raised, raise_error
from .shifted_clock import QueueClock
from .transactions import call_on_commit_functions, is_in_own_transaction, notice_calls
from .without_redis import use_no_redis

# Deliveries that one drain makes at most: a handler that schedules its own message for now would go on for ever.
MOST = 1000
# Messages that a failure shows.
MOST_SHOWN = 5

_used: list[Delayq] = []

# At the import: a class of tests, and a fixture, may call functions before a helper begins.
notice_calls()


def elsewhere() -> Collection[str]:
    """Return the topics that the helper in use knows to be handled elsewhere."""
    return _used[-1].elsewhere if _used else ()


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
        self._former = (clock.of_tests, conf.in_tests)
        clock.of_tests = self._clock.now
        use_no_redis(True)
        _used.append(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        _used.remove(self)
        clock.of_tests, in_tests = self._former
        use_no_redis(in_tests)

    # --- time ---------------------------------------------------------------------------------------------------------

    @property
    def now(self) -> datetime:
        """The time by the queue's clock: Python's time, and the time travelled."""
        return self._clock.now()

    def travel(self, to: Duration | datetime) -> datetime:
        """Move the queue's clock ahead: by a duration such as ``"15m"``, or to an aware datetime. Return the time.

        Nothing runs. The clock of Python stays as it is: the queue follows freezegun and time-machine, not they the
        queue.
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
        if clock.of_tests != self._clock.now:
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
            delivery = deliverer.claim_next(queue) if len(ran) < limit else None
            if delivery is not None:
                ran.append(deliverer.run(delivery))
                if raise_errors or must_be_raised(ran[-1].error):
                    raise_error(ran[-1])
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

        ``count``: fail unless exactly so many match. The failure says which messages there were instead.
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
    ) -> None:
        """Call the handler of a topic, sync or async, with a made delivery: no message, no record, no query.

        What it raises is raised. The payload and the headers go through JSON, as in life. A transactional handler gets
        no transaction of its own, and no middleware surrounds the handler. ``deliveries`` is ``attempt`` by default.
        """
        handler = registry.handlers()[topics.check(topic, ())]
        if attempt < 1 or (deliveries is not None and deliveries < attempt):
            raise ValueError("attempt counts from 1, and deliveries is at least attempt")
        made = Claimed(
            id=message_id,
            topic=topic,
            queue=validation.queue(registry.default_queue(topic) if queue is None else queue),
            key=validation.key(key),
            priority=validation.priority(handler.priority if priority is None else priority),
            payload=json.loads(validation.payload(payload)),
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
        delivery = _Made(made, handler, self.using)
        delivery.cancel_requested = cancel_requested
        delivery.begin()
        error: BaseException | None = None
        try:
            # A time zone or language that a handler activates ends with it.
            contextvars.copy_context().run(call, delivery)
        except BaseException as raised:
            error = raised
            raise
        finally:
            if delivery.on_end is not None:
                delivery.on_end(Ack() if error is None else outcome_of(delivery, error))
            delivery.close()

    # --- from async code ----------------------------------------------------------------------------------------------

    adrain = async_twin(drain)
    ascheduled = async_twin(scheduled)
    aassert_scheduled = async_twin(assert_scheduled)
    aassert_not_scheduled = async_twin(assert_not_scheduled)
    aperform = async_twin(perform)

    # --- the parts ----------------------------------------------------------------------------------------------------

    def _look(self, topic: str | None, wanted: Sought) -> tuple[Criteria, list[Message], list[Message]]:
        """Return the criteria, all scheduled messages of the topic (None: of all), and those of them that match."""
        if topic is not None:
            topics.check(topic, self.elsewhere)
        criteria = Criteria.of(self.now, topic, wanted)
        call_on_commit_functions()
        rows = Message.objects.using(self.using).filter(state=State.SCHEDULED).order_by("due_at", "id")
        candidates = list(rows if topic is None else rows.filter(topic=topic))
        return criteria, candidates, [message for message in candidates if not criteria.differences(message)]

    def _is_any_due(self, queue: str | None) -> bool:
        rows = Message.objects.using(self.using).filter(state=State.SCHEDULED, due_at__lte=self.now)
        rows = rows.exclude(topic__in=self.elsewhere).exclude(queue__in=pausing.paused(self.using))
        return (rows if queue is None else rows.filter(queue=queue)).exists()

    def _failure(self, criteria: Criteria, candidates: list[Message], found: list[Message], count: int | None) -> str:
        if found:
            head = f"{count} scheduled message(s) were to have {criteria}, and {len(found)} have:"
            text = _lines(head, self, found)
        else:
            text = f"No scheduled message has {criteria}."
        others = sorted(
            ((criteria.differences(message), message) for message in candidates if message not in found),
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
    """A delivery of no message. It has no lease to extend."""

    __slots__ = ()

    @property
    def log(self) -> list[Transition]:
        """The moves that the message would have made by now, as far as a task asks for them: there is no record."""
        at = self.claimed.claimed_at
        claim = Transition(at=at, from_state=State.SCHEDULED, to_state=State.RUNNING, actor="worker:testing")
        return [Transition(at=at, to_state=State.SCHEDULED), *[claim] * self.deliveries]

    def _extend(self, holdings: list[LeaseRenewal]) -> dict[int, bool]:
        return {holding.id: self.cancel_requested for holding in holdings}


def _lines(head: str, delayq: Delayq, messages: list[Message]) -> str:
    told = "".join(f"\n  {described(message, delayq.now)}" for message in messages[:MOST_SHOWN])
    return head + told + _more(len(messages))


def _more(number: int) -> str:
    return f"\n  … and {number - MOST_SHOWN} more" if number > MOST_SHOWN else ""
