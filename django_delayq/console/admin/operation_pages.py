"""The list of operations and the page of each: its progress and outcomes, and the buttons that stop and resume it."""

from __future__ import annotations

from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ...core.values import row_id
from ...inspector import stats
from ...models import Message
from ...project import console_conf
from ...record import reads
from ..console_tuning import timeouts
from ..models import Operation, OperationState
from ..operations import lifecycle
from ..operations.lifecycle import ENDED_EARLY, OPEN
from ..operations.work import UNDONE_BY, WORKS
from ..statements import statement_timeout
from . import action_table, page
from .explanation import moment, span
from .page import Page


def operation_row(operation: Operation, now: datetime) -> SimpleNamespace:
    """Return an operation as pages show it at the moment ``now``. A field without a value is empty."""
    end = operation.finished_at or now
    took = end - operation.started_at if operation.started_at else None
    total = operation.total
    is_running = operation.state == OperationState.RUNNING
    rate = operation.done / took.total_seconds() if took and took > timedelta(seconds=1) else 0.0
    left = max(0, total - operation.done) / rate if total is not None and rate and is_running else None
    return SimpleNamespace(
        operation=operation,
        action=name_of(operation),
        progress=_progress(operation),
        percent=min(100, operation.done * 100 // total) if total else None,
        outcomes=action_table.outcomes_text(operation.outcomes),
        created=moment(operation.created_at, "seconds"),
        duration=span(took) if took is not None else "",
        rate=_("%(number)s a second") % {"number": action_table.number(round(rate))} if rate >= 1 else "",
        eta=span(timedelta(seconds=left)) if left is not None else "",
    )


def name_of(operation: Operation) -> str:
    """Return in words what an operation does."""
    if operation.arguments.get("resume"):
        return _("Gentle resume")
    return _("Undo") if operation.arguments.get("undoes") else action_table.label(operation.action)


def _progress(operation: Operation) -> str:
    if operation.total is None:
        text = ngettext("%(done)s message", "%(done)s messages", operation.done)
        return text % {"done": action_table.number(operation.done)}
    text = ngettext("%(done)s of %(total)s message", "%(done)s of %(total)s messages", operation.total)
    return text % {"done": action_table.number(operation.done), "total": action_table.number(operation.total)}


class OperationAdmin(Page):
    """The operations, for users who may view them. Users may stop one that they started, or that they could start."""

    template = "operation/list"

    def may_resume(self, request: HttpRequest, operation: Operation) -> bool:
        """Tell whether the user may resume an operation, which takes the permissions to start it."""
        work = WORKS.get(operation.action)
        return work is not None and self.may(request, *work.needed(operation.arguments))

    def may_stop(self, request: HttpRequest, operation: Operation) -> bool:
        """Tell whether the user may stop an operation: one that the user started or could start."""
        is_own = operation.started_by == page.actor_of(request) and not console_conf.get().READ_ONLY
        return is_own or self.may_resume(request, operation)

    def content(self, request: HttpRequest) -> dict[str, Any]:
        rows = self.get_queryset(request).defer("scope")
        with statement_timeout(rows.db, timeouts.page):
            shown, older = page.newest(request, rows, self.list_per_page)
            now = reads.now(rows.db)
            return {
                "operations": [operation_row(row, now) for row in shown],
                "older": older,
                "is_unserved": self._is_unserved(shown, rows.db, now),
            }

    def change_view(self, request: HttpRequest, object_id: str, *args: Any, **kwargs: Any) -> HttpResponse:
        if not self.has_view_permission(request) or request.method not in ("GET", "HEAD"):
            raise PermissionDenied
        operation = self._find(request, object_id)
        using = operation._state.db or "default"
        now = reads.now(using)
        # When the worker of the operation is gone, its lease ends: after that a second stop takes effect at once.
        is_held = operation.leased_until is not None and operation.leased_until > now
        is_stopping = operation.stop_requested and operation.state == OperationState.RUNNING and is_held
        is_unstoppable = is_stopping or (is_held and operation.worker.startswith(lifecycle.LOADER))
        facts = {
            "row": operation_row(operation, now),
            "operation": operation,
            "arguments": _arguments(operation),
            "is_unserved": self._is_unserved([operation], using, now),
            "is_stopping": is_stopping,
            "may_stop": operation.state in OPEN and not is_unstoppable and self.may_stop(request, operation),
            "may_resume": operation.state in ENDED_EARLY and self.may_resume(request, operation),
            "may_undo": self.may_undo(request, operation),
            "messages_url": self.list_url(Message, f"operation:{operation.pk}", state="all")
            if "ids" in operation.scope
            else "",
        }
        return page.response(self, request, f"{name_of(operation)} #{operation.pk}", "operation/detail", facts)

    def stop_view(self, request: HttpRequest, number: int) -> HttpResponse:
        """Stop an operation between two batches, on POST."""
        return self._act_on(request, number, "stop", _("The operation stops after the current batch."))

    def resume_view(self, request: HttpRequest, number: int) -> HttpResponse:
        """Let an operation go on where it stopped, on POST."""
        return self._act_on(request, number, "resume", _("The operation goes on where it stopped."))

    def may_undo(self, request: HttpRequest, operation: Operation) -> bool:
        """Tell whether the user may undo an operation: it has ended, and nobody has undone it, or does so now."""
        by = UNDONE_BY.get(operation.action)
        is_special = "undoes" in operation.arguments or "resume" in operation.arguments
        if by is None or is_special or operation.state in OPEN or not self.may(request, by, "bulk"):
            return False
        others = Operation.objects.using(self.using).filter(arguments__undoes=operation.pk)
        return not others.filter(state__in=[*OPEN, OperationState.DONE]).exists()

    def undo_view(self, request: HttpRequest, number: int) -> HttpResponse:
        """Start an operation that undoes another one, on POST."""
        self.require(request)
        operation, url = self._find(request, str(number)), self.url(Operation, "change", number)
        by = UNDONE_BY.get(operation.action)
        if by is None:
            raise Http404
        self.require(request, by, "bulk")
        if request.method != "POST":
            return HttpResponseRedirect(url)
        # Two users get here one after the other: the second finds the operation that the first has started.
        with lifecycle.starting(self.using):
            if not self.may_undo(request, operation):
                text = _("Nothing was done: the operation is in another state by now.")
                return self.leave(request, url, text, messages.WARNING)
            described = _("undo of operation #%(id)d: %(messages)s")
            undo = page.start_operation(
                request,
                by,
                operation.scope,
                {"undoes": operation.pk},
                described=described % {"id": operation.pk, "messages": operation.described},
                reason=_("undo of operation #%(id)d") % {"id": operation.pk},
            )
        text = _("Operation #%(id)d is queued: a worker takes back what operation #%(undone)d did.")
        url = self.url(Operation, "change", undo.pk)
        return self.leave(request, url, text % {"id": undo.pk, "undone": number}, messages.SUCCESS)

    def _act_on(self, request: HttpRequest, number: int, action: str, done: str) -> HttpResponse:
        """Stop or resume an operation, and record who did that."""
        may, act = (self.may_stop, lifecycle.stop) if action == "stop" else (self.may_resume, lifecycle.resume)
        self.require(request)
        operation, url = self._find(request, str(number)), self.url(Operation, "change", number)
        if not may(request, operation):
            raise PermissionDenied
        if request.method != "POST":
            return HttpResponseRedirect(url)
        with page.acting_as_user(request):
            is_done = act(operation)
            if is_done:
                target = f"#{operation.pk} {operation.action}: {operation.described}"
                page.record(request, action, target, operation=operation)
        text, level = _("Nothing was done: the operation is in another state by now."), messages.WARNING
        if is_done:
            text, level = done, messages.SUCCESS
        return self.leave(request, url, text, level)

    def _find(self, request: HttpRequest, number: str) -> Operation:
        rows: QuerySet[Operation] = self.get_queryset(request).using(self.using)
        try:
            return rows.get(pk=row_id(number))
        except (ValueError, Operation.DoesNotExist):
            raise Http404 from None

    def _is_unserved(self, shown: list[Operation], using: str, now: datetime) -> bool:
        """Tell whether an operation is open and no worker is alive to do it."""
        return any(row.state in OPEN for row in shown) and not stats.alive(using, now)


def _arguments(operation: Operation) -> dict[str, Any]:
    """Return the arguments of an operation, lengths and moments in words."""
    given = operation.arguments
    told = {name: span(timedelta(seconds=abs(given.get(name) or 0))) for name in ("shift", "spread")}
    due = moment(datetime.fromisoformat(given["due"]), "seconds") if given.get("due") else ""
    return {**given, "due": due, "later": ("-" if (given.get("shift") or 0) < 0 else "+") + told["shift"], **told}
