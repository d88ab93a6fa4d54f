"""Which messages a call means: one by its id, one by topic and key, or those that a queryset finds."""

from __future__ import annotations

from array import array
from typing import Any

from django.db import NotSupportedError
from django.db.models import QuerySet

from ..core.exceptions import InvalidMessage
from ..core.states import FINAL
from ..models import Message
from ..project import validation
from ..record import held_keys

# The id may be text: that of a task's result is.
Target = int | str | Message


def id_of(target: Any) -> int:
    """Return the id of a message that is given as such or by its id. Raises ``InvalidMessage`` for anything else."""
    number = target.pk if isinstance(target, Message) else target
    if isinstance(number, str) and len(number) < 20 and number.isascii() and number.isdecimal():
        number = int(number)
    if isinstance(number, bool) or not isinstance(number, int) or not 0 < number < 2**63:
        by_key = "; to name a message by its key, write topic= and key=" if isinstance(number, str) else ""
        raise InvalidMessage(f"not the id of a message: {type(target).__name__}{by_key}")
    return number


def find(using: str, topic: str, key: str | None, *, finished: bool) -> int | None:
    """Return the id of the message that holds a key, or else has it; with ``finished`` of a finished one, if any.

    Raises ``InvalidMessage`` when the key is not given.
    """
    if key is None or not topic:
        raise InvalidMessage("name the message by its id, or by topic and key")
    topic, checked = validation.topic(topic), validation.key(key)
    assert checked is not None
    live = held_keys.named(using, topic, checked)
    if not finished or (live is not None and live.holds_key):
        return None if live is None else live.pk
    rows = Message.objects.using(using).filter(topic=topic, key=checked, state__in=sorted(FINAL))
    youngest = rows.order_by("-pk").values_list("pk", flat=True).first()
    return live.pk if youngest is None and live is not None else youngest


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
