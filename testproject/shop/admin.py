"""The shop in the admin."""

from __future__ import annotations

from django.apps import apps
from django.contrib import admin

from .models import Item, Order, Stock

if apps.is_installed("django_delayq.console"):
    from django_delayq.console.admin import DelayqTimeline
else:

    class DelayqTimeline:  # type: ignore[no-redef]
        """Without the console nothing is shown."""


class ItemInline(admin.TabularInline):  # type: ignore[type-arg]  # generic for mypy only
    model = Item
    extra = 0


@admin.register(Order)
class OrderAdmin(DelayqTimeline, admin.ModelAdmin):  # type: ignore[type-arg]
    # What will happen to an order, and what did: the messages with its key.
    delayq_key = "order-{pk}"
    list_display = ("id", "email", "status", "created_at")
    list_filter = ("status",)
    inlines = (ItemInline,)


@admin.register(Stock)
class StockAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    list_display = ("article", "available")
