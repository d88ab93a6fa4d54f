"""From a selection or a search, by way of a confirmation page, to what is done: the only thing here that changes rows.

A few messages are done at once; many, and all that a search finds, become an operation that a worker does.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from django.contrib import admin, messages
from django.contrib.admin.views.main import SEARCH_VAR
from django.core import signing
from django.core.exceptions import BadRequest, PermissionDenied
from django.db import IntegrityError, OperationalError, router
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ... import actors
from ...models import Message
from ...sql.moves import writing
from .. import audit, operations
from ..models import AuditEvent, DeadLetter, Operation
from ..operations import BulkAction, Scope
from ..statements import TooSlow, statement_timeout
from . import action_table, page, search_box
from .action_table import VERBS, Verb
from .forms import ReasonForm
from .paginator import CAP
from .preview import describe, expected, has_changed, preview

if TYPE_CHECKING:
    _Base = admin.ModelAdmin[Message]
else:
    _Base = object

# More than so many messages are work for a worker, and for people with the permission for it.
AT_ONCE = 200
# How long a confirmation page holds good, in seconds.
VALID = 600
# How long a statement on a few messages may wait for others that hold them. Milliseconds.
PATIENCE = 10_000

logger = logging.getLogger("django_delayq")

_SALT = "django_delayq.steer"
_SELECT_ACROSS = "select_across"


@dataclass(frozen=True, slots=True)
class Question:
    """What the token of a confirmation page holds: what was asked, of whom, and how many it were then."""

    verb: str
    user: str
    scope: Scope
    number: int | None
    # One question has one answer, however often it is sent.
    nonce: str = field(default_factory=lambda: secrets.token_urlsafe(12))

    def sign(self) -> str:
        """As a token."""
        value: dict[str, Any] = {"verb": self.verb, "user": self.user, "scope": self.scope.to_json()}
        value |= {"number": self.number, "nonce": self.nonce}
        return signing.dumps(value, salt=_SALT, compress=True)

    @classmethod
    def read(cls, token: str, max_age: int | None = None) -> Question:
        """Raises ``signing.BadSignature``, and ``SignatureExpired`` of those."""
        value = signing.loads(token, salt=_SALT, max_age=max_age)
        return cls(value["verb"], value["user"], Scope.from_json(value["scope"]), value["number"], value["nonce"])


class ActionPages(_Base):
    """Mix in before ``ModelAdmin``: the actions, and the page that confirms them."""

    actions = ("cancel_selected", "reschedule_selected", "run_selected", "requeue_selected", "purge_selected")

    @admin.action(permissions=["cancel"], description=gettext_lazy("Cancel selected messages…"))
    def cancel_selected(self, request: HttpRequest, queryset: QuerySet[Message]) -> HttpResponse | None:
        return self._ask_for_selection(request, queryset, action_table.CANCEL)

    @admin.action(permissions=["reschedule"], description=gettext_lazy("Reschedule selected messages…"))
    def reschedule_selected(self, request: HttpRequest, queryset: QuerySet[Message]) -> HttpResponse | None:
        return self._ask_for_selection(request, queryset, action_table.RESCHEDULE)

    @admin.action(permissions=["run"], description=gettext_lazy("Run selected messages now…"))
    def run_selected(self, request: HttpRequest, queryset: QuerySet[Message]) -> HttpResponse | None:
        return self._ask_for_selection(request, queryset, action_table.RUN)

    @admin.action(permissions=["requeue"], description=gettext_lazy("Requeue selected messages…"))
    def requeue_selected(self, request: HttpRequest, queryset: QuerySet[Message]) -> HttpResponse | None:
        return self._ask_for_selection(request, queryset, action_table.REQUEUE)

    @admin.action(permissions=["purge"], description=gettext_lazy("Purge selected messages…"))
    def purge_selected(self, request: HttpRequest, queryset: QuerySet[Message]) -> HttpResponse | None:
        return self._ask_for_selection(request, queryset, action_table.PURGE)

    def has_cancel_permission(self, request: HttpRequest) -> bool:
        return action_table.CANCEL.allowed(request)

    def has_reschedule_permission(self, request: HttpRequest) -> bool:
        return action_table.RESCHEDULE.allowed(request)

    def has_run_permission(self, request: HttpRequest) -> bool:
        return action_table.RUN.allowed(request)

    def has_requeue_permission(self, request: HttpRequest) -> bool:
        return action_table.REQUEUE.allowed(request)

    def has_purge_permission(self, request: HttpRequest) -> bool:
        return action_table.PURGE.allowed(request)

    def may(self, request: HttpRequest, verb: Verb) -> bool:
        """Whether the user may do this, by the same hooks that decide which actions the list offers."""
        allowed: bool = getattr(self, f"has_{verb.name}_permission")(request)
        return allowed and self.has_view_permission(request)

    def offered(self, request: HttpRequest, message: Message) -> list[Verb]:
        """The verbs that do something to this message and that the user may use."""
        return [verb for verb in VERBS.values() if message.state in verb.effects and self.may(request, verb)]

    def get_urls(self) -> list[URLPattern]:
        name = f"{self.opts.app_label}_{self.opts.model_name}_steer"
        view = self.admin_site.admin_view(self.action_view)
        return [path("steer/<slug:name>/", view, name=name), *super().get_urls()]

    def action_view(self, request: HttpRequest, name: str) -> HttpResponse:
        """POST ``ids`` or ``search`` to be asked, and the ``token`` of that question to have it done."""
        verb = VERBS.get(name)
        if verb is None:
            raise Http404
        if not self.may(request, verb):
            raise PermissionDenied
        if request.method != "POST":
            return HttpResponseRedirect(self._url("changelist"))
        if "token" in request.POST:
            return self._answer(request, verb)
        if "search" in request.POST:
            given = {SEARCH_VAR: request.POST["search"], search_box.TAB_VAR: "all"}
            return self._ask_for_search(request, verb, given)
        return self._ask(request, verb, Scope(ids=_ids(request.POST.get("ids", ""))))

    # --- the question -------------------------------------------------------------------------------------------------

    def _ask_for_selection(self, request: HttpRequest, queryset: QuerySet[Message], verb: Verb) -> HttpResponse | None:
        if request.POST.get(_SELECT_ACROSS) == "1":
            return self._ask_for_search(request, verb, request.GET)
        ids = list(queryset.order_by("pk").values_list("pk", flat=True)[: CAP + 1])
        if len(ids) > CAP:
            text = _("More than %(cap)s messages are selected: nothing was done. Narrow the selection.")
            self.message_user(request, text % {"cap": f"{CAP:,}"}, messages.ERROR)
            return None
        if not ids:
            self.message_user(request, _("No message is selected."), messages.WARNING)
            return None
        return self._ask(request, verb, Scope(ids=tuple(ids)))

    def _ask_for_search(self, request: HttpRequest, verb: Verb, given: Mapping[str, str]) -> HttpResponse:
        """For all that the list shows, on whatever page of it."""
        if not action_table.may_bulk(request):
            raise PermissionDenied
        try:
            scope = Scope.of_search(self._using, search_box.of(request, given, self._using).whole)
        except ValueError as error:
            self.message_user(request, str(error), messages.ERROR)
            return HttpResponseRedirect(self._back(request, Scope()))
        return self._ask(request, verb, scope)

    def _ask(
        self, request: HttpRequest, verb: Verb, scope: Scope, bound: ReasonForm | None = None, notice: str = ""
    ) -> HttpResponse:
        if len(scope.ids) > AT_ONCE and not action_table.may_bulk(request):
            raise PermissionDenied
        seen = preview(self._rows(request), verb, scope)
        number = None if seen.number is None else seen.number.count
        form = bound or self._form(verb, scope, number, seen.number is not None and seen.number.more)
        context = {
            **page.context(self, request, str(verb.question)),
            "verb": verb,
            "form": form,
            "token": Question(verb.name, str(request.user.pk), scope, number).sign(),
            "filters": _filters(request),
            "origin": request.POST.get("origin", ""),
            "preview": seen,
            "notice": notice,
            "in_batches": _is_work_for_a_worker(scope),
            "back": self._back(request, scope),
        }
        context["media"] += form.media
        return TemplateResponse(request, "delayq_console/message/confirm.html", context)

    def _form(self, verb: Verb, scope: Scope, number: int | None, more: bool = False, data: Any = None) -> ReasonForm:
        return verb.form(
            data,
            many=scope.search is not None or len(scope.ids) > 1,
            number=number or 0,
            typed=_to_type(verb, number, more),
        )

    # --- the answer ---------------------------------------------------------------------------------------------------

    def _answer(self, request: HttpRequest, verb: Verb) -> HttpResponse:
        token, is_old = request.POST["token"], False
        try:
            try:
                question = Question.read(token, VALID)
            except signing.SignatureExpired:
                question, is_old = Question.read(token), True
        except signing.BadSignature as error:
            raise BadRequest("token") from error
        if question.verb != verb.name or question.user != str(request.user.pk):
            raise BadRequest("token")
        scope = question.scope
        if scope.search is not None and not action_table.may_bulk(request):
            raise PermissionDenied
        if is_old:
            text = _("This question was asked some time ago. Look at it again.")
            return self._ask(request, verb, scope, notice=text)
        more = question.number == CAP
        form = self._form(verb, scope, question.number, more, request.POST)
        if not form.is_valid():
            return self._ask(request, verb, scope, bound=form)
        if scope.search is not None and has_changed(question.number, expected(self._rows(request), verb, scope)):
            return self._ask(request, verb, scope, notice=_("The number has changed meanwhile. Look at it again."))
        try:
            if _is_work_for_a_worker(scope):
                return self._start(request, verb, scope, form, question.nonce)
            return self._do(request, verb, scope, form, question.nonce)
        except IntegrityError:
            if not AuditEvent.objects.using(self._using).filter(nonce=question.nonce).exists():
                raise
            self.message_user(request, _("This was answered already: nothing more was done."), messages.WARNING)
            return HttpResponseRedirect(self._back(request, scope))

    def _start(self, request: HttpRequest, verb: Verb, scope: Scope, form: ReasonForm, nonce: str) -> HttpResponse:
        if not action_table.may_bulk(request):
            raise PermissionDenied
        described, reason = describe(scope), form.cleaned_data["reason"]
        with self._acting(request):
            operation = operations.start(
                self._using,
                verb.name,
                scope.to_json(),
                form.arguments(),
                described=described,
                reason=reason,
                started_by=actors.current(),
            )
            audit.record(
                self._using, verb.name, described, reason=reason, operation=operation, user=request.user, nonce=nonce
            )
        text = _("Operation #%(id)d is queued: a worker does it in batches.") % {"id": operation.pk}
        self.message_user(request, text, messages.SUCCESS)
        if not request.user.has_perm("delayq_console.view_operation"):
            return HttpResponseRedirect(self._back(request, scope))
        return HttpResponseRedirect(page.admin_url(self, Operation, "change", operation.pk))

    def _do(self, request: HttpRequest, verb: Verb, scope: Scope, form: ReasonForm, nonce: str) -> HttpResponse:
        visible = tuple(self._rows(request).filter(pk__in=scope.ids).order_by("pk").values_list("pk", flat=True))
        work = operations.WORKS[verb.name](Scope(ids=visible).to_json(), form.arguments())
        assert isinstance(work, BulkAction)
        reason = form.cleaned_data["reason"]
        try:
            with self._acting(request), statement_timeout(self._using, PATIENCE):
                counts = work.at_once(self._using, reason)
                counts["not found"] += len(scope.ids) - len(visible)
                audit.record(
                    self._using,
                    verb.name,
                    _named(scope),
                    message_id=scope.ids[0] if len(scope.ids) == 1 else None,
                    reason=reason,
                    outcomes=+counts,
                    user=request.user,
                    nonce=nonce,
                )
        except (TooSlow, OperationalError) as error:
            # Somebody holds a row for long, or two that wait for each other were told apart.
            logger.warning("%s by user:%s was rolled back: %r", verb.name, request.user.get_username(), error)
            text = _("The database did not get through with it: nothing was done. Try again in a moment.")
            self.message_user(request, text, messages.ERROR)
            return HttpResponseRedirect(self._back(request, scope))
        level = messages.SUCCESS if action_table.is_all_done(counts) else messages.WARNING
        text = ngettext(
            "%(verb)s, %(count)s message: %(outcome)s.", "%(verb)s, %(count)s messages: %(outcome)s.", len(scope.ids)
        )
        said = {
            "verb": verb.label,
            "count": action_table.number(len(scope.ids)),
            "outcome": action_table.outcome(counts),
        }
        self.message_user(request, text % said, level)
        return HttpResponseRedirect(self._back(request, scope, gone=bool(counts["purged"])))

    # --- what both need -----------------------------------------------------------------------------------------------

    @property
    def _using(self) -> str:
        return router.db_for_write(Message)

    @contextmanager
    def _acting(self, request: HttpRequest) -> Iterator[None]:
        """In the user's name, and all or nothing."""
        with actors.acting_as(f"user:{request.user.get_username()}"), writing(self._using):
            yield

    def _rows(self, request: HttpRequest) -> QuerySet[Message]:
        return self.get_queryset(request).using(self._using)

    def _back(self, request: HttpRequest, scope: Scope, *, gone: bool = False) -> str:
        """To where it began: another page, the list as it was, or the page of the message."""
        if request.POST.get("origin") == "deadletters":
            return page.admin_url(self, DeadLetter)
        filters = _filters(request)
        if filters is None and len(scope.ids) == 1 and not gone:
            return self._url("change", scope.ids[0])
        query = QueryDict(filters or "").urlencode()
        return self._url("changelist") + (f"?{query}" if query else "")

    def _url(self, page: str, *args: object) -> str:
        name = f"admin:{self.opts.app_label}_{self.opts.model_name}_{page}"
        return reverse(name, args=args, current_app=self.admin_site.name)


