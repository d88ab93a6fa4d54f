"""The Python API: schedule, cancel, reschedule, run now, requeue."""

from __future__ import annotations

import gc
import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import islice
from typing import Any, ParamSpec, TypeVar, overload

from asgiref.sync import sync_to_async
from django.db import router, transaction
from django.db.models import QuerySet
from django.db.models.base import ModelState

from . import actors, publisher, registry, retry, signals, transitions, validation
from .broker.base import Entry
from .durations import Duration
from .exceptions import InvalidMessage, KeyConflict
from .models import Message
from .retry import RetryLike
from .sql.portable import writing
from .sql.rows import Inserted, NewMessage, decoded
from .states import State
from .transitions import BATCH, Answer, Verdict

P = ParamSpec("P")
R = TypeVar("R")


class OnConflict(StrEnum):
    """What to do when a live message has the topic and key already."""

    # Raise KeyConflict.
    ERROR = "error"
    # Leave the old message as it is, and return it.
    KEEP = "keep"
    # Give the old message the new payload, due time and options.
    REPLACE = "replace"
    # Push the old message's due time further out, to the new one; keep its payload.
    DEBOUNCE = "debounce"


# --- schedule ---------------------------------------------------------------------------------------------------------


def schedule_message(
    topic: str,
    payload: Any = None,
    *,
    delay: Duration | None = None,
    due: datetime | None = None,
    queue: str | None = None,
    priority: int = 0,
    key: str | None = None,
    on_conflict: OnConflict | str = OnConflict.ERROR,
    expires: Duration | None = None,
    max_attempts: int | None = None,
    retry: RetryLike = None,
    headers: Mapping[str, Any] | None = None,
    using: str | None = None,
) -> Message:
    """Schedule one message and return it.

    The row is written in the caller's transaction: the message exists exactly when that commits. It is delivered at
    least once, never before its due time, and whatever happens to Redis.

    ``delay`` (a timedelta, seconds, or text such as ``"15m"``; counted on the database's clock) or ``due`` (an aware
    datetime); neither means now. Due times are rounded up to 0.1 ms. ``queue``: default the handler's, else
    ``DELAYQ["DEFAULT_QUEUE"]``. ``priority``: -100 … 100, the greater first among what is due. ``key``: at most one
    live message per topic and key; ``on_conflict`` says what to do about a second ("error", "keep", "replace",
    "debounce"). ``expires``: do not start it any more this long after its due time. ``retry`` (a policy or a list of
    delays, not a function) and ``max_attempts`` override the handler's. ``headers``: a small dict that travels along.

    Raises ``InvalidMessage`` (nothing is written), ``PayloadTooLarge``, and ``KeyConflict``: with "error" when the key
    is taken, with "replace" and "debounce" when its message has begun: it is running (from 10 ms before its due time
    at the earliest), or a delivery of it ended without a word and may still succeed.

    ::

        schedule_message("orders.close", {"order": order.pk}, delay="15m", key=str(order.pk))
    """
    new = _checked(topic, payload, delay, due, queue, priority, key, expires, max_attempts, retry, headers, on_conflict)
    using = using or router.db_for_write(Message)
    if new.key is None:
        inserted = transitions.insert(using, new, actors.current())
        assert inserted is not None
        return _scheduled(using, [(new, inserted)])[0]
    return _schedule_keyed(using, new, new.key)


