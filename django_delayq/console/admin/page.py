"""What every page of the app has around it: the links to the others, the environment, the problems."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db.models import Model
from django.http import Http404, HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import NoReverseMatch, reverse

from ... import conf
from ...models import Message, Queue, Worker
from ..models import AuditEvent, Dashboard, DeadLetter, Health, Operation
from .readonly import ReadOnly

if TYPE_CHECKING:
    _Base = admin.ModelAdmin[Any]
else:
    _Base = object

# In the order of the links.
PAGES = (
    Dashboard,
    Message,
    DeadLetter,
    Queue,
    Worker,
    Health,
    Operation,
    AuditEvent,
)


@dataclass(frozen=True, slots=True)
class Link:
    """One link of the navigation."""

    label: str
    url: str
    here: bool


def navigation(model_admin: admin.ModelAdmin[Any], request: HttpRequest) -> dict[str, Any]:
    """What ``delayq_console/nav.html`` needs; pages that extend templates of the admin's own include that."""
    settings = conf.get()
    return {
        "links": _links(model_admin, request),
        "environment": settings.ENVIRONMENT,
        "read_only": settings.ADMIN_READ_ONLY,
        # A page that answers a POST has no address to come back to.
        "live": request.get_full_path() if request.method == "GET" else "",
    }


def context(model_admin: admin.ModelAdmin[Any], request: HttpRequest, title: str) -> dict[str, Any]:
    """What ``delayq_console/base.html`` needs."""
    request.current_app = model_admin.admin_site.name
    return {
        **model_admin.admin_site.each_context(request),
        "opts": model_admin.opts,
        "media": model_admin.media,
        "title": title,
        **navigation(model_admin, request),
    }


def admin_url(model_admin: admin.ModelAdmin[Any], model: type[Model], view: str = "changelist", *args: object) -> str:
    """Return the address of a page of a model on the same site as ``model_admin``."""
    name = f"admin:{model._meta.app_label}_{model._meta.model_name}_{view}"
    return reverse(name, args=args, current_app=model_admin.admin_site.name)


def page_url(model_admin: admin.ModelAdmin[Any], page: str) -> str:
    """Where the list of a model is on the same site; empty when the site has none."""
    site = model_admin.admin_site
    label = next((m._meta.app_label for m in PAGES if m._meta.model_name == page and m in site._registry), None)
    if label is None:
        return ""
    try:
        return reverse(f"admin:{label}_{page}_changelist", current_app=site.name)
    except NoReverseMatch:
        return ""


def _links(model_admin: admin.ModelAdmin[Any], request: HttpRequest) -> list[Link]:
    links = []
    for model in PAGES:
        other = model_admin.admin_site._registry.get(model)
        if other is None or not other.has_view_permission(request):
            continue
        url = page_url(model_admin, str(model._meta.model_name))
        if url:
            links.append(Link(str(model._meta.verbose_name_plural).capitalize(), url, model is model_admin.model))
    return links


class Page(ReadOnly, _Base):
    """Mix in before ``ModelAdmin``: the "list" of its model is one page of our own, for who may see messages."""

    template = ""
    actions = None
    # Whether each row has a page too. Django's own would show every field, payloads unmasked.
    has_detail = False

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

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        if not self.has_detail:
            raise Http404
        page: HttpResponse = super().changeform_view(request, object_id, form_url, extra_context)
        return page
