"""The health page: Redis, the database, and the consistency of the record and Redis."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db import router
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern, path
from django.utils.translation import gettext as _

from ... import restore
from ...broker import publisher
from ...broker.base import QueueSize
from ...inspector import consistency as inspected
from ...inspector import stats
from ...models import Message
from ...models.workers import WorkerState
from ...project import conf
from ...record.sql import vendor_name
from .. import operations
from ..models import Health, Operation, OperationState
from ..operations.consistency_check import QueueCheck, results_of
from ..statements import console_statements
from . import banners, page_data, panels
from .explanation import moment, span
from .page import acting_as_user, actor_of, admin_url, admin_url_if_any, admin_view, may_view, url_name
from .page_data import PageData
from .panels import Panel
from .restore_page import RestorePage, alive

# How long the numbers of the table are shown before they are read again. Seconds.
TABLE_FRESH_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Fact:
    """A line of a card. ``level`` is "ok", "warning" or "critical", or "" for a plain value."""

    name: str
    value: str
    level: str = ""
    note: str = ""

    @property
    def label(self) -> str:
        """The level in words."""
        return {"ok": _("ok"), "warning": _("warning"), "critical": _("critical")}.get(self.level, "")


@dataclass(frozen=True, slots=True)
class DatabaseState:
    """The state of the table of messages in the database. ``None`` where the database cannot tell."""

    name: str
    rows: int | None
    dead: int | None
    vacuumed: str


class HealthAdmin(RestorePage):
    template = "delayq_console/health.html"

    def get_urls(self) -> list[URLPattern]:
        view = partial(admin_view, self)
        return [
            path("check/", view(self.check_view), name=url_name(Health, "check")),
            path("restore/", view(self.restore_view), name=url_name(Health, "restore")),
            *super().get_urls(),
        ]

    def content(self, request: HttpRequest) -> dict[str, Any]:
        data = page_data.gather()
        using = data.using
        held = panels.load(("held all", using), page_data.FRESH_SECONDS, using, lambda: _held(using))
        table = panels.load(("table", using), TABLE_FRESH_SECONDS, using, lambda: _database_state(using))
        stuck = panels.load(("stuck", using), page_data.FRESH_SECONDS, using, lambda: inspected.stuck(using).count)
        checks = panels.load(("checks", using), 0.0, using, lambda: _checks(using))
        asked: tuple[Panel[Any], ...] = (data.redis, data.pending, held, table, stuck, checks)
        last, current = checks.value or (None, None)
        may_restore = self.may_restore(request)
        restored = self.last_restore(request, using)
        return {
            "banners": banners.linked(self, data),
            "has_worker": bool(data.workers.value and data.workers.value.of(WorkerState.ALIVE)),
            "redis": _redis(data),
            "held": sorted((held.value or {}).items()),
            "database": _database(data, table),
            "problems": sorted({panel.problem for panel in asked if panel.problem}),
            "configured": conf.get().REDIS is not None,
            "stuck": stuck.value,
            "mismatches": [] if last is None else sorted(results_of(last).items()),
            "agrees": last is not None and all(found.agrees for found in results_of(last).values()),
            "total": None if last is None else _total(results_of(last)),
            "checked": "" if last is None else _checked(last, data),
            "checking": current,
            "checking_url": "" if current is None else self.operation_url(request, current),
            "check_url": admin_url(self, Health, "check") if may_restore and current is None else "",
            "restore_url": admin_url(self, Health, "restore") if may_restore else "",
            "restoring": self.running_restore(request, using),
            "restored": None if restored is None else (_restored(restored[0], data), restored[1]),
        }

    def check_view(self, request: HttpRequest) -> HttpResponse:
        """Start a consistency check of the record and Redis by a worker, on POST."""
        if not self.may_restore(request):
            raise PermissionDenied
        if request.method == "POST":
            using = router.db_for_write(Message)
            rows = Operation.objects.using(using).filter(action="check", state__in=operations.OPEN)
            if rows.exists():
                self.message_user(request, _("A check is under way already."), messages.WARNING)
            else:
                started_by = actor_of(request)
                with acting_as_user(request):
                    operations.start(
                        using, "check", {}, {}, described=_("all queues"), reason="", started_by=started_by
                    )
                text, level = _("The check is queued: a worker compares the record with Redis."), messages.SUCCESS
                if not alive(using):
                    text, level = _("The check is queued and waits for a worker: none is alive."), messages.WARNING
                self.message_user(request, text, level)
        return HttpResponseRedirect(admin_url(self, Health))

    def operation_url(self, request: HttpRequest, operation: Operation) -> str:
        """Return the address of an operation, or "" when the user may not view it."""
        if not may_view(self, Operation, request):
            return ""
        return admin_url_if_any(self, Operation, "change", operation.pk)


def _held(using: str) -> dict[str, QueueSize]:
    redis_publisher = publisher.get(using)
    if redis_publisher is None:
        return {}
    return {queue: redis_publisher.broker.size(queue) for queue in restore.queues(using)}


def _checks(using: str) -> tuple[Operation | None, Operation | None]:
    """Return the consistency check that finished last, and the one that is open."""
    rows = Operation.objects.using(using).filter(action="check").order_by("-pk")[:20]
    last = current = None
    for operation in reversed(rows):
        if operation.state == OperationState.DONE:
            last = operation
        elif operation.state in operations.OPEN:
            current = operation
    return last, current


def _total(found: dict[str, QueueCheck]) -> int:
    return sum(queue.compared for queue in found.values())


def _checked(check: Operation, data: PageData) -> str:
    assert check.finished_at is not None
    return _("Checked %(span)s ago (%(at)s) by %(actor)s.") % {
        "span": span(data.at - check.finished_at),
        "at": moment(check.finished_at, "seconds"),
        "actor": check.started_by,
    }


def _restored(operation: Operation, data: PageData) -> str:
    assert operation.finished_at is not None
    return _("Last restore: #%(number)d by %(actor)s, %(state)s %(span)s ago (%(at)s).") % {
        "number": operation.pk,
        "actor": operation.started_by,
        "state": OperationState(operation.state).label,
        "span": span(data.at - operation.finished_at),
        "at": moment(operation.finished_at, "seconds"),
    }


# --- cards ------------------------------------------------------------------------------------------------------------


def _redis(data: PageData) -> list[Fact]:
    redis = data.redis.value
    if redis is None:
        return [Fact(_("State"), "?")]
    where = Fact(_("Configured as"), redis.where)
    if redis.reachable is None:
        return [where, Fact(_("State"), _("not configured: workers deliver from the database"))]
    health = redis.health
    if not redis.reachable or health is None:
        note = _("Meanwhile workers deliver from the database. Check the host name, the port, the password and TLS.")
        return [where, Fact(_("State"), _("does not answer: %(error)s") % {"error": redis.error}, "critical", note)]
    evicted = "?" if health.evicted is None else f"{health.evicted:,}"
    uptime = "?" if health.uptime is None else span(timedelta(seconds=health.uptime))
    return [
        where,
        Fact(_("State"), _("answers, version %(version)s") % {"version": health.version or "?"}, "ok"),
        Fact(_("Role"), health.role or "?", "" if health.role in (None, "master") else "critical"),
        Fact(_("Uptime"), uptime),
        Fact(_("Memory"), _memory(health.memory, health.max_memory)),
        _contents(data),
        _policy(health.policy),
        Fact(_("Evicted keys"), evicted, "warning" if health.evicted else ""),
        Fact(
            _("Persistence"),
            health.persistence or "?",
            "",
            _("not needed: workers restore Redis from the record after a restart")
            if health.persistence == "none"
            else "",
        ),
    ]


def _contents(data: PageData) -> Fact:
    """Return whether Redis holds the messages that it should hold."""
    names = data.unfilled.value
    if names is None:
        return Fact(_("Contents"), "?")
    if names:
        return Fact(_("Contents"), _("nothing of %(queues)s") % {"queues": banners.some(names)}, "critical")
    return Fact(_("Contents"), _("filled from the record"), "ok")


def _memory(used: int | None, most: int | None) -> str:
    text = "?" if used is None else f"{used / 2**20:,.1f} MiB"
    if most:
        text = _("%(used)s of %(most)s") % {"used": text, "most": f"{most / 2**20:,.0f} MiB"}
    return text


def _policy(policy: str | None) -> Fact:
    name = "maxmemory-policy"
    if policy in (None, "noeviction"):
        return Fact(name, policy or "?", "ok" if policy else "")
    return Fact(name, policy or "?", "critical", _("Redis may drop waiting messages: set it to noeviction."))


def _database_state(using: str) -> DatabaseState:
    vacuum = console_statements(using).vacuum()
    vacuumed = "" if vacuum.at is None else moment(vacuum.at, "seconds")
    return DatabaseState(vendor_name(using), stats.estimate(using), vacuum.dead_rows, vacuumed)


def _database(data: PageData, panel: Panel[DatabaseState]) -> list[Fact]:
    table = panel.value
    if table is None:
        return [Fact(_("State"), "?", "critical")]
    found = [Fact(_("State"), _("answers, %(vendor)s") % {"vendor": table.name}, "ok")]
    if table.rows is not None:
        found.append(Fact(_("Messages"), _("about %(number)s") % {"number": f"{table.rows:,}"}))
    if table.dead is not None:
        vacuumed = table.vacuumed or _("never")
        found.append(Fact(_("Dead rows"), f"{table.dead:,}", "", _("last vacuum: %(at)s") % {"at": vacuumed}))
    pending = data.pending.value
    if pending is not None:
        value = ", ".join(pending) if pending else _("all applied")
        found.append(Fact(_("Migrations"), value, "critical" if pending else "ok"))
    settings = conf.get()
    for name, kept in (
        (_("Finished messages are kept"), settings.RETENTION),
        (_("Dead messages are kept"), settings.DEAD_RETENTION),
    ):
        found.append(Fact(name, _("forever") if kept is False else span(timedelta(seconds=kept))))
    return found
