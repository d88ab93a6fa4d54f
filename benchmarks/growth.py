"""Measures what grows with the tables: ``python -m benchmarks.growth [--finished 1000000 --waiting 100000]``.

On servers of its own it measures the calls of a project and the commands on empty tables, then everything on large
ones: calls, commands, each page of the console as a browser asks for it, without the network, and the answers to bulk
actions on 10,000 messages. ``--names 1000``: so many queues and as many topics. Prints a table, and for each line that
misses its goal the slowest statement with its plan. ``--write-docs`` puts the table into the documentation.
"""

from __future__ import annotations

import argparse
import io
import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from . import tables
from .growth_rows import fill
from .measures import figure, spread
from .own_servers import own_servers

if TYPE_CHECKING:
    from django.test import Client

    from testproject.servers import PostgresServer

REPEAT = 3
# The messages of a bulk action, and those that are scheduled, cancelled and claimed one by one or together.
BULK, FEW = 10_000, 100
# Queues and topics where the rows are what grows.
NAMES = 8
# Milliseconds.
PAGE, ANSWER, COMMAND = 500.0, 1000.0, 1000.0
# A statement that takes longer is written to the server's log, with its plan.
PLANS = {"session_preload_libraries": "auto_explain", "auto_explain.log_min_duration": "200ms"}
WINDOWS = ("hour", "day", "week")
TABS = ("live", "all", "scheduled", "overdue", "running", "consumed", "dead", "cancelled", "expired")
SEARCHES = (
    "key:order-{dead}",
    "order-{dead}",
    "topic:grown.1",
    "queue:queue-1 state:scheduled",
    "topic:grown.* due:<1h",
    "error:Timeout",
    "error:Timeout state:dead",
    "attempts:>3",
    "state:dead finished:<24h",
    "payload.order.id:{dead}",
)


