"""The Django application of the HTTP door."""

from __future__ import annotations

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class HttpConfig(AppConfig):
    name = "django_delayq.http"
    label = "delayq_http"
    verbose_name = _("Delayed messages: HTTP")
    default_auto_field = "django.db.models.BigAutoField"
