"""The examples of the how-to guides and of the reference do what the pages say."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import re
import sys
import threading
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import django
import psycopg.conninfo
import pytest
from django.contrib.auth.models import Group
from django.db import connection
from django.utils import timezone, translation

from django_delayq import (
    Verdict,
    cancel_message,
    extensions,
    handler,
    run_message,
    schedule_message,
    schedule_messages,
)
from django_delayq.core import actors
from django_delayq.http import views
from django_delayq.models import Message, Queue, Worker
from django_delayq.project import pulled, registry
from django_delayq.record import admission
from django_delayq.recurring import declarations
from django_delayq.signals import message_delivered
from testproject.shop.models import Order
from tests.support.commands import run
from tests.support.receivers import receiving
from tests.support.record_of import log_of

from .blocks import DOCS, blocks, text_of
from .conftest import Run, deliver
from .project import Project

redis_forgets = pytest.mark.usefixtures("redis_client")
pytestmark = [pytest.mark.django_db(transaction=True), redis_forgets]


def state(topic: str) -> str:
    return Message.objects.filter(topic=topic).latest("pk").state


def new_order() -> Order:
    return Order.objects.create(email="anna@example.com")


# --- first page -------------------------------------------------------------------------------------------------------


def test_the_first_page_closes_an_order(run_page: Run) -> None:
    names = run_page("index")
    order = names["place_order"]("anna@example.com")
    message = Message.objects.get(topic="orders.close")
    assert message.due_at - message.created_at == pytest.approx(timedelta(minutes=15), abs=timedelta(seconds=1))
    assert run_message(message)
    deliver()
    order.refresh_from_db()
    assert order.status == "closed"


# --- a worker in your own process -------------------------------------------------------------------------------------


def test_the_guide_to_embedded_workers_starts_and_ends_them(run_page: Run) -> None:
    names = run_page("howto/embedded")
    host = SimpleNamespace()
    names["post_worker_init"](host)
    assert host.delayq.is_alive
    names["worker_exit"](None, host)
    assert not host.delayq.is_alive
    sent: list[str] = []

    async def receive() -> dict[str, str]:
        if sent:
            assert "delayq-embedded" in {thread.name for thread in threading.enumerate()}
        return {"type": "lifespan.shutdown" if sent else "lifespan.startup"}

    async def send(event: dict[str, str]) -> None:
        sent.append(event["type"])

    asyncio.run(names["application"]({"type": "lifespan"}, receive, send))
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert not Worker.objects.exists()


# --- batches ----------------------------------------------------------------------------------------------------------


def test_the_handlers_of_the_guide_to_batches_do_what_it_says(run_page: Run) -> None:
    names = run_page("howto/batches")
    orders = [new_order() for _ in range(4)]
    for order in orders[:3]:
        names["close_many"].schedule({"order": order.pk})
    for number in ("none", orders[3].pk):
        names["close_each"].schedule({"order": number})
    for payload in ({"text": "…"}, {}, {"text": "…", "locked": True}):
        names["index"].schedule({"order": 5, **payload})
    deliver()
    assert {Order.objects.get(pk=order.pk).status for order in orders} == {"closed"}
    states = Message.objects.filter(topic="search.index").order_by("pk").values_list("state", flat=True)
    assert list(states) == ["consumed", "dead", "scheduled"]
    states = Message.objects.filter(topic="orders.close_each").order_by("pk").values_list("state", flat=True)
    assert list(states) == ["scheduled", "consumed"]
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(names["Indexing"]).run(result)
    assert (result.testsRun, result.failures, result.errors) == (1, [], [])


# --- programs that pull -----------------------------------------------------------------------------------------------


def test_the_program_of_the_guide_takes_and_answers(run_page: Run, settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "PULL_QUEUES": ["exports"]}
    for payload in ({"row": 7}, {}, {"row": -1}):
        schedule_message("exports.row", payload, queue="exports")
    assert len(run_page("howto/pull")["done"]) == 1
    assert list(Message.objects.order_by("pk").values_list("state", flat=True)) == ["consumed", "dead", "scheduled"]


def test_the_addresses_of_the_guide_to_http_are_there(run_page: Run) -> None:
    names = run_page("howto/http")
    for address in ("api/shop/emails", "version", "info", "metrics"):
        assert names["urlpatterns"][0].resolve(address).func is views.door


def test_two_lines_declare_what_programs_pull(run_page: Run, settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, **run_page("howto/from-lmstfy")["DELAYQ"]}
    assert pulled.terms("shop.orders") is not None
    assert pulled.terms("orders") is None


# --- limits -----------------------------------------------------------------------------------------------------------


def test_the_handlers_of_the_guide_to_limits_have_them(run_page: Run, settings: Any) -> None:
    names = run_page("howto/limits")
    settings.DELAYQ = {**settings.DELAYQ, **names["DELAYQ"]}
    report = names["order_report"]("anna")
    assert report.limit_key == "customer-anna"
    found = {topic: admission.limits_of(topic, "emails", "k") for topic in ("bank.transfer", "mails.send")}
    assert [str(limit) for limits in found.values() for limit in limits.values()] == [
        "5 at once",
        "5 at once; one in 600 ms, burst 10",
        "one in 600 ms, burst 10",
        "5 at once; one in 600 ms, burst 10",
    ]
    both = admission.limits_of("invoices.send", "invoices", "7")
    assert {name: str(limit) for name, limit in both.items()} == {
        "topic invoices.send key 7": "2 at once",
        "queue invoices": "one in 600 ms, burst 1",
    }
    invoice = names["send_invoice"].schedule({"customer": 7})
    assert (invoice.queue, invoice.limit_key) == ("invoices", "7")
    assert cancel_message(invoice)
    assert schedule_message("reports.build", {"customer": 7}).limit_key == "7"
    schedule_message("reports.build", {"customer": 7})
    deliver()
    assert Message.objects.filter(state="consumed").count() == 3


# --- handlers that may run twice --------------------------------------------------------------------------------------


class BankBusy(Exception):
    retry_after = 60


class BankRefused(Exception):
    pass


def charge(order: str, *, idempotency_key: str) -> None:
    """The bank of the guide: what it answers depends on the order."""
    if order == "busy":
        raise BankBusy
    if order == "refused":
        raise BankRefused("no money")
    assert idempotency_key.startswith("charge-")


def send_invoice(order: int) -> None:
    raise FileNotFoundError


def fetch_page(page: int) -> list[str]:
    """Read a page of the bank: it is busy once, at the third page, and the fourth is the last."""
    if page == 3 and page not in _busy:
        _busy.add(page)
        raise BankBusy
    return ["row"] if page <= 4 else []


_busy: set[int] = set()


def test_the_handlers_of_the_guide_do_what_it_says(run_page: Run) -> None:
    bank = {
        "BankBusy": BankBusy,
        "BankRefused": BankRefused,
        "charge": charge,
        "fetch_page": fetch_page,
        "send_invoice": send_invoice,
    }
    names = run_page("howto/handlers", {"bank": bank})
    order = new_order()
    names["order_paid"](order)
    (invoice,) = names["remind_all"]([order])
    schedule_message("orders.close", {"order": order.pk})
    charged = {order: schedule_message("payments.charge", {"order": order}) for order in ("fine", "busy", "refused")}
    schedule_message("reports.build", {"pages": 2})
    if connection.vendor == "postgresql":
        schedule_message("orders.count", {"tenant": "anna"})
    imported = schedule_message("bank.import", {"page": 1})
    reserved = names["reserve"].schedule({"order": 5}, retry=False)
    deliver()
    (gave_up,) = Message.objects.filter(topic="orders.gave_up")
    assert gave_up.state == "consumed"
    assert gave_up.payload is not None
    assert gave_up.payload["id"] == reserved.pk
    order.refresh_from_db()
    assert order.status == "closed"
    assert Message.objects.get(topic="orders.tell_closed").payload == {"order": order.pk}
    states = {name: Message.objects.get(pk=message.pk).state for name, message in charged.items()}
    assert states == {"fine": "consumed", "busy": "scheduled", "refused": "dead"}
    assert "the bank refused: no money" in log_of(charged["refused"])[-1].error
    assert state("reports.build") == "consumed"
    if connection.vendor == "postgresql":
        assert Message.objects.get(topic="orders.count").result == 1
    assert Message.objects.get(pk=imported.pk).payload == {"page": 3}
    assert run_message(imported)
    deliver()
    assert state("bank.import") == "consumed"
    assert Message.objects.get(topic="invoices.send", key=f"order-{order.pk}").state == "scheduled"
    assert Message.objects.get(pk=invoice.pk).state == "dead"
    with asked_to_stop():
        schedule_message("reports.build", {"pages": 2})
        deliver()
    assert state("reports.build") == "cancelled"


@contextmanager
def asked_to_stop() -> Iterator[None]:
    """Request a cancel of each message whose handler begins."""

    def ask(message_id: int, **facts: Any) -> None:
        assert cancel_message(message_id).verdict == Verdict.REQUESTED

    with receiving(ask, message_delivered):
        yield


# --- Django's tasks ---------------------------------------------------------------------------------------------------


def test_the_tasks_of_the_guide_do_what_it_says(run_page: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    if django.VERSION < (6, 0):
        monkeypatch.setitem(sys.modules, "django.tasks", importlib.import_module("django_tasks"))
    names = run_page("howto/tasks", __name__="orders.tasks")
    total, close = names["total"], names["close"]
    first, later = names["place"](7)
    deliver()
    assert names["look"](first) == {"order": 7, "total": 49}
    assert names["postpone"](later)
    assert names["stop"](later)
    assert close.get_result(later).errors[0].traceback.endswith("TaskCancelled: the customer has paid\n")
    assert names["repeat"](later)
    assert run_message(later)
    deliver()
    assert close.get_result(later).attempts == 1
    once, again = (names["total_once"].enqueue(8) for _ in range(2))
    now, told = names["total_now"](8), names["tell_customer"].enqueue(108)
    assert again.id == once.id
    keys = {str(row.pk): (row.key, row.limit_key) for row in Message.objects.filter(pk__in=[once.id, now.id, told.id])}
    assert keys == {once.id: ("total-8", None), now.id: ("now-8", None), told.id: (None, "customer-8")}
    plain, indexed = names["total_for"](8, "acme"), names["changed"](8)
    deliver()
    assert indexed.wait(0).return_value is None
    assert total.get_result(plain).return_value == {"order": 8, "total": 40}
    once.refresh()
    assert once.return_value == 40


# --- do something often -----------------------------------------------------------------------------------------------


def follow(project: Project, page: str) -> None:
    """Write the files of a page into a project."""
    for block in blocks(DOCS / f"{page}.rst"):
        if block.language == "python" and block.path is not None:
            (project.folder / block.path).parent.mkdir(parents=True, exist_ok=True)
            project.follow(block)


def run_file(path: str) -> dict[str, Any]:
    """Run a file of the guide to recurring messages, and return its names."""
    names: dict[str, Any] = {}
    (block,) = [block for block in blocks(DOCS / "howto/recurring.rst") if block.path == path]
    exec(block.text, names)
    return names


RECURRING = """
import os
from django.core.management import call_command
from django_delayq.models import Message
from django_delayq.recurring import Schedule, run_schedule
from django_delayq.recurring.services import Declarer, Scheduler
from orders.services import subscribe, unsubscribe

