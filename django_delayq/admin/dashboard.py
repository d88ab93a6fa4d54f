"""What is going on, and what comes next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.http import HttpRequest

from ..models import Dashboard
from .frame import Page

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Dashboard]
else:
    _ModelAdmin = admin.ModelAdmin


class DashboardAdmin(Page, _ModelAdmin):
    template = "admin/django_delayq/dashboard.html"

    def content(self, request: HttpRequest) -> dict[str, Any]:
        return {}
