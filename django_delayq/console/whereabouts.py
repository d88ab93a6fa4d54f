"""Finds the location of one message in Redis, tells whether the record agrees, and finds queues that Redis lacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from django.db import router

from ..broker import RedisBroker, publisher
from ..broker.base import Location, QueueSize
from ..core.clock import SECOND, from_tenths, to_tenths
from ..core.exceptions import BrokerUnavailable
from ..inspector.consistency import Mismatch, classify
from ..models import Message
from ..project import conf, pulled
from ..restore.horizon import is_filled, refuse_foreign


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """The location of a message in Redis. With an ``error`` Redis did not answer."""

    error: str = ""
    # The due time that Redis has for the message: while it is delayed, or once it is ready. Both are None when Redis
    # lacks it.
    delayed_until: datetime | None = None
    ready_since: datetime | None = None
    # The number of messages that are taken before it.
    ahead: int | None = None
    # The due time up to which Redis is filled; None: no worker has filled it.
    horizon: datetime | None = None
    # The difference from the record; None: they agree.
    mismatch: Mismatch | None = None


def locate(message: Message) -> Whereabouts | None:
    """Ask Redis about one message. None: it holds no ids of this queue, or none is configured. Never raises."""
    # The message may have been read from a replica.
    using = router.db_for_write(Message, instance=message)
    redis_publisher = publisher.get(using)
    if redis_publisher is None or pulled.terms(message.queue) is not None:
        return None
    try:
        return _locate(using, redis_publisher.broker, message)
    except BrokerUnavailable as error:
        return Whereabouts(error=str(error))


def _locate(using: str, broker: RedisBroker, message: Message) -> Whereabouts:
    meta = broker.read_meta()
    refuse_foreign(using, meta)
    now_tenths = meta.now_tenths
    location = broker.locations(message.queue, [message.pk])[0]
    ahead = broker.rank(message.queue, message.pk) if location.ready_tenths is not None else None
    # Workers fill a Redis that none has filled: until then only messages that are due by now count as missing there.
    horizon_tenths = now_tenths if meta.horizon_tenths is None else meta.horizon_tenths
    return Whereabouts(
        delayed_until=None if location.delayed_tenths is None else from_tenths(location.delayed_tenths),
        ready_since=None if location.ready_tenths is None else from_tenths(location.ready_tenths),
        ahead=ahead,
        horizon=None if meta.horizon_tenths is None else from_tenths(meta.horizon_tenths),
        mismatch=_mismatch(message, location, now_tenths, horizon_tenths),
    )


def _mismatch(message: Message, location: Location, now_tenths: int, horizon_tenths: int) -> Mismatch | None:
    mismatch = classify(message, location, message.queue, now_tenths=now_tenths, horizon_tenths=horizon_tenths)
    # A worker may have taken the message a moment ago.
    just_due = 0 <= now_tenths - to_tenths(message.due_at) < conf.get().GRACE * SECOND
    return None if mismatch == Mismatch.MISSING and just_due else mismatch


def sizes(using: str, queues: Sequence[str]) -> dict[str, QueueSize]:
    """Count the ids in Redis by queue; nothing without Redis. Raises ``BrokerUnavailable``."""
    redis_publisher = publisher.get(using)
    return {} if redis_publisher is None else redis_publisher.broker.sizes(queues)


def unfilled(using: str, queues: Sequence[str]) -> list[str]:
    """Return the queues if Redis is not filled: no worker has filled it or fills it any more, or it was emptied.

    Raises ``BrokerUnavailable``.
    """
    redis_publisher = publisher.get(using)
    if redis_publisher is None:
        return []
    server, meta = redis_publisher.broker.server(), redis_publisher.broker.read_meta()
    refuse_foreign(using, meta)
    return [] if is_filled(meta, server) else [*queues]
