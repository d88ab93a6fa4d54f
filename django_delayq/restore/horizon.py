"""How far ahead Redis is filled, and whether it is ours to fill."""

from __future__ import annotations

from .. import conf
from ..broker.base import Index, QueueMeta, ServerRun
from ..clock import SECOND
from ..exceptions import BrokerUnavailable, ForeignBroker
from ..models import Identity, identity


def refuse_foreign(using: str, meta: QueueMeta) -> None:
    """Raise ``ForeignBroker`` if the queue's meta belongs to another database. Writes nothing."""
    if not meta.identity:
        return
    ours = Identity.objects.using(using).filter(id=1).values_list("value", flat=True).first()
    if ours is None or str(ours) != meta.identity:
        raise ForeignBroker


def master(broker: Index) -> ServerRun:
    """The server that the broker talks to. Raises ``BrokerUnavailable`` when it is a replica."""
    server = broker.server()
    if server.role not in ("master", ""):
        raise BrokerUnavailable("this Redis is a replica")
    return server


def is_current(meta: QueueMeta, server: ServerRun, now_tenths: int, ahead: float) -> bool:
    """Whether the queue's horizon was set in this run of the server, and is still far enough ahead."""
    if meta.horizon_tenths is None or (meta.run_id, meta.replid) != (server.run_id, server.replid):
        return False
    return meta.horizon_tenths - now_tenths > ahead * SECOND / 2


def begin(using: str, broker: Index, queue: str, *, lease: float, worker: str) -> tuple[int, bool]:
    """See to it that a queue has a horizon, as the loader does. Returns it, and whether we are its loader now.

    Rows committed later are then put by their own writers, and the query that follows sees the earlier ones.
    """
    for _round in range(3):
        meta = broker.read_meta(queue)
        refuse_foreign(using, meta)
        server, ahead = master(broker), conf.get().HORIZON
        if meta.horizon_tenths is not None and is_current(meta, server, meta.now_tenths, ahead):
            return meta.horizon_tenths, False
        begun = broker.load(
            queue, ahead=ahead, worker=worker, lease=lease, identity=identity(using), server=server, lost=False
        )
        if begun is not None:
            return begun[1], True
        # A worker is loading it at this moment, so it has a horizon; however near, what lies beyond is the worker's.
        horizon = broker.read_meta(queue).horizon_tenths
        if horizon is not None:
            return horizon, False
    raise BrokerUnavailable(f"queue {queue} has no horizon though a worker is loading it")
