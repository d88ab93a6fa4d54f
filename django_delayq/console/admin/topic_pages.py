"""The list of topics, and the page of a topic or a queue: its deliveries and run times, now and before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, TypeVar, TypeVarTuple
from urllib.parse import urlencode

from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ...api import limiting, pausing
from ...core.durations import brief
from ...core.limits import parts, topic_name
from ...core.outcomes import storable
from ...inspector import stats
from ...inspector.stats import Lines
from ...models import Message, Queue
from ..console_tuning import tuning
from ..models import DeadLetters, Topics
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
        ranked = _ranked(found.value or {}, order)
        rows = _rows(self, ranked, "topic", window)
        self._add_limits(request, rows)
        return {
            "problem": found.problem,
            "rows": rows,
            "requeue_url": _requeue_url(self, request),
            "more": max(0, len(ranked) - self.list_per_page),
            "none": _NONE[order],
            "orders": page.choices(request, "order", order, _ORDERS),
            "windows": page.choices(request, "window", window, _WINDOWS),
        }

    def _add_limits(self, request: HttpRequest, rows: list[SimpleNamespace]) -> None:
        """Add what somebody changed of the limit of each topic, and where it is changed."""
        change_url = limits_page.change_urls(self, request)["override_url"]
        changed = panels.load("overrides", self.using, limiting.in_force, self.using, kept=0.0).value or {}
        for row in rows:
            name = topic_name(row.name, None)
            row.override, row.limit_url = changed.get(name), limits_page.of_limit(change_url, name)

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
    dead, change = _dead_text(kind, name), limits_page.change_urls(shown, request)
    facts = {
        "problems": panels.problems(found, read),
        "queue": state(name, paused.get(name), now, shown.may(request, "pause")) if state and read.value else None,
        "windows": page.choices(request, "window", window, _WINDOWS),
        "measures": _measures(whole),
        "charts": [(heading, draw(past)) for heading, draw in _CHARTS] if past else [],
        "heading": _("Queues") if kind == "topic" else _("Topics"),
        "rows": _rows(shown, _ranked(by_other), "queue" if kind == "topic" else "topic", window),
        "requeue_url": _requeue_url(shown, request),
        "limits": limits_page.rows(shown, of_it, now, change["override_url"]),
        **change,
        "limit_url": limits_page.of_limit(change["override_url"], f"{kind} {name}"),
        "dead": dead if whole.now["dead"] else "",
        "beside": [
            (_("Messages"), shown.list_url(Message, texts.term_text(kind, name), state="all")),
            (_("Dead messages"), shown.list_url(Message, dead, state="all")),
            (_("Failures"), _failures_url(shown, kind, name)),
        ],
    }
    return page.response(shown, request, title % {"name": name}, "topic", facts)


def _limits_and_pauses(using: str) -> tuple[Lines, dict[str, Queue]]:
    return stats.all_limits(using, page_data.MOST_LIMITS), pausing.paused(using)


def _load(read: Callable[[str, *Given], T], using: str, *given: *Given) -> Panel[T]:
    name = f"{read.__name__} {given} {timezone.get_current_timezone_name()}"
    return panels.load(name, using, read, using, *given, kept=tuning.rollups_kept)


def _ranked(found: Mapping[str, Compared], order: str = "busiest") -> list[tuple[str, Compared]]:
    """Return topics or queues in an order; those to which it does not apply are left out."""
    ranked = sorted(((_rank(each, order), name) for name, each in found.items()), reverse=True)
    return [(name, found[name]) for rank, name in ranked if rank]


def _rows(shown: Page, found: list[tuple[str, Compared]], kind: str, window: str) -> list[SimpleNamespace]:
    """Return what a table shows of topics or queues."""
    model = Topics if kind == "topic" else Queue
    return [
        SimpleNamespace(
            name=name,
            url=f"{shown.url(model, 'detail', name)}?window={window}",
            measures=[measure for measure in _measures(each) if measure[-1]],
            slower=f"{each.slowdown:.1f}" if each.slowdown >= tuning.slower else "",
            failures=_failures_url(shown, kind, name) if each.now["dead"] else "",
            dead=_dead_text(kind, name) if each.now["dead"] else "",
            failing=each.now.failed_share > tuning.failed_share,
        )
        for name, each in found[: shown.list_per_page]
    ]


def _dead_text(kind: str, name: str) -> str:
    """Return the text of a search for the dead messages of a topic or a queue."""
    return f"state:dead {texts.term_text(kind, name)}"


def _failures_url(shown: Page, kind: str, name: str) -> str:
    url = shown.url(DeadLetters)
    return url and f"{url}?{urlencode({kind: name})}"


def _requeue_url(shown: Page, request: HttpRequest) -> str:
    return shown.url(Message, "action", "requeue") if shown.may(request, "requeue", "bulk") else ""


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
