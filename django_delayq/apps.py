"""The Django application."""

from __future__ import annotations

import logging
from typing import Any

from django.apps import AppConfig
from django.core.signals import setting_changed
from django.db.models.signals import post_migrate
from django.utils.translation import gettext_lazy as _

from .project import conf


class DelayqConfig(AppConfig):
    """The queue: registers the checks and finds the handlers of the project."""

    name = "django_delayq"
    label = "delayq"
    verbose_name = _("Delayed messages")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from . import checks
        from .models import log_view
        from .project import registry

        # Settings that import an integration make this logger before Django configures logging, which then disables it.
        logging.getLogger("django_delayq").disabled = False
        checks.register()
        registry.calls = _calls
        post_migrate.connect(log_view.make, sender=self, dispatch_uid="django_delayq.log_view")
        setting_changed.connect(_bring_testing, dispatch_uid="django_delayq.apps")
        _bring_testing(setting="DELAYQ")
        registry.autodiscover()


def _calls() -> Any:
    """Return the module with the calls that schedule messages, which is imported at the first call."""
    from .api import scheduling

    return scheduling


def _bring_testing(*, setting: str, **kwargs: Any) -> None:
    """Import what reads ``DELAYQ["TESTING"]`` and runs messages at once, where the project has that setting."""
    if setting == "DELAYQ" and conf.section("TESTING") is not None:
        from .testing import immediate

        immediate.register()
