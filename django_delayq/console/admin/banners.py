"""What is known of Redis and the database, each fact once, and the problems of which banners tell on every page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

from django.db.models import Model
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ...broker.base import ServerInfo
from ...core.exceptions import ForeignBroker
from ...core.findings import Finding, Level
from ...inspector import diagnostics
from ...inspector.diagnostics import Thresholds
from ...inspector.numbers import total
from ...models import Message, Queue, Worker
from ...models.workers import WorkerState
from ..models import Health, Limits
from .explanation import pause_text, span
from .page_data import PageData
from .readonly import ReadOnly

# Share of its memory limit from which on Redis is reported as nearly full.
MEMORY_SHARE = 0.9
# Queues that one text names.
NAMES_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Fact:
    """A line of a card. ``level`` is "ok", "warning" or "critical", or "" for a plain value."""

    name: str
    value: str
    level: str = ""
    note: str = ""
    # What a banner says of it on every page that shows the state.
    problem: str = ""
    # True for what the dashboard shows too.
    is_main: bool = False

    @property
    def label(self) -> str:
        """The level in words."""
        return {"ok": _("ok"), "warning": _("warning"), "critical": _("critical")}.get(self.level, "")


def of_finding(finding: Finding) -> Fact:
    """Return what ``delayq_check`` finds as a line of a card; what is critical is a problem of every page."""
    level = {Level.OK: "ok", Level.WARN: "warning", Level.CRITICAL: "critical"}[finding.level]
    problem = f"{finding.name}: {finding.text}" if finding.level == Level.CRITICAL else ""
    return Fact(finding.name, finding.detail, level, finding.advice, problem, is_main=True)


def of_redis(data: PageData) -> Iterator[Fact]:
    """Yield what Redis told of itself, and whether it holds what it should."""
    redis = data.redis.value
    if redis is None:
        yield Fact(_("State"), "?")
        return
    yield Fact(_("Redis"), redis.where, is_main=True)
    if redis.reachable is None:
        yield Fact(_("State"), _("not configured: workers deliver from the database"))
    elif redis.health is None:
        note = _("Meanwhile workers deliver from the database. Check the host name, the port, the password and TLS.")
        problem = _("Redis does not answer: messages are delivered from the database, less precisely.")
        text, short = _("does not answer: %(error)s"), _("Redis does not answer.")
        if redis.refuses:
            problem = _("Redis cannot be used: messages are delivered from the database, less precisely.")
            text, short = _("refuses: %(error)s"), _("Redis cannot be used.")
        if has_no_worker(data):
            problem = short
        value = text % {"error": redis.error}
        yield Fact(_("State"), value, "critical", note, problem, is_main=True)
    else:
        yield from _server(redis.health)
        error = data.unfilled.error
        if isinstance(error, ForeignBroker):
            yield of_finding(diagnostics.of_identity(error))
        else:
            yield _contents(data)


def _server(health: ServerInfo) -> Iterator[Fact]:
    version = _("answers, version %(version)s") % {"version": health.version or "?"}
    yield Fact(_("State"), version, "ok", is_main=True)
    yield from map(of_finding, diagnostics.of_server(health))
    yield Fact(_("Uptime"), "?" if health.uptime is None else span(timedelta(seconds=health.uptime)))
    yield _memory(health.memory, health.max_memory)
    evicted = "?" if health.evicted is None else f"{health.evicted:,}"
    yield Fact(_("Evicted keys"), evicted, "warning" if health.evicted else "")


def _memory(used: int | None, most: int | None) -> Fact:
    text = "?" if used is None else f"{used / 2**20:,.1f} MiB"
    problem = ""
    if most:
        text = _("%(used)s of %(most)s") % {"used": text, "most": f"{most / 2**20:,.0f} MiB"}
        if used and used > MEMORY_SHARE * most:
            problem = _("Redis uses %(share)d %% of its memory limit.") % {"share": round(100 * used / most)}
    return Fact(_("Memory"), text, "warning" if problem else "", problem=problem, is_main=True)


def _contents(data: PageData) -> Fact:
    """Tell whether Redis is filled with the messages of the queues that have some."""
    names = data.unfilled.value
    if names is None:
        return Fact(_("Contents"), "?")
    if not names:
        return Fact(_("Contents"), _("filled from the record"), "ok")
    queues = {"queues": some(names)}
    problem = _(
        "Redis may lack scheduled messages of %(queues)s: it was emptied, or no worker with the role loader fills it."
    )
    level, more = "warning", _("The record has them all, and live workers with the role loader fill Redis again.")
    note = _("If that stays, compare REDIS and PREFIX here with those of the workers.")
    if has_no_worker(data):
        level, more = "critical", _("The record has them all. A worker fills Redis when it starts, and none is alive.")
    value = _("not filled with %(queues)s") % queues
    return Fact(_("Contents"), value, level, note, f"{problem % queues} {more}")


def of_database(data: PageData) -> Iterator[Fact]:
    """Yield which database has the record, and whether its tables are those of this code."""
    yield of_finding(diagnostics.of_database(data.using))
    if data.pending.value is None:
        yield Fact(_("Migrations"), data.pending.problem, is_main=True)
    else:
        yield of_finding(diagnostics.of_migrations(data.pending.value))
    yield from map(of_finding, diagnostics.of_row_security(data.hidden.value or []))


def has_no_worker(data: PageData) -> bool:
    """Tell whether it is known that no worker is alive."""
    workers = data.workers.value
    return workers is not None and not workers.of(WorkerState.ALIVE)


def some(names: Sequence[str]) -> str:
    """Return the first names, and the number of the others."""
    shown = ", ".join(names[:NAMES_SHOWN])
    if (more := len(names) - NAMES_SHOWN) < 1:
        return shown
    text = ngettext("%(names)s and %(count)d more", "%(names)s and %(count)d more", more)
    return text % {"names": shown, "count": more}


# --- banners ----------------------------------------------------------------------------------------------------------

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
    for fact in (*of_database(data), *of_redis(data)):
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
    oldest = snapshot.without_paused(paused or ()).oldest_overdue
    if oldest and snapshot.at - oldest > timedelta(seconds=Thresholds().max_overdue_age):
        age = span(snapshot.at - oldest)
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
