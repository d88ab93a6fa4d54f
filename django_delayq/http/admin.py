"""The pages of tokens in Django's admin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any, ClassVar
from urllib.parse import urlencode

from django import forms
from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.core.validators import MaxValueValidator, MinValueValidator, RegexValidator
from django.db.models import Count, F, Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import NoReverseMatch, reverse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext, pgettext

from ..core import actors
from ..core.durations import brief
from ..project import conf, http_conf, pulled, registry
from ..project.console_pages import ConsolePages
from ..project.validation import FARTHEST
from . import jobs, tokens, views
from .exchange import NAME
from .models import Token

# A token that expires within this time is marked: its program needs a new one. The texts say so too.
SOON = timedelta(days=7)
# A token that was not used for this time is marked: nobody may need it. The texts say so too.
IDLE = timedelta(days=90)
# A token that has expired and was used within this time is missed by a program.
MISSED = timedelta(days=1)
# The lives that the form of a new token offers (days), and the one that is chosen until somebody chooses another.
LIVES, USUAL_LIFE = (7, 30, 90, 365), 90
# Where ``delayq_http`` listens by default: for a project whose addresses have no door.
BY_ITSELF = "http://127.0.0.1:7777/"
# What is changed once a token is made.
_LIMIT = ("reads", "writes", "interval")
_NEW = ("namespace", "description", "rights", "lasts", "expires_at", *_LIMIT)


def _lives() -> Iterator[tuple[str, str]]:
    """Yield the choices of how long a token lasts."""
    for days in LIVES:
        day = timezone.localdate() + timedelta(days=days)
        yield str(days), _("in %(days)d days, on %(day)s") % {"days": days, "day": day.isoformat()}
    yield "never", pgettext("expires", "never")


class TokenForm(forms.ModelForm):  # type: ignore[type-arg]
    """A new token, or the limits of one."""

    required_css_class = "required"
    rights = forms.MultipleChoiceField(
        label=gettext_lazy("Rights"),
        choices=[
            ("publish", gettext_lazy("publish: put jobs into queues")),
            ("consume", gettext_lazy("consume: take jobs, acknowledge them, look at them")),
            ("manage", gettext_lazy("manage: empty queues, respawn and delete dead jobs, see metrics")),
        ],
        # Who also manages says so.
        initial=["publish", "consume"],
        widget=forms.CheckboxSelectMultiple,
    )
    lasts = forms.ChoiceField(label=gettext_lazy("Expires"), choices=_lives, initial=str(USUAL_LIFE))
    expires_at = forms.DateTimeField(
        label=gettext_lazy("Or at"),
        required=False,
        widget=forms.DateTimeInput({"type": "datetime-local"}),
    )

    class Meta:
        model = Token
        fields: ClassVar = ["namespace", "description", "rights", "expires_at", *_LIMIT]
        help_texts: ClassVar = {
            "namespace": gettext_lazy(
                "The token is for the queues whose names begin with it: those of shop are shop.orders and the like."
            ),
            "description": gettext_lazy("Which program uses it, and who looks after that program."),
            "reads": gettext_lazy("The most calls that take jobs in an interval. Empty: any number."),
            "writes": gettext_lazy("The most calls that publish jobs in an interval. Empty: any number."),
            "interval": gettext_lazy("Empty: a second. Without Redis each process counts for itself."),
        }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, field in self.fields.items():
            if name in _LIMIT:
                field.validators += [MinValueValidator(1), MaxValueValidator(tokens.MOST_CALLS)]
            elif name == "namespace":
                field.validators.append(RegexValidator(rf"^{NAME.pattern}\Z"))
            elif name == "expires_at":
                zone = timezone.get_current_timezone_name()
                field.help_text = _("In the time zone %(zone)s. Empty: as chosen above.") % {"zone": zone}
            field.required = name in ("namespace", "rights", "lasts")

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

    def clean(self) -> None:
        """Let a token last as long as was chosen, unless a time is given."""
        lasts = self.cleaned_data.get("lasts", "never")
        if lasts != "never" and not self.cleaned_data.get("expires_at"):
            self.cleaned_data["expires_at"] = timezone.now() + timedelta(days=int(lasts))


class StateFilter(admin.SimpleListFilter):
    """Finds the tokens that are good, those that end, and those that nobody may need."""

    title = gettext_lazy("State")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(name, label) for name, (label, _where) in _states().items()]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Token]) -> QuerySet[Token]:
        _label, where = _states().get(self.value() or "", ("", Q()))
        return queryset.filter(where)


def _states() -> dict[str, tuple[str, Q]]:
    """Return the choices of the filter, with their texts and conditions."""
    now = timezone.now()
    is_over, is_idle = Q(expires_at__lte=now), Q(used_at__lte=now - IDLE)
    return {
        "live": (_("valid"), ~is_over),
        "soon": (_("expires within a week"), Q(expires_at__lte=now + SOON) & ~is_over),
        "expired": (_("expired"), is_over),
        "missed": (_("expired but in use"), is_over & Q(used_at__gt=F("expires_at"), used_at__gte=now - MISSED)),
        "unused": (_("never used"), Q(used_at=None)),
        "idle": (_("unused for 90 days"), is_idle | Q(used_at=None, created_at__lte=now - IDLE)),
    }


@admin.register(Token)
class TokenAdmin(ConsolePages):
    """Lists and makes tokens, changes their limits, and revokes them. A token is shown once, when it is made."""

    form = TokenForm
    list_display = (
        *("beginning", "namespace", "rights", "expires_at", "used", "reads", "writes", "interval", "description"),
        "created_at",
    )
    list_filter = (StateFilter,)
    show_facets = admin.ShowFacets.ALWAYS
    search_fields = ("namespace", "beginning", "description")
    search_help_text = gettext_lazy("Namespace, beginning or description")
    add_form_template = change_form_template = "delayq_http/form.html"
    delete_confirmation_template = delete_selected_confirmation_template = "delayq_http/revoke.html"
    console_list = "delayq_http/tokens.html"

    def get_ordering(self, request: HttpRequest) -> Any:
        return (F("expires_at").asc(nulls_last=True), "namespace", "id")

    @admin.display(description=gettext_lazy("last used"), ordering=F("used_at").asc(nulls_first=True))
    def used(self, token: Token) -> str:
        return _used(token, timezone.now())

    def shown_in_console(self, request: HttpRequest, cl: ChangeList, frame: dict[str, Any]) -> dict[str, Any]:
        """Return the tokens with who made them, by default those that expire first."""
        found = list(cl.result_list)
        may_change, may_delete = self.has_change_permission(request), self.has_delete_permission(request)
        return {
            "rows": _rows(found, frame["audited"]),
            "verdict": _verdict(self.get_queryset(request)),
            "may_change": may_change,
            "may_delete": may_delete,
            "may_act": may_change or may_delete,
            "alone": not conf.get().REDIS and any(token.limits for token in found),
        }

    def get_fields(self, request: HttpRequest, obj: Token | None = None) -> Any:
        return _NEW if obj is None else _LIMIT

    def get_readonly_fields(self, request: HttpRequest, obj: Token | None = None) -> tuple[str, ...]:
        """Return the fields that the form has by itself, if it shall not have them."""
        return () if obj is None else ("rights", "lasts", "expires_at")

    def get_changeform_initial_data(self, request: HttpRequest) -> dict[str, Any]:
        """Return what the address gives, such as that of another token."""
        given: dict[str, Any] = super().get_changeform_initial_data(request)
        return given | {"rights": given["rights"].split(",")} if "rights" in given else given

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        token = context.get("original")
        own = _of_one(token, context.get("audited")) if token else {"title": _("Make a token"), "has_frame": True}
        return super().render_change_form(request, context | own, *args, **kwargs)

    def render_delete_form(self, request: HttpRequest, context: dict[str, Any]) -> HttpResponse:
        own = _of_one(context["object"], context.get("audited")) | {"title": _("Revoke this token?")}
        return super().render_delete_form(request, context | own)

    def response_action(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse | None:
        response = super().response_action(request, *args, **kwargs)
        shown = (response.context_data or {}) if isinstance(response, TemplateResponse) else {}
        if "queryset" in shown:
            shown |= {"has_frame": True, "title": _("Revoke these tokens?"), "rows": _rows(shown["queryset"])}
        return response

    def save_model(self, request: HttpRequest, obj: Token, form: Any, change: bool) -> None:
        with _acting(request):
            if change:
                tokens.limit(obj, obj.reads, obj.writes, obj.interval)
            else:
                vars(obj)["text"] = tokens.issue(obj)

    def response_add(self, request: HttpRequest, obj: Token, post_url_continue: str | None = None) -> HttpResponse:
        """Show the new token. No cookie, no session and no address gets it."""
        shown = {"opts": self.opts, **_of_one(obj), "text": vars(obj)["text"]}
        queue = _queue(obj)
        shown |= {"curl": _curl(request, obj, shown["text"], queue), "queue": queue}
        return TemplateResponse(request, "delayq_http/made.html", self.admin_site.each_context(request) | shown)

    def delete_model(self, request: HttpRequest, obj: Token) -> None:
        with _acting(request):
            tokens.delete(obj)

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[Token]) -> None:
        for token in queryset:
            self.delete_model(request, token)


def _verdict(found: QuerySet[Token]) -> SimpleNamespace | None:
    """Return the sentence at the top of the list, and the button for what wants attention first."""
    states = _states()
    have: dict[str, int] = found.aggregate(
        every=Count("pk"), **{name: Count("pk", filter=where) for name, (_label, where) in states.items()}
    )
    if not have["every"]:
        return None
    wanting = {
        "missed": ("dq-critical", _("See what expired")),
        "soon": ("dq-warn", _("See what ends")),
        "idle": ("dq-info", _("See the unused")),
    }
    first = next((name for name in wanting if have[name]), "")
    kind, label = wanting.get(first, ("dq-ok", ""))
    text = ngettext("%(count)d token works.", "%(count)d tokens work.", have["live"]) % {"count": have["live"]}
    told = ", ".join(f"{have[name]} {states[name][0]}" for name in (*wanting, "unused") if have[name])
    return SimpleNamespace(kind=kind, text=f"{text} {told}", label=label, url=first and f"?state={first}")


def _queue(token: Token) -> str:
    """Return a queue for the first call with a token; "" if no setting and no handler names one of its namespace."""
    start = f"{token.namespace}{jobs.SEPARATOR}"
    # The last is for namespaces whose queues are declared by their beginning.
    named = [*pulled.names(), *http_conf.get().TOPICS, *registry.handlers(), f"{start}test"]
    works: Callable[[str], object] = jobs.has_receiver if token.may("publish") else pulled.terms
    of_namespace = (queue.removeprefix(start) for queue in named if queue.startswith(start) and works(queue))
    return next(filter(NAME.fullmatch, of_namespace), "")


def _curl(request: HttpRequest, token: Token, text: str, queue: str) -> str:
    """Return a command that makes a call with a token."""
    path, rest = f"api/{token.namespace}/{queue or 'QUEUE'}", ""
    if token.may("publish"):
        rest = """ -X PUT -d '{"hello": "world"}'"""
    elif not token.may("consume"):
        path = "info"
    try:
        url = request.build_absolute_uri(reverse(views.door, kwargs={"path": path}))
    except NoReverseMatch:
        url = BY_ITSELF + path
    query = f"?namespace={token.namespace}" if path == "info" else ""
    return f'curl -H "X-Token: {text}" "{url}{query}"{rest}'


def _rows(found: Iterable[Token], audited: Any = None) -> list[SimpleNamespace]:
    """Return what the pages show of tokens. ``audited`` of the console's frame tells who made them."""
    now, names = timezone.now(), [str(token) for token in found]
    made_by = audited("token add", names) if audited else {}
    return [_row(token, now, made_by.get(name, "")) for token, name in zip(found, names, strict=True)]


