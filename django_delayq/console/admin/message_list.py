"""The list of messages, whose rows are read along an index or not at all."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from types import SimpleNamespace
from typing import Any, Literal
from urllib.parse import urlencode

from django.contrib import admin
from django.contrib.admin.exceptions import DisallowedModelAdminLookup
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.views.main import ORDER_VAR, PAGE_VAR, SEARCH_VAR, ChangeList
from django.core.paginator import Paginator
from django.db.models import F, OuterRef, QuerySet, Subquery
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ...core import names
from ...core.states import FINAL, LIVE
from ...inspector import stats, worker_list
from ...inspector.numbers import Capped, total
from ...inspector.worker_list import list_workers
from ...models import Message, Queue
from ...record import reads
from ...record.sql import statements
from ..console_tuning import timeouts, tuning
from ..search import listing
from ..search.conditions import StoredSize, small
from ..search.language import Search
from ..search.listing import Listing
from ..search.texts import term_text
from ..statements import TooSlow, answering_within, in_time
from . import explanation, page, payload, search_box
from .export import ExportView
from .message_page import MessagePage
from .readonly import CappedCount


class MessageList(ChangeList):
    """One page of a search. ``asked`` is the search; ``too_slow`` is True when no index serves it in time."""

    # Attributes of Django's that its types do not declare so.
    filter_specs: list[Any]
    model_admin: Any

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> QuerySet[Message]:
        """Return all that the search finds, for actions; ``get_results`` reads the page itself."""
        unknown = set(self.get_filters_params()) - {search_box.TAB_VAR, search_box.LONGER_VAR}
        if unknown:
            # Another lookup would read the whole table, and one into the payload would reveal masked values.
            raise DisallowedModelAdminLookup(f"Filtering by {', '.join(sorted(unknown))} not allowed")
        self.asked = search_box.read_search(request, self.params, self.root_queryset.db)
        self.filter_specs = []
        self.has_filters = False
        states = self.asked.whole.states
        self.buttons = self.model_admin.buttons(request, states)
        unused = {"due"} if states <= FINAL else {"ended"} if states <= LIVE else set[str]()
        if not self.buttons:
            unused.add("action_checkbox")
        self.list_display = [name for name in self.list_display if name not in unused]
        if not states <= FINAL:
            # Messages that have not ended have no such time.
            self.sortable_by = [name for name in self.sortable_by or () if name != "ended"]
        self.order = self._chosen_order() or self.asked.whole.order
        found: QuerySet[Message] = self.root_queryset.filter(self.asked.whole.condition())
        return found.order_by(*self.order)

    def _chosen_order(self) -> tuple[str, ...]:
        """Return the order by the column that the reader has chosen; empty when there is none."""
        given = re.match(r"(-?)(\d{1,2})(?!\d)", self.params.get(ORDER_VAR, ""))
        names = {number: name for number, name in enumerate(self.list_display) if name in (self.sortable_by or ())}
        if given is None or (name := names.get(int(given[2]))) is None or not (field := self.get_ordering_field(name)):
            return ()
        return tuple(dict.fromkeys((f"{given[1]}{field}", f"{given[1]}id")))

    def get_ordering_field_columns(self) -> dict[int, Literal["asc", "desc"]]:
        """Return the number of the column that sorts the list, and the direction: no list is sorted by several."""
        field = self.order[0].removeprefix("-")
        places = (place for place, name in enumerate(self.list_display) if self.get_ordering_field(name) == field)
        return dict.fromkeys(places, "asc" if field == self.order[0] else "desc")

    def get_results(self, request: HttpRequest) -> None:
        # True when the search is slow: the page then does not refresh itself.
        self.slow = self.params.get(search_box.LONGER_VAR) == "1"
        # The times after which the search is ended, and one that may take longer, in words.
        most = timeouts.long if self.slow else timeouts.rows
        self.limit, self.longer_limit = (f"{each / 1000:g} s" for each in (most, timeouts.long))
        # The query string of the same search with more time; empty when it had that already.
        self.longer_query = "" if self.slow else self.get_query_string({search_box.LONGER_VAR: "1"})
        with answering_within(2 * most):
            self._read(most)

    def _read(self, most: int) -> None:
        """Read the page and what stands beside it. ``most``: the time limit of the search, in milliseconds."""
        if not 1 <= self.page_num <= max(1, tuning.counted // self.list_per_page):
            self.page_num = 1
        rows: QuerySet[Message] = self.root_queryset
        found, offset = Listing(rows, self.asked.whole, self.order), (self.page_num - 1) * self.list_per_page
        self.too_slow = False
        ids = self._ids(found, offset, most)
        if not ids and self.page_num > 1:
            # The page is empty, since messages no longer match the search. Django would drop the search and the action
            # on it.
            self.page_num, offset = 1, 0
            ids = self._ids(found, offset, most)
        # For a search without results: searches for a topic, queue or limit with a similar name, with their query
        # strings.
        self.near = [] if ids else in_time(rows.db, timeouts.rows, _near, rows.db, self.asked.box) or []
        now = reads.now(rows.db)
        self.counts = listing.counts(rows, self.asked.box, now)
        self.result_list = _rows(rows, ids[: self.list_per_page])
        limited = stats.waits_for(rows.db, self.result_list, now)
        for message in self.result_list:
            # The list shows them.
            message.read_at, pause = now, vars(message)["pause"]
            message.standing = explanation.standing(message, now, limited.get(message.pk), pause)
        self.result_count = self._count(found, offset, len(ids))
        reached, most = self.result_count, tuning.nearest_rows
        # How many messages are sorted, in words; empty for all.
        self.sorted_among = ""
        if found.is_sorted_apart and (reached > most or isinstance(reached, CappedCount)):
            reached, self.sorted_among = min(reached, most), f"{most:,}"
        self.paginator = Paginator(range(reached), self.list_per_page)
        self.multi_page = reached > self.list_per_page
        self.show_admin_actions = bool(ids and self.buttons)

    def _ids(self, found: Listing, offset: int, milliseconds: int) -> list[int]:
        """Return the ids of a page and one more; if the search is too slow, those that can be found quickly."""
        most = self.list_per_page + 1
        try:
            return found.ids(most, offset, milliseconds=milliseconds)
        except TooSlow:
            self.too_slow = self.slow = True
        self.knows_nearest = True
        try:
            return found.nearest(most, offset)
        except TooSlow:
            self.knows_nearest = False
            return []

    def _count(self, found: Listing, offset: int, page: int) -> int:
        """Return the number of rows in all; ``page`` is the number found on this page, up to one more than it shows."""
        if page <= self.list_per_page and not self.too_slow and not found.is_sorted_apart:
            return offset + page
        if self.too_slow:
            return CappedCount(offset + page)
        counted = self.tab_count(self.asked.tab)
        if counted.more and counted.count < tuning.counted:
            counted = found.count() or counted
        if counted.more or counted.count < offset + page:
            return CappedCount(max(counted.count, offset + page))
        return counted.count

    def tab_count(self, tab: search_box.Tab) -> Capped:
        """Return how many messages of a tab match the search box."""
        states = tab.states & self.asked.box.states
        if tab.name in listing.PARTS:
            return self.counts[tab.name] if states else Capped(0)
        found = total(self.counts[state] for state in states)
        return Capped(min(found.count, tuning.counted), found.more or found.count > tuning.counted)

    @property
    def shown_count(self) -> str:
        """The number of rows in all, as the page shows it."""
        count = self.result_count
        return str(count) if isinstance(count, CappedCount) else f"{count:,}"

    def pages(self) -> list[SimpleNamespace]:
        """Return the links to the pages."""
        return page.page_links(self.paginator, self.page_num, self._page_url)

    def _page_url(self, number: int) -> str:
        return self.get_query_string({PAGE_VAR: number})

    def pauses(self) -> list[tuple[str, str, str]]:
        """Return the queues whose pause keeps messages of the page, with its reason and the address of the queue."""
        kept = [message for message in self.result_list if message.standing.kind == "paused"]
        found = {message.queue: message.standing.why for message in kept}
        return [(queue, why, self.model_admin.url(Queue, "detail", queue)) for queue, why in found.items()]

    def tabs(self) -> Iterator[SimpleNamespace]:
        """Yield the tabs as the page shows them. ``count`` is empty when the number is not known."""
        for tab in search_box.TABS:
            count, here = self.tab_count(tab), tab is self.asked.tab
            if self.asked.box.problems:
                # Nothing was looked for.
                shown = ""
            elif here and not self.too_slow:
                shown = self.shown_count
            else:
                shown = "" if count.more and not count.count else str(count)
            others = [PAGE_VAR, ORDER_VAR, search_box.LONGER_VAR]
            query = self.get_query_string({search_box.TAB_VAR: tab.name}, others)
            yield SimpleNamespace(
                label=str(tab.label),
                query=query,
                count=shown,
                here=here,
                # Only these messages need attention.
                alert=tab.name == "overdue" and bool(count.count),
            )


def _link(text: str) -> tuple[str, str]:
    """Return a search with its query string."""
    return text, f"?{urlencode({search_box.TAB_VAR: 'all', SEARCH_VAR: text})}"


def _near(using: str, search: Search) -> list[tuple[str, str]]:
    """Return searches for names that are like the topic, queue and limit of a search, if these may be typing errors."""
    asked = {name: text for name in ("topic", "queue", "limit") if (text := search.only(name)) is not None}
    if not asked:
        return []
    workers = list_workers(using, reads.now(using))
    known = {
        "topic": worker_list.known_topics(workers),
        "queue": worker_list.served_queues(workers).union(statements(using).queues()),
        "limit": stats.known_limits(using) if "limit" in asked else (),
    }
    return [_link(term_text(name, near)) for name, text in asked.items() if (near := names.near(text, known[name]))]


def _rows(rows: QuerySet[Message], ids: list[int]) -> list[Message]:
    """Read the messages of a page in its order: without the wide columns, but with a payload that is small.

    ``pause`` is the reason for the pause of its queue; None: the queue is not paused.
    """
    narrow = rows.filter(pk__in=ids).defer("payload", "headers", "retry", "result")
    pauses = Queue.objects.using(rows.db).filter(Queue.PAUSED, name=OuterRef("queue")).values("reason")
    beside = {"small_payload": small(tuning.small_payload), "payload_size": StoredSize(F("payload"))}
    found = narrow.annotate(pause=Subquery(pauses), **beside).in_bulk()
    return [found[pk] for pk in ids if pk in found]


# A text of Django's admin, which has the translations.
_SELECT = "Select this object for an action - {}"


class MessageAdmin(ExportView, MessagePage):
    """The list of messages. Everything is read-only, but for the actions."""

    list_display = ("ident", "badge", "subject", "due", "ended", "failure", "identity", "place", "tries", "preview")
    # Makes Django show the search box; ``search_box.read_search`` reads the search.
    search_fields = ("=id",)
    change_list_template = "delayq_console/message/change_list.html"
    sortable_by = ("ident", "due", "ended", "tries")

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return MessageList

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        shared = {
            **page.navigation(self, request),
            "title": _("Messages"),
            "help": search_box.HELP,
            "examples": search_box.EXAMPLES,
            "may_export": self.may(request, "export"),
        }
        return super().changelist_view(request, {**shared, **(extra_context or {})})

    def action_checkbox(self, obj: Message) -> SafeString:
        """Return the admin's checkbox without a template for each row, which takes a fifth of the time of the page."""
        return format_html(
            '<input type="checkbox" name="{}" value="{}" class="action-select" aria-label="{}">',
            ACTION_CHECKBOX_NAME,
            obj.pk,
            format_html(gettext(_SELECT), obj),
        )

    @admin.display(description=_("id"), ordering="id")
    def ident(self, message: Message) -> str:
        return f"#{message.pk}"

    @admin.display(description=_("state"))
    def badge(self, message: Message) -> str:
        kind, word, why = vars(message)["standing"]
        title = format_html(' title="{}"', why) if why else ""
        return format_html('<span class="dq-badge dq-state-{}"{}>{}</span>', kind, title, word)

    @admin.display(description=_("topic"))
    def subject(self, message: Message) -> str:
        return _cut(message.topic)

    @admin.display(description=_("key"), empty_value="")
    def identity(self, message: Message) -> str | None:
        return None if message.key is None else _cut(message.key)

    @admin.display(description=_("queue"))
    def place(self, message: Message) -> str:
        return _cut(message.queue)

    @admin.display(description=_("due"), ordering="due_at")
    def due(self, message: Message) -> str:
        is_over = message.finished_at is not None
        words = "" if is_over else explanation.timing(message, vars(message)["read_at"], vars(message)["standing"].kind)
        return _when(message, message.due_at, words)

    @admin.display(description=_("finished"), ordering="finished_at", empty_value="")
    def ended(self, message: Message) -> str | None:
        if message.finished_at is None:
            return None
        return _when(message, message.finished_at, explanation.distance(message.finished_at, vars(message)["read_at"]))

    @admin.display(description=_("attempts"), ordering="attempts")
    def tries(self, message: Message) -> str:
        return f"{message.attempts}" if message.max_attempts is None else f"{message.attempts}/{message.max_attempts}"

    @admin.display(description=_("last error"), empty_value="")
    def failure(self, message: Message) -> str | None:
        if not message.error:
            return None
        return format_html('<span class="dq-error-kind" title="{0}">{0}</span>', message.error)

    @admin.display(description=_("payload"), empty_value="")
    def preview(self, message: Message) -> str | None:
        content = getattr(message, "small_payload", None)
        if content is not None:
            return format_html('<code title="{}">{}</code>', payload.hover(content), payload.preview(content))
        size = getattr(message, "payload_size", None)
        return gettext("large") if size and size > 100 else None


def _when(message: Message, at: datetime, words: str) -> str:
    """Show a time of a message, and in words how long ago or ahead that is."""
    return format_html(
        '<time class="nowrap" datetime="{}" title="{}">{}</time> <span class="dq-muted nowrap">{}</span>',
        at.isoformat(),
        explanation.universal(at),
        explanation.short_moment(at, vars(message)["read_at"]),
        words,
    )


def _cut(text: str) -> str:
    """Return a text that the style sheet cuts to its column, with all of it under the mouse."""
    return format_html('<span title="{0}">{0}</span>', text)
