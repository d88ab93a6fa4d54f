"""What workers take from Redis: sorted sets of ids, moved by Lua scripts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, ClassVar

import redis
from redis.exceptions import NoScriptError

from ..core import limits
from ..core.chunks import chunks
from ..core.clock import SECOND
from ..core.known_record import record_clock
from ..project.conf import Settings
from ..record.sql.rows import Ticket
from . import scripts
from .base import IDS_PER_CALL, Broker, DueQueue, DueQueues, Taken
from .cluster import Cluster
from .connection import ScriptConnections, all_translated, connect
from .keys import BAND, RANKS, Keys, keys, namespace
from .listener import Listener

# More ids than any queue has.
MANY = 10**12


@all_translated
class RedisSource(Broker):
    """The part of the broker on Redis that workers take from. ``RedisBroker`` says what it is made of."""

    holds_ids: ClassVar[bool] = True

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
        # Returns the keys of a queue.
        self.keys = partial(keys, namespace(settings.PREFIX, using))
        # What this broker knows of the cluster, should Redis be one.
        self.cluster = Cluster(namespace(settings.PREFIX, using), settings.REDIS_ADDRESS_MAP)
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
        assert self.settings.REDIS is not None
        return connect(self.settings.REDIS, timeout=self.timeout, cluster=self.cluster)

    @cached_property
    def _scripted(self) -> ScriptConnections:
        return ScriptConnections(self._pool)

    def _pool(self) -> redis.ConnectionPool:
        return self.client.connection_pool

    def now_tenths(self) -> int:
        """Return the time by the record's clock, as far as this process knows it."""
        return int(self.now() * SECOND)

    def _call_many(self, name: str, calls: Sequence[tuple[Keys, dict[str, Any]]]) -> list[Any]:
        """Call a script several times in one round trip. Raise the first error when all have been answered."""
        script = scripts.load(name)
        answers = self._pipeline(script.command(k, **arguments) for k, arguments in calls)
        unknown = [index for index, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        again = self._pipeline(
            script.command(calls[index][0], in_full=not n, **calls[index][1]) for n, index in enumerate(unknown)
        )
        for index, answer in zip(unknown, again, strict=True):
            answers[index] = answer
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def _pipeline(self, commands: Iterable[list[Any]]) -> list[Any]:
        pipe = self.client.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        return pipe.execute(raise_on_error=False)

    def take(
        self, queue: str, limit: int, within: float = 0.0, unblock: Mapping[str, int] = {}, *, both_ends: bool = False
    ) -> Taken:
        """Take ids that are due, or fall due in a moment."""
        terms = self._to_take(limit, within, unblock, both_ends)
        answer = scripts.load("take")(self._scripted, self.keys(queue), **terms)
        return _taken(answer, self.now())

    def _to_take(self, limit: int, within: float, unblock: Mapping[str, int], both_ends: bool) -> dict[str, Any]:
        """Return the arguments of take.lua."""
        return {
            "rest": [*chain.from_iterable((name, min(number, IDS_PER_CALL)) for name, number in unblock.items())],
            "now": self.now_tenths(),
            "limit": min(limit, IDS_PER_CALL),
            "batch": IDS_PER_CALL,
            "within": int(within * SECOND),
            "both_ends": int(both_ends),
            "identity": self.identity(),
        }

    def take_many(
        self, due: Sequence[DueQueue], limit: int, within: float = 0.0, *, both_ends: bool = False
    ) -> dict[str, Taken]:
        """Take ids of several queues in one round trip."""
        calls = {}
        for queue, ready, falling_due, unblock, *_ in due:
            share = min(limit, ready + falling_due + sum(unblock.values()))
            limit -= share
            # A queue without any stands in the index too early. A take corrects that.
            if share or falling_due or not ready:
                calls[queue] = self._to_take(share, within, unblock, both_ends)
        answers = self._call_many("take", [(self.keys(queue), call) for queue, call in calls.items()])
        now = self.now()
        return {queue: _taken(answer, now) for queue, answer in zip(calls, answers, strict=True)}

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

    def delay(self, queue: str, tickets: Sequence[Ticket], seconds: float) -> None:
        """Put taken ids back with another due time."""
        due_tenths = self.now_tenths() + int(seconds * SECOND)
        self._write_back(queue, [(ticket.id, due_tenths + ticket.rank / RANKS, "") for ticket in tickets])

    def put_back(self, queue: str, tickets: Sequence[Ticket]) -> None:
        """Put taken ids back where they were."""
        entries: list[tuple[int, float | str, float | str]] = []
        for ticket in tickets:
            if not ticket.ready_tenths:
                continue
            if ticket.until > 0:
                entries.append((ticket.id, ticket.ready_tenths + ticket.rank / RANKS, ""))
            else:
                entries.append((ticket.id, "", ticket.rank * BAND + ticket.ready_tenths))
        self._write_back(queue, entries)

    def _write_back(self, queue: str, entries: Sequence[tuple[int, float | str, float | str]]) -> None:
        # As Python writes them: a double is exact with up to 17 digits.
        rest = [repr(value) if isinstance(value, float) else value for entry in entries for value in entry]
        scripts.load("put_back")(self.client, self.keys(queue), rest)

    def block(self, queue: str, tickets: Mapping[str, Sequence[Ticket]]) -> None:
        """Block taken ids, by name."""
        named = [(name, ticket) for name, some in tickets.items() for ticket in some]
        for part in chunks(named, IDS_PER_CALL):
            rest: list[Any] = []
            for name, some in groupby(part, itemgetter(0)):
                scores = [(ticket.rank * BAND + (ticket.ready_tenths or 0), ticket.id) for _, ticket in some]
                rest += [name, len(scores), *chain.from_iterable(scores)]
            scripts.load("block")(self.client, self.keys(queue), rest)

    def blocked(self) -> dict[str, dict[str, int]]:
        """Return the numbers of blocked ids."""
        found: dict[str, dict[str, int]] = {}
        fields: Any = self.client.hgetall(self.keys("").blocked_counts)
        for field, number in fields.items():
            queue, _, name = field.decode(errors="replace").partition(":")
            # Raises ``ValueError`` for a name that is not ours.
            limits.parts(name)
            found.setdefault(queue, {})[name] = int(number)
        return found

    def any_blocked(self) -> bool:
        """Return whether ids of any queue are blocked."""
        return bool(self.client.exists(self.keys("").blocked_counts))

    def listen(self, queues: Sequence[str] | None, timeout: float) -> bool:
        """Sleep until one of the queues is notified."""
        return self._listening.listen([k.wake for k in self._woken(queues)], timeout)

    @property
    def _listening(self) -> Listener:
        """The listener. One thread may listen for the first time while another one wakes it."""
        with self._lock:
            if self._listener is None:
                self._listener = Listener(self._connect)
            return self._listener

    def _woken(self, queues: Sequence[str] | None) -> list[Keys]:
        """Return keys whose ``wake`` is what a worker of these queues listens to."""
        if queues is None:
            k = self.keys("")
            return [replace(k, wake=k.wake_all)]
        return [self.keys(queue) for queue in queues]

    def stop_listening(self) -> bool:
        """Leave notifications to other processes. Return whether one may have come here."""
        if self._listener is None or not self._listener.stop():
            return False
        # Redis forgets a closed connection at the end of the step in which it reads its end. A notification that is
        # handled in the same step would be given to nobody: this answer comes after that step.
        self.client.ping()
        return True

    def reset_listener(self) -> None:
        """Have the next ``listen`` use a new connection. Any thread may call this after the broker did not answer."""
        if self._listener is not None:
            self._listener.reset()

    def wake(self) -> None:
        """End a ``listen`` of this process, or the next one."""
        self._listening.wake()

    def notify(self, queues: Sequence[str] | None) -> None:
        """End a ``listen`` of any process."""
        self._call_many("notify", [(k, {}) for k in self._woken(queues)])

    def close(self) -> None:
        """Close all connections."""
        if self._listener is not None:
            self._listener.close()
        if self._client is not None:
            with contextlib.suppress(Exception):
                self._client.close()
                self._client.connection_pool.disconnect()


def _taken(answer: Sequence[Any], now: float) -> Taken:
    """Parse the answer of scripts/take.lua, which came at a time by the record's clock (seconds)."""
    moved, left, next_due, other, any_blocked = answer[:5]
    tickets = []
    numbers = whole(answer[5:])
    for member, score in zip(numbers[::2], numbers[1::2], strict=True):
        rank, ready_tenths = divmod(score, BAND)
        tickets.append(Ticket(member, ready_tenths, rank, ready_tenths / SECOND - now))
    behind = moved == IDS_PER_CALL
    return Taken(tickets, left, _until(next_due, now), behind, _until(other, now), bool(any_blocked))


def _until(tenths: bytes, now: float) -> float | None:
    """Return in how many seconds a due tenth comes; None when a script found none."""
    return max(0.0, float(tenths) / SECOND - now) if tenths else None


def whole(found: Sequence[bytes]) -> list[int]:
    """Return ids and scores as numbers. Raises ``ValueError`` when one is not ours: no column could hold it."""
    numbers = list(map(int, found))
    if numbers and not 0 <= min(numbers) <= max(numbers) < 2**63:
        raise ValueError("an id or a score that is out of range")
    return numbers
