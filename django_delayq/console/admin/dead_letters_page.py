"""What was given up, by topic and by kind of error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from django.contrib import admin
from django.contrib.admin.views.main import SEARCH_VAR
from django.http import HttpRequest
from django.utils import timezone

from ...models import Message
from ..models import DeadLetter
from ..statements import TooSlow
from ..statistics.failures import DEAD_CAP, DeadGroup, group_dead
from . import action_table, search_box
from .action_table import PURGE, REQUEUE, Verb
from .explanation import moment, span
from .page import Page, admin_url

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[DeadLetter]
else:
    _ModelAdmin = admin.ModelAdmin

# Groups of a table that are shown.
SHOWN = 50


@dataclass(frozen=True, slots=True)
class Shown:
    """A group, ready to be shown."""

    group: DeadGroup
    list: str
    sample: str
    first: str
    last: str
    ago: str


class DeadLetterAdmin(Page, _ModelAdmin):
    template = "delayq_console/deadletters.html"

    def content(self, request: HttpRequest) -> dict[str, Any]:
        steer = self.admin_site._registry.get(Message)
        offered = [
            (verb, self._url("steer", verb.name))
            for verb in (REQUEUE, PURGE)
            if steer is not None and action_table.may_bulk(request) and self._may(request, verb)
        ]
        try:
            found = group_dead(Message.objects.using(self.get_queryset(request).db))
        except TooSlow:
            return {"too_slow": True}
        return {
            "topics": [self._show(group) for group in found.topics[:SHOWN]],
            "errors": [self._show(group) for group in found.errors[:SHOWN]],
            "more_topics": max(0, len(found.topics) - SHOWN),
            "more_errors": max(0, len(found.errors) - SHOWN),
            "count": found.count,
            "cap": DEAD_CAP if found.capped else None,
            "offered": offered,
        }

    def _may(self, request: HttpRequest, verb: Verb) -> bool:
        return verb.allowed(request) and self.has_view_permission(request)

    def _show(self, group: DeadGroup) -> Shown:
        query = urlencode({search_box.TAB_VAR: "all", SEARCH_VAR: group.search})
        return Shown(
            group,
            f"{self._url('changelist')}?{query}",
            self._url("change", group.sample),
            moment(group.first, "seconds"),
            moment(group.last, "seconds"),
            span(timezone.now() - group.last),
        )

    def _url(self, page: str, *args: object) -> str:
        return admin_url(self, Message, page, *args)
