"""The rows of the list of messages, which are read along an index or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

from django.contrib.admin.exceptions import DisallowedModelAdminLookup
from django.contrib.admin.views.main import PAGE_VAR, SEARCH_VAR, ChangeList
from django.core.paginator import Paginator
from django.db.models import F, QuerySet
from django.http import HttpRequest

from ...core import names
from ...inspector import lines, unserved
from ...inspector.numbers import Capped, total
from ...inspector.worker_list import list_workers
from ...models import Message
from ...record import transitions
from ...record.sql import statements
from ..search import listing
from ..search.language import Search
from ..search.listing import Listing
from ..search.payloads import StoredSize, small
from ..search.texts import term_text
from ..statements import TooSlow, in_time
from . import addresses, search_box
from .paginator import PAGED_CAP, CappedCount

# The list shows no larger payload. In bytes, as they are stored.
SMALL_PAYLOAD_BYTES = 16_384


class MessageList(ChangeList):
    """One page of a search. ``asked`` is the search; ``too_slow`` is True when no index serves it in time."""

    # An attribute of Django's that its types do not declare.
    filter_specs: list[Any]

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> QuerySet[Message]:
        """Return all that the search finds, for actions; ``get_results`` reads the page itself."""
        unknown = set(self.get_filters_params()) - {search_box.TAB_VAR, search_box.LONGER_VAR}
        if unknown:
            # Another lookup would read the whole table, and one into the payload would reveal masked values.
            raise DisallowedModelAdminLookup(f"Filtering by {', '.join(sorted(unknown))} not allowed")
        self.asked = search_box.read_search(request, self.params, self.root_queryset.db)
        self.filter_specs = []
        self.has_filters = False
        self.has_active_filters = bool(self.asked.box.text)
        self.clear_all_filters_qs = "?"
        found: QuerySet[Message] = self.root_queryset.filter(self.asked.whole.condition())
        return found.order_by(*self.asked.whole.order)

    def get_results(self, request: HttpRequest) -> None:
        if not 1 <= self.page_num <= max(1, PAGED_CAP // self.list_per_page):
            self.page_num = 1
        rows: QuerySet[Message] = self.root_queryset
        found, offset = Listing(rows, self.asked.whole), (self.page_num - 1) * self.list_per_page
        # True when the rows took so long, or may take so long, that a page must not ask for them again and again.
        self.slow = self.params.get(search_box.LONGER_VAR) == "1"
        # The times after which the search is ended, and one that may take longer, in words.
        most = listing.LONGER_TIMEOUT_MS if self.slow else listing.PAGE_TIMEOUT_MS
        self.limit, self.longer_limit = (f"{each / 1000:g} s" for each in (most, listing.LONGER_TIMEOUT_MS))
        # The query string of the same search with more time; empty when it had that already.
        self.longer_query = "" if self.slow else self.get_query_string({search_box.LONGER_VAR: "1"})
        self.too_slow = False
        ids = self._ids(found, offset, most)
        if not ids and self.page_num > 1:
            # So many messages have left the search. Django would drop it, and an action on its messages as well.
            self.page_num, offset = 1, 0
            ids = self._ids(found, offset, most)
        # Searches in payloads for an e-mail address that is no key: texts and query strings.
        address = "" if ids else next(filter(addresses.is_address, self.asked.box.bare), "")
        self.suggestions = [_link(text) for text in addresses.searches(rows, address)] if address else []
        # Searches for a topic or a queue that is like the one of a search without results: likewise.
        self.near = (
            [] if ids else in_time(rows.db, listing.PAGE_TIMEOUT_MS, lambda: _near(rows.db, self.asked.box)) or []
        )
        now = transitions.now(rows.db)
        self.counts = listing.counts(rows, self.asked.box, now)
        self.result_list = _rows(rows, ids[: self.list_per_page])
        limited = lines.waits_for(rows.db, self.result_list, now)
        for message in self.result_list:
            # The list shows them.
            message.waits_for, message.read_at = limited.get(message.pk), now
        self.result_count = self._count(found, offset, len(ids))
        self.paginator = Paginator(range(self.result_count), self.list_per_page)
        self.multi_page = self.result_count > self.list_per_page
        self.show_full_result_count = self.can_show_all = False
        self.full_result_count = None
        self.show_admin_actions = bool(ids)

    def _ids(self, found: Listing, offset: int, milliseconds: int) -> list[int]:
        most = self.list_per_page + 1
        try:
            return found.ids(most, offset, milliseconds=milliseconds)
        except TooSlow:
            self.too_slow = self.slow = True
        try:
            return found.nearest(most, offset)
        except TooSlow:
            return []

    def _count(self, found: Listing, offset: int, page: int) -> int:
        """Return the number of rows in all; ``page`` is the number found on this page, up to one more than it shows."""
        if page <= self.list_per_page and not self.too_slow:
            return offset + page
        if self.too_slow:
            return CappedCount(offset + page)
        counted = self.tab_count(self.asked.tab)
        if counted is None or (counted.more and counted.count < listing.COUNT_CAP):
            counted = found.count() or Capped(counted.count if counted else 0, more=True)
        if counted.more or counted.count < offset + page:
            return CappedCount(max(counted.count, offset + page))
        return counted.count

    def tab_count(self, tab: search_box.Tab) -> Capped | None:
        """Return how many messages of a tab match the search box; None when the number is not known."""
        if self.counts is None:
            return None
        states = tab.states & self.asked.box.states
        if tab.name in ("overdue", "limited"):
            return self.counts[tab.name] if states else Capped(0)
        found = total(self.counts[state] for state in states)
        return Capped(min(found.count, listing.COUNT_CAP), found.more or found.count > listing.COUNT_CAP)

    def tabs(self) -> Iterator[SimpleNamespace]:
        """Yield the tabs as the page shows them. ``count`` is empty when the number is not known."""
        for tab in search_box.TABS:
            count, here = self.tab_count(tab), tab is self.asked.tab
            if here and not self.too_slow:
                shown = (
                    f"{self.result_count}" if isinstance(self.result_count, CappedCount) else f"{self.result_count:,}"
                )
            else:
                shown = "" if count is None or (count.more and not count.count) else str(count)
            query = self.get_query_string({search_box.TAB_VAR: tab.name}, [PAGE_VAR, search_box.LONGER_VAR])
            yield SimpleNamespace(
                label=str(tab.label),
                query=query,
                count=shown,
                here=here,
                # The only messages that need attention.
                alert=tab.name == "overdue" and bool(count and count.count),
            )


def _link(text: str) -> tuple[str, str]:
    """Return a search with its query string."""
    return text, f"?{urlencode({search_box.TAB_VAR: 'all', SEARCH_VAR: text})}"


def _near(using: str, search: Search) -> list[tuple[str, str]]:
    """Return searches for what is like the topic and the queue of a search, if these may be typing errors."""
    topic, queue = search.only("topic"), search.only("queue")
    if topic is None and queue is None:
        return []
    workers = list_workers(using, transitions.now(using))
    found = []
    if topic is not None and (near := names.near(topic, unserved.known_topics(workers))):
        found.append(_link(term_text("topic", near)))
    queues = unserved.served_queues(workers).union(statements(using).queues())
    if queue is not None and (near := names.near(queue, queues)):
        found.append(_link(term_text("queue", near)))
    return found


def _rows(rows: QuerySet[Message], ids: list[int]) -> list[Message]:
    """Read the messages of a page in its order: without the wide columns, but with a payload that is small."""
    narrow = rows.filter(pk__in=ids).defer("payload", "headers", "retry", "result")
    found = narrow.annotate(small_payload=small(SMALL_PAYLOAD_BYTES), payload_size=StoredSize(F("payload"))).in_bulk()
    return [found[pk] for pk in ids if pk in found]
