"""The list of topics, and the page of a topic or a queue: its deliveries and run times, now and before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter, itemgetter, methodcaller
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar, TypeVarTuple
from urllib.parse import urlencode

from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ...core.durations import brief
from ...core.limits import parts
from ...core.names import near
from ...core.outcomes import storable
from ...inspector import stats
from ...inspector.numbers import Capped
from ...inspector.stats import LimitState
from ...models import Message, Queue
from ..console_tuning import tuning
from ..models import DeadLetters, Topics
from ..search import texts
from ..statistics.throughput import Compared, RollupSum, add_up, compare, read_traffic
from . import limits_page, needs, obstacles, page, page_data, panels, past_charts
from .charts import bound
from .obstacles import Backlog, DueNow, Obstacle
from .page import Page
from .panels import Panel

T = TypeVar("T")
Given = TypeVarTuple("Given")


class Measure(NamedTuple):
    """A number of topics and queues. Lists that show it are sorted by it with its name in the address."""

    name: str
    label: Any
    value: Callable[[RollupSum], float | None]
    write: Callable[[Any], str]
    is_listed: bool = False


def _count(number: int) -> str:
    return f"{number:,}" if number else "–"


def _span(seconds: float | None) -> str:
    return "–" if seconds is None else brief(seconds)


def _failing(each: RollupSum) -> float:
    """Return the number of failed runs; of two that are equal the one with the greater share of its runs is greater."""
    return each.failed + each.failed_share / 2


_MEASURES = (
    Measure("consumed", gettext_lazy("Consumed"), itemgetter("consumed"), "{:,}".format, is_listed=True),
    Measure("failed", gettext_lazy("Failed"), attrgetter("failed"), _count, is_listed=True),
    Measure("retried", gettext_lazy("Retried"), itemgetter("retried"), _count),
    Measure("dead", gettext_lazy("Dead"), itemgetter("dead"), _count),
    Measure("run50", gettext_lazy("Run time p50"), methodcaller("runtime", 50), bound),
    Measure("run95", gettext_lazy("Run time p95"), methodcaller("runtime", 95), bound, is_listed=True),
    Measure("mean", gettext_lazy("Mean run time"), attrgetter("mean_runtime"), _span, is_listed=True),
    Measure("late50", gettext_lazy("Lateness p50"), methodcaller("lateness", 50), bound),
    Measure("late95", gettext_lazy("Lateness p95"), methodcaller("lateness", 95), bound, is_listed=True),
)
_COLUMNS = {
    "name": gettext_lazy("Name"),
    "due": gettext_lazy("Waiting"),
    **{measure.name: measure.label for measure in _MEASURES if measure.is_listed},
}
# What else sorts than the numbers of the table; names are in their order already.
_VALUES: dict[str, Callable[[RollupSum], float | None]] = {
    "name": itemgetter("name"),
    "busiest": attrgetter("ended"),
    "failing": _failing,
    **{measure.name: measure.value for measure in _MEASURES},
}

# Each window, and what the grey numbers are of.
_WINDOWS = {
    "hour": gettext_lazy("Last hour"),
    "day": gettext_lazy("Last day"),
    "week": gettext_lazy("Last week"),
    "month": gettext_lazy("Last 30 days"),
}
_BEFORE = {
    "hour": gettext_lazy("the hour before"),
    "day": gettext_lazy("the day before"),
    "week": gettext_lazy("the week before"),
    "month": gettext_lazy("the 30 days before"),
}
_ORDERS = {
    "busiest": gettext_lazy("Busiest"),
    "waiting": gettext_lazy("What waits"),
    "slower": gettext_lazy("What got slower"),
    "failing": gettext_lazy("What fails most"),
}

# What a list says when it is empty. These orders leave out what they do not apply to.
_NONE = {
    "waiting": gettext_lazy("Nothing waits: no message is due."),
    "slower": gettext_lazy("Nothing got slower: no mean run time is half as long again as in the time before."),
    "failing": gettext_lazy("No handler failed in this time."),
}
_CHARTS = (
    (gettext_lazy("Throughput"), past_charts.throughput),
    (gettext_lazy("Lateness"), past_charts.lateness),
    (gettext_lazy("Run time"), past_charts.runtimes),
)


# The list opens with this many of the obstacles that hold topics back.
_OBSTACLES = 3


class TopicsAdmin(Page):
    """The topics, for users who may view messages."""

    template = "topics"

    def content(self, request: HttpRequest) -> dict[str, Any]:
        window = page.chosen(request, "window", _WINDOWS)
        found, due = _load(compare, self.using, window, "topic"), _due_now(self.using)
        known, order = found.value or {}, _order(request)
        query = request.GET.get("q", "").strip()
        none = _("No topic matches.") if query else _("No message was delivered in this time.")
        table = _table(self, request, "topic", known, due.value)
        names = {*known, *(each.topic for each in (due.value.due if due.value else ()))}
        return {
            **(_held_back(self, request, due.value) if due.value else {}),
            "problems": panels.problems(found, due),
            "none": _NONE.get(order, none),
            "like": near(query, names) if query and not page.matching(request, names) else None,
            "query": query,
            "orders": page.choices(request, "order", order, _ORDERS),
            "windows": page.choices(request, "window", window, _WINDOWS),
            **table,
        }

    def detail_view(self, request: HttpRequest, topic: str) -> HttpResponse:
        """Show what became of the messages of a topic, and how long its handler ran."""
        return detail(self, request, "topic", topic)


def _held_back(shown: Page, request: HttpRequest, now: DueNow) -> dict[str, Any]:
    """Return the opening sentence of the list: how many topics wait for something, and what that is."""
    found = obstacles.of_all_topics(shown, now)
    topics = {topic for each in found for topic in each.topics}
    text = ngettext("%(count)s topic is held back", "%(count)s topics are held back", len(topics))
    return {
        "title": text % {"count": Capped(len(topics), now.more)} if topics else _("No topic is held back"),
        "held": [(each, needs.some(each.topics), _resume_url(shown, request, each)) for each in found[:_OBSTACLES]],
        "more_held": len(found[_OBSTACLES:]),
    }


def _resume_url(shown: Page, request: HttpRequest, obstacle: Obstacle) -> str:
    """Return where the user resumes the queue whose pause an obstacle is; empty for others."""
    is_pause = obstacle.cause == "queue paused" and shown.may(request, "resume")
    return shown.url(Queue, "resume", parts(obstacle.what)[1]) if is_pause else ""


def detail(
    shown: Page, request: HttpRequest, kind: str, given: str, state: Callable[..., Any] | None = None
) -> HttpResponse:
    """Return the page of a topic or a queue, as ``kind`` says; ``state`` returns what it shows of a pause."""
    shown.require(request)
    name, using, window = storable(given), shown.using, page.chosen(request, "window", _WINDOWS)
    found, due = _load(read_traffic, using, window, kind, name), _due_now(using)
    past, by_other = found.value or (None, {})
    # Read anew for each page, because a user who has just overridden a limit wants to see it.
    lines = panels.load(f"limits of {kind} {name}", using, _limits, using, (kind, name), due.value, kept=0.0)
    now, other = timezone.now(), "queue" if kind == "topic" else "topic"
    whole = Compared(*(add_up(getattr(each, time) for each in by_other.values()) for time in ("now", "before")))
    title = _("Topic %(name)s") if kind == "topic" else _("Queue %(name)s")
    table = _table(shown, request, other, by_other, due.value, name)
    facts = {
        **table,
        "problems": panels.problems(found, due, lines),
        "row": _row(shown, kind, name, whole, obstacles.backlogs(shown, due.value, kind), table),
        "queue": state(name, due.value.paused.get(name), now, shown.may(request, "pause"))
        if state and due.value
        else None,
        "windows": page.choices(request, "window", window, _WINDOWS),
        "window": _WINDOWS[window],
        "measures": _measures(whole),
        "charts": [(heading, draw(past)) for heading, draw in _CHARTS] if past and by_other else [],
        "is_read": found.value is not None,
        "heading": _("Queues") if kind == "topic" else _("Topics"),
        "limits": limits_page.families(shown, lines.value or (), now, table["override_url"]),
        "beside": [
            (_("Dead messages"), shown.list_url(Message, _dead_text(kind, name), state="all")),
            (_("Failures"), _failures_url(shown, kind, name)),
        ],
    }
    return page.response(shown, request, title % {"name": name}, "topic", facts)


def _load(read: Callable[[str, *Given], T], using: str, *given: *Given) -> Panel[T]:
    name = f"{read.__name__} {given} {timezone.get_current_timezone_name()}"
    return panels.load(name, using, read, using, *given, kept=tuning.rollups_kept)


def _due_now(using: str) -> Panel[DueNow]:
    """Read what is due anew for each page, because a user who has just paused or resumed a queue wants to see it."""
    return panels.load("due now", using, obstacles.read_due_now, using, kept=0.0)


def _limits(using: str, of: tuple[str, str], now: DueNow | None) -> tuple[LimitState, ...]:
    """Return the limits of a topic or a queue."""
    due = [each for each in now.due if each.limit and parts(each.limit)[:2] == of] if now else []
    lines = stats.lines_of(using, due, page_data.MOST_LIMITS, more=bool(now and now.more))
    known = {name for name in stats.known_limits(using) if parts(name)[:2] == of}
    return stats.with_others(using, lines, known, page_data.MOST_LIMITS).longest


def _table(
    shown: Page, request: HttpRequest, kind: str, found: Mapping[str, Compared], now: DueNow | None, only: str = ""
) -> dict[str, Any]:
    """Return what ``topics_table.html`` shows of topics or queues, in the order that the address names.

    ``only``: those of one queue or topic.
    """
    window, order = page.chosen(request, "window", _WINDOWS), _order(request)
    due = obstacles.backlogs(shown, now, kind, only)
    facts = {
        "window_name": window,
        "order": order,
        "before": _BEFORE[window],
        "columns": page.choices(request, "order", order, _COLUMNS),
        "requeue_url": shown.url(Message, "action", "requeue") if shown.may(request, "requeue", "bulk") else "",
        "overridden": now.overridden if now else {},
        **limits_page.change_urls(shown, request),
    }
    # A topic whose handler no worker has was never delivered, and waits all the same.
    known = {**dict.fromkeys(due, Compared()), **found}
    names, pages = page.paged(request, page.matching(request, _ranked(known, due, order)), shown.list_per_page)
    rows = [_row(shown, kind, name, known[name], due, facts) for name in names]
    return {**facts, "rows": rows, "pages": pages}


def _order(request: HttpRequest) -> str:
    return page.chosen(request, "order", _ORDERS | _COLUMNS)


def _ranked(found: Mapping[str, Compared], due: Mapping[str, Backlog], order: str) -> list[str]:
    """Return the names of topics or queues in an order, without those to which it does not apply."""
    ranks = {name: _rank(found[name], due.get(name), order) for name in sorted(found)}
    # Those of one rank stay in the order of their names.
    return [name for name in sorted(ranks, key=ranks.__getitem__, reverse=True) if order not in _NONE or ranks[name]]


def _rank(each: Compared, due: Backlog | None, order: str) -> float:
    """Return the rank of a topic or a queue in an order, the greatest first; 0 where the order does not apply."""
    if order in ("waiting", "due"):
        return due.number.count if due else 0
    if order == "slower":
        return each.slowdown if each.slowdown >= tuning.slower else 0
    return _VALUES[order](each.now) or 0


def _row(
    shown: Page, kind: str, name: str, each: Compared, due: Mapping[str, Backlog], facts: Mapping[str, Any]
) -> SimpleNamespace:
    """Return what a table shows of a topic or a queue."""
    limit, searched = f"{kind} {name}", texts.term_text(kind, name)
    found = due[name].obstacles if name in due else []
    return SimpleNamespace(
        name=name,
        url=f"{shown.url(Topics if kind == 'topic' else Queue, 'detail', name)}?window={facts['window_name']}",
        due=due.get(name),
        due_url=shown.list_url(Message, f"late:0s {searched}"),
        messages_url=shown.list_url(Message, searched, state="all"),
        measures=[measure for measure in _measures(each) if measure[-1]],
        slower=f"{each.slowdown:.1f}" if each.slowdown >= tuning.slower else "",
        failures=_failures_url(shown, kind, name) if each.now["dead"] else "",
        dead=_dead_text(kind, name) if each.now["dead"] else "",
        failing=each.now.failed_share > tuning.failed_share,
        is_still=any(obstacle.stops for obstacle in found),
        tells_pause=any((obstacle.cause, obstacle.what) == ("paused", limit) for obstacle in found),
        limit=limit,
        override=facts["overridden"].get(limit),
        limit_url=limits_page.of_limit(facts["override_url"], limit),
    )


def _dead_text(kind: str, name: str) -> str:
    """Return the text of a search for the dead messages of a topic or a queue."""
    return f"state:dead {texts.term_text(kind, name)}"


def _failures_url(shown: Page, kind: str, name: str) -> str:
    url = shown.url(DeadLetters)
    return url and f"{url}?{urlencode({kind: name})}"


def _measures(each: Compared) -> list[tuple[str, str, str, bool]]:
    """Return the label of each measure, its values in the window and before it, and whether lists show it."""
    return [(str(m.label), _told(m, each.now), _told(m, each.before), m.is_listed) for m in _MEASURES]


def _told(measure: Measure, sums: RollupSum) -> str:
    text = measure.write(measure.value(sums))
    return f"{text} ({sums.failed_share:.1%})" if measure.name == "failed" and sums.failed else text
