"""Schedules messages: their rows are written in the caller's transaction, and Redis is told on commit."""

from __future__ import annotations

import gc
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any, NamedTuple, Unpack

from django.conf import settings
from django.db import IntegrityError, router, transaction

from .. import middleware, signals
from ..broker import publisher
from ..broker.base import Entry
from ..core import actors, names, values
from ..core.chunks import chunks
from ..core.clock import to_us
from ..core.durations import brief
from ..core.exceptions import InvalidMessage, KeyConflict, PayloadTooLarge
from ..core.own_header import OWN_HEADER
from ..core.states import FINAL, State
from ..core.twins import async_twin
from ..models import Message
from ..models.messages import IN_THE_WAY
from ..project import conf, registry, validation
from ..project.message_options import MessageDict, MessageOptions, OnConflict
from ..record import held_keys, transitions
from ..record.sql import statements
from ..record.sql.moves import writing
from ..record.sql.rows import ALIKE_FROM, Inserted, NewMessage, decoded
from . import asking
from .actions import make_way, publish_moves

logger = logging.getLogger("django_delayq")

# --- checked rows of the arguments, before anything is written --------------------------------------------------------

# Names of the arguments in other queues, and names that people guess first.
_MEANT = {
    **names.DELAYS,
    **names.DUE_TIMES,
    **dict.fromkeys(("args", "kwargs", "data", "body", "message"), "payload"),
    **dict.fromkeys(("task_id", "job_id", "unique_key", "queueing_lock"), "key"),
    **dict.fromkeys(("expires_in", "max_age", "ttl"), "expires"),
    **dict.fromkeys(("max_retries", "retries"), "max_attempts={more}"),
    **dict.fromkeys(("queue_name", "cluster", "exchange", "routing_key"), "queue"),
    **dict.fromkeys(("time_limit", "soft_time_limit", "job_timeout"), "timeout"),
    "at_front": "priority",
    "retry_policy": "retry",
    **dict.fromkeys(("link", "chain", "depends_on", "hook", "on_success", "then"), names.NEXT),
    **dict.fromkeys(("dead_letter", "link_error", "on_error", "on_failure"), "on_dead"),
    **dict.fromkeys(("lock", "concurrency_key"), "limit_key, and limit=1 at @handler"),
    **dict.fromkeys(("group", "meta", "tags"), "it into headers or into the payload"),
    **dict.fromkeys(("ignore_result", "result_ttl"), "keep_result at @handler"),
    **dict.fromkeys(("eager", "immediate", "is_async", "sync"), 'DELAYQ["TESTING"] for tests'),
    **dict.fromkeys(("cron", "every", "repeat", "repeats"), "@recurring, or create_schedule()"),
    **dict.fromkeys(("compression", "failure_ttl", "serializer", "shadow"), names.NOTHING),
}
# Any other unknown argument is probably meant for the handler.
_OTHERWISE = "what the handler needs is in the payload, a dict"


# The check of each option. An option that is None counts as not given.
_CHECKS = values.checks_of(MessageOptions)
_NAMES = _CHECKS.keys() | {"topic", "payload"}
# The choices about a key. A message without a key may have only their defaults. None is no choice.
_OF_KEYS = frozenset({"on_conflict", "unique"})
# The choices about what follows an end. They stand in a header.
_OF_ENDS = frozenset({"on_dead", "on_expired"})