def _row(token: Token, now: datetime, made_by: str) -> SimpleNamespace:
    at, kind, state = token.expires_at, "ok", _("valid")
    if at is not None and at <= now:
        kind, state = "dead", _("expired")
    elif at is not None and at <= now + SOON:
        kind, state = "warn", _("expires in %(span)s") % {"span": brief((at - now).total_seconds())}
    return SimpleNamespace(
        token=token,
        kind=kind,
        state=state,
        used=_used(token, now),
        is_idle=(token.used_at or token.created_at) <= now - IDLE,
        made_by=made_by,
        alike=urlencode({name: getattr(token, name) or "" for name in ("namespace", "description", "rights", *_LIMIT)}),
    )


def _of_one(token: Token, audited: Any = None) -> dict[str, Any]:
    """Return what a page of one token shows."""
    title = _("Token %(beginning)s…") % {"beginning": token.beginning}
    return {"title": title, "row": _rows([token], audited)[0], "has_frame": True}


def _used(token: Token, now: datetime) -> str:
    """Return in words when a token was last used, which is written every few minutes."""
    if token.used_at is None:
        return _("never used")
    ago = now - token.used_at
    if ago < tokens.USE_WRITTEN_EVERY:
        return _("just now")
    return _("%(span)s ago") % {"span": brief(ago.total_seconds() // 60 * 60)}


def _acting(request: HttpRequest) -> Any:
    return actors.acting_as(actors.of_user(request.user.get_username()))
