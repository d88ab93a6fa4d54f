"""The parts that all pages share: the navigation, the addresses, the user in whose name a page acts, the base class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from django.apps import apps
from django.contrib import admin
from django.core.paginator import Paginator
from django.db import router
from django.db.models import Model, QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.template import loader
from django.template.response import TemplateResponse
from django.utils.translation import gettext as _

from ...core import actors
from ...core.values import row_id
from ...models import Message
from ...project import console_conf
from ...record.sql import statements
from ...record.sql.moves import writing
from .. import audit
from ..models import AuditEvent, Dashboard, DeadLetters, Limits, Operation
from ..operations import lifecycle
from . import nav_counts, panels
from .readonly import ReadOnly
from .site import PAGES

Row = TypeVar("Row", bound=Model)
T = TypeVar("T")

# The models of pages in other apps of this package.
ELSEWHERE = (("delayq_recurring", "Schedule"), ("delayq_http", "Token"))


def navigation(model_admin: ReadOnly, request: HttpRequest, here: type[Model] | None = None) -> dict[str, Any]:
    """Return the context of ``delayq_console/nav.html``, which pages based on Django's own templates include.

    ``here`` is the model of the page where another app has it.
    """
    settings, using = console_conf.get(), model_admin.using
    return {
        "is_nav_sidebar_enabled": model_admin.admin_site.enable_nav_sidebar and _is_replaced("admin/nav_sidebar.html"),
        "links": _links(model_admin, request, here or model_admin.model),
        "search_url": model_admin.url(Message),
        "environment": settings.ENVIRONMENT,
        "read_only": settings.READ_ONLY,
        "takes_no_writes": panels.load("writes", using, statements(using).takes_writes).value is False,
        # A browser cannot fetch the answer to a POST again, so such a page does not refresh itself.
        "live": request.get_full_path() if request.method == "GET" else "",
    }


def _links(model_admin: ReadOnly, request: HttpRequest, here: type[Model]) -> Iterator[SimpleNamespace]:
    """Yield the links when the page is written, which has read most of the numbers beside them meanwhile."""
    counts = nav_counts.read(model_admin, request)
    for model in _linked():
        if may_view(model_admin, model, request):
            url = model_admin.url(model)
            yield SimpleNamespace(label=label_of(model), url=url, here=model is here, count=counts.get(model))


def _linked() -> Iterator[type[Model]]:
    """Yield the models of the pages in the order of their links, among them those of other apps that are installed."""
    for model in PAGES:
        yield model
        if model is Limits:
            yield from (apps.get_model(*name) for name in ELSEWHERE if name[0] in apps.app_configs)


def label_of(model: type[Model]) -> str:
    """Return the name of a page in the navigation, if it differs from the name of its model."""
    own: dict[type[Model], str] = {Dashboard: _("Now"), DeadLetters: _("Failures"), AuditEvent: _("Audit")}
    return own.get(model) or str(model._meta.verbose_name_plural).capitalize()


def _is_replaced(template: str) -> bool:
    """Tell whether a theme replaces this template of Django's admin.

    A theme's sidebar may be its only navigation, so it is shown; Django's own has the same links as the console.
    """
    origin = getattr(loader.get_template(template), "origin", None)
    return origin is None or Path(admin.__path__[0]) not in Path(origin.name).parents


def context(model_admin: ReadOnly, request: HttpRequest, title: str) -> dict[str, Any]:
    """Return the context of ``delayq_console/base.html``."""
    request.current_app = model_admin.admin_site.name
    return {
        **model_admin.admin_site.each_context(request),
        "opts": model_admin.opts,
        "media": model_admin.media,
        "title": title,
        **navigation(model_admin, request),
    }


def response(
    model_admin: ReadOnly, request: HttpRequest, title: str, template: str, facts: Mapping[str, Any], status: int = 200
) -> HttpResponse:
    """Return a page that has these facts in what all pages share."""
    shown = {**context(model_admin, request, title), **facts}
    return TemplateResponse(request, f"delayq_console/{template}.html", shown, status=status)


def may_view(model_admin: ReadOnly, model: type[Model], request: HttpRequest) -> bool:
    """Tell whether the site of ``model_admin`` has the pages of a model and the user may view them."""
    site = model_admin.admin_site
    return site.is_registered(model) and site.get_model_admin(model).has_view_permission(request)


def operation_url(model_admin: ReadOnly, request: HttpRequest, operation: Operation | None) -> str:
    """Return the address of an operation, or "" when there is none or the user may not view it."""
    if operation is None or not may_view(model_admin, Operation, request):
        return ""
    return model_admin.url(Operation, "change", operation.pk)


def actor_of(request: HttpRequest) -> str:
    """Return the name by which transitions, operations and the audit know the user of a request."""
    return actors.of_user(request.user.get_username())


@contextmanager
def acting_as_user(request: HttpRequest) -> Iterator[None]:
    """Open a transaction in which all is done in the name of the request's user."""
    with actors.acting_as(actor_of(request)), writing(router.db_for_write(Message)):
        yield


