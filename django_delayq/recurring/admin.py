"""The pages of schedules in Django's admin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from django import forms
from django.conf import settings
from django.contrib import admin, messages
from django.contrib.admin.utils import quote
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import ImproperlyConfigured
from django.db import router
from django.db.models import Case, OuterRef, QuerySet, Subquery, Value, When
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import NoReverseMatch, reverse
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext, ngettext_lazy

from .. import signals
from ..core import actors
from ..core.bounds import LENGTHS
from ..core.durations import brief
from ..core.exceptions import InvalidMessage
from ..core.outcomes import storable
from ..core.states import State
from ..core.verbs import VERBS
from ..models import Message
from ..project import console_conf
from ..project.console_pages import ConsolePages
from ..project.message_options import OnConflict
from ..record import reads
from ..record.sql.moves import writing
from . import definition as definitions
from . import runs, schedules
from .models import Schedule
from .schedule_tuning import tuning
from .services import why_nothing
from .times import shown

if TYPE_CHECKING:
    _ModelForm = forms.ModelForm[Schedule]
else:
    _ModelForm = forms.ModelForm

CHANGE = "admin:delayq_recurring_schedule_change"
# The number of next times that the page of a schedule shows.
TIMES_SHOWN = 10


class AsWritten(str):
    """A text that somebody wrote into a field, to be shown again to the letter."""


class PayloadField(forms.JSONField):
    """A payload as JSON. A text that Python cannot read is a mistake too, and a mistake is shown as it was written."""

    widget = forms.Textarea(attrs={"class": "vLargeTextField", "rows": 5})

    def to_python(self, value: Any) -> Any:
        try:
            return super().to_python(value)
        except (ValueError, RecursionError) as error:
            # It is nested too deep, or has a number of too many digits.
            raise forms.ValidationError(self.error_messages["invalid"], code="invalid") from error

    def bound_data(self, data: Any, initial: Any) -> Any:
        return AsWritten(data or "")

    def prepare_value(self, value: Any) -> Any:
        return value if isinstance(value, AsWritten) else super().prepare_value(value)


class SchedulePauseForm(forms.Form):
    """How long a schedule is paused, and why."""

    SPANS: ClassVar = {
        "": gettext_lazy("until somebody resumes it"),
        "hour": gettext_lazy("for an hour"),
        "day": gettext_lazy("until tomorrow"),
        "date": gettext_lazy("until this time:"),
    }
    span = forms.ChoiceField(label=gettext_lazy("Pause"), choices=SPANS, required=False, widget=forms.RadioSelect)
    until = forms.DateTimeField(
        label=gettext_lazy("Time"), required=False, widget=forms.DateTimeInput({"type": "datetime-local"})
    )
    reason = forms.CharField(label=gettext_lazy("Reason"), required=False, max_length=LENGTHS.text)

    def clean(self) -> dict[str, Any]:
        """Make the end of the pause one time, or None."""
        cleaned, now = super().clean() or self.cleaned_data, timezone.localtime()
        span = cleaned.get("span")
        if span != "date":
            tomorrow = (now + timedelta(days=1)).replace(hour=0, minute=0, second=0, microsecond=0)
            cleaned["until"] = tomorrow if span == "day" else None
        elif (cleaned.get("until") or now) <= now:
            self.add_error("until", _("Give a time that is to come."))
        cleaned["duration"] = "1h" if span == "hour" else None
        return cleaned


class Refused(Exception):
    """A schedule could not be written. The text says why."""


class ScheduleForm(_ModelForm):
    """The definition of a schedule. It reports the mistakes for which ``create_schedule`` raises."""

    class Meta:
        model = Schedule
        fields: ClassVar = [
            *("name", "topic", "payload", "cron", "every", "time_zone", "starts_at", "ends_at"),
            *("missed", "expires", "queue", "priority"),
        ]
        field_classes: ClassVar = {"payload": PayloadField}
        help_texts: ClassVar = {
            "cron": gettext_lazy("For example 0 3 * * *: minute, hour, day, month, day of the week."),
            "every": gettext_lazy("In place of a cron expression: for example 10m or 2h."),
            "time_zone": gettext_lazy("Cron expressions are read in this time zone, such as Europe/Berlin."),
            "missed": gettext_lazy("What becomes of times at which no worker ran."),
            "expires": gettext_lazy("For example 10m: an occurrence does not start any more this long after its time."),
            "queue": gettext_lazy("Empty: the default queue of the topic."),
            "priority": gettext_lazy("Empty: the default priority of the topic."),
        }

    # The definition, once all fields are checked together; None until then.
    definition: definitions.Definition | None = None
    # Why the schedule could not be written a moment ago.
    refused = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Django writes one label for the two inputs of a moment, and it belongs to neither.
        for field in self.fields.values():
            if isinstance(field.widget, forms.MultiWidget):
                for part, name in zip(field.widget.widgets, (_("Date:"), _("Time:")), strict=True):
                    part.attrs["aria-label"] = f"{field.label}: {name}"

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or self.cleaned_data
        if self.errors:
            return cleaned
        given: dict[str, Any] = {field: cleaned[field] for field in ("topic", "payload", "priority", "missed")}
        for field in ("starts_at", "ends_at"):
            # The inputs show whole seconds, and one of the two hours when the clocks are set back.
            given[field] = cleaned[field] if field in self.changed_data else getattr(self.instance, field)
        texts: dict[str, Any] = {field: cleaned[field] or None for field in ("cron", "every", "queue", "expires")}
        try:
            if "name" in cleaned:
                definitions.name(cleaned["name"])
            self.definition = definitions.checked(**given, **texts, tz=cleaned["time_zone"])
        except (InvalidMessage, ImproperlyConfigured) as error:
            self.add_error(None, str(error))
        if self.refused:
            self.add_error(None, self.refused)
        return cleaned


@admin.register(Schedule)
class ScheduleAdmin(ConsolePages):
    """Lists schedules, and adds, changes, pauses, resumes, runs and deletes them.

    The definition of a schedule that the code declares cannot be changed here.
    """

    form = ScheduleForm
    list_display = ("name", "topic", "rule", "missed", "state", "next_time", "declared")
    list_filter = ("paused", "declared", "ended")
    search_fields = ("name", "topic")
    actions = ("pause", "resume", "skip", "run")
    readonly_fields = ("state", "next_times", "last_runs", "last_message", "declared_in_code", "created_at")
    console_list = "delayq_recurring/schedules.html"

    # --- as pages of the console, where the site has it ---------------------------------------------------------------

    def get_ordering(self, request: HttpRequest) -> tuple[str, ...]:
        return ("rank", "last_at", "name") if self.host else ()

    def shown_in_console(self, request: HttpRequest, cl: ChangeList, frame: dict[str, Any]) -> dict[str, Any]:
        """Return the list with the last runs, late schedules first."""
        choices = dict(self.get_action_choices(request, []))
        names = dict.fromkeys([*_STEPS, *choices])
        return {
            "rows": [*self._rows(list(cl.result_list), frame["spark"])],
            "steps": [(name, _STEPS.get(name, choices[name])) for name in names if name in choices],
        }

    def _rows(self, found: list[Schedule], spark: Callable[..., SafeString]) -> Iterator[SimpleNamespace]:
        """Yield what the list shows of each schedule."""
        past = runs.of_each(_using(), found, vars(found[0])["now"]) if found else {}
        for schedule in found:
            messages, took = past.get(schedule.pk, ([], None))
            spans = [ran for message in reversed(messages) if (ran := runs.took(message)) is not None]
            last = messages[0] if messages else None
            yield SimpleNamespace(
                schedule=schedule,
                url=reverse(CHANGE, args=[quote(schedule.pk)], current_app=self.admin_site.name),
                rule=self.rule(schedule),
                state=self.state(schedule),
                paused=_is_paused(schedule),
                missed=vars(schedule)["rank"] == 0,
                next=self.next_time(schedule),
                last=last,
                took="" if took is None else brief(took.total_seconds()),
                spark=spark(spans, "critical" if last and last.state == State.DEAD else ""),
            )

    # --- who may do what ----------------------------------------------------------------------------------------------

    def has_change_permission(self, request: HttpRequest, obj: Schedule | None = None) -> bool:
        return super().has_change_permission(request, obj) and not (obj and obj.declared)

    def has_delete_permission(self, request: HttpRequest, obj: Schedule | None = None) -> bool:
        return super().has_delete_permission(request, obj) and not (obj and obj.declared)

    def has_pause_permission(self, request: HttpRequest) -> bool:
        return self._may(request, "pause")

    def has_run_permission(self, request: HttpRequest) -> bool:
        return self._may(request, "run")

    def _may(self, request: HttpRequest, action: str) -> bool:
        allowed = request.user.has_perm(f"delayq_recurring.{action}_schedule") and self.has_view_permission(request)
        return allowed and not console_conf.get().READ_ONLY

    def lookup_allowed(self, lookup: str, value: Any, request: HttpRequest | None = None) -> bool:
        """Tell whether a lookup may be in the address of the list: one into the payload would reveal its values."""
        return lookup.partition("__")[0] in self.list_filter

    # --- what is shown ------------------------------------------------------------------------------------------------

    def get_queryset(self, request: HttpRequest) -> QuerySet[Schedule]:
        # The clock of this host may differ from that by which messages are made.
        now = Value(reads.now(_using()), Schedule._meta.get_field("last_at"))
        last_state = Subquery(Message.objects.filter(pk=OuterRef("message_id")).values("state"))
        rows = Schedule.objects.using(_using()).annotate(now=now, last_state=last_state)
        # Late schedules come first, then paused ones; those that have ended come last.
        late = When(schedules.behind(now.value, now.value - tuning.late), then=0)
        return rows.annotate(rank=Case(late, When(ended=True, then=3), When(paused=True, then=1), default=2))

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Schedule | None:
        """Find the schedule of an address, which may have characters that PostgreSQL does not take."""
        return super().get_object(request, storable(object_id), from_field)

    def get_fields(self, request: HttpRequest, obj: Schedule | None = None) -> Any:
        shown = list(ScheduleForm.Meta.fields)
        may_see = self.has_change_permission(request, obj) or request.user.has_perm(VERBS["reveal"].permission)
        if obj is not None and not may_see:
            shown.remove("payload")
        return shown if obj is None else [*shown, *self.readonly_fields]

    def get_fieldsets(self, request: HttpRequest, obj: Schedule | None = None) -> Any:
        fields = self.get_fields(request, obj)
        if obj is None or self.host is None:
            return [(None, {"fields": fields})]
        first = ("state", "next_times", "last_runs")
        rest = [field for field in fields if field not in first]
        return [(None, {"fields": first}), (_("Definition"), {"fields": rest})]

    def get_readonly_fields(self, request: HttpRequest, obj: Schedule | None = None) -> tuple[str, ...]:
        return self.readonly_fields if obj is None else ("name", *self.readonly_fields)

    def get_form(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        form: Any = super().get_form(request, *args, **kwargs)
        form.refused = vars(request).get("refused", "")
        return form

    def get_changeform_initial_data(self, request: HttpRequest) -> dict[str, Any]:
        return {"time_zone": settings.TIME_ZONE, **super().get_changeform_initial_data(request)}

    @admin.display(description=gettext_lazy("times"))
    def rule(self, schedule: Schedule) -> str:
        if schedule.cron:
            return schedule.rule
        return _("every %(interval)s") % {"interval": schedule.every}

    @admin.display(description=gettext_lazy("state"))
    def state(self, schedule: Schedule) -> str:
        if _is_paused(schedule):
            at = schedule.resumes_at
            return _("paused until %(time)s") % {"time": _moment(schedule, at)} if at else _("paused")
        return _("ended") if schedule.ended else _("active")

    @admin.display(description=gettext_lazy("next time"))
    def next_time(self, schedule: Schedule) -> str:
        if _is_paused(schedule) and schedule.resumes_at is None:
            return "–"
        return next(iter(_times(schedule, 1)), "–")

    @admin.display(description=gettext_lazy("next times"))
    def next_times(self, schedule: Schedule) -> SafeString | str:
        times = _times(schedule, TIMES_SHOWN)
        if (at := _skipped(schedule)) is not None:
            times = [_("%(time)s: skipped") % {"time": _moment(schedule, at)}, *times]
        return format_html_join("", "{}<br>", ((text,) for text in times)) or "–"

    @admin.display(description=gettext_lazy("last message"))
    def last_message(self, schedule: Schedule) -> SafeString | str:
        return "–" if schedule.message_id is None else self._link(schedule.message_id)

    def _link(self, message_id: int) -> SafeString | str:
        try:
            url = reverse("admin:delayq_message_change", args=[message_id], current_app=self.admin_site.name)
        except NoReverseMatch:
            return f"#{message_id}"
        return format_html('<a href="{}">#{}</a>', url, message_id)

    @admin.display(description=gettext_lazy("last runs"))
    def last_runs(self, schedule: Schedule) -> SafeString | str:
        """The last runs as a table, with the numbers of times between them that have no message."""
        found = runs.last_runs(_using(), schedule, vars(schedule)["now"])
        if not found:
            return "–"
        lines = format_html_join("", "{}{}", ((_without(run), self._row(schedule, run)) for run in found))
        heads = (_("at"), _("outcome"), _("began"), _("duration"), _("message"))
        head = format_html_join("", '<th scope="col">{}</th>', ((text,) for text in heads))
        return format_html(
            '<table class="dq-table dq-rows"><thead><tr>{}</tr></thead><tbody>{}</tbody></table>', head, lines
        )

    def _row(self, schedule: Schedule, run: runs.PastRun) -> SafeString:
        """Return a past run as a row of a table."""
        message = run.message
        began = _moment(schedule, run.began_at) if run.began_at else "–"
        took = brief(run.took.total_seconds()) if run.took is not None else "–"
        badge = '<span class="dq-badge dq-state-{}">{}</span>'
        outcome = format_html(badge, message.state, message.get_state_display())
        cells = (_moment(schedule, run.at), outcome, began, took, self._link(message.pk))
        return format_html("<tr>{}</tr>", format_html_join("", "<td>{}</td>", ((cell,) for cell in cells)))

    @admin.display(description=gettext_lazy("declared in code"))
    def declared_in_code(self, schedule: Schedule) -> str:
        if not schedule.declared:
            return _("no")
        return _declared()

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        """Show the page of a schedule, with a button for each action of the list that the user may do to it."""
        schedule, context["has_frame"] = context.get("original"), True
        if schedule is not None:
            labels = _STEPS | ({"pause": _("Change the pause…")} if _is_paused(schedule) else {"resume": ""})
            allowed = self.get_actions(request)
            context["steps"] = [(action, label) for action, label in labels.items() if action in allowed and label]
        return super().render_change_form(request, context, *args, **kwargs)

    # --- what is done -------------------------------------------------------------------------------------------------

    def changeform_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        try:
            return super().changeform_view(request, *args, **kwargs)
        except Refused as error:
            # The transaction was rolled back. The form is shown again with this mistake.
            vars(request)["refused"] = str(error)
            return super().changeform_view(request, *args, **kwargs)

    def save_model(self, request: HttpRequest, obj: Schedule, form: Any, change: bool) -> None:
        if change and not form.has_changed():
            return
        given = {"definition": form.definition, "on_conflict": OnConflict.REPLACE if change else OnConflict.ERROR}
        try:
            self._do(request, "change" if change else "create", obj.pk, schedules.save, **given)
        except Exception as error:
            raise Refused(why_nothing(obj.pk, error)) from error

    def delete_model(self, request: HttpRequest, obj: Schedule) -> None:
        self._do(request, "delete", obj.pk, schedules.delete_schedule)

    def get_deleted_objects(
        self, objs: Any, request: HttpRequest
    ) -> tuple[list[Any], dict[str, int], set[str], list[Any]]:
        """Say of each declared schedule why it is not deleted: Django would name a permission that nobody can have."""
        declared = [schedule for schedule in objs if schedule.declared]
        others = [schedule for schedule in objs if not schedule.declared]
        deleted, counts, needed, protected = super().get_deleted_objects(others, request)
        told = [_("Schedule %(name)s: %(error)s") % {"name": row.pk, "error": _declared()} for row in declared]
        return deleted, counts, needed, [*protected, *told]

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[Schedule]) -> None:
        for schedule in queryset:
            self.delete_model(request, schedule)

    @admin.action(description=gettext_lazy("Pause selected schedules"), permissions=["pause"])
    def pause(self, request: HttpRequest, queryset: QuerySet[Schedule]) -> HttpResponse | None:
        form = SchedulePauseForm(request.POST if "confirmed" in request.POST else None)
        if not form.is_valid():
            return self._question(request, queryset, "pause", _("Pause these schedules?"), form)
        given = {name: form.cleaned_data[name] for name in ("reason", "until", "duration")}
        return self._do_all(request, "pause", queryset, schedules.pause_schedule, **given)

    @admin.action(description=gettext_lazy("Resume selected schedules"), permissions=["pause"])
    def resume(self, request: HttpRequest, queryset: QuerySet[Schedule]) -> HttpResponse | None:
        return self._do_all(request, "resume", queryset, schedules.resume_schedule)

    @admin.action(description=gettext_lazy("Skip the next run of selected schedules"), permissions=["pause"])
    def skip(self, request: HttpRequest, queryset: QuerySet[Schedule]) -> HttpResponse | None:
        if "confirmed" not in request.POST:
            return self._question(request, queryset, "skip", _("Skip the next run of these schedules?"))
        return self._do_all(request, "skip", queryset, schedules.skip_next)

    @admin.action(description=gettext_lazy("Run selected schedules now"), permissions=["run"])
    def run(self, request: HttpRequest, queryset: QuerySet[Schedule]) -> HttpResponse | None:
        if "confirmed" not in request.POST:
            return self._question(request, queryset, "run", _("Run these schedules now?"))
        return self._do_all(request, "run", queryset, schedules.run_schedule)

    def _question(
        self, request: HttpRequest, rows: Iterable[Schedule], action: str, title: str, form: Any = None
    ) -> HttpResponse:
        """Ask for a confirmation before an action; the answer is the same POST with the field ``confirmed``."""
        request.current_app = self.admin_site.name
        context = {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "title": title,
            "has_frame": True,
            "action": action,
            "form": form,
            "schedules": [(row.pk, self.next_time(row)) for row in rows],
        }
        return TemplateResponse(request, "delayq_recurring/confirm.html", context)

    def _do_all(
        self, request: HttpRequest, verb: str, rows: Iterable[Schedule], act: Callable[..., Any], **given: Any
    ) -> HttpResponse | None:
        """Act on each of these schedules. Tell the user how many were changed, and why the others were not."""
        done = 0
        for name in [schedule.pk for schedule in rows]:
            try:
                done += bool(self._do(request, verb, name, act, **given))
            except Exception as error:  # noqa: BLE001
                text = _("Schedule %(name)s: %(error)s") % {"name": name, "error": why_nothing(name, error)}
                self.message_user(request, text, messages.ERROR)
        self.message_user(request, _DONE[verb] % {"count": done}, messages.SUCCESS if done else messages.WARNING)
        # The list is shown again.
        return None

    @staticmethod
    def _do(request: HttpRequest, verb: str, name: str, act: Callable[..., Any], reason: str = "", **given: Any) -> Any:
        """Act in the name of the user, and tell receivers such as the audit, in one transaction."""
        using = _using()
        with actors.acting_as(actors.of_user(request.user.get_username())), writing(using):
            done = act(name=name, using=using, **given)
            if done:
                made = done.pk if isinstance(done, Message) else None
                signals.emit_action(Message, using, f"{verb} schedule", name, message_id=made, reason=reason)
        return done


_STEPS = {
    "run": gettext_lazy("Run now…"),
    "skip": gettext_lazy("Skip the next run…"),
    "pause": gettext_lazy("Pause…"),
    "resume": gettext_lazy("Resume"),
}
_DONE = {
    "pause": ngettext_lazy("%(count)d schedule is paused.", "%(count)d schedules are paused.", "count"),
    "resume": ngettext_lazy("%(count)d schedule is resumed.", "%(count)d schedules are resumed.", "count"),
    "skip": ngettext_lazy("%(count)d run is skipped.", "%(count)d runs are skipped.", "count"),
    "run": ngettext_lazy("%(count)d message is due now.", "%(count)d messages are due now.", "count"),
}


def _declared() -> str:
    return _("The code declares it: change or delete it by its @recurring there. Here it can be paused.")


def _without(run: runs.PastRun) -> SafeString | str:
    """Return a line of the table for the times after a run that have no message, if there are any."""
    if not run.without:
        return ""
    count = f"{run.without}+" if run.without >= tuning.times_counted else run.without
    text = ngettext(
        "%(count)s time without a message: missed, skipped, paused, or purged since",
        "%(count)s times without a message: missed, skipped, paused, or purged since",
        run.without,
    )
    return format_html('<tr><td colspan="5" class="quiet">{}</td></tr>', text % {"count": count})


def _moment(schedule: Schedule, at: datetime) -> str:
    try:
        return shown(at, schedule.time_zone)
    except InvalidMessage:
        return shown(at, "UTC")


def _is_paused(schedule: Schedule) -> bool:
    return schedule.is_paused(vars(schedule)["now"])


def _skipped(schedule: Schedule) -> datetime | None:
    """Return the next time if its message was cancelled, so that it does not run; None otherwise."""
    read = vars(schedule)
    return schedule.last_at if read["last_state"] == State.CANCELLED and schedule.last_at > read["now"] else None


def _times(schedule: Schedule, count: int) -> list[str]:
    """Return the next times as the clocks of the schedule's time zone show them, those after a skip or a pause."""
    after = _skipped(schedule) or vars(schedule)["now"]
    if _is_paused(schedule) and schedule.resumes_at is not None:
        after = max(after, schedule.resumes_at - timedelta.resolution)
    try:
        return [shown(at, schedule.time_zone) for at in schedule.next_times(count, after=after)]
    except (InvalidMessage, ImproperlyConfigured) as error:
        return [str(error)]


def _using() -> str:
    return router.db_for_write(Message)
