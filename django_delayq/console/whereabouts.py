"""Where Redis has one message, and whether that is where the record has it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from .. import conf, publisher, restore
from ..broker.base import Index, Place
from ..clock import SECOND, from_tenths, to_tenths
from ..exceptions import BrokerUnavailable
from ..inspector.consistency import Mismatch, RecordRow, classify
from ..models import Message
from ..states import LIVE


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """What Redis says; with an ``error`` it says nothing."""

    error: str = ""
    # By the clock of Redis: it is due then, or ready since then; None: it is not there.
    delayed_until: datetime | None = None
    ready_since: datetime | None = None
    # How many are taken before it.
    before: int | None = None
    # How far ahead Redis is filled; None: nobody has filled it.
    horizon: datetime | None = None
    # How it differs from the record.
    kind: Mismatch | None = None

    @property
    def absent(self) -> bool:
        return not self.error and self.delayed_until is None and self.ready_since is None


def look(message: Message) -> Whereabouts | None:
    """Ask Redis about one message; None when none is configured. Never raises."""
    using = message._state.db or "default"
    redis_publisher = publisher.get(using)
    if redis_publisher is None:
        return None
    try:
        return _look(using, redis_publisher.broker, message)
    except BrokerUnavailable as error:
        return Whereabouts(error=str(error))


def _look(using: str, broker: Index, message: Message) -> Whereabouts:
    meta = broker.read_meta(message.queue)
    restore.refuse_foreign(using, meta)
    now_tenths = meta.now_tenths
    place = broker.places(message.queue, [message.pk])[0]
    before = broker.rank(message.queue, message.pk) if place.ready_tenths is not None else None
    # Where nobody has filled Redis, the next worker does so first: only what is due by now is missing.
    horizon_tenths = now_tenths if meta.horizon_tenths is None else meta.horizon_tenths
    return Whereabouts(
        delayed_until=None if place.delayed_tenths is None else from_tenths(place.delayed_tenths),
        ready_since=None if place.ready_tenths is None else from_tenths(place.ready_tenths),
        before=before,
        horizon=None if meta.horizon_tenths is None else from_tenths(meta.horizon_tenths),
        kind=_kind(message, place, now_tenths, horizon_tenths),
    )


def _kind(message: Message, place: Place, now_tenths: int, horizon_tenths: int) -> Mismatch | None:
    row = RecordRow(message.queue, message.state, message.due_at, message.priority) if message.state in LIVE else None
    kind = classify(row, place, message.queue, now_tenths=now_tenths, horizon_tenths=horizon_tenths)
    # A worker may have taken it at this moment.
    on_its_way = 0 <= now_tenths - to_tenths(message.due_at) < conf.get().GRACE * SECOND
    return None if kind == Mismatch.MISSING and on_its_way else kind
