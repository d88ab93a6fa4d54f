"""What was done, or is being done, to many messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.contrib import admin

from ..models import Operation
from .readonly import ReadOnly

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Operation]
else:
    _ModelAdmin = admin.ModelAdmin


class OperationAdmin(ReadOnly, _ModelAdmin):
    ordering = ("-id",)
    actions = None