def checked(topic: Any, payload: Any, options: Mapping[str, Any]) -> NewMessage:
    """Check the arguments of one call. Raises ``InvalidMessage``, and ``TypeError`` for an unknown option."""
    if not options.keys() <= _CHECKS.keys():
        raise TypeError(
            f"schedule_message() has no such argument: {names.unknown(options, _NAMES, _MEANT, _OTHERWISE)}"
        )
    handler = registry.find(topic) if isinstance(topic, str) else None
    # The topic of a handler was checked when that was registered.
    topic = validation.topic(topic) if handler is None else handler.topic
    given = {name: value for name, value in options.items() if value is not None or name in _OF_KEYS}
    if "delay" in given and "due_at" in given:
        raise InvalidMessage("give delay or due_at, not both")
    columns: dict[str, Any] = {}
    loaded = payload
    if handler is not None:
        columns = {"priority": handler.priority, "queue": handler.queue, "expires": handler.expires}
        payload, loaded = handler.stored(payload)
    columns |= {name: _CHECKS[name](value) for name, value in given.items()}
    columns["queue"] = columns.get("queue") or conf.get().DEFAULT_QUEUE
    columns["key_deliveries"], columns["key_for"] = columns.pop("unique", (None, None))
    if not _OF_ENDS.isdisjoint(given):
        own = {name: columns.pop(name) for name in _OF_ENDS if name in columns}
        columns["headers"] = validation.headers(decoded(columns.get("headers", "{}")) | {OWN_HEADER: own})
    text, value = validation.payload_and_value(payload)
    new = NewMessage(payload=text, value=value, topic=topic, **columns)
    if not _OF_KEYS.isdisjoint(given):
        _check_choices(new)
    if settings.DEBUG:
        asking.ask("A message is scheduled for", new.topic, new.queue)
    if handler is None or (handler.limit_key is None and new.limit_key is None):
        return new
    return _with_limit_key(new, handler, loaded, options.get("headers"))


def _check_choices(new: NewMessage) -> None:
    """Refuse choices about a key for a message without one, and a merge of a payload that cannot be joined."""
    choice = OnConflict(new.on_conflict)
    if new.key is None and choice != OnConflict.ERROR:
        raise InvalidMessage(f"on_conflict={str(choice)!r} needs a key: without one no message conflicts with another")
    if new.key is None and (new.key_deliveries, new.key_for) != (None, None):
        raise InvalidMessage("unique needs a key: without one there is nothing to hold")
    if choice.merges and not isinstance(new.content, list | dict | None):
        kind = type(new.content).__name__
        raise InvalidMessage(f"on_conflict={str(choice)!r} joins lists or dicts, and the payload is of type {kind}")


@dataclass(frozen=True, slots=True)
class ToSchedule:
    """A message that is about to be scheduled, as ``limit_key`` receives it."""

    topic: str
    queue: str
    key: str | None
    priority: int
    payload: Any
    headers: Mapping[str, Any]


def _with_limit_key(
    new: NewMessage, handler: registry.Handler, payload: Any, headers: Mapping[str, Any] | None
) -> NewMessage:
    """Return the message with the limit key of the call, or else with the one that its handler finds."""
    if handler.limit is None:
        raise InvalidMessage(f"limit_key has no effect: the handler of {new.topic!r} has no limit and no rate")
    if new.limit_key is not None or handler.limit_key is None:
        return new
    try:
        found = handler.limit_key(ToSchedule(new.topic, new.queue, new.key, new.priority, payload, headers or {}))
        return new if found is None else new._replace(limit_key=validation.limit_key(found))
    except Exception as error:
        error.add_note(f"limit_key of @handler({new.topic!r})")
        raise


