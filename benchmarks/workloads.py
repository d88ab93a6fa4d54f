"""The workloads. Each returns measures by name, and none for a system that cannot do it."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median

import redis

from .driver import ANSWER_SECONDS, RARE_CHECKPOINTS, START_SECONDS, Adapter, Bench, Failed, counting, wait
from .measures import Measures, at, levels, quantile
from .peers.adapter_process import Mark
from .systems import System


@dataclass(frozen=True, slots=True)
class Size:
    """The numbers of messages and the seconds of the workloads."""

    schedule: int
    bulk: int
    drain: int
    # A drain that takes more seconds than this is measured up to here.
    drain_limit: float
    late: float
    recurring: float
    idle: float
    memory: int
    life: int
    restore: int
    # Messages that are due within one second.
    burst: int
    # Seconds of the long stream.
    long: float
    # Finished messages that are to be pruned, and the seconds of each turn meanwhile.
    purge: int
    purge_turn: float
    growth: tuple[int, ...]


SIZES = {
    "quick": Size(500, 5_000, 2_000, 3.0, 3.0, 5.0, 3.0, 5_000, 300, 100_000, 10_000, 5.0, 200_000, 3.0, ()),
    "small": Size(1_000, 10_000, 2_000, 3.0, 5.0, 10.0, 5.0, 5_000, 1_000, 300_000, 20_000, 60.0, 500_000, 5.0, ()),
    "full": Size(
        10_000,
        100_000,
        40_000,
        20.0,
        20.0,
        30.0,
        20.0,
        20_000,
        10_000,
        1_000_000,
        1_000_000,
        600.0,
        5_000_000,
        60.0,
        (10_000, 100_000, 1_000_000),
    ),
}

# Delays of messages that are due within the horizon, but not in this run; and of messages beyond the horizon.
LATER_SECONDS, BEYOND_SECONDS = 300.0, 86_400.0
# One for each tenant, for example.
QUEUES = 60
# One for each customer, for example: a message of each may run at a time.
KEYS = 10_000
# Growth workloads take longer than the usual horizon. They have a wider one, and delays within it that end after the
# workload, in the middle of the waiting messages.
HORIZON_SECONDS, MUCH_LATER_SECONDS = 21_600.0, 14_400.0
# The time to fill ten million rows.
FILL_TIMEOUT_SECONDS = 3_600.0
# At each level of growth everything is measured in this many turns. The cost of a schedule, which is quick, is measured
# this many times in each turn.
TURNS, REPEAT = 5, 3
# The delay of messages: in this time they are scheduled and the tables analysed.
PREPARE_SECONDS = 8.0
GROWN = {"schedule": "µs", "drain": "µs", "p50": "ms", "p99": "ms"}
WITH_NONE = " with none"
# The least number of messages in each drain of a growth workload: a smaller drain ends too soon. And its longest delay.
GROWN_DRAIN, SOON_SECONDS = 20_000, 3.0
PROCESSES = 4
# The delay of messages that are due together: the time to start their workers, plus the time to put them at this many
# rows a second.
FILL_DUE_SECONDS, FILL_RATE = 10.0, 20_000
URGENT_MESSAGES = 5
# The messages that one call schedules where one process cannot schedule as many one at a time.
TOGETHER = 30
# The server's shortest time between two checkpoints, in seconds, and the least lateness that counts as a pause, in ms.
SHORTEST_CHECKPOINT, PAUSE = 30.0, 50.0
# Moments that are later than that belong to one pause when no more than these seconds are between them.
SAME_PAUSE_SECONDS = 0.5
# The queues and topics that nobody has used before, and the seconds between their first messages.
NEW, NEW_EVERY_SECONDS = 20, 0.25
# The turns without and with a purge, and the retention time that makes the finished messages old.
PURGE_TURNS, PURGE_RETENTION = 3, {"BENCH_RETENTION": "3600"}
DELETED = "SELECT n_tup_del FROM pg_stat_user_tables WHERE relname = 'delayq_message'"
CHECKPOINTS = "SELECT checkpoints_timed + checkpoints_req FROM pg_stat_bgwriter"
# Since PostgreSQL 17.
CHECKPOINTS_17 = "SELECT num_timed + num_requested FROM pg_stat_checkpointer"
VACUUMS = "SELECT sum(autovacuum_count) FROM pg_stat_user_tables WHERE relname LIKE 'delayq%'"
SCHEDULES, KILLS, KILL_STEP_SECONDS = 100, 3, 0.05
# Occurrences count after this time: a worker that has just started is done with what it makes up for.
SETTLE_SECONDS = 4.0
# The least number of messages in a drain by all but peers in Python: fewer would be handled too soon.
FAST_DRAIN = 40_000
# The messages whose handlers wait for 100 ms, how many of these run at once, and the longest time for the drain.
AWAITING_MESSAGES, AWAITING_AT_ONCE, AWAITING_LIMIT = 20_000, 500, 30.0
# Redis frees the memory of a client's last command after two seconds without another.
IDLE_SECONDS = 3.5
WAL = "SELECT pg_current_wal_insert_lsn() - '0/0'"
# The time for which messages are measured as they fall due.
FLOW_SECONDS = 3.0
# A delayed message that is later than this counts as missing: every peer looks for due messages more often.
GRACE_SECONDS = 35.0


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    title: str
    # The measures, in the order of the table, with their units.
    measures: dict[str, str]
    run: Callable[[Adapter, Size], Measures]
    # True when it runs once in any number of rounds.
    once: bool = False
    # True when peers take part in the first round only: it takes long, and no target needs their spread.
    peers_once: bool = False
    # Selects the systems that take part besides django-delayq.
    who: Callable[[System], bool] = lambda system: True
    # The messages/s that a system must drain in this run to take part: the lateness of a slower one would only show how
    # long it was measured.
    needs: float = 0.0
    # The quantity that grows, for the table and the plot. A growth workload runs when the size has levels.
    grows: str = ""
    environment: dict[str, str] = field(default_factory=dict)


def costs(adapter: Adapter, before: tuple[float, float], messages: int) -> Measures:
    """Return the CPU time for each message since ``before``, in µs; nothing where it is not known."""
    client, servers = ((after - since) * 1e6 / messages for since, after in zip(before, adapter.cpu(), strict=True))
    return {"client": client, "servers": servers} if client or servers else {}


def _timed(adapter: Adapter, verb: str, number: int, delay: float = LATER_SECONDS) -> Measures:
    before = adapter.cpu()
    seconds = adapter.call(verb, number=number, delay=delay)
    return {"rate": number / seconds, **costs(adapter, before, number)}


def schedule(adapter: Adapter, size: Size, delay: float = LATER_SECONDS) -> Measures:
    adapter.call("schedule", number=0, delay=delay, warm=50)
    return _timed(adapter, "schedule", size.schedule, delay)


def schedule_beyond(adapter: Adapter, size: Size) -> Measures:
    return schedule(adapter, size, BEYOND_SECONDS)


def schedule_inside(adapter: Adapter, size: Size) -> Measures:
    if "inside" not in adapter.verbs:
        return {}
    adapter.call("schedule", number=0, delay=LATER_SECONDS, warm=50)
    return _timed(adapter, "schedule_inside", size.schedule)


def schedule_bulk(adapter: Adapter, size: Size) -> Measures:
    if "send_many" not in adapter.verbs:
        return {}
    adapter.call("schedule_bulk", number=100, delay=LATER_SECONDS)
    return _timed(adapter, "schedule_bulk", size.bulk)


def _within(adapter: Adapter, function: str, number: int) -> Measures:
    """Time a loop in the adapter's own process, over messages that were put before."""
    adapter.put(number)
    before = adapter.cpu()
    seconds = adapter.ask(function, number=number)
    return {"rate": number / seconds, **costs(adapter, before, number)}


