"""The admin: messages and their timeline, read-only; and four verbs to steer them."""

from __future__ import annotations

from django.contrib import admin

from ..models import Message, Worker
from .messages import MessageAdmin
from .workers import WorkerAdmin

__all__ = ["MessageAdmin", "WorkerAdmin", "register"]


def register(site: admin.AdminSite) -> None:
    """Show messages and workers on ``site``; the default site has them already."""
    site.register(Message, MessageAdmin)
    site.register(Worker, WorkerAdmin)


register(admin.site)
