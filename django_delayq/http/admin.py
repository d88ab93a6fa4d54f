"""The pages of tokens in Django's admin."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any, ClassVar

from django import forms
from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.core.validators import MaxValueValidator, MinValueValidator, RegexValidator
from django.db import transaction
from django.db.models import F, QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..core import actors
from ..project import conf
from ..project.console_pages import ConsolePages
from ..project.validation import FARTHEST
from . import tokens
from .models import Token

# A token that expires within this time is marked: its program needs a new one.
SOON = timedelta(days=14)
# What is not changed once a token is made.
_FIXED = ("namespace", "rights", "expires_at", "description")


class TokenForm(forms.ModelForm):  # type: ignore[type-arg]
    """A new token, or the limits of one."""

    rights = forms.MultipleChoiceField(
        label=gettext_lazy("Rights"),
        choices=[
            ("publish", gettext_lazy("publish: put jobs into queues")),
            ("consume", gettext_lazy("consume: take jobs, acknowledge them, look at them")),
            ("manage", gettext_lazy("manage: empty queues, respawn and delete dead jobs, see metrics")),
        ],
        initial=tokens.RIGHTS,
        widget=forms.CheckboxSelectMultiple,
    )
    expires_at = forms.DateTimeField(
        label=gettext_lazy("Expires at"),
        required=False,
        help_text=gettext_lazy("Empty: never."),
        widget=forms.DateTimeInput({"type": "datetime-local"}),
    )

    class Meta:
        model = Token
        fields: ClassVar = ["namespace", "rights", "expires_at", "description", "reads", "writes", "interval"]
        help_texts: ClassVar = {
            "reads": gettext_lazy("The most calls that take jobs in an interval. Empty: any number."),
            "writes": gettext_lazy("The most calls that publish jobs in an interval. Empty: any number."),
            "interval": gettext_lazy("Empty: a second. Without Redis each process counts for itself."),
        }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, field in self.fields.items():
            if name in ("reads", "writes", "interval"):
                field.validators += [MinValueValidator(1), MaxValueValidator(tokens.MOST_CALLS)]
            elif name == "namespace":
                field.validators.append(RegexValidator(r"^[-_A-Za-z0-9]+\Z"))
            field.required = name in ("namespace", "rights")

    def clean_rights(self) -> str:
        return ",".join(self.cleaned_data["rights"])

    def clean_expires_at(self) -> datetime | None:
        at: datetime | None = self.cleaned_data["expires_at"]
        if at is not None and at <= timezone.now():
            raise forms.ValidationError(_("Give a time that is to come."))
        if at is not None and at > timezone.now() + FARTHEST:
            raise forms.ValidationError(_("This is more than 100 years ahead."))
        return at

    def clean_interval(self) -> int:
        return self.cleaned_data["interval"] or 1


@admin.register(Token)
class TokenAdmin(ConsolePages):
    """Lists and makes tokens, changes their limits, and revokes them. A token is shown once, when it is made."""

    form = TokenForm
    list_display = ("beginning", "namespace", "rights", "expires_at", "reads", "writes", "interval", "description")
    search_fields = ("namespace", "beginning", "description")
    delete_confirmation_template = "delayq_http/revoke.html"
    console_list = "delayq_http/tokens.html"

    def get_ordering(self, request: HttpRequest) -> Any:
        return (F("expires_at").asc(nulls_last=True), "namespace", "id")

    def shown_in_console(self, request: HttpRequest, cl: ChangeList, frame: dict[str, Any]) -> dict[str, Any]:
        """Return the tokens with who made them, those that expire first."""
        found = list(cl.result_list)
        made_by = frame["audited"]("token add", [str(token) for token in found])
        may_change, may_delete = self.has_change_permission(request), self.has_delete_permission(request)
        return {
            "rows": [*_rows(found, made_by)],
            "may_change": may_change,
            "may_delete": may_delete,
            "may_act": may_change or may_delete,
            "alone": not conf.get().REDIS and any(token.limits for token in found),
        }

    def get_fieldsets(self, request: HttpRequest, obj: Token | None = None) -> Any:
        limits = (_("Limit"), {"fields": ("reads", "writes", "interval")})
        return [(None, {"fields": _FIXED}), limits] if obj is None else [limits]

    def get_readonly_fields(self, request: HttpRequest, obj: Token | None = None) -> tuple[str, ...]:
        return () if obj is None else _FIXED

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        title = _("Change the limit of a token") if context.get("original") else _("Make a token")
        return super().render_change_form(request, context | {"has_frame": True, "title": title}, *args, **kwargs)

    def delete_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> HttpResponse:
        own = {"has_frame": True, "title": _("Revoke this token?")}
        return super().delete_view(request, object_id, (extra_context or {}) | own)

    def save_model(self, request: HttpRequest, obj: Token, form: Any, change: bool) -> None:
        with _acting(request):
            if change:
                tokens.limit(obj, obj.reads, obj.writes, obj.interval)
            else:
                vars(obj)["text"] = tokens.issue(obj)

    def response_add(self, request: HttpRequest, obj: Token, post_url_continue: str | None = None) -> HttpResponse:
        """Show the new token. No cookie, no session and no address gets it."""
        shown = {"opts": self.opts, "title": str(obj), "token": obj, "text": vars(obj)["text"], "has_frame": True}
        return TemplateResponse(request, "delayq_http/made.html", self.admin_site.each_context(request) | shown)

    def delete_model(self, request: HttpRequest, obj: Token) -> None:
        with _acting(request), transaction.atomic(using=obj._state.db):
            tokens.delete(obj)

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[Token]) -> None:
        for token in queryset:
            self.delete_model(request, token)


def _rows(found: list[Token], made_by: dict[str, str]) -> Iterator[SimpleNamespace]:
    now = timezone.now()
    for token in found:
        at = token.expires_at
        expiry = "" if at is None or at > now + SOON else "warn" if at > now else "dead"
        yield SimpleNamespace(token=token, expiry=expiry, made_by=made_by.get(str(token), ""))


def _acting(request: HttpRequest) -> Any:
    return actors.acting_as(actors.of_user(request.user.get_username()))