def drain(adapter: Adapter, size: Size, processes: int = 1) -> Measures:
    is_slow = adapter.system.kind == "peer" and not adapter.system.is_node
    number = size.drain if is_slow else max(size.drain, FAST_DRAIN)
    if adapter.worker_arguments is None:
        return {} if adapter.system.name == "orm" else _within(adapter, "drain", number)
    return _drained(adapter, number, size.drain_limit, processes)


def _drained(adapter: Adapter, number: int, limit: float, processes: int, *, insert: bool = False) -> Measures:
    """Measure from the moment when every worker has handled a message until the last outcome."""
    adapter.put(number, insert=insert)
    with adapter.worker(processes):
        begin = adapter.synchronize_workers()
        before = adapter.cpu()
        counted_before = adapter.done
        whole = adapter.wait_for(number, limit)
        if whole and adapter.system.kind == "ours":
            wait(lambda: adapter.ask("all_recorded"), START_SECONDS)
            end = time.time()
        else:
            end = max(mark.at for mark in adapter.read_marks())
        spent = costs(adapter, before, max(1, adapter.done - counted_before))
    handled = sum(begin < mark.at <= end for mark in adapter.read_marks())
    if handled < 2:
        raise adapter.failed("fewer than two messages were handled with all workers running")
    return {"rate": handled / (end - begin), **spent}


def drain_2(adapter: Adapter, size: Size) -> Measures:
    return drain(adapter, size, 2)


def drain_query(adapter: Adapter, size: Size) -> Measures:
    """Drain without Redis: a query finds what is due."""
    return {} if adapter.worker_arguments is None else _drained(adapter, FAST_DRAIN, size.drain_limit, 1)


def insert(adapter: Adapter, size: Size, processes: int = 1) -> Measures:
    """Drain with a handler that inserts a row: ours in the transaction of the outcome, a peer's in one of its own."""
    if adapter.system.name == "orm":
        return _within(adapter, "insert", size.drain)
    if adapter.worker_arguments is None:
        return {}
    peer = adapter.system.kind == "peer"
    if peer:
        adapter.create_effects_table()
    else:
        adapter.ask("choose", name="bench.insert")
    return _drained(adapter, size.drain, size.drain_limit, processes, insert=peer)