class Refused(Exception):
    """The console did not do what it was asked for."""


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to measure: ``act``, which gets what ``prepare`` has returned. Only ``act`` is timed."""

    name: str
    act: Callable[[Any], object]
    # Milliseconds; None: it has none.
    goal: float | None = None
    prepare: Callable[[], Any] = lambda: None
    # How many times ``act`` does it: the time is for each.
    times: int = 1
    # What takes long is measured once.
    turns: int = REPEAT


@dataclass(slots=True)
class Measured:
    """The milliseconds of a task in each turn, or why it was refused."""

    task: Task
    times: list[float] = field(default_factory=list)
    # Of these the CPU time of this process.
    python: list[float] = field(default_factory=list)
    refused: str = ""

    @property
    def is_met(self) -> bool:
        return not self.refused and (self.task.goal is None or statistics.median(self.times) <= self.task.goal)

    @property
    def figures(self) -> str:
        return self.refused or spread(self.times)

    @property
    def in_python(self) -> str:
        return figure(statistics.median(self.python)) if self.python else ""

    @property
    def verdict(self) -> str:
        if self.task.goal is None:
            return ""
        return "met" if self.is_met else "not met"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--finished", type=int, default=1_000_000)
    parser.add_argument("--waiting", type=int, default=100_000)
    parser.add_argument("--names", type=int, default=NAMES, help="queues, and as many topics")
    parser.add_argument("--only", default="", help="only what has this in its name")
    parser.add_argument("--write-docs", action="store_true", help="replace the table in the documentation")
    parser.add_argument("--machine", default=tables.cores(), help="what the documentation says of it")
    arguments = parser.parse_args()
    with own_servers("testproject.settings", **PLANS) as (_redis, postgres):
        _declare(arguments.names)
        empty = {task.name: measure(task) for task in calls() if arguments.only in task.name}
        began = time.monotonic()
        fill(arguments.finished, arguments.waiting, arguments.names)
        print(f"filled in {time.monotonic() - began:.0f} s", flush=True)
        rows = [["what", "on empty tables, ms", "on full ones, ms", "of it Python", "goal", ""]]
        for task in [*calls(), *pages(), *answers()]:
            if arguments.only in task.name:
                with _slow_statements(postgres) as slow:
                    found = measure(task)
                before = empty[task.name].figures if task.name in empty else ""
                rows.append([task.name, before, found.figures, found.in_python, _goal(task), found.verdict])
                print("  ".join(rows[-1]), flush=True)
                if not found.is_met:
                    print("\n".join(slow()), flush=True)
    title = f"{arguments.finished:,} finished and {arguments.waiting:,} waiting, {arguments.names:,} queues and topics"
    print(f"\n{title}\n\n{tables.as_text(rows)}")
    if arguments.write_docs:
        mark = "rows" if arguments.names == NAMES else "names"
        tables.write_docs(
            f"growth of {mark}", f"{title}; {tables.measured_on(arguments.machine)}\n\n{tables.as_rst(rows)}"
        )


def _goal(task: Task) -> str:
    return "" if task.goal is None else f"≤ {task.goal:,.0f}"


def _declare(names: int) -> None:
    """Have a handler for each topic, as the code of a project has."""
    from django_delayq import handler

    for name in ["bulk", *(f"grown.{number}" for number in range(names))]:
        handler(name)(lambda message: None)


def measure(task: Task) -> Measured:
    """Do a task once to warm up, then a few times; or only once. One that is refused is not tried again."""
    found = Measured(task)
    for turn in range(task.turns + (task.turns > 1)):
        prepared = task.prepare()
        began, used = time.perf_counter(), time.process_time()
        try:
            task.act(prepared)
        except Refused as error:
            found.refused = str(error)
            break
        if turn or task.turns == 1:
            found.times.append((time.perf_counter() - began) * 1000 / task.times)
            found.python.append((time.process_time() - used) * 1000 / task.times)
    return found


@contextmanager
def _slow_statements(postgres: PostgresServer) -> Iterator[Callable[[], list[str]]]:
    """Yield a function that returns what the server has logged of slow statements since: each with its plan."""
    seen = postgres.log.stat().st_size

    def logged() -> list[str]:
        with postgres.log.open(errors="replace") as log:
            log.seek(seen)
            entries = re.split(r"(?m)^(?=\S)", log.read())
        timeouts = sum("statement timeout" in entry for entry in entries)
        plans = [entry for entry in entries if "plan:" in entry]
        plans.sort(key=lambda plan: -float(re.findall(r"duration: ([\d.]+)", plan)[0]))
        return [f"statements ended after their time: {timeouts}", *plans[:1]]

    yield logged


# --- calls of the API, and commands -----------------------------------------------------------------------------------


def calls() -> Iterator[Task]:
    from django_delayq import cancel_message, schedule_message

    def some() -> list[Any]:
        return [schedule_message("bulk", delay="10m") for _ in range(FEW)]

    yield Task("schedule one", lambda _: some(), times=FEW)
    yield Task("cancel one", lambda made: [cancel_message(one) for one in made], prepare=some, times=FEW)
    yield Task(f"claim {FEW}", _claim, ANSWER, lambda: [schedule_message("bulk").pk for _ in range(FEW)])
    yield from _bulk_calls()
    for name in ("delayq_check", "delayq_stats"):
        yield Task(name, partial(_command, name), COMMAND)


def _claim(ids: list[int]) -> None:
    from django_delayq.record import transitions
    from django_delayq.record.sql.rows import Ticket

    claimed = transitions.claim("default", [Ticket(pk) for pk in ids], {"bulk": 60.0}, "bench", ahead=1.0)
    if len(claimed) != FEW:
        raise Refused(f"{len(claimed)} of {FEW} claimed")


def _bulk_calls() -> Iterator[Task]:
    """Yield the calls that change many messages; each gets new ones."""
    from django_delayq import cancel_message, requeue_message, reschedule_message, run_message, schedule_messages

    def many() -> Any:
        made = schedule_messages({"topic": "bulk", "delay": "10m"} for _ in range(BULK))
        return _messages().filter(pk__gte=made[0].pk, pk__lte=made[-1].pk, topic="bulk")

    def cancelled() -> Any:
        found = many()
        cancel_message(found)
        return found

    for name, act, prepare in (
        ("schedule_messages()", lambda _: many(), lambda: None),
        ("cancel_message()", cancel_message, many),
        ("reschedule_message()", lambda some: reschedule_message(some, delay="1h"), many),
        ("run_message()", run_message, many),
        ("requeue_message()", lambda some: requeue_message(some, delay="1h"), cancelled),
    ):
        yield Task(f"{name} of {BULK:,}", act, ANSWER, prepare, turns=1)


def _messages() -> Any:
    from django_delayq.models import Message

    return Message.objects


def _command(name: str, _prepared: None) -> None:
    from django.core.management import CommandError, call_command

    # A check that finds something exits with 1.
    with suppress(CommandError, SystemExit):
        call_command(name, stdout=io.StringIO(), stderr=io.StringIO())


# --- the console ------------------------------------------------------------------------------------------------------


def pages() -> Iterator[Task]:
    from django.urls import reverse

    dead = _messages().filter(state="dead", key__isnull=False).order_by("-finished_at").values_list("pk", flat=True)[0]
    client = _client()
    for name, url, query in _addresses(dead):
        of = {"change": [dead], "queue_detail": ["queue-1"], "topics_detail": ["grown.1"]}
        args = next((args for ending, args in of.items() if url.endswith(ending)), [])
        address = f"{reverse(url, args=args)}?{urlencode(query)}"
        yield Task(f"page: {name}", partial(_page, client, address), PAGE, _forget)


def _page(client: Client, address: str, _prepared: None) -> None:
    _check(client.get(address), 200)


def _addresses(dead: int) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield the name of each page, the name of its address, and its query."""
    from django.contrib import admin

    messages = "admin:delayq_message_changelist"
    for tab in TABS:
        yield f"list, {tab}", messages, {"state": tab}
    yield "list, page 100", messages, {"p": "100"}
    for search in SEARCHES:
        yield f"list, {search.format(dead='…')}", messages, {"q": search.format(dead=dead)}
    yield "a message", "admin:delayq_message_change", {}
    dashboard = "delayq_console_dashboard"
    for window in WINDOWS:
        yield f"dashboard, {window}", f"admin:{dashboard}_changelist", {"window": window, "past": window}
    for window in ("hour", "day", "week", "month"):
        yield f"topics, {window}", "admin:delayq_console_topics_changelist", {"window": window}
        yield f"a topic, {window}", "admin:delayq_console_topics_detail", {"window": window}
        yield f"a queue, {window}", "admin:delayq_queue_detail", {"window": window}
    for model in admin.site._registry:
        name = f"{model._meta.app_label}_{model._meta.model_name}"
        if model._meta.app_label.startswith("delayq") and name not in ("delayq_message", dashboard):
            yield str(model._meta.verbose_name_plural), f"admin:{name}_changelist", {}


