"""The list of worker processes with their heartbeats and running messages, and the page of each."""

from __future__ import annotations

from datetime import datetime
from types import SimpleNamespace
from typing import Any

from django.contrib import messages
from django.contrib.admin.utils import quote, unquote
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ...models import Message, Worker
from ...models.workers import WorkerList, WorkerState, state_of
from ...record import reads
from . import page_data
from .explanation import moment, span
from .page import Page, response
from .page_data import PageData

LABELS = {
    WorkerState.ALIVE: gettext_lazy("alive"),
    WorkerState.LATE: gettext_lazy("late"),
    WorkerState.LOST: gettext_lazy("lost"),
}


class WorkerAdmin(Page):
    """The workers, for users who may view messages."""

    template = "workers"

    def content(self, request: HttpRequest) -> dict[str, Any]:
        data = PageData()
        running = page_data.running(data.using)
        there = data.workers.value
        found, partial = running.value or ({}, False)
        return {
            "workers": data.workers,
            "running": running,
            "rows": self._rows(there, found) if there else [],
            "counts": [(health, LABELS[health], len(there.of(health))) for health in WorkerState] if there else [],
            "partial": partial,
            "most": sum(map(len, found.values())),
        }

    def _rows(self, there: WorkerList, running: dict[str, list[tuple[int, str]]]) -> list[SimpleNamespace]:
        # A lost worker that still holds messages comes first: they wait for the end of their leases.
        order = {WorkerState.LOST: 1, WorkerState.LATE: 2, WorkerState.ALIVE: 3}
        rows = [self._row(worker, running.get(worker.name, []), there.at) for worker in there.workers]
        return sorted(rows, key=lambda row: 0 if row.running and row.health == WorkerState.LOST else order[row.health])

    def _row(self, worker: Worker, held: list[tuple[int, str]], now: datetime) -> SimpleNamespace:
        """Return what the list of workers shows of one."""
        health = state_of(worker, now)
        return SimpleNamespace(
            worker=worker,
            health=health,
            label=str(LABELS[health]),
            queues=", ".join(map(str, worker.queues)),
            started=moment(worker.started_at, "seconds"),
            seen=_("%(span)s ago") % {"span": span(now - worker.seen_at)},
            # The labels of its messages, with their addresses.
            running=[(f"{topic} #{pk}", self.url(Message, "change", quote(pk))) for pk, topic in held[:5]],
            more=max(0, len(held) - 5),
        )

    def change_view(self, request: HttpRequest, object_id: str, *args: Any, **kwargs: Any) -> HttpResponse:
        """Show one worker as the list does."""
        self.require(request)
        name = unquote(object_id)
        worker = self.get_object(request, name)
        if worker is None:
            text = _("There is no worker %(name)s. It ended, or has been lost for more than a day.") % {"name": name}
            return self.leave(request, self.url(Worker), text, messages.WARNING)
        running = page_data.running(self.using)
        held, _partial = running.value or ({}, False)
        row = self._row(worker, held.get(name, []), reads.now(self.using))
        return response(self, request, name, self.template, {"running": running, "rows": [row]})
