"""Reads scheduled messages along their index, page by page, in constant memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from itertools import starmap

from .. import conf, registry, transitions
from ..broker.base import IDS_PER_CALL, Entry
from ..clock import from_tenths
from ..models import Message
from ..sql import statements
from ..sql.expressions import After
from ..states import State


def page(
    using: str,
    queue: str,
    *,
    after: tuple[datetime, int] | None = None,
    start: datetime | None = None,
    end: datetime | None = None,
    limit: int = IDS_PER_CALL,
    topics: Sequence[str] | None = None,
) -> list[Entry]:
    """Return scheduled messages of a queue in the order of (due, id), after a place in that order.

    The query walks along one partial index and needs no OFFSET.
    """
    rows = Message.objects.using(using).filter(state=State.SCHEDULED, queue=queue)
    if after is not None:
        rows = rows.filter(After(*after))
    elif start is not None:
        rows = rows.filter(due_at__gte=start)
    if end is not None:
        rows = rows.filter(due_at__lte=end)
    if topics is not None:
        rows = rows.filter(topic__in=topics)
    return list(starmap(Entry, statements(using).places(rows.order_by("due_at", "id")[:limit])))


def any_scheduled(using: str, queues: Sequence[str], end: datetime) -> bool:
    """Return whether a scheduled message of these queues is due by ``end``."""
    return Message.objects.using(using).filter(state=State.SCHEDULED, queue__in=queues, due_at__lte=end).exists()


def still_scheduled(using: str, ids: Iterable[int]) -> set[int]:
    """Return the ids whose messages are still scheduled."""
    # The state is compared in Python: with a condition the database might read all scheduled messages to find these
    # few.
    rows = Message.objects.using(using).filter(pk__in=list(ids)).values_list("pk", "state")
    return {pk for pk, state in rows if state == State.SCHEDULED}


def pages(
    using: str,
    queue: str,
    *,
    start_tenths: int | None,
    end_tenths: int,
    limit: int = IDS_PER_CALL,
    topics: Sequence[str] | None = None,
    after: tuple[datetime, int] | None = None,
) -> Iterator[list[Entry]]:
    """Yield the scheduled messages of a queue that are due from ``start_tenths`` to ``end_tenths`` (tenths of a ms)."""
    start = None if start_tenths is None else from_tenths(start_tenths)
    while True:
        rows = page(using, queue, after=after, start=start, end=from_tenths(end_tenths), limit=limit, topics=topics)
        if rows:
            yield rows
        if len(rows) < limit:
            return
        after = (rows[-1].due_at, rows[-1].id)


def queues(using: str) -> list[str]:
    """Return the queues that the settings or handlers name, and those that hold scheduled messages."""
    settings = conf.get()
    found = {settings.DEFAULT_QUEUE, *settings.QUEUES}
    found |= {handler.queue for handler in registry.handlers().values() if handler.queue is not None}
    found.update(transitions.queues(using))
    return sorted(found)
