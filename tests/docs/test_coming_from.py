"""What the guide for those who come from another queue has ported does what its text says."""

from __future__ import annotations

import importlib
import json
import re
import sys
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import django
import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_delayq import cancel_message, run_message, schedule_message
from django_delayq.models import Message
from django_delayq.project import registry
from django_delayq.recurring import Schedule, declarations
from testproject.shop.models import Order
from tests.support.workers import eventually

from .conftest import Run, deliver

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("redis_client")]


class BankBusy(Exception):
    retry_after = 60


class Calls:
    """Counts what the ported handlers call, and is busy at the first charge."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, ...]] = []

    def take(self, name: str) -> Any:
        return lambda *given: self.made.append((name, *given))

    def charge_card(self, order: int) -> str:
        self.made.append(("charge", order))
        if len(self.of("charge")) == 1:
            raise BankBusy
        return f"r-{order}"

    def of(self, name: str) -> list[Any]:
        return [call[1] if len(call) > 1 else None for call in self.made if call[0] == name]


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
def ported(run_page: Run, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of the page, after all of its examples that are run."""
    if django.VERSION < (6, 0):
        monkeypatch.setitem(sys.modules, "django.tasks", importlib.import_module("django_tasks"))
    modules = {
        "bank": {"BankBusy": BankBusy, "charge_card": calls.charge_card},
        "stock": {"shops": lambda: ["north", "south"], "sync": calls.take("sync")},
        "labels": {"print_label": calls.take("label")},
        "reports": {"build": calls.take("build")},
        "search": {"index": calls.take("index")},
        "digests": {"send_digest": calls.take("digest")},
        "examples": {},
    }
    names = run_page("howto/coming-from", modules)
    # A task is found by the path of its module.
    vars(sys.modules["orders.examples"]).update(names)
    return names


def deliver_charges(calls: Calls, number: int) -> None:
    """Deliver until so many charges were tried. A rate lets one begin each 600 ms, and ``--once`` waits for none."""

    def tried() -> bool:
        deliver()
        return len(calls.of("charge")) == number

    eventually(tried, f"{number} charges")


def an_order() -> Order:
    return Order.objects.create(email="anna@example.com")


def test_an_order_is_closed_or_paid(ported: dict[str, Any]) -> None:
    paid, unpaid = (ported["place_order"]("anna@example.com") for _ in range(2))
    with CaptureQueriesContext(connection) as asked:
        ported["pay_order"](paid)
    # The handler locks the order first, too.
    tables = re.findall(rf"{Order._meta.db_table}|{Message._meta.db_table}", str(asked.captured_queries))
    assert tables[0] == Order._meta.db_table
    assert run_message(topic="orders.close", key=f"order-{unpaid.pk}")
    deliver()
    paid.refresh_from_db()
    unpaid.refresh_from_db()
    assert (paid.status, unpaid.status) == ("paid", "closed")
    with pytest.raises(ValueError, match="too late"):
        ported["pay_order"](unpaid)


def test_from_celery_a_charge_is_retried_and_sends_one_receipt(ported: dict[str, Any], calls: Calls) -> None:
    charge = schedule_message("orders.charge", {"order": 7})
    deliver_charges(calls, 1)
    charge.refresh_from_db()
    assert charge.state == "scheduled"
    assert run_message(charge)
    deliver_charges(calls, 2)
    # Once more, as after a crash between the effect and its record.
    schedule_message("orders.charge", {"order": 7})
    deliver_charges(calls, 3)
    receipt = Message.objects.get(topic="orders.receipt")
    assert receipt.payload == {"order": 7, "receipt": "r-7"}
    found = registry.find("orders.charge")
    assert found is not None
    assert (found.retry.max_attempts, found.timeout) == (5, 30)