def deliver():
    call_command("run_delayq", "--once", "--threads", "1")

call_command("check")
Declarer("default", "docs").tick()
assert {row.name: row.rule for row in Schedule.objects.all()} == {
    "orders.report": "0 3 * * * (Europe/Berlin)",
    "orders.poll": "every 10m",
    "digest.week": "0 9 * * MON (UTC)",
    "digest.month": "0 9 1 * * (UTC)",
}
assert Message.objects.filter(state="scheduled").count() == 4
subscribe(7, 9, "Asia/Tokyo")
subscribe(7, 10, "Asia/Tokyo")
assert Schedule.objects.get(name="digest:7").cron == "0 10 * * *"
assert Message.objects.filter(payload__user=7, state="scheduled").count() == 1
unsubscribe(7)
assert not Message.objects.filter(payload__user=7, state="scheduled").exists()
message = run_schedule("digest.month")
deliver()
assert Message.objects.get(pk=message.pk).state == "consumed"
"""


def test_schedules_are_declared_and_made_at_run_time(mysite: Project) -> None:
    follow(mysite, "tutorial")
    follow(mysite, "howto/recurring")
    mysite.run("python manage.py makemigrations orders")
    mysite.run("python manage.py migrate")
    mysite.python(RECURRING)


def test_a_handler_schedules_the_next_message_under_its_own_key(free_topics: None) -> None:
    names = run_file("orders/chain.py")
    for account in (7, 7, 8):
        names["watch"](account)
    for _turn in range(2):
        assert run_message(topic="bank.balance", key="account-7")
        deliver()
    found = Message.objects.filter(key="account-7").order_by("pk").values_list("state", flat=True)
    assert list(found) == ["consumed", "consumed", "scheduled"]


# --- keys -------------------------------------------------------------------------------------------------------------


def test_changes_and_events_are_handled_once_as_the_guide_says(run_page: Run) -> None:
    names = run_page("howto/keys")
    order = new_order()
    for status in ("open", "paid"):
        order.status = status
        names["order_changed"](order)
    message = Message.objects.get(topic="orders.index")
    assert (message.key, message.unique, message.moves) == (f"order-{order.pk}", "scheduled", 2)
    assert run_message(message)
    deliver()
    handler("orders.paid")(lambda message: None)
    answers = [names["received"]({"id": "e1"}) for _ in range(2)]
    deliver()
    assert [*answers, names["received"]({"id": "e1"})] == ["accepted", "known", "known"]
    assert state("orders.paid") == state("orders.index") == "consumed"
    # Without its message there is no change.
    names["schedule_message"] = lambda *arguments, **options: refuse(None)
    order.status = "closed"
    with pytest.raises(ConnectionError):
        names["order_changed"](order)
    order.refresh_from_db()
    assert order.status == "paid"


def test_a_schedule_starts_no_second_message_while_one_runs(free_topics: None) -> None:
    names = run_file("orders/syncing.py")
    assert list(declarations.collect()[0]) == ["orders.sync.start"]
    del registry.declared["orders.sync"]
    counts: list[int] = []

    @handler("orders.sync")
    def sync(message: Any) -> None:
        # As the handler of another message: under its own key a handler schedules the next one.
        with actors.handling("default", "orders.sync.start", "another", 0):
            names["start"](message)
        counts.append(Message.objects.filter(topic="orders.sync").count())

    for _turn in range(2):
        schedule_message("orders.sync.start")
        deliver()
    assert counts == [1, 2]


def test_a_message_that_never_ends_keeps_its_attempts(free_topics: None) -> None:
    run_file("orders/polling.py")
    message = schedule_message("bank.poll", key="poll")
    deliver()
    message.refresh_from_db()
    assert (message.state, message.attempts, message.transitions.count()) == ("scheduled", 0, 3)
    minute = timedelta(minutes=1)
    assert message.created_at + minute <= message.due_at <= timezone.now() + minute


# --- test your own code -----------------------------------------------------------------------------------------------


def test_the_tests_of_the_guide_pass(mysite: Project) -> None:
    follow(mysite, "tutorial")
    follow(mysite, "howto/testing")
    mysite.run("python manage.py makemigrations orders")
    mysite.run("python manage.py test")
    # The plugin is named, for the package may be installed without its entry points.
    mysite.run("python -m pytest -q -p no:delayq -p django_delayq.testing.plugin -p no:cacheprovider", "… passed")


# --- deploy, operate --------------------------------------------------------------------------------------------------


def test_two_topics_can_have_one_handler_while_a_topic_is_renamed(run_page: Run) -> None:
    databases: dict[str, Any] = {"default": {}}
    names = run_page("howto/deploy", DATABASES=databases)
    for topic in ("orders.close", "orders.close_unpaid"):
        schedule_message(topic, {"order": 1})
    deliver()
    assert set(Message.objects.values_list("topic", "state")) == {
        ("orders.close", "consumed"),
        ("orders.close_unpaid", "consumed"),
    }
    assert names["close"]
    # psycopg knows each of the options.
    assert psycopg.conninfo.make_conninfo(**databases["default"]["OPTIONS"])
    assert databases["default"]["DISABLE_SERVER_SIDE_CURSORS"] is True


def test_a_worker_host_runs_with_both_apps_and_without_the_admin(mysite: Project) -> None:
    mysite.write(
        "mysite/settings.py",
        'INSTALLED_APPS = ["django_delayq", "django_delayq.console"]\nMIDDLEWARE = TEMPLATES = []\n'
        f'ROOT_URLCONF = None\nDELAYQ = {{"REDIS": "{mysite.redis_url}"}}\n',
    )
    mysite.run("python manage.py migrate")
    mysite.run("python manage.py run_delayq --once", "0 delivered")
    mysite.run("python manage.py delayq_stats", "Coming hour  nothing falls due")


def test_a_queue_is_paused_and_dead_messages_are_requeued(run_page: Run) -> None:
    dead = schedule_message("payments.callback", max_attempts=1)
    handler("payments.callback")(refuse)
    deliver()
    assert state("payments.callback") == "dead"
    names = run_page("howto/operate")
    assert not Queue.objects.exists()
    assert {verdict.name: number for verdict, number in names["counts"].items()} == {"REQUEUED": 1}
    dead.refresh_from_db()
    assert log_of(dead)[-1].reason == "the bank is back"


def test_a_backlog_is_spread_without_redis(free_topics: None, settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": None}
    (line,) = re.findall(r"``delayq_act (run --due-before .+?)``, with", text_of("howto/operate").partition("Pause")[0])
    waiting = schedule_messages([{"topic": "docs.ok"}, {"topic": "docs.ok"}, {"topic": "docs.ok", "delay": "1h"}])
    assert run("delayq_act", *line.replace("…", timezone.now().isoformat()).split(), "--yes").code == 0
    first, last, later = Message.objects.order_by("pk")
    assert last.due_at - first.due_at == timedelta(minutes=5)
    assert later.due_at == waiting[2].due_at


def refuse(message: Any) -> None:
    raise ConnectionError("the bank does not answer")


# --- monitor ----------------------------------------------------------------------------------------------------------


class Statsd:
    """Remembers what it was sent."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    def timing(self, name: str, milliseconds: float) -> None:
        self.sent.append(name)
        assert milliseconds >= 0

    def incr(self, name: str) -> None:
        self.sent.append(name)


