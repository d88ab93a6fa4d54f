"""Redis is lost, emptied, restarted, rolled back, or another project's. Every message is delivered once."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import redis
from django.db import connection

from django_delayq import Verdict, cancel_message, reschedule_message, schedule_message, schedule_messages
from django_delayq.broker.keys import keys
from django_delayq.core.known_record import doubt_identity
from django_delayq.core.states import State
from django_delayq.models import Message
from django_delayq.models.messages import Identity
from django_delayq.worker.claim.blocked_names import names_in_redis
from testproject.servers import RedisServer
from tests.support.processes import Configure, Gate, Start
from tests.support.proxy import Proxy
from tests.support.record_of import (
    begun_per_message,
    consumed,
    effects_per_message,
    once_each,
    states,
    wait_until,
    wait_until_all,
    wait_until_redis_times,
)
from tests.support.redis_servers import of
from tests.support.workers import eventually

KEYS = keys("delayq", "default")


@pytest.fixture(autouse=True)
def _with_redis(configure: Configure) -> None:
    """Configure the short intervals: every test here is about Redis."""


# Fewer on SQLite, which has one writer.
A_LOT = 2000 if connection.vendor == "postgresql" else 300


def many(number: int, *, over: float, topic: str = "t.tx", start: float = 0.0) -> list[Message]:
    return schedule_messages({"topic": topic, "delay": start + over * n / number} for n in range(number))


def test_a_flush_with_thousands_waiting_loses_none_and_delivers_none_twice(
    start: Start, redis_client: redis.Redis
) -> None:
    """Redis is emptied again and again, at any moment of a load too."""
    worker = start("--processes", "2")
    worker.wait_for("Loaded Redis")
    messages = many(A_LOT, over=2.5, start=0.3)
    eventually(consumed(A_LOT // 10), "the first are delivered")
    while states()[State.CONSUMED] < A_LOT // 2:
        redis_client.flushall()
    worker.wait_for(r"Redis lost its ids \(it is empty\)")
    wait_until_all(State.CONSUMED, A_LOT)
    assert effects_per_message() == once_each(messages)
    worker.wait_for("Loaded Redis from the record: [1-9]")


def test_while_redis_is_down_delivery_goes_on_from_the_database_and_it_is_filled_when_it_is_back(
    start: Start, redis_server: RedisServer
) -> None:
    worker = start()
    worker.wait_for("Loaded Redis")
    messages = [*many(10, over=1.0), later := schedule_message("t.tx", delay=300)]
    redis_server.kill()
    messages += [*many(10, over=1.0), unknown := schedule_message("t.tx", delay=300)]
    eventually(consumed(20), "what is due is delivered")
    redis_server.start()
    with of(redis_server) as client:
        for message in (later, unknown):
            eventually(partial(client.zscore, KEYS.delayed, str(message.pk)), "the future is loaded again")
    assert all([reschedule_message(later, delay=0), reschedule_message(unknown, delay=0)])
    wait_until_all(State.CONSUMED, 22)
    assert effects_per_message() == once_each(messages)
    wait_until_redis_times()
    worker.wait_for("Redis is back")
    # An error of another kind that takes the place of the first has a line too: reset, and then refused.
    told = re.findall("Redis is away.*", worker.log)
    assert len(told) == len(set(told)) > 0
    assert worker.count("Redis is back") == 1


def test_workers_that_start_without_redis_load_it_when_it_comes(start: Start, redis_server: RedisServer) -> None:
    """Both at once: neither does harm to the other."""
    redis_server.stop()
    workers = [start() for _ in range(2)]
    first = wait_until(schedule_message("t.tx"), State.CONSUMED)
    messages = many(A_LOT, over=1.0, start=1.0)
    redis_server.start()
    wait_until_all(State.CONSUMED, A_LOT + 1)
    assert effects_per_message() == begun_per_message() == once_each([first, *messages])
    wait_until_redis_times()
    assert any(worker.count("Loaded Redis") for worker in workers)


def test_a_redis_restarted_from_an_old_dump_resurrects_nothing_and_lacks_nothing(
    start: Start, configure: Configure
) -> None:
    with RedisServer(persistence="rdb") as server, of(server) as client:
        configure(REDIS=server.url)
        worker = start()
        worker.wait_for("Loaded Redis")
        delivered = many(20, over=0.5, start=0.5)
        cancelled = many(5, over=0.1, start=2.5)
        moved = many(5, over=0.1, start=2.5)
        client.save()
        for message in cancelled:
            assert cancel_message(message).verdict == Verdict.CANCELLED
        eventually(consumed(20), "what is in the dump is delivered")
        unknown = many(20, over=1.5, start=1.0)
        server.kill()
        server.start()
        worker.wait_for(r"Redis lost its ids \(it was restarted or went back in time\)")
        eventually(lambda: states() == {State.CONSUMED: 45, State.CANCELLED: 5}, "all are delivered")
        assert effects_per_message() == once_each([*delivered, *moved, *unknown])
        worker.stop()


def ready_or_blocked(client: redis.Redis) -> int:
    """Return how many ids are due: those for which this worker has no slot are blocked."""
    return int(client.zcard(KEYS.ready)) + int(client.hlen(KEYS.blocked))


def test_any_key_may_be_deleted(start: Start, redis_client: redis.Redis, gate: Gate) -> None:
    worker = start("--threads", "1")
    messages: list[Message] = []
    due = {KEYS.ready, KEYS.blocked, KEYS.blocked_counts, f"{KEYS.blocked}:{names_in_redis('handler t.tx')[0]}"}
    for names in ({KEYS.delayed}, {KEYS.ready}, {KEYS.meta}, {KEYS.wake}, {KEYS.blocked}, {KEYS.blocked_counts}, due):
        # The only thread is busy.
        messages.append(blocker := gate.running())
        messages += schedule_messages({"topic": "t.tx"} for _ in range(5))
        messages += many(5, over=0.5, start=0.5)
        eventually(lambda: ready_or_blocked(redis_client) >= 5, "five are ready, if not the delayed ones too")
        redis_client.delete(*names)
        gate.open(f"go-{blocker.pk}-1")
        wait_until_all(State.CONSUMED, len(messages))
        assert effects_per_message() == once_each(messages), names
    assert worker.count("sweep of queue default put [0-9]+ messages that Redis had lost") > 0


def test_the_redis_of_another_database_is_refused(start: Start, redis_client: redis.Redis) -> None:
    redis_client.hset(KEYS.meta, mapping={"identity": "somebody-else", "horizon": 2**46})
    redis_client.zadd(KEYS.delayed, {str(10**9 + n): 2**45 for n in range(3)})
    worker = start()
    worker.wait_for("CRITICAL.*belongs to another database")
    messages = many(10, over=0.5)
    for message in messages:
        wait_until(message, State.CONSUMED)
    redis_client.zadd(KEYS.ready, {str(2 * 10**9 + n): n for n in range(3)})
    for message in (more := many(10, over=0.3)):
        wait_until(message, State.CONSUMED)
    assert redis_client.hget(KEYS.meta, "identity") == b"somebody-else"
    assert redis_client.zcount(KEYS.delayed, 2**45, 2**45) == 3
    assert all(redis_client.zscore(KEYS.ready, str(2 * 10**9 + n)) is not None for n in range(3))
    assert effects_per_message() == once_each([*messages, *more])
    assert worker.count("CRITICAL") == 1


@pytest.mark.usefixtures("puts_are_flushed")
def test_messages_that_redis_evicts_are_delivered(start: Start, configure: Configure) -> None:
    options = ["--maxmemory", "3mb", "--maxmemory-policy", "allkeys-lru", "--notify-keyspace-events", "Ke"]
    with (
        RedisServer(*options) as server,
        of(server) as client,
        client.pubsub(ignore_subscribe_messages=True) as evictions,
    ):
        evictions.subscribe(f"__keyspace@0__:{KEYS.delayed}")
        configure(REDIS=server.url)
        worker = start()
        worker.wait_for("Loaded Redis")
        messages = many(300, over=1.5, start=5.0)
        # While it is there, the key can still be evicted.
        far = schedule_message("t.tx", delay=300)
        assert client.zcard(KEYS.delayed) == 301
        full = threading.Event()

        def press() -> None:
            # These keys are always newer than the queue's own, which no one reads before the due time.
            number = 0
            while not full.is_set():
                number += 1
                try:
                    client.set(f"junk:{number}", b"x" * 20_000)
                except redis.ResponseError:
                    full.wait(0.01)

        pressing = threading.Thread(target=press)
        pressing.start()
        try:
            eventually(evictions.get_message, "the key of what is delayed is evicted")
            assert cancel_message(far)
            eventually(consumed(300), "all others are delivered")
        finally:
            full.set()
            pressing.join()
        assert effects_per_message() == once_each(messages)
        worker.stop()


@pytest.fixture
def replica(to_redis: Proxy) -> Iterator[RedisServer]:
    """A replica with the network between it and its master."""
    with RedisServer("--replicaof", "127.0.0.1", str(to_redis.port)) as server:
        yield server


@pytest.mark.usefixtures("puts_are_flushed")
def test_a_failover_to_a_replica_that_lags_loses_nothing_though_a_producer_follows_late(
    start: Start, configure: Configure, redis_server: RedisServer, to_redis: Proxy, replica: RedisServer
) -> None:
    """A worker has loaded the new master when a producer commits that still knows the old one only."""
    # No sweep comes in time.
    configure(GRACE=600)
    with Proxy(redis_server.port) as of_worker, Proxy(redis_server.port) as own, of(replica) as client:
        configure(REDIS=of_worker.url)
        worker = start()
        worker.wait_for("Loaded Redis")
        configure(REDIS=own.url)
        eventually(lambda: client.info("replication")["master_link_status"] == "up", "the replica follows")
        known = [*many(50, over=2.0, start=1.0), schedule_message("t.tx", delay=300)]
        eventually(lambda: client.zscore(KEYS.delayed, str(known[-1].pk)), "the replica knows them")
        to_redis.swallow()
        unknown = [*many(50, over=2.0, start=1.5), schedule_message("t.tx", delay=300)]
        last = str(unknown[-1].pk)
        redis_server.kill()
        client.replicaof("no", "one")
        assert client.zscore(KEYS.delayed, last) is None
        of_worker.turn_to(replica.port)
        worker.wait_for("Redis lost its ids")
        eventually(lambda: client.zscore(KEYS.delayed, last) is not None, "the future is loaded again")
        late = schedule_message("t.tx")
        own.turn_to(replica.port)

        def is_loaded() -> bool:
            schedule_message("t.tx", delay=600)
            return worker.count("Redis was out of reach for a process") > 0

        eventually(is_loaded, "the producer asks for a load")
        for message in (known[-1], unknown[-1]):
            assert reschedule_message(message, delay=0)
        eventually(consumed(103), "all are delivered")
        assert effects_per_message() == once_each([*known, *unknown, late])
        worker.stop()


Write = Callable[[redis.Redis], object]


def of_another_type(name: str) -> Write:
    return lambda client: client.set(getattr(KEYS, name), "somebody's")


def in_the_meta(rubbish: dict[Any, Any]) -> Write:
    return lambda client: client.hset(KEYS.meta, mapping=rubbish)


NO_IDS = ("nonsense", "-1", "0", "1.5", str(2**63), str(2**70), "")
RUBBISH: dict[str, dict[str, Write]] = {
    "meta": {
        "a horizon that is no number": in_the_meta({"horizon": "abc"}),
        "a horizon that is not a number": in_the_meta({"horizon": "nan"}),
        "an endless horizon": in_the_meta({"horizon": "inf"}),
        "a horizon in a hundred years": in_the_meta({"horizon": 49_000_000_000_000, "loaded": 49_000_000_000_000}),
        "a load beyond the horizon": in_the_meta({"loaded": "9" * 15}),
        "a load that is no number": in_the_meta({"loaded": "1e300"}),
        "a tick that is no number": in_the_meta({"tick": "abc"}),
        "a tick at its end": in_the_meta({"tick": 2**63 - 1}),
        "a loader until the end of time": in_the_meta({"loader": "ghost", "loader_until": "9" * 15, "horizon": "x"}),
        "a run that is no text": in_the_meta({"run_id": b"\xff\xfe"}),
    },
    "types": {f"a {name} of another type": of_another_type(name) for name in ("delayed", "ready", "meta", "wake")},
    "ids": {
        **{repr(id_): partial(redis.Redis.zadd, name=KEYS.ready, mapping={id_: 0}) for id_ in NO_IDS},
        "ids of nothing": partial(redis.Redis.zadd, name=KEYS.ready, mapping={"999999999": 1}),
        "ids of nothing in a moment": partial(redis.Redis.zadd, name=KEYS.delayed, mapping={"888888888": 3}),
    },
}


@pytest.mark.parametrize("kind", RUBBISH)
def test_rubbish_is_replaced_under_a_working_worker(
    start: Start, redis_client: redis.Redis, set_pace: Callable[[dict[str, float]], None], kind: str
) -> None:
    # After failures in a row a worker would wait before it uses Redis again.
    set_pace({"broker_switch.FLAPPING": 0.0, "process.Parts.upkeep.meta_interval": 0.1})
    worker = start("--threads", "2")
    done = wait_until(schedule_message("t.tx"), State.CONSUMED)
    redis_client.zadd(KEYS.ready, {str(done.pk): 1})
    future: list[str] = []

    def is_healed() -> bool:
        if b"string" in map(redis_client.type, (KEYS.meta, KEYS.delayed, KEYS.ready, KEYS.wake)):
            return False
        meta = redis_client.hgetall(KEYS.meta)
        seconds, _micros = redis_client.time()
        horizon = meta.get(b"horizon", b"")
        whole = horizon.isdigit() and horizon == meta.get(b"loaded")
        return whole and int(horizon) / 10_000 < int(seconds) + 3_700 and meta.get(b"tick", b"").isdigit()

    def times() -> bool:
        # This process may have failed to put the one before, and Redis may not have read this one yet.
        future.append(str(schedule_message("t.tx", delay=300).pk))
        return any(redis_client.zscore(KEYS.delayed, pk) is not None for pk in future[-2:])

    for what, write in RUBBISH[kind].items():
        # Workers delete their keys once in half a minute at most.
        redis_client.hdel(KEYS.meta, "cleared")
        write(redis_client)
        waiting, future = many(5, over=0.5, start=0.2), []
        eventually(is_healed, f"{what} is replaced")
        eventually(times, f"Redis times again after {what}")
        for message in waiting:
            wait_until(message, State.CONSUMED)
        wait_until_redis_times()
        assert set(effects_per_message().values()) == {1}, what
    assert redis_client.zcard(KEYS.ready) == 0
    assert worker.count("Traceback|died") == 0, worker.log
    assert worker.count("Redis") <= 8 * len(RUBBISH[kind]), worker.log
    assert worker.stop() == 0


def test_a_redis_that_refuses_some_calls_floods_no_log(start: Start, configure: Configure) -> None:
    """The loader may do all it needs, but nobody may take."""
    with RedisServer() as server, of(server) as client:
        rights = ("resetkeys", "~*", "+@all", "-zpopmin")
        client.execute_command("ACL", "SETUSER", "half", "on", ">half", *rights)
        configure(REDIS=f"redis://half:half@127.0.0.1:{server.port}/0")
        worker = start()
        worker.wait_for("Redis answers, and cannot be used")
        began = time.monotonic()
        while time.monotonic() - began < 8.0:
            wait_until(schedule_message("t.tx"), State.CONSUMED)
        assert worker.count("cannot be used") <= 5, worker.log
        assert set(effects_per_message().values()) == {1}
        worker.stop()


def test_a_worker_notices_that_its_database_was_emptied(start: Start) -> None:
    """``manage.py flush`` gives the database another identity, which those who start now know."""
    worker = start()
    worker.wait_for("Loaded Redis")
    Identity.objects.all().delete()
    doubt_identity("default")
    for _ in range(4):
        wait_until(schedule_message("t.tx"), State.CONSUMED)
    assert worker.count("that Redis had lost") <= 1, worker.log