def answers() -> Iterator[Task]:
    """Yield the question and the answer of each bulk action on 10,000 messages."""
    from django_delayq import cancel_message, schedule_messages
    from django_delayq.console.admin.action_table import CONSOLE_ACTIONS

    for queue in ("bulk", "over"):
        schedule_messages({"topic": "bulk", "queue": queue, "delay": "1d"} for _ in range(BULK))
    cancel_message(_messages().filter(queue="over"))
    client = _client()
    for name in CONSOLE_ACTIONS:
        search = f"queue:{'over' if name in ('requeue', 'purge') else 'bulk'}"
        ask = partial(_question, client, name, {"search": search})
        yield Task(f"{name} {BULK:,}: question", ask, ANSWER, _forget)
        asked = partial(_asked, client, name, {"search": search, "longer": "1"})
        yield Task(f"{name} {BULK:,}: answer", partial(_answer, client, name), ANSWER, asked)


def _question(client: Client, action: str, given: dict[str, str], _prepared: None = None) -> Any:
    """Ask to act on all that a search finds."""
    shown = client.post(_action_url(action), given)
    _check(shown, 200)
    return shown


def _asked(client: Client, action: str, given: dict[str, str]) -> dict[str, str]:
    """Ask to act on all that a search finds, and return the fields of the answer."""
    from django_delayq.console.admin.action_pages import Question

    shown = _question(client, action, given)
    hidden = dict(re.findall(r'name="(token|found)" value="([^"]+)"', shown.content.decode()))
    if "token" not in hidden:
        raise Refused("the messages could not be counted")
    typed = str(Question.read(hidden["token"]).number)
    return {**hidden, "typed": typed, "reason": "the server is back", "delay": "1h", "priority": "1"}


def _answer(client: Client, action: str, fields: dict[str, str]) -> None:
    """Confirm the question, and check that an operation on the messages has been queued."""
    from django_delayq.console.models import Operation

    before = Operation.objects.count()
    answer = client.post(_action_url(action), fields)
    if answer.status_code == 200:
        raise Refused("the question was asked again")
    _check(answer, 302)
    if Operation.objects.count() == before:
        raise Refused("no operation was queued")


def _action_url(action: str) -> str:
    from django.urls import reverse

    return reverse("admin:delayq_message_action", args=[action])


def _forget() -> None:
    """Empty the caches of the pages."""
    from django_delayq.console.admin import panels

    panels.forget()


def _check(answer: Any, expected: int) -> None:
    if answer.status_code != expected:
        raise Refused(f"status {answer.status_code}, not {expected}")


def _client() -> Client:
    from django.contrib.auth import get_user_model
    from django.test import Client

    users = get_user_model().objects
    client = Client()
    client.force_login(users.filter(username="admin").first() or users.create_superuser("admin"))
    return client


if __name__ == "__main__":
    main()
