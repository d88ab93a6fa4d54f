"""What a page says when the database does not answer in time, or takes no writes."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from django.db import DatabaseError, InterfaceError
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.template.response import TemplateResponse
from django.utils.translation import gettext as _

from ...record.sql.troubles import Trouble, trouble
from ..console_tuning import timeouts
from ..statements import TooSlow, answering_within, statement_timeout
from . import page
from .readonly import ReadOnly
from .search_box import LONGER_VAR

# The views that read one row and what belongs to it, and write nothing. Others limit each of their parts.
OF_ONE_ROW = ("change_view",)


def visit(shown: ReadOnly, view: str, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
    """Return what a view of a page answers, or a page with the reason why the database could not serve it."""
    try:
        with ExitStack() as limits:
            if request.method != "POST" and LONGER_VAR not in request.GET:
                limits.enter_context(answering_within(timeouts.answer))
            if view in OF_ONE_ROW:
                limits.enter_context(statement_timeout(shown.get_queryset(request).db, timeouts.page))
            return shown.view(view)(request, *args, **kwargs)
    except TooSlow:
        text = _("The database did not answer in time. A table may be locked, or the server is busy: try again.")
    except (DatabaseError, InterfaceError) as error:
        if trouble(error) != Trouble.READ_ONLY:
            raise
        text = _("The database takes no writes: nothing was done.")
    context = {**page.context(shown, request, _("Nothing was done")), "text": text}
    return TemplateResponse(request, "delayq_console/troubled.html", context, status=503)
