"""What the confirmation page asks for."""

from __future__ import annotations

from typing import Any

from django import forms
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from .. import validation
from ..exceptions import InvalidMessage


class ReasonForm(forms.Form):
    reason = forms.CharField(
        label=_("Reason"),
        max_length=500,
        required=False,
        help_text=_("Goes into the log of each message."),
        widget=forms.TextInput(attrs={"class": "vTextField"}),
    )


class RescheduleForm(ReasonForm):
    """A new due time, or a delay from now."""

    due = forms.DateTimeField(
        label=_("New due time"),
        required=False,
        widget=forms.DateTimeInput(attrs={"type": "datetime-local", "step": "1"}, format="%Y-%m-%dT%H:%M:%S"),
    )
    delay = forms.CharField(
        label=_("Or a delay from now"),
        required=False,
        max_length=40,
        help_text=_("For example 90s, 15m, 1h30m or 7d."),
        widget=forms.TextInput(attrs={"size": "12"}),
    )
    field_order = ("due", "delay", "reason")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        zone = timezone.get_current_timezone_name()
        self.fields["due"].help_text = _("In the time zone %(zone)s.") % {"zone": zone}

    def clean_due(self) -> Any:
        due = self.cleaned_data["due"]
        if due is None:
            return None
        try:
            # The last minute still means "now".
            return max(validation.due(due), timezone.now())
        except InvalidMessage as error:
            raise forms.ValidationError(str(error)) from error

    def clean_delay(self) -> Any:
        delay = self.cleaned_data["delay"]
        if not delay:
            return None
        try:
            return validation.delay(delay)
        except InvalidMessage as error:
            raise forms.ValidationError(str(error)) from error

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or self.cleaned_data
        if not self.errors and (cleaned.get("due") is None) == (cleaned.get("delay") is None):
            raise forms.ValidationError(_("Give a new due time or a delay: one of the two."))
        return cleaned
