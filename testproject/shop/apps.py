"""The Django application of the shop."""

from __future__ import annotations

from django.apps import AppConfig


class ShopConfig(AppConfig):
    name = "testproject.shop"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from . import signals  # noqa: F401  connects the receivers
