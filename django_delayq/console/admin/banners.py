"""The problems that need somebody's attention, the most severe first, each with the one link that helps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

from django.db.models import Model
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ...core.findings import Finding, Level
from ...inspector import diagnostics
from ...inspector.diagnostics import Thresholds
from ...inspector.numbers import total
from ...models import Message, Queue, Worker
from ..models import Health, Limits
from . import facts
from .explanation import pause_text, span
from .facts import has_no_worker, some
from .page_data import PageData
from .readonly import ReadOnly

_SEVERITY = ("error", "warning", "info")


@dataclass(frozen=True, slots=True)
class Banner:
    """A problem of ``level`` "error", "warning" or "info". Its link leads to the list of ``model``."""

    level: str
    text: str
    link: str
    model: type[Model]
    query: str = ""


def linked(page: ReadOnly, data: PageData) -> list[tuple[Banner, str]]:
    """Return the problems with the addresses that their links lead to, "" for one that the site does not have."""
    checks = (_servers, _unserved, _overdue, _limited, _findings, _paused)
    found = [(banner, page.list_url(banner.model, banner.query)) for check in checks for banner in check(data)]
    return sorted(found, key=lambda pair: _SEVERITY.index(pair[0].level))


def _servers(data: PageData) -> Iterator[Banner]:
    for fact in (*facts.of_database(data), *facts.of_redis(data)):
        if fact.problem:
            yield Banner("error" if fact.level == "critical" else "warning", fact.problem, _("Health"), Health)


def _unserved(data: PageData) -> Iterator[Banner]:
    snapshot, workers, paused = data.snapshot.value, data.workers.value, data.paused.value or {}
    if snapshot is None or workers is None:
        return
    queues = {name: queue for name, queue in snapshot.queues.items() if name not in paused}
    scheduled = total(queue.scheduled for queue in queues.values())
    overdue = total(queue.overdue for queue in queues.values())
    if has_no_worker(data):
        if overdue.count:
            text = _("No worker is alive, so no message is delivered: %(overdue)s are overdue, the oldest by %(age)s.")
            oldest = min(queue.oldest_overdue for queue in queues.values() if queue.oldest_overdue)
            values = {"overdue": overdue, "age": span(snapshot.at - oldest)}
            yield Banner("error", text % values, _("Workers"), Worker)
        elif scheduled.count:
            text = _("No worker is alive, so no message will be delivered: %(scheduled)s are scheduled.")
            yield Banner("warning", text % {"scheduled": scheduled}, _("Workers"), Worker)
        return
    unserved = [name for name, queue in queues.items() if queue.overdue.count and not workers.serving(name)]
    if unserved:
        text = ngettext(
            "No live worker serves queue %(queues)s, and %(count)s of its messages are overdue.",
            "No live worker serves the queues %(queues)s, and %(count)s of their messages are overdue.",
            len(unserved),
        )
        count = total(queues[name].overdue for name in unserved)
        yield Banner("error", text % {"queues": some(unserved), "count": count}, _("Workers"), Worker)


def _overdue(data: PageData) -> Iterator[Banner]:
    snapshot, paused = data.snapshot.value, data.paused.value
    if snapshot is None or has_no_worker(data):
        return
    waiting = [
        q.oldest_overdue for name, q in snapshot.queues.items() if q.oldest_overdue and name not in (paused or {})
    ]
    if waiting and snapshot.at - min(waiting) > timedelta(seconds=Thresholds().max_overdue_age):
        age = span(snapshot.at - min(waiting))
        text = _("The oldest overdue message has waited for %(age)s.") % {"age": age}
        yield Banner("warning", text, _("Overdue messages"), Message, "is:overdue")


def _limited(data: PageData) -> Iterator[Banner]:
    lines, workers = data.lines.value, data.workers.value
    if lines and lines.oldest and workers is not None:
        yield from _of_finding(diagnostics.of_limited(lines, workers, Thresholds()), _("Limits"), Limits)


def _findings(data: PageData) -> Iterator[Banner]:
    for finding in data.findings.value or ():
        yield from _of_finding(finding, _("Workers"), Worker)


def _of_finding(finding: Finding, link: str, model: type[Model]) -> Iterator[Banner]:
    if finding.level != Level.OK:
        yield Banner("error" if finding.level == Level.CRITICAL else "warning", finding.text, link, model)


def _paused(data: PageData) -> Iterator[Banner]:
    for queue in (data.paused.value or {}).values():
        yield Banner("info", pause_text(queue), _("Queues"), Queue)
