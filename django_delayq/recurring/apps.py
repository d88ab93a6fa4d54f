"""The Django application of recurring messages."""

from __future__ import annotations

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class RecurringConfig(AppConfig):
    name = "django_delayq.recurring"
    label = "delayq_recurring"
    verbose_name = _("Delayed messages: schedules")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from . import services

        services.register()