def insert_2(adapter: Adapter, size: Size) -> Measures:
    return insert(adapter, size, 2)


def limits(adapter: Adapter, size: Size) -> Measures:
    """Drain messages of many keys, one of which may run at a time; and messages without a limit beside a limit."""
    if adapter.worker_arguments is None:
        return {}
    adapter.ask("choose", name="bench.limited")
    adapter.ask("spread_over_keys", over=KEYS)
    keyed = _drained(adapter, 2 * KEYS, size.drain_limit * 10, 1)
    adapter.empty()
    adapter.ask("choose", name="bench.limited")
    adapter.ask("spread_over_keys", over=KEYS // 100)
    few = _drained(adapter, KEYS, size.drain_limit * 10, 1)
    return {**keyed, "few": few["rate"]}


def late(adapter: Adapter, size: Size, rate: float, longest: float = 10.0, *, wait_for_all: bool = False) -> Measures:
    """Measure the lateness in ms of messages with delays from 1 s to ``longest`` seconds.

    Messages count while as many fall due as are sent. ``wait_for_all`` waits for the messages that fall due later too.
    """
    if adapter.worker_arguments is None:
        return {}
    with adapter.warm_worker():
        measures, _marks = _stream(adapter, rate, size.late, longest)
        if wait_for_all:
            adapter.wait_for(int(measures["messages"]) + 1, longest + GRACE_SECONDS)
    return measures


def _stream(
    adapter: Adapter, rate: float, seconds: float, longest: float = 10.0, together: int = 1
) -> tuple[Measures, list[Mark]]:
    """Send messages at an even rate to the workers that run; return their lateness, and the marks that count."""
    arguments = {"rate": rate, "seconds": seconds, "longest": longest}
    if together > 1:
        arguments["together"] = together
    stream = adapter.call("late", timeout=ANSWER_SECONDS + longest + seconds, **arguments)

    def counted() -> list[Mark]:
        time.sleep(0.1)
        return [mark for mark in adapter.read_marks() if mark.number and stream["begin"] <= mark.due < stream["end"]]

    wait(lambda: len(counted()) >= stream["counted"], GRACE_SECONDS)
    marks = counted()
    missing = stream["counted"] - len({mark.number for mark in marks})
    early = sum(mark.at < mark.due for mark in marks)
    measures = {"early": early, "missing": missing, "sent": stream["rate"], "messages": stream["sent"]}
    return {**measures, **_lateness(marks)}, marks


def _lateness(marks: list[Mark]) -> Measures:
    ms = sorted((mark.at - mark.due) * 1000 for mark in marks)
    return {"p50": quantile(ms, 0.5), "p99": quantile(ms, 0.99), "max": ms[-1]} if ms else {}


def awaiting(adapter: Adapter, size: Size) -> Measures:
    """Drain with a handler that waits for 100 ms."""
    if adapter.system.kind == "ours":
        adapter.ask("choose", name="bench.await")
    return _drained(adapter, AWAITING_MESSAGES, AWAITING_LIMIT, 1)


def awaiting_late(adapter: Adapter, size: Size) -> Measures:
    if adapter.system.kind == "ours":
        adapter.ask("choose", name="bench.await")
    return late(adapter, size, 1000)


def late_200(adapter: Adapter, size: Size) -> Measures:
    return late(adapter, size, 200)


def late_1000(adapter: Adapter, size: Size) -> Measures:
    return late(adapter, size, 1000)


def late_3000(adapter: Adapter, size: Size) -> Measures:
    """Measure the lateness with two worker processes; one process sends, some messages with each call."""
    with adapter.warm_worker(2):
        sender, before = adapter.sender_cpu(), adapter.cpu()
        measures, _marks = _stream(adapter, 3000, size.late, together=TOGETHER)
        number = int(measures["messages"])
        spent, sending = costs(adapter, before, number), (adapter.sender_cpu() - sender) * 1e6 / number
    if spent:
        measures |= {"sender": sending, "workers": spent["client"] - sending, "servers": spent["servers"]}
    return measures


def late_long(adapter: Adapter, size: Size) -> Measures:
    """Measure the lateness for long, with a checkpoint in the middle and at the end."""
    bench = adapter.bench
    bench.configure({"checkpoint_timeout": f"{max(SHORTEST_CHECKPOINT, size.long / 2):.0f}s"})
    try:
        checkpoints, vacuums = _checkpoints(bench), bench.sql(VACUUMS, adapter.system)
        with adapter.warm_worker():
            measures, marks = _stream(adapter, 1000, size.long)
        did = {
            "checkpoints": _checkpoints(bench) - checkpoints,
            "vacuums": float(bench.sql(VACUUMS, adapter.system) - vacuums),
        }
    finally:
        bench.configure(RARE_CHECKPOINTS)
    return {**measures, "pauses": pauses(marks), **did}


def _checkpoints(bench: Bench) -> float:
    is_17 = int(bench.sql("SHOW server_version_num")) >= 170_000
    return float(bench.sql(CHECKPOINTS_17 if is_17 else CHECKPOINTS))


def pauses(marks: list[Mark]) -> int:
    """Return how many times handlers began later than ``PAUSE``: moments close to each other are one."""
    ends = sorted(mark.at for mark in marks if (mark.at - mark.due) * 1000 > PAUSE)
    return sum(later - earlier > SAME_PAUSE_SECONDS for earlier, later in pairwise([0.0, *ends]))


def new_queue(adapter: Adapter, size: Size) -> Measures:
    """Measure the time from a call to the handler, for messages of new queues, of a known queue and of new topics."""
    kinds = {
        "new": [(f"new-{n}", "bench.mark") for n in range(NEW)],
        "known": [("default", "bench.mark")] * NEW,
        "topic": [("default", f"bench.new-{n}") for n in range(NEW)],
    }
    found: dict[str, list[float]] = {}
    number = 0
    with adapter.warm_worker():
        for turn in range(NEW):
            for kind, places in kinds.items():
                number += 1
                queue, topic = places[turn]
                time.sleep(NEW_EVERY_SECONDS)
                adapter.ask("send_now", number=number, queue=queue, topic=topic)
                if not adapter.wait_for(number + 1, GRACE_SECONDS):
                    raise adapter.failed(f"no message in {GRACE_SECONDS:.0f} s: queue {queue}, topic {topic}")
                mark = adapter.read_marks()[-1]
                found.setdefault(kind, []).append((mark.at - mark.due) * 1000)
    middle = {kind: median(ms) for kind, ms in found.items()}
    return {"p50": middle["new"], "max": max(found["new"]), "known": middle["known"], "topic": middle["topic"]}


def purge(adapter: Adapter, size: Size) -> Measures:
    """Measure the lateness without and with a purge, in turns: a worker with a short retention time prunes."""
    adapter.ask("fill", timeout=FILL_TIMEOUT_SECONDS, rows=size.purge, what="history")
    turns: dict[str, list[Measures]] = {"without": [], "with": []}
    for turn in range(PURGE_TURNS):
        for name in ("without", "with") if turn % 2 else ("with", "without"):
            with adapter.warm_worker(environment=PURGE_RETENTION if name == "with" else None):
                began, deleted = time.time(), adapter.bench.sql(DELETED, adapter.system)
                measures, _marks = _stream(adapter, 1000, size.purge_turn, SOON_SECONDS)
                seconds, gone = time.time() - began, adapter.bench.sql(DELETED, adapter.system) - deleted
                adapter.wait_for(int(measures["messages"]) + 1, GRACE_SECONDS)
            adapter.clear_marks()
            turns[name].append({**measures, "purged": gone / seconds})
    if adapter.ask("finished_before", days=1) == 0:
        raise adapter.failed("all were purged before the last turn ended")
    plain, beside = (
        {measure: median([one[measure] for one in turns[name]]) for measure in ("p50", "p99", "max", "purged")}
        for name in ("without", "with")
    )
    return {
        "ratio": beside["p99"] / plain["p99"],
        "p99": beside["p99"],
        "without": plain["p99"],
        "p50": beside["p50"],
        "max": max(one["max"] for one in turns["with"]),
        "purged": beside["purged"],
        "missing": sum(one["missing"] for some in turns.values() for one in some),
    }


def late_queues(adapter: Adapter, size: Size) -> Measures:
    """Measure the lateness of messages that go to many queues in turn."""
    adapter.ask("spread", over=QUEUES)
    return late(adapter, size, 1000)


def idle(adapter: Adapter, size: Size) -> Measures:
    """Count the commands and queries of a worker process while there are no messages."""
    if adapter.worker_arguments is None:
        return {}
    with adapter.warm_worker(), counting(adapter.bench) as count:
        time.sleep(2)
        before = count()
        time.sleep(size.idle)
        after = count()
    return {"redis": (after[0] - before[0]) / size.idle, "queries": (after[1] - before[1]) / size.idle}


def memory(adapter: Adapter, size: Size) -> Measures:
    """Measure the bytes in Redis for a waiting message."""

    def used() -> int:
        time.sleep(IDLE_SECONDS)
        info = adapter.bench.redis.info("memory")
        return int(info["used_memory"])

    adapter.put(10, LATER_SECONDS)
    before = used()
    adapter.put(size.memory, LATER_SECONDS)
    inside = used()
    measures = {"bytes": (inside - before) / size.memory}
    if adapter.system.kind == "ours":
        adapter.put(size.memory, BEYOND_SECONDS)
        measures["beyond"] = max(0.0, (used() - inside) / size.memory)
    return measures


def life(adapter: Adapter, size: Size) -> Measures:
    """Measure the bytes of WAL and of disk for a message from its schedule to its end."""
    disk = "SELECT pg_database_size(current_database())"
    system, bench = adapter.system, adapter.bench
    if adapter.worker_arguments is None:
        return {}
    began, disk_before = bench.sql(WAL), bench.sql(disk, system)
    adapter.call("schedule", number=size.life, delay=0)
    scheduled = bench.sql(WAL)
    with adapter.worker():
        done = adapter.wait_for(size.life, START_SECONDS + size.drain_limit * 3)
        if system.kind == "ours":
            wait(lambda: adapter.ask("all_recorded"), START_SECONDS)
    if not done:
        raise adapter.failed(f"{adapter.done} of {size.life} were handled")
    measures = {
        "scheduled": float(scheduled - began) / size.life,
        "wal": float(bench.sql(WAL) - began) / size.life,
        "disk": (bench.sql(disk, system) - disk_before) / size.life,
    }
    return {**measures, "flowing": _flowing(adapter)} if system.kind == "ours" else measures


def _flowing(adapter: Adapter) -> float:
    """Return the bytes of WAL for each of 1000 messages a second that fall due in no order while a worker runs."""
    adapter.empty()
    with adapter.warm_worker():
        began = adapter.bench.sql(WAL)
        stream = adapter.call("late", rate=1000, seconds=FLOW_SECONDS, longest=FLOW_SECONDS)
        if not adapter.wait_for(int(stream["sent"]) + 1, GRACE_SECONDS):
            raise adapter.failed(f"{adapter.done - 1} of {stream['sent']} were handled")
        wait(lambda: adapter.ask("all_recorded"), START_SECONDS)
        return float(adapter.bench.sql(WAL) - began) / int(stream["sent"])


def restore(adapter: Adapter, size: Size) -> Measures:
    measures: Measures = adapter.ask("restore", rows=size.restore)
    return {**measures, "rate": size.restore / measures["seconds"]}


def recovery(adapter: Adapter, size: Size) -> Measures:
    measures: Measures = adapter.ask("killed")
    return measures


def recurring(adapter: Adapter, size: Size) -> Measures:
    """Measure schedules that have a time each second, and count their times while the scheduler is killed."""
    if "recur" not in adapter.verbs:
        return {}
    adapter.ask("recur", number=SCHEDULES)
    with adapter.worker():
        begin = _until_recurring(adapter)
        _before(begin)
        cpu_before = adapter.cpu()
        killed = begin + size.recurring
        _before(killed)
        spent = costs(adapter, cpu_before, int(SCHEDULES * size.recurring))
        _kill_in_the_midst(adapter, 1)
    for place in range(2, KILLS + 1):
        with adapter.worker():
            _before(_until_recurring(adapter))
            _kill_in_the_midst(adapter, place)
    with adapter.worker():
        end = _until_recurring(adapter) + 1.0
        _before(end)
        wait(lambda: not _occurrences(adapter.read_marks(), begin, killed, end)["missing"], GRACE_SECONDS)
    return {**_occurrences(adapter.read_marks(), begin, killed, end), **spent}


def _kill_in_the_midst(adapter: Adapter, place: int) -> None:
    """Kill the workers while they run the occurrences of a second, a little later in it each time."""
    _before(math.ceil(time.time() + KILL_STEP_SECONDS) + place * KILL_STEP_SECONDS)
    adapter.kill_workers()


def _until_recurring(adapter: Adapter) -> float:
    """Wait until a worker that has just started runs occurrences; return a whole second that follows."""
    started = time.time()
    if not wait(lambda: any(mark.at > started for mark in adapter.read_marks()), START_SECONDS):
        raise adapter.failed("no occurrence")
    return math.ceil(time.time() + SETTLE_SECONDS)


def _occurrences(marks: list[Mark], begin: float, killed: float, end: float) -> Measures:
    """Return the lateness up to the first kill, and the share of times between ``begin`` and ``end`` without a run."""
    expected = SCHEDULES * (end - begin)
    if not any(mark.due for mark in marks):
        # The system does not tell its tasks their times.
        counted = sum(begin <= mark.at < end for mark in marks)
        return {"missing": max(0.0, 100 * (1 - counted / expected))}
    runs = Counter((mark.number, mark.due) for mark in marks if begin <= mark.due < end)
    late = sorted((mark.at - mark.due) * 1000 for mark in marks if begin <= mark.due < killed)
    return {
        **({"p50": quantile(late, 0.5), "p99": quantile(late, 0.99), "max": late[-1]} if late else {}),
        "missing": 100 * (1 - len(runs) / expected),
        "doubled": 100 * (runs.total() / len(runs) - 1),
    }


def burst(adapter: Adapter, size: Size) -> Measures:
    """Measure messages that are due within one second: their rate, PINGs of Redis meanwhile, and urgent messages."""
    number, limit = size.burst, 6 * size.drain_limit
    begins = _fill_due(adapter, number, 1.0)
    with adapter.worker():
        _until_workers(adapter, 1)
        _before(begins)
        with pinging(adapter.bench) as pings:
            for turn in range(URGENT_MESSAGES):
                adapter.ask("urgent", number=number + 1 + turn, due=begins + 1.0 + turn * 0.1)
            whole = adapter.wait_for(number + URGENT_MESSAGES, begins + limit - time.time())
            end = time.time()
    marks = [mark for mark in adapter.read_marks() if mark.at <= end]
    lateness = {mark.number: (mark.at - mark.due) * 1000 for mark in marks}
    urgent = [late for n, late in lateness.items() if n > number]
    seconds = max(mark.at for mark in marks) - begins if whole else limit
    return {
        "rate": (len(lateness) - len(urgent)) / seconds,
        "seconds": seconds,
        "ping": max(pings),
        "p99": quantile(sorted(pings), 0.99),
        **({"urgent": max(urgent)} if len(urgent) == URGENT_MESSAGES else {}),
        "early": sum(late < 0 for late in lateness.values()),
        "missing": number + URGENT_MESSAGES - len(lateness),
    }


def _fill_due(adapter: Adapter, number: int, within: float) -> float:
    """Put messages that fall due after all of them are put and a worker runs. Return the first due time."""
    due = round(time.time() + FILL_DUE_SECONDS + number / FILL_RATE, 3)
    adapter.ask("fill_due", rows=number, due=due, within=within)
    return due


def _before(moment: float) -> None:
    """Wait for a moment, which must be in the future."""
    ahead = moment - time.time()
    if ahead < 0:
        raise Failed(f"too slow: messages fell due {-ahead:.1f} s before the workers were ready")
    time.sleep(ahead)


def _until_workers(adapter: Adapter, processes: int) -> None:
    """Wait until ``processes`` worker processes run."""
    if not wait(lambda: adapter.ask("workers") >= processes, START_SECONDS):
        raise adapter.failed("a worker did not start")


@contextmanager
def pinging(bench: Bench) -> Iterator[list[float]]:
    """Yield a list that collects the time of PINGs in ms, from a client that sends some hundred a second."""
    took: list[float] = []
    over = threading.Event()

    def ping() -> None:
        with redis.Redis.from_url(bench.redis_server.url) as client:
            client.ping()
            while not over.wait(0.005):
                began = time.perf_counter()
                client.ping()
                took.append((time.perf_counter() - began) * 1000)

    thread = threading.Thread(target=ping, daemon=True)
    thread.start()
    try:
        yield took
    finally:
        over.set()
        thread.join()


def growth(adapter: Adapter, size: Size, what: str, far: int) -> Measures:
    """Measure cost and lateness of a message with more and more rows, in turns with a second system without rows."""
    size = replace(size, drain=max(size.drain, GROWN_DRAIN))
    measures: Measures = {}
    filled = 0
    with beside(adapter) as none:
        for rows in size.growth:
            try:
                if rows > filled:
                    adapter.ask("fill", timeout=FILL_TIMEOUT_SECONDS, rows=rows - filled, what=what)
                    filled = rows
                found = _level(adapter, none, size)
            except Failed as error:
                if not measures:
                    raise
                # The earlier levels took long: their results are kept.
                print(f"at {rows:,}: {error}", file=sys.stderr)
                break
            measures |= {at(name, rows, unit): value for (name, unit), value in found.items()}
    return {**_compared(levels(measures), far), **measures}


@contextmanager
def beside(adapter: Adapter) -> Iterator[Adapter]:
    """Start the same system again on the same servers, with databases of its own."""
    bench, horizon = adapter.bench, {"BENCH_HORIZON": str(HORIZON_SECONDS)}
    second = replace(adapter.system, name=f"{adapter.system.name}-none")
    redis_url = bench.redis_server.url.rpartition("/")[0] + "/1"
    with bench.adapter(second, {**horizon, "REDIS_URL": redis_url}) as none:
        # Starting it has emptied all of Redis.
        adapter.call("ready")
        yield none


def _level(adapter: Adapter, none: Adapter, size: Size) -> dict[tuple[str, str], float]:
    """Return the least cost of some turns and the median lateness, both with the rows and without."""
    turns: dict[Adapter, list[Measures]] = {adapter: [], none: []}
    for turn in range(TURNS):
        pair = (adapter, none) if turn % 2 else (none, adapter)
        for one in pair * REPEAT:
            turns[one].append({"schedule": 1e6 / schedule(one, size, MUCH_LATER_SECONDS)["rate"]})
        for one in pair:
            turns[one].append(_delivery(one, size))
    found: dict[tuple[str, str], float] = {}
    for name, unit in GROWN.items():
        middle = min if unit == "µs" else median
        for one, suffix in ((adapter, ""), (none, WITH_NONE)):
            found[name + suffix, unit] = middle([part[name] for part in turns[one] if name in part])
    return found


def _delivery(adapter: Adapter, size: Size) -> Measures:
    cost = _drain_warm(adapter, size.drain)
    adapter.clear_marks()
    lateness = late(adapter, size, 1000, longest=SOON_SECONDS, wait_for_all=True)
    adapter.clear_marks()
    if "p50" not in lateness or lateness["early"] or lateness["missing"]:
        raise adapter.failed(f"lateness: {lateness}")
    return {"drain": cost, **lateness}


def _drain_warm(adapter: Adapter, number: int) -> float:
    """Return the µs to deliver each of some messages that fall due together, by a worker that was running before.

    A worker that has just started also loads messages that came within the horizon while none was running.
    """
    with adapter.warm_worker():
        adapter.put(number, PREPARE_SECONDS)
        if not adapter.wait_for(number + 1, START_SECONDS + number / 1000):
            raise adapter.failed(f"{adapter.done} of {number} were handled")
        wait(lambda: adapter.ask("all_recorded"), START_SECONDS)
        ended = time.time()
    first = min(mark.at for mark in adapter.read_marks() if mark.number)
    return 1e6 * (ended - first) / number


def _compared(by_level: dict[int, Measures], far: int) -> Measures:
    """Return the largest ratio of the cost to the cost without rows, and the ratio of lateness at the level ``far``."""

    def ratio(level: int, name: str) -> float:
        unit = GROWN[name]
        return by_level[level][f"{name}, {unit}"] / by_level[level][f"{name}{WITH_NONE}, {unit}"]

    measures: Measures = {"ratio": max(ratio(level, name) for level in by_level for name in ("schedule", "drain"))}
    return {**measures, **({name: ratio(far, name) for name in ("p50", "p99")} if far in by_level else {})}


def growth_waiting(adapter: Adapter, size: Size) -> Measures:
    return growth(adapter, size, "waiting", 1_000_000)


def growth_history(adapter: Adapter, size: Size) -> Measures:
    return growth(adapter, size, "history", 10_000_000)


def growth_processes(adapter: Adapter, size: Size) -> Measures:
    """Measure the rate with one worker process and with more; each is the median of some runs."""
    rates: dict[int, list[float]] = {}
    for _ in range(REPEAT):
        for processes in range(1, PROCESSES + 1):
            adapter.empty()
            rates.setdefault(processes, []).append(_together(adapter, 10 * size.drain, processes))
    measures = {at("drain", processes, "messages/s"): median(found) for processes, found in rates.items()}
    return {"ratio": max(map(median, rates.values())) / median(rates[1]), **measures}


def _together(adapter: Adapter, number: int, processes: int) -> float:
    """Return the messages/s from the moment when all are due, with all worker processes running."""
    due = _fill_due(adapter, number, 0.0)
    with adapter.worker(processes):
        _until_workers(adapter, processes)
        _before(due)
        if not adapter.wait_for(number, START_SECONDS + number / 1000):
            raise adapter.failed(f"{adapter.done} of {number} were handled")
        wait(lambda: adapter.ask("all_recorded"), START_SECONDS)
        return number / (time.time() - due)


def _only_ours(system: System) -> bool:
    return False


def _no_floor(system: System) -> bool:
    return system.kind != "floor"


def _waiting(system: System) -> bool:
    return "waits" in system.traits


WAITING = {"BENCH_AT_ONCE": str(AWAITING_AT_ONCE)}
RATE = {"rate": "messages/s", "client": "µs of CPU", "servers": "µs of CPU"}
LATE = {"p50": "ms", "p99": "ms", "max": "ms", "early": "", "missing": "", "sent": "messages/s"}
COST = "times the cost with none, at most"
LATENESS = "times that with none,"

WORKLOADS = (
    Workload("schedule", "Schedule one at a time, each in a transaction of its own", RATE, schedule),
    Workload(
        "schedule-beyond",
        "The same, due tomorrow: beyond the horizon of Redis",
        RATE,
        schedule_beyond,
        who=lambda system: system.name == "orm",
    ),
    Workload(
        "schedule-inside",
        "Schedule one at a time, 100 in each transaction of the caller",
        RATE,
        schedule_inside,
        once=True,
    ),
    Workload("schedule-bulk", "Schedule in bulk", RATE, schedule_bulk),
    Workload("drain", "Drain of due messages, handler does nothing, one process", RATE, drain),
    Workload("drain-2", "The same, two processes", RATE, drain_2, once=True, who=_no_floor),
    Workload(
        "drain-query",
        "Drain of due messages without Redis, one process",
        RATE,
        drain_query,
        once=True,
        who=_only_ours,
        environment={"REDIS_URL": ""},
    ),
    Workload(
        "insert",
        "Drain, handler inserts a row in its transaction, one process",
        RATE,
        insert,
        who=lambda system: system.kind == "peer" or system.name == "orm",
        peers_once=True,
    ),
    Workload("insert-2", "The same, two processes", RATE, insert_2, once=True, who=_only_ours),
    Workload(
        "limits",
        f"Drain of messages with {KEYS:,} keys, one of each at a time, one process",
        {**RATE, "few": f"messages/s with {KEYS // 100} keys"},
        limits,
        once=True,
        who=_only_ours,
        environment={"BENCH_LIMITS": "1"},
    ),
    Workload(
        "late-200",
        "Lateness at 200 messages/s, delays of 1 to 10 s",
        LATE,
        late_200,
        once=True,
        who=_no_floor,
        needs=200.0,
    ),
    Workload("late-1000", "Lateness at 1000 messages/s", LATE, late_1000, peers_once=True, who=_no_floor, needs=1000.0),
    Workload(
        "late-queues",
        f"Lateness at 1000 messages/s that go to {QUEUES} queues in turn",
        LATE,
        late_queues,
        once=True,
        who=_only_ours,
    ),
    Workload(
        "late-3000",
        "Lateness at 3000 messages/s, two processes",
        {**LATE, "sender": "µs of CPU", "workers": "µs of CPU", "servers": "µs of CPU"},
        late_3000,
        once=True,
        who=_only_ours,
    ),
    Workload(
        "late-long",
        "Lateness at 1000 messages/s for long, beside checkpoints and autovacuum",
        {**LATE, "pauses": "", "checkpoints": "", "vacuums": ""},
        late_long,
        once=True,
        who=_only_ours,
    ),
    Workload(
        "new-queue",
        "First message of a queue that nobody has used before, idle worker",
        {
            "p50": "ms",
            "max": "ms",
            "known": "ms, p50 of a known queue",
            "topic": "ms, p50 of a new topic",
        },
        new_queue,
        once=True,
        who=_only_ours,
        environment={"BENCH_NEW": str(NEW)},
    ),
    Workload(
        "purge",
        "Lateness at 1000 messages/s while finished messages are pruned",
        {
            "ratio": "times the p99 without",
            "p99": "ms",
            "without": "ms, p99",
            "p50": "ms",
            "max": "ms",
            "purged": "messages/s",
            "missing": "",
        },
        purge,
        once=True,
        who=_only_ours,
    ),
    Workload(
        "async",
        "Drain of 20,000 due messages, handler waits for 100 ms, one process, 500 at once",
        RATE,
        awaiting,
        peers_once=True,
        who=_waiting,
        environment=WAITING,
    ),
    Workload(
        "async-late",
        "Lateness at 1000 messages/s, handler waits for 100 ms",
        LATE,
        awaiting_late,
        peers_once=True,
        who=lambda system: _waiting(system) and system.name != "taskiq",
        environment=WAITING,
    ),
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
        {
            "scheduled": "B of WAL to schedule",
            "wal": "B of WAL in all",
            "disk": "B of disk",
            "flowing": "B of WAL in all, 1000 a second falling due one by one",
        },
        life,
        peers_once=True,
        who=lambda system: system.kind == "peer" and "postgres" in system.uses,
    ),
    Workload(
        "restore",
        "Restore into an empty Redis",
        {
            "seconds": "s",
            "rate": "rows/s",
            "vacuumed": "s once vacuumed",
            "memory": "MB above a restore of nothing",
        },
        restore,
        who=_only_ours,
    ),
    Workload(
        "recovery",
        "After SIGKILL with 100 handlers of 1 s running: all consumed",
        {"process": "s, a worker process killed", "worker": "s, the whole worker killed (lease 5 s)"},
        recovery,
        once=True,
        who=_only_ours,
    ),
    Workload(
        "recurring",
        f"{SCHEDULES} schedules that have a time each second; the scheduler is killed {KILLS} times",
        {
            "p50": "ms late",
            "p99": "ms late",
            "max": "ms late",
            "missing": "% of the times",
            "doubled": "% of the times",
            "client": "µs of CPU",
            "servers": "µs of CPU",
        },
        recurring,
        once=True,
        who=lambda system: system.kind == "peer" and not system.is_node,
        environment={"BENCH_RECURRING": str(SCHEDULES)},
    ),
    Workload(
        "burst",
        "All due within one second",
        {
            "rate": "messages/s",
            "seconds": "s until all were handled",
            "ping": "ms, slowest PING meanwhile",
            "p99": "ms, PING",
            "urgent": "ms late, the latest of five with high priority",
            "early": "",
            "missing": "",
        },
        burst,
        once=True,
        who=_only_ours,
    ),
    Workload(
        "growth-waiting",
        "Cost of a message with more and more waiting",
        {"ratio": COST, "p50": f"{LATENESS} at 1,000,000", "p99": f"{LATENESS} at 1,000,000"},
        growth_waiting,
        once=True,
        who=_only_ours,
        grows="messages waiting, half of them in Redis",
        environment={"BENCH_HORIZON": str(HORIZON_SECONDS)},
    ),
    Workload(
        "growth-history",
        "Cost of a message with more and more finished",
        {"ratio": COST, "p50": f"{LATENESS} at 10,000,000", "p99": f"{LATENESS} at 10,000,000"},
        growth_history,
        once=True,
        who=_only_ours,
        grows="messages finished",
        environment={"BENCH_HORIZON": str(HORIZON_SECONDS)},
    ),
    Workload(
        "growth-processes",
        "Drain with more and more worker processes",
        {"ratio": "times the rate with one, at best"},
        growth_processes,
        once=True,
        who=_only_ours,
        grows="worker processes",
    ),
)


def takes_part(workload: Workload, system: System) -> bool:
    if "only waits" in system.traits and workload.environment is not WAITING:
        return False
    if system.only:
        return workload.name in system.only
    return system.kind == "ours" or workload.who(system)
