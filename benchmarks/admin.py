"""Measures the admin on a large table: ``python -m benchmarks.admin [--rows 10000000] [--json FILE]``.

It starts PostgreSQL and Redis of its own, fills the tables in a realistic mix, and asks for each page as a browser
would, without the network. Of the bulk actions it measures the question and the answer: first on the table that nobody
has analyzed yet, and once more after ANALYZE. With ``--database URL`` the rows stay in a database of yours, and later
runs find them there, analyzed.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from testproject.servers import PostgresServer, RedisServer

if TYPE_CHECKING:
    from django.test import Client

REPEAT = 7
# Milliseconds.
LIST, MESSAGE, DASHBOARD, ANSWER, RELEASE = 200.0, 20.0, 300.0, 500.0, 50.0
SERVER: dict[str, Any] = {
    "shared_buffers": "1GB",
    "max_wal_size": "8GB",
    "maintenance_work_mem": "512MB",
    # The measurement says when the table is analyzed.
    "autovacuum": "off",
}
TABS = ("live", "all", "scheduled", "overdue", "running", "consumed", "dead", "cancelled", "expired")
SEARCHES = (
    "key:order-{dead}",
    "order-{dead}",
    "topic:mail.welcome",
    "queue:mails state:scheduled",
    "topic:mail.* due:<1h",
    "error:Timeout",
    "error:Timeout state:dead",
    "attempts:>3",
    "state:dead finished:<24h",
    "state:consumed finished:<24h",
    "payload.order.id:{dead}",
)
# Messages that are cancelled, to be requeued; and those that a worker claims without getting the answer.
CANCELLED, ORPHANS = 467, 20


class Refused(Exception):
    """The console did not do what it was asked for."""


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to measure: ``act``, which gets what ``prepare`` has returned. Only ``act`` is timed."""

    name: str
    act: Callable[[Any], object]
    prepare: Callable[[], Any]
    target: float | None = None


@dataclass(slots=True)
class Measured:
    """Times of one task in ms: in all, in Python, and in its slowest statement."""

    name: str
    target: float | None
    times: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    statements: int = 0
    slowest: float = 0.0
    slowest_sql: str = ""
    refused: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    @property
    def verdict(self) -> str:
        if self.refused:
            return f"REFUSED: {self.refused}"
        if self.target is None:
            return ""
        return "ok" if self.median <= self.target else "slow"

    def line(self) -> str:
        target = "" if self.target is None else f"{self.target:.0f}"
        numbers = f"{self.median:8.1f} {max(self.times):8.1f} {statistics.median(self.cpu):8.1f}"
        return f"{self.name:<44} {numbers} {self.statements:5d} {self.slowest:9.1f} {target:>7} {self.verdict}"


HEAD = f"{'page':<44} {'median':>8} {'max':>8} {'CPU':>8} {'stmts':>5} {'slowest':>9} {'target':>7}   (ms)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--database", help="the URL of a PostgreSQL database to use, and to fill if it is empty")
    parser.add_argument("--only", default="", help="only the pages whose name contains this")
    parser.add_argument("--json", type=Path, help="a file for the numbers")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer())
        database = arguments.database or stack.enter_context(PostgresServer(**SERVER)).url
        os.environ.update(
            DJANGO_SETTINGS_MODULE="testproject.settings", REDIS_URL=redis.url, DATABASE_URL=database, DEBUG="0"
        )
        import django

        django.setup()
        logging.getLogger("django_delayq.audit").setLevel(logging.WARNING)
        before = os.getloadavg()
        print(f"load average {before[0]:.1f} on {os.cpu_count()} cores", flush=True)
        found = []
        for task in tasks(arguments.rows):
            if arguments.only in task.name:
                found.append(measure(task))
                print(found[-1].line(), flush=True)
        after = os.getloadavg()
        slow = ", ".join(measured.name for measured in found if measured.verdict not in ("", "ok"))
        print(f"\nload average {after[0]:.1f}; slow: {slow or 'none'}")
    if arguments.json:
        report = {"rows": arguments.rows, "load": [before[0], after[0]], "pages": [asdict(m) for m in found]}
        arguments.json.write_text(json.dumps(report, indent=1))


# --- the tasks --------------------------------------------------------------------------------------------------------


def tasks(rows: int) -> Iterator[Task]:
    """Fill the table if it is empty, and yield what to measure on it."""
    is_new = prepare(rows)
    cancel_some()
    print(f"\n{HEAD}", flush=True)
    if is_new:
        yield from actions(", never analyzed")
        analyze()
    yield from pages()
    yield from actions()


