"""The list of limits: how much of each is used up, and who waits for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.http import HttpRequest

from ...core.limits import parts
from ...core.states import State
from ...inspector import lines
from ...inspector.lines import LimitState
from ...models import Message
from ..search import texts as searches
from . import banners, page_data, panels
from .explanation import limit_text, span
from .page import Links, Page

# Limits that the page shows.
LIMITS_SHOWN = 100


@dataclass(frozen=True, slots=True)
class LimitRow:
    """A limit as pages show it, with the addresses of the lists of those that run and those that wait."""

    name: str
    use: str
    running: str
    running_url: str
    waiting: str
    waiting_url: str
    oldest: str


class LimitsAdmin(Page):
    """The limits, for users who may view messages."""

    template = "delayq_console/limits.html"

    def content(self, request: HttpRequest) -> dict[str, Any]:
        data = page_data.gather()
        using = data.using
        found = panels.load(
            ("all limits", using), page_data.FRESH_SECONDS, using, lambda: lines.all_limits(using, LIMITS_SHOWN)
        )
        limits = found.value.longest if found.value else ()
        return {
            "banners": banners.linked(self, data),
            "lines": found,
            "limits": rows(limits, data.at, Links(self)),
            "partial": len(limits) == LIMITS_SHOWN,
            "most": LIMITS_SHOWN,
        }


def rows(limits: Iterable[LimitState], now: datetime, links: Links) -> list[LimitRow]:
    """Return limits as pages show them."""
    return [_row(limit, now, links) for limit in limits]


def _row(limit: LimitState, now: datetime, links: Links) -> LimitRow:
    return LimitRow(
        limit.name,
        limit_text(limit, now),
        f"{limit.running:,}",
        links(Message, running_text(limit.name)) if limit.running else "",
        str(limit.waiting),
        links(Message, searches.term_text("limit", limit.name)) if limit.waiting.count else "",
        "–" if limit.oldest is None else span(now - limit.oldest),
    )


def running_text(limit: str) -> str:
    """Return the text of a search for the messages that run under a limit."""
    kind, what, key = parts(limit)
    texts = [f"state:{State.RUNNING}", searches.term_text(kind, what)]
    if key is not None:
        texts.append(searches.term_text("limit_key", key))
    return " ".join(texts)
