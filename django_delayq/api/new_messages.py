"""Makes checked rows of the arguments of ``schedule_message`` and ``schedule_messages``, before anything is written."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.conf import settings

from ..core import names, values
from ..core.exceptions import InvalidMessage, PayloadTooLarge
from ..project import conf, registry, validation
from ..project.message_options import MessageOptions, OnConflict
from ..record.sql.rows import ALIKE_FROM, NewMessage

logger = logging.getLogger("django_delayq")

# What other queues and the first guess call the arguments.
_MEANT = {
    **names.DELAYS,
    **names.DUE_TIMES,
    **dict.fromkeys(("args", "kwargs", "data", "body", "message"), "payload"),
    **dict.fromkeys(("task_id", "job_id", "unique_key", "queueing_lock"), "key"),
    **dict.fromkeys(("expires_in", "max_age", "ttl"), "expires"),
    "max_retries": "max_attempts",
    "queue_name": "queue",
    "time_limit": "timeout",
}


# The check of each option. One that is None is not given.
_CHECKS = values.checks_of(MessageOptions)
_NAMES = _CHECKS.keys() | {"topic", "payload"}
# The choices about a key. A message without one may have the usual ones only, and None is no choice.
_OF_KEYS = frozenset({"on_conflict", "unique"})


def checked(topic: Any, payload: Any, options: Mapping[str, Any]) -> NewMessage:
    """Check the arguments of one call. Raises ``InvalidMessage``, and ``TypeError`` for an option that there is not."""
    if not options.keys() <= _CHECKS.keys():
        raise TypeError(
            f"schedule_message() has no such argument: {names.unknown(options.keys() - _CHECKS.keys(), _NAMES, _MEANT)}"
        )
    handler = registry.find(topic) if isinstance(topic, str) else None
    # The topic of a handler was checked when that was registered.
    topic = validation.topic(topic) if handler is None else handler.topic
    given = {name: value for name, value in options.items() if value is not None or name in _OF_KEYS}
    if "delay" in given and "due_at" in given:
        raise InvalidMessage("give delay or due_at, not both")
    columns: dict[str, Any] = {} if handler is None else {"priority": handler.priority, "queue": handler.queue}
    columns |= {name: _CHECKS[name](value) for name, value in given.items()}
    columns["queue"] = columns.get("queue") or conf.get().DEFAULT_QUEUE
    columns["key_deliveries"], columns["key_for"] = columns.pop("unique", (None, None))
    text, value = validation.payload_and_value(payload)
    new = NewMessage(payload=text, value=value, topic=topic, **columns)
    if new.key is None and not _OF_KEYS.isdisjoint(given):
        _refuse_without_key(new)
    if settings.DEBUG:
        _ask_of(new)
    if handler is None or (handler.limit_key is None and new.limit_key is None):
        return new
    return _with_limit_key(new, handler, payload, options.get("headers"))


# What was asked already, so that each name is logged once.
_asked: set[tuple[str, str]] = set()


def _ask(what: str, name: str, known: Iterable[str]) -> None:
    """Log a topic or a queue that this project does not know, if it knows one that is like it."""
    like = None if (what, name) in _asked else names.near(name, known)
    if like is not None:
        _asked.add((what, name))
        text = "A message is scheduled for the %s %s, which no code here names. Did you mean %s?"
        logger.warning(text, what, name, like)


def _ask_of(new: NewMessage) -> None:
    """Log what is probably a typing error in the topic or the queue of a message."""
    handlers = registry.handlers()
    if new.topic not in handlers:
        _ask("topic", new.topic, handlers)
    queues = {*conf.get().QUEUES, conf.get().DEFAULT_QUEUE, *(one.queue for one in handlers.values() if one.queue)}
    if new.queue not in queues:
        _ask("queue", new.queue, queues)


def _refuse_without_key(new: NewMessage) -> None:
    if new.on_conflict != OnConflict.ERROR:
        raise InvalidMessage(
            f"on_conflict={str(new.on_conflict)!r} needs a key: without one no message conflicts with another"
        )
    if (new.key_deliveries, new.key_for) != (None, None):
        raise InvalidMessage("unique needs a key: without one there is nothing to hold")


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
    found = handler.limit_key(ToSchedule(new.topic, new.queue, new.key, new.priority, payload, headers or {}))
    return new if found is None else new._replace(limit_key=validation.limit_key(found))


class ManyChecks:
    """Checks the messages of one call. What several of them have in common is checked once."""

    # What is checked for each message.
    _OWN = frozenset({"payload", "due_at", "key"})
    # Of a call with more kinds of messages than this, the first are remembered.
    _MOST_KINDS = 1000

    def __init__(self) -> None:
        # What the messages of each kind have in common, by whether they have a key, and by the names, types and values
        # of all other arguments. Without the types True would pass for the priority 1.
        self._kinds: dict[tuple[object, ...], tuple[Any, ...]] = {}
        # The due time that was checked last, as it was given and as it is written: many messages often share one.
        self._due: tuple[Any, datetime | None] = (None, None)

    def message(self, number: int, message: Any) -> NewMessage:
        """Check the message with this number. Raises as ``schedule_message`` does, and names the number."""
        try:
            if not isinstance(message, (dict, Mapping)) or "topic" not in message:
                raise InvalidMessage("schedule_messages takes dicts with a 'topic' each")
            return self._message(message)
        except InvalidMessage as error:
            if type(error) not in (InvalidMessage, PayloadTooLarge):
                # A class of the project may be made of other arguments.
                error.add_note(f"message {number}")
                raise
            raise type(error)(f"message {number}: {error}") from error

    def _message(self, message: Mapping[str, Any]) -> NewMessage:
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
        if len(self._kinds) < self._MOST_KINDS and (handler is None or handler.limit_key is None):
            self._kinds[kind] = new[ALIKE_FROM:]
        return new


def _of_dict(message: Mapping[str, Any]) -> NewMessage:
    if not message.keys() <= _NAMES:
        raise InvalidMessage(f"unknown: {names.unknown(message.keys() - _NAMES, _NAMES, _MEANT)}")
    options = {name: value for name, value in message.items() if name not in ("topic", "payload")}
    return checked(message["topic"], message.get("payload"), options)
