"""Counts of deliveries, in memory that the processes of a worker share and that outlives each of them."""

from __future__ import annotations

import mmap
import threading
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from ...core.states import State
from ...extensions import HandledMessage, WorkerExtension
from ...project import registry
from ...record.sql.rows import Claimed, Moved
from ...signals import MessageFacts
from ...worker.shared.shared_state import ProcessLock

OUTCOMES = ("consumed", "retried", "dead", "cancelled", "expired", "released")
# The outcome of a message that no handler reported.
_MOVED = {state: OUTCOMES.index(state.value) for state in (State.DEAD, State.CANCELLED, State.EXPIRED)}
_MOVED[State.SCHEDULED] = OUTCOMES.index("released")

# The upper bounds of the buckets, in seconds: from what the queue itself takes to what people notice.
BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)

# The label of topics without a handler in this process, and of queues beyond the limit: they have no label of their
# own.
OTHER = "other"
# The number of queues that have a label of their own.
MOST_QUEUES = 100

# A row has a key and numbers: first one for each outcome. LATENESS is the index at which the histogram of lateness
# begins: the buckets, with the one beyond the last bound, and the sum.
LATENESS = len(OUTCOMES)
# The index at which the histogram of run times begins.
RUNTIME = LATENESS + len(BOUNDS) + 2
# The number of numbers in a row.
NUMBERS = RUNTIME + len(BOUNDS) + 2
# The key is a queue and a topic in ASCII.
KEY_BYTES = 168
# The numbers are doubles.
ROW_BYTES = KEY_BYTES + 8 * NUMBERS
# The rows of a slot, which is the memory of one process. The last row counts all messages that find no other row.
MOST_ROWS = 1000
# The number of rows that are in use stands before the rows.
SLOT_BYTES = 8 + MOST_ROWS * ROW_BYTES


class Row(NamedTuple):
    """The counts of one queue and topic. ``numbers`` is the shared memory itself."""

    queue: str
    topic: str
    numbers: memoryview[float]


class Slot:
    """The part of the shared memory in which one process counts. Others read it meanwhile, without a lock.

    A row is complete before the number of rows counts it, and each number is written at once.
    """

    def __init__(self, memory: memoryview[int]) -> None:
        self._memory = memory
        self._size = memory[:8].cast("d")

    def rows(self) -> Iterator[Row]:
        """Yield all rows."""
        for place in range(int(self._size[0])):
            row = self._row(place)
            queue, _blank, topic = bytes(row[:KEY_BYTES]).rstrip(b"\0").decode("ascii").partition(" ")
            yield Row(queue, topic, row[KEY_BYTES:].cast("d"))

    def add(self, queue: str, topic: str) -> Row:
        """Add a row of zeros."""
        place = int(self._size[0])
        row = self._row(place)
        key = f"{queue} {topic}".encode("ascii")
        row[: len(key)] = memoryview(key)
        self._size[0] = place + 1
        return Row(queue, topic, row[KEY_BYTES:].cast("d"))

    def _row(self, place: int) -> memoryview[int]:
        begin = 8 + place * ROW_BYTES
        return self._memory[begin : begin + ROW_BYTES]


