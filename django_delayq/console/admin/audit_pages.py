"""The list of audit events: every change by users and commands, with its time, reason and outcomes."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils import timezone
from django.utils.translation import gettext_lazy

from ...core.outcomes import storable
from ...core.values import row_id
from ..console_tuning import timeouts
from ..models import AuditEvent
from ..statements import in_time
from . import action_table
from .explanation import moment
from .page import Page, newest

PERIODS = (
    ("", gettext_lazy("any time"), None),
    ("day", gettext_lazy("the last day"), timedelta(days=1)),
    ("week", gettext_lazy("the last 7 days"), timedelta(days=7)),
    ("month", gettext_lazy("the last 30 days"), timedelta(days=30)),
)
_ASKED = ("action", "actor", "period", "q", "before")
_SPANS = {name: length for name, _label, length in PERIODS}


class AuditEventAdmin(Page):
    """The audit events, which nobody can change."""

    template = "auditevent/list"

    def content(self, request: HttpRequest) -> dict[str, Any]:
        asked = {name: storable(request.GET.get(name, ""))[:200] for name in _ASKED}
        rows = _found(self.get_queryset(request), asked)
        found = in_time(rows.db, timeouts.page, newest, request, rows, self.list_per_page)
        shown, older = found or ([], None)
        # Other apps send actions that this app does not know.
        others = sorted({event.action for event in shown} - action_table.LABELS.keys())
        query = request.GET.copy()
        query["before"] = str(older)
        return {
            "events": [_shown(event) for event in shown],
            "older": query.urlencode() if older else "",
            "asked": asked,
            "filtered": any(asked.values()),
            "too_slow": found is None,
            "actions": [(name, action_table.label(name)) for name in (*action_table.LABELS, *others)],
            "periods": [(name, str(label)) for name, label, _length in PERIODS],
        }

    def change_view(self, request: HttpRequest, object_id: str, *args: Any, **kwargs: Any) -> HttpResponse:
        return HttpResponseRedirect(self.url(AuditEvent))


def _shown(event: AuditEvent) -> SimpleNamespace:
    """Return what the list of audit events shows of one."""
    outcomes = event.outcomes
    if event.operation is not None and event.operation.action == event.action:
        # Until the operation has ended, only its row has the outcomes.
        outcomes = outcomes or event.operation.outcomes
    return SimpleNamespace(
        event=event,
        at=moment(event.at, "seconds"),
        action=action_table.label(event.action),
        outcomes=action_table.outcomes_text(outcomes),
    )


def _found(rows: QuerySet[AuditEvent], asked: dict[str, str]) -> QuerySet[AuditEvent]:
    """Return the audit events that the filters and the search box of the page ask for."""
    rows = rows.select_related("operation").defer("operation__scope")
    if asked["action"]:
        rows = rows.filter(action=asked["action"])
    if asked["actor"]:
        rows = rows.filter(actor__icontains=asked["actor"])
    length = _SPANS.get(asked["period"])
    if length is not None:
        rows = rows.filter(at__gte=timezone.now() - length)
    if asked["q"]:
        rows = rows.filter(_searched(asked["q"].strip()))
    return rows


def _searched(text: str) -> Q:
    """Return the condition for a message by its id, or for a part of the target."""
    try:
        number = row_id(text.removeprefix("#"))
    except ValueError:
        return Q(target__icontains=text)
    return Q(message_id=number) | Q(target__iregex=rf"#{number}([^0-9]|$)")
