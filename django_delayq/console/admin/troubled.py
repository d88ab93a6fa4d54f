"""Answers with the reason when the database does not answer a page in time, or takes no writes."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

from django.contrib import admin
from django.db import DatabaseError, InterfaceError
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.template.response import TemplateResponse
from django.utils.translation import gettext as _

from ...core.actors import display_name
from ...record.sql.troubles import Trouble, trouble
from ..console_tuning import timeouts
from ..models import AuditEvent
from ..statements import TooSlow, answering_within, in_time, statement_timeout
from . import charts, page
from .readonly import ReadOnly, View
from .search_box import LONGER_VAR

# The views that read one row and what belongs to it, and write nothing. Others limit each of their parts.
OF_ONE_ROW = ("change_view",)


def visit(shown: ReadOnly, view: str, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
    """Return the answer of a view, or a page with the reason why the database could not serve it."""
    limited = shown.get_queryset(request).db if view in OF_ONE_ROW else None
    return _answer(shown, shown.view(view), limited, request, *args, **kwargs)


def host(
    shown: ReadOnly, guest: admin.ModelAdmin[Any], view: View, request: HttpRequest, *args: Any, **kwargs: Any
) -> HttpResponseBase:
    """Return the answer of another app's view as a page of the console, with its context as ``extra_context``."""

    def within(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        lent = {"spark": charts.spark, "page_links": page.page_links, "audited": partial(_audited, shown, request)}
        frame = {**page.navigation(shown, request, guest.model), **lent}
        has_sidebar = frame.pop("is_nav_sidebar_enabled")
        response = view(request, *args, **{"extra_context": frame, **kwargs})
        if isinstance(response, TemplateResponse):
            response.context_data = {**(response.context_data or {}), **frame}
            # Django's own pages have no other navigation than its sidebar.
            if "has_frame" in response.context_data:
                response.context_data["is_nav_sidebar_enabled"] = has_sidebar
            response.render()
        return response

    limited = shown.using if request.method != "POST" else None
    return _answer(shown, within, limited, request, *args, **kwargs)


def _audited(shown: ReadOnly, request: HttpRequest, action: str, targets: list[str]) -> dict[str, str]:
    """Return who did this to each of these targets, as far as the user may see it, and it is found in time."""
    if not page.may_view(shown, AuditEvent, request):
        return {}
    rows = AuditEvent.objects.using(shown.using).filter(action=action, target__in=targets)
    found = in_time(shown.using, timeouts.beside, dict, rows.values_list("target", "actor")) or {}
    return {target: display_name(actor) for target, actor in found.items()}


def _answer(
    shown: ReadOnly, view: View, limited: str | None, request: HttpRequest, *args: Any, **kwargs: Any
) -> HttpResponseBase:
    """Let a view answer in time. ``limited``: its database, if its statements have no time limits of their own."""
    try:
        with ExitStack() as limits:
            if request.method != "POST" and LONGER_VAR not in request.GET:
                limits.enter_context(answering_within(timeouts.answer))
            if limited is not None:
                limits.enter_context(statement_timeout(limited, timeouts.page))
            return view(request, *args, **kwargs)
    except TooSlow:
        text = _("The database did not answer in time. A table may be locked, or the server is busy: try again.")
    except (DatabaseError, InterfaceError) as error:
        if trouble(error) != Trouble.READ_ONLY:
            raise
        text = _("The database takes no writes: nothing was done.")
    return page.response(shown, request, _("Nothing was done"), "troubled", {"text": text}, status=503)
