"""The broker on Redis: sorted sets of ids, moved by Lua scripts."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, wraps
from itertools import chain
from typing import Any, ClassVar, ParamSpec, TypeVar

import redis
from django.db import Error as DatabaseError
from redis.exceptions import NoScriptError

from ..core.bounds import PRIORITIES
from ..core.clock import SECOND, us_to_tenths
from ..core.exceptions import (
    BrokerFull,
    BrokerRubbish,
    BrokerUnavailable,
    ClusterBroker,
    DelayqError,
    ForeignBroker,
)
from ..core.record_clock import record_clock
from ..project.conf import Settings
from ..record.sql.rows import Ticket
from . import scripts, server_info
from .base import (
    IDS_PER_CALL,
    DueQueue,
    DueQueues,
    Entry,
    Meta,
    Put,
    QueueSize,
    RedisPlace,
    ServerInfo,
    ServerRun,
    Taken,
)
from .connection import connect
from .keys import BAND, RANKS, Keys, keys, namespace
from .listener import Listener
from .puts import PutConnections, SentPut
from .scripted import ScriptConnections

# More ids than any queue has.
MANY = 10**12
# The number of members in one reply to a scan, roughly.
SCAN_COUNT = 1000
# The fields that scripts/tick.lua returns, and that ``read_meta`` reads, in this order.
META_FIELDS = ("tick", "horizon", "loaded", "run_id", "replid", "identity", "loader_until", "requested")
# The answers by which a Redis in cluster mode refuses keys.
CLUSTER_ERRORS = (
    redis.exceptions.MovedError,
    redis.exceptions.AskError,
    redis.exceptions.ClusterCrossSlotError,
    redis.exceptions.ClusterDownError,
)
# What Redis says when a key, a score or a field is not what this package writes there.
NOT_OURS = re.compile("WRONGTYPE|not an integer|not a valid float|overflow|attempt to")

# Errors that stay what they are. Some calls read the identity of the database, which may not answer.
OURS = (DelayqError, DatabaseError)

P = ParamSpec("P")
R = TypeVar("R")


@contextlib.contextmanager
def translated_errors() -> Iterator[None]:
    """Turn every error of Redis, its client and its answers into ``BrokerUnavailable`` or a kind of it.

    An answer that is not what it should be raises anything: a server need not be Redis, and people write into keys.
    """
    try:
        yield
    except OURS:
        raise
    except Exception as error:
        raise _translate(error) from error


def _translated(method: Callable[P, R]) -> Callable[P, R]:
    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except OURS:
            raise
        except Exception as error:
            raise _translate(error) from error

    return call


def _translate(error: Exception) -> BrokerUnavailable:
    if isinstance(error, CLUSTER_ERRORS):
        return ClusterBroker()
    kind: type[BrokerUnavailable] = BrokerUnavailable
    if "used memory > 'maxmemory'" in str(error):
        kind = BrokerFull
    elif NOT_OURS.search(str(error)) or not isinstance(error, redis.RedisError | OSError):
        kind = BrokerRubbish
    return kind(f"{type(error).__name__}: {error}")


class RedisBroker:
    """Implements ``Index``, and so ``Broker``; their docstrings say what each method does.

    ``timeout`` is in seconds, for connecting and for each answer. ``identity`` returns the identity of the caller's
    database: queues of another one are refused with ``ForeignBroker``. None: the caller does not mind. ``now`` returns
    the time by the record's clock, in seconds since 1970; the clock of the server is not used.
    """

    claims_ahead: ClassVar[bool] = True
    forgets_taken: ClassVar[bool] = True

    def __init__(
        self,
        settings: Settings,
        using: str,
        *,
        timeout: float,
        identity: Callable[[], str] | None = None,
        now: Callable[[], float] | None = None,
    ) -> None:
        self.settings = settings
        self.namespace = namespace(settings.PREFIX, using)
        self.timeout = timeout
        self.identity = identity or (lambda: "")
        self.now = now or record_clock(using).seconds
        self._client: redis.Redis | None = None
        self._listener: Listener | None = None
        self._lock = threading.Lock()

    @property
    def client(self) -> redis.Redis:
        """The client of redis-py, which connects on its first command."""
        if self._client is None:
            with self._lock:
                if self._client is None:
                    self._client = self._connect()
        return self._client

    def _connect(self) -> redis.Redis:
        return connect(self.settings, timeout=self.timeout)

    @cached_property
    def _puts(self) -> PutConnections:
        return PutConnections(lambda: self.client.connection_pool)

    @cached_property
    def _scripted(self) -> ScriptConnections:
        return ScriptConnections(lambda: self.client.connection_pool)

    def keys(self, queue: str) -> Keys:
        """Return the keys of a queue."""
        return keys(self.namespace, queue)

    # --- Broker -------------------------------------------------------------------------------------------------------

    @_translated
    def put(self, queue: str, entries: Sequence[Entry]) -> Put:
        """Put ids into the places for their due times."""
        return self._put({queue: entries}, "set")[queue]

    def _put(self, entries: Mapping[str, Sequence[Entry]], mode: str) -> dict[str, Put]:
        how = {"now": self.now_tenths(), "mode": mode, "identity": self.identity()}
        parts = [
            (queue, some[start : start + IDS_PER_CALL])
            for queue, some in entries.items()
            for start in range(0, len(some), IDS_PER_CALL)
        ]
        answers = self._call_many("put", [(self.keys(queue), {**how, "rest": _flat(part)}) for queue, part in parts])
        found = dict.fromkeys(entries, Put())
        for (queue, part), answer in zip(parts, answers, strict=True):
            found[queue] += _counts(answer, len(part))
        return found

    @_translated
    def remove(self, queue: str, ids: Sequence[int]) -> None:
        """Forget ids."""
        k = self.keys(queue)
        if "_puts" in self.__dict__:
            # A put of the same message would bring its id back when it arrived after this call.
            self._puts.flush()
        for start in range(0, len(ids), IDS_PER_CALL):
            some = ids[start : start + IDS_PER_CALL]
            answer = scripts.load("remove")(self.client, k, some, identity=self.identity())
            if answer == b"foreign":
                raise ForeignBroker

    @_translated
    def take(self, queue: str, limit: int, within: float = 0.0, opened: Mapping[str, int] = {}) -> Taken:
        """Take ids that are due, or fall due in a moment."""
        answer = scripts.load("take")(self._scripted, self.keys(queue), **self._to_take(limit, within, opened))
        return _taken(answer, self.now())

    def _to_take(self, limit: int, within: float, opened: Mapping[str, int]) -> dict[str, Any]:
        return {
            "rest": [*chain.from_iterable((name, min(number, IDS_PER_CALL)) for name, number in opened.items())],
            "now": self.now_tenths(),
            "limit": min(limit, IDS_PER_CALL),
            "batch": IDS_PER_CALL,
            "within": int(within * SECOND),
            "identity": self.identity(),
        }

    @_translated
    def take_many(self, due: Sequence[DueQueue], limit: int, within: float = 0.0) -> dict[str, Taken]:
        """Take ids of several queues in one round trip."""
        calls = {}
        for queue, ready, falling_due, opened in due:
            share = min(limit, ready + falling_due + sum(opened.values()))
            limit -= share
            # A queue without any stands in the index too early. A take corrects that.
            if share or falling_due or not ready:
                calls[queue] = self._to_take(share, within, opened)
        answers = self._call_many("take", [(self.keys(queue), call) for queue, call in calls.items()])
        now = self.now()
        return {queue: _taken(answer, now) for queue, answer in zip(calls, answers, strict=True)}

    @_translated
    def due_queues(
        self, queues: Sequence[str] | None, within: float = 0.0, *, after: str = "", enough: int | None = None
    ) -> DueQueues:
        """Ask the index of queues."""
        answer = scripts.load("due")(
            self._scripted,
            self.keys(""),
            queues or (),
            now=self.now_tenths(),
            within=int(within * SECOND),
            enough=MANY if enough is None else enough,
            after=after,
        )
        next_due, more = answer[:2]
        found = [
            DueQueue(name.decode(), ready, due)
            for name, ready, due in zip(answer[2::3], answer[3::3], answer[4::3], strict=True)
        ]
        return DueQueues(found, more, _until(next_due, self.now()))

    def promote(self, queue: str) -> Taken:
        """Make ids ready that have fallen due."""
        return self.take(queue, 0)

    @_translated
    def park(self, queue: str, tickets: Sequence[Ticket], seconds: float) -> None:
        """Put taken ids back with another due time."""
        due_tenths = self.now_tenths() + int(seconds * SECOND)
        self._put_back(queue, [(ticket.id, due_tenths + ticket.rank / RANKS, "") for ticket in tickets])

    @_translated
    def put_back(self, queue: str, tickets: Sequence[Ticket]) -> None:
        """Put taken ids back into their former places."""
        places: list[tuple[int, float | str, float | str]] = []
        for ticket in tickets:
            if not ticket.ready_tenths:
                continue
            if ticket.until > 0:
                places.append((ticket.id, ticket.ready_tenths + ticket.rank / RANKS, ""))
            else:
                places.append((ticket.id, "", ticket.rank * BAND + ticket.ready_tenths))
        self._put_back(queue, places)

    def _put_back(self, queue: str, places: Sequence[tuple[int, float | str, float | str]]) -> None:
        # As Python writes them: a double is exact with up to 17 digits.
        rest = [repr(value) if isinstance(value, float) else value for place in places for value in place]
        scripts.load("put_back")(self.client, self.keys(queue), rest)

    @_translated
    def stand_aside(self, queue: str, tickets: Mapping[str, Sequence[Ticket]]) -> None:
        """Put taken ids aside by name."""
        places = [
            (ticket.id, ticket.rank * BAND + (ticket.ready_tenths or 0), name)
            for name, some in tickets.items()
            for ticket in some
        ]
        for start in range(0, len(places), IDS_PER_CALL):
            rest = [*chain.from_iterable(places[start : start + IDS_PER_CALL])]
            scripts.load("stand_aside")(self.client, self.keys(queue), rest)

    @_translated
    def asides(self) -> dict[str, dict[str, int]]:
        """Return how many ids stand aside."""
        found: dict[str, dict[str, int]] = {}
        fields: Any = self.client.hgetall(self.keys("").asides)
        for place, number in fields.items():
            queue, _, name = place.decode(errors="replace").partition(":")
            found.setdefault(queue, {})[name] = int(number)
        return found

    def exclusively(self) -> AbstractContextManager[object]:
        """Do nothing: an id that was taken is no longer there for others."""
        return nullcontext()

    @_translated
    def listen(self, queues: Sequence[str] | None, timeout: float) -> bool:
        """Sleep until one of the queues is notified."""
        if self._listener is None:
            self._listener = Listener(self._connect)
        return self._listener.listen([k.wake for k in self._woken(queues)], timeout)

    def _woken(self, queues: Sequence[str] | None) -> list[Keys]:
        """Return keys whose ``wake`` is what a worker of these queues listens to."""
        if queues is None:
            k = self.keys("")
            return [replace(k, wake=k.wake_all)]
        return [self.keys(queue) for queue in queues]

    def stop_listening(self) -> None:
        """Leave notifications to other processes."""
        if self._listener is not None:
            self._listener.stop()

    def reset_listener(self) -> None:
        """Have the next ``listen`` use a new connection."""
        if self._listener is not None:
            self._listener.reset()

    def wake(self) -> None:
        """End a ``listen`` of this process."""
        if self._listener is not None:
            self._listener.wake()

    @_translated
    def notify(self, queues: Sequence[str] | None) -> None:
        """End a ``listen`` of any process."""
        self._call_many("notify", [(k, {}) for k in self._woken(queues)])

    def close(self) -> None:
        """Wait for the answers to all puts, and close all connections."""
        if self._listener is not None:
            self._listener.close()
        if "_puts" in self.__dict__:
            self._puts.close()
        if self._client is not None:
            with contextlib.suppress(Exception):
                self._client.close()
                self._client.connection_pool.disconnect()

    # --- Index --------------------------------------------------------------------------------------------------------

    @_translated
    def put_nowait(self, queue: str, entries: Sequence[Entry]) -> bool:
        """Send a put without waiting for its answer."""
        k = self.keys(queue)
        answered = False
        for start in range(0, len(entries), IDS_PER_CALL):
            some = _flat(entries[start : start + IDS_PER_CALL])
            answered |= self._puts.put(SentPut(k, self.identity(), self.now_tenths(), some))
        return answered

    @_translated
    def flush(self) -> None:
        """Wait for the answers to all puts of ``put_nowait``."""
        self._puts.flush()

    @_translated
    def fill(self, entries: Mapping[str, Sequence[Entry]]) -> dict[str, Put]:
        """Add missing ids of several queues."""
        return self._put(entries, "fill")

    @_translated
    def missing(self, entries: Mapping[str, Sequence[Entry]]) -> dict[str, list[int]]:
        """Return the ids that ``fill`` would put."""
        calls = [(self.keys(queue), {"rest": _flat(some)}) for queue, some in entries.items()]
        answers = self._call_many("missing", calls)
        return {queue: [int(pk) for pk in answer] for queue, answer in zip(entries, answers, strict=True)}

    def _call_many(self, name: str, calls: Sequence[tuple[Keys, dict[str, Any]]]) -> list[Any]:
        """Call a script several times in one round trip. Raise the first error when all have been answered."""
        script = scripts.load(name)
        answers = self._pipeline(script.command(k, **arguments) for k, arguments in calls)
        unknown = [place for place, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        again = self._pipeline(
            script.command(calls[place][0], in_full=not n, **calls[place][1]) for n, place in enumerate(unknown)
        )
        for place, answer in zip(unknown, again, strict=True):
            answers[place] = answer
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def _pipeline(self, commands: Iterable[list[Any]]) -> list[Any]:
        pipe = self.client.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        return pipe.execute(raise_on_error=False)

    @_translated
    def read_meta(self) -> Meta:
        """Read the meta."""
        fields: Any = self.client.hmget(self.keys("").meta, META_FIELDS)
        return _meta(self.now_tenths(), fields)

    @_translated
    def tick(self) -> Meta:
        """Count one more tick, and return the meta."""
        identity = self.identity()
        fields = scripts.load("tick")(self.client, self.keys(""), identity=identity)
        meta = _meta(self.now_tenths(), fields)
        if identity and meta.identity not in ("", identity):
            raise ForeignBroker
        return meta

    @_translated
    def request_load(self) -> None:
        """Have a worker load everything again."""
        if scripts.load("request_load")(self.client, self.keys(""), identity=self.identity()) == b"foreign":
            raise ForeignBroker

    @_translated
    def clear(self, queues: Sequence[str], seen_tenths: int) -> bool:
        """Delete our keys."""
        k, terms = self.keys(""), {"now": self.now_tenths(), "seen": seen_tenths, "identity": self.identity()}
        word = scripts.load("clear")(self.client, k, queues, **terms)
        if word == b"foreign":
            raise ForeignBroker
        return bool(word == b"ok")

    @_translated
    def load(
        self,
        *,
        ahead: float,
        worker: str,
        lease: float,
        identity: str,
        server: ServerRun,
        lost: bool,
    ) -> tuple[int | None, int] | None:
        """Begin to load all queues."""
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
        if word == b"foreign":
            raise ForeignBroker
        if word == b"busy":
            return None
        return (int(begin) if begin else None), int(horizon)

    @_translated
    def loaded(self, *, worker: str, upto_tenths: int | None, lease: float | None) -> bool:
        """Record how far a load has come."""
        word = scripts.load("loaded")(
            self.client,
            self.keys(""),
            now=self.now_tenths(),
            worker=worker,
            upto="" if upto_tenths is None else upto_tenths,
            lease="" if lease is None else int(lease * SECOND),
        )
        return bool(word == b"ok")

    @_translated
    def hold_duty(self, duty: str, worker: str, lease: float | None) -> bool:
        """Take a duty, go on with it, or give it up."""
        milliseconds = "" if lease is None else int(lease * 1000)
        k = self.keys("")
        named = replace(k, duty=f"{k.duty}:{duty}")
        return bool(scripts.load("duty")(self.client, named, worker=worker, lease=milliseconds))

    @_translated
    def server(self) -> ServerRun:
        """Ask the server for its identity."""
        # One command for three sections: a worker asks every few seconds.
        info = self.client.info()
        return ServerRun(
            str(info["run_id"]),
            str(info.get("master_replid", "")),
            str(info.get("role", "")),
            is_cluster=bool(info.get("cluster_enabled")),
        )

    @_translated
    def server_info(self) -> ServerInfo:
        """Ask the server about itself."""
        return server_info.read(self.client)

    def now_tenths(self) -> int:
        """Return the time by the record's clock."""
        return int(self.now() * SECOND)

    @_translated
    def size(self, queue: str) -> QueueSize:
        """Count the ids of a queue."""
        k = self.keys(queue)
        pipe = self.client.pipeline(transaction=False)
        pipe.zcard(k.delayed)
        pipe.zcard(k.ready)
        pipe.hlen(k.aside)
        delayed, ready, aside = pipe.execute()
        return QueueSize(delayed, ready + aside)

    @_translated
    def places(self, queue: str, ids: Sequence[int]) -> list[RedisPlace]:
        """Find where each of these ids is."""
        k = self.keys(queue)
        found: list[RedisPlace] = []
        for start in range(0, len(ids), IDS_PER_CALL):
            members = [str(pk) for pk in ids[start : start + IDS_PER_CALL]]
            pipe = self.client.pipeline(transaction=False)
            pipe.zmscore(k.delayed, members)
            pipe.zmscore(k.ready, members)
            pipe.hmget(k.aside, members)
            delayed, ready, names = pipe.execute()
            for member, d, r, name in zip(members, delayed, ready, names, strict=True):
                # Few ids stand aside while somebody looks at them one by one.
                score = r if name is None else self.client.zscore(f"{k.aside}:{name.decode()}", member)
                found.append(
                    RedisPlace(
                        None if d is None else int(d),
                        None if score is None else int(score) % BAND,
                        None if name is None else name.decode(),
                    )
                )
        return found

    @_translated
    def rank(self, queue: str, pk: int) -> int | None:
        """Count the ready ids that are taken before this one."""
        found: Any = self.client.zrank(self.keys(queue).ready, str(pk))
        return None if found is None else int(found)

    def ids(self, queue: str) -> Iterator[list[int]]:
        """Read every id of a queue, in batches."""
        k = self.keys(queue)
        for key, scan in ((k.delayed, self.client.zscan), (k.ready, self.client.zscan), (k.aside, self.client.hscan)):
            cursor: Any = 0
            while True:
                with translated_errors():
                    answer: Any = scan(key, cursor, count=SCAN_COUNT)
                    cursor, members = answer
                    batch = _whole([*dict(members)])
                if batch:
                    yield batch
                if int(cursor) == 0:
                    break