class ManyChecks:
    """Checks the messages of one call. What several of them have in common is checked once."""

    # What is checked for each message.
    _OWN = frozenset({"payload", "due_at", "key"})

    def __init__(self, most_kinds: int) -> None:
        """If a call has more kinds of messages than ``most_kinds``, only the first ones are remembered."""
        self._most_kinds = most_kinds
        # What the messages of each kind have in common, by whether they have a key, and by the names, types and values
        # of all other arguments. Without the types True would pass for the priority 1.
        self._kinds: dict[tuple[object, ...], tuple[Any, ...]] = {}
        # The due time that was checked last, as it was given and as it is written: many messages often share one.
        self._due: tuple[Any, datetime | None] = (None, None)

    def message(self, number: int, message: Any) -> NewMessage:
        """Check the message with this number. Raises as ``schedule_message`` does, and names the number."""
        try:
            if not isinstance(message, (dict, Mapping)) or "topic" not in message:
                raise InvalidMessage("schedule_messages takes a list of dicts with a 'topic' each")
            return self._message(message)
        except InvalidMessage as error:
            if type(error) not in (InvalidMessage, PayloadTooLarge):
                # A class of the project may be made of other arguments.
                error.add_note(f"message {number}")
                raise
            raise type(error)(f"message {number}: {error}") from error

    def _message(self, message: Mapping[str, Any]) -> NewMessage:
        """Check one message; take what its kind has in common from the first message of that kind."""
        due_at, key = message.get("due_at"), message.get("key")
        common = [(name, type(value), value) for name, value in message.items() if name not in self._OWN]
        kind = (key is None, *common)
        try:
            alike = self._kinds.get(kind)
        except TypeError:
            # A value cannot be looked up: headers, for example.
            return _of_dict(message)
        if alike is not None and (due_at is None or message.get("delay") is None):
            if due_at is not self._due[0]:
                self._due = (due_at, None if due_at is None else validation.due(due_at))
            text, value = validation.payload_and_value(message.get("payload"))
            return NewMessage(text, value, self._due[1], validation.key(key), *alike)
        new = _of_dict(message)
        handler = registry.find(new.topic)
        is_alike = handler is None or (handler.limit_key is None and handler.payload is None)
        if len(self._kinds) < self._most_kinds and is_alike and not OnConflict(new.on_conflict).merges:
            self._kinds[kind] = new[ALIKE_FROM:]
        return new


def _of_dict(message: Mapping[str, Any]) -> NewMessage:
    """Check one dict of ``schedule_messages``."""
    if not message.keys() <= _NAMES:
        raise InvalidMessage(f"unknown: {names.unknown(message, _NAMES, _MEANT, _OTHERWISE)}")
    options = {name: value for name, value in message.items() if name not in ("topic", "payload")}
    return checked(message["topic"], message.get("payload"), options)


# --- the calls --------------------------------------------------------------------------------------------------------


class Bulk(NamedTuple):
    """The numbers of messages in the steps of ``schedule_messages``."""

    # Messages that travel to the database together.
    inserted: int = 5000
    # The garbage collector rests while this number of messages is checked or written: it would scan all of their
    # objects again and again, and all of them are in use.
    collected: int = 10_000
    # Kinds of messages whose common arguments are checked once.
    kinds: int = 1000


BULK = Bulk()


def schedule_message(
    topic: str, payload: Any = None, *, using: str | None = None, **options: Unpack[MessageOptions]
) -> Message:
    """Schedule one message and return it.

    The row is written in the caller's transaction: the message exists exactly when that commits. It is delivered at
    least once and never before its due time, whatever happens to Redis.

    ``delay``, ``due_at``
        A timedelta, seconds, or text such as ``"15m"``, counted on the database's clock; or an aware datetime. Without
        either it is due now. Due times are rounded up to 0.1 ms.
    ``queue``, ``priority``
        By default the handler's, else ``DELAYQ["DEFAULT_QUEUE"]`` and 0. Priorities go from -100 to 100; among due
        messages the greater one goes first.
    ``key``, ``on_conflict``, ``unique``
        One message at a time holds a topic and key. ``on_conflict`` chooses the fate of a second one ("error", "keep",
        "replace", "debounce", "merge", "merge_debounce"), and ``message.existed`` tells whether another one was there.
        ``unique`` says how long this one holds the key: while it is live ("live"), only until its delivery begins
        ("scheduled"), or also for a time after its end ("1h").
    ``expires``
        Do not start it any more this long after its due time. By default the handler's; False: it never expires.
    ``retry``, ``max_attempts``
        A policy, a list of delays, or False for never; no function. It overrides the handler's, which keeps its choice
        of exceptions. ``max_attempts`` gives up earlier than the policy, and never later.
    ``timeout``, ``lease``
        They override the handler's. ``timeout=False``: no timeout.
    ``headers``
        A small dict that travels along.
    ``limit_key``
        The limits of the handler count the messages with this text by themselves. The default is what the handler's
        ``limit_key`` returns.
    ``on_dead``, ``on_expired``
        The topic of the message that follows when this one ends dead, or expired. By default the handler's; False: none
        follows.

    Raises ``InvalidMessage`` (nothing is written), ``PayloadTooLarge``, and ``KeyConflict``: with "error" when the key
    is taken; with a choice that changes the other message, when that runs (a worker may claim it a moment before its
    due time), has finished, or may still succeed after a crash. A handler may schedule the next message under the key
    of its own.

    ::

        schedule_message("orders.close", {"order": order.pk}, delay="15m", key=str(order.pk))
    """
    using = using or router.db_for_write(Message)
    message = write(using, topic, payload, options)
    publisher.run_at_once(using, [message.pk])
    return message