def _is_work_for_a_worker(scope: Scope) -> bool:
    return scope.search is not None or len(scope.ids) > AT_ONCE


def _to_type(verb: Verb, number: int | None, more: bool) -> str:
    """What has to be typed: nothing, the number, or the verb where nobody knows the number."""
    if number is None:
        return verb.name
    if number > AT_ONCE or verb.final:
        return f"{number:,}+" if more else f"{number:,}"
    return ""


def _filters(request: HttpRequest) -> str | None:
    """The filters of the list that it began on; None when it began elsewhere."""
    if "action" in request.POST:
        return request.GET.urlencode()
    return request.POST.get("filters")


def _named(scope: Scope) -> str:
    """The messages by their ids, for the audit."""
    ids = ", ".join(f"#{pk}" for pk in scope.ids[:50])
    return f"{describe(scope)}: {ids}{', …' if len(scope.ids) > 50 else ''}" if len(scope.ids) > 1 else describe(scope)


def _ids(text: str) -> tuple[int, ...]:
    """Numbers with commas between them; each once."""
    parts = text.split(",")
    if len(parts) > CAP or not all(part.isascii() and part.isdigit() and len(part) <= 18 for part in parts):
        raise BadRequest("ids")
    return tuple(sorted({int(part) for part in parts}))
