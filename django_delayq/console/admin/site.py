"""The pages in the registry of an admin site: each is imported when somebody first visits it.

``django.setup()`` and ``manage.py check`` need only the addresses of a page and its permissions. To import all pages
would cost every command and every worker an eighth of a second.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any

from django.contrib import admin
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.urls import URLPattern

from ...core.lazy import at_first_use
from ...models import Message, Queue, Worker
from ..models import AuditEvent, Dashboard, DeadLetters, Health, Limits, Operation, Topics
from .readonly import ReadOnly, View

# The models of the pages, in the order of their links in the navigation; and the module of each page in this package.
PAGES = (Dashboard, Message, DeadLetters, Queue, Topics, Limits, Worker, Health, Operation, AuditEvent)
_HOME = {
    "DashboardAdmin": "dashboard_page",
    "MessageAdmin": "message_list",
    "DeadLettersAdmin": "dead_letters_page",
    "QueueAdmin": "queue_pages",
    "TopicsAdmin": "topic_pages",
    "LimitsAdmin": "limits_page",
    "WorkerAdmin": "worker_pages",
    "HealthAdmin": "health_page",
    "OperationAdmin": "operation_pages",
    "AuditEventAdmin": "audit_pages",
    "visit": "troubled",
    "host": "troubled",
    "show_timeline": "timeline_page",
    "cancel_from_timeline": "timeline_page",
}
load = at_first_use(__package__, _HOME)


class OnDemand(ReadOnly):
    """Stands for a page in a site, with its addresses, and leaves every visit to the page."""

    @cached_property
    def page(self) -> ReadOnly:
        """The page itself."""
        found: ReadOnly = load(f"{self.model.__name__}Admin")(self.model, self.admin_site)
        return found

    def get_urls(self) -> list[URLPattern]:
        for name in ("changelist_view", "add_view", "change_view", "delete_view", "history_view"):
            setattr(self, name, self.view(name))
        return super().get_urls()

    def host(self, *args: Any, **kwargs: Any) -> HttpResponseBase:
        """Answer a view of another app as a page of the console: ``host(model_admin, view, request, …)``."""
        response: HttpResponseBase = load("host")(self.page, *args, **kwargs)
        return response

    def view(self, name: str) -> View:
        return partial(self._visit, name)

    def _visit(self, view: str, /, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        response: HttpResponseBase = load("visit")(self.page, view, request, *args, **kwargs)
        return response


def register(site: admin.AdminSite) -> None:
    """Add the pages to an admin site."""
    site.register(PAGES, OnDemand)
