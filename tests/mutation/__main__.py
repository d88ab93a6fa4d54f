"""``python -m tests.mutation [NAME …]`` breaks the code on purpose, one bug at a time, and reports which tests notice.

It works on copies in a temporary folder. A mutant that survives is a hole in the tests. The exit code is 1 when one
survives, and 3 when a test fails without a mutant.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

HARNESSES = {
    "model": ["tests/faults/test_machine.py"],
    "directed": [
        "tests/testing",
        "tests/core/test_limits.py",
        "tests/record",
        "tests/api",
        "tests/broker",
        "tests/restore",
        "tests/inspector",
        "tests/faults/test_horizon_races.py",
        "tests/faults/test_limit_races.py",
        "tests/faults/test_move_races.py",
        "tests/faults/test_redis_races.py",
        "tests/commands/test_act_purge.py",
        "tests/commands/test_act_reschedule.py",
        "tests/commands/test_restore.py",
        "tests/worker",
        "tests/test_extensions.py",
        "tests/test_middleware.py",
        "tests/test_signals.py",
        "tests/test_urls.py",
        "tests/console/test_restore_operations.py",
        "tests/console/test_rollup.py",
        "tests/contrib/tasks",
        "tests/contrib/test_opentelemetry.py",
        "tests/contrib/test_sentry.py",
        "tests/recurring",
    ],
    "monitoring": [
        "tests/commands/test_check.py",
        "tests/commands/test_check_handlers.py",
        "tests/contrib/test_healthcheck.py",
        "tests/contrib/test_prometheus.py",
    ],
    "processes": [
        "tests/worker/test_handlers.py",
        "tests/faults/test_redis_faults.py",
        "tests/faults/test_isolation.py",
        "tests/faults/test_pooler.py",
    ],
}


class Edit(NamedTuple):
    """One change of a file: ``old``, found once however it is broken into lines, becomes ``new``.

    Further lines of ``new`` are indented like the line on which ``old`` begins.
    """

    file: str
    old: str
    new: str

    def of(self, text: str) -> str:
        """Return the text of the file with the change made."""
        places = list(re.finditer(r"\s+".join(map(re.escape, self.old.split())), text))
        if len(places) != 1:
            raise ValueError(f"{self.file} has {len(places)} places like {self.old!r}, not 1")
        start, end = places[0].span()
        line = text[text.rfind("\n", 0, start) + 1 : start]
        indent = line[: len(line) - len(line.lstrip())]
        return text[:start] + self.new.replace("\n", f"\n{indent}") + text[end:]


class Mutant(NamedTuple):
    """One seeded bug."""

    name: str
    edits: tuple[Edit, ...]


def mutant(name: str, *edits: tuple[str, str, str]) -> Mutant:
    return Mutant(name, tuple(Edit(*edit) for edit in edits))


ACTIONS = "django_delayq/api/actions.py"
ENGINE = "django_delayq/restore/engine.py"
MIDDLEWARE = "django_delayq/middleware.py"
PUBLISHER = "django_delayq/broker/publisher.py"
RECURRING = "django_delayq/recurring"
LIMITS = "django_delayq/core/limits.py"
ADMISSION = "django_delayq/record/admission.py"
LIMITS_SQL = "django_delayq/record/sql/postgresql_limited.py"
SQL = "django_delayq/record/sql/postgresql.py"
LOOKS_SQL = "django_delayq/record/sql/postgresql_looks.py"
BASE_SQL = "django_delayq/record/sql/postgresql_base.py"
SCHEDULING_SQL = "django_delayq/record/sql/postgresql_scheduling.py"
DELIVERY_SQL = "django_delayq/record/sql/postgresql_delivery.py"
MOVES = "django_delayq/record/sql/moves.py"
LOG_IN_ROW = "django_delayq/record/sql/log_in_row.py"
TRANSITIONS = "django_delayq/record/transitions.py"
CRASHES = "django_delayq/record/crashes.py"
HELD_KEYS = "django_delayq/record/held_keys.py"
COUNTS = "django_delayq/contrib/prometheus/counts.py"
CONSISTENCY = "django_delayq/inspector/consistency.py"
LINES = "django_delayq/inspector/lines.py"
DIAGNOSTICS = "django_delayq/inspector/diagnostics.py"
UNSERVED = "django_delayq/inspector/unserved.py"
LUA = "django_delayq/broker/scripts"
WORKER = "django_delayq/worker"
TESTING = "django_delayq/testing"
TASKS = "django_delayq/contrib/tasks"

MUTANTS = [
    mutant(
        "poll without Redis that knows no new queue",
        (f"{WORKER}/claim/queues.py", "others = not named or len(queues) > 1", "others = len(queues) > 1"),
    ),
    mutant(
        "claim without a look at the room of each lane",
        (
            f"{WORKER}/claim/sorting.py",
            "elif kind.lane is None or rooms[kind.lane] <= 0 or messages <= 0:",
            "elif kind.lane is None:",
        ),
    ),
    mutant(
        "place that becomes free amid a turn for a lower queue",
        (
            f"{WORKER}/claim/wanted.py",
            "return self._rooms.get(lane, 0)",
            "return lane.room",
        ),
    ),
    mutant(
        "lost reply while ids stand aside that orphans claims",
        (
            f"{WORKER}/claim/unclaimed.py",
            "except BrokerUnavailable as error: self.brokers.report_failure(error) except DatabaseError as error:",
            "except DatabaseError as error:",
        ),
    ),
    mutant(
        "queue that saves its unused shares up",
        (f"{WORKER}/claim/shares.py", "clocks.get(queue, max(clock, least))", "clocks.get(queue, clock)"),
    ),
    mutant("queues that do not take turns", (f"{WORKER}/claim/queues.py", 'if is_short else ""', 'if False else ""')),
    mutant(
        "consumer that goes on while outcomes wait",
        (f"{WORKER}/claim/wanted.py", "or self._pool.recorder.behind > LONGEST_BEHIND", ""),
    ),
    mutant(
        "--once that ends beside messages that could begin",
        (
            f"{WORKER}/claim/consumer.py",
            "if was_quiet and self._is_quiet and self._found_nothing:",
            "if self._found_nothing:",
        ),
    ),
    mutant(
        "place under a limit that is free and opens nothing",
        (
            f"{WORKER}/claim/freed_places.py",
            "self._freed.update(name for name in names if",
            "list(name for name in names if",
        ),
    ),
    mutant(
        "wake-up that is not passed on",
        (f"{WORKER}/claim/wake_ups.py", "elif self._is_woken and self._pass_at is None:", "elif False:"),
    ),
    mutant(
        "removal that a put under way undoes",
        (
            "django_delayq/broker/redis.py",
            "after this call.\n            self._puts.flush()",
            "after.\n            pass",
        ),
    ),
    mutant(
        "place under a limit that is taken long before the due time",
        (f"{WORKER}/processes/assembly.py", "NEAR if knows_limits else CLAIM_AHEAD", "CLAIM_AHEAD"),
    ),
    mutant(
        "spread that ends beyond the farthest due time",
        (TRANSITIONS, "min(start + share(message.pk), at + FARTHEST)", "start + share(message.pk)"),
    ),
    mutant(
        "preview of a reschedule that takes running messages for scheduled",
        (ACTIONS, "counts[done if state in verb.states else", "counts[done if state in State else"),
    ),
    mutant(
        "changed payload lost where others are not changed",
        (DELIVERY_SQL, "changes = any(payload is not None", "changes = all(payload is not None"),
    ),
    mutant(
        "changed payload that removes the payloads of others",
        (DELIVERY_SQL, "payload = coalesce(x.payload::jsonb, m.payload)", "payload = x.payload::jsonb"),
    ),
    mutant(
        "changed payload without a word in the log",
        (f"{WORKER}/run/recorder.py", "payload=outcome.payload, reason=PAYLOAD_CHANGED", "payload=outcome.payload"),
    ),
    mutant(
        "changed payload lost with the last attempt",
        (
            f"{WORKER}/run/executor.py",
            "return GiveUp(text, exception=class_path(error), payload=error.payload)",
            "return GiveUp(text, exception=class_path(error))",
        ),
    ),
    mutant(
        "payload that the database refuses, tried without it for ever",
        (f"{WORKER}/run/recorder.py", "if outcome.payload is not None:\n# No", "if False:\n# No"),
    ),
    mutant(
        "unique that keeps the key while the handler runs",
        (
            "django_delayq/project/validation.py",
            'if value == "live" else (0, None)',
            'if value == "live" else (None, None)',
        ),
    ),
    mutant(
        "key that is free as soon as its message has finished",
        (
            "django_delayq/project/validation.py",
            'return None, checked("unique", values.span, value, values.SHORTEST)',
            "return None, None",
        ),
    ),
    mutant(
        "key taken from a finished message before its time is over",
        (
            HELD_KEYS,
            "if holder.finished_at + timedelta(seconds=holder.key_for) > statements(using).now():",
            "if False:",
        ),
    ),
    mutant(
        "message scheduled beside one that waits for its retry",
        (SCHEDULING_SQL, "AND deliveries > key_deliveries AND deliveries = reported", "AND false"),
    ),
    mutant(
        "crashed delivery that keeps new messages out",
        (
            SCHEDULING_SQL,
            "AND deliveries > key_deliveries AND deliveries = reported",
            "AND deliveries > key_deliveries",
        ),
    ),
    mutant(
        "requeued message that does not hold its key",
        (TRANSITIONS, '"key_deliveries": message.deliveries if message.unique == "scheduled" else None,', ""),
    ),
    mutant(
        "requeued message that has its next one already",
        (TRANSITIONS, '"next_id": None,', ""),
    ),
    mutant(
        "message that is in the way of its own requeue",
        (TRANSITIONS, "message.topic, message.key, but=message.pk)", "message.topic, message.key)"),
    ),
    mutant(
        "kept message that starts before the caller's transaction ends",
        (SCHEDULING_SQL, "AND state = 'scheduled' FOR SHARE", "AND state = 'scheduled'"),
    ),
    mutant(
        "running message of another key that hands its key over",
        ("django_delayq/core/actors.py", "own is not None and own[0] == (using, topic, key)", "own is not None"),
    ),
    mutant(
        "handler that runs again and meets its next message as a conflict",
        ("django_delayq/api/scheduling.py", "if new.own is not None:\n# The", "if False:\n# The"),
    ),
    mutant(
        "message that waits again and keeps the later steps of its chain out",
        (SCHEDULING_SQL, "AND next_id IS NULL AND state = 'scheduled'", "AND state = 'scheduled'"),
    ),
    mutant(
        "key that is given up although the next message is refused",
        (TRANSITIONS, "transaction.set_rollback(True, using=using)", "pass"),
    ),
    mutant(
        "step of a chain that is made again when it is over",
        ("django_delayq/api/scheduling.py", "following = held_keys.next_of(using, own)", "following = None"),
    ),
    mutant(
        "next message of another's making that is forgotten",
        ("django_delayq/api/scheduling.py", "held_keys.note_next(using, own, existing.pk)", "pass"),
    ),
    mutant(
        "finished message purged while it holds its key",
        (
            "django_delayq/record/purge.py",
            "Q(key_for__isnull=True) | Q(next_id__isnull=False) | ~Q(HoldsKeyAt(now)),",
            "",
        ),
    ),
    mutant(
        "janitor that does nothing more after an error",
        (f"{WORKER}/upkeep/janitor.py", "pruning, self._pruning = self._pruning, None", "pruning = self._pruning"),
    ),
    mutant(
        "message moved on the replica that it was read from",
        (
            ACTIONS,
            "using = using or router.db_for_write(Message, **hints)",
            "using = using or (target._state.db if hints else router.db_for_write(Message))",
        ),
    ),
    mutant(
        "message purged while a row refers to it",
        ("django_delayq/record/purge.py", "rows = rows.filter(~Q(ReferredTo(reference)))", "pass"),
    ),
    mutant(
        "janitor that does not rest",
        (f"{WORKER}/upkeep/janitor.py", "return REST * (time", "return 0 * (time"),
    ),
    mutant(
        "purge that waits for locked messages",
        (SQL, "LIMIT %s::int FOR UPDATE SKIP LOCKED", "LIMIT %s::int FOR UPDATE"),
    ),
    mutant(
        "purge that lets the commits of its caller wait for no disk",
        (SQL, "[*parameters, *after, size, is_own]", "[*parameters, *after, size, True]"),
    ),
    mutant(
        "chosen messages purged though they wait again",
        (
            "django_delayq/record/purge.py",
            "doomed = Message.objects.using(using).filter(finished_at__isnull=False, state__in=sorted(FINAL))",
            "doomed = Message.objects.using(using).all()",
        ),
    ),
    mutant(
        "results lost where only some are kept",
        (DELIVERY_SQL, "keeps = any(result is not None for", "keeps = all(result is not None for"),
    ),
    mutant(
        "results kept of every handler",
        (f"{WORKER}/run/executor.py", "if delivery.handler.keep_result:", "if True:"),
    ),
    mutant(
        "tasks imported because a row names them",
        (
            f"{TASKS}/known.py",
            "return _known.get(topic)",
            "__import__(topic.rpartition('.')[0])\nreturn _known.get(topic)",
        ),
    ),
    mutant(
        "task_finished for a failure that is tried again",
        (f"{TASKS}/running.py", 'if self.delivery.fate(outcome) in ("dead", "cancelled"):', "if True:"),
    ),
    mutant(
        "success of a transactional task told before its commit",
        (
            f"{TASKS}/running.py",
            "if self.delivery.handler.transactional and connections[using].in_atomic_block:",
            "if False:",
        ),
    ),
    mutant(
        "tasks that no worker knows are enqueued",
        (f"{TASKS}/backend.py", "self._refuse_unknown_to_workers(task)", "pass"),
    ),
    mutant(
        "result of a task under the settings of today",
        (f"{TASKS}/results.py", '"priority": message.priority, "queue_name": message.queue,', ""),
    ),
    mutant(
        "process that claims more than its share",
        (
            f"{WORKER}/parts/lifetime.py",
            "return 0 if self._page.spent else max(0, min(wanted, self._left))",
            "return wanted",
        ),
    ),
    mutant(
        "spent process that never goes on",
        (
            f"{WORKER}/parts/lifetime.py",
            "self._spent_at >= PATIENCE and self._go_on()",
            "self._spent_at >= PATIENCE and False",
        ),
    ),
    mutant(
        "more spent processes that finish than processes that work",
        (f"{WORKER}/processes/supervisor.py", "and sum(finishing) < self.options.processes", ""),
    ),
    mutant(
        "replaced process that counts as a quick death",
        (
            f"{WORKER}/processes/supervisor.py",
            "if self._stopping or (ended and child.page.replaced):",
            "if self._stopping:",
        ),
    ),
    mutant(
        "occurrence that is made again",
        (f"{RECURRING}/occurrences.py", "if (schedule.pk, at) not in there]", "]"),
    ),
    mutant(
        "schedule that several processes advance at once",
        (
            f"{RECURRING}/schedules.py",
            "list(locked(using, rows, wait=False))",
            "list(rows)",
        ),
    ),
    mutant(
        "times missed while an occurrence waited that are made",
        (f"{RECURRING}/occurrences.py", "begin = min(now, max(begin, left[schedule.message_id]))", "pass"),
    ),
    mutant(
        "times missed after the last delivery that are forgotten",
        (f"{RECURRING}/occurrences.py", "begin = min(now, max(begin, left[schedule.message_id]))", "begin = now"),
    ),
    mutant(
        "occurrences that have begun withdrawn",
        (f"{RECURRING}/schedules.py", "filter(WAITS, pk__in=rows", "filter(pk__in=rows"),
    ),
    mutant(
        "withdrawn occurrence whose time does not come again",
        (
            f"{RECURRING}/schedules.py",
            "occurrences.update(schedule, last_at=min(schedule.last_at, now), message_id=None)",
            "pass",
        ),
    ),
    mutant(
        "old version of the code that turns a deploy back",
        (f"{RECURRING}/services.py", "if newest.fingerprint != mine or", "if"),
    ),
    mutant(
        "worker that removes schedules as soon as it starts",
        (f"{RECURRING}/services.py", "if time.monotonic() - self._started > FORGOTTEN_AFTER:", "if True:"),
    ),
    mutant(
        "scheduler that counts as alive for ever",
        (f"{RECURRING}/diagnosis.py", "filter(seen_at__gt=since).exists()", "exists()"),
    ),
    mutant(
        "schedule that nobody advances and nobody reports",
        (f"{RECURRING}/diagnosis.py", "since=BEHIND_AFTER", "since=timedelta(days=1)"),
    ),
    mutant(
        "time that comes twice when the clocks are put back",
        (f"{RECURRING}/times.py", "for wall in walls) if at > moment)", "for wall in walls))"),
    ),
    mutant(
        "claim without a look at the state",
        (
            DELIVERY_SQL,
            "WHERE {IS_SCHEDULED} AND m.due_at <=",
            "WHERE m.state IN ('scheduled', 'running') AND m.due_at <=",
        ),
    ),
    mutant(
        "reaper that ignores the lease",
        (
            "django_delayq/models/record.py",
            "return Q(~Exists(renewed), state=_State.RUNNING, leased_until__lt=at)",
            "return Q(state=_State.RUNNING, leased_until__isnull=False)",
        ),
    ),
    mutant(
        "reaper that overlooks renewals",
        (
            "django_delayq/models/record.py",
            "return Q(~Exists(renewed), state=_State.RUNNING, leased_until__lt=at)",
            "return Q(state=_State.RUNNING, leased_until__lt=at)",
        ),
        (CRASHES, "if held in renewed() or (among", "if (among"),
    ),
    mutant(
        "reaper that overlooks a renewal beside it",
        (CRASHES, "if held in renewed() or (among", "if (among"),
    ),
    mutant(
        "weights that are right in each turn only",
        (f"{WORKER}/claim/shares.py", "return self._clocks[queue] + number /", "return number /"),
    ),
    mutant(
        "queue with nothing due that keeps its share",
        (f"{WORKER}/claim/shares.py", "given = shares[queue] + unused", "given = shares[queue]"),
    ),
    mutant(
        "event loop that begins any number of handlers",
        (f"{WORKER}/run/event_loop.py", "while len(self._tasks) < self.places:", "while True:"),
    ),
    mutant(
        "tasks that share a context",
        (f"{WORKER}/run/event_loop.py", "context=self._context.copy()", "context=self._context"),
    ),
    mutant(
        "task that was cancelled before its first step and is held for ever",
        (f"{WORKER}/run/event_loop.py", "if task.cancelled():", "if False:"),
    ),
    mutant(
        "cancel request that is forgotten because the handler had not begun",
        (f"{WORKER}/parts/delivery.py", "if self.cancel_requested:\n# While", "if False:\n# While"),
    ),
    mutant(
        "dead letter of a message that was asked to stop",
        (DELIVERY_SQL, "WHEN m.cancel_requested THEN 'cancelled' WHEN o.dead THEN 'dead'", "WHEN o.dead THEN 'dead'"),
    ),
    mutant(
        "dead letter of a crash after a request to stop",
        (CRASHES, "if judgement.is_dead and not message.cancel_requested:", "if judgement.is_dead:"),
    ),
    mutant(
        "delivery that ends before its sync calls",
        (f"{WORKER}/run/executor.py", "await ended()", "pass"),
    ),
    mutant(
        "cancel that leaves the task of an async handler alone",
        (f"{WORKER}/parts/delivery.py", "self._scope[2].cancel()", "pass"),
    ),
    mutant(
        "dirty connection that another handler gets",
        (f"{WORKER}/run/sync_calls.py", "if connections.after_task() and", "if"),
    ),
    mutant(
        "reaper that believes its first look",
        (f"{WORKER}/upkeep/reaper.py", "confirm_after = 2.0", "confirm_after = 0.0"),
    ),
    mutant(
        "reaper that takes no notice of its own wait",
        (f"{WORKER}/upkeep/reaper.py", "self._suspects if now - began < LONGEST_LOOK else {}", "self._suspects"),
    ),
    mutant(
        "statements prepared behind a pooler",
        ("django_delayq/record/sql/sessions.py", "is_direct = pid == raw.info.backend_pid and", "is_direct ="),
    ),
    mutant(
        "moves at the level of the project",
        ("django_delayq/record/sql/sessions.py", "raw.isolation_level = READ_COMMITTED", "pass"),
    ),
    mutant(
        "conflict that is not counted",
        (f"{WORKER}/run/recorder.py", "conflict=outcome.conflict, ", ""),
    ),
    mutant(
        "conflict that costs an attempt",
        (f"{WORKER}/run/executor.py", "return _conflict(delivery, error) or", "return"),
    ),
    mutant(
        "policy that retries what it excludes",
        ("django_delayq/core/retry.py", "or isinstance(error, self.refused)", ""),
    ),
    mutant(
        "message with a policy of its own that retries every error",
        (
            f"{WORKER}/parts/delivery.py",
            "RetryPolicy.from_json(stored).for_errors_of(policy)",
            "RetryPolicy.from_json(stored)",
        ),
    ),
    mutant(
        "claim that overlooks the message's own lease",
        (DELIVERY_SQL, "coalesce(m.lease, (%(leases)s", "coalesce((%(leases)s"),
    ),
    mutant(
        "delivery that overlooks the message's own timeout",
        (f"{WORKER}/parts/delivery.py", " if own is None else own or None", ""),
    ),
    mutant(
        "search for what is due that reads all that is not",
        (BASE_SQL, 'NOW = "(SELECT clock_timestamp())"', 'NOW = "clock_timestamp()"'),
    ),
    mutant(
        "flat payload that changes with the dict of the caller",
        ("django_delayq/project/validation.py", "value.copy() if is_flat", "value if is_flat"),
    ),
    mutant(
        "flat payload that nobody searches for NUL",
        (
            "django_delayq/project/validation.py",
            'if "\\\\u0000" in text:',
            "if False:",
        ),
    ),
    mutant(
        "message that overlooks its handler's priority",
        (
            "django_delayq/api/new_messages.py",
            '"priority": handler.priority, "queue"',
            '"priority": 0, "queue"',
        ),
    ),
    mutant(
        "member of an enum as the queue of a handler",
        ("django_delayq/project/registry.py", "None if queue is None else validation.queue(queue)", "queue"),
    ),
    mutant(
        "member of an enum as the default queue",
        (
            "django_delayq/core/values.py",
            "and pattern.fullmatch(value): return plain(value)",
            "and pattern.fullmatch(value): return value",
        ),
    ),
    mutant(
        "cursor that is kept with all the rows of its last answer",
        (BASE_SQL, "if len(rows) <= MOST_ROWS_KEPT:", "if True:"),
    ),
    mutant(
        "cursor that reads times in a former time zone",
        (
            BASE_SQL,
            "cursor = session.cursors.pop(how, None)",
            "cursor = (session.cursors.popitem()[1] if session.cursors else None)",
        ),
    ),
    mutant(
        "due times in bulk that are not rounded",
        (SCHEDULING_SQL, "rounded = ceil_tenth(due)", "rounded = due"),
    ),
    mutant(
        "new message without a timeout that has its handler's",
        (
            SCHEDULING_SQL,
            "if parameters[name] is not None]",
            "if parameters[name] not in (None, 0.0) or name == 'priority']",
        ),
    ),
    mutant(
        "choice on conflict without a key",
        ("django_delayq/api/new_messages.py", "if new.on_conflict != OnConflict.ERROR:", "if False:"),
    ),
    mutant(
        "failure without a fence",
        (
            DELIVERY_SQL,
            "{COLUMNS} FROM o JOIN delayq_message m ON m.id = o.id WHERE {IS_RUNNING} AND m.deliveries = o.delivery",
            "{COLUMNS} FROM o JOIN delayq_message m ON m.id = o.id WHERE {IS_RUNNING}",
        ),
    ),
    mutant("success without a guard", (DELIVERY_SQL, "WHERE m.state IN ('running', 'scheduled') ORDER BY", "ORDER BY")),
    mutant(
        "late success refused",
        (DELIVERY_SQL, "WHERE m.state IN ('running', 'scheduled') ORDER BY", "WHERE m.state = 'running' ORDER BY"),
    ),
    mutant(
        "worker that looks for garbage against the project's choice",
        (f"{WORKER}/processes/process.py", "if youngest and youngest < YOUNG_OBJECTS:", "if True:"),
    ),
    mutant(
        "success of a crashed delivery as one of the present one",
        (
            DELIVERY_SQL,
            "actor{{its}} FROM o JOIN delayq_message m ON m.id = o.id WHERE {IS_RUNNING} AND m.deliveries = o.delivery",
            "actor{{its}} FROM o JOIN delayq_message m ON m.id = o.id WHERE {IS_RUNNING}",
        ),
    ),
    mutant(
        "failure that loses the claim from the log",
        (LOG_IN_ROW, "FROM x WHERE claimed_at IS NOT NULL", "FROM x WHERE false"),
    ),
    mutant(
        "failure that changes the first row of the log",
        (LOG_IN_ROW, "FROM x WHERE created_by IS NOT NULL", "FROM x WHERE false"),
    ),
    mutant("move that loses the claim from the log", (LOG_IN_ROW, " or one.claimed_at is not None]", "]")),
    mutant(
        "move that changes the first row of the log",
        (LOG_IN_ROW, 'dict.fromkeys(("created_by", "claimed_at",', 'dict.fromkeys(("claimed_at",'),
        (LOG_IN_ROW, "if one.created_by is not None or", "if"),
    ),
    mutant(
        "claim that names its worker as it was marked later",
        (CRASHES, "update(worker=worker + ALONE, claimed_by=worker)", "update(worker=worker + ALONE)"),
    ),
    mutant(
        "quick handlers in all threads",
        (f"{WORKER}/run/handler_threads.py", "if self._means[topic] >= QUICK:", "if True:"),
    ),
    mutant(
        "slow handlers in one thread",
        (f"{WORKER}/run/handler_threads.py", "if self._means[topic] >= QUICK:", "if False:"),
    ),
    mutant(
        "stuck handler that keeps its turn",
        (f"{WORKER}/run/handler_threads.py", "elif begun == self._begun:", "elif False:"),
    ),
    mutant(
        "delivery that waits for a stuck handler unseen",
        (f"{WORKER}/run/handler_threads.py", "self.turns.note_waiting()", ""),
    ),
    mutant("claim in spite of a pause", (BASE_SQL, "AND m.queue NOT IN ({PAUSED})", "")),
    mutant(
        "cancel without a condition",
        (
            TRANSITIONS,
            "if message.state == State.SCHEDULED: has_crashed",
            "if message.state in LIVE:\n    has_crashed",
        ),
    ),
    mutant(
        "crashes without a limit",
        (CRASHES, "if crashes >= max_crashes + (suspect if by_kill else 0):", "if crashes < 0:"),
    ),
    mutant("crashes beside others that convict", (CRASHES, "if not was_alone:", "if False:")),
    mutant("crashes of handlers that had not begun", (CRASHES, "if message.pk not in running:", "if False:")),
    mutant(
        "dead hosts that accuse their messages",
        (CRASHES, "if (message.deliveries - message.reported) % WORKERS_PER_CRASH == 0:", "if True:"),
    ),
    mutant(
        "kill from outside taken for a crash of its own",
        (CRASHES, "(suspect if by_kill else 0)", "0"),
    ),
    mutant(
        "suspects that run beside others",
        (f"{WORKER}/claim/quarantine.py", "return delivery.crashes >= self._suspect_crashes", "return False"),
    ),
    mutant(
        "orphaned claims that include those of an answer",
        (CRASHES, "where &= claimed_after(since)", "pass"),
    ),
    mutant(
        "duty that two processes have",
        (f"{LUA}/duty.lua", "if holder and holder ~= worker then", "if false then"),
    ),
    mutant(
        "shared work that no process does without the duty",
        (f"{WORKER}/parts/service_turns.py", "self._due[place] + STANDBY", "self._due[place] + 1e12"),
    ),
    mutant(
        "refund that is lost",
        (f"{WORKER}/parts/lifetime.py", "self._left -= claimed", "self._left -= max(0, claimed)"),
    ),
    mutant(
        "two suspects at a time",
        (f"{WORKER}/claim/quarantine.py", "(self._lock is None or self._lock.acquire(wait=False))", "True"),
    ),
    mutant(
        "sweeper that starts at a cursor",
        (f"{WORKER}/upkeep/sweeper.py", "return BEGINNING", "return overdue_since, 0"),
    ),
    mutant(
        "sweeper that forgets the backlog",
        (f"{WORKER}/upkeep/sweeper.py", "(lag if first is None else min(first, lag), 0)", "(lag, 0)"),
    ),
    mutant(
        "load that takes Redis for loaded too early",
        (
            "django_delayq/restore/filling.py",
            "upto_tenths=None, lease=LOADER",
            "upto_tenths=self.horizon_tenths, lease=LOADER",
        ),
    ),
    mutant(
        "put that leaves the index of queues alone",
        (f"{LUA}/put.lua", "note(queues, queue, any_ready and 0 or earliest and math.floor(earliest))", ""),
    ),
    mutant(
        "broker that takes any number for a score",
        ("django_delayq/broker/redis_source.py", "if numbers and not 0 <= min", "if False and not 0 <= min"),
    ),
    mutant(
        "child of a handler that is not known to be one",
        (f"{WORKER}/parts/delivery.py", "os.register_at_fork(after_in_child=_count_fork)", ""),
    ),
    mutant(
        "recorder that forgets the outcomes of locked rows",
        (f"{WORKER}/run/recorder.py", "recorded = batch if len(consumed) == len(acks) else", "recorded = batch or"),
    ),
    mutant(
        "take that does not tell of other queues",
        (f"{LUA}/take.lua", "if other then", "if false then"),
    ),
    mutant(
        "sweep beside a load",
        (f"{WORKER}/upkeep/sweeper.py", "return meta.horizon_tenths is None or meta.is_loading", "return False"),
    ),
    mutant(
        "horizon advanced after the query",
        (f"{LUA}/load.lua", '"horizon", string.format("%.0f", horizon),', ""),
        (f"{LUA}/loaded.lua", '"loaded", upto)', '"loaded", upto, "horizon", upto)'),
    ),
    mutant(
        "restore that clears first",
        (
            ENGINE,
            "horizon = self._horizon if not self.dry_run:",
            (
                "horizon = self._horizon\n"
                "self.broker.client.delete(self.broker.keys(queue).delayed, self.broker.keys(queue).ready)\n"
                "if not self.dry_run:"
            ),
        ),
    ),
    mutant(
        "resumed restore that says the whole queue is loaded",
        (ENGINE, "self.selection.is_everything and self._from is None", "self.selection.is_everything"),
    ),
    mutant(
        "spread of a restore that counts anew in each step",
        (ENGINE, "if self._from is None and self.overdue == Overdue.SPREAD:", "if self.overdue == Overdue.SPREAD:"),
    ),
    mutant(
        "spread that holds no queue",
        (ENGINE, "if self.dry_run or is_past or Stage.OVERDUE not in self._stages:", "if True:"),
    ),
    mutant(
        "restore that ends the pause of somebody else",
        ("django_delayq/api/pausing.py", "filter(paused_by=holder).delete()", "all().delete()"),
    ),
    mutant(
        "requeue that gives up a due time to come",
        (TRANSITIONS, "if delay is not None or due <= at:", "if True:"),
    ),
    mutant(
        "spread that begins anew with each batch",
        (ACTIONS, "times = self._spread(using, ids, times)", "pass"),
    ),
    mutant(
        "selection with a message for each of its rows",
        (
            "django_delayq/api/targets.py",
            'sorted(set(queryset.values_list("pk", flat=True)))',
            'sorted(queryset.values_list("pk", flat=True))',
        ),
    ),
    mutant(
        "record before the effect",
        (
            f"{WORKER}/run/executor.py",
            "if not delivery.handler.transactional:",
            (
                "if not delivery.handler.transactional:\n"
                "    transitions.succeed(delivery.using, [Success(delivery.id, delivery.deliveries, actor)])"
            ),
        ),
    ),
    mutant(
        "reschedule that keeps the old score",
        (
            f"{LUA}/put.lua",
            'redis.call("ZADD", delayed, unpack(places))',
            'redis.call("ZADD", delayed, "NX", unpack(places))',
        ),
    ),
    mutant("fill that replaces an earlier place", (f"{LUA}/put.lua", '"LT", "CH", unpack', '"CH", unpack')),
    mutant("mover that is a second early", (f"{LUA}/take.lua", '"%.0f", now + 1)', '"%.0f", now + 10001)')),
    mutant(
        "loader that ignores another run of the server",
        (
            f"{WORKER}/upkeep/loader.py",
            "ours = (meta.run_id, meta.replid) == (server.run_id, server.replid)",
            "ours = True",
        ),
    ),
    mutant(
        "handler begun after its lease",
        (f"{WORKER}/parts/delivery.py", "if self.started_mono - self.leased_mono > self.lease:", "if False:"),
    ),
    mutant(
        "handler that begins with its claim",
        (f"{WORKER}/run/claim_ahead.py", "if delivery.due_mono <= delivery.queued_mono:", "if True:"),
    ),
    mutant(
        "shutdown that costs an attempt",
        (f"{WORKER}/run/recorder.py", "outcome.delay, counts=False, conflict", "outcome.delay, conflict"),
    ),
    mutant(
        "returned coroutine that nobody awaits",
        (f"{WORKER}/run/executor.py", "if inspect.isawaitable(returned):", "if False:"),
    ),
    mutant(
        "returned generator taken for a success",
        (f"{WORKER}/run/executor.py", "if isinstance(returned, _UNRUN):", "if False:"),
    ),
    mutant(
        "messages updated directly",
        (
            "django_delayq/models/record.py",
            "def update(self, **kwargs: Any) -> NoReturn:",
            "def _update_(self) -> NoReturn:",
        ),
    ),
    mutant(
        "put before the commit",
        (PUBLISHER, "if not connection.in_atomic_block and connection.get_autocommit():", "if True:"),
    ),
    mutant(
        "put before the commit by hand",
        (PUBLISHER, "not connection.in_atomic_block and connection.get_autocommit()", "not connection.in_atomic_block"),
    ),
    mutant(
        "message due within the horizon left to the loader",
        (PUBLISHER, "conf.get().HORIZON + CLOCK_MARGIN", "conf.get().HORIZON / 2"),
    ),
    mutant(
        "horizon of another setting believed",
        (f"{LUA}/load.lua", "if not horizon or horizon > now + ahead + SLACK then", "if not horizon then"),
    ),
    mutant("loader that claims years believed", (f"{LUA}/load.lua", "and loader_until <= now + LONGEST_LEASE", "")),
    mutant(
        "put into the queue of another database",
        (f"{LUA}/put.lua", 'if identity ~= "" and known[2] and known[2] ~= identity then', "if false then"),
    ),
    mutant(
        "take from the queue of another database",
        (f"{LUA}/take.lua", "if is_foreign(meta, identity) then", "if false then"),
    ),
    mutant(
        "keys of another type left",
        (f"{LUA}/clear.lua", 'redis.call("UNLINK", base ..', 'redis.call("EXISTS", base ..'),
    ),
    mutant(
        "Redis that flaps used at once",
        (f"{WORKER}/parts/broker_switch.py", "or time.monotonic() < self._held_until", ""),
    ),
    mutant(
        "strange answer of a server raised as it is",
        (
            "django_delayq/broker/connection.py",
            "if isinstance(error, CLUSTER_ERRORS) or str(error).startswith(CLUSTER_WORDS):",
            "if not isinstance(error, (redis.RedisError, OSError)):\n    raise error\nif isinstance(error, ()):",
        ),
    ),
    mutant(
        "take that keeps ready what is early",
        (f"{LUA}/take.lua", "if since > now + within then", "if false then"),
    ),
    mutant(
        "claim that believes the clock of Redis",
        (
            DELIVERY_SQL,
            "AND m.due_at <= least({READY}, clock_timestamp() +",
            "AND m.due_at <= greatest({READY}, clock_timestamp() +",
        ),
    ),
    mutant(
        "handler that begins by the clock of Redis",
        (
            f"{WORKER}/claim/consumer.py",
            "return until if left <= until <= left + took else left + took",
            "return until",
        ),
    ),
    mutant(
        "time of the record that is asked for and not learned",
        ("django_delayq/record/transitions.py", "record_clock(using).learn(asked, shown)", "pass"),
    ),
    mutant(
        "answer that moves a clock which it proves right",
        (
            "django_delayq/core/known_record.py",
            "min(max(self._ahead, seconds - answered), seconds - asked)",
            "seconds - answered",
        ),
    ),
    mutant(
        "backlog in the order in which Redis learned of it",
        (
            f"{LUA}/put.lua",
            'redis.call("ZADD", ready, ready_score(due, rank), id)\n      any_ready',
            'redis.call("ZADD", ready, ready_score(now, rank), id)\nany_ready',
        ),
    ),
    mutant(
        "claimed rows in the order of their ids",
        (TRANSITIONS, "[rows[pk] for pk in unique if pk in rows]", "[rows[pk] for pk in sorted(rows)]"),
    ),
    mutant(
        "query that locks more than it takes",
        (
            LOOKS_SQL,
            "self._rows(DUE, parameters) or self._rows(DUE_UNLOCKED, parameters)",
            "self._rows(DUE_UNLOCKED, parameters)",
        ),
    ),
    mutant(
        "times read in the zone of the session",
        ("django_delayq/models/fields.py", "return [] if connection.timezone is UTC else [_in_utc]", "return []"),
    ),
    mutant(
        "counts that a successor does not go on with",
        (COUNTS, "for row in self._slot.rows()}", "for row in ()}"),
    ),
    mutant("two processes that count in one slot", (COUNTS, "if lock.acquire(wait=False):", "if True:")),
    mutant("labels of topics that have no handler", (COUNTS, "if topic not in self._topics:", "if False:")),
    mutant("lateness of retries", (COUNTS, "if claim.deliveries == 1:", "if True:")),
    mutant(
        "runtimes that nobody is told of",
        (f"{WORKER}/run/recorder.py", "self.extensions.handled(done)", "pass"),
    ),
    mutant(
        "gauges that wait for the database for ever",
        (
            "django_delayq/contrib/prometheus/gauges.py",
            "with statement_timeout(self.using, TIMEOUT_MS):",
            "if True:",
        ),
    ),
    mutant(
        "paused queues that count as overdue",
        (DIAGNOSTICS, "stats.oldest_overdue(using, now, paused)", "stats.oldest_overdue(using, now)"),
    ),
    mutant(
        "warnings that fail a health check",
        ("django_delayq/contrib/healthcheck.py", "f.level == Level.CRITICAL]", "f.level != Level.OK]"),
    ),
    mutant(
        "dead workers whose topics are handled",
        (
            UNSERVED,
            "(worker.topics for worker in workers.of(WorkerState.ALIVE))",
            "(worker.topics for worker in workers.workers)",
        ),
    ),
    mutant(
        "queues served by processes that run no handler",
        (
            UNSERVED,
            "for worker in workers.of(WorkerState.ALIVE) if worker.topics for",
            "for worker in workers.of(WorkerState.ALIVE) for",
        ),
    ),
    mutant("a new queue that counts as unserved", (UNSERVED, "NEW = 60.0", "NEW = 0.0")),
    mutant(
        "process that is not ready without Redis",
        ("django_delayq/urls.py", 'if database != "ok" else', 'if database != "ok" or redis == "unavailable" else'),
    ),
    mutant(
        "effects that middleware lost recorded as a success",
        (
            f"{WORKER}/run/executor.py",
            "if isinstance(delivery.decided, Recorded):",
            "if delivery.decided:",
        ),
    ),
    mutant(
        "error on commit taken for a failure of the handler",
        (f"{WORKER}/run/executor.py", "if isinstance(delivery.decided, Recorded):", "if False:"),
    ),
    mutant(
        "attempt charged for a transaction that did not begin",
        (f"{WORKER}/run/executor.py", "if delivery.entry_error is not None:", "if False:"),
    ),
    mutant(
        "handler called without a connection",
        (f"{WORKER}/run/handler_threads.py", "if delivery.enter() else not_entered(delivery)", ""),
    ),
    mutant(
        "transaction of a handler that begins with its first statement",
        (f"{WORKER}/parts/delivery.py", "statements(self.using).begin()", "pass"),
    ),
    mutant(
        "thread without a connection that is offered the next message",
        (f"{WORKER}/run/handler_threads.py", "self._resting.add(number)", "pass"),
    ),
    mutant(
        "idle connections that are kept",
        (f"{WORKER}/parts/connections.py", "close_all()\nreturn queue.get()", "return queue.get()"),
    ),
    mutant("failure told when its middleware has ended", (MIDDLEWARE, "self._on_error(self.raised[0])", "pass")),
    mutant(
        "failure that middleware hides",
        (MIDDLEWARE, "raise self.raised[-1]", "pass"),
    ),
    mutant(
        "errors logged whole against the settings",
        (f"{WORKER}/run/executor.py", "error if logs_whole_errors() else None", "error"),
    ),
    mutant(
        "failures logged without their context",
        (f"{WORKER}/parts/reporting.py", "cause.context.run(log_event,", "(lambda f, *a, **o: f(*a, **o))(log_event,"),
    ),
    mutant(
        "dead messages that Sentry gets twice",
        ("django_delayq/contrib/sentry.py", "if _is_reported.get():", "if False:"),
    ),
    mutant(
        "deliveries in the trace of their call",
        ("django_delayq/contrib/opentelemetry.py", "if not self._continue_trace:", "if False:"),
    ),
    mutant("drain that swallows errors", (f"{TESTING}/helper.py", "raise_errors or must_be_raised", "must_be_raised")),
    mutant(
        "drain that runs everything at its end",
        (f"{TESTING}/helper.py", "self._clock.move_to(moment or end)", "self._clock.move_to(end)"),
    ),
    mutant("drain whose clock runs", (f"{TESTING}/helper.py", "self._clock.stand_still()", "pass")),
    mutant(
        "test whose record has the clock of the database",
        (BASE_SQL, "if clock.of_tests is not None:", "if clock.of_tests is None and False:"),
    ),
    mutant(
        "functions on commit that are called again",
        (f"{TESTING}/transactions.py", "if not self._was_called:", "if True:"),
    ),
    mutant(
        "failed statement that spoils its transaction",
        (f"{TESTING}/transactions.py", "connection.savepoint_rollback(mark) raise", "raise"),
    ),
    mutant(
        "tests that use Redis",
        ("django_delayq/project/conf.py", "settings._replace(REDIS=None)", "settings"),
    ),
    mutant(
        "--once inside of a transaction",
        (
            "django_delayq/management/commands/run_delayq.py",
            "if once and connections[options.using].in_atomic_block",
            "if False",
        ),
    ),
    mutant("one more than the limit", (LIMITS, "self.running < self.limit.count", "self.running <= self.limit.count")),
    mutant("rate that nobody uses up", (LIMITS, "self.is_charged = True", "self.is_charged = False")),
    mutant("late deliveries that make up for their slots", (LIMITS, "if moment < self.now - PUNCTUAL:", "if False:")),
    mutant(
        "slots that are pushed away by each delay",
        (LIMITS, "moment = due if self.slot is None else max(due, self.slot)", "moment = due"),
    ),
    mutant(
        "rate that waits for a clock which was set back",
        (
            LIMITS,
            "self.full_at = min(self.full_at, self.now + LEAD +",
            "self.full_at = max(self.full_at, self.now + LEAD +",
        ),
    ),
    mutant(
        "places of deliveries that have ended",
        (
            LIMITS_SQL,
            "AND {IS_RUNNING} AND m.deliveries = p.delivery OFFSET 0",
            "AND m.deliveries = p.delivery OFFSET 0",
        ),
    ),
    mutant("places that nobody deletes", (ADMISSION, "if count.ended > count.running]", "if False]")),
    mutant(
        "process that freezes and keeps a limit",
        (LIMITS_SQL, "set_config('idle_in_transaction_session_timeout', '{LONGEST_PAUSE}', true)", "1"),
    ),
    mutant(
        "admission without a lock",
        (ADMISSION, "statements.lock(None if makes_others else names)", "pass"),
    ),
    mutant(
        "claims without Redis that take the locks of limits in any order",
        (ADMISSION, "None if makes_others else names", "names"),
    ),
    mutant(
        "message that is not claimed and uses up a rate",
        (ADMISSION, "counts.keys() and _is_due(row, tickets[row.id])]", "counts.keys()]"),
    ),
    mutant(
        "message under two limits that asks for one of them",
        (
            ADMISSION,
            "own = [usages[name] for name in limits[row.id]]",
            "own = [usages[name] for name in [*limits[row.id]][:1]]",
        ),
    ),
    mutant(
        "look that never goes on behind full limits",
        ("django_delayq/broker/database.py", "if seen.is_open else seen.spot", "if seen.is_open else begin"),
    ),
    mutant(
        "places that keep messages limited when all workers have died",
        (LIMITS_SQL, "IS_TAKEN if since is None else WAS_TAKEN", "IS_TAKEN"),
    ),
    mutant("query that finds the messages of full limits", (LOOKS_SQL, "AND {is_open(CLOSED)} AND", "AND")),
    mutant(
        "replaced message that is judged by a limit without its lock",
        (ADMISSION, "if limits[row.id].keys() <= counts.keys() and _is_due", "if _is_due"),
    ),
    mutant(
        "message that is due, is to run now and goes behind the others",
        (TRANSITIONS, "if is_at_once and message.due_at <= at:", "if False:"),
    ),
    mutant(
        "limit key without a limit",
        ("django_delayq/api/new_messages.py", "if handler.limit is None:", "if False:"),
    ),
    mutant("due times rounded down", ("django_delayq/core/clock.py", "return -(-us // 100)", "return us // 100 - 1")),
    mutant(
        "limited messages counted as overdue",
        ("django_delayq/inspector/snapshot.py", "if closed := admission.full_lately(using)", "if closed := set()"),
    ),
    mutant(
        "limited messages named as overdue",
        ("django_delayq/inspector/stats.py", "admission.full_lately(using)", "()"),
    ),
    mutant("long wait for a limit that no check tells", (DIAGNOSTICS, "_limited_for(line, now) > most", "False")),
    mutant("line without a worker that no check tells", (DIAGNOSTICS, "if _has_no_worker(line, workers)", "if False")),
    mutant("slot of a rate that forgets the burst", (LINES, "count.full_at - limit.tolerance", "count.full_at")),
]


# The code as it is: a test that fails with it notices nothing when it fails with a mutant.
CONTROL = mutant("nothing")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description="Run the tests on mutants.")
    names = [each.name for each in MUTANTS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of: {'; '.join(names)} (default: all)")
    wanted = parser.parse_args().names or names
    if unknown := set(wanted) - set(names):
        parser.error(f"there is no mutant {', '.join(sorted(unknown))}")
    survivors = 0
    print(f"{'mutant':<48}" + "".join(f"{name:>16}" for name in HARNESSES), flush=True)
    for each in [CONTROL, *(one for one in MUTANTS if one.name in wanted)]:
        with tempfile.TemporaryDirectory() as folder:
            tree = Path(folder) / "tree"
            shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "*.sqlite3*", "__pycache__"))
            apply(each, tree)
            verdicts = [run(tree, paths) for paths in HARNESSES.values()]
        print(f"{each.name:<48}" + "".join(f"{verdict.brief:>16}" for verdict in verdicts), flush=True)
        noticed = [test for verdict in verdicts for test in verdict.noticed]
        for test in noticed:
            print(f"    {test}", flush=True)
        if each is CONTROL and noticed:
            return 3
        survivors += not noticed and each is not CONTROL
    return int(survivors > 0)


def apply(mutant: Mutant, tree: Path) -> None:
    """Make the edits of a mutant in a copy of the code."""
    for edit in mutant.edits:
        file = tree / edit.file
        file.write_text(edit.of(file.read_text()))


class Verdict(NamedTuple):
    """The answer of one harness: the tests that noticed the mutant, at most one, and how many seconds it took."""

    noticed: list[str]
    seconds: float

    @property
    def brief(self) -> str:
        return f"{'caught' if self.noticed else '–'} {self.seconds:.0f} s"


def run(tree: Path, paths: list[str]) -> Verdict:
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", *paths]
    environment = {
        "DELAYQ_MODEL_EXAMPLES": "300",
        "DELAYQ_MODEL_QUICK": "1",
        **os.environ,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": str(tree),
    }
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    noticed = [line.split(" - ")[0][:150] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode and not noticed:
        raise SystemExit(f"pytest ended with {done.returncode} and named no test:\n{done.stdout}{done.stderr}")
    return Verdict(noticed, time.monotonic() - began)


if __name__ == "__main__":
    sys.exit(main())
