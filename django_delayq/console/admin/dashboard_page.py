"""The dashboard: problems, numbers, upcoming messages, deliveries, queues, workers and servers."""

from __future__ import annotations

from datetime import datetime
from types import SimpleNamespace
from typing import Any

from django.http import HttpRequest
from django.utils import timezone
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ...inspector.stats import overdue_cutoff
from ...models import Message, Queue, Worker
from ...models.workers import WorkerState
from ..models import Health, Limits, Topics
from ..statistics.throughput import RollupSum, Throughput
from ..statistics.upcoming import Bar, Upcoming
from . import banners, charts, limits_page, page, page_data, past_charts, queue_pages
from .charts import Column
from .explanation import span
from .page import Page
from .page_data import PageData
from .panels import Panel
from .readonly import Links

_AHEAD = {"hour": gettext_lazy("Next hour"), "day": gettext_lazy("Next day"), "week": gettext_lazy("Next week")}
_BACK = {"hour": gettext_lazy("Last hour"), "day": gettext_lazy("Last day"), "week": gettext_lazy("Last week")}


class DashboardAdmin(Page):
    template = "delayq_console/dashboard.html"

    def content(self, request: HttpRequest) -> dict[str, Any]:
        window, back = page.chosen(request, "window", _AHEAD), page.chosen(request, "past", _BACK)
        data = page_data.gather()
        coming, past = page_data.coming(data, window), page_data.past(data, back)
        links = self.list_url
        queues = _queues(data, page_data.rates(data), links)
        return {
            "banners": banners.of_page(self, data),
            "tiles": _tiles(data, past, links),
            "data": data,
            "empty": page_data.is_empty(data),
            "ahead": page.choices(request, "window", window, _AHEAD),
            "coming": coming,
            "upcoming": _upcoming(coming.value, links) if coming.value else "",
            "peak": _peak(coming.value) if coming.value else "",
            "back": page.choices(request, "past", back, _BACK),
            "past": past,
            "throughput": past_charts.throughput(past.value[back]) if past.value else "",
            "lateness": past_charts.lateness(past.value[back]) if past.value else "",
            "lateness_now": _lateness_now(past.value["hour"], data) if past.value else "",
            "topics_url": self.url(Topics),
            "queues": queues,
            "more_queues": len(data.snapshot.value.queues) - len(queues) if data.snapshot.value else 0,
            "queues_url": links(Queue),
            "limits": limits_page.rows(data.lines.value.longest, data.at, links) if data.lines.value else [],
            "limits_url": links(Limits),
            "workers_text": _workers(data),
            "workers_url": links(Worker),
            "servers": [*banners.of_redis(data), *banners.of_database(data)],
            "health_url": links(Health),
        }


def _tiles(data: PageData, past: Panel[dict[str, Throughput]], links: Links) -> list[SimpleNamespace]:
    """Return numbers with their labels, and the addresses of the lists of what they count."""

    def tile(label: str, number: object, note: str, query: str, *, alert: bool = False) -> SimpleNamespace:
        url = links(Message, query) if query else ""
        return SimpleNamespace(label=label, number=str(number), note=note, url=url, alert=alert)

    tiles = []
    snapshot = data.snapshot.value
    if snapshot is not None:
        late = snapshot.without_paused(data.paused.value or ())
        following, oldest = snapshot.next_due, late.oldest_overdue
        ahead = _("next in %(span)s") % {"span": span(following - snapshot.at)} if following else ""
        waiting = _("none, every message is on time")
        if oldest:
            waiting = _("oldest: %(span)s") % {"span": span(snapshot.at - oldest)}
        elif snapshot.overdue.count:
            waiting = _("in paused queues")
        # No search leaves out those that wait for limits.
        ready = "" if snapshot.limited.count else _due(overdue_cutoff(snapshot.at), snapshot.at)
        tiles += [
            tile(_("Scheduled"), snapshot.scheduled, ahead, "state:scheduled"),
            tile(_("Ready"), snapshot.ready, _("due, waiting for a worker"), ready),
            tile(_("Overdue"), snapshot.overdue, waiting, "is:overdue", alert=bool(late.overdue.count)),
        ]
        if snapshot.limited.count:
            longest = data.lines.value.longest if data.lines.value else ()
            note = _("longest line: %(limit)s") % {"limit": longest[0].name} if longest else ""
            tiles.append(tile(_("Limited"), snapshot.limited, note, "is:limited"))
        tiles.append(tile(_("Running"), snapshot.running, "", "state:running"))
    if past.value is not None:
        day = past.value["day"].sum.outcomes
        dead, consumed = day["dead"], day["consumed"]
        share = _("%(share)s of those ended") % {"share": f"{dead / (consumed + dead):.2%}"} if dead else ""
        tiles += [
            tile(_("Dead in 24 h"), f"{dead:,}", share, "state:dead finished:<24h"),
            tile(_("Consumed in 24 h"), f"{consumed:,}", "", "state:consumed finished:<24h"),
        ]
    return tiles


