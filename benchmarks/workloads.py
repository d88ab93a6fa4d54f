"""What each system has to do. A workload returns measures by name; one that a system cannot do returns none."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from .driver import START, Adapter, counting, wait
from .measures import Measures, quantile
from .systems import System


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything."""

    schedule: int
    bulk: int
    drain: int
    # A drain that takes longer than this is measured up to here. Seconds.
    patience: float
    late: float
    idle: float
    memory: int
    life: int
    restore: int
    growth: tuple[int, ...]


SIZES = {
    "small": Size(1_000, 10_000, 2_000, 5.0, 5.0, 5.0, 5_000, 1_000, 100_000, ()),
    "full": Size(10_000, 100_000, 40_000, 20.0, 20.0, 20.0, 20_000, 10_000, 1_000_000, (10_000, 100_000, 1_000_000)),
}

# Due within the horizon, but not in this run; and due beyond it. Seconds.
LATER, BEYOND = 300.0, 86_400.0
# How long a delayed message may take before it counts as missing: no peer looks less often. Seconds.
GRACE = 35.0


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    title: str
    # The measures, in the order of the table, with their units.
    measures: dict[str, str]
    run: Callable[[Adapter, Size], Measures]
    # Run once, whatever the number of rounds.
    once: bool = False
    # Which systems, apart from ours, take part.
    who: Callable[[System], bool] = lambda system: True
    full_only: bool = False


def costs(adapter: Adapter, before: tuple[float, float], messages: int) -> Measures:
    """CPU time for each message since then, in µs; nothing where it cannot be told."""
    client, servers = ((after - since) * 1e6 / messages for since, after in zip(before, adapter.cpu(), strict=True))
    return {"client": client, "servers": servers} if client or servers else {}


def _timed(adapter: Adapter, verb: str, number: int) -> Measures:
    before = adapter.cpu()
    seconds = adapter.call(verb, number=number, delay=LATER)
    return {"rate": number / seconds, **costs(adapter, before, number)}


def schedule(adapter: Adapter, size: Size) -> Measures:
    adapter.call("schedule", number=0, delay=LATER, warm=50)
    return _timed(adapter, "schedule", size.schedule)


def schedule_inside(adapter: Adapter, size: Size) -> Measures:
    if "inside" not in adapter.verbs:
        return {}
    adapter.call("schedule", number=0, delay=LATER, warm=50)
    return _timed(adapter, "schedule_inside", size.schedule)


def schedule_bulk(adapter: Adapter, size: Size) -> Measures:
    if "send_many" not in adapter.verbs:
        return {}
    adapter.call("schedule_bulk", number=100, delay=LATER)
    return _timed(adapter, "schedule_bulk", size.bulk)


def _within(adapter: Adapter, function: str, number: int) -> Measures:
    """A loop in the adapter's own process, over messages that were put before."""
    adapter.put(number)
    before = adapter.cpu()
    seconds = adapter.ask(function, number=number)
    return {"rate": number / seconds, **costs(adapter, before, number)}


def drain(adapter: Adapter, size: Size, processes: int = 1) -> Measures:
    """From the first message handled to the last one written down, so that nobody's start counts."""
    if adapter.worker_arguments is None:
        return {} if adapter.system.name == "orm" else _within(adapter, "drain", size.drain)
    adapter.put(size.drain)
    with adapter.worker(processes):
        if not adapter.wait_for(1, START):
            raise adapter.failed("the worker handled nothing")
        before = adapter.cpu()
        counted_before = adapter.done
        whole = adapter.wait_for(size.drain, size.patience)
        if whole and adapter.system.kind == "ours":
            wait(lambda: adapter.ask("settled"), START)
            end = time.time()
        else:
            end = max(at for _number, at, _due in adapter.read_marks())
        spent = costs(adapter, before, max(1, adapter.done - counted_before))
    marks = [at for _number, at, _due in adapter.read_marks() if at <= end]
    if len(marks) < 2:
        return {}
    return {"rate": (len(marks) - 1) / max(end - min(marks), 1e-9), **spent}


