"""The dead letters, by topic and by kind of error."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

from django.http import HttpRequest
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from ...core.outcomes import storable
from ...models import Message
from ...project import conf
from ...record.sql import statements
from ..statements import TooSlow, in_time
from ..statistics.failures import DEAD_CAP, PAGE_TIMEOUT_MS, PERIODS, DeadFilter, DeadGroup, group_dead
from .action_table import CONSOLE_ACTIONS
from .explanation import moment, span
from .page import Page

# Groups that each table shows.
GROUPS_SHOWN = 50

_PERIODS = (("", _("any time")), ("1h", _("the last hour")), ("24h", _("the last day")), ("7d", _("the last 7 days")))


class DeadLettersAdmin(Page):
    template = "delayq_console/deadletters.html"

    def content(self, request: HttpRequest) -> dict[str, Any]:
        acts_here = self.admin_site.is_registered(Message)
        offered = [
            (action, self.url(Message, "action", action.name))
            for action in (CONSOLE_ACTIONS["requeue"], CONSOLE_ACTIONS["purge"])
            if acts_here and self.may(request, action.name, "bulk")
        ]
        using = self.get_queryset(request).db
        chosen = _chosen(request)
        shared = {"chosen": chosen, "filtered": chosen != DeadFilter(), "periods": _PERIODS}
        try:
            found = group_dead(Message.objects.using(using), chosen)
        except TooSlow:
            return {**shared, "too_slow": True, "queues": _queues(using, chosen, [])}
        return {
            **shared,
            "queues": _queues(using, chosen, found.queues),
            "topics": [self._row(group) for group in found.topics[:GROUPS_SHOWN]],
            "errors": [self._row(group) for group in found.errors[:GROUPS_SHOWN]],
            "more_topics": max(0, len(found.topics) - GROUPS_SHOWN),
            "more_errors": max(0, len(found.errors) - GROUPS_SHOWN),
            "count": found.count,
            "cap": DEAD_CAP if found.capped else None,
            "offered": offered,
        }

    def _row(self, group: DeadGroup) -> SimpleNamespace:
        """Return a group as the page shows it, with the addresses of its messages."""
        links = partial(self.list_url, Message, state="all")
        return SimpleNamespace(
            group=group,
            list=links(group.search),
            # The numbers of those that died lately, with the addresses of their lists.
            recent=[(found, links(f"{group.search} finished:<{one}")) for one, found in group.recent.items()],
            sample=self.url(Message, "change", group.sample),
            first=moment(group.first, "seconds"),
            last=moment(group.last, "seconds"),
            ago=span(timezone.now() - group.last),
        )


def _chosen(request: HttpRequest) -> DeadFilter:
    period = request.GET.get("period", "")
    return DeadFilter(storable(request.GET.get("queue", "").strip()), period if period in PERIODS else "")


def _queues(using: str, chosen: DeadFilter, found: list[str]) -> list[str]:
    """Return the queues that can be chosen: those of the messages found, of scheduled ones, and of the settings."""
    settings = conf.get()
    waiting = in_time(using, PAGE_TIMEOUT_MS, statements(using).queues) or ()
    names = {*found, *waiting, *settings.QUEUES, settings.DEFAULT_QUEUE, chosen.queue}
    return sorted(names - {""})