def pages() -> Iterator[Task]:
    from django.urls import reverse

    from django_delayq.models import Message

    dead = Message.objects.filter(state="dead", key__isnull=False).order_by("-finished_at").values_list("pk", flat=True)
    known = dead[0]
    messages = reverse("admin:delayq_message_changelist")

    def listed(**query: Any) -> str:
        return f"{messages}?{urlencode(query)}" if query else messages

    yield page("list", listed(), LIST)
    yield page("list, a moment later", listed(), LIST, cold=False)
    for tab in TABS:
        yield page(f"list, tab {tab}", listed(state=tab), LIST)
    yield page("list, page 2", listed(p=2), LIST)
    yield page("list, page 100", listed(p=100), LIST)
    yield page("list, an id", listed(q=known), LIST)
    for search in SEARCHES:
        text = search.format(dead=known)
        yield page(f"list, {text}", listed(q=text), LIST)
    yield page("message", reverse("admin:delayq_message_change", args=[known]), MESSAGE)
    yield from _dashboards()
    for name in ("deadletters", "queue", "worker", "health", "operation", "auditevent"):
        app = "delayq" if name in ("queue", "worker") else "delayq_console"
        yield page(name, reverse(f"admin:{app}_{name}_changelist"))
    yield from _requeues("all dead", "state:dead")


def _dashboards() -> Iterator[Task]:
    from django.urls import reverse

    url = reverse("admin:delayq_console_dashboard_changelist")
    for window in ("hour", "day", "week"):
        yield page(f"dashboard, {window}", f"{url}?window={window}&past={window}", DASHBOARD)
    yield page("dashboard, a moment later", url, DASHBOARD, cold=False)


def page(name: str, url: str, target: float | None = None, *, cold: bool = True) -> Task:
    """Return the task to ask for a page. ``cold``: the caches are empty."""
    from django_delayq.console.admin import panels

    client = _client()

    def ask(_prepared: Any = None) -> None:
        _check(client.get(url), 200)

    return Task(name, ask, panels.forget if cold else ask, target)


def actions(note: str = "") -> Iterator[Task]:
    """Yield the question and the answer of bulk actions, and what a worker does that lost the answer to a claim."""
    yield from _requeues(f"the dead of one error{note}", "state:dead error:=KeyError")
    yield from _requeues(f"{CANCELLED} just cancelled{note}", "state:cancelled finished:<1h")
    yield Task(f"release {ORPHANS} orphaned claims{note}", _release, _claim, RELEASE)


def _requeues(name: str, search: str) -> Iterator[Task]:
    from django_delayq.console.admin import panels

    client = _client()
    question = partial(_question, client, search)
    yield Task(f"requeue {name}: question", lambda _prepared: question(), panels.forget)
    yield Task(f"requeue {name}: answer", partial(_answer, client), question, ANSWER)


def _question(client: Client, search: str) -> dict[str, str]:
    """Ask to requeue all that a search finds, and return the fields of the answer."""
    from django_delayq.console.admin.action_pages import Question

    shown = client.post(_action_url(), {"search": search})
    _check(shown, 200)
    token = re.search(r'name="token" value="([^"]+)"', shown.content.decode())
    if token is None:
        raise Refused("the messages could not be counted")
    return {"token": token[1], "typed": str(Question.read(token[1]).number), "reason": "the server is back"}


def _answer(client: Client, fields: dict[str, str]) -> None:
    """Confirm the question, and check that an operation on the messages has been queued."""
    from django_delayq.console.models import Operation

    before = Operation.objects.count()
    answer = client.post(_action_url(), fields)
    if answer.status_code == 200:
        raise Refused("the question was asked again")
    _check(answer, 302)
    if Operation.objects.count() == before:
        raise Refused("no operation was queued")


def _action_url() -> str:
    from django.urls import reverse

    return reverse("admin:delayq_message_action", args=["requeue"])


def _claim() -> list[int]:
    """Claim messages, as a worker does that loses the answer."""
    from django_delayq import schedule_message
    from django_delayq.record import transitions
    from django_delayq.record.sql.rows import Ticket

    ids = [schedule_message("mail.welcome").pk for _ in range(ORPHANS)]
    claimed = transitions.claim("default", [Ticket(pk) for pk in ids], {"mail.welcome": 60.0}, "lost", ahead=1.0)
    return [row.id for row in claimed]


def _release(ids: Sequence[int]) -> None:
    from datetime import timedelta

    from django_delayq.record import crashes, transitions

    since = transitions.now("default") - timedelta(minutes=1)
    if len(crashes.release_orphaned("default", ids, "lost", since=since, actor="worker:lost")) != ORPHANS:
        raise Refused("not all claims were released")


