"""From a selection, by way of a confirmation page, to the client functions: the only thing here that changes rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin, messages
from django.core.exceptions import BadRequest, PermissionDenied
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from .. import actors
from ..models import Message
from ..transitions import Verdict
from . import verbs
from .forms import ReasonForm
from .paginator import CAP
from .verbs import VERBS, Verb

if TYPE_CHECKING:
    _Base = admin.ModelAdmin[Message]
else:
    _Base = object

# Messages that the confirmation page names one by one.
_SHOWN = 10


class Steering(_Base):
    """Mix in before ``ModelAdmin``: the actions, and the page that confirms them."""

    actions = ("cancel_selected", "reschedule_selected", "run_selected", "requeue_selected")

    @admin.action(permissions=["cancel"], description=gettext_lazy("Cancel selected messages…"))
    def cancel_selected(self, request: HttpRequest, queryset: QuerySet[Message]) -> HttpResponse | None:
        return self._ask_for_selection(request, queryset, verbs.CANCEL)

    @admin.action(permissions=["reschedule"], description=gettext_lazy("Reschedule selected messages…"))
    def reschedule_selected(self, request: HttpRequest, queryset: QuerySet[Message]) -> HttpResponse | None:
        return self._ask_for_selection(request, queryset, verbs.RESCHEDULE)

    @admin.action(permissions=["run"], description=gettext_lazy("Run selected messages now…"))
    def run_selected(self, request: HttpRequest, queryset: QuerySet[Message]) -> HttpResponse | None:
        return self._ask_for_selection(request, queryset, verbs.RUN)

    @admin.action(permissions=["requeue"], description=gettext_lazy("Requeue selected messages…"))
    def requeue_selected(self, request: HttpRequest, queryset: QuerySet[Message]) -> HttpResponse | None:
        return self._ask_for_selection(request, queryset, verbs.REQUEUE)

    def has_cancel_permission(self, request: HttpRequest) -> bool:
        return verbs.CANCEL.allowed(request)

    def has_reschedule_permission(self, request: HttpRequest) -> bool:
        return verbs.RESCHEDULE.allowed(request)

    def has_run_permission(self, request: HttpRequest) -> bool:
        return verbs.RUN.allowed(request)

    def has_requeue_permission(self, request: HttpRequest) -> bool:
        return verbs.REQUEUE.allowed(request)

    def may(self, request: HttpRequest, verb: Verb) -> bool:
        """Whether the user may do this, by the same hooks that decide which actions the list offers."""
        allowed: bool = getattr(self, f"has_{verb.name}_permission")(request)
        return allowed and self.has_view_permission(request)

    def offered(self, request: HttpRequest, message: Message) -> list[Verb]:
        """The verbs that do something to this message and that the user may use."""
        return [verb for verb in VERBS.values() if message.state in verb.effects and self.may(request, verb)]

    def get_urls(self) -> list[URLPattern]:
        name = f"{self.opts.app_label}_{self.opts.model_name}_steer"
        view = self.admin_site.admin_view(self.steer_view)
        return [path("steer/<slug:name>/", view, name=name), *super().get_urls()]

    def steer_view(self, request: HttpRequest, name: str) -> HttpResponse:
        """POST ``ids`` to be asked, and once more with ``confirmed`` to have it done."""
        verb = VERBS.get(name)
        if verb is None:
            raise Http404
        if not self.may(request, verb):
            raise PermissionDenied
        if request.method != "POST":
            return HttpResponseRedirect(self._url("changelist"))
        ids = _ids(request.POST.get("ids", ""))
        filters = request.POST.get("filters")
        if "confirmed" not in request.POST:
            return self._ask(request, verb, ids, filters, verb.form())
        form = verb.form(request.POST)
        if not form.is_valid():
            return self._ask(request, verb, ids, filters, form)
        return self._do(request, verb, ids, filters, form.cleaned_data)

    def _ask_for_selection(self, request: HttpRequest, queryset: QuerySet[Message], verb: Verb) -> HttpResponse | None:
        ids = list(queryset.values_list("pk", flat=True)[: CAP + 1])
        if len(ids) > CAP:
            text = _("More than %(cap)s messages are selected: nothing was done. Narrow the selection.")
            self.message_user(request, text % {"cap": f"{CAP:,}"}, messages.ERROR)
            return None
        if not ids:
            self.message_user(request, _("No message is selected."), messages.WARNING)
            return None
        return self._ask(request, verb, sorted(ids), request.GET.urlencode(), verb.form())

    def _ask(
        self, request: HttpRequest, verb: Verb, ids: list[int], filters: str | None, form: ReasonForm
    ) -> HttpResponse:
        rows = list(self._chosen(request, ids).order_by("pk").values_list("pk", "topic", "state"))
        forecast = verbs.forecast(verb, (state for _pk, _topic, state in rows))
        context = {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "title": verb.question,
            "verb": verb,
            "form": form,
            "media": self.media + form.media,
            "ids": ",".join(map(str, ids)),
            "filters": filters,
            "forecast": forecast,
            "changes": any(part.changes for part in forecast),
            "missing": len(ids) - len(rows),
            "shown": rows[:_SHOWN],
            "more": max(0, len(rows) - _SHOWN),
            "back": self._back(ids, filters),
        }
        # What reverses URLs in the template.
        request.current_app = self.admin_site.name
        return TemplateResponse(request, "admin/django_delayq/message/confirm.html", context)

    def _do(
        self, request: HttpRequest, verb: Verb, ids: list[int], filters: str | None, given: dict[str, Any]
    ) -> HttpResponse:
        with actors.acting_as(f"user:{request.user.get_username()}"):
            verdicts = verb.run(self._chosen(request, ids), given)
        verdicts[Verdict.NOT_FOUND] += len(ids) - verdicts.total()
        level = messages.SUCCESS if verbs.is_all_done(verdicts) else messages.WARNING
        text = ngettext("%(verb)s, %(count)d message: ", "%(verb)s, %(count)d messages: ", len(ids))
        start = text % {"verb": verb.label, "count": len(ids)}
        self.message_user(request, f"{start}{verbs.outcome(verdicts)}.", level)
        return HttpResponseRedirect(self._back(ids, filters))

    def _chosen(self, request: HttpRequest, ids: list[int]) -> QuerySet[Message]:
        return self.get_queryset(request).filter(pk__in=ids)

    def _back(self, ids: list[int], filters: str | None) -> str:
        """The list as it was, or the page of the message that it began on."""
        if filters is None and len(ids) == 1:
            return self._url("change", ids[0])
        query = QueryDict(filters or "").urlencode()
        return self._url("changelist") + (f"?{query}" if query else "")

    def _url(self, page: str, *args: object) -> str:
        name = f"{self.admin_site.name}:{self.opts.app_label}_{self.opts.model_name}_{page}"
        return reverse(name, args=args, current_app=self.admin_site.name)


def _ids(text: str) -> list[int]:
    """Numbers with commas between them; each once."""
    parts = text.split(",")
    if len(parts) > CAP or not all(part.isascii() and part.isdigit() and len(part) <= 18 for part in parts):
        raise BadRequest("ids")
    return sorted({int(part) for part in parts})
