"""The demo shop, from the request to its effects: the package as its users know it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection, transaction
from django.test import Client
from django.utils import timezone

from django_delayq import Verdict, run_message
from django_delayq.models import Message
from testproject.shop import orders
from testproject.shop.bank import Bank
from testproject.shop.models import Deed, Order, Stock
from tests.support.processes import Start
from tests.support.record_of import is_early
from tests.support.workers import eventually

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def lamps() -> Stock:
    return Stock.objects.create(article="lamp", available=10)


@pytest.fixture
def bank(settings: Any) -> Iterator[Bank]:
    with Bank(refusals=2) as bank:
        settings.SHOP_CALLBACK_URL = bank.url
        yield bank


def post(path: str, data: dict[str, Any], *, expect: int) -> dict[str, Any]:
    response = Client().post(path, data, content_type="application/json")
    assert response.status_code == expect, response.content
    answer: dict[str, Any] = response.json()
    return answer


def place(pieces: int = 3) -> int:
    answer = post("/orders/", {"email": "anna@example.com", "articles": {"lamp": pieces}}, expect=201)
    assert answer["status"] == "new"
    number: int = answer["id"]
    return number


def pay(order: int, *, expect: int = 200) -> dict[str, Any]:
    return post(f"/orders/{order}/pay/", {}, expect=expect)


def deliver() -> str:
    said = StringIO()
    call_command("run_delayq", "--once", "--threads", "2", stdout=said)
    return said.getvalue().strip()


def message(topic: str) -> Message:
    return Message.objects.get(topic=topic)


def available() -> int:
    return Stock.objects.get(article="lamp").available


def status(order: int) -> str:
    return Order.objects.get(pk=order).status


def due_in(message: Message) -> timedelta:
    return message.due_at - timezone.now()


# --- closing ----------------------------------------------------------------------------------------------------------


def test_a_worker_closes_an_unpaid_order_after_its_time_and_its_pieces_can_be_sold_again(
    settings: Any, start: Start
) -> None:
    settings.SHOP_SPEED = 900  # a quarter of an hour in one second
    start().wait_for("Loaded Redis")

    order = place(pieces=3)
    assert available() == 7
    eventually(lambda: status(order) == "closed")

    assert available() == 10
    eventually(lambda: message("orders.close").state == Message.State.CONSUMED)
    assert not is_early(message("orders.close").transitions.get(to_state=Message.State.RUNNING))
    assert Deed.objects.filter(what="closed").count() == 1


def test_pieces_come_back_once_though_the_first_delivery_failed_after_giving_them_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order = place(pieces=3)
    run_message(topic="orders.close", key=f"order-{order}")
    with monkeypatch.context() as broken:
        broken.setattr(Deed, "save", _fail)
        assert deliver() == "1 delivered"
    assert (status(order), available(), message("orders.close").attempts) == ("new", 7, 1)

    run_message(topic="orders.close", key=f"order-{order}")
    assert deliver() == "1 delivered"

    assert (status(order), available()) == ("closed", 10)
    assert message("orders.close").deliveries == 2


def _fail(deed: Deed) -> None:
    raise OSError("the disk is full")


def test_an_order_that_was_not_taken_schedules_nothing() -> None:
    wanted = {"email": "anna@example.com", "articles": {"lamp": 3, "unicorn": 1}}

    assert post("/orders/", wanted, expect=409) == {"error": "sold out: unicorn"}

    assert available() == 10
    assert not Order.objects.exists()
    assert not Message.objects.exists()


# --- paying -----------------------------------------------------------------------------------------------------------


def test_an_order_that_is_paid_in_its_quarter_of_an_hour_is_neither_closed_nor_reminded_of(bank: Bank) -> None:
    order = place(pieces=3)
    closing = message("orders.close")
    assert timedelta(minutes=14) < due_in(closing) <= timedelta(minutes=15)

    assert pay(order) == {"id": order, "status": "paid"}
    # Paying twice is paying once.
    pay(order)

    assert run_message(closing).verdict == Verdict.TOO_LATE
    assert deliver() == "1 delivered"
    assert (status(order), available()) == ("paid", 7)
    ends = [message(topic).state for topic in ("orders.close", "orders.remind", "payments.callback")]
    assert ends == [Message.State.CANCELLED, Message.State.CANCELLED, Message.State.SCHEDULED]


def test_whoever_pays_too_late_is_told_so_and_not_reminded() -> None:
    order = place()
    run_message(topic="orders.close", key=f"order-{order}")
    deliver()

    assert pay(order, expect=409) == {"error": f"too late: order {order} is closed"}

    assert (status(order), message("orders.remind").state) == ("closed", Message.State.CANCELLED)
    assert not Message.objects.filter(topic="payments.callback").exists()
    pay(order + 1, expect=404)


@pytest.mark.skipif("connection.vendor == 'sqlite'", reason="SQLite locks no rows: one waits for the other's end")
def test_a_payment_that_meets_the_closing_half_way_wins_and_the_pieces_stay_sold() -> None:
    order = place(pieces=3)
    run_message(topic="orders.close", key=f"order-{order}")
    delivering = threading.Thread(target=_deliver_elsewhere)

    with transaction.atomic():
        Order.objects.select_for_update().get(pk=order)
        delivering.start()
        eventually(lambda: message("orders.close").state == Message.State.RUNNING)
        orders.pay(order)
    delivering.join(60)

    assert (status(order), available()) == ("paid", 7)
    assert message("orders.close").state == Message.State.CONSUMED
    assert not Deed.objects.filter(what="closed").exists()


def _deliver_elsewhere() -> None:
    try:
        deliver()
    finally:
        connection.close()


# --- the bank ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refusals", [2, 100])
def test_the_bank_is_called_by_its_schedule_until_it_answers_and_eight_times_at_most(bank: Bank, refusals: int) -> None:
    bank.refusals = refusals
    order = place()
    pay(order)

    for failures, minutes in ((1, 4), (2, 10)):
        deliver()
        callback = message("payments.callback")
        assert callback.attempts == failures
        assert timedelta(minutes=minutes - 1) < due_in(callback) <= timedelta(minutes=minutes)
        run_message(callback)
    for _call in range(7):
        deliver()
        run_message(message("payments.callback"))

    callback, is_told = message("payments.callback"), refusals == 2
    assert callback.state == (Message.State.CONSUMED if is_told else Message.State.DEAD)
    assert bank.calls[order] == (3 if is_told else 8)
    assert Deed.objects.filter(what="told the bank", order=order).count() == is_told
    errors = callback.transitions.exclude(error="").values_list("error", flat=True)
    assert set(errors) == {"HTTPError: HTTP Error 503: Service Unavailable"}


# --- reminders and news -----------------------------------------------------------------------------------------------


def test_the_reminder_comes_once_and_later_the_longer_somebody_is_busy_with_the_order() -> None:
    order = place()
    first = message("orders.remind").due_at

    for note in ("soon", "tonight"):
        post(f"/orders/{order}/note/", {"note": note}, expect=200)

    reminder = message("orders.remind")
    assert reminder.due_at > first
    assert reminder.transitions.filter(reason="debounced").count() == 2
    run_message(reminder)
    assert deliver() == "1 delivered"
    assert Deed.objects.filter(what="reminded", order=order).count() == 1


def test_the_news_reach_every_reader() -> None:
    orders.send_news(f"reader{number}@example.com" for number in range(20))

    assert deliver() == "20 delivered"

    assert Deed.objects.filter(what="sent the news").count() == 20


# --- requests that are no orders --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"email": "anna@example.com", "articles": {}},
        {"email": "anna@example.com", "articles": {"lamp": 0}},
        {"email": "anna@example.com", "articles": {"lamp": True}},
        {"email": "anna@example.com", "articles": {"lamp": 10**30}},
        {"email": "anna@example.com", "articles": {"la\x00mp": 1}},
        {"email": "nobody", "articles": {"lamp": 1}},
    ],
)
def test_a_malformed_order_is_refused(data: dict[str, Any]) -> None:
    assert "not an order" in post("/orders/", data, expect=400)["error"]
