"""The health page: Redis, the database, and the consistency of the record and Redis."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _

from ...inspector import consistency as inspected
from ...inspector import diagnostics, stats
from ...project import conf
from ...record.sql import statements
from ...record.sql.holders import Holder
from ...restore import reading
from ..models import Health, Operation, OperationState
from ..operations import lifecycle
from ..operations.consistency_check import results_of
from ..operations.restore_work import RestoreWork
from ..statements import console_statements
from ..statements.shapes import Vacuum
from ..whereabouts import sizes
from . import banners, facts, page_data, panels
from .explanation import moment, span
from .facts import Fact
from .page import acting_as_user, operation_url
from .page_data import PageData
from .panels import Panel
from .restore_page import RestorePage, alive

# How long the numbers of the table are shown before they are read again. Seconds.
TABLE_FRESH_SECONDS = 60.0


# The state of the table of messages: about how many rows it has, what is known of its dead rows, and who keeps them.
TableState = tuple[int | None, Vacuum, list[Holder] | None]


class HealthAdmin(RestorePage):
    template = "delayq_console/health.html"

    def content(self, request: HttpRequest) -> dict[str, Any]:
        data = page_data.gather()
        using = data.using
        held = panels.load("held all", using, lambda: sizes(using, reading.queues(using)))
        table = panels.load("table", using, lambda: _table_state(using), TABLE_FRESH_SECONDS)
        stuck = panels.load("stuck", using, lambda: inspected.stuck(using).count)
        checks = panels.load("checks", using, lambda: _checks(using), 0.0)
        restores = panels.load("restores", using, lambda: lifecycle.newest(using, RestoreWork.name), 0.0)
        asked: tuple[Panel[Any], ...] = (data.redis, data.pending, held, table, stuck, checks, restores)
        last, current = checks.value or (None, None)
        restored, restoring = restores.value or (None, None)
        results = {} if last is None else results_of(last)
        may_restore = self.may_restore(request)
        last_restore = _("Last restore: #%(number)d by %(actor)s, %(state)s %(span)s ago (%(at)s).")
        return {
            "banners": banners.linked(self, data),
            "has_worker": not facts.has_no_worker(data),
            "redis": list(facts.of_redis(data)),
            "held": sorted((held.value or {}).items()),
            "database": [*facts.of_database(data), *_table(table)],
            "problems": sorted({panel.problem for panel in asked if panel.problem}),
            "configured": conf.get().REDIS is not None,
            "stuck": stuck.value,
            "mismatches": sorted(results.items()),
            "agrees": last is not None and all(found.agrees for found in results.values()),
            "total": None if last is None else sum(found.compared for found in results.values()),
            "checked": last and _ended(_("Checked %(span)s ago (%(at)s) by %(actor)s."), last, data),
            "checking": current,
            "checking_url": operation_url(self, request, current),
            "check_url": self.url(Health, "check") if may_restore and current is None else "",
            "restore_url": self.url(Health, "restore") if may_restore else "",
            "restoring": restoring,
            "restoring_url": operation_url(self, request, restoring),
            "restored": restored and _ended(last_restore, restored, data),
            "restored_url": operation_url(self, request, restored),
        }

    def check_view(self, request: HttpRequest) -> HttpResponse:
        """Start a consistency check of the record and Redis by a worker, on POST."""
        if not self.may_restore(request):
            raise PermissionDenied
        url = self.url(Health)
        if request.method != "POST":
            return HttpResponseRedirect(url)
        with acting_as_user(request), lifecycle.starting(self.using):
            if _checks(self.using)[1] is not None:
                return self.leave(request, url, _("A check is under way already."), messages.WARNING)
            lifecycle.start(self.using, "check", {}, {}, described=_("all queues"), reason="")
        text, level = _("The check is queued: a worker compares the record with Redis."), messages.SUCCESS
        if not alive(self.using):
            text, level = _("The check is queued and waits for a worker: none is alive."), messages.WARNING
        return self.leave(request, url, text, level)


def _checks(using: str) -> tuple[Operation | None, Operation | None]:
    """Return the consistency check that was finished last, and the one that is open."""
    return lifecycle.newest(using, "check", OperationState.DONE)


def _ended(text: str, operation: Operation, data: PageData) -> str:
    """Return a text with what is known of an operation that has ended."""
    assert operation.finished_at is not None
    return text % {
        "number": operation.pk,
        "actor": operation.started_by,
        "state": OperationState(operation.state).label,
        "span": span(data.at - operation.finished_at),
        "at": moment(operation.finished_at, "seconds"),
    }


# --- the table --------------------------------------------------------------------------------------------------------


def _table_state(using: str) -> TableState:
    return stats.estimate(using), console_statements(using).vacuum(), statements(using).snapshot_holders()


def _table(panel: Panel[TableState]) -> Iterator[Fact]:
    """Yield how large the table of messages is, and how long they are kept there. No line for what is not known."""
    if panel.value is None:
        yield Fact(_("State"), "?", "critical")
        return
    rows, vacuum, holders = panel.value
    if rows is not None:
        yield Fact(_("Messages"), _("about %(number)s") % {"number": f"{rows:,}"})
    if vacuum.dead_rows is not None:
        vacuumed = _("never") if vacuum.at is None else moment(vacuum.at, "seconds")
        yield Fact(_("Dead rows"), f"{vacuum.dead_rows:,}", "", _("last vacuum: %(at)s") % {"at": vacuumed})
    if holders is not None:
        yield facts.of_finding(diagnostics.of_snapshots(holders))
    settings = conf.get()
    for name, kept in (
        (_("Finished messages are kept"), settings.RETENTION),
        (_("Dead messages are kept"), settings.DEAD_RETENTION),
    ):
        yield Fact(name, _("forever") if kept is False else span(timedelta(seconds=kept)))
