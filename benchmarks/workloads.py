"""The workloads. Each returns measures by name, and none for a system that cannot do it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from .driver import ANSWER_SECONDS, Adapter, wait
from .measures import Measures, quantile
from .peers.adapter_process import Mark
from .systems import System


@dataclass(frozen=True, slots=True)
class Size:
    """The numbers of messages and the seconds of the workloads."""

    # Messages that are scheduled one by one: five times as many in bulk.
    schedule: int = 2_000
    drain: int = 20_000
    # A drain that takes more seconds than this is measured up to here.
    drain_limit: float = 10.0
    # The stream of the lateness.
    late: float = 20.0


QUICK = Size(300, 3_000, 5.0, 4.0)

# The delay of messages that are not due in this run.
LATER_SECONDS = 300.0
WAITING_MESSAGES, WAITING_AT_ONCE = 10_000, 500
# Those of a handler that waits for 20 ms: in threads, and as coroutines, of which 200 are our default.
THREADS_AT_ONCE, COROUTINES_AT_ONCE = 64, 200
BATCH_MESSAGES = 10_000
LONGEST_DELAY_SECONDS = 10.0
# A delayed message that is later than this counts as missing: every peer looks for due messages more often.
GRACE_SECONDS = 35.0
# A line in the log for each message: ours with -v 2, Graphile Worker's by default.
LINES = {"BENCH_VERBOSITY": "2", "NO_LOG_SUCCESS": ""}


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    title: str
    # The measures with their units, the first of which is compared.
    measures: dict[str, str]
    run: Callable[[Adapter, Size], Measures]
    # Selects the systems that take part besides django-delayq.
    who: Callable[[System], bool] = lambda system: True
    # The messages/s that a system must drain in this run to take part: the lateness of a slower one would only show how
    # long it was measured.
    needs: float = 0.0
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def more_is_better(self) -> bool:
        return "rate" in self.measures


def takes_part(workload: Workload, system: System) -> bool:
    if system.only:
        return workload.name in system.only
    return system.kind == "ours" or workload.who(system)


def _costs(adapter: Adapter, before: Measures, messages: float) -> Measures:
    """Return the CPU time for each message since ``before``, in µs; nothing where it is not known."""
    used = {name: (seconds - before[name]) * 1e6 / max(1, messages) for name, seconds in adapter.cpu().items()}
    return used if any(used.values()) else {}


def _scheduled(adapter: Adapter, verb: str, number: int, **arguments: bool) -> Measures:
    before = adapter.cpu()
    seconds = adapter.call(verb, number=number, delay=LATER_SECONDS, **arguments)
    return {"rate": number / seconds, **_costs(adapter, before, number)}


def schedule(adapter: Adapter, size: Size) -> Measures:
    adapter.call("schedule", number=0, delay=LATER_SECONDS, warm=50)
    return _scheduled(adapter, "schedule", size.schedule)


def bulk(adapter: Adapter, size: Size) -> Measures:
    if "send_many" not in adapter.verbs:
        return {}
    adapter.call("schedule_bulk", number=100, delay=LATER_SECONDS)
    return _scheduled(adapter, "schedule_bulk", 5 * size.schedule)


def keyed(adapter: Adapter, size: Size) -> Measures:
    return _scheduled(adapter, "schedule_bulk", 5 * size.schedule, keyed=True)


def drain(adapter: Adapter, size: Size, processes: int = 1, *, number: int = 0) -> Measures:
    """Measure from the moment when every worker has handled a message until the last outcome is committed."""
    if adapter.worker_arguments is None:
        return {}
    number = number or size.drain
    adapter.put(number)
    with adapter.worker(processes), adapter.workers_stopped() as all_began:
        left = adapter.left(number)
        before = adapter.cpu()
        all_began()
        began = time.time()
        adapter.wait_until_done(number, size.drain_limit)
        took = time.time() - began
        done = left - adapter.left(number)
        spent = _costs(adapter, before, done)
    if done < 2:
        raise adapter.failed("fewer than two messages were handled with all workers running")
    return {"rate": done / took, **spent}


def drain_2(adapter: Adapter, size: Size) -> Measures:
    return drain(adapter, size, 2)


def insert(adapter: Adapter, size: Size) -> Measures:
    """Drain with a handler that inserts a row."""
    adapter.fill_effects(0)
    return drain(adapter, size)


def update(adapter: Adapter, size: Size) -> Measures:
    """Drain with a handler that updates the message's own row."""
    adapter.fill_effects(size.drain)
    return drain(adapter, size)


def batch(adapter: Adapter, size: Size) -> Measures:
    adapter.fill_effects(0)
    return drain(adapter, size, number=min(size.drain, BATCH_MESSAGES))


