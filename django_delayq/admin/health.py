"""The record and Redis, side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.http import HttpRequest

from ..models import Health
from .frame import Page

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Health]
else:
    _ModelAdmin = admin.ModelAdmin


class HealthAdmin(Page, _ModelAdmin):
    template = "admin/django_delayq/health.html"

    def content(self, request: HttpRequest) -> dict[str, Any]:
        return {}
