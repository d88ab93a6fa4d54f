"""The findings of the pages, in one list. Those that somebody has to act on are the rows at the top of *Now*."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from operator import attrgetter
from typing import Any, NamedTuple

from django.apps import apps
from django.http import HttpRequest
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ...core.exceptions import ForeignBroker
from ...core.findings import Finding, Level
from ...core.limits import parts
from ...inspector import diagnostics
from ...inspector.diagnostics import Thresholds
from ...inspector.numbers import total
from ...models import Message, Queue, Worker
from ...models.workers import WorkerState
from ..console_tuning import tuning
from ..models import DeadLetters, Health, Limits
from ..statistics.throughput import Throughput
from . import charts, page_data
from .explanation import clock, pause_facts, span
from .page_data import PageData
from .readonly import ReadOnly

# The pages that findings lead to: the text of the button, the list, and the search in it.
PAGES: dict[str, tuple[Any, Any, str]] = {
    "health": (gettext_lazy("See health"), Health, ""),
    "limits": (gettext_lazy("See limits"), Limits, ""),
    "overdue": (gettext_lazy("See them"), Message, "is:overdue"),
    "queues": (gettext_lazy("See queues"), Queue, ""),
    "schedules": (gettext_lazy("See schedules"), "delayq_recurring.Schedule", ""),
    "workers": (gettext_lazy("See workers"), Worker, ""),
}


class Need(NamedTuple):
    """A finding that somebody has to act on: what and how much, since when and by whom, its last hour, and one button.

    The address is empty for a page that the site does not have.
    """

    level: Level
    text: str
    note: str
    label: str
    url: str
    spark: SafeString = SafeString("")

    @property
    def kind(self) -> str:
        """The style class of its colour."""
        return f"dq-{self.level.name.lower()}"


def rows(page: ReadOnly, request: HttpRequest, data: PageData) -> list[Need]:
    """Return the findings that somebody has to act on, the worst first."""
    hours = page_data.last_hour(data, "queue").value or {}
    found = [*_of_findings(page, data, hours), *_failing(page, data), *_paused(page, request, data, hours)]
    return sorted(found, key=attrgetter("level"), reverse=True)


def _of_findings(page: ReadOnly, data: PageData, hours: dict[str, Throughput]) -> Iterator[Need]:
    """Yield a need for each finding that a banner is to show."""
    for finding in findings(data):
        if finding.is_banner:
            label, model, query = PAGES[finding.link]
            if isinstance(model, str):
                model = apps.get_model(model)
            note = "" if finding.headline and finding.advice in finding.headline else finding.advice
            text, url = finding.headline or finding.detail, page.list_url(model, query)
            yield Need(finding.level, text, note, str(label), url, _of_last_hour(finding.link, data, hours))


def _of_last_hour(link: str, data: PageData, hours: dict[str, Throughput]) -> SafeString:
    """Draw what began late in the last hour, or what ended under the limit for which a message has waited longest."""
    lines = data.lines.value
    if link == "overdue":
        steps = zip(*(hour.steps[:-1] for hour in hours.values()), strict=True)
        return charts.spark([sum(step.late for step in each) for each in steps], "warn")
    if link == "limits" and lines and lines.oldest:
        kind, name, _key = parts(lines.oldest[0].name)
        found = hours if kind == "queue" else page_data.last_hour(data, "topic", name).value or {}
        return spark(found.get(name), "warn")
    return SafeString("")


def findings(data: PageData) -> Iterator[Finding]:
    """Yield the findings about the database, Redis, the workers and the messages."""
    for find in (of_database, of_redis, of_redis_values, _unserved, _overdue, _limited, _of_extensions):
        yield from find(data)


# --- servers ----------------------------------------------------------------------------------------------------------


def of_redis(data: PageData) -> Iterator[Finding]:
    """Yield which Redis this is, and whether it may keep ids of messages."""
    redis = data.redis.value
    if redis is None:
        return
    yield Finding(_("Redis"), Level.INFO, redis.where)
    if redis.health is not None:
        version = _("answers, version %(version)s") % {"version": redis.health.version or "?"}
        yield Finding(_("State"), Level.OK, version)
        yield from map(_of_server, diagnostics.of_server(redis.health))
        yield _memory(redis.health.memory, redis.health.max_memory)
        if isinstance(data.unfilled.error, ForeignBroker):
            yield _of_server(diagnostics.of_identity(data.unfilled.error))
    elif redis.reachable is not None:
        note = _("Meanwhile workers deliver from the database. Check the host name, the port, the password and TLS.")
        problem = _("Redis does not answer: messages are delivered from the database, less precisely.")
        text, short = _("does not answer: %(error)s"), _("Redis does not answer.")
        if redis.refuses:
            problem = _("Redis cannot be used: messages are delivered from the database, less precisely.")
            text, short = _("refuses: %(error)s"), _("Redis cannot be used.")
        if has_no_worker(data):
            problem = short
        value = text % {"error": redis.error}
        yield Finding(_("State"), Level.CRITICAL, value, advice=note, link="health", headline=problem)


def of_redis_values(data: PageData) -> Iterator[Finding]:
    """Yield the values of Redis that only the health page shows, and whether Redis holds what it should."""
    redis = data.redis.value
    if redis is None:
        yield Finding(_("State"), Level.INFO, "?")
    elif redis.reachable is None:
        yield Finding(_("State"), Level.INFO, _("not configured: workers deliver from the database"))
    elif redis.health is not None:
        uptime, evicted = redis.health.uptime, redis.health.evicted
        yield Finding(_("Uptime"), Level.INFO, "?" if uptime is None else span(timedelta(seconds=uptime)))
        level = Level.WARN if evicted else Level.INFO
        yield Finding(_("Evicted keys"), level, "?" if evicted is None else f"{evicted:,}")
        if not isinstance(data.unfilled.error, ForeignBroker):
            yield _contents(data)


def _memory(used: int | None, most: int | None) -> Finding:
    """Return the finding about the memory that Redis uses."""
    name, text = _("Memory"), "?" if used is None else f"{used / 2**20:,.1f} MiB"
    if not most:
        return Finding(name, Level.INFO, text)
    text = _("%(used)s of %(most)s") % {"used": text, "most": f"{most / 2**20:,.0f} MiB"}
    if not used or used <= tuning.memory_share * most:
        return Finding(name, Level.INFO, text)
    problem = _("Redis uses %(share)d %% of its memory limit.") % {"share": round(100 * used / most)}
    return Finding(name, Level.WARN, text, link="health", headline=problem)


def _contents(data: PageData) -> Finding:
    """Tell whether Redis is filled with the messages of the queues that have some."""
    names = data.unfilled.value
    if names is None:
        return Finding(_("Contents"), Level.INFO, "?")
    if not names:
        return Finding(_("Contents"), Level.OK, _("filled from the record"))
    queues = {"queues": some(names)}
    problem = _(
        "Redis may lack scheduled messages of %(queues)s: it was emptied, or no worker with the role loader fills it."
    )
    level, more = Level.WARN, _("The record has them all, and live workers with the role loader fill Redis again.")
    note = _("If that stays, compare REDIS and PREFIX here with those of the workers.")
    if has_no_worker(data):
        level = Level.CRITICAL
        more = _("The record has them all. A worker fills Redis when it starts, and none is alive.")
    value = _("not filled with %(queues)s") % queues
    return Finding(_("Contents"), level, value, advice=f"{more} {note}", link="health", headline=problem % queues)


def of_database(data: PageData) -> Iterator[Finding]:
    """Yield which database has the record, and whether its tables are those of this code."""
    yield diagnostics.of_database(data.using)
    if data.pending.value is None:
        yield Finding(_("Migrations"), Level.INFO, data.pending.problem)
    else:
        yield _of_server(diagnostics.of_migrations(data.pending.value))
    yield from map(_of_server, diagnostics.of_row_security(data.hidden.value or []))


def _of_server(finding: Finding) -> Finding:
    """Make a banner of a finding of ``delayq_check``, if that is critical."""
    if finding.level != Level.CRITICAL:
        return finding
    return finding._replace(link="health", headline=f"{finding.name}: {finding.text}")


def has_no_worker(data: PageData) -> bool:
    """Tell whether it is known that no worker is alive."""
    workers = data.workers.value
    return workers is not None and not workers.of(WorkerState.ALIVE)


def some(names: Sequence[str]) -> str:
    """Return the first three names, and the number of the others."""
    shown = ", ".join(names[:3])
    if (more := len(names) - 3) < 1:
        return shown
    text = ngettext("%(names)s and %(count)d more", "%(names)s and %(count)d more", more)
    return text % {"names": shown, "count": more}


# --- workers, messages and queues -------------------------------------------------------------------------------------


def _unserved(data: PageData) -> Iterator[Finding]:
    """Yield what is wrong when no worker is alive, or none serves some queue."""
    snapshot, paused = data.snapshot.value, data.paused.value or {}
    if snapshot is None:
        return
    queues = {name: queue for name, queue in snapshot.queues.items() if name not in paused}
    scheduled = total(queue.scheduled for queue in queues.values())
    overdue = total(queue.overdue for queue in queues.values())
    if has_no_worker(data):
        if overdue.count:
            text = _("No worker is alive, so no message is delivered: %(overdue)s are overdue, the oldest by %(age)s.")
            oldest = min(queue.oldest_overdue for queue in queues.values() if queue.oldest_overdue)
            values = {"overdue": overdue, "age": span(snapshot.at - oldest)}
            yield Finding(_("Workers"), Level.CRITICAL, text % values, link="workers")
        elif scheduled.count:
            text = _("No worker is alive, so no message will be delivered: %(scheduled)s are scheduled.")
            yield Finding(_("Workers"), Level.WARN, text % {"scheduled": scheduled}, link="workers")
        return
    unserved = [name for name in page_data.unserved(data) if name in queues]
    if unserved:
        text = ngettext(
            "No live worker serves queue %(queues)s, and %(count)s of its messages are overdue.",
            "No live worker serves the queues %(queues)s, and %(count)s of their messages are overdue.",
            len(unserved),
        )
        count = total(queues[name].overdue for name in unserved)
        text %= {"queues": some(unserved), "count": count}
        yield Finding(_("Workers"), Level.CRITICAL, text, link="workers")


def _overdue(data: PageData) -> Iterator[Finding]:
    """Yield the queues with overdue messages whose cause no other finding names."""
    snapshot = data.snapshot.value
    if snapshot is None or has_no_worker(data):
        return
    late = snapshot.without_paused({*(data.paused.value or ()), *page_data.unserved(data)})
    oldest = late.oldest_overdue
    if oldest and snapshot.at - oldest > timedelta(seconds=Thresholds().max_overdue_age):
        text = ngettext(
            "%(count)s message is overdue, for %(age)s.",
            "%(count)s messages are overdue, the oldest for %(age)s.",
            late.overdue.count,
        )
        values = {"count": late.overdue, "age": span(snapshot.at - oldest)}
        yield Finding(_("Overdue messages"), Level.WARN, text % values, link="overdue")


def _limited(data: PageData) -> Iterator[Finding]:
    lines, workers = data.lines.value, data.workers.value
    if lines and lines.oldest and workers is not None:
        yield diagnostics.of_limited(lines, workers, Thresholds())


def _of_extensions(data: PageData) -> Iterator[Finding]:
    for finding in data.findings.value or ():
        yield finding if finding.link in PAGES else finding._replace(link="workers")


def _paused(page: ReadOnly, request: HttpRequest, data: PageData, hours: dict[str, Throughput]) -> Iterator[Need]:
    """Yield the pauses that keep messages waiting."""
    snapshot, paused = data.snapshot.value, data.paused.value or {}
    if snapshot is None:
        return
    held = snapshot.without_paused(paused).queues
    for name, pause in paused.items():
        if not (waiting := held[name].held).count:
            continue
        text = ngettext(
            "%(queue)s is paused: %(count)s message waits",
            "%(queue)s is paused: %(count)s messages wait",
            waiting.count,
        )
        text %= {"queue": name, "count": waiting}
        if oldest := snapshot.queues[name].oldest_overdue:
            text = _("%(text)s, the oldest for %(age)s") % {"text": text, "age": span(data.at - oldest)}
        label, url = _("See queues"), page.url(Queue)
        if page.may(request, "resume"):
            label, url = _("Resume…"), page.url(Queue, "resume", name)
        yield Need(Level.WARN, text, pause_facts(pause, data.at), label, url, spark(hours.get(name), "warn"))


def _failing(page: ReadOnly, data: PageData) -> Iterator[Need]:
    """Yield the topics that fail far more often than the day before."""
    for failing in page_data.failing(data).value or ():
        hour = failing.hour
        text = _("%(topic)s fails: %(share)s of %(runs)s in the last hour")
        values = {"topic": failing.topic, "share": f"{hour.sum.failed_share:.0%}", "runs": f"{hour.sum.ended:,}"}
        note = _("%(share)s in the day before · since %(time)s")
        told = {"share": f"{failing.before:.1%}", "time": clock(failing.since)}
        line = charts.spark([step.failed for step in hour.steps[:-1]], "critical")
        yield Need(Level.CRITICAL, text % values, note % told, _("See failures"), page.list_url(DeadLetters), line)


def spark(hour: Throughput | None, level: str = "") -> SafeString:
    """Draw the runs that ended in each minute of the last hour."""
    return SafeString("") if hour is None else charts.spark([step.ended for step in hour.steps[:-1]], level)