def drain_2(adapter: Adapter, size: Size) -> Measures:
    return drain(adapter, size, 2)


def insert(adapter: Adapter, size: Size, processes: int = 1) -> Measures:
    """A handler that inserts a row, in the transaction that records the success."""
    if adapter.system.name == "orm":
        return _within(adapter, "insert", size.drain)
    adapter.ask("choose", name="bench.insert")
    return drain(adapter, size, processes)


def insert_2(adapter: Adapter, size: Size) -> Measures:
    return insert(adapter, size, 2)


def late(adapter: Adapter, size: Size, rate: float) -> Measures:
    """Lateness of messages due 1 to 10 s after they were scheduled, in ms."""
    if adapter.worker_arguments is None:
        return {}
    with adapter.warm_worker():
        sent = adapter.call("late", rate=rate, seconds=size.late)
        adapter.wait_for(int(sent["sent"]) + 1, 10 + GRACE)
        time.sleep(0.2)
        marks = [mark for mark in adapter.read_marks() if mark[0]]
    lateness = sorted((at - due) * 1000 for _number, at, due in marks)
    missing = sent["sent"] - len({number for number, _at, _due in marks})
    measures = {"early": sum(ms < 0 for ms in lateness), "missing": missing, "sent": sent["sent"] / sent["seconds"]}
    if lateness:
        measures |= {"p50": quantile(lateness, 0.5), "p99": quantile(lateness, 0.99), "max": lateness[-1]}
    return measures


def late_200(adapter: Adapter, size: Size) -> Measures:
    return late(adapter, size, 200)


def late_1000(adapter: Adapter, size: Size) -> Measures:
    return late(adapter, size, 1000)


def idle(adapter: Adapter, size: Size) -> Measures:
    """What a worker process asks of the servers while nothing happens."""
    if adapter.worker_arguments is None:
        return {}
    with adapter.warm_worker(), counting(adapter.bench) as count:
        time.sleep(2)
        before = count()
        time.sleep(size.idle)
        after = count()
    return {"redis": (after[0] - before[0]) / size.idle, "queries": (after[1] - before[1]) / size.idle}


def memory(adapter: Adapter, size: Size) -> Measures:
    """Bytes of Redis for a waiting message."""

    def used() -> int:
        info = adapter.bench.redis.info("memory")
        return int(info["used_memory"])

    adapter.put(10, LATER)
    before = used()
    adapter.put(size.memory, LATER)
    inside = used()
    measures = {"bytes": (inside - before) / size.memory}
    if adapter.system.kind == "ours":
        adapter.put(size.memory, BEYOND)
        measures["beyond"] = max(0.0, (used() - inside) / size.memory)
    return measures


def life(adapter: Adapter, size: Size) -> Measures:
    """Bytes of WAL and of disk for a message from its schedule to its end."""
    wal, disk = "SELECT pg_current_wal_insert_lsn() - '0/0'", "SELECT pg_database_size(current_database())"
    system, bench = adapter.system, adapter.bench
    if adapter.worker_arguments is None:
        return {}
    began, disk_before = bench.sql(wal), bench.sql(disk, system)
    adapter.call("schedule", number=size.life, delay=0)
    scheduled = bench.sql(wal)
    with adapter.worker():
        done = adapter.wait_for(size.life, START + size.patience * 3)
        if system.kind == "ours":
            wait(lambda: adapter.ask("settled"), START)
    if not done:
        return {}
    return {
        "scheduled": float(scheduled - began) / size.life,
        "wal": float(bench.sql(wal) - began) / size.life,
        "disk": (bench.sql(disk, system) - disk_before) / size.life,
    }


def restore(adapter: Adapter, size: Size) -> Measures:
    measures: Measures = adapter.ask("restore", rows=size.restore)
    return {**measures, "rate": size.restore / measures["seconds"]}


def recovery(adapter: Adapter, size: Size) -> Measures:
    measures: Measures = adapter.ask("killed")
    return measures


