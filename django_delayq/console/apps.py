"""The Django application of the console."""

from __future__ import annotations

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class ConsoleConfig(AppConfig):
    name = "django_delayq.console"
    label = "delayq_console"
    verbose_name = _("Delayed messages: console")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from . import additions

        additions.register()
