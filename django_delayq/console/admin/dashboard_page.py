"""What is going on, what comes next, and what has to be done about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from django.contrib import admin
from django.http import HttpRequest
from django.utils import formats, timezone
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext, pgettext

from ...durations import brief
from ...inspector.numbers import Capped
from ...inspector.snapshot import overdue_cutoff
from ...inspector.workers import WorkerState
from ...sql import vendor_name
from ..models import Dashboard, Rollup
from ..statistics.throughput import RollupSum, Throughput
from ..statistics.upcoming import COMING_WINDOWS, Bar, Upcoming
from . import banners, charts, page_data
from .charts import Column
from .page import Page, page_url
from .page_data import Facts
from .panels import Panel

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Dashboard]
else:
    _ModelAdmin = admin.ModelAdmin

# Topics that have a colour of their own.
_TOPICS = 5
_QUEUES = 10

_AHEAD = {"hour": gettext_lazy("Next hour"), "day": gettext_lazy("Next day"), "week": gettext_lazy("Next week")}
_BACK = {"hour": gettext_lazy("Last hour"), "day": gettext_lazy("Last day"), "week": gettext_lazy("Last week")}


@dataclass(frozen=True, slots=True)
class Tile:
    """A number, and the list of what it counts."""

    label: str
    number: str
    note: str
    url: str
    alert: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the windows that can be looked at."""

    label: str
    url: str
    chosen: bool


@dataclass(frozen=True, slots=True)
class QueueRow:
    """One line of the table of queues; empty text where nothing is known."""

    name: str
    url: str
    scheduled: Capped
    overdue: Capped
    oldest: str
    rate: str
    p95: str
    workers: str
    paused: bool


class DashboardAdmin(Page, _ModelAdmin):
    template = "delayq_console/dashboard.html"

    def content(self, request: HttpRequest) -> dict[str, Any]:
        window, back = _window(request, "window"), _window(request, "past")
        known = page_data.gather()
        coming, past = page_data.coming(known, window), page_data.past(known, back)
        page = _Links(self, request)
        return {
            "banners": [(banner, page(banner.page, banner.query)) for banner in banners.banners(known)],
            "tiles": _tiles(known, past, page),
            "pulse": known.pulse,
            "empty": page_data.is_empty(known),
            "ahead": _choices(request, "window", window, _AHEAD),
            "coming": coming,
            "upcoming": _upcoming(coming.facts, page) if coming.facts else "",
            "peak": _peak(coming.facts) if coming.facts else "",
            "back": _choices(request, "past", back, _BACK),
            "past": past,
            "throughput": _throughput(past.facts[back]) if past.facts else "",
            "lateness": _lateness(past.facts[back]) if past.facts else "",
            "lateness_now": _lateness_now(past.facts["hour"], known) if past.facts else "",
            "queues": _queues(known, past, page),
            "more_queues": max(0, len(known.pulse.facts.queues) - _QUEUES) if known.pulse.facts else 0,
            "queues_url": page("queue"),
            "workers": known.workers,
            "workers_text": _workers(known),
            "workers_url": page("worker"),
            "redis": known.redis,
            "redis_facts": _redis(known),
            "database_facts": _database(known),
            "health_url": page("health"),
        }


class _Links:
    """Where a page of the same site is."""

    def __init__(self, model_admin: DashboardAdmin, request: HttpRequest) -> None:
        self._admin, self._request = model_admin, request

    def __call__(self, page: str, query: str = "") -> str:
        url = page_url(self._admin, page)
        return f"{url}?{urlencode({'q': query})}" if url and query else url


def _window(request: HttpRequest, name: str) -> str:
    given = request.GET.get(name, "")
    return given if given in COMING_WINDOWS else "hour"


def _choices(request: HttpRequest, name: str, chosen: str, labels: dict[str, Any]) -> list[Choice]:
    found = []
    for window, label in labels.items():
        query = request.GET.copy()
        query[name] = window
        found.append(Choice(str(label), f"?{query.urlencode()}", window == chosen))
    return found


def _tiles(known: Facts, past: Panel[dict[str, Throughput]], page: _Links) -> list[Tile]:
    tiles = []
    pulse = known.pulse.facts
    if pulse is not None:
        following, oldest = pulse.next_due, pulse.oldest_overdue
        ahead = _("next in %(span)s") % {"span": _ago(following, pulse.at, -1)} if following else ""
        waiting = _("oldest: %(span)s") % {"span": _ago(oldest, pulse.at)} if oldest else _("none, all is in time")
        tiles += [
            Tile(_("Scheduled"), str(pulse.scheduled), ahead, page("message", "state:scheduled")),
            Tile(_("Ready"), str(pulse.ready), _("due, waiting for a worker"), page("message", _ready(pulse.at))),
            Tile(_("Overdue"), str(pulse.overdue), waiting, page("message", "is:overdue"), bool(pulse.overdue.count)),
            Tile(_("Running"), str(pulse.running), "", page("message", "state:running")),
        ]
    if past.facts is not None:
        day = past.facts["day"].sum
        ended = day.consumed + day.dead
        share = _("%(share)s of those ended") % {"share": f"{day.dead / ended:.2%}"} if day.dead else ""
        tiles += [
            Tile(_("Dead in 24 h"), f"{day.dead:,}", share, page("message", "state:dead finished:<24h")),
            Tile(_("Consumed in 24 h"), f"{day.consumed:,}", "", page("message", "state:consumed finished:<24h")),
        ]
    return tiles