def test_from_celery_the_schedules_of_beat_become_ours_and_may_be_adopted_again(ported: dict[str, Any]) -> None:
    at = SimpleNamespace(
        minute="30", hour="6", day_of_week="1-5", day_of_month="*", month_of_year="*", timezone="Europe/Berlin"
    )
    usual = dict.fromkeys(("crontab", "start_time", "expires", "expire_seconds"))
    task = partial(SimpleNamespace, task="orders.receipt", args="[]", kwargs="{}", one_off=False, **usual)
    nightly = task(pk=3, name="nightly report", kwargs='{"order": 1}', crontab=at)
    every = SimpleNamespace(every=10, period="minutes")
    # The names of the two are alike but for their signs.
    polling = [task(pk=pk, name=name, interval=every) for pk, name in {4: "poll: all", 5: "poll (all)"}.items()]
    start, end = (timezone.now() + timedelta(days=days) for days in (1, 2))
    polling[0].start_time, polling[0].expires, polling[0].expire_seconds = start, end, 90
    for _time in range(2):
        ported["adopt"]([nightly, *polling])
    limited = Schedule.objects.get(name="poll-all-4")
    assert (limited.starts_at, limited.ends_at, limited.expires) == (start, end, "90s")
    assert {row.name: row.rule for row in Schedule.objects.all()} == {
        "nightly-report-3": "30 6 * * 1-5 (Europe/Berlin)",
        "poll-all-4": "every 10m",
        "poll-all-5": "every 10m",
    }
    waiting = Message.objects.filter(topic="orders.receipt", state="scheduled")
    assert sorted(json.dumps(message.payload) for message in waiting) == ['{"order": 1}', "{}", "{}"]
    first_monday = SimpleNamespace(**{**vars(at), "day_of_month": "1-7", "day_of_week": "1"})
    often = SimpleNamespace(every=500, period="microseconds")
    for wrong in (
        {"crontab": first_monday},
        {"interval": often},
        {"args": "[7]", "interval": every},
        {"one_off": True, "interval": every},
    ):
        with pytest.raises((ValueError, KeyError)):
            ported["adopt"]([task(pk=6, name="wrong", **wrong)])


def test_from_django_q2_a_reminder_is_replaced_and_can_be_called_off(ported: dict[str, Any]) -> None:
    order = an_order()
    for days in (1, 2):
        ported["remind"](order, timezone.now() + timedelta(days=days))
    message = Message.objects.get(topic="orders.reminder", state="scheduled")
    assert message.due_at - timezone.now() > timedelta(days=1, hours=23)
    assert cancel_message(topic="orders.reminder", key=f"order-{order.pk}")


def test_from_huey_each_shop_has_a_lock(ported: dict[str, Any], calls: Calls) -> None:
    schedule_message("stock.sync_all")
    deliver()
    deliver()
    assert sorted(calls.of("sync")) == ["north", "south"]
    limit_keys = Message.objects.filter(topic="stock.sync").values_list("limit_key", flat=True)
    assert set(limit_keys) == {"north", "south"}


def test_from_django_rq_a_label_is_printed_later(ported: dict[str, Any], calls: Calls) -> None:
    order = an_order()
    ported["ship"](order)
    message = Message.objects.get(topic="orders.label")
    assert message.queue == "high"
    assert message.due_at - message.created_at == pytest.approx(timedelta(minutes=5), abs=timedelta(seconds=1))
    assert run_message(message)
    deliver("--queue", "high")
    assert calls.of("label") == [order.pk]


def test_from_dramatiq_one_report_of_a_customer_is_built_at_a_time(ported: dict[str, Any], calls: Calls) -> None:
    message = schedule_message("reports.build", {"customer": 7})
    assert message.limit_key == "7"
    deliver()
    assert calls.of("build") == [7]


def test_from_procrastinate_two_changes_index_an_order_once(ported: dict[str, Any], calls: Calls) -> None:
    order = an_order()
    for _change in range(2):
        ported["order_changed"](order)
    assert run_message(topic="orders.index", key=f"order-{order.pk}")
    deliver()
    assert calls.of("index") == [order.pk]


def test_from_django_tasks_db_a_task_runs_unchanged(ported: dict[str, Any]) -> None:
    result_id = ported["count"](7)
    deliver()
    assert ported["total"].get_result(result_id).return_value == {"order": 7, "total": 49}


def test_from_apscheduler_a_digest_has_its_times(ported: dict[str, Any], calls: Calls) -> None:
    declared, mistakes = declarations.collect()[0], declarations.collect()[1]
    assert not mistakes
    assert {"digests.send", "stock.sync_all"} <= set(declared)
    schedule_message("digests.send")
    deliver()
    assert len(calls.of("digest")) == 1