def waiting(adapter: Adapter, size: Size) -> Measures:
    """Drain with a handler that waits."""
    return drain(adapter, size, number=min(size.drain, WAITING_MESSAGES))


def late(adapter: Adapter, size: Size, rate: float = 1000) -> Measures:
    """Measure the lateness in ms of messages with delays from one second on, while as many fall due as are sent."""
    if adapter.worker_arguments is None:
        return {}
    with adapter.warm_worker():
        arguments = {"rate": rate, "seconds": size.late, "longest": LONGEST_DELAY_SECONDS}
        before = adapter.cpu()
        stream = adapter.call("late", timeout=ANSWER_SECONDS + LONGEST_DELAY_SECONDS + size.late, **arguments)
        spent = _costs(adapter, before, stream["sent"])

        def counted() -> list[Mark]:
            time.sleep(0.1)
            return [mark for mark in adapter.read_marks() if stream["begin"] <= mark.due < stream["end"]]

        wait(lambda: len(counted()) >= stream["counted"], GRACE_SECONDS)
        marks = counted()
    ms = sorted((mark.at - mark.due) * 1000 for mark in marks)
    missing = stream["counted"] - len({mark.number for mark in marks})
    lateness = {"p50": quantile(ms, 0.5), "p99": quantile(ms, 0.99), "max": ms[-1]} if ms else {}
    early = sum(one < 0 for one in ms)
    return {**lateness, "early": early, "missing": missing, "sent": stream["rate"], **spent}


def late_200(adapter: Adapter, size: Size) -> Measures:
    return late(adapter, size, 200)


def _only_ours(system: System) -> bool:
    return False


def _peer(system: System) -> bool:
    return system.kind == "peer"


def _among(*names: str) -> Callable[[System], bool]:
    return lambda system: system.name in names


def _does(what: str) -> dict[str, str]:
    return {"BENCH_DOES": what}


CPU = {"client": "µs of CPU", "postgres": "µs of CPU in PostgreSQL", "redis": "µs of CPU in Redis"}
RATE = {"rate": "messages/s", **CPU}
LATE = {"p50": "ms", "p99": "ms", "max": "ms", "early": "", "missing": "", "sent": "messages/s", **CPU}

WORKLOADS = (
    Workload("schedule", "schedule one at a time", RATE, schedule),
    Workload("bulk", "schedule in bulk", RATE, bulk),
    Workload("keyed", "schedule in bulk, each with a key", RATE, keyed, _only_ours),
    Workload("drain", "drain, one process", RATE, drain, _peer),
    Workload("drain-2", "drain, two processes", RATE, drain_2, _peer),
    Workload(
        "insert", "drain, a transactional handler with one INSERT", RATE, insert, _peer, environment=_does("insert")
    ),
    Workload(
        "update",
        "drain, a transactional handler with one UPDATE of its own row",
        RATE,
        update,
        _peer,
        environment=_does("update"),
    ),
    Workload(
        "autocommit", "drain, not transactional, one INSERT", RATE, insert, _peer, environment=_does("autocommit")
    ),
    Workload(
        "batch", "drain, a transactional handler of batches of 500", RATE, batch, _only_ours, environment=_does("batch")
    ),
    Workload(
        "savepoints",
        "drain, batches of 50 with a savepoint and one INSERT for each message",
        RATE,
        batch,
        _only_ours,
        environment=_does("savepoints"),
    ),
    Workload("lines", "drain, a line in the log for each message", RATE, drain, _among("graphile"), environment=LINES),
    Workload("query", "drain without Redis", RATE, drain, _only_ours, environment={"REDIS_URL": ""}),
    Workload(
        "async",
        f"drain, the handler waits for 100 ms, {WAITING_AT_ONCE} at once",
        RATE,
        waiting,
        _among("graphile", "procrastinate", "celery"),
        environment={"BENCH_AT_ONCE": str(WAITING_AT_ONCE)},
    ),
    Workload(
        "wait-threads",
        f"drain, the handler waits for 20 ms, {THREADS_AT_ONCE} threads",
        RATE,
        waiting,
        _among("graphile", "celery"),
        environment={"BENCH_WAIT_SECONDS": "0.02", "BENCH_THREADS": "1", "BENCH_AT_ONCE": str(THREADS_AT_ONCE)},
    ),
    Workload(
        "wait-async",
        f"drain, the handler waits for 20 ms, {COROUTINES_AT_ONCE} coroutines",
        RATE,
        waiting,
        _among("graphile", "procrastinate"),
        environment={"BENCH_WAIT_SECONDS": "0.02", "BENCH_AT_ONCE": str(COROUTINES_AT_ONCE)},
    ),
    Workload("late-200", "lateness at 200 messages/s", LATE, late_200, _peer, needs=200),
    Workload("late-1000", "lateness at 1000 messages/s", LATE, late, _peer, needs=1000),
)