def _ready(now: datetime) -> str:
    since, until = timezone.localtime(overdue_cutoff(now)), timezone.localtime(now)
    return f"state:scheduled due:{since:%Y-%m-%dT%H:%M:%S}..{until:%Y-%m-%dT%H:%M:%S}"


def _ago(at: datetime, now: datetime, sign: int = 1) -> str:
    return brief(max(0.0, sign * (now - at).total_seconds()))


# --- what comes next --------------------------------------------------------------------------------------------------


def _upcoming(coming: Upcoming, page: _Links) -> SafeString:
    topics = coming.topics(_TOPICS)
    shown = [coming.overdue, *coming.bars]
    others = any(set(bar.topics) - set(topics) for bar in shown)
    series = [*topics, *([_("other topics")] if others else [])]
    columns = [_column(bar, place, coming, topics, others, page) for place, bar in enumerate(shown)]
    description = _("Messages by the time they fall due. %(peak)s") % {"peak": _peak(coming)}
    return charts.bars("dq-upcoming", _("What falls due next"), description, series, columns)


def _column(bar: Bar, place: int, coming: Upcoming, topics: list[str], others: bool, page: _Links) -> Column:
    known = [bar.topics[topic] for topic in topics]
    rest = [max(0, bar.number.count - sum(known))] if others else []
    text = ngettext("%(number)s message", "%(number)s messages", bar.number.count) % {"number": bar.number}
    if bar.start is None:
        url = page("message", "is:overdue")
        return Column(_("Overdue"), [*known, *rest], text, _("overdue"), url, alert=True)
    start, end = timezone.localtime(bar.start), timezone.localtime(bar.end)
    query = f"state:scheduled due:{start:%Y-%m-%dT%H:%M}..{end:%Y-%m-%dT%H:%M}"
    tick = _tick(start, coming.window) if place % _EVERY[coming.window] == 0 else ""
    return Column(_span(start, end), [*known, *rest], text, tick, page("message", query))


# A tick under each so many bars.
_EVERY = {"hour": 10, "day": 8, "week": 8}


def _tick(at: datetime, window: str) -> str:
    return formats.date_format(at, pgettext("date format", "D j") if window == "week" else "H:i")


def _span(start: datetime, end: datetime) -> str:
    clock = f"{start:%H:%M}–{end:%H:%M}"
    if start.date() == timezone.localdate():
        return clock
    day = formats.date_format(start, pgettext("date format", "D j N"))
    return f"{day} {clock}"


def _peak(coming: Upcoming) -> str:
    bar = coming.peak
    if bar is None or bar.start is None:
        return _("Nothing falls due in this time.")
    start, end = timezone.localtime(bar.start), timezone.localtime(bar.end)
    number, seconds = bar.number, (bar.end - bar.start).total_seconds()
    rate = _("%(number)s a second") % {"number": f"{number.count / seconds:,.0f}"}
    if number.count < seconds:
        rate = _("less than one a second")
    text = ngettext(
        "Peak %(span)s: %(number)s message, %(rate)s.", "Peak %(span)s: %(number)s messages, %(rate)s.", number.count
    )
    return text % {"span": _span(start, end), "number": number, "rate": rate}


# --- what was ---------------------------------------------------------------------------------------------------------


def _throughput(past: Throughput) -> SafeString:
    names = [_("consumed"), _("retried"), _("dead"), _("expired")]

    def column(tally: RollupSum) -> tuple[list[float | None], str]:
        numbers = tally.counts[: len(Rollup.OUTCOMES)]
        said = ", ".join(f"{number:,} {name}" for number, name in zip(numbers, names, strict=True) if number)
        return list(numbers), said or _("nothing")

    total = past.sum
    description = _("%(consumed)s consumed, %(retried)s retried, %(dead)s dead, %(expired)s expired.") % {
        "consumed": f"{total.consumed:,}",
        "retried": f"{total.retried:,}",
        "dead": f"{total.dead:,}",
        "expired": f"{total.expired:,}",
    }
    return charts.bars(
        "dq-throughput",
        _("Throughput"),
        description,
        names,
        _steps(past, column),
        width=charts.NARROW,
        fills=("0", "1", "bad", "5"),
    )