def record(request: HttpRequest, action: str, target: str, **facts: Any) -> None:
    """Write to the audit what the user did."""
    with actors.acting_as(actor_of(request)):
        audit.record(router.db_for_write(Message), action, target, user=request.user, **facts)


def start_operation(
    request: HttpRequest,
    action: str,
    scope: Mapping[str, Any],
    arguments: Mapping[str, Any],
    *,
    audited: tuple[str, str] | None = None,
    nonce: str | None = None,
    **told: Any,
) -> Operation:
    """Queue an operation in the name of the user, and write that to the audit.

    ``audited`` is the verb and the target for the audit, by default the action and its messages. ``told`` are further
    arguments of ``lifecycle.start``.
    """
    with acting_as_user(request):
        operation = lifecycle.start(router.db_for_write(Message), action, scope, arguments, **told)
        verb, target = audited or (action, operation.described)
        record(request, verb, target, reason=operation.reason, operation=operation, nonce=nonce)
    return operation


def newest(request: HttpRequest, rows: QuerySet[Row], size: int) -> tuple[list[Row], int | None]:
    """Return a page of rows, the newest first, and the id before which the next page begins, if there is one."""
    with suppress(ValueError):
        rows = rows.filter(pk__lt=row_id(request.GET.get("before", "")))
    read = list(rows.order_by("-pk")[: size + 1])
    return read[:size], read[size - 1].pk if len(read) > size else None


def chosen(request: HttpRequest, name: str, labels: Mapping[str, Any]) -> str:
    """Return the choice that the address names; by default the first."""
    given = request.GET.get(name, "")
    return given if given in labels else next(iter(labels))


def choices(request: HttpRequest, name: str, now: str, labels: Mapping[str, Any]) -> list[SimpleNamespace]:
    """Return what ``delayq_console/choices.html`` shows: a link for each choice."""
    return [
        SimpleNamespace(label=str(label), url=_query(request, name, choice), chosen=choice == now)
        for choice, label in labels.items()
    ]


def _query(request: HttpRequest, name: str, value: str) -> str:
    """Return the query string of this page with another value, which leads to the first page of a list."""
    query = request.GET.copy()
    query.pop("page", None)
    query[name] = value
    return f"?{query.urlencode()}"


def matching(request: HttpRequest, names: Iterable[str]) -> list[str]:
    """Return the names that have the text of the search box in them, or that begin with it where it ends with a *."""
    text = request.GET.get("q", "").strip().casefold()
    if text.endswith("*"):
        return [name for name in names if name.casefold().startswith(text[:-1])]
    return [name for name in names if text in name.casefold()]


def paged(request: HttpRequest, rows: Sequence[T], size: int) -> tuple[list[T], list[SimpleNamespace]]:
    """Return the rows of the page that the address names, and a link to each page where there are several."""
    found = Paginator(rows, size).get_page(request.GET.get("page"))
    links = page_links(found.paginator, found.number, lambda number: _query(request, "page", str(number)))
    return list(found.object_list), links


def page_links(paginator: Paginator[Any], now: int, url: Callable[[int], str]) -> list[SimpleNamespace]:
    """Return the links to the pages of a list, if it has several, and the gaps between them, for ``choices.html``."""
    now = paginator.get_page(now).number
    return [
        SimpleNamespace(label=str(number), url=url(number) if isinstance(number, int) else "", chosen=number == now)
        for number in paginator.get_elided_page_range(now, on_each_side=2, on_ends=1)
        if paginator.num_pages > 1
    ]


class Page(ReadOnly):
    """One page of our own in place of the model's list, for users who may view messages."""

    template = ""
    actions = None

    def content(self, request: HttpRequest) -> dict[str, Any]:
        """Return the context of the page, without the parts that all pages share."""
        raise NotImplementedError

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        self.require(request)
        facts = {**self.content(request), **(extra_context or {})}
        return response(self, request, label_of(self.model), self.template, facts)

    def change_view(self, request: HttpRequest, object_id: str, *args: Any, **kwargs: Any) -> HttpResponse:
        """Return the page of a row. Django's own would show every field, payloads without masks."""
        raise Http404

    def history_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """Refuse Django's page of changes made in the admin: these rows are not changed there."""
        raise Http404
