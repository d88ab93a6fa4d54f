"""Who did what, when, why, and to how many."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.db.models import Model, Q, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import NoReverseMatch
from django.utils import timezone
from django.utils.translation import gettext_lazy

from ...models import Message
from ..models import AuditEvent, Operation
from ..statements import TooSlow, statement_timeout
from . import action_table
from .explanation import moment
from .page import Page, admin_url

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[AuditEvent]
else:
    _ModelAdmin = admin.ModelAdmin

PER_PAGE = 50
# How long the database may think. Milliseconds.
PATIENCE = 1500

PERIODS = (
    ("", gettext_lazy("any time"), None),
    ("day", gettext_lazy("the last day"), timedelta(days=1)),
    ("week", gettext_lazy("the last 7 days"), timedelta(days=7)),
    ("month", gettext_lazy("the last 30 days"), timedelta(days=30)),
)
_SPANS = {name: length for name, _label, length in PERIODS}


@dataclass(frozen=True, slots=True)
class Shown:
    """An event, ready to be shown."""

    event: AuditEvent
    at: str
    verb: str
    outcomes: str
    message_url: str
    operation_url: str


class AuditEventAdmin(Page, _ModelAdmin):
    """Nobody changes what is written here."""

    template = "delayq_console/auditevent/list.html"

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return request.user.has_perm("delayq_console.view_auditevent")

    def content(self, request: HttpRequest) -> dict[str, Any]:
        asked = {name: request.GET.get(name, "")[:200] for name in ("verb", "actor", "period", "q", "before")}
        rows = _found(self.get_queryset(request), asked)
        too_slow = False
        try:
            with statement_timeout(rows.db, PATIENCE):
                page = list(rows[: PER_PAGE + 1])
        except TooSlow:
            page, too_slow = [], True
        query = request.GET.copy()
        if len(page) > PER_PAGE:
            query["before"] = str(page[PER_PAGE - 1].pk)
        return {
            "events": [self._show(event) for event in page[:PER_PAGE]],
            "older": query.urlencode() if len(page) > PER_PAGE else "",
            "asked": asked,
            "filtered": any(asked.values()),
            "too_slow": too_slow,
            "verbs": [(name, str(label)) for name, label in action_table.LABELS.items()],
            "periods": [(name, str(label)) for name, label, _length in PERIODS],
        }

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        return HttpResponseRedirect(self._url(AuditEvent, "changelist"))

    def _show(self, event: AuditEvent) -> Shown:
        outcomes = event.outcomes
        if event.operation is not None and event.operation.verb == event.verb:
            # They come in while it is done.
            outcomes = outcomes or event.operation.outcomes
        return Shown(
            event,
            moment(event.at, "seconds"),
            action_table.label(event.verb),
            action_table.outcome(outcomes),
            self._url(Message, "change", event.message_id) if event.message_id else "",
            self._url(Operation, "change", event.operation_id) if event.operation_id else "",
        )

    def _url(self, model: type[Model], view: str, *args: object) -> str:
        try:
            return admin_url(self, model, view, *args)
        except NoReverseMatch:
            return ""


def _found(rows: QuerySet[AuditEvent], asked: dict[str, str]) -> QuerySet[AuditEvent]:
    rows = rows.select_related("operation").defer("operation__scope").order_by("-pk")
    if asked["verb"]:
        rows = rows.filter(verb=asked["verb"])
    if asked["actor"]:
        rows = rows.filter(actor__icontains=_storable(asked["actor"]))
    length = _SPANS.get(asked["period"])
    if length is not None:
        rows = rows.filter(at__gte=timezone.now() - length)
    if asked["q"]:
        rows = rows.filter(_searched(_storable(asked["q"].strip())))
    if _is_number(asked["before"]):
        rows = rows.filter(pk__lt=int(asked["before"]))
    return rows


def _searched(text: str) -> Q:
    """A message by its id, or a part of the target."""
    number = text.removeprefix("#")
    if _is_number(number):
        return Q(message_id=int(number)) | Q(target__iregex=rf"#{number}([^0-9]|$)")
    return Q(target__icontains=text)


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,18}", text) is not None


def _storable(text: str) -> str:
    return text.replace("\x00", "")