def measure(task: Task) -> Measured:
    """Do a task once to warm up, then a few times. One that is refused is not tried again."""
    from django.db import connection

    found = Measured(task.name, task.target)
    for turn in range(REPEAT + 1):
        statements = _Statements()
        began, cpu = time.perf_counter(), time.process_time()
        try:
            prepared = task.prepare()
            began, cpu = time.perf_counter(), time.process_time()
            with connection.execute_wrapper(statements):
                task.act(prepared)
        except Refused as error:
            found.refused = str(error)
        if turn or found.refused:
            found.times.append((time.perf_counter() - began) * 1000)
            found.cpu.append((time.process_time() - cpu) * 1000)
            found.statements = len(statements.all)
            found.slowest, found.slowest_sql = max((found.slowest, found.slowest_sql), *statements.all)
        if found.refused:
            break
    return found


class _Statements:
    """Times each statement, in ms."""

    def __init__(self) -> None:
        self.all: list[tuple[float, str]] = []

    def __call__(self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        began = time.perf_counter()
        try:
            return execute(sql, params, many, context)
        finally:
            self.all.append(((time.perf_counter() - began) * 1000, f"{sql} {params}"))


def _check(answer: Any, expected: int) -> None:
    if answer.status_code != expected:
        raise RuntimeError(f"{answer.request['PATH_INFO']}: status {answer.status_code}, not {expected}")


def _client() -> Client:
    from django.contrib.auth import get_user_model
    from django.test import Client

    users = get_user_model().objects
    user = users.filter(username="admin").first() or users.create_superuser("admin")
    client = Client()
    client.force_login(user)
    return client


# --- the table --------------------------------------------------------------------------------------------------------


def prepare(rows: int) -> bool:
    """Migrate, and fill what is empty. Tell whether it was empty: then nobody has analyzed it yet."""
    from django.core.management import call_command

    from django_delayq.models import Message

    call_command("migrate", verbosity=0)
    is_new = not Message.objects.exists()
    if is_new:
        began = time.monotonic()
        fill(rows)
        print(f"{rows:,} messages built in {time.monotonic() - began:.0f} s", flush=True)
    show_workers()
    return is_new


def fill(rows: int) -> None:
    """Write the messages: two fifths were due in the past, in the order of their ids, the others in the next week."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("SELECT setseed(0.5)")
        with _without_indexes(cursor):
            cursor.execute(_MESSAGES.format(past=int(rows * 0.4), rows=rows))
        for statement in (_LOG, _MINUTES, _HOURS):
            cursor.execute(statement)
        act()


def analyze() -> None:
    """Do what the server would do by itself, sooner or later."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("VACUUM (ANALYZE) delayq_message")
        cursor.execute("ANALYZE")


def cancel_some() -> None:
    """Cancel the messages of one topic that are due next, as somebody does who takes that back at once."""
    from django_delayq import cancel_message
    from django_delayq.models import Message

    rows = Message.objects.filter(state="scheduled", topic="cart.forget").order_by("-due_at")
    cancel_message(Message.objects.filter(pk__in=list(rows.values_list("pk", flat=True)[:CANCELLED])))


@contextmanager
def _without_indexes(cursor: Any) -> Iterator[None]:
    """Build the indexes at the end: that takes half the time."""
    cursor.execute(
        """
        SELECT i.indexrelid::regclass, pg_get_indexdef(i.indexrelid) FROM pg_index i
         WHERE i.indrelid = 'delayq_message'::regclass AND NOT i.indisprimary
        """
    )
    indexes: Sequence[tuple[str, str]] = cursor.fetchall()
    for name, _definition in indexes:
        cursor.execute(f"DROP INDEX {name}")
    yield
    for _name, definition in indexes:
        cursor.execute(definition)


_QUEUE = "(ARRAY['default', 'mails', 'reports'])[1 + n % 3]"
_TOPIC = """(ARRAY['mail.welcome', 'mail.reminder', 'order.expire', 'order.ship', 'invoice.send', 'report.build',
                   'session.end', 'cart.forget'])[1 + (n / 3) % 8]"""
_ERROR = """(ARRAY['TimeoutError', 'ConnectionError: refused', 'ValueError: invalid literal', 'KeyError',
                   'HTTPError: 503', 'crashed'])[1 + n % 6]"""

_MESSAGES = f"""
INSERT INTO delayq_message (topic, queue, key, priority, payload, headers, due_at, created_at, state, finished_at,
    attempts, deliveries, reported, excused, moves, leased_until, worker, cancel_requested, error,
    created_by, claimed_at, claimed_by, consumed_by)
SELECT {_TOPIC}, {_QUEUE}, CASE WHEN n % 5 = 0 OR state = 'dead' THEN 'order-' || n END, 0,
       jsonb_build_object('order', jsonb_build_object('id', n, 'total', n % 1000), 'customer', md5(n::text)),
       '{{{{}}}}', due, least(due, now()) - interval '1 day', state,
       CASE WHEN state IN ('consumed', 'dead', 'cancelled', 'expired') THEN due + chance * interval '20 s' END,
       failed, delivered, failed + (state = 'consumed')::int, 0, 1 + 2 * delivered,
       CASE state WHEN 'running' THEN now() + interval '1 day' END,
       CASE state WHEN 'running' THEN 'worker-' || n % 4 ELSE '' END, false,
       CASE WHEN failed > 0 THEN {_ERROR} ELSE '' END,
       CASE WHEN usual THEN 'process:web/1' END, CASE WHEN usual AND delivered > 0 THEN due + interval '1 ms' END,
       CASE WHEN usual AND delivered > 0 THEN 'worker-1' END,
       CASE WHEN usual AND state = 'consumed' THEN 'worker:worker-1' END
  FROM (SELECT n, chance, state, due, failed,
               -- The row of a message is the log of its usual life.
               state IN ('scheduled', 'running', 'consumed') AND failed = 0 AS usual,
               CASE WHEN state IN ('consumed', 'dead', 'running') THEN greatest(failed + (state <> 'dead')::int, 1)
                    ELSE failed END AS delivered
          FROM (SELECT n, chance, state, due,
                       CASE WHEN state = 'dead' THEN 5 WHEN another < 0.002 THEN 1 ELSE 0 END AS failed
                  FROM (SELECT n, chance, random() AS another,
                               CASE WHEN n > {{past}} THEN 'scheduled'
                                    WHEN chance < 0.0025 THEN 'scheduled'
                                    WHEN chance < 0.0026 THEN 'running'
                                    WHEN chance < 0.0400 THEN 'dead'
                                    WHEN chance < 0.0450 THEN 'cancelled'
                                    WHEN chance < 0.0475 THEN 'expired'
                                    ELSE 'consumed' END AS state,
                               CASE WHEN n > {{past}} THEN now() + interval '1 h' + random() * interval '7 days'
                                    WHEN chance < 0.0026 THEN now() - random() * interval '2 h' - interval '60 s'
                                    ELSE now() - interval '30 days' * (1.0001 - n::float / {{past}})
                                         - random() * interval '60 s' END AS due
                          FROM (SELECT n, random() AS chance FROM generate_series(1, {{rows}}) n) numbers) rolled
               ) told
       ) counted
"""

_LOG = """
INSERT INTO delayq_log (message_id, number, at, from_state, to_state, delivery, due_at, ready_at, actor, reason,
    error, traceback)
SELECT m.id, step, CASE step WHEN 1 THEN created_at ELSE due_at + step * interval '1 s' END,
       CASE WHEN step = 1 THEN NULL WHEN step % 2 = 0 THEN 'scheduled' ELSE 'running' END,
       CASE WHEN step = moves THEN state WHEN step % 2 = 0 THEN 'running' ELSE 'scheduled' END,
       step / 2, due_at, NULL, 'worker:worker-1', '', CASE WHEN step % 2 = 1 AND step > 1 THEN error ELSE '' END, ''
  FROM (SELECT * FROM delayq_message WHERE created_by IS NULL ORDER BY finished_at DESC LIMIT 200000) m,
       generate_series(1, moves) step
"""

_ROLLUP = f"""
INSERT INTO delayq_rollup (seconds, at, queue, topic, consumed, retried, dead, expired, late_1, late_2, late_5, late_10,
    late_20, late_50, late_100, late_200, late_500, late_1000, late_2000, late_5000, late_10000, late_30000, late_60000,
    late_600000, late_more)
SELECT {{seconds}}, date_trunc('hour', now()) - step * interval '{{seconds}} s', {_QUEUE}, {_TOPIC},
       4 * {{seconds}} / 60, 1, 1, 0, 2, 3, 5, 20, 10, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0
  FROM generate_series({{first}}, {{last}}) step, generate_series(0, 23) n
"""
_MINUTES = _ROLLUP.format(seconds=60, first=-60, last=2880)
_HOURS = _ROLLUP.format(seconds=3600, first=49, last=720)


def act() -> None:
    """Write operations, and the audit of what people did."""
    from django_delayq.console.models import AuditEvent, Operation

    common = {"action": "requeue", "reason": "the server is back"}
    Operation.objects.bulk_create(
        [Operation(described="state is dead", started_by="user:anna", state="done", **common) for _ in range(1000)]
    )
    AuditEvent.objects.bulk_create(
        [AuditEvent(actor="user:anna", target="state is dead", **common) for _ in range(20_000)], batch_size=5000
    )


def show_workers() -> None:
    """Write the rows of four worker processes that are alive now."""
    from datetime import timedelta

    from django.utils import timezone

    from django_delayq.models import Worker

    Worker.objects.all().delete()
    now = timezone.now()
    seen = now + timedelta(minutes=1)
    Worker.objects.bulk_create(
        Worker(name=f"worker-{n}", host="web", pid=n, threads=50, started_at=now, seen_at=seen) for n in range(4)
    )


if __name__ == "__main__":
    main()