def _lateness(past: Throughput) -> SafeString:
    def column(tally: RollupSum) -> tuple[list[float | None], str]:
        p50, p95 = tally.lateness(50), tally.lateness(95)
        said = _("half %(p50)s, 95 %% %(p95)s") % {"p50": charts.span(p50), "p95": charts.span(p95)}
        return [p50, p95], _("no delivery") if p50 is None else said

    title = _("Lateness of first deliveries")
    series = [_("half of them (p50)"), _("%(share)d %% of them (p95)") % {"share": 95}]
    return charts.lines("dq-lateness", title, _late(past.sum), series, _steps(past, column), width=charts.NARROW)


def _steps(past: Throughput, column: Callable[[RollupSum], tuple[list[float | None], str]]) -> list[Column]:
    columns = []
    for place, tally in enumerate(past.steps):
        start = timezone.localtime(past.start + place * past.step)
        values, text = column(tally)
        tick = _tick(start, past.window) if place % _EVERY[past.window] == 0 else ""
        filling = place == len(past.steps) - 1
        columns.append(Column(_span(start, start + past.step), values, text, tick, filling=filling))
    return columns


def _late(tally: RollupSum) -> str:
    p50, p95 = tally.lateness(50), tally.lateness(95)
    if p50 is None:
        return _("No message was delivered in this time.")
    return _("From the due time to the start: half of them %(p50)s, 95 %% %(p95)s.") % {
        "p50": charts.span(p50),
        "p95": charts.span(p95),
    }


def _lateness_now(hour: Throughput, known: Facts) -> str:
    pulse = known.pulse.facts
    oldest = pulse.oldest_overdue if pulse else None
    if pulse is None or oldest is None:
        return _late(hour.sum)
    waits = _("The oldest overdue message has waited for %(age)s.") % {"age": _ago(oldest, pulse.at)}
    return f"{_late(hour.sum)} {waits}"


# --- queues, workers, servers -----------------------------------------------------------------------------------------


def _queues(known: Facts, past: Panel[dict[str, Throughput]], page: _Links) -> list[QueueRow]:
    pulse = known.pulse.facts
    if pulse is None:
        return []
    first = sorted(pulse.queues.items(), key=lambda item: (-item[1].overdue.count, -item[1].scheduled.count, item[0]))
    hour = past.facts["hour"].queues if past.facts else None
    rows = []
    for name, queue in first[:_QUEUES]:
        tally = None if hour is None else hour.get(name, RollupSum())
        p95 = None if tally is None else tally.lateness(95)
        rows.append(
            QueueRow(
                name,
                page("message", f"queue:{name}"),
                queue.scheduled,
                queue.overdue,
                _ago(queue.oldest_overdue, pulse.at) if queue.oldest_overdue else "–",
                "?" if tally is None else f"{tally.consumed:,}",
                "?" if tally is None else charts.span(p95),
                "?" if known.workers.facts is None else f"{known.workers.facts.serving(name):,}",
                name in (known.paused.facts or {}),
            )
        )
    return rows


def _workers(known: Facts) -> str:
    there = known.workers.facts
    if there is None:
        return ""
    if not there.workers:
        return _("No worker has shown itself in the last day. Start one: manage.py run_delayq")
    alive, late, lost = (len(there.of(state)) for state in WorkerState)
    parts = [ngettext("%(count)d alive", "%(count)d alive", alive) % {"count": alive}]
    parts += [_("%(count)d late") % {"count": late}] if late else []
    parts += [_("%(count)d lost") % {"count": lost}] if lost else []
    text = _("%(workers)s; latest heartbeat %(span)s ago.")
    return text % {"workers": ", ".join(parts), "span": _ago(there.workers[0].seen_at, there.at)}


def _redis(known: Facts) -> list[tuple[str, str]]:
    redis = known.redis.facts
    if redis is None:
        return []
    found = [(_("Redis"), redis.where)]
    if redis.reachable is None:
        return found
    if not redis.reachable or redis.health is None:
        return [*found, (_("State"), _("does not answer: %(error)s") % {"error": redis.error})]
    health = redis.health
    memory = "?" if health.memory is None else f"{health.memory / 2**20:,.1f} MiB"
    if health.max_memory:
        memory = _("%(used)s of %(most)s") % {"used": memory, "most": f"{health.max_memory / 2**20:,.0f} MiB"}
    return [
        *found,
        (_("State"), _("answers, version %(version)s") % {"version": health.version or "?"}),
        (_("Memory"), f"{memory}, {health.policy or '?'}"),
        (_("Persistence"), health.persistence or "?"),
    ]


def _database(known: Facts) -> list[tuple[str, str]]:
    names = known.pending.facts
    if names is None:
        state = known.pending.problem
    else:
        state = _("pending: %(names)s") % {"names": ", ".join(names)} if names else _("all applied")
    return [(_("Database"), f"{known.using}: {vendor_name(known.using)}"), (_("Migrations"), state)]
