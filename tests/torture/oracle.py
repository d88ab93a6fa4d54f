"""The judge of a torture, from the outside: ``python tests/torture/oracle.py FOLDER --dsn postgresql://…``.

It imports neither the app nor Django, and has a table of moves of its own. It reads

* ``torture.sched``, a row for each message in the transaction that scheduled it; ``torture.effect``, the effects of
  transactional handlers; ``torture.gone``, what was deleted; the two tables of the record; occurrences of schedules;
* ``FOLDER/lines/*.log``, what handlers wrote while they ran; ``FOLDER/journals/*.jsonl``, what producers were told,
  what a canceller, callers and those who requeue and purge were answered, and what the nemesis did to whom and when;
  ``FOLDER/run.json``, the settings.

Exit code 1 when a fault was found.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations, pairwise, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import psycopg

# No message of a torture expires; only one that is refused is requeued, and those of chains that are acted on by key.
MOVES = {
    (None, "scheduled"),
    ("scheduled", "running"),
    ("scheduled", "cancelled"),
    ("scheduled", "consumed"),
    ("running", "consumed"),
    ("running", "scheduled"),
    ("running", "dead"),
    ("running", "cancelled"),
    ("running", "running"),
}
REQUEUE = ("dead", "scheduled")
# What actions by key may do beside a cancel.
BY_KEY = {("scheduled", "scheduled"), ("cancelled", "scheduled")}
# The topic of the chains that are acted on by key, and by nothing else.
RELAY = "torture.relay"
# The topics of chains that have so many messages as each says.
COUNTED = (RELAY, "torture.own")
TRANSACTIONAL = ("torture.row", "torture.extending")
# Messages that others lock, or hand over in a transaction that stays open: they may wait for the end of that.
LOCKED = frozenset({*COUNTED, "torture.lasting"})
# The reason of a failure that changed the payload.
CHANGED = "payload changed"
FINAL = {"consumed", "dead", "cancelled"}
# A start is early from so many seconds before the due time: clocks are read that exactly.
EARLY = 0.001
# A claim may come so many seconds before the message falls due and its handler begins.
AHEAD = 0.01
# Once the clock of Redis was set, workers correct it by what they have measured, and a claim may come this early.
AHEAD_OF_WRONG_CLOCK = 0.11
# A worker process is warmed up after so many seconds.
WARM_UP = 30.0
# A script of so many ms by Redis's clock kept others waiting, however busy the machine was: with all processes on two
# cores some took up to 90.
SLOW = 250.0
# Times that two processes on one machine write down may differ by so many seconds.
BLUR = 0.05
# Times in the log are those of statements: one that gets a key may wait for a while for the commit that frees it.
HANDED_OVER = 0.5
# A process that lived for so many seconds after an effect, without a fault, has recorded it.
RECORDED = 2.0
# A message that kills its process, and is dead after so many crashes at the earliest.
POISON = "poison"
CRASHES = 3
# The reason of the end of a delivery whose lease ran out.
RAN_OUT = "lease ran out"
# The kind of those that programs pull, and the end of the error of one that a program rejects.
PULLED, REJECTED = "pulled", "Reject: as ordered"
# A message whose first delivery is refused: it is dead until somebody requeues it, or purges it.
REFUSED = "refused"
# The schedule that has a message for each second, whatever was missed.
ALL = "torture.all"
# The reason of a message whose occurrence was withdrawn, and may have another message.
WITHDRAWN = "schedule "
# A process that is to be replaced claims this part of the messages of its lifetime at least, and then waits for so many
# seconds before it claims more.
LEAST_PART = 0.9
WAIT_FOR_SUCCESSOR = 0.9
# A delivery may begin so many seconds before its slot under a rate: a late one counts for its due time, and a busy
# machine takes a moment between the decision and the claim.
PUNCTUAL = 0.25
# A process that stands still between the two, or a database that does, makes it this many seconds.
STOOD_STILL = 6.0
# A call takes no longer than this. What is meant to wait for Redis, names included, waits for 0.25 s; seconds.
LONGEST_CALL = 3.0
# A handler that asks for more time in its transaction is answered in so many seconds, by what may use few connections.
LONGEST_ASKING = 10.0
# After the database is back, a call may have to find that out, for so many seconds.
FOUND_OUT = 5.0
# A message waits no longer than this for a limit that has room all the time. Seconds.
FORGOTTEN = 15.0
# The 99th percentile is judged from so many deliveries without a fault near.
MANY = 1000

# Faults in which a Redis stands still, and a script that runs in it takes that long.
REDIS_STOPS = frozenset({"redis-freeze", "redis-failover", "redis-failover-paused"})
# In this one a producer stands still, too.
STOPPED = "redis-failover-paused"
FREEZES = frozenset({"freeze-child", "freeze-limited", "freeze-worker"})
# After these faults consumers had to start or to find their server again: lateness counts from then.
STANDSTILLS = frozenset({"isolation", "kill-all", "kill-worker", "kill-supervisor", "roll"})
# By what mark messages may be late after a fault; by that of its server or of a worker after the others.
MARKS = {
    # Workers have the new master by then; what is left are puts that were lost with the old one.
    "redis-failover-paused": "push",
    "kill-producer": "push",
    "kill-child": "child",
    POISON: "poison",
}
# Faults that excuse nothing.
HARMLESS = frozenset({"held-snapshot", "key-actions", "long-locks", "unread-log"})
# Faults that are programs, which ought to succeed.
CALLERS = frozenset({"freeze-limited", "key-actions", "long-locks", "rivals", "small-pool"})
# What sessions answer after this fault that were opened while the database took no writes, until they end.
FAILED_OVER = "database-read-only"
READ_ONLY = "read-only transaction"
# The database answers nobody meanwhile, and so no lease can end: workers wait before they believe that one ran out.
LOCKS = frozenset({"table-lock"})


class Row(NamedTuple):
    """One line of the record's log. Times in seconds since the epoch."""

    number: int
    at: float
    before: str | None
    after: str
    delivery: int
    due: float
    ready: float | None
    actor: str
    reason: str
    error: str

    @property
    def failed(self) -> bool:
        return bool(self.error)

    @property
    def is_claim(self) -> bool:
        return (self.before, self.after) == ("scheduled", "running")

    @property
    def is_death(self) -> bool:
        """True when a delivery crashed: it ended without reporting. One that is released unfinished has reported."""
        parts = {part.strip() for part in self.reason.split(";")}
        return self.before == "running" and bool(
            parts & {RAN_OUT, "worker process died", "all processes of the worker died"}
        )

    @property
    def pid(self) -> int | None:
        """The process of ``worker:host/pid/token/thread``."""
        parts = self.actor.split("/")
        return int(parts[1]) if self.actor.startswith("worker:") and len(parts) > 2 else None


class Message(NamedTuple):
    topic: str
    state: str
    deliveries: int
    # The deliveries that changed the payload, as the payload itself says.
    left: list[int]
    # The limit that counts it: its topic and its limit key.
    line: tuple[str, str] = ("", "")

    @property
    def is_transactional(self) -> bool:
        return self.topic in TRANSACTIONAL


class Pulled(NamedTuple):
    """A message that programs pull: in the record (None: it is not), in the log, and what programs wrote."""

    message: Message | None
    log: list[Row]
    lines: list[Line]


class Scheduled(NamedTuple):
    due: float
    kind: str


class Line(NamedTuple):
    """One line that a handler wrote."""

    what: str
    delivery: int
    pid: int
    at: float


