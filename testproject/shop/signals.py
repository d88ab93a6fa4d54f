"""Reminds the buyer of an order that nobody has touched for a while."""

from __future__ import annotations

import contextlib
from typing import Any

from django.db.models.signals import post_save
from django.dispatch import receiver

from django_delayq import KeyConflict, cancel_message, schedule_message

from . import conf
from .models import Order


@receiver(post_save, sender=Order, dispatch_uid="shop.remind")
def remind(sender: type[Order], instance: Order, **kwargs: Any) -> None:
    """Schedule the reminder of a new order; each further change puts it off, and the end of the order calls it off."""
    if instance.status != Order.Status.NEW:
        cancel_message(topic="orders.remind", key=instance.key, reason=instance.status)
        return
    # It is being sent this moment: too late to put it off, and no reason for the order not to be saved.
    with contextlib.suppress(KeyConflict):
        schedule_message(
            "orders.remind",
            {"order": instance.pk},
            delay=conf.remind_after(),
            key=instance.key,
            on_conflict="debounce",
        )
