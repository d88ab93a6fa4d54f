"""The record and Redis, side by side."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db import router
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import NoReverseMatch, URLPattern, path, reverse
from django.utils.translation import gettext as _

from ... import actors, conf, publisher, restore
from ...broker.base import QueueSize
from ...inspector import consistency as inspected
from ...inspector import stats
from ...models import Message
from ...sql import vendor_name
from .. import operations
from ..models import Health, Operation, OperationState
from ..operations.consistency_check import QueueCheck, results_of
from ..statements import statements
from . import page_data, panels
from .explanation import moment, span
from .page import Page, admin_url
from .page_data import Facts
from .panels import Panel
from .restore_page import Restoring

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Health]
else:
    _ModelAdmin = admin.ModelAdmin


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of a card. ``level``: "" when there is nothing to say to it, else "ok", "warning" or "critical"."""

    name: str
    value: str
    level: str = ""
    note: str = ""

    @property
    def label(self) -> str:
        """The level in words."""
        return {"ok": _("ok"), "warning": _("warning"), "critical": _("critical")}.get(self.level, "")


@dataclass(frozen=True, slots=True)
class Server:
    """What the database knows of the table of messages."""

    name: str
    rows: int | None
    dead: int | None
    vacuumed: str


class HealthAdmin(Restoring, Page, _ModelAdmin):
    template = "delayq_console/health.html"

    def get_urls(self) -> list[URLPattern]:
        name = f"{self.opts.app_label}_{self.opts.model_name}"
        return [
            path("check/", self.admin_site.admin_view(self.check_view), name=f"{name}_check"),
            path("restore/", self.admin_site.admin_view(self.restore_view), name=f"{name}_restore"),
            *super().get_urls(),
        ]

    def content(self, request: HttpRequest) -> dict[str, Any]:
        known = page_data.gather()
        using = known.using
        held = panels.load(("held all", using), page_data.FRESH, using, lambda: _held(using))
        server = panels.load(("server", using), 60.0, using, lambda: _server(using))
        stuck = panels.load(("stuck", using), page_data.FRESH, using, lambda: inspected.stuck(using).count)
        checks = panels.load(("checks", using), 0.0, using, lambda: _checks(using))
        asked: tuple[Panel[Any], ...] = (known.redis, known.pending, held, server, stuck, checks)
        last, current = checks.facts or (None, None)
        may = self.may_restore(request)
        restored = self.last_restore(request, using)
        return {
            "redis": _redis(known),
            "held": sorted((held.facts or {}).items()),
            "database": _database(known, server),
            "problems": sorted({panel.problem for panel in asked if panel.problem}),
            "configured": conf.get().REDIS is not None,
            "stuck": stuck.facts,
            "drift": [] if last is None else sorted(results_of(last).items()),
            "agrees": last is not None and all(found.agrees for found in results_of(last).values()),
            "total": None if last is None else _total(results_of(last)),
            "checked": "" if last is None else _when(last, known),
            "checking": current,
            "checking_url": "" if current is None else self.operation_url(request, current),
            "check_url": self.url("check") if may and current is None else "",
            "restore_url": self.url("restore") if may else "",
            "restoring": self.running_restore(request, using),
            "restored": None if restored is None else (_restored(restored[0], known), restored[1]),
        }

    def check_view(self, request: HttpRequest) -> HttpResponse:
        """POST to have a worker compare the record with Redis."""
        if not self.may_restore(request):
            raise PermissionDenied
        if request.method == "POST":
            using = router.db_for_write(Message)
            rows = Operation.objects.using(using).filter(verb="check", state__in=operations.OPEN)
            if rows.exists():
                self.message_user(request, _("A check is under way already."), messages.WARNING)
            else:
                actor = f"user:{request.user.get_username()}"
                with actors.acting_as(actor):
                    operations.start(using, "check", {}, {}, described=_("all queues"), reason="", started_by=actor)
                self.message_user(request, _("A worker compares the record with Redis."), messages.SUCCESS)
        return HttpResponseRedirect(self.url("changelist"))

    def url(self, page: str, *args: object) -> str:
        """Of a page of this site's Health."""
        name = f"admin:{self.opts.app_label}_{self.opts.model_name}_{page}"
        return reverse(name, args=args, current_app=self.admin_site.name)

    def operation_url(self, request: HttpRequest, operation: Operation) -> str:
        """Of an operation, for who may see it."""
        other = self.admin_site._registry.get(Operation)
        if other is None or not other.has_view_permission(request):
            return ""
        try:
            return admin_url(self, Operation, "change", operation.pk)
        except NoReverseMatch:
            return ""


def _held(using: str) -> dict[str, QueueSize]:
    redis_publisher = publisher.get(using)
    if redis_publisher is None:
        return {}
    return {queue: redis_publisher.broker.size(queue) for queue in restore.queues(using)}