def write(
    using: str,
    topic: str,
    payload: Any,
    options: MessageOptions,
    join: Callable[[Any, Any], Any] | None = None,
) -> Message:
    """Schedule one message. The caller has it run at once, which in tests may be in that call.

    ``join`` joins two payloads where the choice is to merge them.
    """
    new = checked(topic, payload, options)
    if join is not None:
        new = new._replace(join=join)
    # An impossible DELAYQ["REDIS"] raises before anything is written.
    publisher.get(using)
    return write_checked(using, new)


def write_checked(using: str, new: NewMessage) -> Message:
    """Schedule a message as ``write`` does."""
    if chain := middleware.chain():
        return _inside(chain, [new], _schedule_each, using)[0]
    return _schedule(using, new)


def _schedule_each(using: str, news: list[NewMessage]) -> list[Message]:
    return [_schedule(using, new) for new in news]


def _schedule(using: str, new: NewMessage) -> Message:
    """Write a message, whose key another one may have, and have Redis told about it on commit."""
    if new.key is not None:
        return _schedule_with_key(using, new, new.key)
    inserted = transitions.insert(using, new, actors.current())
    assert inserted is not None
    return _scheduled(using, [(new, inserted)])[0]


def _schedule_with_key(using: str, new: NewMessage, key: str) -> Message:
    """Write a message that has a key, or return the one that is in its way. Raises ``KeyConflict``."""
    actor, own = actors.current(), actors.own_message(using, new.topic, key)
    new = new._replace(own=own)
    # Between the refused insert and the query for the message in its way, that one may move: then the key may be free.
    for _round in range(held_keys.KEY_ROUNDS):
        inserted = transitions.insert(using, new, actor)
        if inserted is not None:
            return _scheduled(using, [(new, inserted)])[0]
        if own is None:
            existing = _resolve(using, new, held_keys.in_the_way(using, new.topic, key))
        else:
            existing = _next_of_own(using, new, key, own)
        if existing is not None:
            existing.existed = True
            return existing
    raise KeyConflict(f"the key of topic {new.topic!r} changes hands too quickly")


def _inside(
    chain: Sequence[middleware.Middleware],
    news: list[NewMessage],
    write: Callable[..., list[Message]],
    *given: Any,
) -> list[Message]:
    """Write new messages inside of the middleware, with the headers that it gives them. ``write`` gets them last."""
    drafts = [middleware.Draft(new.topic, new.queue, new.key, decoded(new.headers)) for new in news]

    def schedule() -> list[Message]:
        headers = [validation.headers(draft.headers) for draft in drafts]
        written = write(*given, [new._replace(headers=own) for new, own in zip(news, headers, strict=True)])
        for draft, message in zip(drafts, written, strict=True):
            draft.id = message.pk
        return written

    return middleware.run_inside((one.scheduling(drafts) for one in chain), schedule)


def schedule_messages(messages: Iterable[MessageDict], *, using: str | None = None) -> list[Message]:
    """Schedule many messages at once, all or none; returns them in the same order.

    Each is a dict of ``schedule_message``'s arguments: ``{"topic": …, "payload": …, "delay": …}``. A generator must
    make each dict, and its payload, anew: many are collected before the first is read. Up to five thousand travel
    together to the database, and up to a thousand to Redis, also where their ``key`` is taken.

    Raises as ``schedule_message`` does; then nothing is written.
    """
    return write_all(using, messages)