class Fault(NamedTuple):
    """One fault of the nemesis, with the time until it was healed, the processes that it hit, the clock that it set."""

    kind: str
    begin: float
    end: float
    pids: frozenset[int] = frozenset()
    code: int | None = None
    ahead: float = 0.0

    @property
    def is_of_redis(self) -> bool:
        return self.kind.startswith("redis-") or self.kind in ("clock", "drop-key", "flush", "lost-reply")

    @property
    def is_of_database(self) -> bool:
        return self.kind.startswith("database-") or self.kind in ("disk-full", "pooler", "small-pool", "table-lock")


class Answer(NamedTuple):
    """The answer to a request to cancel."""

    id: int
    answered: float
    verdict: str


class Act(NamedTuple):
    """An action by key, and its answer: the message that it says it acted on."""

    key: str
    verb: str
    asked: float
    answered: float
    id: int | None
    verdict: str


class Link(NamedTuple):
    """A message of a chain that has so many steps: its place in it."""

    topic: str
    key: str
    turn: int
    steps: int


class Call(NamedTuple):
    """A call of a producer that took long."""

    begin: float
    end: float


@dataclass
class Evidence:
    """All traces of a run."""

    run: dict[str, Any]
    scheduled: dict[int, Scheduled] = field(default_factory=dict)
    messages: dict[int, Message] = field(default_factory=dict)
    log: dict[int, list[Row]] = field(default_factory=lambda: defaultdict(list))
    effects: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    lines: dict[int, list[Line]] = field(default_factory=lambda: defaultdict(list))
    faults: list[Fault] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    acked: set[int] = field(default_factory=set)
    orphaned: set[int] = field(default_factory=set)
    gone: dict[int, str] = field(default_factory=dict)
    # The message of each occurrence, by its schedule and time.
    occurrences: dict[tuple[str, float], int] = field(default_factory=dict)
    # The schedule and the time that a message says it stands for.
    stands_for: dict[int, tuple[str, float]] = field(default_factory=dict)
    # The topic and the key of a message, and how long it holds the key: live, scheduled, or seconds after its end.
    keys: dict[int, tuple[str, str, str]] = field(default_factory=dict)
    # The place of a message in the chain.
    turns: dict[int, int] = field(default_factory=dict)
    # The messages of the other chains.
    links: dict[int, Link] = field(default_factory=dict)
    acts: list[Act] = field(default_factory=list)
    pulled: dict[int, Pulled] = field(default_factory=dict)
    long_calls: list[Call] = field(default_factory=list)
    # What those who requeue and purge were told.
    requeued: int = 0
    purged: int = 0
    notes: list[dict[str, Any]] = field(default_factory=list)


# --- reading ----------------------------------------------------------------------------------------------------------


def read(folder: Path, dsn: str) -> Evidence:
    """Collect what is in the database and in the folder."""
    evidence = Evidence(json.loads((folder / "run.json").read_text()))
    with psycopg.connect(dsn) as connection:
        _read_tables(evidence, connection)
    for path in sorted(folder.glob("lines/*.log")):
        for text in path.read_text().splitlines():
            what, pk, delivery, pid, at = text.split()
            evidence.lines[int(pk)].append(Line(what, int(delivery), int(pid), float(at)))
    for lines in evidence.lines.values():
        lines.sort(key=lambda line: line.at)
    for path in sorted(folder.glob("journals/*.jsonl")):
        entries = [json.loads(text) for text in path.read_text().splitlines()]
        if path.name.startswith("nemesis"):
            _read_faults(evidence, entries)
        elif path.name.startswith(("canceller", "callers")):
            told = [entry for entry in entries if entry["what"] == "answered"]
            evidence.answers += [Answer(entry["id"], entry["at"], entry["verdict"]) for entry in told]
            for acted in (entry for entry in entries if entry["what"] == "acted"):
                answer = acted["id"], acted["verdict"]
                evidence.acts.append(Act(acted["key"], acted["verb"], acted["asked"], acted["at"], *answer))
        elif path.name.startswith("rivals"):
            evidence.requeued += sum(entry["number"] for entry in entries if entry["what"] == "requeued")
            evidence.purged += sum(entry["number"] for entry in entries if entry["what"] == "purged")
        else:
            for entry in entries:
                if entry["what"] in ("acked", "dies"):
                    (evidence.acked if entry["what"] == "acked" else evidence.orphaned).update(entry["ids"])
                elif entry["what"] == "long call":
                    evidence.long_calls.append(Call(entry["began"], entry["at"]))
    return evidence


def _set_pulled_apart(evidence: Evidence) -> None:
    """Keep what programs pull from the questions about workers."""
    for pk in [pk for pk, scheduled in evidence.scheduled.items() if scheduled.kind == PULLED]:
        del evidence.scheduled[pk]
        evidence.acked.discard(pk)
        evidence.orphaned.discard(pk)
        found = evidence.messages.pop(pk, None), evidence.log.pop(pk, []), evidence.lines.pop(pk, [])
        evidence.pulled[pk] = Pulled(*found)


def _read_tables(evidence: Evidence, connection: psycopg.Connection[Any]) -> None:
    epoch = "extract(epoch from {})::float8".format
    for pk, due, kind in connection.execute(f"SELECT id, {epoch('due')}, kind FROM torture.sched"):
        evidence.scheduled[pk] = Scheduled(due, kind)
    for pk, delivery in connection.execute("SELECT id, delivery FROM torture.effect ORDER BY id, delivery"):
        evidence.effects[pk].append(delivery)
    evidence.gone.update(connection.execute("SELECT id, state FROM torture.gone").fetchall())
    of_messages = """
        SELECT id, topic, state, deliveries, coalesce(payload -> 'left', '[]'), coalesce(limit_key, '')
          FROM delayq_message
    """
    for pk, topic, state, deliveries, left, key in connection.execute(of_messages):
        evidence.messages[pk] = Message(topic, state, deliveries, left, (topic, key))
    keyed = "SELECT id, topic, s.key, holds FROM torture.sched s JOIN delayq_message USING (id) WHERE s.key <> ''"
    for pk, *facts in connection.execute(keyed):
        evidence.keys[pk] = (facts[0], facts[1], facts[2])
    turns = "SELECT id, (payload ->> 'turn')::int FROM delayq_message WHERE topic = 'torture.chain'"
    evidence.turns.update(connection.execute(turns).fetchall())
    links = """
        SELECT id, topic, key, (payload ->> 'turn')::int, (payload ->> 'steps')::int
          FROM delayq_message WHERE payload ? 'steps'
    """
    for pk, *place in connection.execute(links):
        evidence.links[pk] = Link(*place)
    for name, at, pk in connection.execute(f"SELECT schedule, {epoch('at')}, message_id FROM delayq_occurrence"):
        evidence.occurrences[name, at] = pk
    of_schedules = f"""
        SELECT id, headers ->> 'schedule', {epoch("(headers ->> 'occurrence')::timestamptz")}
          FROM delayq_message WHERE headers ? 'schedule'
    """
    for pk, name, at in connection.execute(of_schedules):
        evidence.stands_for[pk] = (name, at)
        evidence.scheduled[pk] = Scheduled(at, "recurring")
    # A claim by query has no time when its id was ready, and never comes before the due time.
    log = f"""
        SELECT message_id, number, {epoch("at")}, from_state, to_state, delivery, {epoch("due_at")},
               {epoch("ready_at")}, actor, reason, error
          FROM delayq_transition ORDER BY message_id, number
    """
    for pk, *facts in connection.execute(log):
        evidence.log[pk].append(Row(*facts))


