"""Takes messages of pulled queues: claims those that are due, and waits for those that fall due."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache, partial
from os import getpid
from typing import Any, Protocol, TypeVar

from asgiref.sync import sync_to_async
from django.db import DatabaseError, connections, router

from .. import signals
from ..core import actors, values
from ..core.durations import Duration
from ..core.forks import after_fork
from ..core.pull_queues import PULLER, PullQueue
from ..models import Message
from ..project import pulled, validation
from ..record import transitions
from ..record.sql.rows import Claimed
from .answering import release
from .ending import end_what_is_over
from .receipts import Receipt, signer, text_of
from .waiters import Waiter

T = TypeVar("T")

# The most messages of one call.
MOST = 1000


class InThread(Protocol):
    """Makes a call in a thread that has connections to the databases."""

    def __call__(self, act: Callable[[], T], /) -> Awaitable[T]: ...


@dataclass(frozen=True, slots=True)
class Pulled:
    """A message that this program has until its lease ends, and the receipt by which any process answers it."""

    id: int
    topic: str
    queue: str
    key: str | None
    priority: int
    payload: Any
    headers: dict[str, Any]
    due_at: datetime
    expires_at: datetime | None
    claimed_at: datetime
    # Counts from 1; after ``attempts_left`` further ones the message is dead. None: its policy has no end.
    attempt: int
    attempts_left: int | None
    _delivery: Receipt = field(repr=False)
    _using: str = field(repr=False)

    @property
    def receipt(self) -> str:
        """The text by which any process answers the message."""
        return text_of(self._delivery, signer(self._using))


def take(
    queue: str | Iterable[str],
    *,
    max: int = 1,
    wait: Duration = 0,
    lease: Duration | None = None,
    using: str | None = None,
) -> list[Pulled]:
    """Take up to ``max`` messages that are due, the most urgent first; of several queues those of the first go first.

    When none is due, wait for the first up to ``wait``; then return an empty list. A message that is not answered
    within ``lease`` (by default that of the message, then that of the queue) is delivered again, which counts as an
    attempt.

    In a transaction the messages are taken when that commits. Raises ``ValueError`` for a queue that the settings do
    not declare as pulled.
    """
    call = PullCall(queue, max, wait, lease, using)
    return call.fetch() or call.later()


async def atake(
    queue: str | Iterable[str],
    *,
    max: int = 1,
    wait: Duration = 0,
    lease: Duration | None = None,
    using: str | None = None,
) -> list[Pulled]:
    """Take messages from async code as ``take`` does. A call that waits holds no thread.

    If the call is cancelled, the messages that it claims go back, and that costs no attempt.
    """
    call = PullCall(queue, max, wait, lease, using)
    return await call.afetch(_in_thread) or await call.alater(_in_thread)


async def _in_thread(act: Callable[[], T]) -> T:
    return await sync_to_async(act)()


@cache
def _name() -> str:
    return PULLER + actors.worker_name("", getpid(), actors.new_run())


after_fork(_name.cache_clear)


class PullCall(Waiter):
    """One call that takes: its checked arguments, its claims, and its wait when the first claim finds nothing."""

    def __init__(
        self, queue: str | Iterable[str], most: int, wait: Duration, lease: Duration | None, using: str | None
    ) -> None:
        queues = [queue] if isinstance(queue, str) else list(queue)
        self.terms = [_terms(name) for name in queues]
        self.most = validation.checked("max", values.whole, most, 1, MOST)
        self.lease = None if lease is None else validation.checked("lease", values.span, lease, 0, values.YEAR)
        seconds = validation.checked("wait", values.span, wait)
        super().__init__(using or router.db_for_write(Message), queues, seconds)

    def later(self) -> list[Pulled]:
        """Wait in this thread, and claim what falls due meanwhile."""
        found: list[Pulled] = []
        with self:
            while not found and self.left > 0:
                self.sleep()
                found = self.fetch()
        return found

    async def alater(self, run: InThread) -> list[Pulled]:
        """Wait in a coroutine, and claim what falls due meanwhile."""
        found: list[Pulled] = []
        with self:
            while not found and self.left > 0:
                await self.asleep()
                found = await self.afetch(run)
        return found

    async def afetch(self, run: InThread) -> list[Pulled]:
        """Claim what is due now, in a thread. When the caller is cancelled meanwhile, give back what was claimed."""
        claims = asyncio.ensure_future(run(self.fetch))
        try:
            return await asyncio.shield(claims)
        except asyncio.CancelledError:
            found = await claims
            await run(partial(self.give_back, found))
            raise

    def give_back(self, found: Sequence[Pulled]) -> None:
        """Release the messages that were claimed and reach nobody."""
        if found:
            release([each.receipt for each in found], using=self.using)

    def fetch(self) -> list[Pulled]:
        """Claim what is due now."""
        end_what_is_over(self.using)
        self.is_in_transaction = connections[self.using].in_atomic_block
        rows: list[Claimed] = []
        for queue, terms in zip(self.queues, self.terms, strict=True):
            lease = terms.lease if self.lease is None else self.lease
            try:
                rows += transitions.claim_due(self.using, queue, self.most - len(rows), lease, _name())
            except DatabaseError:
                # The messages of the queues before this one are committed, unless there is a transaction.
                if not rows or self.is_in_transaction:
                    raise
                break
            if len(rows) == self.most:
                break
        self.note_look(took_all=len(rows) == self.most)
        for row in rows:
            late = max(0.0, (row.claimed_at - row.due_at).total_seconds())
            facts = {**signals.message_arguments(row, self.using), "delivery": row.deliveries, "lateness": late}
            signals.emit(signals.message_delivered, Message, **facts)
        return _pulled(self.using, rows)


def _terms(queue: str) -> PullQueue:
    found = pulled.terms(validation.queue(queue))
    if found is None:
        raise ValueError(f"the queue {queue!r} is not pulled: DELAYQ['PULL_QUEUES'] does not declare it")
    return found


def _pulled(using: str, rows: Sequence[Claimed]) -> list[Pulled]:
    found = []
    for row in rows:
        # Deliveries without an answer are attempts, too: see ``crashes.reap``.
        attempt = row.attempts + row.deliveries - row.reported - row.excused
        policy = pulled.policy(row.queue, row.retry, row.max_attempts)
        delay = policy.delay(attempt)
        receipt = Receipt(row.id, row.deliveries, None if delay is None else delay.total_seconds())
        left = None if policy.attempts is None else max(0, policy.attempts - attempt)
        found.append(Pulled(*row[:9], row.claimed_at, attempt, left, receipt, using))
    return found
