"""The list of messages, and the page of one."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.contrib.admin.utils import flatten_fieldsets
from django.contrib.admin.views.main import ChangeList
from django.db.models import QuerySet
from django.db.models.expressions import Combinable
from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from django.utils.html import format_html
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from .. import transitions
from ..models import Message
from . import filters, payload, search, story
from .filters import DueFilter, StateFilter
from .readonly import ReadOnly
from .steering import Steering

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Message]
else:
    _ModelAdmin = admin.ModelAdmin


class MessageList(ChangeList):
    """Rows without their wide columns, always in the order that the filters imply."""

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> QuerySet[Message]:
        rows: QuerySet[Message] = super().get_queryset(request, exclude_parameters)
        return rows.defer("payload", "headers", "retry")

    def get_ordering(self, request: HttpRequest, queryset: QuerySet[Message]) -> list[str | Combinable]:
        return list(self.model_admin.get_ordering(request))


class MessageAdmin(ReadOnly, Steering, _ModelAdmin):
    """Everything can be read; what changes a message goes through ``Steering``."""

    list_display = ("ident", "state", "topic", "queue", "key", "due_second", "when", "attempts")
    list_filter = (StateFilter, DueFilter)
    # Only for the box to be there: see get_search_results.
    search_fields = ("=id",)
    search_help_text = search.HELP
    fieldsets = (
        (None, {"fields": ("topic", "queue", "key", "state", "priority")}),
        (_("Times"), {"fields": ("due", "expires", "created", "finished")}),
        (_("Deliveries"), {"fields": ("attempts", "max_attempts", "deliveries", "crashed", "worker", "leased")}),
        (_("Content"), {"fields": ("pretty_payload", "pretty_headers", "pretty_retry")}),
    )
    readonly_fields = flatten_fieldsets(fieldsets)
    change_form_template = "admin/django_delayq/message/change_form.html"

    # --- the list -----------------------------------------------------------------------------------------------------

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return MessageList

    def get_ordering(self, request: HttpRequest) -> tuple[str | Combinable, ...]:
        return filters.ordering(request)

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        # Any other lookup would read the whole table; one into the payload would tell what is masked.
        return lookup in (StateFilter.parameter_name, DueFilter.parameter_name)

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Message], search_term: str
    ) -> tuple[QuerySet[Message], bool]:
        found = search.parse(search_term)
        if found is None:
            return queryset, False
        condition = found.condition()
        return (queryset.none() if condition is None else queryset.filter(condition)), False

    @admin.display(description=_("id"))
    def ident(self, message: Message) -> str:
        return f"#{message.pk}"

    @admin.display(description=_("due"))
    def due_second(self, message: Message) -> str:
        return format_html('<span class="nowrap">{}</span>', story.moment(message.due_at, "seconds"))

    @admin.display(description=_("when"))
    def when(self, message: Message) -> str:
        return story.when(message, timezone.now())

    # --- one message --------------------------------------------------------------------------------------------------

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        message: Message = context["original"]
        now = transitions.now(message._state.db or "default")
        moves = story.log(message)
        context |= {
            "title": _("Message"),
            "why": story.why(message, moves[-1] if moves else None, now),
            "timeline": story.timeline(moves),
            "earlier": max(0, message.moves - len(moves)),
            "zone": timezone.get_current_timezone_name(),
            "verbs": self.offered(request, message),
        }
        return super().render_change_form(request, context, *args, **kwargs)

    @admin.display(description=_("due"))
    def due(self, message: Message) -> str:
        return story.moment(message.due_at)

    @admin.display(description=_("expires"))
    def expires(self, message: Message) -> str:
        return self._moment(message.expires_at)

    @admin.display(description=_("created"))
    def created(self, message: Message) -> str:
        return story.moment(message.created_at)

    @admin.display(description=_("finished"))
    def finished(self, message: Message) -> str:
        return self._moment(message.finished_at)

    @admin.display(description=_("leased until"))
    def leased(self, message: Message) -> str:
        return self._moment(message.leased_until)

    @admin.display(description=_("ended without a word"))
    def crashed(self, message: Message) -> int:
        return message.crashes

    @admin.display(description=_("payload"))
    def pretty_payload(self, message: Message) -> str:
        return format_html("<pre>{}</pre>", payload.pretty(message.payload))

    @admin.display(description=_("headers"))
    def pretty_headers(self, message: Message) -> str:
        return format_html("<pre>{}</pre>", payload.pretty(message.headers))

    @admin.display(description=_("retry policy"))
    def pretty_retry(self, message: Message) -> str:
        if message.retry is None:
            return gettext("the handler's")
        return format_html("<pre>{}</pre>", payload.pretty(message.retry))

    def _moment(self, at: datetime | None) -> str:
        return self.get_empty_value_display() if at is None else story.moment(at)
