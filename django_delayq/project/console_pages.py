"""The base of the admin's pages that other apps add to the console: they are pages of it where the site has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.contrib.admin.views.main import ORDER_VAR, PAGE_VAR, ChangeList
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.template.response import TemplateResponse
from django.urls import URLPattern

from ..models import Message
from . import console_conf

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Any]
else:
    _ModelAdmin = admin.ModelAdmin


class ConsolePages(_ModelAdmin):
    """Pages of Django's admin, in the frame of the console where the site has one. One that only reads changes nothing.

    ``console_list`` is the template of the list there; ``shown_in_console`` returns what it shows beside the frame.
    """

    console_list = ""
    view_on_site = False

    def get_urls(self) -> list[URLPattern]:
        for name in ("changelist_view", "add_view", "change_view", "delete_view", "history_view"):
            setattr(self, name, partial(self._visit, name))
        return super().get_urls()

    def _visit(self, name: str, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        view, host = getattr(type(self), name).__get__(self), self.host
        response: HttpResponseBase = (
            host(self, view, request, *args, **kwargs) if host else view(request, *args, **kwargs)
        )
        return response

    @property
    def host(self) -> Callable[..., HttpResponseBase] | None:
        """What answers a view as a page of the console; None where the site has no console."""
        site = self.admin_site
        return getattr(site.get_model_admin(Message), "host", None) if site.is_registered(Message) else None

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Return the list: that of Django's admin, or in the console one of its own."""
        response = super().changelist_view(request, extra_context)
        shown = (response.context_data or {}) if isinstance(response, TemplateResponse) else {}
        if extra_context and "cl" in shown:
            cl = shown["cl"]
            response.template_name = self.console_list  # type: ignore[attr-defined]
            # The scripts of Django's own list miss parts of it.
            shown["media"] = ""
            shown["has_frame"] = True
            shown["title"] = str(self.opts.verbose_name_plural).capitalize()
            shown["filters"] = [(spec.title, list(spec.choices(cl))) for spec in cl.filter_specs]
            shown["columns"] = dict(_columns(cl))
            shown["pages"] = extra_context["page_links"](cl.paginator, cl.page_num, partial(_page_url, cl))
            shown.update(self.shown_in_console(request, cl, extra_context))
        return response

    def shown_in_console(self, request: HttpRequest, cl: ChangeList, frame: dict[str, Any]) -> dict[str, Any]:
        """Return what the list shows. ``frame`` has what the console lends its guests."""
        raise NotImplementedError

    def has_add_permission(self, request: HttpRequest) -> bool:
        return super().has_add_permission(request) and not console_conf.get().READ_ONLY

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return super().has_change_permission(request, obj) and not console_conf.get().READ_ONLY

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return super().has_delete_permission(request, obj) and not console_conf.get().READ_ONLY


def _page_url(cl: ChangeList, number: int) -> str:
    return cl.get_query_string({PAGE_VAR: number})


def _columns(cl: ChangeList) -> Iterator[tuple[str, SimpleNamespace]]:
    """Yield the columns of a list by name: in which way each sorts now, and the address at which it does."""
    ways = cl.get_ordering_field_columns()
    for number, name in enumerate(cl.list_display):
        way = ways.get(number, "")
        url = cl.get_query_string({ORDER_VAR: f"-{number}" if way == "asc" else f"{number}"})
        yield str(name), SimpleNamespace(way=way, url=url)