def _flat(entries: Sequence[Entry]) -> list[int]:
    """Return the entries as a script reads them: id, due tenth, rank, id, due tenth, rank, …"""
    flat: list[int] = []
    for pk, due_us, priority in entries:
        flat += (pk, us_to_tenths(due_us), PRIORITIES[1] - priority)
    return flat


def _taken(answer: Sequence[Any], now: float) -> Taken:
    """Parse the answer of scripts/take.lua, which came at a time by the record's clock (seconds)."""
    if answer[0] == b"foreign":
        raise ForeignBroker
    moved, left, next_due, other, any_aside = answer[:5]
    tickets = []
    numbers = _whole(answer[5:])
    for member, score in zip(numbers[::2], numbers[1::2], strict=True):
        rank, ready_tenths = divmod(score, BAND)
        tickets.append(Ticket(member, ready_tenths, rank, ready_tenths / SECOND - now))
    behind = moved == IDS_PER_CALL
    return Taken(tickets, left, _until(next_due, now), behind, _until(other, now), bool(any_aside))


def _until(tenths: bytes, now: float) -> float | None:
    """Return in how many seconds a due tenth comes; None when a script found none."""
    return max(0.0, float(tenths) / SECOND - now) if tenths else None


def _whole(found: Sequence[bytes]) -> list[int]:
    """Return ids and scores as numbers. Raises ``ValueError`` when one is not ours: no column could hold it."""
    numbers = list(map(int, found))
    if numbers and not 0 <= min(numbers) <= max(numbers) < 2**63:
        raise ValueError("an id or a score that is out of range")
    return numbers


def _counts(answer: Sequence[Any], entries: int) -> Put:
    """Parse the answer of scripts/put.lua to so many entries."""
    word, put, present, beyond = answer
    if word == b"foreign":
        raise ForeignBroker
    # Without a horizon nothing is put: the loader of a worker will find the rows.
    return Put(beyond=entries) if word == b"lost" else Put(put, present, beyond)


def _meta(now_tenths: int, fields: Sequence[Any]) -> Meta:
    """Parse the values of ``META_FIELDS``; None for what is missing."""
    tick, horizon, loaded, run_id, replid, identity, loader_until, requested = fields
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
    )
