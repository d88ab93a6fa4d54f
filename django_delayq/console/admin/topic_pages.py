"""The list of topics, and the page of a topic or a queue: its deliveries and run times, now and before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, TypeVar, TypeVarTuple

from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ...api import pausing
from ...core.durations import brief
from ...core.limits import parts
from ...core.outcomes import storable
from ...inspector import stats
from ...inspector.stats import Lines
from ...models import Message, Queue
from ..console_tuning import tuning
from ..models import Topics
from ..search import texts
from ..statistics.throughput import Compared, RollupSum, add_up, compare, read_traffic
from . import limits_page, page, page_data, panels, past_charts
from .charts import bound
from .page import Page
from .panels import Panel

T = TypeVar("T")
Given = TypeVarTuple("Given")

_WINDOWS = {
    "hour": gettext_lazy("Last hour"),
    "day": gettext_lazy("Last day"),
    "week": gettext_lazy("Last week"),
    "month": gettext_lazy("Last 30 days"),
}
_ORDERS = {
    "busiest": gettext_lazy("Busiest"),
    "slower": gettext_lazy("What got slower"),
    "failing": gettext_lazy("What fails most"),
}


# What a list says when it is empty.
_NONE = {
    "busiest": gettext_lazy("No message was delivered in this time."),
    "slower": gettext_lazy("Nothing got slower: no mean run time is half as long again as in the time before."),
    "failing": gettext_lazy("No handler failed in this time."),
}
_CHARTS = (
    (gettext_lazy("Throughput"), past_charts.throughput),
    (gettext_lazy("Lateness"), past_charts.lateness),
    (gettext_lazy("Run time"), past_charts.runtimes),
)


class TopicsAdmin(Page):
    """The topics, for users who may view messages."""

    template = "topics"

    def content(self, request: HttpRequest) -> dict[str, Any]:
        order, window = page.chosen(request, "order", _ORDERS), page.chosen(request, "window", _WINDOWS)
        found = _load(compare, self.using, window, "topic")
        rows = _rows(self, found.value or {}, "topic", window, order)
        return {
            "problem": found.problem,
            "rows": rows[: self.list_per_page],
            "more": max(0, len(rows) - self.list_per_page),
            "none": _NONE[order],
            "orders": page.choices(request, "order", order, _ORDERS),
            "windows": page.choices(request, "window", window, _WINDOWS),
        }

    def detail_view(self, request: HttpRequest, topic: str) -> HttpResponse:
        """Show what became of the messages of a topic, and how long its handler ran."""
        return detail(self, request, "topic", topic)


def detail(
    shown: Page, request: HttpRequest, kind: str, given: str, state: Callable[..., Any] | None = None
) -> HttpResponse:
    """Return the page of a topic or a queue, as ``kind`` says; ``state`` returns what it shows of a pause."""
    shown.require(request)
    name, using, window = storable(given), shown.using, page.chosen(request, "window", _WINDOWS)
    found = _load(read_traffic, using, window, kind, name)
    past, by_other = found.value or (None, {})
    # Read anew for each page, because a user who has just paused a queue wants to see it.
    read = panels.load("limits and pauses", using, _limits_and_pauses, using, kept=0.0)
    lines, paused = read.value or (Lines(), {})
    of_it = [limit for limit in lines.longest if parts(limit.name)[:2] == (kind, name)]
    now = timezone.now()
    whole = Compared(*(add_up(getattr(each, time) for each in by_other.values()) for time in ("now", "before")))
    title = _("Topic %(name)s") if kind == "topic" else _("Queue %(name)s")
    search = texts.term_text(kind, name)
    context = {
        **page.context(shown, request, title % {"name": name}),
        "problems": panels.problems(found, read),
        "queue": state(name, paused.get(name), now, shown.may(request, "pause")) if state and read.value else None,
        "windows": page.choices(request, "window", window, _WINDOWS),
        "measures": _measures(whole),
        "charts": [(heading, draw(past)) for heading, draw in _CHARTS] if past else [],
        "heading": _("Queues") if kind == "topic" else _("Topics"),
        "rows": _rows(shown, by_other, "queue" if kind == "topic" else "topic", window, "busiest")[
            : shown.list_per_page
        ],
        "limits": limits_page.rows(of_it, now, shown.list_url),
        "beside": [
            (_("Messages"), shown.list_url(Message, search, state="all")),
            (_("Dead messages"), shown.list_url(Message, f"state:dead {search}", state="all")),
        ],
    }
    return TemplateResponse(request, "delayq_console/topic.html", context)


def _limits_and_pauses(using: str) -> tuple[Lines, dict[str, Queue]]:
    return stats.all_limits(using, page_data.MOST_LIMITS), pausing.paused(using)


def _load(read: Callable[[str, *Given], T], using: str, *given: *Given) -> Panel[T]:
    name = f"{read.__name__} {given} {timezone.get_current_timezone_name()}"
    return panels.load(name, using, read, using, *given, kept=tuning.rollups_kept)


def _rows(shown: Page, found: Mapping[str, Compared], kind: str, window: str, order: str) -> list[SimpleNamespace]:
    """Return what a table shows of topics or queues, in an order; those to which it does not apply are left out."""
    ranked = sorted(((_rank(each, order), name) for name, each in found.items()), reverse=True)
    model = Topics if kind == "topic" else Queue
    return [
        SimpleNamespace(
            name=name,
            url=f"{shown.url(model, 'detail', name)}?window={window}",
            measures=[measure for measure in _measures(found[name]) if measure[-1]],
            slower=f"{found[name].slowdown:.1f}" if found[name].slowdown >= tuning.slower else "",
        )
        for rank, name in ranked
        if rank
    ]


def _rank(each: Compared, order: str) -> float:
    """Return the rank of a topic or a queue in an order, the greatest first; 0 where the order does not apply to it."""
    if order == "slower":
        return each.slowdown if each.slowdown >= tuning.slower else 0.0
    return each.now.failed if order == "failing" else each.now.ended + each.before["consumed"]


def _measures(each: Compared) -> list[tuple[str, str, str, bool]]:
    """Return the label of each measure, its values in the window and before it, and whether lists show it."""
    both = zip(_told(each.now), _told(each.before), strict=True)
    return [(label, now, before, listed) for (label, now, listed), (_label, before, _listed) in both]


def _told(sums: RollupSum) -> list[tuple[str, str, bool]]:
    """Return the label of each measure, its value, and whether lists show it."""
    mean = sums.mean_runtime
    return [
        (_("Consumed"), f"{sums['consumed']:,}", True),
        (_("Failed"), f"{sums.failed:,} ({sums.failed_share:.1%})" if sums.failed else "–", True),
        (_("Retried"), f"{sums['retried']:,}" if sums["retried"] else "–", False),
        (_("Dead"), f"{sums['dead']:,}" if sums["dead"] else "–", False),
        (_("Run time p50"), bound(sums.runtime(50)), True),
        (_("Run time p95"), bound(sums.runtime(95)), True),
        (_("Mean run time"), "–" if mean is None else brief(mean), True),
        (_("Lateness p50"), bound(sums.lateness(50)), False),
        (_("Lateness p95"), bound(sums.lateness(95)), True),
    ]