class SharedCounts:
    """The counts of all processes of a worker. Made before they are forked.

    A process counts in a slot that no living process has, and adds to the counts that it finds there: no count goes
    back when a process dies, and the memory does not grow with each process that starts.
    """

    def __init__(self, processes: int) -> None:
        memory = memoryview(mmap.mmap(-1, processes * SLOT_BYTES))
        self._slots = [Slot(memory[n * SLOT_BYTES : (n + 1) * SLOT_BYTES]) for n in range(processes)]
        self._locks = [ProcessLock() for _slot in self._slots]

    def take_slot(self) -> tuple[Slot, ProcessLock]:
        """Return a slot, and the lock that keeps it for this process until the process releases it or ends."""
        for slot, lock in zip(self._slots, self._locks, strict=True):
            if lock.acquire(wait=False):
                return slot, lock
        raise RuntimeError("more processes count than the worker has")

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, the counts of all processes added up."""
        sums: dict[tuple[str, str], list[float]] = {}
        for row in (row for slot in self._slots for row in slot.rows()):
            before = sums.get((row.queue, row.topic), [0.0] * NUMBERS)
            sums[row.queue, row.topic] = [*map(sum, zip(before, row.numbers, strict=True))]
        outcomes = CounterMetricFamily(
            "delayq_outcomes", "Deliveries and messages that ended, by outcome.", labels=["queue", "topic", "outcome"]
        )
        lateness = HistogramMetricFamily(
            "delayq_lateness_seconds",
            "Time from the due time to the first claim of a message.",
            labels=["queue", "topic"],
        )
        runtime = HistogramMetricFamily(
            "delayq_runtime_seconds", "Time that handlers ran, with any outcome.", labels=["queue", "topic"]
        )
        for labels, numbers in sorted(sums.items()):
            for outcome, number in zip(OUTCOMES, numbers, strict=False):
                outcomes.add_metric([*labels, outcome], number)
            for family, begin in ((lateness, LATENESS), (runtime, RUNTIME)):
                buckets = numbers[begin : begin + len(BOUNDS) + 1]
                # A topic without messages gets no samples: it would have 18 for each histogram.
                if any(buckets):
                    family.add_metric(labels, _cumulative(buckets), numbers[begin + len(BOUNDS) + 1])
        yield from (outcomes, lateness, runtime)


def _cumulative(buckets: Sequence[float]) -> list[tuple[str, float]]:
    """Return the buckets as Prometheus wants them: each with the number of all values up to its bound."""
    bounds = [*map(floatToGoString, BOUNDS), "+Inf"]
    return [(bound, sum(buckets[: place + 1])) for place, bound in enumerate(bounds)]


class Counting(WorkerExtension):
    """Counts what happens to the messages of one process. A message costs one look-up in a dict."""

    def __init__(self, using: str, worker: str, shared: SharedCounts) -> None:
        super().__init__(using, worker)
        # The lock is needed since several threads of the worker count.
        self._lock = threading.Lock()
        self._slot, self._kept = shared.take_slot()
        self._topics = frozenset(registry.handlers())
        self._rows = {(row.queue, row.topic): row for row in self._slot.rows()}
        self._queues = {queue for queue, _topic in self._rows}
        # Prometheus sees an increase only between two values: so a counter begins at 0, and not with its first message.
        for topic in self._topics:
            self._numbers(registry.default_queue(topic), topic)

    def claimed(self, claims: Sequence[Claimed]) -> None:
        with self._lock:
            for claim in claims:
                if claim.deliveries == 1:
                    # A message may be claimed a moment before it falls due.
                    self._observe(claim, LATENESS, max(0.0, (claim.claimed_at - claim.due_at).total_seconds()))

    def handled(self, messages: Sequence[HandledMessage]) -> None:
        with self._lock:
            for message in messages:
                self._observe(message, RUNTIME, message.runtime)

    def consumed(self, messages: Sequence[MessageFacts]) -> None:
        self._count(OUTCOMES.index("consumed"), messages)

    def retried(self, messages: Sequence[MessageFacts]) -> None:
        self._count(OUTCOMES.index("retried"), messages)

    def ended(self, moves: Sequence[Moved]) -> None:
        for state, outcome in _MOVED.items():
            self._count(outcome, [move for move in moves if move.after == state])

    def stop(self) -> None:
        self._kept.release()

    def _count(self, outcome: int, messages: Sequence[MessageFacts]) -> None:
        with self._lock:
            for message in messages:
                self._numbers(message.queue, message.topic)[outcome] += 1

    def _observe(self, message: MessageFacts, histogram: int, seconds: float) -> None:
        numbers = self._numbers(message.queue, message.topic)
        numbers[histogram + bisect_left(BOUNDS, seconds)] += 1
        numbers[histogram + len(BOUNDS) + 1] += seconds

    def _numbers(self, queue: str, topic: str) -> memoryview[float]:
        """Return the numbers of a queue and topic; those of ``other`` for a topic or a queue without a label."""
        row = self._rows.get((queue, topic))
        if row is None:
            if topic not in self._topics:
                topic = OTHER
            if queue not in self._queues and len(self._queues) >= MOST_QUEUES:
                queue = OTHER
            if (queue, topic) not in self._rows and len(self._rows) >= MOST_ROWS - 1:
                queue = topic = OTHER
            row = self._rows.get((queue, topic)) or self._slot.add(queue, topic)
            self._rows[queue, topic] = row
            self._queues.add(queue)
        return row.numbers
