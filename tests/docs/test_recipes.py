"""The recipes do what they say."""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType
from typing import Any

import django
import pytest
import yaml
from django.core import mail
from django.core.management import call_command
from django.db import connection
from django.test import Client, RequestFactory
from django.urls import path
from django.utils import timezone

from django_delayq import (
    handler,
    pause_queue,
    reschedule_message,
    run_message,
    schedule_message,
    schedule_messages,
)
from django_delayq.contrib.prometheus.server import Gauges
from django_delayq.models import Message
from testproject.shop.models import Order
from tests.support.commands import run
from tests.support.rows import unguarded

from .blocks import DOCS, blocks, text_of
from .conftest import Run, deliver

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("redis_client")]

ENTERED: list[str] = []


@contextmanager
def schema_context(name: str) -> Any:
    ENTERED.append(name)
    yield


@pytest.fixture
def posted() -> list[Any]:
    return []


@pytest.fixture
def recipes(run_page: Run, posted: list[Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of the page, after all of its examples."""
    ENTERED.clear()
    tenants = ModuleType("django_tenants.utils")
    vars(tenants)["schema_context"] = schema_context
    monkeypatch.setitem(sys.modules, "django_tenants", ModuleType("django_tenants"))
    monkeypatch.setitem(sys.modules, "django_tenants.utils", tenants)
    bank = {
        "transfer": lambda order, idempotency_key: posted.append((order, idempotency_key)),
        "post": lambda to, body, headers, timeout: posted.append((to, body, headers)),
    }
    return run_page("howto/recipes", {"bank": bank})


def test_a_refund_has_one_key_at_each_attempt(recipes: dict[str, Any], posted: list[Any]) -> None:
    order = Order.objects.create(email="anna@example.com")
    refund = schedule_message("orders.refund", {"order": order.pk})
    for _time in range(2):
        schedule_message("orders.mark_paid", {"order": order.pk})
    deliver()
    assert posted == [(order.pk, f"refund-{refund.pk}")]
    order.refresh_from_db()
    assert order.status == "paid"


def test_a_webhook_that_comes_twice_is_taken_once_and_a_forged_one_is_refused(recipes: dict[str, Any]) -> None:
    body = json.dumps({"id": "ev-1", "kind": "paid"})
    for _time in range(2):
        request = RequestFactory().post(
            "/", body, content_type="application/json", headers={"X-Signature": recipes["signature"](body.encode())}
        )
        assert recipes["webhook"](request).status_code == 202
    for signature in ("x", "\xfc"):
        forged = RequestFactory().post("/", body, content_type="application/json", headers={"X-Signature": signature})
        assert recipes["webhook"](forged).status_code == 403
    deliver()
    assert Message.objects.get(topic="bank.event").state == "consumed"


def test_a_webhook_that_goes_out_is_signed(recipes: dict[str, Any], posted: list[Any]) -> None:
    message = schedule_message("webhooks.send", {"to": "https://shop.example.com", "event": "paid"})
    assert message.limit_key == "https://shop.example.com"
    deliver()
    ((to, body, headers),) = posted
    assert (to, json.loads(body)) == ("https://shop.example.com", {"id": message.pk, "event": "paid"})
    assert headers == {"X-Signature": recipes["signature"](body)}


def test_what_follows_a_mailing_comes_when_the_last_of_it_has_ended(
    recipes: dict[str, Any], posted: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    recipes["start"](7, ["a", "b", "c"])
    last = Message.objects.filter(topic="mailing.send").latest("pk")
    reschedule_message(last, delay="1h")

    def look() -> tuple[str, int]:
        run_message(topic="mailing.finish", key="mailing-7")
        deliver()
        return Message.objects.values_list("state", "attempts").get(topic="mailing.finish")

    # A look costs no attempt.
    assert look() == ("scheduled", 0)
    assert sorted(to for to, *_rest in posted) == ["a", "b"]
    run_message(last)
    deliver()
    assert look() == ("consumed", 0)
    assert "0 could not be sent" in capsys.readouterr().out


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_a_message_lives_in_the_database_that_it_was_scheduled_in(recipes: dict[str, Any]) -> None:
    recipes["pack_later"](2026)
    assert not Message.objects.exists()
    deliver("--database", "other")
    assert Message.objects.using("other").get(topic="archive.pack").state == "consumed"


def test_the_handler_runs_in_the_schema_of_its_tenant(
    recipes: dict[str, Any], settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "MIDDLEWARE": ["orders.tenants.Tenant"]}
    monkeypatch.setattr(connection, "schema_name", "anna", raising=False)
    handler("docs.ok")(lambda message: None)
    message = schedule_message("docs.ok")
    assert message.headers == {"schema": "anna"}
    deliver()
    assert ENTERED == ["anna"]
    assert schedule_message("orders.export").limit_key == "anna"


def test_cron_alone_delivers_and_is_well_without_a_worker(recipes: dict[str, Any]) -> None:
    (line,) = re.findall(r"run_delayq (--once .+)$", text_of("howto/recipes"), re.MULTILINE)
    (check,) = re.findall(r"delayq_check (--min-workers 0 .+)$", text_of("howto/recipes"), re.MULTILINE)
    handler("docs.ok")(lambda message: None)
    schedule_message("docs.ok")
    # It fell due just after a run.
    unguarded(Message).update(due_at=timezone.now() - timedelta(seconds=62))
    assert run("delayq_check", *check.split()).code == 0
    assert run("run_delayq", *line.split()).code == 0
    assert Message.objects.get(topic="docs.ok").state == "consumed"


def test_the_query_for_keda_counts_what_is_due_in_queues_that_are_not_paused() -> None:
    (block,) = [block for block in blocks(DOCS / "howto/recipes.rst") if block.language == "yaml"]
    triggers = yaml.safe_load(block.text)["spec"]["triggers"]
    summed = [re.fullmatch(r"max\(sum by \(instance\) \((.+)\)\)", one["metadata"]["query"]) for one in triggers]
    due, coming = (re.sub(r'{within="5m"}| on \(instance, queue\)', "", found[1]) for found in summed if found)
    deliver_one("docs.ok")
    pause_queue("mail")
    schedule_messages({"topic": "docs.ok", "queue": queue} for queue in ("mail", "mail", "default"))
    schedule_messages({"topic": "docs.ok", "queue": queue, "delay": "4m"} for queue in ("mail", "default"))
    schedule_message("docs.ok", delay="6m")
    of_queues: dict[str, dict[str, float]] = defaultdict(dict)
    for sample in (sample for family in Gauges("default").collect() for sample in family.samples):
        if sample.labels.get("within", "5m") == "5m":
            of_queues[sample.labels.get("queue", "")][sample.name] = sample.value
    assert {queue: eval(due, of_queues[queue]) for queue in ("mail", "default")} == {"mail": 0, "default": 1}
    assert eval(coming, of_queues["mail"]) == 0
    assert eval(coming, of_queues["default"]) == of_queues["default"]["delayq_due_seconds"] > 0


def deliver_one(topic: str) -> None:
    """Deliver a message, so that the mean run time of the topic is known."""
    handler(topic)(lambda message: None)
    schedule_message(topic)
    deliver()


def test_admins_get_a_mail_while_no_worker_runs(recipes: dict[str, Any], settings: Any) -> None:
    settings.ADMINS = ["anna@example.com"] if django.VERSION >= (6, 0) else [("Anna", "anna@example.com")]
    call_command(recipes["Command"]())
    (sent,) = mail.outbox
    assert "Workers" in sent.body


def test_an_order_is_shipped_when_it_was_approved_in_time_and_refused_otherwise(recipes: dict[str, Any]) -> None:
    shipped: list[int] = []
    handler("orders.ship")(lambda message: shipped.append(message.payload["order"]))
    in_time, late = (Order.objects.create(email="a@example.com") for _ in range(2))
    for order in (in_time, late):
        recipes["ask_for_approval"](order)
    assert recipes["approve"](in_time)
    run_message(topic="orders.refuse", key=f"order-{late.pk}")
    deliver()
    assert not recipes["approve"](late)
    late.refresh_from_db()
    assert (shipped, late.status) == ([in_time.pk], "closed")


def test_a_dataclass_is_a_payload_and_again_one_in_the_handler(recipes: dict[str, Any]) -> None:
    Invoice = recipes["Invoice"]
    message = recipes["bill"](Invoice(order=5, total="12.50"))
    assert message.payload == {"order": 5, "total": "12.50"}
    message = recipes["bill"](Invoice(order=6, total="x"))
    deliver()
    assert recipes["BILLED"] == [Invoice(order=5, total="12.50"), Invoice(order=6, total="x")]


def test_a_page_can_show_how_far_a_handler_is(recipes: dict[str, Any]) -> None:
    order = Order.objects.create(email="a@example.com")
    recipes["print_catalogue"].schedule({"order": order.pk, "pages": 4})
    deliver()
    assert recipes["progress_of"](order) == "4 of 4 pages"


def test_a_customer_is_forgotten(recipes: dict[str, Any]) -> None:
    handler("docs.ok")(lambda message: None)
    schedule_message("docs.ok", {"customer": 7})
    deliver()
    schedule_message("docs.ok", {"customer": 7}, delay="1d")
    other = schedule_message("docs.ok", {"customer": 8}, delay="1d")
    recipes["forget"](7)
    assert list(Message.objects.values_list("pk", flat=True)) == [other.pk]


def test_a_typed_api_publishes_takes_and_acknowledges(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ninja")
    settings.DELAYQ = {**settings.DELAYQ, "PULL_QUEUES": ["exports"]}
    settings.EXPORTS_API_KEY = "a-key"
    (block,) = [block for block in blocks(DOCS / "howto/recipes.rst") if block.path == "orders/api.py"]
    module = ModuleType("orders.api")
    monkeypatch.setitem(sys.modules, "orders.api", module)
    exec(compile(block.text, str(block), "exec", dont_inherit=True), vars(module))
    vars(module)["urlpatterns"] = [path("api/", vars(module)["api"].urls)]
    settings.ROOT_URLCONF = "orders.api"
    client = Client(headers={"X-Key": "a-key"})

    def post(address: str, **body: Any) -> tuple[int, Any]:
        answer = client.post(f"/api/{address}", body, content_type="application/json")
        return answer.status_code, answer.json()

    assert Client().post("/api/exports", {"row": 7}, content_type="application/json").status_code == 401
    assert post("exports", row="seven")[0] == 422
    status, pk = post("exports", row=7)
    assert (status, Message.objects.get(pk=pk).payload) == (200, {"row": 7, "format": "csv"})
    assert post("exports/take", most=101)[0] == 422
    status, (taken,) = post("exports/take", most=5, wait=1)
    assert (status, taken["payload"], taken["attempt"]) == (200, {"row": 7, "format": "csv"}, 1)
    assert post("exports/take") == (200, [])
    assert post("exports/retry", receipt=taken["receipt"], error="locked") == (200, {"done": True, "reason": ""})
    run_message(pk)
    (again,) = post("exports/take", wait=1)[1]
    assert again["attempt"] == 2
    assert post("exports/ack", receipt=again["receipt"])[1]["done"]
    assert Message.objects.get(pk=pk).state == "consumed"
    status, stale = post("exports/retry", receipt=taken["receipt"], error="late")
    assert (status, stale["done"]) == (200, False)
    assert "consumed already" in stale["reason"]
    assert post("exports/ack", receipt="nonsense")[0] == 400
    assert client.get("/api/openapi.json").json()["info"]["title"] == "Exports"
