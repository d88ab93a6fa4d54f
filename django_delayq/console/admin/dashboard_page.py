"""The page *Now*: problems, the last day in numbers, past and future in one chart, queues, limits and workers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import datetime
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

from django.http import HttpRequest
from django.utils import timezone
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ...core.findings import Finding, Level
from ...inspector.numbers import Capped, total
from ...inspector.stats import QueueSnapshot
from ...models import Message, Queue
from ...models.workers import WorkerState
from ..console_tuning import tuning
from ..models import Rollup
from ..statistics.throughput import RollupSum, Throughput
from ..statistics.upcoming import Bar
from . import charts, limits_page, needs, page, page_data, panels, past_charts, worker_pages
from .charts import Column, Marks
from .explanation import moment
from .needs import Need
from .page import Page
from .page_data import PageData
from .readonly import Links

_WINDOWS = {"hour": gettext_lazy("hour"), "day": gettext_lazy("day"), "week": gettext_lazy("week")}
_TITLES = {
    "hour": gettext_lazy("An hour behind, an hour ahead"),
    "day": gettext_lazy("A day behind, a day ahead"),
    "week": gettext_lazy("A week behind, a week ahead"),
}
# The page shows this many queues, limits and workers.
_QUEUES, _LIMITS, _WORKERS = 10, 6, 8


class DashboardAdmin(Page):
    template = "dashboard"

    def content(self, request: HttpRequest) -> dict[str, Any]:
        window = page.chosen(request, "window", _WINDOWS)
        data, links = PageData(), self.list_url
        coming, past = page_data.coming(data, window), page_data.past(data, window)
        asked = (data.snapshot, data.workers, data.paused, data.lines, data.redis, past, page_data.failing(data))
        problems = panels.problems(*asked)
        rows = needs.rows(self, request, data)
        queues = _queues(self, request, data, page_data.last_hour(data, "queue").value or {})
        return {
            "title": _verdict(rows, past.value, known=not problems),
            "read_at": f"{moment(data.at, 'seconds')[11:]}, {timezone.get_current_timezone_name()}",
            "rows": rows,
            "problems": problems,
            "data": data,
            "empty": page_data.is_empty(data),
            "tiles": _tiles(data, past.value, links) if past.value else [],
            "river_title": _TITLES[window],
            "windows": page.choices(request, "window", window, _WINDOWS),
            "river": _river(past.value, coming.value, data, window, links) if past.value and coming.value else "",
            "river_problem": coming.problem or past.problem,
            "queues": queues[:_QUEUES],
            "more_queues": max(0, len(queues) - _QUEUES),
            "limits": _limits(self, data),
            "workers": _workers(data),
            "servers": [
                _worst(_("Redis"), [*needs.of_redis(data), *needs.of_redis_values(data)]),
                _worst(_("Database"), needs.of_database(data)),
            ],
        }


def _verdict(rows: list[Need], past: dict[str, Throughput] | None, *, known: bool) -> str:
    """Return the opening sentence."""
    if rows:
        return ngettext("One thing needs you", "%(count)d things need you", len(rows)) % {"count": len(rows)}
    if not known or past is None:
        return _("Not everything could be read")
    return _("All is well: %(consumed)s delivered in 24 h") % {"consumed": f"{past['day'].sum['consumed']:,}"}


# --- the last 24 hours ------------------------------------------------------------------------------------------------


def _tiles(data: PageData, past: dict[str, Throughput], links: Links) -> list[SimpleNamespace]:
    """Return the four numbers, with their last 24 hours as a line."""
    day, steps = past["day"], past["day"].steps[:-1]
    done, consumed, dead = day.sum, day.sum["consumed"], day.sum["dead"]
    p50, p95 = done.lateness(50), done.lateness(95)
    return [
        SimpleNamespace(
            label=_("Delivered in 24 h"),
            number=f"{consumed:,}",
            unit=_("%(number)s a minute now") % {"number": _rate(past["hour"])},
            **_change(consumed, day.before["consumed"]),
            url=links(Message, "state:consumed finished:<24h"),
            spark=charts.spark([step["consumed"] for step in steps]),
        ),
        SimpleNamespace(
            label=_("Starts late by (p95)"),
            number=charts.bound(p95),
            note="" if p50 is None else _("half of them %(p50)s") % {"p50": charts.bound(p50)},
            spark=charts.spark([min(step.lateness(95) or 0, Rollup.BOUNDS[-1] / 1000) for step in steps]),
        ),
        _waiting(data, past["hour"], [step.late for step in steps], links),
        SimpleNamespace(
            label=_("Failed for good in 24 h"),
            number=f"{dead:,}",
            unit=f"{dead / (dead + consumed):.1%}" if dead else "",
            **_change(dead, day.before["dead"], kind="dq-critical"),
            url=links(Message, "state:dead finished:<24h"),
            spark=charts.spark([step["dead"] for step in steps], "critical" if dead else ""),
        ),
    ]


def _change(now: int, before: int, kind: str = "dq-ok") -> dict[str, str]:
    """Return how a number has changed since the day before. ``kind`` is the colour of an increase."""
    if not before:
        return {"note": _("none in the day before") if now else ""}
    ratio = now / before
    if abs(ratio - 1) < 0.005:
        return {"note": _("as on the day before")}
    change = f"▲ {ratio:.0f} ×" if ratio >= 2 else f"{'▲' if ratio >= 1 else '▼'} {abs(ratio - 1):.0%}"
    return {"change": change, "kind": kind if ratio > 1.05 else "", "note": _("on the day before")}


def _rate(hour: Throughput) -> str:
    """Return how many messages were delivered in a minute, on average over the last five."""
    rate = hour.last(5)["consumed"] / 5
    return f"{rate:,.0f}" if rate >= 1 or not rate else f"{rate:.1f}"


def _waiting(data: PageData, hour: Throughput, late: list[int], links: Links) -> SimpleNamespace:
    """Return the tile of messages that wait past their time; those of paused queues are counted apart."""
    tile = SimpleNamespace(label=_("Waiting past its time"), number="?", url=links(Message, "is:overdue"))
    tile.spark = charts.spark(late, "warn" if any(late) else "")
    snapshot = data.snapshot.value
    if snapshot is not None:
        seen = snapshot.without_paused(data.paused.value or ())
        tile.number = str(seen.overdue)
        tile.unit = _("+ %(count)s paused") % {"count": seen.held} if seen.held.count else ""
        tile.note = _gone(seen.overdue, hour) or _("every message is on time")
    return tile


def _gone(overdue: Capped, hour: Throughput) -> str:
    """Return the time after which no message will be overdue, if workers go on as in the last five minutes."""
    if not overdue.count:
        return ""
    rate = hour.last(5).ended / 5
    if not rate:
        return _("nothing was delivered for five minutes")
    minutes = math.ceil(overdue.count / rate)
    return ngettext("gone in about %(count)d min", "gone in about %(count)d min", minutes) % {"count": minutes}


# --- the river: what was delivered, and what falls due ----------------------------------------------------------------


def _river(past: dict[str, Throughput], coming: list[Bar], data: PageData, window: str, links: Links) -> SafeString:
    """Draw the past, left of the line of now, and the future."""
    back, day = past[window], past["day"]
    behind = past_charts.steps(back, _delivered, near=_NEAR)
    ahead = [_ahead(bar, place, window, links) for place, bar in enumerate(coming)]
    flag, snapshot = "", data.snapshot.value
    if snapshot is not None:
        seen = snapshot.without_paused(data.paused.value or ())
        flags = [(_("%(count)s overdue"), seen.overdue), (_("%(count)s paused"), seen.held)]
        flag = ", ".join(text % {"count": number} for text, number in flags if number.count)
    most = day.most * back.step.total_seconds() / 60
    text = _("most that the workers did: %(number)s a minute") % {"number": f"{day.most:,}"}
    now = timezone.localtime(data.at)
    due = total(bar.number for bar in coming)
    description = _("%(runs)s runs ended in this time, and %(due)s messages fall due.")
    return charts.bars(
        "dq-river",
        str(_TITLES[window]),
        description % {"runs": f"{back.sum.ended:,}", "due": due},
        [_("delivered"), _("retried"), _("dead"), _("falls due")],
        [*behind, *ahead],
        fills=("0", "1", "bad", "due"),
        marks=Marks(len(behind), f"{now:%H:%M}", most, text, flag),
    )


def _delivered(tally: RollupSum) -> tuple[list[float | None], str]:
    values: list[float | None] = [tally["consumed"], tally["retried"], tally["dead"], 0]
    names = (_("delivered"), _("retried"), _("dead"))
    text = ", ".join(f"{number:,} {name}" for number, name in zip(values, names, strict=False) if number)
    return values, text or _("nothing")


def _ahead(bar: Bar, place: int, window: str, links: Links) -> Column:
    """Return the column of the chart for the messages that become due in a span of time."""
    start, end = timezone.localtime(bar.start), timezone.localtime(bar.end)
    text = ngettext("%(number)s message", "%(number)s messages", bar.number.count) % {"number": bar.number}
    tick = "" if place < _NEAR else past_charts.tick(start, window)
    return Column(
        past_charts.clock_span(start, end), [0, 0, 0, bar.number.count], text, tick, links(Message, _due(start, end))
    )


# The bars beside the line of now that get no text under the axis: the time of now stands there.
_NEAR = 10


def _due(start: datetime, end: datetime) -> str:
    """Return the search for messages that fall due in this time. An offset marks an hour that the clocks show twice."""
    return f"state:scheduled due:{start.isoformat()}..{end.isoformat()}"


# --- queues, limits, workers, servers ---------------------------------------------------------------------------------


def _queues(shown: Page, request: HttpRequest, data: PageData, hours: dict[str, Throughput]) -> list[SimpleNamespace]:
    """Return the queues as rows, those that need somebody first."""
    snapshot, paused = data.snapshot.value, data.paused.value or {}
    if snapshot is None:
        return []
    may_resume, unserved = shown.may(request, "resume"), page_data.unserved(data)
    rows = []
    for name, queue in snapshot.queues.items():
        row = _queue(name, queue, hours.get(name), unserved=name in unserved)
        row.url = shown.url(Queue, "detail", name)
        row.paused = name in paused
        row.resume = shown.url(Queue, "resume", name) if row.paused and may_resume else ""
        row.needs = row.unserved or row.failing or bool(queue.overdue.count)
        rows.append((not row.needs, -queue.overdue.count, -queue.scheduled.count, name, row))
    return [row for *_order, row in sorted(rows, key=lambda each: each[:-1])]


def _queue(name: str, queue: QueueSnapshot, hour: Throughput | None, *, unserved: bool) -> SimpleNamespace:
    """Return what the dashboard shows of one queue."""
    done = RollupSum() if hour is None else hour.sum
    due = queue.overdue.count + queue.limited.count
    later = max(0, queue.scheduled.count - due)
    return SimpleNamespace(
        name=name,
        unserved=unserved,
        mix=charts.mix([("0", later), ("3", queue.limited.count), ("bad", queue.overdue.count)]),
        scheduled=queue.scheduled,
        overdue=queue.overdue,
        limited=queue.limited,
        spark=needs.spark(hour),
        rate="0" if hour is None else _rate(hour),
        p95=charts.bound(done.lateness(95)),
        failed=f"{done.failed_share:.1%}" if done.ended else "–",
        failing=done.failed_share > tuning.failed_share,
    )


def _limits(shown: Page, data: PageData) -> list[SimpleNamespace]:
    """Return the limits for which most messages wait."""
    lines = data.lines.value.longest[:_LIMITS] if data.lines.value else ()
    return limits_page.rows(shown, lines, data.at)


def _workers(data: PageData) -> SimpleNamespace:
    """Return the live workers with their threads, and how many of these are busy."""
    there, running = data.workers.value, page_data.running(data.using).value
    alive = [] if there is None else there.of(WorkerState.ALIVE)
    held = {} if running is None else running[0]
    rows = [
        SimpleNamespace(name=worker.name, busy=min(len(held.get(worker.name, ())), worker.threads), of=worker.threads)
        for worker in alive
    ]
    for row in rows:
        row.squares = charts.squares(row.busy, row.of)
    text = _("%(busy)d of %(of)d threads busy")
    text %= {"busy": sum(row.busy for row in rows), "of": sum(row.of for row in rows)}
    others = [] if there is None else [(state, len(there.of(state))) for state in WorkerState if state != "alive"]
    return SimpleNamespace(
        rows=rows[:_WORKERS],
        more=max(0, len(rows) - _WORKERS),
        text=text if rows else "",
        others=[f"{number} {worker_pages.LABELS[state]}" for state, number in others if number],
    )


def _worst(name: str, found: Iterable[Finding]) -> SimpleNamespace:
    """Return the worst finding about a server, in one line."""
    worst = max(found, key=attrgetter("level"), default=Finding(name, Level.INFO, "?"))
    text = worst.detail if worst.level == Level.OK else f"{worst.name}: {worst.detail}"
    return SimpleNamespace(name=name, kind=f"dq-{worst.level.name.lower()}", text=text)
