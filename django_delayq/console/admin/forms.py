"""The forms of the confirmation pages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from django import forms
from django.db import router
from django.utils import timezone
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from ...api.actions import ToCome
from ...core.bounds import PRIORITIES
from ...core.durations import seconds
from ...core.exceptions import InvalidMessage
from ...inspector import worker_list
from ...models import Message
from ...project import validation
from . import payload
from .explanation import moment


class DelayField(forms.CharField):
    """A length of time such as "15m", or None when the field is empty. With ``signed`` it may be negative: "-15m"."""

    def __init__(self, *, signed: bool = False, **kwargs: Any) -> None:
        self.signed = signed
        widget = forms.TextInput(attrs={"size": "12"})
        super().__init__(required=False, max_length=40, widget=widget, **kwargs)

    def clean(self, value: Any) -> timedelta | None:
        text = str(super().clean(value) or "").strip()
        if not text:
            return None
        back = self.signed and text.startswith("-")
        plain = text[1:].strip() if self.signed and text[0] in "+-" else text
        try:
            seconds(plain)
        except ValueError as error:
            problem = gettext("“%(text)s” is not a duration. Write for example 90s, 15m, 1h30m or 7d.")
            raise forms.ValidationError(problem % {"text": text}) from error
        try:
            span = validation.delay(plain)
        except InvalidMessage as error:
            raise forms.ValidationError(gettext("This is longer than 100 years.")) from error
        return -span if back else span


class MomentField(forms.DateTimeField):
    """A moment in the current time zone that a message may be due at, or None when the field is empty."""

    def __init__(self, **kwargs: Any) -> None:
        attributes = {"type": "datetime-local", "step": "1", "class": "vTextField"}
        widget = forms.DateTimeInput(attrs=attributes, format="%Y-%m-%dT%H:%M:%S")
        super().__init__(required=False, widget=widget, **kwargs)

    def clean(self, value: Any) -> datetime | None:
        given: datetime | None = super().clean(value)
        if given is None:
            return None
        try:
            return validation.due(given)
        except InvalidMessage as error:
            is_past = given < timezone.now()
            problem = gettext("This is in the past.") if is_past else gettext("This is more than 100 years ahead.")
            raise forms.ValidationError(problem) from error


class ReasonField(forms.CharField):
    """The reason for an action."""

    def __init__(self, help_text: Any) -> None:
        widget = forms.TextInput(attrs={"class": "vTextField"})
        super().__init__(label=_("Reason"), max_length=500, required=False, help_text=help_text, widget=widget)


class PauseForm(forms.Form):
    """The reason and the length or end of a pause."""

    duration = DelayField(label=_("For"), help_text=_("For example 30m or 2h."))
    until = MomentField(label=_("Or until"))
    reason = ReasonField(_("Shown with the queue and written to the audit."))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        zone = timezone.get_current_timezone_name()
        text = gettext("In the time zone %(zone)s. If both are empty, it lasts until somebody ends it.")
        self.fields["until"].help_text = text % {"zone": zone}

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or self.cleaned_data
        if cleaned.get("duration") is not None and cleaned.get("until") is not None:
            raise forms.ValidationError(gettext("Give a length of time or an end, not both."))
        return cleaned


class PayloadForm(forms.Form):
    """The payload of a message that is repeated. A mask in it stands for the value that it hides."""

    payload = forms.CharField(label=_("Payload"), widget=forms.Textarea(attrs={"rows": "12", "spellcheck": "false"}))

    def __init__(self, data: Any, old: Any, *, masked: bool = True) -> None:
        super().__init__(data, initial={"payload": payload.pretty(old, masked=masked)})
        self._old = old

    def clean_payload(self) -> Any:
        try:
            return payload.unmasked(json.loads(self.cleaned_data["payload"]), self._old)
        except LookupError as error:
            problem = gettext("A mask stands for the value at its own place only. Write the value there.")
            raise forms.ValidationError(problem) from error
        except (ValueError, RecursionError) as error:
            raise forms.ValidationError(gettext("This is not JSON: %(error)s") % {"error": error}) from error


class ReasonForm(forms.Form):
    """The reason of an action. It is required for more than one message; many messages need their number typed too."""

    reason = ReasonField(_("Written to the log of each message and to the audit."))
    typed = forms.CharField(
        label=_("Type it to confirm"),
        max_length=40,
        widget=forms.TextInput(attrs={"size": "12", "autocomplete": "off"}),
    )

    def __init__(
        self, data: Any, *, many: bool, number: int = 0, to_come: ToCome | None = None, typed: str = ""
    ) -> None:
        """Make the form for ``number`` messages; ``many``: more than one.

        ``to_come`` are those whose due time is still to come, None when the form is only read. ``typed``: what to type
        to confirm, if anything.
        """
        super().__init__(data)
        self.many = many
        self.number = number
        self.to_come = to_come
        self.expected = typed
        self.fields["reason"].required = many
        if typed:
            self.fields["typed"].label = gettext("Type %(text)s to confirm") % {"text": typed}
        else:
            del self.fields["typed"]

    def clean_typed(self) -> str:
        typed: str = self.cleaned_data["typed"]
        if _plain(typed) != _plain(self.expected):
            raise forms.ValidationError(gettext("This is not %(text)s.") % {"text": self.expected})
        return typed

    def arguments(self, now: datetime) -> dict[str, Any]:
        """Return the arguments of the action as an operation keeps them; times are absolute, and count from ``now``."""
        return {}


def _plain(text: str) -> str:
    """Return the text without the separators and signs that people need not type."""
    return re.sub(r"[\W_]", "", text).casefold()


class SpreadForm(ReasonForm):
    """A time to spread many messages over, so that they are not all due in the same second."""

    spread = DelayField(
        label=_("Spread over"),
        help_text=_("For example 10m: the messages fall due one by one in that time. Empty: all at once."),
    )
    field_order: Iterable[str] | None = ("spread", "reason", "typed")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.many:
            del self.fields["spread"]
        elif self.number > 1000:
            self.fields["spread"].initial = f"{self.number // 1000}m"

    def clean_spread(self) -> timedelta | None:
        spread: timedelta | None = self.cleaned_data["spread"]
        if spread is not None and not spread:
            raise forms.ValidationError(gettext("Give a longer time; without one the messages fall due all at once."))
        return spread

    def arguments(self, now: datetime) -> dict[str, Any]:
        spread = self.cleaned_data.get("spread")
        return {"spread": spread.total_seconds()} if spread else {}


class MoveForm(ReasonForm):
    """The queue and the priority of messages from now on. The queue is one that something knows."""

    queue = forms.ChoiceField(label=_("Queue"), required=False)
    priority = forms.IntegerField(
        label=_("Priority"),
        required=False,
        min_value=PRIORITIES[0],
        max_value=PRIORITIES[1],
        help_text=_("From -100 to 100; the greater one goes first. Empty: as it is."),
    )
    field_order = ("queue", "priority", "reason", "typed")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        names = sorted(worker_list.known_queues(router.db_for_write(Message)))
        self.fields["queue"].choices = [("", gettext("as it is")), *((name, name) for name in names)]  # type: ignore[attr-defined]

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or self.cleaned_data
        if not self.errors and not cleaned.get("queue") and cleaned.get("priority") is None:
            raise forms.ValidationError(_("Give a queue, a priority, or both."))
        return cleaned

    def arguments(self, now: datetime) -> dict[str, Any]:
        given = {name: self.cleaned_data[name] for name in ("queue", "priority")}
        return {name: value for name, value in given.items() if value not in ("", None)}


class RequeueForm(SpreadForm):
    """The time at which requeued messages are due: their own due time while that is still to come, or now."""

    when = forms.ChoiceField(label=_("Due"), required=False, widget=forms.RadioSelect)
    field_order = ("when", "spread", "reason", "typed")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        later = ToCome() if self.to_come is None else self.to_come
        self.fields["when"].choices = [("keep", self._kept(later)), ("now", self._all_now())]  # type: ignore[attr-defined]
        self.fields["when"].initial = "keep"
        if self.to_come is not None and not later.number:
            del self.fields["when"]
        if self.many:
            self.fields["spread"].help_text = gettext(
                "For example 10m: the messages that would be due at once fall due one by one in that time."
            )
            overdue = self.number - later.number
            self.fields["spread"].initial = f"{overdue // 1000}m" if overdue > 1000 else None

    def _kept(self, later: ToCome) -> str:
        """Return in words how many messages keep their due times and how many are due at once."""
        if later.first is None or later.last is None:
            return gettext("at their own due times, at once where these are over")
        text = ngettext(
            "%(count)s at its own due time (%(first)s)",
            "%(count)s at their own due times (%(first)s to %(last)s)",
            later.number,
        )
        first, last = (moment(at, "seconds") for at in (later.first, later.last))
        kept = text % {"count": f"{later.number:,}", "first": first, "last": last}
        others = self.number - later.number
        return gettext("%(kept)s, %(others)s at once") % {"kept": kept, "others": f"{others:,}"} if others else kept

    def _all_now(self) -> str:
        text = ngettext("%(count)s at once", "all %(count)s at once", self.number)
        return text % {"count": f"{self.number:,}"}

    def arguments(self, now: datetime) -> dict[str, Any]:
        return {**super().arguments(now), **({"now": True} if self.cleaned_data.get("when") == "now" else {})}


class RescheduleForm(SpreadForm):
    """A new due time, a delay from now, or a shift from the due time that each message has."""

    due = MomentField(label=_("New due time"))
    delay = DelayField(label=_("Or a delay from now"), help_text=_("For example 90s, 15m, 1h30m or 7d."))
    shift = DelayField(
        label=_("Or later by"),
        help_text=_("From the due time of each message, for example 2h, or -30m for earlier; never before now."),
        signed=True,
    )
    field_order = ("due", "delay", "shift", "spread", "reason", "typed")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["due"].help_text = _("In the time zone %(zone)s.") % {"zone": timezone.get_current_timezone_name()}
        if self.many:
            self.fields["spread"].initial = None

    def clean_due(self) -> Any:
        due = self.cleaned_data["due"]
        # A time within the last minute counts as now.
        return None if due is None else max(due, timezone.now())

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or self.cleaned_data
        if not self.errors and sum(cleaned.get(name) is not None for name in ("due", "delay", "shift")) != 1:
            raise forms.ValidationError(_("Give exactly one of the three: a new due time, a delay, or how much later."))
        return cleaned

    def arguments(self, now: datetime) -> dict[str, Any]:
        given = super().arguments(now)
        if self.cleaned_data["shift"] is not None:
            return {**given, "shift": self.cleaned_data["shift"].total_seconds()}
        due = self.cleaned_data["due"] or now + self.cleaned_data["delay"]
        return {**given, "due": due.isoformat()}