def schedule_messages(messages: Iterable[Mapping[str, Any]], *, using: str | None = None) -> list[Message]:
    """Schedule many messages at once, all or none; returns them in the same order.

    Each is a dict of ``schedule_message``'s arguments: ``{"topic": …, "payload": …, "delay": …}``. Up to a thousand
    travel in one round trip to the database, and in one to Redis; those with a ``key`` go one by one.

    Raises as ``schedule_message`` does; then nothing is written.
    """
    checked: list[NewMessage] = []
    numbered = enumerate(messages)
    while batch := list(islice(numbered, BATCH)):
        with _collector_resting():
            checked += [_from_mapping(number, message) for number, message in batch]
    using = using or router.db_for_write(Message)
    actor = actors.current()
    plain: list[Message] = []
    keyed: dict[int, Message] = {}
    with writing(using):
        news = [new for new in checked if new.key is None]
        for start in range(0, len(news), BATCH):
            with _collector_resting():
                plain += _scheduled(using, transitions.insert_many(using, news[start : start + BATCH], actor))
        keys = [(new.topic, new.key, place) for place, new in enumerate(checked) if new.key is not None]
        # In one order, so that two such calls cannot wait for each other's keys in a circle.
        for _topic, key, place in sorted(keys):
            keyed[place] = _schedule_keyed(using, checked[place], key)
    if not keyed:
        return plain
    others = iter(plain)
    return [keyed.get(place) or next(others) for place in range(len(checked))]


@contextmanager
def _collector_resting() -> Iterator[None]:
    """For one batch: with thousands of new objects the collector looks again and again at what nobody let go."""
    working = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if working:
            gc.enable()


def _from_mapping(number: int, message: Any) -> NewMessage:
    try:
        if not isinstance(message, (dict, Mapping)) or "topic" not in message:
            raise InvalidMessage("schedule_messages takes dicts with a 'topic' each")
        if not message.keys() <= _OPTIONS:
            raise InvalidMessage(f"unknown: {', '.join(sorted(map(str, message.keys() - _OPTIONS)))}")
        return _checked(**message)
    except InvalidMessage as error:
        raise type(error)(f"message {number}: {error}") from error


def _checked(
    topic: str,
    payload: Any = None,
    delay: Duration | None = None,
    due: datetime | None = None,
    queue: str | None = None,
    priority: int = 0,
    key: str | None = None,
    expires: Duration | None = None,
    max_attempts: int | None = None,
    retry: RetryLike = None,
    headers: Mapping[str, Any] | None = None,
    on_conflict: OnConflict | str = OnConflict.ERROR,
) -> NewMessage:
    """Check everything, so that nothing is half written."""
    topic = validation.topic(topic)
    if delay is not None and due is not None:
        raise InvalidMessage("give delay or due, not both")
    return NewMessage(
        topic,
        validation.queue(registry.default_queue(topic) if queue is None else queue),
        validation.payload(payload),
        validation.headers(headers),
        validation.key(key),
        validation.priority(priority),
        None if due is None else validation.due(due),
        _NONE if delay is None else validation.delay(delay),
        validation.expires(expires),
        None if retry is None else _stored_policy(retry),
        validation.max_attempts(max_attempts),
        _on_conflict(on_conflict),
    )


_NONE = timedelta(0)
_OPTIONS = frozenset(inspect.signature(_checked).parameters)


def _stored_policy(value: RetryLike) -> str:
    try:
        return json.dumps(retry.as_policy(value).to_json())
    except (ValueError, TypeError) as error:
        raise InvalidMessage(f"retry: {error}") from error


def _on_conflict(value: Any) -> OnConflict:
    if type(value) is OnConflict:
        return value
    try:
        return OnConflict(value)
    except ValueError:
        shown = ascii(value[:40]) if isinstance(value, str) else type(value).__name__
        raise InvalidMessage(f"on_conflict is one of {', '.join(OnConflict)}, not {shown}") from None


def _schedule_keyed(using: str, new: NewMessage, key: str) -> Message:
    actor = actors.current()
    # Between the refused insert and the look at the holder of the key, the holder may finish: then the key is free.
    for _round in range(20):
        inserted = transitions.insert(using, new, actor)
        if inserted is not None:
            return _scheduled(using, [(new, inserted)])[0]
        holder = transitions.live_with_key(using, new.topic, key)
        if holder is None:
            continue
        if new.on_conflict == OnConflict.ERROR:
            raise KeyConflict(f"message {holder.pk} of topic {new.topic!r} is live and has this key")
        if new.on_conflict == OnConflict.KEEP:
            holder.existed = True
            return holder
        due_only = new.on_conflict == OnConflict.DEBOUNCE
        answer = transitions.replace(using, holder.pk, new, due_only=due_only, actor=actor)
        if answer:
            publish_moves(using, [answer])
            holder = Message.objects.using(using).get(pk=holder.pk)
            holder.existed = True
            return holder
        if answer.state == State.RUNNING:
            raise KeyConflict(f"message {holder.pk} of topic {new.topic!r} has this key and is running already")
        if answer.state == State.SCHEDULED:
            raise KeyConflict(f"a delivery of message {holder.pk}, which has this key, may still report its success")
    raise KeyConflict(f"the key of topic {new.topic!r} changes hands too quickly")