def write_all(using: str | None, messages: Iterable[MessageDict], bulk: Bulk = BULK) -> list[Message]:
    """Schedule many messages as ``schedule_messages`` does."""
    checked: list[NewMessage] = []
    numbered = enumerate(messages)
    check = ManyChecks(bulk.kinds)
    while unchecked := list(islice(numbered, bulk.collected)):
        with _without_garbage_collection():
            checked += [check.message(number, message) for number, message in unchecked]
    return write_all_checked(using or router.db_for_write(Message), checked, bulk)


def write_all_checked(using: str, checked: list[NewMessage], bulk: Bulk = BULK) -> list[Message]:
    """Schedule messages that were checked before, all or none."""
    publisher.get(using)
    if chain := middleware.chain():
        written = _inside(chain, checked, _schedule_all, using, bulk)
    else:
        written = _schedule_all(using, bulk, checked)
    publisher.run_at_once(using, [message.pk for message in written])
    return written


def _schedule_all(using: str, bulk: Bulk, checked: list[NewMessage]) -> list[Message]:
    """Write messages that were checked before, all or none; return them in the order of the call."""
    if len(checked) == 1 and checked[0].key is None:
        # One statement does it.
        return [_schedule(using, checked[0])]
    actor = actors.current()
    plain: list[Message] = []
    keyed: dict[int, Message] = {}
    with writing(using):
        news = [new for new in checked if new.key is None]
        for many in chunks(news, bulk.collected):
            with _without_garbage_collection():
                for some in chunks(many, bulk.inserted):
                    plain += _scheduled(using, transitions.insert_many(using, some, actor))
        if len(news) < len(checked):
            keyed = _schedule_all_keyed(using, bulk, checked, actor)
    if not keyed:
        return plain
    others = iter(plain)
    return [keyed.get(place) or next(others) for place in range(len(checked))]


def _schedule_all_keyed(using: str, bulk: Bulk, checked: Sequence[NewMessage], actor: str) -> dict[int, Message]:
    """Schedule those messages that have a key; return them by their positions in the call.

    Messages whose keys are free are written together, and so are most of those changed that have the other keys. The
    rest goes one by one: each asks what is in its way.
    """
    # Keys are taken always in the same order, so that two such calls cannot wait for each other's in a circle.
    keys = sorted((new.topic, new.key, place) for place, new in enumerate(checked) if new.key is not None)
    changing = {(topic, key) for topic, key, place in keys if _changes(checked[place])}
    done: dict[int, Message] = {}
    taken: set[held_keys.Key] | None = None
    # When somebody has taken a key meanwhile, all keys are looked at again before any is locked: a call must not wait
    # while it holds a lock.
    while (held := held_keys.lock_keys(using, [(topic, key) for topic, key, _place in keys], changing)) != taken:
        taken = held
        first: dict[tuple[str, str], int] = {}
        for topic, key, place in keys:
            if (topic, key) not in taken and actors.own_message(using, topic, key) is None:
                first.setdefault((topic, key), place)
        written = _insert_free(using, bulk, [checked[place] for place in first.values()], actor)
        if written is not None:
            done |= zip(first.values(), _scheduled(using, written), strict=True)
            break
    left = {place: checked[place] for _topic, _key, place in keys if place not in done}
    done |= _resolve_all(using, left) if left else {}
    return done | {place: _schedule(using, new) for place, new in left.items() if place not in done}


def _resolve_all(using: str, news: Mapping[int, NewMessage]) -> dict[int, Message]:
    """Resolve together the conflicts of calls, given by their positions, with the messages that have their keys.

    Left out are calls that look again one by one: their key may be free, their message cannot be changed, or another
    call has that key too.
    """
    calls: defaultdict[held_keys.Key, list[int]] = defaultdict(list)
    for place, new in news.items():
        if new.key is not None and actors.own_message(using, new.topic, new.key) is None:
            calls[new.topic, new.key].append(place)
    found, now = held_keys.all_in_the_way(using, calls), statements(using).now()
    others = {key: rows[0] for key, rows in found.items() if not held_keys.is_over(rows[0], now)}
    resolved = _resolved(using, [(other, [news[place] for place in calls[key]]) for key, other in others.items()])
    for message in resolved.values():
        message.existed = True
    return {place: resolved[other.pk] for key, other in others.items() if other.pk in resolved for place in calls[key]}


