"""What workers do in batches: how far they are, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db import router
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ... import actors, conf, transitions
from ...inspector import stats
from ...sql.moves import writing
from .. import audit, operations
from ..models import Operation, OperationState
from . import action_table, page
from .explanation import moment, span
from .page import Page

if TYPE_CHECKING:
    from collections.abc import Callable

    _ModelAdmin = admin.ModelAdmin[Operation]
else:
    _ModelAdmin = admin.ModelAdmin

PER_PAGE = 50


@dataclass(frozen=True, slots=True)
class Shown:
    """An operation, ready to be shown. Empty where there is nothing to say."""

    operation: Operation
    url: str
    verb: str
    progress: str
    percent: int | None
    outcomes: str
    created: str
    started: str
    duration: str
    rate: str
    eta: str


def show(operation: Operation, url: str, now: datetime) -> Shown:
    """How far it is."""
    end = operation.finished_at or now
    took = end - operation.started_at if operation.started_at else None
    total = operation.total
    is_running = operation.state == OperationState.RUNNING
    rate = operation.done / took.total_seconds() if took and took > timedelta(seconds=1) else 0.0
    left = max(0, total - operation.done) / rate if total is not None and rate and is_running else None
    return Shown(
        operation,
        url,
        action_table.label(operation.verb),
        _progress(operation),
        min(100, operation.done * 100 // total) if total else None,
        action_table.outcome(operation.outcomes),
        moment(operation.created_at, "seconds"),
        moment(operation.started_at, "seconds") if operation.started_at else "",
        span(took) if took is not None else "",
        _("%(number)s a second") % {"number": action_table.number(round(rate))} if rate >= 1 else "",
        span(timedelta(seconds=left)) if left is not None else "",
    )


def _progress(operation: Operation) -> str:
    if operation.total is None:
        text = ngettext("%(done)s message", "%(done)s messages", operation.done)
        return text % {"done": action_table.number(operation.done)}
    text = ngettext("%(done)s of %(total)s message", "%(done)s of %(total)s messages", operation.total)
    return text % {"done": action_table.number(operation.done), "total": action_table.number(operation.total)}


class OperationAdmin(Page, _ModelAdmin):
    """Who may see operations sees them all; who started one may stop it, and so may who could have started it."""

    template = "delayq_console/operation/list.html"

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return request.user.has_perm("delayq_console.view_operation")

    def may_resume(self, request: HttpRequest, operation: Operation) -> bool:
        """Whether the user could have started it."""
        work = operations.WORKS.get(operation.verb)
        if work is None or conf.get().ADMIN_READ_ONLY or not self.has_view_permission(request):
            return False
        needed = {work.permission, "bulk_message"} if issubclass(work, operations.BulkAction) else {work.permission}
        return request.user.has_perms([f"django_delayq.{name}" for name in needed])

    def may_stop(self, request: HttpRequest, operation: Operation) -> bool:
        """Whether the user started it, or could have."""
        if conf.get().ADMIN_READ_ONLY or not self.has_view_permission(request):
            return False
        return operation.started_by == _actor(request) or self.may_resume(request, operation)

    def get_urls(self) -> list[URLPattern]:
        name = f"{self.opts.app_label}_{self.opts.model_name}"
        return [
            path("<int:number>/stop/", self.admin_site.admin_view(self.stop_view), name=f"{name}_stop"),
            path("<int:number>/resume/", self.admin_site.admin_view(self.resume_view), name=f"{name}_resume"),
            *super().get_urls(),
        ]

    def content(self, request: HttpRequest) -> dict[str, Any]:
        before = request.GET.get("before", "")
        rows = self.get_queryset(request).order_by("-pk").defer("scope")
        if before.isascii() and before.isdigit() and len(before) <= 18:
            rows = rows.filter(pk__lt=int(before))
        page = list(rows[: PER_PAGE + 1])
        now = transitions.now(rows.db)
        return {
            "operations": [show(row, self._url("change", row.pk), now) for row in page[:PER_PAGE]],
            "older": page[PER_PAGE - 1].pk if len(page) > PER_PAGE else None,
            "waits": self._waits(page, rows.db, now),
        }

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        if not self.has_view_permission(request) or request.method != "GET":
            raise PermissionDenied
        operation = self._find(request, object_id or "")
        using = operation._state.db or "default"
        now = transitions.now(using)
        # Unless its worker is gone: then it can be told once more, and stops at once.
        is_held = operation.leased_until is not None and operation.leased_until > now
        is_stopping = operation.stop_requested and operation.state == OperationState.RUNNING and is_held
        context = {
            **page.context(self, request, f"{action_table.label(operation.verb)} #{operation.pk}"),
            "shown": show(operation, "", now),
            "operation": operation,
            "arguments": _arguments(operation),
            "waits": self._waits([operation], using, now),
            "stops": is_stopping,
            "may_stop": operation.state in operations.OPEN and not is_stopping and self.may_stop(request, operation),
            "may_resume": operations.is_resumable(operation) and self.may_resume(request, operation),
            "list": self._url("changelist"),
            **(extra_context or {}),
        }
        return TemplateResponse(request, "delayq_console/operation/detail.html", context)

    def history_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        raise Http404

    def stop_view(self, request: HttpRequest, number: int) -> HttpResponse:
        """POST to stop it between two batches."""
        return self._steer(request, number, "stop", self.may_stop, operations.stop)

    def resume_view(self, request: HttpRequest, number: int) -> HttpResponse:
        """POST to let it go on where it ended."""
        return self._steer(request, number, "resume", self.may_resume, operations.resume)

    def _steer(
        self,
        request: HttpRequest,
        number: int,
        verb: str,
        may: Callable[[HttpRequest, Operation], bool],
        act: Callable[[Operation], bool],
    ) -> HttpResponse:
        if not self.has_view_permission(request):
            raise PermissionDenied
        operation = self._find(request, str(number))
        if not may(request, operation):
            raise PermissionDenied
        if request.method != "POST":
            return HttpResponseRedirect(self._url("change", number))
        with actors.acting_as(_actor(request)), writing(self._using):
            is_done = act(operation)
            if is_done:
                target = f"#{operation.pk} {operation.verb}: {operation.described}"
                audit.record(self._using, verb, target, operation=operation, user=request.user)
        if not is_done:
            self.message_user(request, _("Nothing was done: it is in another state by now."), messages.WARNING)
        elif verb == "stop":
            self.message_user(request, _("It stops after the batch that is under way."), messages.SUCCESS)
        else:
            self.message_user(request, _("It goes on where it ended."), messages.SUCCESS)
        return HttpResponseRedirect(self._url("change", number))

    @property
    def _using(self) -> str:
        return router.db_for_write(Operation)

    def _find(self, request: HttpRequest, number: str) -> Operation:
        if not (number.isascii() and number.isdigit() and len(number) <= 18):
            raise Http404
        operation: Operation | None = self.get_queryset(request).using(self._using).filter(pk=int(number)).first()
        if operation is None:
            raise Http404
        return operation

    def _waits(self, page: list[Operation], using: str, now: datetime) -> bool:
        """Whether something is to do and nobody there to do it."""
        return any(row.state in operations.OPEN for row in page) and not stats.alive(using, now)

    def _url(self, page: str, *args: object) -> str:
        name = f"admin:{self.opts.app_label}_{self.opts.model_name}_{page}"
        return reverse(name, args=args, current_app=self.admin_site.name)


def _actor(request: HttpRequest) -> str:
    return f"user:{request.user.get_username()}"


def _arguments(operation: Operation) -> list[tuple[str, str]]:
    """What was asked for besides the verb, in words."""
    given, said = operation.arguments, []
    if given.get("due"):
        said.append((_("New due time"), moment(datetime.fromisoformat(given["due"]), "seconds")))
    if given.get("shift"):
        sign = "-" if given["shift"] < 0 else "+"
        said.append((_("Later by"), sign + span(timedelta(seconds=abs(given["shift"])))))
    if given.get("spread"):
        said.append((_("Spread over"), span(timedelta(seconds=given["spread"]))))
    return said