def _scheduled(using: str, written: Iterable[tuple[NewMessage, Inserted]]) -> list[Message]:
    """The messages of these rows, announced."""
    messages: list[Message] = []
    entries: dict[str, list[Entry]] = {}
    for new, inserted in written:
        messages.append(_message(using, new, inserted))
        entries.setdefault(new.queue, []).append(Entry.at(inserted.id, inserted.due_at, new.priority))
    for queue, group in entries.items():
        publisher.put_on_commit(using, queue, group)
    if signals.message_scheduled.receivers:
        for message in messages:
            _emit_on_commit(
                using,
                signals.message_scheduled,
                id_=message.pk,
                topic=message.topic,
                queue=message.queue,
                due_at=message.due_at,
            )
    return messages


# What a message has that was not scheduled yet, and what has a value of its own in each.
_BLANK = {field.attname: field.get_default() for field in Message._meta.concrete_fields if field.attname != "headers"}


def _message(using: str, new: NewMessage, inserted: Inserted) -> Message:
    """As if it were read, and made as an unpickled one is: the constructor takes longer than all else here."""
    message = Message.__new__(Message)
    state = ModelState()
    state.adding, state.db = False, using
    values = message.__dict__
    values.update(_BLANK)
    values["_state"] = state
    values["id"], values["due_at"], values["created_at"] = inserted
    values["topic"], values["queue"] = new.topic, new.queue
    values["payload"] = decoded(new.payload)
    values["headers"] = {} if new.headers == "{}" else decoded(new.headers)
    values["key"], values["priority"], values["max_attempts"] = new.key, new.priority, new.max_attempts
    if new.expires is not None:
        values["expires_at"] = inserted.due_at + new.expires
    if new.retry is not None:
        values["retry"] = decoded(new.retry)
    return message


def _emit_on_commit(using: str, signal: Any, *, id_: int, **facts: Any) -> None:
    def emit() -> None:
        signals.emit(signal, Message, message_id=id_, using=using, **facts)

    transaction.on_commit(emit, using=using, robust=True)


# --- steer ------------------------------------------------------------------------------------------------------------

Target = int | Message
Verb = Callable[[str, Sequence[int]], list[Answer]]


@overload
def cancel_message(
    target: Target | None = ...,
    *,
    topic: str = ...,
    key: str | None = ...,
    reason: str = ...,
    using: str | None = ...,
) -> Answer: ...
@overload
def cancel_message(target: QuerySet[Message], *, reason: str = ..., using: str | None = ...) -> Counter[Verdict]: ...
def cancel_message(
    target: Target | QuerySet[Message] | None = None,
    *,
    topic: str = "",
    key: str | None = None,
    reason: str = "",
    using: str | None = None,
) -> Answer | Counter[Verdict]:
    """Cancel a message, given by id, by ``topic`` and ``key``, or as a queryset of messages.

    The answer's ``verdict`` is the truth at the commit: CANCELLED (no delivery is running or ended without a word,
    and none will start), REQUESTED (it is running, or begins within 10 ms: a handler that goes on for more than a
    second can see the request, no retry follows), OUTCOME_UNKNOWN (no new start, but a delivery that died may have had
    its effect), TOO_LATE (``answer.state`` says why), NOT_FOUND. An answer is true when something was done. A queryset
    is worked off in batches, each in a transaction of its own, and answered by a count per verdict.
    """
    return _steer(target, topic, key, using, lambda db, ids: transitions.cancel(db, ids, reason=reason))


