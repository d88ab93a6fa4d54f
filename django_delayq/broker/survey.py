"""Reads what Redis holds, and changes nothing: for the preview of a restore, the comparison and the statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import redis

from .keys import BAND
from .redis import RedisBroker, answering, tenths_now

# Members in one reply of a scan, and ids in one question.
BATCH = 1000


@dataclass(frozen=True, slots=True)
class Meta:
    """What a queue's meta says."""

    horizon_tenths: int | None
    loaded_tenths: int | None
    run_id: str
    replid: str
    identity: str


class Place(NamedTuple):
    """Where an id is: its due tenth in *delayed*, the tenth since which it is in *ready*; None where it is not."""

    delayed_tenths: int | None
    ready_tenths: int | None


@dataclass(frozen=True, slots=True)
class QueueSize:
    """How many ids a queue holds."""

    delayed: int
    ready: int

    @property
    def total(self) -> int:
        return self.delayed + self.ready


@dataclass(frozen=True, slots=True)
class Health:
    """What the server says of itself; None where it does not say, or may not."""

    version: str | None
    role: str | None
    uptime: int | None
    memory: int | None
    max_memory: int | None
    policy: str | None
    evicted: int | None
    # Whether anything is written to disk: "aof", "rdb", "none".
    persistence: str | None


class Survey:
    """The questions to one Redis, through a broker's connection. Each raises ``BrokerUnavailable``."""

    def __init__(self, broker: RedisBroker) -> None:
        self.broker = broker

    def now_tenths(self) -> int:
        return tenths_now(self.broker)

    def meta(self, queue: str) -> Meta:
        with answering():
            values: list[Any] = self.broker.client.hmget(
                self.broker.keys(queue).meta, ["horizon", "loaded", "run_id", "replid", "identity"]
            )
        horizon, loaded, run_id, replid, identity = ((value or b"").decode() for value in values)
        return Meta(int(horizon) if horizon else None, int(loaded) if loaded else None, run_id, replid, identity)

    def held(self, queue: str) -> QueueSize:
        k = self.broker.keys(queue)
        with answering():
            pipe = self.broker.client.pipeline(transaction=False)
            pipe.zcard(k.delayed)
            pipe.zcard(k.ready)
            delayed, ready = pipe.execute()
        return QueueSize(delayed, ready)

    def places(self, queue: str, ids: Sequence[int]) -> list[Place]:
        """Where each of these ids is, in their order."""
        k = self.broker.keys(queue)
        found: list[Place] = []
        for start in range(0, len(ids), BATCH):
            batch = [str(pk) for pk in ids[start : start + BATCH]]
            with answering():
                pipe = self.broker.client.pipeline(transaction=False)
                pipe.zmscore(k.delayed, batch)
                pipe.zmscore(k.ready, batch)
                delayed, ready = pipe.execute()
            found += [
                Place(None if d is None else int(d), None if r is None else int(r) % BAND)
                for d, r in zip(delayed, ready, strict=True)
            ]
        return found

    def rank(self, queue: str, pk: int) -> int | None:
        """How many ids are taken from *ready* before this one; None: it is not there."""
        with answering():
            found: Any = self.broker.client.zrank(self.broker.keys(queue).ready, str(pk))
        return None if found is None else int(found)

    def ids(self, queue: str) -> Iterator[list[int]]:
        """Every id that a queue holds, in batches. One that moves meanwhile may come twice."""
        k = self.broker.keys(queue)
        for key in (k.delayed, k.ready):
            cursor: Any = 0
            while True:
                with answering():
                    answer: Any = self.broker.client.zscan(key, cursor, count=BATCH)
                cursor, members = answer
                # Members that are no ids are none of ours.
                batch = [int(member) for member, _score in members if member.isdigit()]
                if batch:
                    yield batch
                if int(cursor) == 0:
                    break

    def health(self) -> Health:
        server, memory = self._info("server"), self._info("memory")
        persistence, replication = self._info("persistence"), self._info("replication")
        return Health(
            version=_text(server.get("valkey_version") or server.get("redis_version")),
            role=_text(replication.get("role")),
            uptime=server.get("uptime_in_seconds"),
            memory=memory.get("used_memory"),
            max_memory=memory.get("maxmemory"),
            policy=_text(memory.get("maxmemory_policy")) or self._config("maxmemory-policy"),
            evicted=self._info("stats").get("evicted_keys"),
            persistence=self._persistence(persistence),
        )

    def _persistence(self, info: dict[str, Any]) -> str | None:
        if info.get("aof_enabled"):
            return "aof"
        save = self._config("save")
        if save is None:
            return None
        return "rdb" if save else "none"

    def _info(self, section: str) -> dict[str, Any]:
        with answering():
            try:
                found: dict[str, Any] = self.broker.client.info(section)
            except redis.exceptions.ResponseError:
                # Not permitted, or not known there.
                return {}
        return found

    def _config(self, name: str) -> str | None:
        with answering():
            try:
                found = self.broker.client.config_get(name)
            except redis.exceptions.ResponseError:
                return None
        return _text(found.get(name))


def _text(value: Any) -> str | None:
    if value is None:
        return None
    return value.decode() if isinstance(value, bytes) else str(value)