def _read_faults(evidence: Evidence, entries: Iterable[dict[str, Any]]) -> None:
    begun: dict[int, dict[str, Any]] = {}
    for entry in entries:
        if entry["what"] == "begin":
            begun[entry["fault"]] = entry
        elif entry["what"] == "end":
            first = begun.pop(entry["fault"])
            pids = frozenset([*first.get("pids", ()), *entry.get("pids", ())])
            facts = entry.get("code"), first.get("ahead", 0.0)
            evidence.faults.append(Fault(first["kind"], first["at"], entry["at"], pids, *facts))
        else:
            evidence.notes.append(entry)
    for entry in begun.values():
        evidence.faults.append(Fault(entry["kind"], entry["at"], float("inf"), frozenset(entry.get("pids", ()))))


# --- judging ----------------------------------------------------------------------------------------------------------


@dataclass
class Report:
    """The findings: ``wrong`` by kind, which must be empty, and numbers about the run."""

    wrong: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    counts: Counter[str] = field(default_factory=Counter)
    duplicates: Counter[str] = field(default_factory=Counter)
    lateness: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def found(self, kind: str, text: str) -> None:
        self.wrong[kind].append(text)

    @property
    def good(self) -> bool:
        return not self.wrong


# Each must be 0; in the order in which they are printed.
KINDS = (
    "lost",
    "unexpected",
    "early",
    "duplicate transactional effect",
    "unexplained duplicate",
    "lost lease",
    "start after cancelled",
    "illegal path",
    "overlong lifetime",
    "limit exceeded",
    "rate exceeded",
    "forgotten in a line",
    "missing occurrence",
    "doubled occurrence",
    "two holders",
    "broken chain",
    "consumed without effect",
    "effect without consumed",
    "failure without a cause",
    "wrong payload",
    "late",
    "wrong answer",
    "slow call",
    "worker ended by itself",
    "client ended by itself",
    "restore failed",
    "toothless fault",
    "fault that never came",
    "slow script",
    "growth",
)


def _held(log: Iterable[Row], holds: str) -> Iterator[tuple[float, float]]:
    """Yield the times between which a message held its key: from a schedule or requeue on.

    A message that is requeued may have lost the time after its end to another one that took the key.
    """
    begin: float | None = None
    after = 0.0 if holds in ("live", "scheduled") else float(holds.removesuffix("s"))
    for row in log:
        if row.before is None or row.before in FINAL:
            begin = row.at
            after = 0.0 if row.before in FINAL else after
        elif begin is not None and row.after in FINAL:
            yield begin, row.at + after
            begin = None
        elif begin is not None and row.is_claim and holds == "scheduled":
            yield begin, row.at
            begin = None
    if begin is not None:
        yield begin, float("inf")


