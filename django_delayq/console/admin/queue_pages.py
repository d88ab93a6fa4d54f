"""The list of queues with their messages, workers and pauses, and the pages that pause and resume one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

from django import forms
from django.contrib import messages
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ...api import actions, pausing
from ...broker.base import QueueSize
from ...core.exceptions import InvalidMessage
from ...core.states import State
from ...inspector import worker_list
from ...inspector.stats import QueueSnapshot
from ...models import Message, Queue
from ...models.messages import not_expired
from ...models.workers import WorkerState
from ...project import conf, validation
from ...record import reads
from ..console_tuning import timeouts, tuning
from ..models import Operation
from ..operations import lifecycle
from ..operations.work import Scope, holder
from ..statements import in_time, statement_timeout
from . import action_table, page, page_data, panels, topic_pages
from .explanation import pause_facts, span
from .forms import DelayField, PauseForm, ReasonField, SpreadForm
from .page import Page
from .page_data import PageData


class ResumeForm(SpreadForm):
    """The reason to resume a queue, and the time to spread the messages over that are due."""

    spread = DelayField(
        label=gettext_lazy("Spread over"),
        help_text=gettext_lazy(
            "For example 10m: a worker lets them fall due one by one in that time, then resumes the queue. Empty: all "
            "at once."
        ),
    )
    reason = ReasonField(gettext_lazy("Written to the audit."))
    # Another operation that does so already is stopped only if the user says so.
    stop = forms.BooleanField()

    def __init__(self, data: Any, *, number: int | None, may_spread: bool, under_way: Operation | None) -> None:
        """Make the form for ``number`` messages that begin when the queue is resumed, None: too many to count.

        The user may answer a question about more messages than there are now. The operation ``under_way`` spreads them
        already.
        """
        is_one = data is None and number in (0, 1)
        super().__init__(data, many=may_spread and not is_one, number=number or 0)
        self.fields["reason"].required = False
        self.under_way = under_way
        stop = self.fields.pop("stop")
        if under_way is not None and may_spread:
            stop.label = _("Stop operation #%(id)d and do this instead") % {"id": under_way.pk}
            stop.error_messages["required"] = self.problem
            # The form names the operation by its number: so the user stops no other one that was started meanwhile.
            self.fields[f"stop_{under_way.pk}"] = stop

    @property
    def problem(self) -> str:
        """What is under way already, in words; empty when nothing is."""
        if self.under_way is None:
            return ""
        spread = span(timedelta(seconds=self.under_way.arguments.get("spread") or 0))
        text = _("Operation #%(id)d by %(actor)s spreads the due messages over %(spread)s, then resumes the queue.")
        return text % {"id": self.under_way.pk, "actor": self.under_way.starter, "spread": spread}

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or self.cleaned_data
        if self.under_way is not None and f"stop_{self.under_way.pk}" not in self.fields:
            raise forms.ValidationError(self.problem)
        return cleaned


class QueueAdmin(Page):
    template = "queues"

    def content(self, request: HttpRequest) -> dict[str, Any]:
        data = PageData()
        # Read anew for each page, because a user who has just paused a queue wants to see it.
        paused = panels.load("paused now", data.using, pausing.paused, data.using, kept=0.0)
        names = _names(data, paused.value or {})
        held = page_data.held(data, "held", names)
        may_pause, unserved, pauses = self.may(request, "pause"), page_data.unserved(data), paused.value or {}
        rows = [self._row(name, data, held.value) for name in names]
        for row in rows:
            pausing_of_it = self._pausing(row.name, pauses.get(row.name), data.at, may_pause)
            vars(row).update(pausing_of_it, unserved=row.name in unserved)
        return {
            "queues": rows,
            "snapshot": data.snapshot.value,
            "held": held.value,
            "may_pause": may_pause,
            "problems": panels.problems(data.snapshot, data.workers, paused, held),
        }

    def _row(self, name: str, data: PageData, held: dict[str, QueueSize] | None) -> SimpleNamespace:
        """Return what the table shows of a queue, but for its pause."""
        snapshot, workers = data.snapshot.value, data.workers.value
        queue = QueueSnapshot() if snapshot is None else snapshot.queues.get(name, QueueSnapshot())
        ids = held and held.get(name)
        return SimpleNamespace(
            name=name,
            counts=queue,
            url=self.list_url(Message, f"queue:{name}"),
            detail_url=self.url(Queue, "detail", name),
            limited_url=self.list_url(Message, f"is:limited queue:{name}") if queue.limited.count else "",
            oldest=queue.oldest_overdue and span(data.at - queue.oldest_overdue),
            following=queue.next_due and span(queue.next_due - data.at),
            workers="?" if workers is None else f"{workers.serving(name):,}",
            in_redis=ids and f"{ids.delayed:,} / {ids.ready:,}",
        )

    def _pausing(self, name: str, pause: Queue | None, now: datetime, may_pause: bool) -> dict[str, Any]:
        """Return what pages show of the pause of a queue, with the addresses that end, change or begin one."""
        return {
            "paused": pause is not None,
            "pause": "" if pause is None else pause_facts(pause, now),
            "pause_url": self.url(Queue, "pause", name) if may_pause else "",
            "resume_url": self.url(Queue, "resume", name) if may_pause and pause is not None else "",
        }

    def detail_view(self, request: HttpRequest, queue: str) -> HttpResponse:
        """Show the state of a queue, what became of its messages, and how long its handlers ran."""
        return topic_pages.detail(self, request, "queue", queue, self._pausing)

    def pause_view(self, request: HttpRequest, queue: str) -> HttpResponse:
        """Ask before a pause on GET; pause the queue on POST."""
        name = self._checked(request, "pause", queue)
        form = PauseForm(request.POST if request.method == "POST" else None)
        if form.is_valid():
            given = form.cleaned_data
            try:
                with page.acting_as_user(request):
                    pausing.pause(self.using, name, **given)
                    page.record(request, "pause", name, reason=given["reason"])
            except InvalidMessage:
                form.add_error(None, _("The pause would have ended already."))
            else:
                text = _("Queue %(queue)s is paused: workers start no more of its messages.") % {"queue": name}
                return self._done(request, text, messages.SUCCESS)
        return self._ask(request, name, form, "pause", _("Pause queue %(queue)s?"))

    def resume_view(self, request: HttpRequest, queue: str) -> HttpResponse:
        """Ask before a resume on GET; resume the queue on POST, at once or after its messages were spread."""
        name = self._checked(request, "resume", queue)
        if request.POST.get("spread"):
            self.require(request, "run", "bulk")
        with statement_timeout(self.using, timeouts.page):
            is_paused, under_way = name in pausing.paused(self.using), self._gentle_resume(name)
        number = in_time(self.using, timeouts.count, self._due(name).count) if is_paused else 0
        form = ResumeForm(
            request.POST if request.method == "POST" else None,
            number=number,
            may_spread=self.may(request, "run", "bulk"),
            under_way=under_way,
        )
        ids: Sequence[int] = ()
        if is_paused and form.is_valid() and form.cleaned_data.get("spread"):
            ids = actions.selected(self._due(name)[: tuning.most_messages + 1])
            if len(ids) > tuning.most_messages:
                text = _("An operation takes %(most)s messages at most. Spread some of them with “Run now” first.")
                form.add_error("spread", text % {"most": action_table.number(tuning.most_messages)})
        if not form.is_valid():
            waiting = _waiting(number) if is_paused else ""
            return self._ask(request, name, form, "resume", _("Resume queue %(queue)s?"), waiting)
        resume = self._resume_slowly if form.cleaned_data.get("spread") else self._resume_at_once
        # Two users get here one after the other: the second learns of the operation that the first has started.
        with page.acting_as_user(request), lifecycle.starting(self.using):
            if self._gentle_resume(name) != form.under_way:
                text = _("Somebody else acted on queue %(queue)s meanwhile. Check it and confirm again.")
                return self.leave(request, self.url(Queue, "resume", name), text % {"queue": name}, messages.WARNING)
            text, level = resume(request, name, form, ids)
            # The operation ends the pause only if the pause is still its own.
            if form.under_way is not None and lifecycle.stop(form.under_way):
                target = f"#{form.under_way.pk} {form.under_way.action}: {form.under_way.described}"
                page.record(request, "stop", target, operation=form.under_way)
        return self._done(request, text, level)

    def _resume_at_once(
        self, request: HttpRequest, name: str, form: ResumeForm, _ids: Sequence[int]
    ) -> tuple[str, int]:
        """Resume the queue; return what to tell the user, and the level of that."""
        values, workers = {"queue": name}, worker_list.list_workers(self.using, reads.now(self.using))
        if not pausing.resume(self.using, name):
            return _("Queue %(queue)s was not paused.") % values, messages.WARNING
        page.record(request, "resume", name, reason=form.cleaned_data["reason"])
        if not workers.serving(name):
            text = _("Queue %(queue)s is resumed, but no live worker serves it: its messages wait.")
            return text % values, messages.WARNING
        text = _("Queue %(queue)s is resumed: workers start its messages within about a second.")
        return text % values, messages.SUCCESS

    def _resume_slowly(self, request: HttpRequest, name: str, form: ResumeForm, ids: Sequence[int]) -> tuple[str, int]:
        """Start an operation that spreads the messages that are due, then resumes the queue."""
        operation = page.start_operation(
            request,
            "run",
            Scope(ids=tuple(ids)).to_json(),
            {**form.arguments(reads.now(self.using)), "resume": name},
            described=_("the due messages of queue %(queue)s") % {"queue": name},
            reason=form.cleaned_data["reason"],
            audited=("resume", name),
        )
        # The pause ends with the operation and not by itself. A later pause by somebody else outlasts it.
        pausing.take_over(self.using, name, holder(operation))
        text = _("Operation #%(id)d is queued: a worker spreads the messages, then resumes queue %(queue)s.")
        return text % {"id": operation.pk, "queue": name}, messages.SUCCESS

    def _gentle_resume(self, name: str) -> Operation | None:
        """Return the operation that spreads the due messages of a queue and then resumes it, while it is open."""
        rows = Operation.objects.using(self.using).filter(state__in=lifecycle.OPEN, arguments__resume=name)
        return rows.filter(stop_requested=False).order_by("-pk").first()

    def _due(self, name: str) -> QuerySet[Message]:
        """Return the messages of a queue that begin when it is resumed, the longest due first."""
        now = reads.now(self.using)
        rows = Message.objects.using(self.using).filter(not_expired(now), state=State.SCHEDULED, queue=name)
        return rows.filter(due_at__lte=now).order_by("due_at", "id")

    def _checked(self, request: HttpRequest, verb: str, queue: str) -> str:
        self.require(request, verb)
        try:
            return validation.queue(queue)
        except InvalidMessage:
            raise Http404 from None

    def _ask(
        self, request: HttpRequest, name: str, form: forms.Form, view: str, question: str, waiting: str = ""
    ) -> HttpResponse:
        """Show the page on which the user confirms a pause or its end."""
        with statement_timeout(self.using, timeouts.page):
            pause = pausing.paused(self.using).get(name)
        facts = {
            "form": form,
            "action": view,
            "waiting": waiting,
            "problem": getattr(form, "problem", ""),
            "pause": "" if pause is None else pause_facts(pause, reads.now(self.using)),
            "url": self.url(Queue, view, name),
            "back": self.url(Queue),
        }
        return page.response(self, request, question % {"queue": name}, "queue_confirm", facts)

    def _done(self, request: HttpRequest, text: str, level: int) -> HttpResponse:
        panels.forget()
        return self.leave(request, self.url(Queue), text, level)


def _waiting(number: int | None) -> str:
    """Return in words how many messages begin when a queue is resumed; None: they could not be counted in time."""
    if number is None:
        return _("Messages are due, more than could be counted. They begin at once.")
    if not number:
        return _("No message is due.")
    text = ngettext(
        "%(count)s message is due and begins at once.", "%(count)s messages are due and begin at once.", number
    )
    return text % {"count": action_table.number(number)}


def _names(data: PageData, paused: dict[str, Queue]) -> list[str]:
    """Return every queue that the record, the settings, a pause or a live worker names, paused ones first."""
    found = {*conf.get().QUEUES, conf.get().DEFAULT_QUEUE}
    if data.snapshot.value is not None:
        found |= set(data.snapshot.value.queues)
    if data.workers.value is not None:
        for worker in data.workers.value.of(WorkerState.ALIVE):
            found |= set(map(str, worker.queues))
    return [*sorted(paused), *sorted(found.difference(paused))]
