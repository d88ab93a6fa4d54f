"""The dead letters, by topic and by kind of error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from django.contrib import admin
from django.contrib.admin.views.main import SEARCH_VAR
from django.http import HttpRequest
from django.utils import timezone

from ...models import Message
from ..models import DeadLetters
from ..statements import TooSlow
from ..statistics.failures import DEAD_CAP, DeadGroup, group_dead
from . import action_table, search_box
from .action_table import CONSOLE_ACTIONS, ConsoleAction
from .explanation import moment, span
from .page import Page, admin_url

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[DeadLetters]
else:
    _ModelAdmin = admin.ModelAdmin

# Groups that each table shows.
GROUPS_SHOWN = 50


@dataclass(frozen=True, slots=True)
class DeadLetterRow:
    """A group of dead letters as the page shows it."""

    group: DeadGroup
    list: str
    sample: str
    first: str
    last: str
    ago: str


class DeadLetterAdmin(Page, _ModelAdmin):
    template = "delayq_console/deadletters.html"

    def content(self, request: HttpRequest) -> dict[str, Any]:
        acts_here = self.admin_site.is_registered(Message)
        offered = [
            (action, admin_url(self, Message, "action", action.name))
            for action in (CONSOLE_ACTIONS["requeue"], CONSOLE_ACTIONS["purge"])
            if acts_here and action_table.may_bulk(request) and self._may(request, action)
        ]
        try:
            found = group_dead(Message.objects.using(self.get_queryset(request).db))
        except TooSlow:
            return {"too_slow": True}
        return {
            "topics": [self._row(group) for group in found.topics[:GROUPS_SHOWN]],
            "errors": [self._row(group) for group in found.errors[:GROUPS_SHOWN]],
            "more_topics": max(0, len(found.topics) - GROUPS_SHOWN),
            "more_errors": max(0, len(found.errors) - GROUPS_SHOWN),
            "count": found.count,
            "cap": DEAD_CAP if found.capped else None,
            "offered": offered,
        }

    def _may(self, request: HttpRequest, action: ConsoleAction) -> bool:
        return action.allowed(request) and self.has_view_permission(request)

    def _row(self, group: DeadGroup) -> DeadLetterRow:
        query = urlencode({search_box.TAB_VAR: "all", SEARCH_VAR: group.search})
        return DeadLetterRow(
            group,
            f"{admin_url(self, Message)}?{query}",
            admin_url(self, Message, "change", group.sample),
            moment(group.first, "seconds"),
            moment(group.last, "seconds"),
            span(timezone.now() - group.last),
        )
