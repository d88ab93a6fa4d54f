"""What was given up, by topic and by kind of error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.http import HttpRequest

from ..models import DeadLetter
from .frame import Page

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[DeadLetter]
else:
    _ModelAdmin = admin.ModelAdmin


class DeadLetterAdmin(Page, _ModelAdmin):
    template = "admin/django_delayq/deadletters.html"

    def content(self, request: HttpRequest) -> dict[str, Any]:
        return {}
