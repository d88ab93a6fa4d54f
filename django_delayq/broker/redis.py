"""The broker on Redis."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import redis

from ..core.bounds import PRIORITIES
from ..core.chunks import chunks
from ..core.clock import SECOND, us_to_tenths
from ..core.exceptions import BrokerFailing, ClusterBroker, ForeignBroker
from ..project import pulled
from . import scripts
from .base import FAR_AWAY, IDS_PER_CALL, CallCount, Entry, Location, Meta, Put, QueueSize, ServerInfo, ServerRun
from .cluster import SlotPool
from .connection import all_translated, translated
from .keys import BAND
from .puts import PutConnections, SentPut
from .redis_source import RedisSource, whole

# The number of members in one reply to a scan, roughly.
SCAN_COUNT = 1000
# ``round_trip`` takes the shortest of this number of round trips.
TRIPS = 5
# The fields that ``read_meta`` reads, in this order.
META_FIELDS = ("tick", "horizon", "loaded", "run_id", "replid", "identity", "loader_until", "requested", "swept")


@all_translated
class RedisBroker(RedisSource):
    """The broker that holds ids. It has to be filled, and can lose some.

    What it has beside the methods of a ``Broker`` serves the publisher, the loader, the sweeper, the restore, the
    consistency check and the console.

    ``timeout`` is in seconds, for connecting and for each answer. ``identity`` returns the identity of the caller's
    database: queues of another one are refused with ``ForeignBroker``. None: the caller does not mind. ``now`` returns
    the time by the record's clock, in seconds since 1970; the clock of the server is not used.
    """

    @cached_property
    def _puts(self) -> PutConnections:
        return PutConnections(self._pool)

    def close(self) -> None:
        """Wait for the answers to all puts, and close all connections."""
        if "_puts" in self.__dict__:
            self._puts.close()
        super().close()

    def put(self, queue: str, entries: Sequence[Entry]) -> Put:
        """Put ids into the locations for their due times."""
        return self._put({queue: entries}, "set")[queue]

    def _put(self, entries: Mapping[str, Sequence[Entry]], mode: str) -> dict[str, Put]:
        """Put entries of several queues in one round trip, in the mode "set" or "fill". Return the counts by queue."""
        if elsewhere := entries.keys() - set(pulled.without(entries)):
            # Redis holds no ids of queues that are pulled.
            rest = {queue: some for queue, some in entries.items() if queue not in elsewhere}
            return {queue: Put(present=len(entries[queue])) for queue in elsewhere} | self._put(rest, mode)
        how = {"now": self.now_tenths(), "mode": mode, "identity": self.identity()}
        parts = [(queue, part) for queue, some in entries.items() for part in chunks(some, IDS_PER_CALL)]
        answers = self._call_many("put", [(self.keys(queue), {**how, "rest": _flat(part)}) for queue, part in parts])
        found = dict.fromkeys(entries, Put())
        for (queue, part), answer in zip(parts, answers, strict=True):
            found[queue] += _counts(answer, len(part))
        return found

    def remove(self, queue: str, ids: Sequence[int]) -> None:
        """Forget ids. This saves a look-up later; the claim refuses finished messages anyway."""
        k = self.keys(queue)
        if "_puts" in self.__dict__:
            # A put of the same message would bring its id back when it arrived after this call.
            self._puts.flush()
        for some in chunks(ids, IDS_PER_CALL):
            scripts.load("remove")(self.client, k, some, identity=self.identity())

    def send_put(self, queue: str, entries: Sequence[Entry]) -> bool:
        """Send a put without waiting for its answer. Return whether an earlier put turned out to have succeeded.

        Waits for the answer to the put before it, and raises the error in that, or ``BrokerUnavailable`` when it took
        longer than the timeout.
        """
        k = self.keys(queue)
        answered = False
        # Mostly there is one.
        for start in range(0, len(entries), IDS_PER_CALL):
            some = _flat(entries[start : start + IDS_PER_CALL])
            answered |= self._puts.send(SentPut(k, self.identity(), self.now_tenths(), some))
        return answered

    def flush(self) -> None:
        """Wait until Redis has answered all puts of ``send_put``. Raises the errors in the answers."""
        self._puts.flush()

    def fill(self, entries: Mapping[str, Sequence[Entry]]) -> dict[str, Put]:
        """Add missing ids of several queues, and give no id a later time than it has.

        One round trip, if no queue has more than ``IDS_PER_CALL`` of them.
        """
        return self._put(entries, "fill")

    def missing(self, entries: Mapping[str, Sequence[Entry]]) -> dict[str, list[int]]:
        """Return the ids of each queue that ``fill`` would put, of at most ``IDS_PER_CALL`` entries a queue."""
        calls = [(self.keys(queue), {"rest": _flat(some)}) for queue, some in entries.items()]
        answers = self._call_many("missing", calls)
        return {queue: [int(pk) for pk in answer] for queue, answer in zip(entries, answers, strict=True)}

    def read_meta(self) -> Meta:
        """Read the meta. Writes nothing."""
        began = time.monotonic()
        fields: Any = self.client.hmget(self.keys("").meta, META_FIELDS)
        return replace(_meta(self.now_tenths(), fields), round_trip=time.monotonic() - began)

    def round_trip(self) -> float:
        """Return how long a question and its answer take, in seconds: the least of some, unless the first is short.

        A busy process, or a busy Redis, is slow now and then.
        """
        least = self.read_meta().round_trip
        for _look in range(TRIPS - 1):
            if least <= FAR_AWAY:
                break
            least = min(least, self.read_meta().round_trip)
        return least

    def tick(self, *, counts: bool = True) -> Meta:
        """Read the meta, and count one more tick if this ``counts``.

        Raises ``ForeignBroker`` when Redis holds the ids of another database.
        """
        identity, meta = self.identity(), self.read_meta()
        if identity and meta.identity not in ("", identity):
            raise ForeignBroker
        return replace(meta, tick=self.client.hincrby(self.keys("").meta, "tick", 1)) if counts else meta

    def request_load(self) -> None:
        """Have a loader load everything again: this process could not tell the broker of messages for a while."""
        scripts.load("request_load")(self.client, self.keys(""), identity=self.identity())

    def note_sweep(self) -> None:
        """Note that a sweep has just put messages that Redis lacked."""
        self.client.hset(self.keys("").meta, "swept", self.now_tenths())

    def clear(self, queues: Sequence[str], seen_tenths: int) -> bool:
        """Delete all keys, by their names, because somebody has written into them: of these queues, and of those known.

        ``seen_tenths`` is when that was seen. Nothing is deleted when the keys were deleted since; if that was in the
        half minute before, return false. What was deleted is loaded again: see ``load``. Raises ``ForeignBroker``, and
        deletes nothing, when Redis holds the ids of another database.
        """
        k, terms = self.keys(""), {"now": self.now_tenths(), "seen": seen_tenths, "identity": self.identity()}
        return bool(scripts.load("clear")(self.client, k, queues, **terms) == b"ok")

    def load(
        self, *, ahead: float, worker: str, lease: float, identity: str, server: ServerRun, lost: bool
    ) -> tuple[int | None, int] | None:
        """Begin to load all queues up to a horizon that is ``ahead`` seconds from now.

        Returns the due tenth to begin at (None: at the beginning) and the due tenth of the horizon; or None while
        another process loads, which keeps the right for ``lease`` seconds after its last sign of life. ``lost``:
        Redis has lost ids. Raises ``ForeignBroker`` when Redis holds the ids of another database.
        """
        word, begin, horizon = scripts.load("load")(
            self.client,
            self.keys(""),
            now=self.now_tenths(),
            ahead=int(ahead * SECOND),
            worker=worker,
            lease=int(lease * SECOND),
            identity=identity,
            run_id=server.run_id,
            replid=server.replid,
            lost="1" if lost else "",
        )
        if word == b"busy":
            return None
        return (int(begin) if begin else None), int(horizon)

    def loaded(self, *, worker: str, upto_tenths: int | None, lease: float | None) -> bool:
        """Record how far a load has come, or with lease None that it is done; return whether it is still valid.

        With ``upto_tenths`` None it has come no further: only the lease begins again, or ends.
        """
        word = scripts.load("loaded")(
            self.client,
            self.keys(""),
            now=self.now_tenths(),
            worker=worker,
            upto="" if upto_tenths is None else upto_tenths,
            lease="" if lease is None else int(lease * SECOND),
        )
        return bool(word == b"ok")

    def take_duty(self, duty: str, worker: str, lease: float) -> bool:
        """Take a duty that nobody has, for ``lease`` seconds. Returns whether this worker took it."""
        k = self.keys("")
        return bool(self.client.set(f"{k.duty}:{duty}", worker, nx=True, px=int(lease * 1000)))

    def hold_duty(self, duty: str, worker: str, lease: float | None) -> bool:
        """Go on with a duty for ``lease`` seconds, or take it if nobody has it; None: give it up.

        Returns whether this worker has it.
        """
        milliseconds = "" if lease is None else int(lease * 1000)
        k = self.keys("")
        named = replace(k, duty=f"{k.duty}:{duty}")
        return bool(scripts.load("duty")(self.client, named, worker=worker, lease=milliseconds))

    def count_call(self, name: str, window: str, step: int, most: int, interval_ms: int) -> CallCount:
        """Count a call (``step`` 1) in a window, unless it has ``most`` calls; or take one back (-1) from ``window``.

        A window begins with its first call, gets the name that this brings, and ends after the interval.
        """
        k = self.keys("")
        counted_in, left_ms = scripts.load("count_call")(
            self._scripted,
            replace(k, calls=f"{k.calls}:{name}"),
            window=window,
            step=step,
            most=most,
            interval=interval_ms,
        )
        return CallCount(counted_in.decode(), left_ms)

    def server(self) -> ServerRun:
        """Ask the server for its identity and the identity of its present run.

        Raises ``ClusterBroker`` when it is one node of a cluster, and the way to it does not lead to the others.
        """
        # One command for three sections: a worker asks every few seconds.
        info = self._info()
        if info.get("cluster_enabled") and not self._finds_owner():
            raise ClusterBroker
        return ServerRun(
            str(info["run_id"]),
            str(info.get("master_replid", "")),
            str(info.get("role", "")),
            policy=str(info.get("maxmemory_policy", "")),
        )

    def _info(self) -> dict[str, Any]:
        """Ask the server about itself. If it tells that it is a cluster, ask the node that has our keys."""
        info = self.client.info()
        if info.get("cluster_enabled") and self._finds_owner() and not self.cluster.is_seen:
            # From now on connections lead there.
            self.cluster.is_seen = True
            info = self.client.info()
        return info

    def _finds_owner(self) -> bool:
        return isinstance(self.client.connection_pool, SlotPool)

    def write_nothing(self) -> None:
        """Send a write that changes nothing: a Redis that is full, or that cannot save, answers questions only."""
        self.client.set(f"{self.keys('').duty}:nobody", "", xx=True)

    def server_info(self) -> ServerInfo:
        """Ask the server about itself, and whether it takes a write. Raises what a worker would meet."""
        info, refusal = self._info(), None
        try:
            self.write_nothing()
        except (BrokerFailing, ClusterBroker) as error:
            refusal = str(error)
        if self.cluster.owner is not None:
            # The replicas may be other ones by now.
            self.cluster.note(self.cluster.owner, self._scripted.execute_command("CLUSTER", "SLOTS"))
        return ServerInfo(
            version=_text(info.get("valkey_version") or info.get("redis_version")),
            role=_text(info.get("role")),
            uptime=info.get("uptime_in_seconds"),
            memory=info.get("used_memory"),
            max_memory=info.get("maxmemory"),
            policy=_text(info.get("maxmemory_policy")) or _config(self.client, "maxmemory-policy"),
            cluster=bool(info["cluster_enabled"]) if "cluster_enabled" in info else None,
            hash_slot=self.cluster.hash_slot,
            evicted=info.get("evicted_keys"),
            persistence="aof" if info.get("aof_enabled") else _snapshots(self.client),
            refusal=refusal,
        )

    def sizes(self, queues: Sequence[str]) -> dict[str, QueueSize]:
        """Count the ids of queues."""
        pipe = self.client.pipeline(transaction=False)
        for k in map(self.keys, queues):
            pipe.zcard(k.delayed)
            pipe.zcard(k.ready)
            pipe.hlen(k.blocked)
        counts = iter(pipe.execute())
        return {
            queue: QueueSize(delayed, ready + blocked)
            for queue, delayed, ready, blocked in zip(queues, counts, counts, counts, strict=False)
        }

    def locations(self, queue: str, ids: Sequence[int]) -> list[Location]:
        """Find where each of these ids is, in their order."""
        k = self.keys(queue)
        found: list[Location] = []
        for some in chunks(ids, IDS_PER_CALL):
            members = list(map(str, some))
            pipe = self.client.pipeline(transaction=False)
            pipe.zmscore(k.delayed, members)
            pipe.zmscore(k.ready, members)
            pipe.hmget(k.blocked, members)
            delayed, ready, names = pipe.execute()
            blocked = {member: name.decode() for member, name in zip(members, names, strict=True) if name is not None}
            for member, name in blocked.items():
                pipe.zscore(f"{k.blocked}:{name}", member)
            scores = dict(zip(blocked, pipe.execute(), strict=True))
            for member, d, r in zip(members, delayed, ready, strict=True):
                score = scores.get(member, r)
                found.append(
                    Location(
                        None if d is None else int(d),
                        None if score is None else int(score) % BAND,
                        blocked.get(member),
                    )
                )
        return found

    def rank(self, queue: str, pk: int) -> int | None:
        """Count the ready ids that are taken before this one; None when it is not ready."""
        found: Any = self.client.zrank(self.keys(queue).ready, str(pk))
        return None if found is None else int(found)

    def ids(self, queue: str) -> Iterator[list[int]]:
        """Read every id of a queue, in batches. An id that moves meanwhile may come twice."""
        k = self.keys(queue)
        for key, scan in ((k.delayed, self.client.zscan), (k.ready, self.client.zscan), (k.blocked, self.client.hscan)):
            cursor = 0
            while True:
                cursor, batch = self._scanned(scan, key, cursor)
                if batch:
                    yield batch
                if cursor == 0:
                    break

    @translated
    def _scanned(self, scan: Callable[..., Any], key: str, cursor: int) -> tuple[int, list[int]]:
        """Read one batch of the ids in a key; return where the next one begins, and the batch."""
        following, members = scan(key, cursor, count=SCAN_COUNT)
        return int(following), whole([*dict(members)])


def _flat(entries: Sequence[Entry]) -> list[int]:
    """Return the entries as a script reads them: id, due tenth, rank, id, due tenth, rank, …"""
    flat: list[int] = []
    for pk, due_us, priority in entries:
        flat += (pk, us_to_tenths(due_us), PRIORITIES[1] - priority)
    return flat


def _counts(answer: Sequence[Any], entries: int) -> Put:
    """Parse the answer of scripts/put.lua to this number of entries."""
    word, put, present, beyond = answer
    # Without a horizon nothing is put: the loader of a worker will find the rows.
    return Put(beyond=entries) if word == b"lost" else Put(put, present, beyond)


def _meta(now_tenths: int, fields: Sequence[Any]) -> Meta:
    """Parse the values of ``META_FIELDS``; None for what is missing."""
    tick, horizon, loaded, run_id, replid, identity, loader_until, requested, swept = fields
    return Meta(
        now_tenths,
        int(tick or 0),
        None if horizon is None else int(horizon),
        None if loaded is None else int(loaded),
        (run_id or b"").decode(errors="replace"),
        (replid or b"").decode(errors="replace"),
        (identity or b"").decode(errors="replace"),
        int(loader_until or 0),
        requested is not None,
        int(swept or 0),
    )


def _snapshots(client: redis.Redis) -> str | None:
    save = _config(client, "save")
    if save is None:
        return None
    return "rdb" if save else "none"


def _config(client: redis.Redis, name: str) -> str | None:
    try:
        found = client.config_get(name)
    except redis.exceptions.ResponseError:
        return None
    return _text(found.get(name))


def _text(value: Any) -> str | None:
    if value is None:
        return None
    return value.decode() if isinstance(value, bytes) else str(value)
