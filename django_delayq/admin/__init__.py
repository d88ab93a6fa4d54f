"""The admin: a dashboard, messages with their timeline, and verbs to steer them."""

from __future__ import annotations

from django.contrib import admin

from .. import models
from .audit import AuditEventAdmin
from .dashboard import DashboardAdmin
from .deadletters import DeadLetterAdmin
from .health import HealthAdmin
from .messages import MessageAdmin
from .operations import OperationAdmin
from .queues import QueueAdmin
from .workers import WorkerAdmin

__all__ = ["MessageAdmin", "WorkerAdmin", "register"]


def register(site: admin.AdminSite) -> None:
    """Show the pages on ``site``; the default site has them already."""
    site.register(models.Dashboard, DashboardAdmin)
    site.register(models.Message, MessageAdmin)
    site.register(models.DeadLetter, DeadLetterAdmin)
    site.register(models.Queue, QueueAdmin)
    site.register(models.Worker, WorkerAdmin)
    site.register(models.Health, HealthAdmin)
    site.register(models.Operation, OperationAdmin)
    site.register(models.AuditEvent, AuditEventAdmin)


register(admin.site)
