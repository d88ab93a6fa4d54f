"""The shop in the admin."""

from __future__ import annotations

from django.contrib import admin

from .models import Item, Order, Stock


class ItemInline(admin.TabularInline):  # type: ignore[type-arg]  # generic for mypy only
    model = Item
    extra = 0


@admin.register(Order)
class OrderAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    list_display = ("id", "email", "status", "created_at")
    list_filter = ("status",)
    inlines = (ItemInline,)


@admin.register(Stock)
class StockAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    list_display = ("article", "available")