@overload
def reschedule_message(
    target: Target | None = ...,
    *,
    due: datetime | None = ...,
    delay: Duration | None = ...,
    topic: str = ...,
    key: str | None = ...,
    reason: str = ...,
    using: str | None = ...,
) -> Answer: ...
@overload
def reschedule_message(
    target: QuerySet[Message],
    *,
    due: datetime | None = ...,
    delay: Duration | None = ...,
    reason: str = ...,
    using: str | None = ...,
) -> Counter[Verdict]: ...
def reschedule_message(
    target: Target | QuerySet[Message] | None = None,
    *,
    due: datetime | None = None,
    delay: Duration | None = None,
    topic: str = "",
    key: str | None = None,
    reason: str = "",
    using: str | None = None,
) -> Answer | Counter[Verdict]:
    """Give a scheduled message another due time: ``due``, or ``delay`` from now. Targets as in ``cancel_message``.

    RESCHEDULED, TOO_LATE (it runs or is finished: ``answer.state``) or NOT_FOUND. An ``expires`` moves along.
    Raises ``InvalidMessage`` for an impossible time.
    """
    if (due is None) == (delay is None):
        raise InvalidMessage("reschedule_message needs either due or delay")
    at = None if due is None else validation.due(due)
    wait = timedelta(0) if delay is None else validation.delay(delay)
    return _steer(
        target,
        topic,
        key,
        using,
        lambda db, ids: transitions.reschedule(db, ids, due=at, delay=wait, reason=reason),
    )


@overload
def run_message_now(
    target: Target | None = ...,
    *,
    topic: str = ...,
    key: str | None = ...,
    reason: str = ...,
    using: str | None = ...,
) -> Answer: ...
@overload
def run_message_now(target: QuerySet[Message], *, reason: str = ..., using: str | None = ...) -> Counter[Verdict]: ...
def run_message_now(
    target: Target | QuerySet[Message] | None = None,
    *,
    topic: str = "",
    key: str | None = None,
    reason: str = "",
    using: str | None = None,
) -> Answer | Counter[Verdict]:
    """Make a scheduled message due now. Targets and answers as in ``reschedule_message``."""
    return _steer(
        target, topic, key, using, lambda db, ids: transitions.reschedule(db, ids, reason=reason or "run now")
    )


@overload
def requeue_message(
    target: Target | None = ...,
    *,
    delay: Duration | None = ...,
    topic: str = ...,
    key: str | None = ...,
    reason: str = ...,
    using: str | None = ...,
) -> Answer: ...
@overload
def requeue_message(
    target: QuerySet[Message], *, delay: Duration | None = ..., reason: str = ..., using: str | None = ...
) -> Counter[Verdict]: ...
def requeue_message(
    target: Target | QuerySet[Message] | None = None,
    *,
    delay: Duration | None = None,
    topic: str = "",
    key: str | None = None,
    reason: str = "",
    using: str | None = None,
) -> Answer | Counter[Verdict]:
    """Schedule a dead, expired or cancelled message again, due now or after ``delay``; its attempts start anew.

    REQUEUED, TOO_LATE (it is live, or was consumed: ``answer.state``), KEY_TAKEN (another live message has its topic
    and key) or NOT_FOUND. By ``topic`` and ``key`` the youngest finished message with that key is meant.
    """
    wait = timedelta(0) if delay is None else validation.delay(delay)
    return _steer(
        target,
        topic,
        key,
        using,
        lambda db, ids: transitions.requeue(db, ids, delay=wait, reason=reason),
        finished=True,
    )


def _steer(
    target: Target | QuerySet[Message] | None,
    topic: str,
    key: str | None,
    using: str | None,
    verb: Verb,
    *,
    finished: bool = False,
) -> Answer | Counter[Verdict]:
    if isinstance(target, QuerySet):
        return _act_on_queryset(target, using, verb)
    using = using or (target._state.db if isinstance(target, Message) else None) or router.db_for_write(Message)
    number = _find(using, topic, key, finished) if target is None else _id(target)
    if number is None:
        return Answer(None, Verdict.NOT_FOUND)
    answers = verb(using, [number])
    publish_moves(using, answers)
    return answers[0]