def _checks(using: str) -> tuple[Operation | None, Operation | None]:
    """The last check that was finished, and the one under way."""
    rows = Operation.objects.using(using).filter(verb="check").order_by("-pk")[:20]
    last = current = None
    for operation in reversed(rows):
        if operation.state == OperationState.DONE:
            last = operation
        elif operation.state in operations.OPEN:
            current = operation
    return last, current


def _total(found: dict[str, QueueCheck]) -> int:
    return sum(queue.compared for queue in found.values())


def _when(check: Operation, known: Facts) -> str:
    assert check.finished_at is not None
    return _("Checked %(span)s ago (%(at)s) by %(actor)s.") % {
        "span": span(known.at - check.finished_at),
        "at": moment(check.finished_at, "seconds"),
        "actor": check.started_by,
    }


def _restored(operation: Operation, known: Facts) -> str:
    assert operation.finished_at is not None
    return _("Last restore: #%(number)d by %(actor)s, %(state)s %(span)s ago (%(at)s).") % {
        "number": operation.pk,
        "actor": operation.started_by,
        "state": OperationState(operation.state).label,
        "span": span(known.at - operation.finished_at),
        "at": moment(operation.finished_at, "seconds"),
    }


# --- cards ------------------------------------------------------------------------------------------------------------


def _redis(known: Facts) -> list[Fact]:
    redis = known.redis.facts
    if redis is None:
        return [Fact(_("State"), "?")]
    where = Fact(_("Where"), redis.where)
    if redis.reachable is None:
        return [where, Fact(_("State"), _("none: messages are delivered from the database"))]
    health = redis.health
    if not redis.reachable or health is None:
        note = _("Messages are delivered from the database meanwhile. Refused, a wrong password, TLS, the name?")
        return [where, Fact(_("State"), _("does not answer: %(error)s") % {"error": redis.error}, "critical", note)]
    evicted = "?" if health.evicted is None else f"{health.evicted:,}"
    uptime = "?" if health.uptime is None else span(timedelta(seconds=health.uptime))
    return [
        where,
        Fact(_("State"), _("answers, version %(version)s") % {"version": health.version or "?"}, "ok"),
        Fact(_("Role"), health.role or "?", "" if health.role in (None, "master") else "critical"),
        Fact(_("Up for"), uptime),
        Fact(_("Memory"), _memory(health.memory, health.max_memory)),
        _policy(health.policy),
        Fact(_("Evicted keys"), evicted, "warning" if health.evicted else ""),
        Fact(
            _("Persistence"),
            health.persistence or "?",
            "",
            _("not needed: the record restores it after a restart") if health.persistence == "none" else "",
        ),
    ]


def _memory(used: int | None, most: int | None) -> str:
    text = "?" if used is None else f"{used / 2**20:,.1f} MiB"
    if most:
        text = _("%(used)s of %(most)s") % {"used": text, "most": f"{most / 2**20:,.0f} MiB"}
    return text


def _policy(policy: str | None) -> Fact:
    name = "maxmemory-policy"
    if policy in (None, "noeviction"):
        return Fact(name, policy or "?", "ok" if policy else "")
    return Fact(name, policy or "?", "critical", _("It may drop what waits; set it to noeviction."))


def _server(using: str) -> Server:
    vacuum = statements(using).vacuum()
    vacuumed = "" if vacuum.at is None else moment(vacuum.at, "seconds")
    return Server(vendor_name(using), stats.estimate(using), vacuum.dead_rows, vacuumed)


def _database(known: Facts, panel: Panel[Server]) -> list[Fact]:
    server = panel.facts
    if server is None:
        return [Fact(_("State"), "?", "critical")]
    found = [Fact(_("State"), _("answers, %(vendor)s") % {"vendor": server.name}, "ok")]
    if server.rows is not None:
        found.append(Fact(_("Messages"), _("about %(number)s") % {"number": f"{server.rows:,}"}))
    if server.dead is not None:
        vacuumed = server.vacuumed or _("never")
        found.append(Fact(_("Dead rows"), f"{server.dead:,}", "", _("last vacuum: %(at)s") % {"at": vacuumed}))
    pending = known.pending.facts
    if pending is not None:
        value = ", ".join(pending) if pending else _("all applied")
        found.append(Fact(_("Migrations"), value, "critical" if pending else "ok"))
    settings = conf.get()
    for name, kept in (
        (_("Finished messages are kept"), settings.RETENTION),
        (_("Dead ones are kept"), settings.DEAD_RETENTION),
    ):
        found.append(Fact(name, _("for ever") if kept is None else span(timedelta(seconds=kept))))
    return found