def _resolved(using: str, conflicts: Iterable[tuple[Message, Sequence[NewMessage]]]) -> dict[int, Message]:
    """Keep or change messages, as the calls choose that want their keys. Return those by id that are."""
    kept, waiting = list[int](), list[int]()
    changes: defaultdict[Change, dict[int, NewMessage]] = defaultdict(dict)
    for other, news in conflicts:
        if all(new.on_conflict == OnConflict.KEEP for new in news):
            (waiting if any(_has_to_wait(new, other) for new in news) else kept).append(other.pk)
        elif len(news) == 1 and other.state not in FINAL and news[0].on_conflict in _CHANGES:
            changes[_CHANGES[news[0].on_conflict]][other.pk] = news[0]
    rows = Message.objects.using(using)
    resolved = rows.filter(IN_THE_WAY).in_bulk(kept) | _keep_waiting(using, waiting, is_next=False)
    for change, some in changes.items():
        done = [answer for answer in change(using, some) if answer]
        publish_moves(using, [answer.moved for answer in done])
        resolved |= rows.in_bulk([answer.id for answer in done])
    return resolved


def _changes(new: NewMessage) -> bool:
    """Return whether the call locks a waiting message that holds its key."""
    is_to_wait = new.on_conflict == OnConflict.KEEP and new.key_deliveries is not None
    return is_to_wait or new.on_conflict in _CHANGES


def _insert_free(
    using: str, bulk: Bulk, news: Sequence[NewMessage], actor: str
) -> list[tuple[NewMessage, Inserted]] | None:
    """Write messages whose keys were free a moment ago; None, and none, when another transaction has just taken one."""
    try:
        with transaction.atomic(using=using):
            parts = [transitions.insert_many(using, some, actor) for some in chunks(news, bulk.inserted)]
            return [row for part in parts for row in part]
    except IntegrityError:
        return None


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Have the garbage collector rest in this block: ``Bulk.collected`` says why."""
    working = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if working:
            gc.enable()


def _next_of_own(using: str, new: NewMessage, key: str, own: int) -> Message | None:
    """Return the message that is the next one of ``own``, whose handler makes this call; None when it has moved.

    An earlier delivery has scheduled it, or somebody else while ``own`` did not hold the key.
    """
    following = held_keys.next_of(using, own)
    if following is not None:
        return _keep_or_change(using, new, following)
    existing = _resolve(using, new, held_keys.holder(using, new.topic, key))
    if existing is not None:
        held_keys.note_next(using, own, existing.pk)
    return existing


def _resolve(using: str, new: NewMessage, other: Message | None) -> Message | None:
    """Resolve the conflict with a message that has the key; None when it is over, and the key may be free."""
    if other is None or make_way(using, [other]):
        return None
    return _keep_or_change(using, new, other)


# What the choices do to a waiting message, without the choices that leave it as it is.
Change = Callable[[str, Mapping[int, NewMessage]], list[transitions.Answer]]
_CHANGES: dict[str, Change] = {
    OnConflict.REPLACE: transitions.replace,
    **dict.fromkeys((OnConflict.DEBOUNCE, OnConflict.MERGE, OnConflict.MERGE_DEBOUNCE), transitions.join),
}


def _keep_or_change(using: str, new: NewMessage, other: Message) -> Message | None:
    """Keep or change the message that has the key, as ``on_conflict`` says, and return it.

    None when it has moved meanwhile: then the key may be free. Raises ``KeyConflict``; but a handler that schedules
    under its own key is in no conflict with its next message, which it keeps.
    """
    choice, state = new.on_conflict, State(other.state)
    if choice == OnConflict.KEEP or (new.own is not None and state in FINAL):
        return _keep(using, new, other)
    if choice in _CHANGES and state not in FINAL:
        [answer] = _CHANGES[choice](using, {other.pk: new})
        if answer:
            publish_moves(using, [answer.moved])
            return Message.objects.using(using).get(pk=other.pk)
        if answer.state is None or answer.state in FINAL:
            # It has ended, or is in the way no more: the key is free, or another message has taken it.
            return None
        state = answer.state
    if new.own is not None:
        return _keep(using, new, other)
    raise KeyConflict(_refusal(new, other, state))


def _refusal(new: NewMessage, other: Message, state: State) -> str:
    """Say why a call may not have the key of another message, which is in this state."""
    named = f"message {other.pk} of topic {new.topic!r}"
    if state in FINAL:
        assert other.key_for is not None
        return f"{named} holds this key for {brief(other.key_for)} after its end"
    if new.on_conflict == OnConflict.ERROR:
        return f"{named} is live and has this key; on_conflict chooses what follows"
    if state == State.RUNNING:
        return f"{named} has this key and is running already"
    return f"a delivery of message {other.pk}, which has this key, may still report its success"


def _keep(using: str, new: NewMessage, other: Message) -> Message | None:
    """Return the other message as it is; None when it has moved meanwhile."""
    if not _has_to_wait(new, other):
        return other
    return _keep_waiting(using, [other.pk], is_next=new.own is not None).get(other.pk)


def _has_to_wait(new: NewMessage, other: Message) -> bool:
    """Tell whether the other message, which a call keeps for ``unique="scheduled"``, may not begin before it commits.

    So its handler, which begins later, sees what the caller writes.
    """
    return new.key_deliveries is not None and other.state == State.SCHEDULED


def _keep_waiting(using: str, ids: Sequence[int], *, is_next: bool) -> dict[int, Message]:
    """Lock waiting messages until the caller's transaction ends. Return those that have not moved meanwhile."""
    kept: dict[int, Message] = {}
    for some in chunks(ids, held_keys.ROWS_TOGETHER):
        locked = statements(using).keep_waiting(some, is_next=is_next)
        kept |= Message.objects.using(using).in_bulk(locked)
    for other in kept.values():
        if other.state == State.SCHEDULED:
            # A worker may have taken the id and passed over the locked row.
            publisher.announce_on_commit(using, other.queue, [Entry.at(other.pk, other.due_at, other.priority)])
    return kept


