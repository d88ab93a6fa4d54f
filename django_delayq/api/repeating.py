"""Repeats a message that has ended: its content once more, as a new message that names the old one."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

from django.db import router

from ..broker import publisher
from ..core import names
from ..core.clock import NO_TIME
from ..core.durations import Duration
from ..core.exceptions import InvalidMessage
from ..core.own_header import OWN_HEADER, own_part, without_own_part
from ..core.states import LIVE
from ..core.twins import async_twin
from ..models import Message
from ..project import registry, validation
from ..record import transitions
from ..record.sql.moves import locked, writing
from ..record.sql.rows import NewMessage
from .actions import Target, id_of
from .scheduling import checked, write_checked

# What a new message takes from the row of the old one as it is.
AS_BEFORE = "topic", "queue", "key", "priority", "max_attempts", "timeout", "lease", "limit_key", "key_for"
_MEANT = {
    **names.DELAYS,
    **dict.fromkeys(("args", "kwargs", "data", "body"), "payload"),
    **dict.fromkeys(("id", "pk", "message", "message_id", "task_id", "job_id"), "target"),
}


@names.with_hints(_MEANT)
def repeat_message(
    target: Target, *, payload: Any = ..., delay: Duration | None = None, using: str | None = None
) -> Message:
    """Schedule a message that has ended once more, as a new message, and return that. The old one stays as it is.

    The new message has the payload, the headers and all options of the old one, also its key and its time to live; it
    is due now, or after ``delay``. Its attempts count from 1. ``message.repeats`` is the id of the old one.

    With ``payload`` it has this payload instead, checked as ``schedule_message`` checks one, and the limit key that its
    handler finds for it, if that has a function for them.

    To try a dead, expired or cancelled message again under its own id, use ``requeue_message``. A message that was
    consumed can only be repeated: what its handler did is done again.

    Raises ``InvalidMessage`` for a message that is live and for a payload that does not fit, ``Message.DoesNotExist``
    for one that is not there, and ``KeyConflict`` when another message holds its key, or it holds the key itself for
    a time after its end.
    """
    hints = {"instance": target} if isinstance(target, Message) else {}
    using = using or router.db_for_write(Message, **hints)
    wait = NO_TIME if delay is None else validation.delay(delay)
    rows = Message.objects.using(using).filter(pk=id_of(target))
    publisher.get(using)
    with writing(using):
        # It stays as it is until the new one is written: nobody requeues it meanwhile.
        old = locked(using, rows, wait=True).get()
        if old.state in LIVE:
            raise InvalidMessage(f"message {old.pk} is {old.state}: only one that has ended is repeated")
        new = _again(using, old, wait)
        message = write_checked(using, new if payload is ... else _with_payload(new, old, payload))
    publisher.run_at_once(using, [message.pk])
    return message


def _again(using: str, old: Message, delay: timedelta) -> NewMessage:
    """Return a new message like the old one."""
    own = own_part(old.headers) | {"repeats": old.pk}
    expires = None
    if old.expires_at is not None:
        expires = old.expires_at - transitions.due_times_given(using, [old.pk]).get(old.pk, old.due_at)
    return NewMessage(
        json.dumps(old.payload),
        None,
        delay=delay,
        headers=validation.headers(without_own_part(old.headers) | {OWN_HEADER: own}),
        expires=expires,
        retry=None if old.retry is None else json.dumps(old.retry),
        key_deliveries=0 if old.unique == "scheduled" else None,
        **{name: getattr(old, name) for name in AS_BEFORE},
    )


def _with_payload(new: NewMessage, old: Message, payload: Any) -> NewMessage:
    """Return the new message with another payload. ``None`` is one, too."""
    options = {name: getattr(old, name) for name in ("queue", "key", "priority")}
    call = checked(old.topic, payload, options | {"headers": without_own_part(old.headers)})
    handler = registry.find(old.topic)
    finds = handler is not None and handler.limit_key is not None
    return new._replace(payload=call.payload, value=call.value, limit_key=call.limit_key if finds else new.limit_key)


arepeat_message = async_twin(repeat_message)
