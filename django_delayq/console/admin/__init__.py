"""The pages of the console in Django's admin."""

from __future__ import annotations

from django.contrib import admin

from ... import models as queue_models
from .. import models
from .audit_pages import AuditEventAdmin
from .dashboard_page import DashboardAdmin
from .dead_letters_page import DeadLetterAdmin
from .health_page import HealthAdmin
from .limits_page import LimitsAdmin
from .message_list import MessageAdmin
from .operation_pages import OperationAdmin
from .queue_pages import QueueAdmin
from .worker_pages import WorkerAdmin

__all__ = ["MessageAdmin", "WorkerAdmin", "register"]


def register(site: admin.AdminSite) -> None:
    """Add the pages to another admin site; the default site has them already."""
    site.register(models.Dashboard, DashboardAdmin)
    site.register(queue_models.Message, MessageAdmin)
    site.register(models.DeadLetters, DeadLetterAdmin)
    site.register(queue_models.Queue, QueueAdmin)
    site.register(models.Limits, LimitsAdmin)
    site.register(queue_models.Worker, WorkerAdmin)
    site.register(models.Health, HealthAdmin)
    site.register(models.Operation, OperationAdmin)
    site.register(models.AuditEvent, AuditEventAdmin)


register(admin.site)
