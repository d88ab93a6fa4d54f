"""The messages of an order in the project's own page of the order."""

from __future__ import annotations

import re

import pytest
from django.test import Client
from django.urls import reverse

from django_delayq import cancel_message, schedule_message
from django_delayq.console.models import AuditEvent
from django_delayq.core.states import State
from django_delayq.models import Message
from testproject.shop.models import Order

from .conftest import logged_in, person
from .samples import fresh, text

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def order() -> Order:
    return Order.objects.create(email="anna@example.com")


@pytest.fixture
def clerk(db: None) -> Client:
    return logged_in(person("clara", "view_order", "view_message", "cancel_message"))


def page_of(order: Order) -> str:
    return reverse("admin:shop_order_change", args=[order.pk])


def cancel_url(order: Order, message: Message) -> str:
    return page_of(order).replace("/change/", f"/delayq/{message.pk}/cancel/")


def test_the_page_of_an_order_shows_what_will_happen_to_it_and_what_did(clerk: Client, order: Order) -> None:
    # The shop schedules a reminder with each order.
    cancel_message(topic="orders.remind", key=order.key)
    waiting = schedule_message("orders.close", key=order.key, delay="2h")
    schedule_message("orders.close", key="order-99", delay="2h")
    page = clerk.get(page_of(order))
    shown = text(page)
    assert re.search(r"orders\.close ?: scheduled, in .*orders\.remind ?: cancelled, ended .* ago", shown)
    assert page.content.decode().count("/cancel/") == 1
    assert f"/delayq/{waiting.pk}/cancel/" in page.content.decode()


def test_a_message_is_cancelled_from_the_page_of_its_order(clerk: Client, order: Order) -> None:
    waiting = schedule_message("orders.close", key=order.key, delay="2h")
    assert "orders.close with the key" in text(clerk.get(cancel_url(order, waiting)))
    answer = clerk.post(cancel_url(order, waiting), {"reason": "she called"}, follow=True)
    assert answer.status_code == 200
    assert "1 cancelled" in text(answer)
    assert fresh(waiting).state == State.CANCELLED
    event = AuditEvent.objects.get()
    assert (event.actor, event.action, event.message_id, event.reason) == (
        "user:clara",
        "cancel",
        waiting.pk,
        "she called",
    )


def test_nobody_cancels_without_the_permission_nor_the_message_of_another_order(order: Order, clerk: Client) -> None:
    waiting = schedule_message("orders.close", key=order.key, delay="2h")
    other = schedule_message("orders.close", key="order-99", delay="2h")
    viewer = logged_in(person("vera", "view_order", "view_message"))
    assert "/cancel/" not in viewer.get(page_of(order)).content.decode()
    assert viewer.post(cancel_url(order, waiting)).status_code == 403
    assert clerk.post(cancel_url(order, other)).status_code == 404
    stranger = logged_in(person("sam", "view_message", "cancel_message"))
    assert stranger.post(cancel_url(order, waiting)).status_code in (403, 404)
    assert Client().post(cancel_url(order, waiting)).status_code == 302
    assert {fresh(waiting).state, fresh(other).state} == {State.SCHEDULED}


def test_who_may_not_see_messages_sees_none(order: Order) -> None:
    schedule_message("orders.close", key=order.key, delay="2h")
    assert "orders.close" not in text(logged_in(person("ann", "view_order")).get(page_of(order)))