def growth(adapter: Adapter, size: Size, what: str) -> Measures:
    """What a message costs, and how late it is, with more and more rows that are waiting, or finished."""
    measures: Measures = {}
    cost: dict[str, list[float]] = {"schedule": [], "drain": []}
    for rows in (0, *size.growth):
        adapter.empty()
        if rows:
            adapter.ask("fill", rows=rows, what=what)
        for name, work in (("schedule", schedule), ("drain", drain)):
            cost[name].append(1e6 / work(adapter, size)["rate"])
            measures[f"{name} at {rows:,}, µs"] = cost[name][-1]
            adapter.marks.unlink(missing_ok=True)
        measures[f"p99 at {rows:,}, ms"] = late(adapter, size, 1000)["p99"]
        adapter.marks.unlink(missing_ok=True)
    return {"ratio": max(max(more) / none for none, *more in cost.values()), **measures}


def growth_waiting(adapter: Adapter, size: Size) -> Measures:
    return growth(adapter, size, "waiting")


def growth_history(adapter: Adapter, size: Size) -> Measures:
    return growth(adapter, size, "history")


def _ours(system: System) -> bool:
    return False


def _no_floor(system: System) -> bool:
    return system.kind != "floor"


RATE = {"rate": "messages/s", "client": "µs of CPU", "servers": "µs of CPU"}
LATE = {"p50": "ms", "p99": "ms", "max": "ms", "early": "", "missing": "", "sent": "messages/s"}
PER_MESSAGE = "µs a message"

WORKLOADS = (
    Workload("schedule", "Schedule one at a time, each in a transaction of its own", RATE, schedule),
    Workload("schedule-inside", "Schedule one at a time, 100 in each transaction of the caller", RATE, schedule_inside),
    Workload("schedule-bulk", "Schedule in bulk", RATE, schedule_bulk),
    Workload("drain", "Drain of due messages, handler does nothing, one process", RATE, drain),
    Workload("drain-2", "The same, two processes", RATE, drain_2, who=_no_floor),
    Workload(
        "insert",
        "Drain, handler inserts a row in its transaction, one process",
        RATE,
        insert,
        who=lambda system: system.name == "orm",
    ),
    Workload("insert-2", "The same, two processes", RATE, insert_2, who=_ours),
    Workload("late-200", "Lateness at 200 messages/s, delays of 1 to 10 s", LATE, late_200, once=True, who=_no_floor),
    Workload("late-1000", "Lateness at 1000 messages/s", LATE, late_1000, once=True, who=_no_floor),
    Workload(
        "idle",
        "Idle: what a worker process asks for",
        {"redis": "commands/s", "queries": "queries/s"},
        idle,
        once=True,
        who=_no_floor,
    ),
    Workload(
        "memory",
        "Redis memory for a waiting message",
        {"bytes": "B", "beyond": "B beyond the horizon"},
        memory,
        once=True,
        who=lambda system: "redis" in system.uses,
    ),
    Workload(
        "life",
        "The whole life of a message on disk",
        {"scheduled": "B of WAL to schedule", "wal": "B of WAL in all", "disk": "B of disk"},
        life,
        once=True,
        who=lambda system: system.kind == "peer" and "postgres" in system.uses,
    ),
    Workload(
        "restore",
        "Restore into an empty Redis",
        {"seconds": "s", "rate": "rows/s", "memory": "MB above the idle process"},
        restore,
        once=True,
        who=_ours,
    ),
    Workload(
        "recovery",
        "After SIGKILL with 100 handlers of 1 s running: all consumed",
        {"process": "s, a worker process killed", "worker": "s, the whole worker killed (lease 5 s)"},
        recovery,
        once=True,
        who=_ours,
    ),
    Workload(
        "growth-waiting",
        "Cost of a message with more and more waiting",
        {"ratio": "times"},
        growth_waiting,
        once=True,
        who=_ours,
        full_only=True,
    ),
    Workload(
        "growth-history",
        "Cost of a message with more and more finished",
        {"ratio": "times"},
        growth_history,
        once=True,
        who=_ours,
        full_only=True,
    ),
)


def takes_part(workload: Workload, system: System) -> bool:
    return system.kind == "ours" or workload.who(system)
