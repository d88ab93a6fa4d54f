"""The worker processes, and when they were last seen."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.http import HttpRequest
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..models import Worker
from .readonly import ReadOnly
from .story import span

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Worker]
else:
    _ModelAdmin = admin.ModelAdmin


class WorkerAdmin(ReadOnly, _ModelAdmin):
    """Who may see messages may see who works on them."""

    list_display = ("name", "host", "pid", "serves", "threads", "started_at", "seen", "alive")
    fields = ("name", "host", "pid", "serves", "threads", "started_at", "seen_at", "alive")
    readonly_fields = fields
    ordering = ("-seen_at", "name")
    actions = None

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return request.user.has_perm("django_delayq.view_message")

    @admin.display(description=gettext_lazy("queues"))
    def serves(self, worker: Worker) -> str:
        return ", ".join(map(str, worker.queues))

    @admin.display(description=gettext_lazy("last seen"))
    def seen(self, worker: Worker) -> str:
        return _("%(span)s ago") % {"span": span(timezone.now() - worker.seen_at)}

    @admin.display(description=gettext_lazy("alive"), boolean=True)
    def alive(self, worker: Worker) -> bool:
        return timezone.now() - worker.seen_at < timedelta(seconds=Worker.ALIVE)
