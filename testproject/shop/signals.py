"""Reminds the buyer of an order that has not been changed for a while."""

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
    """Schedule the reminder of a new order; later changes put it off, and payment or closing cancels it."""
    if instance.status != Order.Status.NEW:
        cancel_message(topic="orders.remind", key=instance.key, reason=instance.status)
        return
    # A conflict means that the reminder is being sent now: too late to put it off, and the order is saved anyway.
    with contextlib.suppress(KeyConflict):
        schedule_message(
            "orders.remind",
            {"order": instance.pk},
            delay=conf.remind_after(),
            key=instance.key,
            on_conflict="debounce",
        )