def _id(target: Any) -> int:
    number = target.pk if isinstance(target, Message) else target
    if isinstance(number, bool) or not isinstance(number, int) or not 0 < number < 2**63:
        raise InvalidMessage(f"not the id of a message: {type(target).__name__}")
    return number


def _find(using: str, topic: str, key: str | None, finished: bool) -> int | None:
    if key is None:
        raise InvalidMessage("name the message by its id, or by topic and key")
    topic, checked = validation.topic(topic), validation.key(key)
    assert checked is not None
    live = transitions.live_with_key(using, topic, checked)
    if live is not None or not finished:
        return None if live is None else live.pk
    rows = Message.objects.using(using).filter(topic=topic, key=checked)
    return rows.order_by("-pk").values_list("pk", flat=True).first()


def _act_on_queryset(queryset: QuerySet[Message], using: str | None, verb: Verb) -> Counter[Verdict]:
    # Only an alias that was named: a router may have sent the reading to a replica.
    using = using or getattr(queryset, "_db", None) or router.db_for_write(Message)
    counts: Counter[Verdict] = Counter()
    for ids in _batches(queryset.using(using)):
        answers = verb(using, ids)
        publish_moves(using, answers)
        counts.update(answer.verdict for answer in answers)
    return counts


def _batches(queryset: QuerySet[Message]) -> Iterator[list[int]]:
    """The ids of a queryset by key, so that rows which leave it on the way disturb nothing."""
    if queryset.query.is_sliced:
        yield list(queryset.values_list("pk", flat=True))
        return
    last = 0
    while True:
        ids = list(queryset.filter(pk__gt=last).order_by("pk").values_list("pk", flat=True)[:BATCH])
        if not ids:
            return
        yield ids
        last = ids[-1]


def publish_moves(using: str, answers: Sequence[Answer]) -> None:
    """On commit, tell Redis and the receivers of signals what became of messages."""
    gone: dict[str, list[int]] = {}
    for answer in answers:
        moved = answer.moved
        if moved is None:
            continue
        if moved.after == State.SCHEDULED:
            publisher.put_on_commit(using, moved.queue, [Entry.at(moved.id, moved.due_at, moved.priority)])
        elif moved.after == State.CANCELLED:
            gone.setdefault(moved.queue, []).append(moved.id)
            _emit_on_commit(using, signals.message_cancelled, id_=moved.id, topic=moved.topic, queue=moved.queue)
    for queue, ids in gone.items():
        publisher.remove_on_commit(using, queue, ids)


# --- the same for async code ------------------------------------------------------------------------------------------


def _twin(function: Callable[P, R]) -> Any:
    return sync_to_async(function, thread_sensitive=True)


async def aschedule_message(topic: str, payload: Any = None, **options: Any) -> Message:
    """``schedule_message`` for async code; the same arguments."""
    message: Message = await _twin(schedule_message)(topic, payload, **options)
    return message


async def aschedule_messages(messages: Iterable[Mapping[str, Any]], *, using: str | None = None) -> list[Message]:
    """``schedule_messages`` for async code."""
    scheduled: list[Message] = await _twin(schedule_messages)(messages, using=using)
    return scheduled


async def acancel_message(target: Any = None, **options: Any) -> Any:
    """``cancel_message`` for async code; the same arguments."""
    return await _twin(cancel_message)(target, **options)


async def areschedule_message(target: Any = None, **options: Any) -> Any:
    """``reschedule_message`` for async code; the same arguments."""
    return await _twin(reschedule_message)(target, **options)


async def arun_message_now(target: Any = None, **options: Any) -> Any:
    """``run_message_now`` for async code; the same arguments."""
    return await _twin(run_message_now)(target, **options)


async def arequeue_message(target: Any = None, **options: Any) -> Any:
    """``requeue_message`` for async code; the same arguments."""
    return await _twin(requeue_message)(target, **options)
