"""The list of limits: how much of each is used up, and who waits for it."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from types import SimpleNamespace
from typing import Any

from django.http import HttpRequest

from ...core.limits import parts
from ...core.states import State
from ...inspector import stats
from ...inspector.stats import LimitState
from ...models import Message
from ..search import texts as searches
from . import page_data, panels
from .explanation import limit_text, span
from .page import Page
from .readonly import Links

# A page names this many limits at most.
MOST = 100


class LimitsAdmin(Page):
    """The limits, for users who may view messages."""

    template = "delayq_console/limits.html"
    list_per_page = MOST

    def content(self, request: HttpRequest) -> dict[str, Any]:
        data = page_data.gather()
        using = data.using
        found = panels.load("all limits", using, stats.all_limits, using, self.list_per_page)
        limits = found.value.longest if found.value else ()
        return {
            "lines": found,
            "limits": rows(limits, data.at, self.list_url),
            "partial": len(limits) == self.list_per_page,
            "most": self.list_per_page,
        }


def rows(limits: Iterable[LimitState], now: datetime, links: Links) -> list[SimpleNamespace]:
    """Return limits as pages show them, with the addresses of the lists of those that run and those that wait."""
    return [
        SimpleNamespace(
            name=limit.name,
            use=limit_text(limit, now),
            running=f"{limit.running:,}",
            running_url=links(Message, running_text(limit.name)) if limit.running else "",
            waiting=str(limit.waiting),
            waiting_url=links(Message, searches.term_text("limit", limit.name)) if limit.waiting.count else "",
            oldest="–" if limit.oldest is None else span(now - limit.oldest),
        )
        for limit in limits
    ]


def running_text(limit: str) -> str:
    """Return the text of a search for the messages that run under a limit."""
    kind, what, key = parts(limit)
    texts = [f"state:{State.RUNNING}", searches.term_text(kind, what)]
    if kind == "topic":
        texts.append(searches.term_text("limit_key", key or ""))
    return " ".join(texts)
