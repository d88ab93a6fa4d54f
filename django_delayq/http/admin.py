"""The page of tokens in Django's admin."""

from __future__ import annotations

from typing import Any, ClassVar

from django import forms
from django.contrib import admin
from django.core.validators import MaxValueValidator, MinValueValidator, RegexValidator
from django.db import transaction
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.translation import gettext_lazy

from ..core import actors
from ..project import console_conf
from . import tokens
from .models import Token


class TokenForm(forms.ModelForm):  # type: ignore[type-arg]
    """A new token, or the limits of one."""

    rights = forms.MultipleChoiceField(
        label=gettext_lazy("Rights"),
        choices=[(right, right) for right in tokens.RIGHTS],
        initial=tokens.RIGHTS,
        widget=forms.CheckboxSelectMultiple,
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

    def clean_interval(self) -> int:
        return self.cleaned_data["interval"] or 1


@admin.register(Token)
class TokenAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """Lists and makes tokens, changes their limits, and deletes them. A token is shown once, when it is made."""

    form = TokenForm
    list_display = ("beginning", "namespace", "rights", "expires_at", "reads", "writes", "interval", "description")
    search_fields = ("namespace", "beginning")
    view_on_site = False

    def has_add_permission(self, request: HttpRequest) -> bool:
        return super().has_add_permission(request) and not console_conf.get().READ_ONLY

    def has_change_permission(self, request: HttpRequest, obj: Token | None = None) -> bool:
        return super().has_change_permission(request, obj) and not console_conf.get().READ_ONLY

    def has_delete_permission(self, request: HttpRequest, obj: Token | None = None) -> bool:
        return super().has_delete_permission(request, obj) and not console_conf.get().READ_ONLY

    def get_readonly_fields(self, request: HttpRequest, obj: Token | None = None) -> tuple[str, ...]:
        return () if obj is None else ("namespace", "rights", "expires_at", "description")

    def save_model(self, request: HttpRequest, obj: Token, form: Any, change: bool) -> None:
        with _acting(request):
            if change:
                tokens.limit(obj, obj.reads, obj.writes, obj.interval)
            else:
                vars(obj)["text"] = tokens.issue(obj)

    def response_add(self, request: HttpRequest, obj: Token, post_url_continue: str | None = None) -> HttpResponse:
        """Show the new token. No cookie, no session and no address gets it."""
        shown = {"opts": self.opts, "title": str(obj), "text": vars(obj)["text"]}
        return TemplateResponse(request, "delayq_http/made.html", self.admin_site.each_context(request) | shown)

    def delete_model(self, request: HttpRequest, obj: Token) -> None:
        with _acting(request), transaction.atomic(using=obj._state.db):
            tokens.delete(obj)

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[Token]) -> None:
        for token in queryset:
            self.delete_model(request, token)


def _acting(request: HttpRequest) -> Any:
    return actors.acting_as(actors.of_user(request.user.get_username()))
