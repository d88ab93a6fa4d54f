"""A call of each method with which a broker asks Redis something."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from django_delayq.broker.base import DueQueue, Entry
from django_delayq.broker.redis import RedisBroker
from django_delayq.record.sql.rows import Ticket

QUEUE = "contract"
ENTRY = Entry.at(7, datetime.now(UTC) + timedelta(seconds=60), 0)
TICKET = Ticket(7, 18_000_000_000_000, 100)


def send_put_and_flush(broker: RedisBroker) -> None:
    broker.send_put(QUEUE, [ENTRY])
    broker.flush()


METHODS: dict[str, Callable[[RedisBroker], object]] = {
    "take_duty": lambda broker: broker.take_duty("d", "w", 4.0),
    "hold_duty": lambda broker: [broker.hold_duty("d", "w", lease) for lease in (4.0, None)],
    "put": lambda broker: broker.put(QUEUE, [ENTRY]),
    "remove": lambda broker: broker.remove(QUEUE, [7]),
    "take": lambda broker: broker.take(QUEUE, 5),
    "promote": lambda broker: broker.promote(QUEUE),
    "delay": lambda broker: broker.delay(QUEUE, [TICKET], 1.0),
    "put_back": lambda broker: broker.put_back(QUEUE, [TICKET]),
    "block": lambda broker: broker.block(QUEUE, {"handler t": [TICKET]}),
    "blocked": lambda broker: broker.blocked(),
    "any_blocked": lambda broker: broker.any_blocked(),
    "listen": lambda broker: broker.listen([QUEUE], 0.2),
    "notify": lambda broker: broker.notify([QUEUE]),
    "send_put": lambda broker: broker.send_put(QUEUE, [ENTRY]),
    "send_put and flush": send_put_and_flush,
    "missing": lambda broker: broker.missing({QUEUE: [ENTRY]}),
    "fill": lambda broker: broker.fill({QUEUE: [ENTRY]}),
    "take_many": lambda broker: broker.take_many([DueQueue(QUEUE, 1, 1)], 5),
    "due_queues": lambda broker: broker.due_queues(None),
    "clear": lambda broker: broker.clear([QUEUE], 5),
    "request_load": lambda broker: broker.request_load(),
    "read_meta": lambda broker: broker.read_meta(),
    "tick": lambda broker: broker.tick(),
    "note_sweep": lambda broker: broker.note_sweep(),
    "load": lambda broker: broker.load(
        ahead=60, worker="w", lease=10, identity="i", server=broker.server(), lost=False
    ),
    "loaded": lambda broker: broker.loaded(worker="w", upto_tenths=5, lease=None),
    "count_call": lambda broker: broker.count_call("t:consume", "w", 1, 5, 1000),
    "server": lambda broker: broker.server(),
    "write_nothing": lambda broker: broker.write_nothing(),
    "round_trip": lambda broker: broker.round_trip(),
    "server_info": lambda broker: broker.server_info(),
    "sizes": lambda broker: broker.sizes([QUEUE]),
    "locations": lambda broker: broker.locations(QUEUE, [7]),
    "rank": lambda broker: broker.rank(QUEUE, 7),
    "ids": lambda broker: list(broker.ids(QUEUE)),
}
