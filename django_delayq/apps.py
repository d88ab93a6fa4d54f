"""The Django application."""

from __future__ import annotations

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class DelayqConfig(AppConfig):
    """The queue: registers the checks and finds the handlers of the project."""

    name = "django_delayq"
    verbose_name = _("Delayed messages")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from . import checks
        from .project import registry

        checks.register()
        registry.autodiscover()
