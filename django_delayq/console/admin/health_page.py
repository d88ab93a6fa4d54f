"""The health page: Redis, the database, the consistency of the record and Redis; and the page that restores Redis."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

from django import forms
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db import DatabaseError, InterfaceError
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ...broker import publisher
from ...core.exceptions import BrokerUnavailable
from ...core.findings import Finding, Level
from ...core.retention import rules
from ...inspector import consistency as inspected
from ...inspector import diagnostics, stats
from ...project import conf, console_conf, pulled, registry
from ...record import reads
from ...record.sql import statements
from ...record.sql.holders import Holder
from ...restore import reading
from ...restore.selection import Overdue, Selection, Tally
from ..console_tuning import timeouts, tuning
from ..models import Health, Operation, OperationState
from ..operations import lifecycle
from ..operations.work import RestoreWork, arguments_of, results_of, scope_of
from ..statements import TooSlow, console_statements, statement_timeout
from ..statements.portable_console import Vacuum
from . import needs, page, page_data, panels
from .explanation import moment, span
from .forms import DelayField, ReasonField, ReasonForm
from .page import Page, operation_url
from .page_data import PageData
from .panels import Panel

_POLICIES = (
    (Overdue.RUN.value, gettext_lazy("start at once")),
    (Overdue.SPREAD.value, gettext_lazy("get new due times, spread over a time")),
    (Overdue.CANCEL.value, gettext_lazy("are cancelled: they do not run unless somebody requeues them")),
    (Overdue.DEAD.value, gettext_lazy("are given up: they stay dead until somebody requeues them")),
)


class RestoreForm(forms.Form):
    """The queues to restore, and what happens to overdue and expired messages."""

    queues = forms.MultipleChoiceField(
        label=gettext_lazy("Queues"),
        required=False,
        widget=forms.CheckboxSelectMultiple,
        help_text=gettext_lazy("When none is ticked, all queues are restored."),
    )
    overdue = forms.ChoiceField(
        label=gettext_lazy("Overdue messages"), choices=_POLICIES, initial=Overdue.RUN.value, required=False
    )
    spread = DelayField(label=gettext_lazy("Spread over"), help_text=gettext_lazy("For example 10m, from now on."))
    no_expired = forms.BooleanField(
        label=gettext_lazy("Expire messages that were not started in time"),
        required=False,
        help_text=gettext_lazy("Otherwise a worker expires them a little later."),
    )

    def __init__(self, data: Any, using: str) -> None:
        super().__init__(data)
        self.fields["queues"].choices = [(name, name) for name in reading.queues(using)]  # type: ignore[attr-defined]

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or self.cleaned_data
        cleaned["overdue"] = Overdue(cleaned.get("overdue") or Overdue.RUN)
        if not self.errors and (cleaned["overdue"] == Overdue.SPREAD) != bool(cleaned.get("spread")):
            raise forms.ValidationError(
                _("“Spread over” belongs to the choice of new due times: give both, or neither.")
            )
        return cleaned

    @property
    def scope(self) -> dict[str, Any]:
        return scope_of(Selection(queues=tuple(sorted(self.cleaned_data["queues"]))))

    @property
    def arguments(self) -> dict[str, Any]:
        given = self.cleaned_data
        spread = given["spread"].total_seconds() if given["spread"] else 0.0
        return arguments_of(given["overdue"], spread, no_expired=given["no_expired"])

    def described(self) -> str:
        """Return the choice in words."""
        given = self.cleaned_data
        parts = [", ".join(sorted(given["queues"])) or _("all queues")]
        if given["overdue"] != Overdue.RUN:
            parts.append(_("overdue messages %(policy)s") % {"policy": dict(_POLICIES)[given["overdue"].value]})
        return "; ".join(parts)


class ConfirmForm(ReasonForm):
    """The word to type, and the reason."""

    reason = ReasonField(gettext_lazy("Written to the audit."))


# The state of the table of messages: its rows as far as they are known, and who keeps the dead ones.
TableState = tuple[Vacuum, list[Holder] | None]


class HealthAdmin(Page):
    template = "health"

    def content(self, request: HttpRequest) -> dict[str, Any]:
        data = PageData()
        using = data.using
        held = page_data.held(data, "held all", _queues(data))
        table = panels.load("table", using, _table_state, using, kept=tuning.slow_panel_kept)
        stuck = panels.load("stuck", using, inspected.stuck, using)
        checks = panels.load("checks", using, _checks, using, kept=0.0)
        restores = panels.load("restores", using, lifecycle.newest, using, RestoreWork.name, kept=0.0)
        last, current = checks.value or (None, None)
        restored, restoring = restores.value or (None, None)
        results = {} if last is None else results_of(last)
        last_restore = _("Last restore: #%(number)d by %(actor)s, %(state)s %(span)s ago (%(at)s).")
        return {
            "has_worker": not needs.has_no_worker(data),
            "redis": [*needs.of_redis(data), *needs.of_redis_values(data)],
            "held": sorted((held.value or {}).items()),
            "database": [*needs.of_database(data), *_table(table)],
            "problems": panels.problems(data.redis, data.pending, held, table, stuck, checks, restores),
            "configured": conf.get().REDIS is not None,
            "stuck": None if stuck.value is None else stuck.value.count,
            "mismatches": sorted(results.items()),
            "agrees": last is not None and all(sum(found.values()) == found["compared"] for found in results.values()),
            "total": None if last is None else sum(found["compared"] for found in results.values()),
            "checked": last and _ended(_("Checked %(span)s ago (%(at)s) by %(actor)s."), last, data),
            "checking": current,
            "checking_url": operation_url(self, request, current),
            "may_restore": self.may_restore(request),
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
        with page.acting_as_user(request), lifecycle.starting(self.using):
            if _checks(self.using)[1] is not None:
                return self.leave(request, url, _("A check is under way already."), messages.WARNING)
            lifecycle.start(self.using, "check", {}, {}, described=_("all queues"), reason="")
        text, level = _("The check is queued: a worker compares the record with Redis."), messages.SUCCESS
        if not stats.alive(self.using, reads.now(self.using)):
            text, level = _("The check is queued and waits for a worker: none is alive."), messages.WARNING
        return self.leave(request, url, text, level)

    def may_restore(self, request: HttpRequest) -> bool:
        """Tell whether there is a Redis, and the user may compare the record with it and restore it."""
        return self.may(request, "restore") and conf.get().REDIS is not None

    def restore_view(self, request: HttpRequest) -> HttpResponse:
        """Show the preview on GET, which writes nothing; start an operation on POST."""
        self.require(request, "restore")
        title = _("Restore Redis from the record")
        if conf.get().REDIS is None:
            return page.response(self, request, title, "restore", {"is_unneeded": True})
        using = self.using
        is_post = request.method == "POST"
        given = request.POST if is_post else request.GET
        word = console_conf.get().ENVIRONMENT or "restore"
        confirm = ConfirmForm(request.POST if is_post else None, many=False, typed=word)
        with statement_timeout(using, timeouts.page):
            form = RestoreForm(given if given else {"overdue": Overdue.RUN.value}, using)
            _last, running = lifecycle.newest(using, RestoreWork.name)
            workers = stats.alive(using, reads.now(using))
        if is_post and form.is_valid() and confirm.is_valid():
            return self._start(request, form, confirm.cleaned_data["reason"])
        facts = {
            "form": form,
            "confirm": confirm,
            "preview": _preview(using, form) if form.is_valid() else None,
            "hidden": [field.as_hidden({"id": False}) for field in form],
            "running": running,
            "running_url": operation_url(self, request, running),
            "workers": workers,
        }
        return page.response(self, request, title, "restore", facts)

    def _start(self, request: HttpRequest, form: RestoreForm, reason: str) -> HttpResponse:
        """Start a restore, unless one is under way."""
        with lifecycle.starting(self.using):
            _last, running = lifecycle.newest(self.using, RestoreWork.name)
            operation = running or page.start_operation(
                request, RestoreWork.name, form.scope, form.arguments, described=form.described(), reason=reason
            )
        url = operation_url(self, request, operation) or self.url(Health)
        if running is not None:
            text = _("Restore #%(number)d is under way already, started by %(actor)s: nothing was done.")
            text %= {"number": running.pk, "actor": running.starter}
            return self.leave(request, url, text, messages.ERROR)
        text, level = _("Restore #%(number)d is queued: a worker begins within seconds."), messages.SUCCESS
        if not stats.alive(self.using, reads.now(self.using)):
            text, level = _("Restore #%(number)d is queued and waits for a worker: none is alive."), messages.WARNING
        return self.leave(request, url, text % {"number": operation.pk}, level)


def _checks(using: str) -> tuple[Operation | None, Operation | None]:
    """Return the consistency check that was finished last, and the one that is open."""
    return lifecycle.newest(using, "check", OperationState.DONE)


def _ended(text: str, operation: Operation, data: PageData) -> str:
    """Return a text with what is known of an operation that has ended."""
    assert operation.finished_at is not None
    return text % {
        "number": operation.pk,
        "actor": operation.starter,
        "state": OperationState(operation.state).label,
        "span": span(data.at - operation.finished_at),
        "at": moment(operation.finished_at, "seconds"),
    }


# --- the table --------------------------------------------------------------------------------------------------------


def _queues(data: PageData) -> list[str]:
    """Return the queues of which Redis may hold ids: ``reading.queues``, with those of the snapshot."""
    snapshot = data.snapshot.value
    return sorted(pulled.without(registry.queues().union(snapshot.queues if snapshot else ())))


def _table_state(using: str) -> TableState:
    return console_statements(using).vacuum(), statements(using).snapshot_holders()


def _table(panel: Panel[TableState]) -> Iterator[Finding]:
    """Yield the size of the table of messages and how long they are kept there. Unknown values have no line."""
    if panel.value is None:
        yield Finding(_("State"), Level.CRITICAL, "?")
        return
    vacuum, holders = panel.value
    if vacuum.rows is not None:
        yield Finding(_("Messages"), Level.INFO, _("about %(number)s") % {"number": f"{vacuum.rows:,}"})
    if vacuum.dead_rows is not None:
        vacuumed = _("never") if vacuum.at is None else moment(vacuum.at, "seconds")
        note = _("last vacuum: %(at)s") % {"at": vacuumed}
        yield Finding(_("Dead rows"), Level.INFO, f"{vacuum.dead_rows:,}", advice=note)
    if holders is not None:
        yield diagnostics.of_snapshots(holders)
    settings = conf.get()
    for name, kept in (
        (_("Finished messages are kept"), settings.RETENTION),
        (_("Dead messages are kept"), settings.DEAD_RETENTION),
    ):
        for pattern, seconds in rules(kept):
            text = _("forever") if seconds is False else span(timedelta(seconds=seconds))
            yield Finding(f"{name}: {pattern}" if pattern else name, Level.INFO, text)


# --- the restore ------------------------------------------------------------------------------------------------------


def _preview(using: str, form: RestoreForm) -> dict[str, Any]:
    """Return what a restore would find, or why that is not known; ``refused``: the restore cannot be started."""
    redis_publisher = publisher.get(using)
    assert redis_publisher is not None
    work = RestoreWork(form.scope, form.arguments)
    try:
        with statement_timeout(using, timeouts.count):
            report = work.restore(using, redis_publisher.broker).preview()
            now = reads.now(using)
    except TooSlow:
        text = _("The messages could not be counted within %(seconds)d s. You can start the restore all the same.")
        return {"problem": text % {"seconds": timeouts.count // 1000}}
    except BrokerUnavailable as error:
        return {"problem": _("Redis: %(error)s") % {"error": error}, "refused": True}
    except (DatabaseError, InterfaceError) as error:
        text = _("The database does not answer: %(error)s")
        return {"problem": text % {"error": type(error).__name__}, "refused": True}
    total = report.total()
    return {
        "rows": [_row(name, tally, now) for name, tally in sorted(report.queues.items())],
        "total": _row(_("all"), total, now),
        "overdue": f"{total.overdue:,}",
        "policy": form.cleaned_data["overdue"].value,
        "spread": span(form.cleaned_data["spread"] or timedelta(0)),
    }


def _row(name: str, tally: Tally, now: datetime) -> SimpleNamespace:
    """Return what the page shows of the check of one queue."""
    return SimpleNamespace(
        name=name,
        tally=tally,
        missing=max(0, tally.found - tally.beyond - tally.held),
        oldest="–" if tally.oldest is None else span(now - tally.oldest),
    )
