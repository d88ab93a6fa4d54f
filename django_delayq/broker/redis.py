"""The broker on Redis: sorted sets of ids, moved by scripts."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import selectors
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import redis

from ..clock import SECOND, us_to_tenths
from ..conf import Settings
from ..exceptions import BrokerFull, BrokerUnavailable, ForeignBroker
from ..validation import PRIORITIES
from . import connection, scripts
from .base import BATCH, DueTicket, Entry, Put, Taken
from .keys import BAND, PARTITION, RANKS, Keys, keys, namespace
from .pipelined import PipelinedConnections
from .scripted import ScriptConnections

logger = logging.getLogger("django_delayq")

# A connection on which no token came for so long may have been dropped on the way without a word. Seconds.
REARM = 60.0


@dataclass(frozen=True, slots=True)
class Look:
    """What a queue's meta says, and what the server says of itself."""

    now_tenths: int
    tick: int
    horizon_tenths: int | None
    loaded_tenths: int | None
    run_id: str
    replid: str
    identity: str


@dataclass(frozen=True, slots=True)
class Server:
    """Which run of which server this is: it changes with a restart and with a failover."""

    run_id: str
    replid: str
    role: str


class RedisBroker:
    """The verbs of ``Broker``, and what the loader and the restore need besides.

    ``now`` is for tests: tenths of a millisecond, or "" for the server's clock.
    """

    def __init__(self, settings: Settings, using: str, *, timeout: float, now: str | int = "") -> None:
        self.settings = settings
        self.namespace = namespace(settings.PREFIX, using)
        self.timeout = timeout
        self.now = now
        self._client: redis.Redis | None = None
        self._listener: _Listener | None = None
        self._lock = threading.Lock()

    @property
    def client(self) -> redis.Redis:
        if self._client is None:
            with self._lock:
                if self._client is None:
                    self._client = connection.connect(self.settings, timeout=self.timeout)
        return self._client

    @cached_property
    def lines(self) -> PipelinedConnections:
        return PipelinedConnections(lambda: self.client.connection_pool, self.timeout)

    @cached_property
    def calls(self) -> ScriptConnections:
        return ScriptConnections(lambda: self.client.connection_pool)

    def keys(self, queue: str) -> Keys:
        return keys(self.namespace, queue)

    # --- the verbs of Broker ------------------------------------------------------------------------------------------

    def put(self, queue: str, entries: Sequence[Entry], *, fill: bool = False) -> Put:
        k = self.keys(queue)
        total = Put()
        for start in range(0, len(entries), BATCH):
            rest = _flat(entries[start : start + BATCH])
            with answering():
                word, put, present, beyond = scripts.load("put")(
                    self.client,
                    delayed=k.delayed,
                    ready=k.ready,
                    meta=k.meta,
                    wake=k.wake,
                    now=self.now,
                    mode="fill" if fill else "set",
                    rest=rest,
                )
            if word == b"lost":
                # No horizon yet: the loader, which any worker runs, will find the rows.
                beyond = len(rest) // 3
            total += Put(put, present, beyond)
        return total

    def tell(self, queue: str, entries: Sequence[Entry]) -> int:
        """``put`` without waiting for the answer; how many answers of earlier ones have come, all of them good.

        Raises what an earlier answer said, or that none came within the timeout. ``settle`` waits for all.
        """
        k = self.keys(queue)
        answers = 0
        with answering():
            for start in range(0, len(entries), BATCH):
                answers += self.lines.put(k, self.now, _flat(entries[start : start + BATCH]))
        return answers

    def settle(self) -> None:
        """Wait until Redis has answered all that it was told."""
        with answering():
            self.lines.settle()

    def missing(self, queue: str, entries: Sequence[Entry]) -> list[int]:
        """The ids of those that ``put(fill=True)`` would put; at most ``BATCH`` entries."""
        k = self.keys(queue)
        with answering():
            answer = scripts.load("missing")(self.client, delayed=k.delayed, ready=k.ready, rest=_flat(entries))
        return [int(id_) for id_ in answer]

    def park(self, queue: str, tickets: Sequence[DueTicket], seconds: float) -> None:
        """Look at these ids again after a while, whatever their due time."""
        k = self.keys(queue)
        at = tenths_now(self) + int(seconds * SECOND)
        with answering():
            self.client.zadd(k.delayed, {str(ticket.id): at + ticket.rank / RANKS for ticket in tickets})

    def give_back(self, queue: str, tickets: Sequence[DueTicket]) -> None:
        """Put ids that were taken back, each where it was."""
        k = self.keys(queue)
        ready, delayed = {}, {}
        for ticket in tickets:
            if not ticket.ready_tenths:
                continue
            if ticket.until > 0:
                delayed[str(ticket.id)] = ticket.ready_tenths + ticket.rank / RANKS
            else:
                ready[str(ticket.id)] = ticket.rank * BAND + ticket.ready_tenths
        for key, places in ((k.ready, ready), (k.delayed, delayed)):
            if places:
                with answering():
                    self.client.zadd(key, places)

    def remove(self, queue: str, ids: Sequence[int]) -> None:
        k = self.keys(queue)
        for start in range(0, len(ids), BATCH):
            with answering():
                scripts.load("remove")(self.client, delayed=k.delayed, ready=k.ready, rest=ids[start : start + BATCH])

    def take(self, queue: str, limit: int, within: float = 0.0) -> Taken:
        k = self.keys(queue)
        with answering():
            answer = scripts.load("take")(
                self.calls,
                delayed=k.delayed,
                ready=k.ready,
                wake=k.wake,
                now=self.now,
                limit=min(limit, BATCH),
                batch=BATCH,
                within=int(within * SECOND),
            )
        moved, left, next_due = answer[:3]
        now_tenths = float(answer[3])
        tickets = []
        for i in range(4, len(answer), 2):
            # What cannot be an id was not put by us; the database would refuse the others with it.
            if not _is_id(answer[i]):
                continue
            rank, ready_tenths = divmod(int(answer[i + 1]), BAND)
            until = (ready_tenths - now_tenths) / SECOND
            tickets.append(DueTicket(int(answer[i]), ready_tenths, PARTITION, rank, until))
        return Taken(tickets, left, float(next_due) / SECOND if next_due else None, moved == BATCH)

    def exclusively(self) -> AbstractContextManager[object]:
        # A taken id is nobody else's any more.
        return nullcontext()

    def wait(self, queues: Sequence[str], timeout: float) -> bool:
        if self._listener is None:
            self._listener = _Listener(lambda: connection.connect(self.settings, timeout=self.timeout))
        with answering():
            return self._listener.wait([self.keys(queue).wake for queue in queues], timeout)

    def wake(self) -> None:
        if self._listener is not None:
            self._listener.wake()

    def stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.stop_listening()

    def distrust(self) -> None:
        """Redis did not answer: the connection that waits may be as dead, and would never say so."""
        if self._listener is not None:
            self._listener.stale = True

    def ring(self, queue: str) -> None:
        with answering():
            scripts.load("ring")(self.client, wake=self.keys(queue).wake)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        if "lines" in self.__dict__:
            self.lines.close()
        if self._client is not None:
            with contextlib.suppress(redis.RedisError, OSError):
                self._client.close()
                self._client.connection_pool.disconnect()

    # --- for the loader, the restore and the inspector ----------------------------------------------------------------

    def look(self, queue: str) -> Look:
        with answering():
            answer = scripts.load("look")(self.client, meta=self.keys(queue).meta, now=self.now)
        now, tick, horizon, loaded, run_id, replid, identity = answer
        return Look(
            int(now),
            int(tick),
            int(horizon) if horizon else None,
            int(loaded) if loaded else None,
            run_id.decode(),
            replid.decode(),
            identity.decode(),
        )

    def server(self) -> Server:
        with answering():
            pipe = self.client.pipeline(transaction=False)
            pipe.info("server")
            pipe.info("replication")
            server, replication = pipe.execute()
        return Server(
            str(server["run_id"]), str(replication.get("master_replid", "")), str(replication.get("role", ""))
        )

    def load(
        self,
        queue: str,
        *,
        ahead: float,
        worker: str,
        lease: float,
        identity: str,
        server: Server,
        lost: bool,
    ) -> tuple[int | None, int] | None:
        """Begin to load: from which due tenth on (None: all), and up to which. None when another is at it."""
        with answering():
            word, begin, horizon = scripts.load("load")(
                self.client,
                meta=self.keys(queue).meta,
                now=self.now,
                ahead=int(ahead * SECOND),
                worker=worker,
                lease=int(lease * SECOND),
                identity=identity,
                run_id=server.run_id,
                replid=server.replid,
                lost="1" if lost else "",
            )
        if word == b"foreign":
            raise ForeignBroker
        if word == b"busy":
            return None
        return (int(begin) if begin else None), int(horizon)

    def loaded(self, queue: str, *, worker: str, upto_tenths: int, lease: float | None) -> bool:
        """Note how far the load has come; lease None: it is done. False when this load is void."""
        with answering():
            word = scripts.load("loaded")(
                self.client,
                meta=self.keys(queue).meta,
                now=self.now,
                worker=worker,
                upto=upto_tenths,
                lease="" if lease is None else int(lease * SECOND),
            )
        return bool(word == b"ok")


