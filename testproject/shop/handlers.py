"""The shop's handlers. django-delayq finds this module by its name."""

from __future__ import annotations

import json
from urllib.request import Request, urlopen

from django_delayq import Delivered, Reject, handler

from . import conf
from .models import Deed, Order


@handler("orders.close", transactional=True)
def close(message: Delivered) -> None:
    """Close an unpaid order and give its pieces back. Exactly once: the outcome is recorded in the same transaction."""
    order = Order.objects.select_for_update().get(pk=message.payload["order"])
    if order.status != Order.Status.NEW:
        return
    for item in order.items.select_related("stock"):
        item.stock.give_back(item.quantity)
    order.status = Order.Status.CLOSED
    order.save()
    Deed.of(message, "closed", order).save()


@handler("orders.remind")
async def remind(message: Delivered) -> None:
    """Remind the buyer. A real shop sends a mail here."""
    order = await Order.objects.aget(pk=message.payload["order"])
    if order.status == Order.Status.NEW:
        await Deed.of(message, "reminded", order).asave()


@handler("payments.callback", retry=conf.callback_retry(), timeout="30s")
def callback(message: Delivered) -> None:
    """Tell the bank that an order is paid; a call that fails is retried."""
    order = Order.objects.get(pk=message.payload["order"])
    url = conf.callback_url()
    if not url.startswith(("http://", "https://")):
        raise Reject("the bank's address is not an HTTP URL")
    # The key is the same for each call: by it the bank tells a second call about one payment from a second payment.
    headers = {"Content-Type": "application/json", "Idempotency-Key": f"payment-{order.pk}"}
    body = json.dumps({"order": order.pk, "status": order.status}).encode()
    with urlopen(Request(url, body, headers), timeout=conf.CALLBACK_TIMEOUT) as answer:  # noqa: S310
        answer.read()
    Deed.of(message, "told the bank", order).save()


@handler("news.send")
def send_news(message: Delivered) -> None:
    """Send the news to one reader. A real shop sends a mail here."""
    Deed.of(message, "sent the news").save()
