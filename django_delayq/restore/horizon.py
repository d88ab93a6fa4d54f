"""The horizon, up to which Redis is filled. The Redis of another database is refused."""

from __future__ import annotations

from ..broker import RedisBroker
from ..broker.base import Meta, ServerRun
from ..core.clock import SECOND
from ..core.exceptions import BrokerFailing, ForeignBroker
from ..core.known_record import CLOCK_OFF
from ..models.messages import Identity
from ..project import conf
from ..record.reads import identity

# A lease that runs out at once: a worker may begin to load right away. Seconds.
NO_LEASE = 0.001
# A horizon may be this much farther away than the setting says: clocks may have moved since. As in load.lua. Seconds.
SLACK = CLOCK_OFF


def refuse_foreign(using: str, meta: Meta) -> None:
    """Raise ``ForeignBroker`` if Redis holds the ids of another database. Writes nothing."""
    if not meta.identity:
        return
    ours = Identity.objects.using(using).filter(id=1).values_list("value", flat=True).first()
    if ours is None or str(ours) != meta.identity:
        raise ForeignBroker


def writable_server(broker: RedisBroker) -> ServerRun:
    """Return the identity of the server that the broker talks to.

    Raises ``ClusterBroker`` if it is one node of a cluster, and the others are not known, and ``BrokerFailing`` if it
    is a replica.
    """
    server = broker.server()
    if server.role not in ("master", ""):
        raise BrokerFailing("this Redis is a replica")
    return server


def is_filled(meta: Meta, server: ServerRun) -> bool:
    """Return whether Redis was filled in this run of the server, and somebody has gone on filling it."""
    in_this_run = (meta.run_id, meta.replid) == (server.run_id, server.replid)
    return in_this_run and (meta.horizon_tenths or 0) > meta.now_tenths


def is_too_far(meta: Meta, ahead: float) -> bool:
    """Return whether the horizon is farther away than ``ahead`` seconds, for instance because HORIZON was larger once.

    Producers do not put a message that is due beyond their own HORIZON, and loaders load what is due beyond that of
    Redis: a message between the two would be missed.
    """
    return meta.horizon_tenths is not None and meta.horizon_tenths - meta.now_tenths > (ahead + SLACK) * SECOND


def is_current(meta: Meta, server: ServerRun, now_tenths: int, ahead: float) -> bool:
    """Return whether the horizon was set in this run of the server and is more than half of ``ahead`` seconds away."""
    if meta.horizon_tenths is None or (meta.run_id, meta.replid) != (server.run_id, server.replid):
        return False
    if is_too_far(meta, ahead):
        return False
    return meta.horizon_tenths - now_tenths > ahead * SECOND / 2


def ensure_horizon(using: str, broker: RedisBroker, *, lease: float = NO_LEASE, worker: str) -> tuple[int, bool]:
    """Give Redis a horizon if it has none that is current. Return it, and whether ``worker`` is the loader now.

    Every message that is committed from then on is put by its producer. A query after this call finds the others.
    ``lease`` is in seconds, the horizon in tenths of a ms.
    """
    for _round in range(3):
        meta = broker.read_meta()
        refuse_foreign(using, meta)
        server, ahead = writable_server(broker), conf.get().HORIZON
        if meta.horizon_tenths is not None and is_current(meta, server, meta.now_tenths, ahead):
            return meta.horizon_tenths, False
        begun = broker.load(
            ahead=ahead,
            worker=worker,
            lease=lease,
            identity=identity(using),
            server=server,
            lost=False,
        )
        if begun is not None:
            return begun[1], True
        # A worker is loading, so there is a horizon, and the worker loads the messages beyond it.
        horizon = broker.read_meta().horizon_tenths
        if horizon is not None:
            return horizon, False
    raise BrokerFailing("Redis has no horizon though a worker is loading")