def _scheduled(using: str, written: Iterable[tuple[NewMessage, Inserted]]) -> list[Message]:
    """Return the messages of these rows, and have Redis and the receivers of signals told about them on commit."""
    messages: list[Message] = []
    entries: dict[str, list[Entry]] = {}
    due, due_us = None, 0
    for new, inserted in written:
        messages.append(_message(using, new, inserted))
        # Many messages in bulk share a due time, which is the same object then.
        if inserted.due_at is not due:
            due, due_us = inserted.due_at, to_us(inserted.due_at)
        entries.setdefault(new.queue, []).append(Entry(inserted.id, due_us, new.priority))
    for queue, group in entries.items():
        publisher.announce_on_commit(using, queue, group, new=True)
    if signals.message_scheduled.receivers:
        for message in messages:
            arguments = signals.message_arguments(message, using)
            signals.emit_on_commit(signals.message_scheduled, Message, **arguments, due_at=message.due_at)
    return messages


# The values of a new message's fields. A field that is added to the model gets its default here, and its value from
# ``NewMessage.columns`` if a call chooses it.
_State = type(Message()._state)
_BLANK = {field.attname: field.get_default() for field in Message._meta.concrete_fields if field.attname != "headers"}


def _message(using: str, new: NewMessage, inserted: Inserted) -> Message:
    """Return the message as if its row had been read.

    Its attributes are set past the constructor, which would take longer than all the rest of a call with many messages.
    """
    message = Message.__new__(Message)
    state = _State()
    state.adding, state.db = False, using
    values = message.__dict__
    values.update(_BLANK)
    values.update(new.columns(inserted.due_at))
    values["_state"], values["id"], values["created_at"] = state, inserted.id, inserted.created_at
    return message


aschedule_message = async_twin(schedule_message)
aschedule_messages = async_twin(schedule_messages)
