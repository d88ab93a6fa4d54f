"""The settings in ``DELAYQ["HTTP"]``, for the door that programs in any language use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from ..core import values
from ..core.bounds import LENGTHS
from . import conf


def _topics(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ValueError("must be a dict of queue names and topics, such as {'shop.orders': 'orders.close'}")
    return {
        _named(queue, values.word, queue, LENGTHS.queue): _named(queue, values.topic, topic, LENGTHS.topic)
        for queue, topic in value.items()
    }


def _named(queue: Any, check: conf.Parser, given: Any, limit: int) -> str:
    """Check a name that belongs to a queue. Raises ``ValueError`` with the queue in its words."""
    try:
        found: str = check(given, limit)
    except ValueError as error:
        raise ValueError(f"of queue {queue!r}: {error}") from None
    return found


class HttpSettings(NamedTuple):
    """The settings of the HTTP door."""

    # The topics of the messages that programs publish, by the queue: ``{"shop.orders": "orders.close"}``. For a queue
    # that is not in it the topic is the name of the queue.
    TOPICS: Annotated[Mapping[str, str], _topics] = {}


_section = conf.Section("HTTP", HttpSettings)
PARSERS, parse, get = _section.parsers, _section.parse, _section.get