class Oracle:
    """Asks the evidence one question after the other."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        _set_pulled_apart(evidence)
        self.report = Report()
        self.lease = float(evidence.run["lease"])
        self.faults = sorted(evidence.faults, key=lambda fault: fault.begin)
        self.poisonings = list(self._poisonings())
        self.deaths = self._deaths()
        # Both the nemesis's faults and poison may make other messages late.
        disturbing = [fault for fault in self.faults if fault.kind not in HARMLESS]
        self.disturbances = sorted([*disturbing, *self.poisonings], key=lambda fault: fault.begin)

    def judge(self) -> Report:
        self.report.counts["scheduled"] = len(self.evidence.scheduled)
        for question in (
            self.nothing_is_lost,
            self.what_is_pulled_is_answered,
            self.nothing_is_unexpected,
            self.each_occurrence_has_one_message,
            self.no_key_has_two_holders,
            self.the_chain_goes_on,
            self.counted_chains_have_their_steps,
            self.actions_by_key_mean_the_holder,
            self.every_path_is_legal,
            self.nothing_is_early,
            self.purged_means_dead,
            self.effects_and_states_agree,
            self.failures_have_a_cause,
            self.payloads_are_those_that_were_left,
            self.processes_are_replaced_in_time,
            self.limits_are_kept,
            self.handlers_keep_limits,
            self.rates_are_kept,
            self.nobody_is_forgotten_in_a_line,
            self.duplicates_are_explained,
            self.no_lease_is_lost_in_vain,
            self.cancelled_means_cancelled,
            self.nothing_is_late,
            self.no_call_is_slow,
            self.nothing_else_broke,
        ):
            question()
        return self.report

    # --- what there is ------------------------------------------------------------------------------------------------

    def nothing_is_lost(self) -> None:
        messages = self.evidence.messages
        for pk in sorted(self.evidence.scheduled.keys() - messages.keys() - self.evidence.gone.keys()):
            self.report.found("lost", f"{pk} was committed and is not in the record")
        for pk in sorted(self.evidence.acked - self.evidence.scheduled.keys()):
            self.report.found("lost", f"{pk}: the producer was told of its commit, and it is not there")
        for pk, message in messages.items():
            self.report.counts[message.state] += 1
            if message.state not in FINAL:
                self.report.found("lost", f"{pk} is still {message.state}")
            elif message.state == "consumed" and self._kind(pk) == "poison":
                self.report.found("unexpected", f"{pk} was consumed, and kills every process that runs it")
            elif message.state == "dead" and not self._may_be_dead(pk):
                deaths = "; ".join(self._strange_deaths(pk))
                self.report.found("lost", f"{pk} was given up: {self.evidence.log[pk][-1].reason}; strange: {deaths}")

    def what_is_pulled_is_answered(self) -> None:
        """Check that a program did the work of each message that is consumed; the others are dead as ordered."""
        for pk, (message, log, lines) in sorted(self.evidence.pulled.items()):
            whats = Counter((line.what, line.delivery) for line in lines)
            state = message and message.state
            self.report.counts[f"pulled, {state}"] += 1
            self.report.counts["pulled, leases that ran out"] += sum(row.is_death for row in log)
            if state not in ("consumed", "dead"):
                self.report.found("lost", f"{pk}, which programs pull: {state}")
            elif state == "dead" and log[-1].error != REJECTED:
                self.report.found("lost", f"{pk}, which programs pull, is dead: {log[-1].reason} {log[-1].error}")
            if state == "consumed" and not any(what == "end" for what, _delivery in whats):
                self.report.found("consumed without effect", f"{pk}, which programs pull")
            if state == "dead" and any(what == "told" for what, _delivery in whats):
                self.report.found("effect without consumed", f"{pk}, whose success was acknowledged, is dead")
            if twice := [delivery for (what, delivery), number in whats.items() if what == "start" and number > 1]:
                self.report.found("unexplained duplicate", f"{pk}: programs took {twice} twice")
            for text in self._illegal(message, log) if message else ():
                self.report.found("illegal path", f"{pk}, which programs pull: {text}")

    def processes_are_replaced_in_time(self) -> None:
        """Check that a process that is to be replaced claims no more than its messages without a wait."""
        name, most = f"worker:{self.evidence.run['replaced']}/", int(self.evidence.run["lifetime"])
        claims: dict[str, list[float]] = defaultdict(list)
        for log in self.evidence.log.values():
            # Deliveries that the process released, or lost, do not count.
            ended = {row.delivery for row in log if row.before == "running" and not row.is_death and _has_run(row)}
            for row in log:
                if row.is_claim and row.delivery in ended and row.actor.startswith(name):
                    claims[row.actor].append(row.at)
        self.report.counts["processes to be replaced"] = len(claims)
        for actor, times in claims.items():
            times.sort()
            near = times[int(most * LEAST_PART) - 1 : most + 1]
            if len(times) > most and all(b - a < WAIT_FOR_SUCCESSOR for a, b in pairwise(near)):
                self.report.found("overlong lifetime", f"{actor} claimed {len(times)} messages and {most} are allowed")

    def _may_be_dead(self, pk: int) -> bool:
        """Tell whether a message may be dead: it is poison and died alone, or its first delivery was refused."""
        log = self.evidence.log[pk]
        if self._kind(pk) == REFUSED:
            return log[-1].delivery == 1 and log[-1].failed
        deaths = [row for row in log if row.is_death]
        if self._kind(pk) != "poison":
            return False
        return "it ran alone" in log[-1].reason and len(deaths) >= CRASHES

    def _strange_deaths(self, pk: int) -> Iterator[str]:
        """Return the deliveries that crashed although nothing was done to their process."""
        for row in self.evidence.log[pk]:
            if not row.is_death:
                continue
            if not (self._why(pk, row.delivery, row.at) or self._was_unheard(pk, row.delivery)):
                yield f"delivery {row.delivery}, {row.reason} at {row.at:.3f}"

    def _kind(self, pk: int) -> str:
        scheduled = self.evidence.scheduled.get(pk)
        return "" if scheduled is None else scheduled.kind

    def nothing_is_unexpected(self) -> None:
        known = self.evidence.scheduled.keys()
        for pk in sorted(self.evidence.messages.keys() - known):
            self.report.found("unexpected", f"{pk} is in the record, and its transaction was not committed")
        for pk in sorted((self.evidence.effects.keys() | self.evidence.lines.keys()) - known):
            self.report.found("unexpected", f"{pk} ran, and was never scheduled")

    def each_occurrence_has_one_message(self) -> None:
        """Check that each time of a schedule has its one message, and that no second is left out by the one for all."""
        occurrences = self.evidence.occurrences
        self.report.counts["occurrences"] += len(occurrences)
        for (name, at), pk in occurrences.items():
            if self.evidence.stands_for.get(pk) != (name, at):
                self.report.found("missing occurrence", f"{name} at {at:.0f} has no message {pk}")
        for pk, (name, at) in self.evidence.stands_for.items():
            if occurrences.get((name, at)) != pk and not self._is_withdrawn(pk):
                self.report.found("doubled occurrence", f"{pk}: {name} at {at:.0f}")
        times = sorted(at for name, at in occurrences if name == ALL)
        end = float(int(self.evidence.run["until"]))
        for at, following in pairwise([*times, end + 1]):
            if following - at != 1:
                self.report.found("missing occurrence", f"{ALL}: nothing between {at:.0f} and {following:.0f}")
        if end and not times:
            self.report.found("missing occurrence", f"{ALL} never had one")

    def _is_withdrawn(self, pk: int) -> bool:
        log = self.evidence.log[pk]
        was_delivered = any(row.is_claim for row in log)
        return log[-1].after == "cancelled" and log[-1].reason.startswith(WITHDRAWN) and not was_delivered

    def no_key_has_two_holders(self) -> None:
        """Check that no message was scheduled or requeued while another one held its key."""
        holdings: dict[tuple[str, str], list[tuple[float, float, int]]] = defaultdict(list)
        for pk, (topic, key, holds) in self.evidence.keys.items():
            for begin, end in _held(self.evidence.log.get(pk, []), holds):
                holdings[topic, key].append((begin, end, pk))
        for (topic, key), spans in holdings.items():
            self.report.counts["held keys"] += len(spans)
            for (_begin, end, first), (begin, _end, second) in combinations(sorted(spans), 2):
                if first == second or begin >= end - HANDED_OVER:
                    continue
                near = self._between(begin, begin + HANDED_OVER)
                if not any(fault.is_of_database or fault.kind in STANDSTILLS for fault in near):
                    self.report.found("two holders", f"{first} and {second} of {topic} have {key} at {begin:.3f}")

    def the_chain_goes_on(self) -> None:
        """Check that each message of the chain has scheduled the next one, once, until the producers ended."""
        turns = sorted(self.evidence.turns.values())
        self.report.counts["turns of the chain"] += len(turns)
        if turns != list(range(1, len(turns) + 1)):
            self.report.found("broken chain", f"the turns are {turns}")
        if not self.evidence.run["until"]:
            return
        last = max(self.evidence.turns, default=0)
        log = self.evidence.log.get(last, [])
        if not log or log[-1].at < self.evidence.run["until"]:
            self.report.found("broken chain", f"it ended with {last}")

    def chains(self) -> dict[tuple[str, str], list[int]]:
        """Return the messages of each chain that has so many steps as it says, in their order."""
        chains: dict[tuple[str, str], list[int]] = defaultdict(list)
        for pk, link in sorted(self.evidence.links.items(), key=lambda item: (item[1].turn, item[0])):
            chains[link.topic, link.key].append(pk)
        return chains

    def counted_chains_have_their_steps(self) -> None:
        """Check that each message of these chains has scheduled one next message, unless somebody cancelled it."""
        for (topic, key), ids in self.chains().items():
            self.report.counts[f"chains of {topic}"] += 1
            links = [self.evidence.links[pk] for pk in ids]
            turns = [link.turn for link in links]
            if turns != list(range(1, len(turns) + 1)):
                self.report.found("broken chain", f"{topic} {key}: the turns are {turns}")
            elif len(turns) < links[-1].steps and not self._is_cancelled(ids[-1]):
                self.report.found("broken chain", f"{topic} {key}: it ended with {ids[-1]}, turn {turns[-1]}")

    def _is_cancelled(self, pk: int) -> bool:
        """Tell whether somebody has cancelled a message, or asked its handler to stop."""
        return any(
            (row.after == "cancelled") or (row.before == row.after == "running") for row in self.evidence.log[pk]
        )

    def actions_by_key_mean_the_holder(self) -> None:
        """Check that actions by key act on the message that holds the key, and that their answers are true.

        A message holds the key until it has scheduled the next one.
        """
        chains = {key: ids for (topic, key), ids in self.chains().items() if topic == RELAY}
        for ids in chains.values():
            for pk, following in pairwise(ids):
                handed_over = self.evidence.log[following][0].at
                for row in self.evidence.log[pk]:
                    if _is_action(row) and row.at > handed_over + BLUR:
                        text = f"{pk}: {row.before} → {row.after} by key at {row.at:.3f}, and {following} had the key"
                        self.report.found("wrong answer", text)
        for act in self.evidence.acts:
            self.report.counts[f"{act.verb} by key answered {act.verdict!r}"] += 1
            ids = chains.get(act.key, [])
            self._judge_id(act, ids)
            if act.id is not None:
                self._judge_verdict(act)
            if act.id in ids and act.verb == "cancel" and act.verdict in ("cancelled", "outcome unknown", "requested"):
                self._judge_end(act, act.id, ids[ids.index(act.id) + 1 :])

    def _judge_id(self, act: Act, ids: list[int]) -> None:
        """Check that the answer is about the message that held the key all the time, if there is one."""
        asked, answered = act.asked - BLUR, act.answered + BLUR
        for pk, following in zip_longest(ids, ids[1:]):
            log = self.evidence.log[pk]
            before = [row.after for row in log if row.at < asked]
            within = [row.after for row in log if asked <= row.at <= answered]
            ended = not before or bool(FINAL & {before[-1], *within})
            handed_over = following is not None and self.evidence.log[following][0].at <= answered
            if pk != act.id and self._committed(pk) < asked and not ended and not handed_over:
                text = f"{act.verb} {act.key}: {act.verdict!r} of {act.id}, and {pk} had the key all the time"
                self.report.found("wrong answer", text)

    def _committed(self, pk: int) -> float:
        """Return a time at which a message of a chain was committed: it begins, or its predecessor says so."""
        link = self.evidence.links[pk]
        claims = [row.at for row in self.evidence.log[pk] if row.is_claim]
        if link.turn == 1:
            claims.append(self.evidence.log[pk][0].at + RECORDED)
        return min(claims, default=float("inf"))

    def _judge_verdict(self, act: Act) -> None:
        """Check that the log has what was answered."""
        moves = {"cancelled": "cancelled", "outcome unknown": "cancelled", "rescheduled": "scheduled"}
        moves |= {"requeued": "scheduled"}
        log = self.evidence.log.get(act.id or 0, [])
        to = moves.get(act.verdict)
        within = [row for row in log if act.asked - BLUR <= row.at <= act.answered + BLUR]
        if to is not None and not any(row.after == to and row.before != "running" for row in within):
            self.report.found("wrong answer", f"{act.verb} {act.key}: {act.verdict!r} of {act.id}, which did not move")
        if act.verdict == "too late":
            before = [row for row in log if row.at < act.asked - BLUR]
            if before and not within and before[-1].after == "scheduled" and act.verb != "requeue":
                self.report.found("wrong answer", f"{act.verb} {act.key}: {act.id} waited, and it was 'too late'")

    def _judge_end(self, act: Act, pk: int, later: list[int]) -> None:
        """Check that no step follows the one that was cancelled, unless that was requeued."""
        requeued = [row.at for row in self.evidence.log[pk] if row.before in FINAL and row.at > act.asked]
        for following in later:
            if not requeued or self.evidence.log[following][0].at < requeued[0]:
                text = f"{act.key}: {pk} was {act.verdict!r} at {act.answered:.3f}, and {following} is a later step"
                self.report.found("start after cancelled", text)
                return

    def every_path_is_legal(self) -> None:
        for pk, message in self.evidence.messages.items():
            for text in self._illegal(message, self.evidence.log.get(pk, [])):
                self.report.found("illegal path", f"{pk}: {text}")

    def _illegal(self, message: Message, log: list[Row]) -> Iterator[str]:
        if [row.number for row in log] != list(range(1, len(log) + 1)):
            yield f"rows {[row.number for row in log]}"
        before: str | None = None
        claims = 0
        at = 0.0
        for row in log:
            claims += row.is_claim
            move = row.before, row.after
            is_legal = (
                move in MOVES
                or (move == REQUEUE and message.topic == "torture.refuse")
                or (move in BY_KEY and message.topic == RELAY)
            )
            if row.before != before or not is_legal:
                yield f"{before} is followed by {row.before} → {row.after}"
            if row.is_claim and row.delivery != claims:
                yield f"claim {claims} is called delivery {row.delivery}"
            if row.before == "running" and row.after != "consumed" and row.delivery != claims:
                yield f"{row.before} → {row.after} of delivery {row.delivery}, while {claims} is the current one"
            if row.after == "consumed" and not 1 <= row.delivery <= claims:
                yield f"success of delivery {row.delivery} of {claims}"
            if row.at < at - BLUR:
                yield f"row {row.number} is older than the one before"
            before, at = row.after, row.at
        if before != message.state or claims != message.deliveries:
            yield f"it ends {before} after {claims} claims; the message says {message.state}, {message.deliveries}"

    def purged_means_dead(self) -> None:
        """Check that nothing was deleted but what was dead, and that requeued and purged are as many as was said."""
        for pk, state in self.evidence.gone.items():
            if state != "dead" or self._kind(pk) != REFUSED:
                self.report.found("lost", f"{pk} was deleted while it was {state}")
        requeues = sum((row.before, row.after) == REQUEUE for log in self.evidence.log.values() for row in log)
        for what, done, told in (
            ("requeued", requeues, self.evidence.requeued),
            ("purged", len(self.evidence.gone), self.evidence.purged),
        ):
            self.report.counts[what] += done
            if done != told:
                self.report.found("wrong answer", f"{done} messages were {what}, and {told} by the answers")

    def nothing_is_early(self) -> None:
        set_at = min((fault.begin for fault in self.faults if fault.kind == "clock"), default=float("inf"))
        for pk, log in self.evidence.log.items():
            dues = [row.due for row in log[:1]]
            if pk in self.evidence.scheduled:
                # The due time that the producer asked for, not the one in the record.
                dues.append(self.evidence.scheduled[pk].due)
            for row in log:
                if (row.before, row.after) in BY_KEY:
                    # It has another due time from now on.
                    dues = []
                if row.at > set_at:
                    # Redis says by a clock like that when a message was ready.
                    early = max([row.due, *dues]) - (row.at + AHEAD_OF_WRONG_CLOCK)
                else:
                    early = max([row.due, *dues]) - min(row.at + AHEAD, row.ready or row.at)
                if row.is_claim and early > EARLY:
                    self.report.found("early", f"{pk}: delivery {row.delivery}, {early:.3f} s")
            for line in self.evidence.lines.get(pk, ()):
                if dues and line.at < max(dues) - EARLY:
                    self.report.found("early", f"{pk}: the handler ran {max(dues) - line.at:.3f} s before its time")

    # --- effects ------------------------------------------------------------------------------------------------------

    def effects_and_states_agree(self) -> None:
        for pk, message in self.evidence.messages.items():
            rows = self.evidence.effects.get(pk, [])
            ends = [line for line in self.evidence.lines.get(pk, ()) if line.what == "end"]
            consumed = message.state == "consumed"
            if len(rows) > 1:
                self.report.found("duplicate transactional effect", f"{pk}: deliveries {rows}")
            if consumed and not (rows if message.is_transactional else ends):
                self.report.found("consumed without effect", f"{pk} ({message.topic})")
            if rows and not (consumed and message.is_transactional):
                self.report.found("effect without consumed", f"{pk} is {message.state}")
            success = [row.delivery for row in self.evidence.log.get(pk, ()) if row.after == "consumed"]
            if rows and success and success != rows:
                self.report.found("effect without consumed", f"{pk}: success of {success}, effect of {rows}")
            if message.state == "cancelled":
                self._cancelled_after_its_return(pk, ends)

    def _cancelled_after_its_return(self, pk: int, ends: list[Line]) -> None:
        """Check that no message was cancelled whose handler returned, unless a fault kept that from the record."""
        cancelled = self.evidence.log[pk][-1].at
        for line in ends:
            if self._why(pk, line.delivery, max(line.at, cancelled)) is None:
                text = f"{pk} is cancelled, and delivery {line.delivery} returned at {line.at:.3f}"
                self.report.found("effect without consumed", text)

    def no_lease_is_lost_in_vain(self) -> None:
        """Check that no delivery lost its lease while its process lived and could reach the database."""
        for pk, log in self.evidence.log.items():
            for row in log:
                if row.before != "running" or RAN_OUT not in row.reason or self._was_unheard(pk, row.delivery):
                    continue
                claim = self._claim(pk, row.delivery)
                if claim is None or self._why(pk, row.delivery, row.at) is not None:
                    continue
                # Children whose supervisor is gone end by themselves, and perhaps before all is released.
                if not any(fault.kind == "kill-supervisor" for fault in self._between(claim.at, row.at)):
                    text = f"{pk} ({self.evidence.messages[pk].topic}): delivery {row.delivery}, {claim.actor}"
                    self.report.found("lost lease", f"{text}, from {claim.at:.3f} to {row.at:.3f}")

    def failures_have_a_cause(self) -> None:
        """Check that each failed delivery failed as ordered, or while something was done to the database.

        A conflict of transactions at a high isolation level is no failure: the message is delivered again.
        """
        for pk, log in self.evidence.log.items():
            ordered = {line.delivery for line in self.evidence.lines.get(pk, ()) if line.what == "fail"}
            for row in log:
                if row.before != "running" or not row.failed or row.is_death or row.delivery in ordered:
                    continue
                if READ_ONLY in row.error and any(f.begin <= row.at for f in self.faults if f.kind == FAILED_OVER):
                    continue
                claim = self._claim(pk, row.delivery)
                begin = row.at if claim is None else claim.at
                if not any(fault.is_of_database for fault in self._between(begin - RECORDED, row.at)):
                    told = f"{pk}: delivery {row.delivery} by {row.actor} at {row.at:.3f}: {row.error}"
                    self.report.found("failure without a cause", told)

    def payloads_are_those_that_were_left(self) -> None:
        """Check that each change of a payload in the log is in the payload, and that no attempt saw an older one."""
        for pk, message in self.evidence.messages.items():
            changes = [row.delivery for row in self.evidence.log.get(pk, ()) if CHANGED in row.reason]
            self.report.counts["payload changes"] += len(changes)
            if changes != message.left:
                self.report.found("wrong payload", f"{pk}: changed by deliveries {changes}, it has {message.left}")

    # --- limits -------------------------------------------------------------------------------------------------------

    def _lines(self, term: str) -> dict[tuple[str, str], list[int]]:
        """Return the messages of each line before a limit that has this term."""
        lines: dict[tuple[str, str], list[int]] = defaultdict(list)
        for pk, message in self.evidence.messages.items():
            if term in self.evidence.run["limits"].get(message.topic, {}):
                lines[message.line].append(pk)
        return lines

    def _running(self, ids: list[int]) -> list[tuple[float, int]]:
        """Return the times at which the number of these messages that run changes, and the number from then on."""
        steps = []
        for pk in ids:
            for row in self.evidence.log[pk]:
                if row.is_claim:
                    steps.append((row.at, 1))
                elif row.before == "running" and row.after != "running":
                    steps.append((row.at, -1))
        number = 0
        found = []
        # One that ends at the very moment at which another one begins has made room for it.
        for at, step in sorted(steps):
            number += step
            found.append((at, number))
        return found

    def limits_are_kept(self) -> None:
        """Check by the record that never more messages of a line ran at once than its limit."""
        for line, ids in self._lines("count").items():
            running = self._running(ids)
            most = max((number for _at, number in running), default=0)
            self.report.counts[f"most of {line[0]} at once"] = max(
                self.report.counts[f"most of {line[0]} at once"], most
            )
            limit = self.evidence.run["limits"][line[0]]["count"]
            for at, number in running:
                if number > limit:
                    self.report.found("limit exceeded", f"{' '.join(line)}: {number} ran at {at:.3f}, and {limit} may")

    def handlers_keep_limits(self) -> None:
        """Check by what handlers wrote that never more messages of a line ran at once than its limit.

        A handler that runs on after its lease has run out is not counted. Another delivery of its message is, also when
        the success of the first one ends the message.
        """
        for line, ids in self._lines("count").items():
            steps = []
            for pk in ids:
                for begin, end in _joined(self._runs(pk)):
                    steps += [(begin, 1, pk), (end - BLUR, -1, pk)] if end - BLUR > begin else []
            limit, running = self.evidence.run["limits"][line[0]]["count"], frozenset[int]()
            for at, step, pk in sorted(steps):
                running = running | {pk} if step > 0 else running - {pk}
                if step > 0 and len(running) > limit:
                    text = f"{' '.join(line)}: handlers of {sorted(running)} ran at {at:.3f}, and {limit} may"
                    self.report.found("limit exceeded", text)

    def _runs(self, pk: int) -> Iterator[tuple[float, float]]:
        """Yield the times between which handlers of a message ran under a lease that a fault cannot have ended."""
        told: dict[int, list[Line]] = defaultdict(list)
        for line in self.evidence.lines.get(pk, ()):
            told[line.delivery].append(line)
        for delivery, lines in told.items():
            start = lines[0]
            ends = [line.at for line in lines if line.what != "start"][-1:]
            ends += [row.at for row in self.evidence.log[pk] if row.before == "running" and row.delivery == delivery]
            for fault in self._between(start.at, min(ends, default=float("inf"))):
                stops = start.pid in fault.pids or fault.kind in STANDSTILLS
                away = fault.is_of_database and fault.end - fault.begin > self.lease / 2
                ends += [max(fault.begin, start.at)] if stops or away else []
            yield start.at, min(ends, default=start.at)

    def rates_are_kept(self) -> None:
        """Check by the record that in no time more deliveries began than the burst and one for each interval."""
        for line, ids in self._lines("interval").items():
            limit = self.evidence.run["limits"][line[0]]
            full = 0.0
            for at in sorted(row.at for pk in ids for row in self.evidence.log[pk] if row.is_claim):
                full = max(full, at)
                early = full - at - limit["interval"] * (limit["burst"] - 1)
                near = any(True for _ in self._between(at - STOOD_STILL, at + STOOD_STILL))
                if early > (STOOD_STILL if near else PUNCTUAL):
                    self.report.found("rate exceeded", f"{line[0]}: {early:.3f} s too early at {at:.3f}")
                full += limit["interval"]

    def nobody_is_forgotten_in_a_line(self) -> None:
        """Check that no message that is due waits on while its limit has room all the time."""
        for line, ids in self._lines("count").items():
            limit = self.evidence.run["limits"][line[0]]["count"]
            steps = [(0.0, 0), *self._running(ids), (float("inf"), 0)]
            roomy = [(a, b) for (a, number), (b, _next) in pairwise(steps) if number < limit]
            for pk in ids:
                for before, after in pairwise(self.evidence.log[pk]):
                    if before.after == "scheduled" and after.is_claim:
                        self.report.counts["messages of limits that waited"] += 1
                        self._forgotten(pk, max(before.at, before.due), after.at, roomy)

    def _forgotten(self, pk: int, begin: float, end: float, roomy: list[tuple[float, float]]) -> None:
        for free, taken in roomy:
            since, until = max(begin, free), min(end, taken)
            if until - since <= FORGOTTEN:
                continue
            deadline = since + FORGOTTEN
            for fault in self.disturbances:
                if fault.begin <= deadline and fault.end + self._mark(fault) >= since:
                    deadline = max(deadline, fault.end + self._mark(fault) + FORGOTTEN)
            if until > deadline:
                self.report.found("forgotten in a line", f"{pk}: {until - since:.1f} s, from {since:.3f} on")

    def duplicates_are_explained(self) -> None:
        for pk, message in self.evidence.messages.items():
            if message.is_transactional:
                continue
            starts = [line for line in self.evidence.lines.get(pk, ()) if line.what == "start"]
            if len({line.delivery for line in starts}) < len(starts):
                self.report.found("unexplained duplicate", f"{pk}: one delivery ran twice")
            # Not ordered by time: a delivery that was frozen before its handler starts after its successor.
            for first, second in pairwise(sorted(starts, key=lambda line: line.delivery)):
                self._explain(pk, first, second)

    def _explain(self, pk: int, first: Line, second: Line) -> None:
        """Note the window through which another delivery came though this one started, or that there is none."""
        told = {line.what for line in self.evidence.lines[pk] if line.delivery == first.delivery}
        reported = any(
            row.before == "running" and row.delivery == first.delivery and row.failed for row in self.evidence.log[pk]
        )
        if told & {"fail", "lost"} and "end" not in told and reported:
            return
        window = self._why(pk, first.delivery, second.at)
        what = "effect" if "end" in told else "start"
        if window is None:
            self.report.found(
                "unexplained duplicate",
                f"{pk}: deliveries {first.delivery} (process {first.pid}, {first.at:.3f}) and {second.delivery} "
                f"(process {second.pid}, {second.at:.3f}), {what}",
            )
        else:
            self.report.duplicates[f"{window}: {what} twice"] += 1

    def _why(self, pk: int, delivery: int, until: float) -> str | None:
        """Return the window through which another delivery came, if a fault opened one.

        W1: the process died between the effect and its record. W2: the lease ran out though the process lived: it
        stood still, or the database was away for so long that the lease could not be extended in time.
        """
        claim = self._claim(pk, delivery)
        if claim is None or claim.pid is None:
            return None
        died = self._died(claim.pid, claim.at)
        if died is not None and died <= until + BLUR and not self._is_recorded(pk, delivery, claim.pid, died):
            return "W1"
        for fault in self._between(claim.at - BLUR, until):
            if fault.kind in FREEZES and claim.pid in fault.pids:
                return "W2"
            away = fault.is_of_database and fault.kind not in LOCKS and fault.end - fault.begin > self.lease / 2
            if away and until - claim.at > self.lease - BLUR:
                return "W2"
        return None

    def _was_unheard(self, pk: int, delivery: int) -> bool:
        """Tell whether a claim is orphaned: committed while the database was cut off, and its handler never began."""
        claim = self._claim(pk, delivery)
        if claim is None or any(line.delivery == delivery for line in self.evidence.lines.get(pk, ())):
            return False
        return any(fault.is_of_database for fault in self._between(claim.at - BLUR, claim.at + BLUR))

    def _claim(self, pk: int, delivery: int) -> Row | None:
        return next((row for row in self.evidence.log[pk] if row.is_claim and row.delivery == delivery), None)

    def _is_recorded(self, pk: int, delivery: int, pid: int, died: float) -> bool:
        """Tell whether this delivery had its effect so long before its process died that the record knows of it."""
        ends = [line.at for line in self.evidence.lines.get(pk, ()) if (line.what, line.delivery) == ("end", delivery)]
        return (
            bool(ends)
            and died - ends[0] > RECORDED
            and not any(
                fault.is_of_database or (pid in fault.pids and fault.kind in FREEZES)
                for fault in self._between(ends[0] - BLUR, died)
            )
        )

    def _between(self, begin: float, end: float) -> Iterator[Fault]:
        """Yield the faults that lasted at some moment between these times."""
        return (fault for fault in self.faults if fault.begin <= end and fault.end >= begin)

    def _died(self, pid: int, since: float) -> float | None:
        """Return when the process was killed after this time. A pid may be used again for another process."""
        for begin, end in self.deaths.get(pid, ()):
            if end >= since - BLUR:
                return max(begin, since)
        return None

    def _deaths(self) -> dict[int, list[tuple[float, float]]]:
        """The times between which each process was killed, in order."""
        deaths: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for fault in [*self.faults, *self.poisonings]:
            if fault.kind in ("kill-all", "kill-child", "kill-worker", POISON):
                for pid in fault.pids:
                    deaths[pid].append((fault.begin, fault.end))
        for times in deaths.values():
            times.sort()
        return deaths

    def _poisonings(self) -> Iterator[Fault]:
        """The deaths of processes by the poison that they delivered."""
        for lines in self.evidence.lines.values():
            for line in lines:
                if line.what == "die":
                    yield Fault(POISON, line.at, line.at, frozenset({line.pid}))

    def cancelled_means_cancelled(self) -> None:
        for answer in self.evidence.answers:
            self.report.counts[f"answered {answer.verdict!r}"] += 1
            pk = answer.id
            if answer.verdict not in ("cancelled", "outcome unknown", "requested"):
                log = self.evidence.log.get(pk, [])
                if (
                    answer.verdict != "too late"
                    or not log
                    or log[-1].after not in FINAL
                    or (log[-1].at > answer.answered + BLUR)
                ):
                    self.report.found("wrong answer", f"{pk}: {answer.verdict!r}")
                continue
            for row in self.evidence.log.get(pk, ()):
                if row.is_claim and row.at > answer.answered:
                    self.report.found(
                        "start after cancelled", f"{pk}: delivery {row.delivery} after {answer.verdict!r}"
                    )
            if answer.verdict == "requested":
                continue
            state = self.evidence.messages[pk].state if pk in self.evidence.messages else "gone"
            late_success = answer.verdict == "outcome unknown" and state == "consumed"
            if state != "cancelled" and not late_success:
                self.report.found("start after cancelled", f"{pk}: {answer.verdict!r}, and it is {state}")
            if answer.verdict == "cancelled":
                for line in self.evidence.lines.get(pk, ()):
                    if line.what == "start" and line.at > answer.answered:
                        self.report.found("start after cancelled", f"{pk}: its handler ran after the answer")
                    elif line.what == "end":
                        self.report.found("wrong answer", f"{pk}: 'cancelled', and it had its effect")

    # --- time ---------------------------------------------------------------------------------------------------------

    def nothing_is_late(self) -> None:
        for pk, log in self.evidence.log.items():
            # A message under a limit may be due long before there is room.
            if self.evidence.messages[pk].topic in {*self.evidence.run["limits"], *LOCKED}:
                continue
            for before, row in pairwise(log):
                if row.is_claim:
                    self._measure(pk, log, before, row)
        quiet, steady = sorted(self.report.lateness.get("quiet", [])), self.evidence.run["steady"]
        if len(quiet) >= MANY and quiet[len(quiet) * 99 // 100] > steady:
            self.report.found("late", f"99th percentile of quiet times: {quiet[len(quiet) * 99 // 100]:.3f} s")

    def _measure(self, pk: int, log: list[Row], before: Row, claim: Row) -> None:
        ready = max(before.due, before.at)
        marks = self.evidence.run["marks"]
        allowed, kind = marks["quiet"], "quiet"
        if before.before == "running" and before.reason and not before.failed:
            # Released, not failed: count from the death, whose time the record cannot know.
            died = self._died_holding(log, before.delivery)
            if died is not None:
                ready = min(ready, max(died, before.due))
                child = before.reason.startswith("worker process died")
                kind = "killed child" if child else "killed or frozen worker"
                allowed = marks["child"] if child else marks["worker"]
        elif pk in self.evidence.orphaned:
            allowed, kind = marks["push"], "lost push"
        deadline, near = ready + allowed, None
        for fault in self.disturbances:
            # A fault that came when the message was late already is no excuse.
            if fault.begin > min(deadline, claim.at):
                break
            if fault.end + self._mark(fault) >= ready:
                deadline, near = max(deadline, fault.end + self._mark(fault)), fault
                if fault.end <= claim.at and (fault.is_of_redis or fault.is_of_database or fault.kind in STANDSTILLS):
                    ready = max(ready, fault.end)
        if near is not None and kind == "quiet":
            kind = f"after {near.kind}"
        # A claim may be early; its handler waits.
        self.report.lateness[kind].append(max(0.0, claim.at - ready))
        if claim.at > deadline:
            over = f"{claim.at - deadline:.2f} s more than the {deadline - ready:.2f} s allowed"
            self.report.found("late", f"{pk}: {over} ({kind}), delivery {claim.delivery}")

    def _died_holding(self, log: list[Row], delivery: int) -> float | None:
        claim = next((row for row in log if row.is_claim and row.delivery == delivery), None)
        if claim is None or claim.pid is None:
            return None
        frozen = [f.begin for f in self.faults if f.kind in FREEZES and claim.pid in f.pids]
        times = [self._died(claim.pid, claim.at), *(at for at in frozen if at >= claim.at)]
        return min((at for at in times if at is not None), default=None)

    def _mark(self, fault: Fault) -> float:
        """Return how late a message may still be after the fault is healed, in seconds."""
        server = "redis" if fault.is_of_redis else "database" if fault.is_of_database else "worker"
        return float(self.evidence.run["marks"][MARKS.get(fault.kind, server)])

    def no_call_is_slow(self) -> None:
        """Check that nobody waited for Redis or for a connection longer than promised, with time for a busy machine."""
        self.report.counts["calls of more than 1 s"] = len(self.evidence.long_calls)
        for begin, end in self.evidence.long_calls:
            near = self._between(begin - FOUND_OUT, end)
            if end - begin > LONGEST_CALL and not any(fault.is_of_database or fault.kind == STOPPED for fault in near):
                self.report.found("slow call", f"a producer waited for {end - begin:.2f} s from {begin:.3f} on")
        for pk, lines in self.evidence.lines.items():
            for asks, told in pairwise(line for line in lines if line.what in ("asks", "told")):
                if (asks.what, told.what) != ("asks", "told") or asks.delivery != told.delivery:
                    continue
                self.report.counts["calls of extend()"] += 1
                near = self._between(asks.at - FOUND_OUT, told.at)
                explained = any(
                    (fault.is_of_database and fault.kind != "small-pool") or asks.pid in fault.pids for fault in near
                )
                if told.at - asks.at > LONGEST_ASKING and not explained:
                    text = f"{pk}: extend() took {told.at - asks.at:.2f} s from {asks.at:.3f} on, process {asks.pid}"
                    self.report.found("slow call", text)

    # --- the rest -----------------------------------------------------------------------------------------------------

    def nothing_else_broke(self) -> None:
        for note in self.evidence.notes:
            if note["what"] == "slow script":
                self._slow(note)
            elif note["what"] in KINDS:
                self.report.found(note["what"], note["text"])
        self._nothing_grows()
        for kind in sorted(set(self.evidence.run["kinds"]) - {fault.kind for fault in self.faults}):
            self.report.found("fault that never came", kind)
        for fault in self.faults:
            self.report.counts[f"fault {fault.kind}"] += 1
            if fault.kind == "restores" and fault.code and not self._disturbed(fault):
                self.report.found("restore failed", f"exit code {fault.code} at {fault.begin:.3f}")
            if fault.kind in CALLERS and fault.code:
                text = f"{fault.kind}, exit code {fault.code} at {fault.begin:.3f}"
                self.report.found("client ended by itself", text)

    def _slow(self, note: dict[str, Any]) -> None:
        """Find slow scripts. Redis counts its wait for a processor too: only what no waiting explains is wrong."""
        if not (self._frozen(note["began"]) or self._clock_was_set(note["began"])):
            self.report.counts["scripts above 10 ms"] += 1
            if note["ms"] > SLOW:
                self.report.found("slow script", note["text"])

    def _frozen(self, at: float) -> bool:
        """Tell whether Redis stood still then. Its own times are whole seconds."""
        return any(fault.kind in REDIS_STOPS for fault in self._between(at - 2, at + 2))

    def _clock_was_set(self, at: float) -> bool:
        """Tell whether the clock by which Redis notes this time was set then. A script seems to take as long."""
        clocks = (fault for fault in self.faults if fault.kind == "clock")
        return any(abs(at - moment) < 2 for fault in clocks for moment in (fault.begin + fault.ahead, fault.end))

    def _nothing_grows(self) -> None:
        """Check that neither the files nor the memory of a process grow once it has warmed up."""
        samples: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for note in self.evidence.notes:
            if note["what"] == "sample":
                samples[note["process"]].append(note)
        for pid, taken in samples.items():
            warm = [note for note in taken if note["at"] > taken[0]["at"] + WARM_UP]
            if not warm or warm[-1]["at"] < warm[0]["at"] + WARM_UP:
                continue
            self.report.counts["processes watched for growth"] += 1
            first, last = warm[0], warm[-1]
            if last["files"] > first["files"] + 8 or last["memory"] > first["memory"] * 1.15:
                self.report.found("growth", f"process {pid}: {first} … {last}")

    def _disturbed(self, fault: Fault) -> bool:
        return any(other.is_of_redis or other.is_of_database for other in self._between(fault.begin, fault.end))


def _is_action(row: Row) -> bool:
    """Tell whether somebody acted on a message that waited, or asked its handler to stop."""
    return (row.before, row.after) in {("scheduled", "scheduled"), ("scheduled", "cancelled"), ("running", "running")}


def _joined(spans: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Join those that overlap."""
    last: tuple[float, float] | None = None
    for begin, end in sorted(spans):
        if last is not None and begin <= last[1]:
            last = last[0], max(last[1], end)
            continue
        if last is not None:
            yield last
        last = begin, end
    if last is not None:
        yield last


