"""Orders of the shop. Each function is one transaction, and the messages that it schedules are part of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from django.db import transaction

from django_delayq import Verdict, cancel_message, schedule_message, schedule_messages
from django_delayq.models import Message

from . import conf
from .models import Item, Order, Stock


class SoldOut(Exception):
    """Not enough pieces of an article are left."""


class TooLate(Exception):
    """The order is closed already, or is being closed."""


@transaction.atomic
def place(email: str, articles: Mapping[str, int]) -> Order:
    """Make an order, reserve its pieces, and schedule its closing in case nobody pays. Raises ``SoldOut``."""
    order = Order.objects.create(email=email)
    # Articles are locked in the same order, so that two buyers never wait for each other in a circle.
    for article, quantity in sorted(articles.items()):
        stock = Stock.objects.filter(article=article).first()
        if stock is None or not stock.take(quantity):
            raise SoldOut(article)
        Item.objects.create(order=order, stock=stock, quantity=quantity)
    schedule_message("orders.close", {"order": order.pk}, delay=conf.close_after(), key=order.key)
    return order


@transaction.atomic
def pay(order_id: int) -> Order:
    """Mark an order paid, cancel its closing, and tell the bank. To pay a second time changes nothing.

    Raises ``TooLate`` when the closing has run: then the pieces may be sold to another buyer already.
    """
    order = Order.objects.select_for_update().get(pk=order_id)
    if order.status == Order.Status.PAID:
        return order
    # CANCELLED: the closing will not run. REQUESTED: it is running, waits for our lock, and will find the order paid.
    # OUTCOME_UNKNOWN: its delivery crashed; it is transactional, so an order that is still new was not changed.
    answer = cancel_message(topic="orders.close", key=order.key, reason="paid")
    if answer.verdict in (Verdict.TOO_LATE, Verdict.NOT_FOUND):
        raise TooLate(f"order {order.pk} is {order.status}")
    order.status = Order.Status.PAID
    order.save()
    schedule_message("payments.callback", {"order": order.pk}, key=order.key)
    return order


@transaction.atomic
def annotate(order_id: int, note: str) -> Order:
    """Write a note on an order. The change puts off the reminder."""
    order = Order.objects.select_for_update().get(pk=order_id)
    order.note = note
    order.save()
    return order


def send_news(emails: Iterable[str], spacing: float = 0.0) -> list[Message]:
    """Send the news to all readers, one every ``spacing`` seconds, so that the mail server can keep up."""
    return schedule_messages(
        {"topic": "news.send", "payload": {"email": email}, "delay": number * spacing, "priority": -10}
        for number, email in enumerate(emails)
    )
