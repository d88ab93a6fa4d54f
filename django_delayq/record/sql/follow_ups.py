"""Writes the messages that follow the ends of others, in the transactions that record these ends."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ...core.own_header import without_own_part
from ...core.states import State
from ...models import Message
from ...project import registry
from .rows import Inserted, Moved, NewMessage

# Writes messages for an actor.
Insert = Callable[[Sequence[NewMessage], str], Iterable[tuple[NewMessage, Inserted]]]


# What the payload of the new message says of the message that ended, beside the payload of that.
OF_MESSAGE = "id", "topic", "queue", "key", "state", "attempts", "deliveries"


class End(NamedTuple):
    """The end of a message, and the topic of the message that follows. ``said`` has its reason and its error."""

    message: Message
    topic: str
    said: dict[str, str]
    actor: str


def write_follow_ups(using: str, ends: Sequence[End], insert: Insert) -> dict[int, Moved]:
    """Write the messages that follow these ends. Return them by the ids of the messages that ended."""
    rows = Message.objects.using(using).filter(pk__in=[end.message.pk for end in ends])
    content = {pk: (payload, headers) for pk, payload, headers in rows.values_list("pk", "payload", "headers")}
    by_actor: defaultdict[str, list[End]] = defaultdict(list)
    for end in ends:
        by_actor[end.actor].append(end)
    written = {}
    for actor, some in by_actor.items():
        news = [_follow_up(end, *content[end.message.pk]) for end in some]
        for end, (new, row) in zip(some, insert(news, actor), strict=True):
            place = new.topic, new.queue, new.priority
            written[end.message.pk] = Moved(row.id, *place, State.SCHEDULED, row.due_at, 0)
    return written


def _follow_up(end: End, payload: Any, headers: Any) -> NewMessage:
    """Return the message that follows an end. It is due at once, with the queue and the like that its handler gives."""
    ended, handler = end.message, registry.find(end.topic)
    said = {name: getattr(ended, name) for name in OF_MESSAGE} | {"payload": payload, **end.said}
    return NewMessage(
        json.dumps(said),
        said,
        topic=end.topic,
        queue=registry.default_queue(end.topic),
        headers=json.dumps(without_own_part(headers)),
        # No function of the project is called here: it could fail, or take its time.
        limit_key=ended.limit_key if handler is not None and handler.limit_key is not None else None,
        priority=0 if handler is None else handler.priority,
        expires=None if handler is None else handler.expires,
    )
