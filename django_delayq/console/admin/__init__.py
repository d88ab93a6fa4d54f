"""The pages of the console in Django's admin. The default site has them; ``register`` adds them to another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.contrib import admin

from .site import load, register
from .timeline import DelayqTimeline

if TYPE_CHECKING:
    from .message_list import MessageAdmin
    from .worker_pages import WorkerAdmin

__all__ = ["DelayqTimeline", "MessageAdmin", "WorkerAdmin", "register"]

if not TYPE_CHECKING:
    __getattr__ = load

register(admin.site)