def _due(start: datetime, end: datetime) -> str:
    """Return the search for what falls due in this time. An hour that the clocks show twice is told by its offset."""
    return f"state:scheduled due:{timezone.localtime(start).isoformat()}..{timezone.localtime(end).isoformat()}"


# --- upcoming messages ------------------------------------------------------------------------------------------------


def _upcoming(coming: Upcoming, links: Links) -> SafeString:
    topics = coming.topics(5)
    shown = [coming.overdue, *coming.bars]
    others = any(set(bar.topics) - set(topics) for bar in shown)
    series = [*topics, *([_("other topics")] if others else [])]
    columns = [_column(bar, place, coming, topics, others, links) for place, bar in enumerate(shown)]
    description = _("Messages by the time they fall due. %(peak)s") % {"peak": _peak(coming)}
    return charts.bars("dq-upcoming", _("Upcoming messages"), description, series, columns)


def _column(bar: Bar, place: int, coming: Upcoming, topics: list[str], others: bool, links: Links) -> Column:
    numbers = [bar.topics[topic] for topic in topics]
    rest = [max(0, bar.number.count - sum(numbers))] if others else []
    text = ngettext("%(number)s message", "%(number)s messages", bar.number.count) % {"number": bar.number}
    if bar.start is None:
        url = links(Message, "is:overdue")
        return Column(_("Overdue"), [*numbers, *rest], text, _("overdue"), url, alert=True)
    start, end = timezone.localtime(bar.start), timezone.localtime(bar.end)
    tick = past_charts.tick(start, coming.window) if place % past_charts.BARS_PER_TICK[coming.window] == 0 else ""
    return Column(past_charts.clock_span(start, end), [*numbers, *rest], text, tick, links(Message, _due(start, end)))


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
    return text % {"span": past_charts.clock_span(start, end), "number": number, "rate": rate}


# --- what was delivered -----------------------------------------------------------------------------------------------


def _lateness_now(hour: Throughput, data: PageData) -> str:
    snapshot = data.snapshot.value
    oldest = snapshot.without_paused(data.paused.value or ()).oldest_overdue if snapshot else None
    if snapshot is None or oldest is None:
        return past_charts.late(hour.sum)
    waits = _("The oldest overdue message has waited for %(age)s.") % {"age": span(snapshot.at - oldest)}
    return f"{past_charts.late(hour.sum)} {waits}"


# --- queues, workers, servers -----------------------------------------------------------------------------------------


def _queues(data: PageData, rates: Panel[dict[str, RollupSum]], links: Links) -> list[SimpleNamespace]:
    snapshot = data.snapshot.value
    if snapshot is None:
        return []
    first = sorted(
        snapshot.queues.items(), key=lambda item: (-item[1].overdue.count, -item[1].scheduled.count, item[0])
    )
    rows = []
    for name, _queue in first[:10]:
        tally = None if rates.value is None else rates.value.get(name, RollupSum())
        rows.append(
            SimpleNamespace(
                **queue_pages.facts_of(name, data, data.paused.value or {}, links),
                rate="?" if tally is None else f"{tally.outcomes['consumed']:,}",
                p95="?" if tally is None else charts.bound(tally.lateness(95)),
            )
        )
    return rows


def _workers(data: PageData) -> str:
    there = data.workers.value
    if there is None:
        return ""
    if not there.workers:
        return _("No worker is running. Start one: manage.py run_delayq")
    alive, late, lost = (len(there.of(state)) for state in WorkerState)
    parts = [ngettext("%(count)d alive", "%(count)d alive", alive) % {"count": alive}]
    parts += [_("%(count)d late") % {"count": late}] if late else []
    parts += [_("%(count)d lost") % {"count": lost}] if lost else []
    text = _("%(workers)s; latest heartbeat %(span)s ago.")
    return text % {"workers": ", ".join(parts), "span": span(there.at - there.workers[0].seen_at)}
