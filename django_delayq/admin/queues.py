"""The queues: what waits in them, and who stopped them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.http import HttpRequest

from ..models import Queue
from .frame import Page

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Queue]
else:
    _ModelAdmin = admin.ModelAdmin


class QueueAdmin(Page, _ModelAdmin):
    template = "admin/django_delayq/queues.html"

    def content(self, request: HttpRequest) -> dict[str, Any]:
        return {}