def test_the_examples_of_monitoring_see_a_success_and_a_failure(
    run_page: Run, caplog: pytest.LogCaptureFixture
) -> None:
    statsd = Statsd()
    names = run_page("howto/monitoring", {"statsd": {"statsd": statsd}})
    handler("docs.ok")(lambda message: None)
    handler("orders.close", retry=["1m"])(refuse)
    schedule_message("docs.ok")
    schedule_message("orders.close")
    with caplog.at_level(logging.DEBUG, "django_delayq"):
        deliver()
    assert sorted(statsd.sent) == [
        "delayq.docs.ok.lateness",
        "delayq.docs.ok.runtime",
        "delayq.orders.close.failed",
        "delayq.orders.close.lateness",
    ]
    lines = [json.loads(names["JsonFormatter"]().format(record)) for record in caplog.records]
    events = {line["topic"]: line["event"] for line in lines if "topic" in line}
    assert events == {"docs.ok": "consumed", "orders.close": "retried"}
    (said,) = re.findall(r"``record.delayq_event`` is (.+?), and", text_of("howto/monitoring"), re.DOTALL)
    assert {line["event"] for line in lines if "topic" in line} <= set(re.findall(r"\*(\w+)\*", said))
    assert all({"id", "delivery"} <= line.keys() for line in lines if "topic" in line)
    [counted] = [line for line in lines if line.get("event") == "counted"]
    assert (counted["queue"], counted["consumed"], counted["retried"]) == ("default", 1, 1)