def _is_id(member: bytes) -> bool:
    return member.isdigit() and len(member) <= 19 and int(member) < 2**63


def _flat(entries: Sequence[Entry]) -> list[int]:
    flat: list[int] = []
    for pk, due_us, priority in entries:
        flat += (pk, us_to_tenths(due_us), PRIORITIES[1] - priority)
    return flat


def tenths_now(broker: RedisBroker) -> int:
    """The broker's clock."""
    if broker.now != "":
        return int(broker.now)
    with answering():
        seconds, micros = broker.client.time()
    return int(seconds) * SECOND + int(micros) // 100


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Whatever Redis or its client raises means one thing: no answer."""
    try:
        yield
    except (redis.RedisError, OSError) as error:
        kind = BrokerFull if "used memory > 'maxmemory'" in str(error) else BrokerUnavailable
        raise kind(f"{type(error).__name__}: {error}") from error


def _readable(files: list[Any], timeout: float) -> list[Any]:
    """Which of these can be read, within ``timeout`` seconds."""
    try:
        # epoll and poll know whole milliseconds only, and round up.
        return select.select(files, [], [], timeout)[0]
    except ValueError:
        # A descriptor of 1024 or more.
        with selectors.DefaultSelector() as selector:
            for file in files:
                selector.register(file, selectors.EVENT_READ)
            return [key.fileobj for key, _events in selector.select(timeout)]


class _Listener:
    """Waits for a token in one of several lists, exactly as long as asked.

    BLPOP's own timeout is looked at only ``hz`` times a second (10 by default). So it is sent without one, and the
    wait happens on the client's socket; a BLPOP that is still waiting stays armed for the next wait. One that was
    answered is sent again by the next wait only: who is busy till then takes no token from another. Who is busy without
    having been answered, and for long, calls ``deafen``.
    """

    def __init__(self, connect: Callable[[], redis.Redis]) -> None:
        self._connect = connect
        self._client: redis.Redis | None = None
        self._connection: Any = None
        self._armed: tuple[str, ...] = ()
        self._armed_at = 0.0
        # Set by any thread.
        self.stale = False
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._write, b"1")

    def wait(self, lists: Sequence[str], timeout: float) -> bool:
        """Whether a token came."""
        try:
            return self._wait(tuple(lists), timeout)
        except (redis.RedisError, OSError):
            self._hang_up()
            raise

    def _wait(self, lists: tuple[str, ...], timeout: float) -> bool:
        if self.stale or (self._armed and self._armed != lists) or time.monotonic() - self._armed_at > REARM:
            self._hang_up()
            self.stale = False
        if self._connection is not None and not self._armed and connection.has_ended(self._connection):
            self._hang_up()
        if self._connection is None:
            if self._client is None:
                self._client = self._connect()
            self._connection = self._client.connection_pool.get_connection()
        if not self._armed:
            self._connection.send_command("BLPOP", *lists, 0)
            self._armed = lists
            self._armed_at = time.monotonic()
        woken = _readable([self._read, self._connection._sock], max(0.0, timeout))
        if self._read in woken:
            with contextlib.suppress(BlockingIOError):
                os.read(self._read, 4096)
        if self._connection._sock in woken or self._connection.can_read(0):
            self._connection.read_response()
            self._armed = ()
            return True
        return False

    def stop_listening(self) -> None:
        """Take no token any more. Closing the connection is the only way to be sure."""
        if self._armed:
            self._hang_up()

    def _hang_up(self) -> None:
        self._armed = ()
        if self._connection is not None:
            self._connection.disconnect()
            if self._client is not None:
                self._client.connection_pool.release(self._connection)
            self._connection = None

    def close(self) -> None:
        self._hang_up()
        if self._client is not None:
            self._client.close()
            self._client = None
        for end in (self._read, self._write):
            with contextlib.suppress(OSError):
                os.close(end)