def _has_run(row: Row) -> bool:
    """Tell whether a delivery ended by what its handler did."""
    return row.after in FINAL or row.failed


# --- telling ----------------------------------------------------------------------------------------------------------


def tell(report: Report, run: dict[str, Any]) -> Iterator[str]:
    """Return the lines of the report."""
    yield f"seed {run['seed']}, size {run['size']}, {run['seconds']:.0f} s"
    for name, number in sorted(report.counts.items()):
        yield f"  {name:<44} {number:>8}"
    yield "duplicates of effects that are out of reach of a transaction, by window"
    for name, number in sorted(report.duplicates.items()):
        yield f"  {name:<44} {number:>8}"
    yield f"lateness in ms {'deliveries':>30} {'p50':>8} {'p99':>8} {'max':>8}"
    for name, values in sorted(report.lateness.items()):
        values.sort()
        p50, p99, top = (values[int((len(values) - 1) * q)] * 1000 for q in (0.5, 0.99, 1))
        yield f"  {name:<31} {len(values):>11} {p50:>8.0f} {p99:>8.0f} {top:>8.0f}"
    yield "must be 0"
    for kind in KINDS:
        found = report.wrong.get(kind, [])
        yield f"  {kind:<44} {len(found):>8}"
        for text in found[:10]:
            yield f"      {text}"
    yield "GOOD" if report.good else "BAD"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dsn", required=True)
    given = parser.parse_args(arguments)
    evidence = read(given.folder, given.dsn)
    report = Oracle(evidence).judge()
    print("\n".join(tell(report, evidence.run)))
    return 0 if report.good else 1


if __name__ == "__main__":
    sys.exit(main())
