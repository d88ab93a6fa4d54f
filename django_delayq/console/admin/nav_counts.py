"""The numbers beside the links of the navigation: what pages have read in the last minute, and the rest read anew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from django.db.models import Model
from django.http import HttpRequest
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ...core.findings import Level
from ...models import Queue, Worker
from ...models.workers import WorkerState
from ..console_tuning import timeouts
from ..models import Dashboard, DeadLetters, Limits
from ..statements import TooSlow, answering_within
from . import needs, page_data, panels
from .explanation import clock
from .page_data import PageData
from .readonly import ReadOnly


class NavCount(NamedTuple):
    """A number, the class of its colour, and its unit; and since when nothing newer could be read."""

    number: Any
    kind: str = ""
    unit: Any = ""
    old: str = ""


# What was read last, and when, by the database.
_last: dict[str, dict[type[Model], tuple[NavCount, str]]] = {}


def read(page: ReadOnly, request: HttpRequest) -> dict[type[Model], NavCount]:
    """Return the numbers by the models of their pages. One that cannot be read in time stays as it was, and says so."""
    last, now = _last.setdefault(page.using, {}), clock(timezone.now())
    with panels.reading_few(), answering_within(timeouts.navigation):
        fresh = dict(_read(page, request))
    last.update((model, (count, now)) for model, count in fresh.items())
    old = _("as it was at %(time)s")
    return {
        model: count if model in fresh else count._replace(old=old % {"time": at})
        for model, (count, at) in last.items()
    }


def _read(page: ReadOnly, request: HttpRequest) -> Iterator[tuple[type[Model], NavCount]]:
    data = PageData()
    # In this order they are read where a page reads few of them.
    seen = (data.snapshot, data.workers, data.lines, data.paused, data.redis, data.unfilled, data.pending, data.hidden)
    # Now has read the times behind of its window.
    window = request.GET.get("window", "") if page.model is Dashboard else ""
    past = page_data.past(data, window if window in ("day", "week") else "hour").value
    rows = needs.rows(page, request, data)
    more = (data.findings, page_data.last_hour(data, "queue"), page_data.failing(data))
    if not any(isinstance(panel.error, TooSlow) for panel in (*seen, *more)):
        worst = max((row.level for row in rows), default=Level.OK)
        yield Dashboard, NavCount(len(rows), worst.name.lower())
    if past is not None:
        dead = past["day"].sum["dead"]
        yield DeadLetters, NavCount(dead and f"{dead:,}", "critical")
    if data.paused.value is not None:
        yield Queue, NavCount(len(data.paused.value), "warn", gettext_lazy("paused"))
    if data.lines.value is not None:
        full = data.lines.value.number
        yield Limits, NavCount(full.count and full, unit=gettext_lazy("waited for"))
    if data.workers.value is not None:
        yield Worker, NavCount(len(data.workers.value.of(WorkerState.ALIVE)))
