"""What every page of the app has around it: the links to the others, the environment, the problems."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import NoReverseMatch, reverse

from .. import conf, models
from .readonly import ReadOnly

if TYPE_CHECKING:
    _Base = admin.ModelAdmin[Any]
else:
    _Base = object

# In the order of the links.
PAGES = (
    models.Dashboard,
    models.Message,
    models.DeadLetter,
    models.Queue,
    models.Worker,
    models.Health,
    models.Operation,
    models.AuditEvent,
)


@dataclass(frozen=True, slots=True)
class Link:
    """One link of the navigation."""

    label: str
    url: str
    here: bool


def context(model_admin: admin.ModelAdmin[Any], request: HttpRequest, title: str) -> dict[str, Any]:
    """What ``admin/django_delayq/base.html`` needs."""
    request.current_app = model_admin.admin_site.name
    return {
        **model_admin.admin_site.each_context(request),
        "opts": model_admin.opts,
        "media": model_admin.media,
        "title": title,
        "links": _links(model_admin, request),
        "environment": conf.get().ENVIRONMENT,
        "read_only": conf.get().ADMIN_READ_ONLY,
    }


def _links(model_admin: admin.ModelAdmin[Any], request: HttpRequest) -> list[Link]:
    site = model_admin.admin_site
    links = []
    for model in PAGES:
        other = site._registry.get(model)
        if other is None or not other.has_view_permission(request):
            continue
        try:
            url = reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_changelist", current_app=site.name)
        except NoReverseMatch:
            continue
        links.append(Link(str(model._meta.verbose_name_plural).capitalize(), url, model is model_admin.model))
    return links


class Page(ReadOnly, _Base):
    """Mix in before ``ModelAdmin``: the "list" of its model is one page of our own, for who may see messages."""

    template = ""
    actions = None

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return request.user.has_perm("django_delayq.view_message")

    def has_module_permission(self, request: HttpRequest) -> bool:
        return self.has_view_permission(request)

    def content(self, request: HttpRequest) -> dict[str, Any]:
        """What the page shows."""
        raise NotImplementedError

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        if not self.has_view_permission(request):
            raise PermissionDenied
        title = str(self.opts.verbose_name_plural).capitalize()
        shown = {**context(self, request, title), **self.content(request), **(extra_context or {})}
        return TemplateResponse(request, self.template, shown)
