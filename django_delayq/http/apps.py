"""The Django application of the HTTP door."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig
from django.core import checks
from django.utils.translation import gettext_lazy as _

from ..checks import TAG, errors
from ..project import conf, http_conf


class HttpConfig(AppConfig):
    name = "django_delayq.http"
    label = "delayq_http"
    verbose_name = _("Delayed messages: HTTP")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        checks.register(check_settings, TAG)


def check_settings(app_configs: Sequence[Any] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Check ``DELAYQ["HTTP"]``: ``delayq.E001`` to ``E003``. Touches neither the database nor Redis."""
    _settings, problems = http_conf.parse(conf.section("HTTP"))
    return errors(problems)
