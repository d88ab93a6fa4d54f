"""Reads scheduled messages along their index, page by page, in constant memory.

A restore and a load read once and pass the dead rows once, so they need no low-water mark. The sweeper reads again and
again, and keeps one.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from itertools import chain, islice, repeat
from typing import NamedTuple

from ..broker.base import Entry
from ..broker.publisher import by_queue
from ..core.chunks import chunks
from ..core.states import State
from ..project import pulled, registry
from ..record.sql import statements
from ..record.sql.rows import Span


class Pages(NamedTuple):
    """The sizes of the queries that read the beginnings of many queues."""

    # Rows of each queue.
    head: int = 50
    # Queues of one query.
    queues: int = 200


PAGES = Pages()

# The last due time (None when reading by id) and the last id of a batch.
BatchEnd = tuple[datetime | None, int]


class Batch(NamedTuple):
    """Messages by their queues, which are put into Redis together. ``end`` is where reading goes on after them."""

    by_queue: dict[str, list[Entry]]
    end: BatchEnd = (None, 0)

    @property
    def first(self) -> datetime:
        """The earliest due time."""
        return min(entries[0].due_at for entries in self.by_queue.values())

    @property
    def ids(self) -> list[int]:
        """The ids of the messages."""
        return [entry.id for entries in self.by_queue.values() for entry in entries]

    @property
    def size(self) -> int:
        """The number of messages."""
        return sum(map(len, self.by_queue.values()))


def still_scheduled(using: str, ids: Iterable[int]) -> set[int]:
    """Return the ids whose messages are still scheduled."""
    return {pk for pk, facts in statements(using).facts(list(ids)).items() if facts.state == State.SCHEDULED}


def merged(using: str, queues: Sequence[str], span: Span, pages: Pages = PAGES) -> Iterator[Batch]:
    """Yield the scheduled messages of queues in the one order of (due, id), after a position in that order.

    After ``(moment, 0)`` means: due from that moment on.
    """
    walks = _walks(using, queues, span, pages)
    if len(walks) == 1:
        for queue, pages_of_it in walks.items():
            for rows in pages_of_it:
                yield Batch({queue: rows}, (rows[-1].due_at, rows[-1].id))
        return
    each = [zip(repeat(queue), chain.from_iterable(pages_of_it)) for queue, pages_of_it in walks.items()]
    together = heapq.merge(*each, key=lambda one: (one[1].due_us, one[1].id))
    while some_entries := list(islice(together, span.limit)):
        last = some_entries[-1][1]
        yield Batch(by_queue(some_entries), (last.due_at, last.id))


def in_turn(using: str, queues: Sequence[str], span: Span) -> Iterator[Batch]:
    """Yield the scheduled messages of several queues: a page of each queue in turn.

    So the few messages of one queue do not wait for the many of another.
    """
    walks = _walks(using, queues, span, PAGES)
    batch: dict[str, list[Entry]] = {}
    while walks:
        for queue in list(walks):
            rows = next(walks[queue], None)
            if rows is None:
                del walks[queue]
                continue
            if batch and sum(map(len, batch.values())) + len(rows) > span.limit:
                yield Batch(batch)
                batch = {}
            batch.setdefault(queue, []).extend(rows)
    if batch:
        yield Batch(batch)


def _walks(using: str, queues: Sequence[str], span: Span, pages: Pages) -> dict[str, Iterator[list[Entry]]]:
    """Return the pages of each queue that has messages, in its order of (due, id).

    One query for many queues finds the first messages of each; a queue that has more is read on page by page.
    """
    first: dict[str, list[Entry]] = {}
    head = span.limit if len(queues) == 1 else min(span.limit, pages.head)
    for some in chunks(queues, pages.queues):
        for queue, *values in statements(using).heads(some, span._replace(limit=head)):
            first.setdefault(queue, []).append(Entry(*values))

    def pages_of(queue: str) -> Iterator[list[Entry]]:
        rows, size = first.pop(queue), head
        while True:
            yield rows
            if len(rows) < size:
                return
            # A queue of which much was read gets larger pages, so that a thousand queues do not fill the memory.
            size = min(span.limit, size * 4)
            following = span._replace(after=(rows[-1].due_at, rows[-1].id), limit=size)
            heads = statements(using).heads([queue], following)
            if not (rows := [Entry(*values) for _queue, *values in heads]):
                return

    return {queue: pages_of(queue) for queue in first}


def queues(using: str) -> list[str]:
    """Return the queues that the settings or handlers name, and those that hold scheduled messages, in Redis too.

    Of those that are pulled Redis holds nothing.
    """
    return sorted(pulled.without(registry.queues().union(statements(using).queues())))
