"""Who did what, when, why, and to how many."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.contrib import admin

from ..models import AuditEvent
from .readonly import ReadOnly

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[AuditEvent]
else:
    _ModelAdmin = admin.ModelAdmin


class AuditEventAdmin(ReadOnly, _ModelAdmin):
    ordering = ("-id",)
    actions = None