def test_the_context_of_the_log_reaches_the_handler_and_the_line_of_its_failure(run_page: Run, settings: Any) -> None:
    structlog = pytest.importorskip("structlog")
    names = run_page("howto/errors")
    json_formatter = dict(names["LOGGING"]["formatters"]["json"])
    formatter = json_formatter.pop("()")(**json_formatter)
    lines: list[dict[str, Any]] = []

    class Console(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(json.loads(formatter.format(record)))

    bound: list[dict[str, Any]] = []

    @handler("docs.fails", retry=False)
    def note_and_fail(message: Any) -> None:
        bound.append(structlog.contextvars.get_contextvars())
        refuse(message)

    settings.DELAYQ = {**settings.DELAYQ, **names["DELAYQ"]}
    console = Console()
    logger = logging.getLogger("django_delayq")
    logger.addHandler(console)
    try:
        with structlog.contextvars.bound_contextvars(request="r-1", topic="of the request"):
            message = schedule_message("docs.fails")
        deliver()
    finally:
        logger.removeHandler(console)
    context = {"request": "r-1", "topic": "docs.fails", "message": message.pk, "attempt": 1}
    assert bound == [context]
    (line,) = [line for line in lines if line["event"].startswith("message dead")]
    assert context.items() <= line.items()
    assert structlog.contextvars.get_contextvars() == {}
    assert names["failures"] == {("docs.fails", "ConnectionError", "refuse", "dead"): 1}


def test_the_example_of_middleware_carries_the_language(run_page: Run, settings: Any) -> None:
    names = run_page("reference/middleware")
    settings.DELAYQ = {**settings.DELAYQ, **names["DELAYQ"]}
    seen = []
    handler("docs.ok")(lambda message: seen.append(translation.get_language()))
    with translation.override("de"):
        schedule_message("docs.ok")
    schedule_message("docs.ok")
    deliver()
    assert sorted(seen) == sorted(["de", translation.get_language()])


def test_the_example_of_signals_counts(run_page: Run) -> None:
    names = run_page("reference/signals")
    handler("docs.dies", retry=False)(refuse)
    schedule_message("docs.dies")
    deliver()
    assert names["dead"] == {("docs.dies", "ConnectionError"): 1}
    assert len(names["late"]) == 1


# --- reference --------------------------------------------------------------------------------------------------------


@pytest.mark.console
def test_the_group_of_operators_has_its_permissions(run_page: Run) -> None:
    run_page("reference/permissions")
    assert Group.objects.get(name="delayq operators").permissions.count() == 8


def test_a_model_keeps_the_id_of_a_message_in_a_plain_column(run_page: Run) -> None:
    field = run_page("reference/record")["message_id"]
    assert not field.is_relation


@pytest.mark.console
def test_the_examples_of_the_console_can_be_run(run_page: Run) -> None:
    names = run_page("reference/console")
    assert names["backstage"].is_registered(Message)
    assert names["Migration"].operations


def test_the_extension_counts_and_reports(run_page: Run, caplog: pytest.LogCaptureFixture, own_additions: None) -> None:
    names = run_page("reference/extensions")
    made: list[Any] = []

    def make(using: str, worker: str) -> Any:
        made.append(names["OrdersExtension"](using, worker))
        return made[-1]

    extensions.add_to_workers(make)
    handler("docs.ok")(lambda message: None)
    schedule_message("docs.ok")
    deliver()
    (service,) = made[0].services(frozenset())
    with caplog.at_level(logging.INFO, "orders"):
        assert service.tick() == 60
    assert "{'docs.ok': 1}" in caplog.text
