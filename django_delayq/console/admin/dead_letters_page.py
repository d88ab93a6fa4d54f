"""The dead letters, by topic and by kind of error."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from ...core.outcomes import storable
from ...core.states import State
from ...models import Message
from ...project import conf
from ...record import transitions
from ...record.sql import statements
from ..search import texts
from ..statements import TooSlow, in_time, statement_timeout
from ..tuning import timeouts, tuning
from .action_table import CONSOLE_ACTIONS
from .explanation import moment, span
from .page import Page

# The times back from now that are counted and can be chosen, in the words of the search.
PERIODS = {"1h": timedelta(hours=1), "24h": timedelta(days=1), "7d": timedelta(days=7)}


@dataclass(frozen=True, slots=True)
class DeadFilter:
    """The dead messages that are wanted: of one queue, or "" for all; of one of the ``PERIODS``, or "" for any time."""

    queue: str = ""
    period: str = ""

    @property
    def search(self) -> str:
        """The terms of the search that find these messages."""
        terms = [f"state:{State.DEAD}"]
        if self.queue:
            terms.append(texts.term_text("queue", self.queue))
        if self.period:
            terms.append(f"finished:<{self.period}")
        return " ".join(terms)


# Topic, kind of error, time of death, id, queue.
DeadRow = tuple[str, str, datetime, int, str]


@dataclass(slots=True)
class DeadGroup:
    """Dead messages that have something in common. ``error`` is None for those of a whole topic."""

    topic: str
    error: str | None
    last: datetime
    first: datetime
    # The id of the message that died last.
    sample: int
    # What the reader chose, which holds for every number here.
    chosen: DeadFilter
    count: int = 0
    # How many of them died within each of the periods.
    recent: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PERIODS, 0))

    @property
    def search(self) -> str:
        """The search that finds exactly these messages."""
        text = f"{self.chosen.search} {texts.term_text('topic', self.topic)}"
        return text if self.error is None else f"{text} {texts.exact_error_text(self.error)}"

    @property
    def burst(self) -> tuple[list[int], int, datetime]:
        """The order of groups: most deaths in the last hour, then in the last day, the last week, and at any time."""
        return [*self.recent.values()], self.count, self.last


@dataclass(frozen=True, slots=True)
class DeadGroups:
    """All groups, the newest burst first. ``capped`` is True when older dead messages were left out."""

    topics: list[DeadGroup]
    errors: list[DeadGroup]
    # The queues of these messages.
    queues: list[str]
    count: int
    capped: bool


def group_dead(rows: QuerySet[Message], chosen: DeadFilter) -> DeadGroups:
    """Group the newest dead messages among ``rows`` that the reader chose. Raises ``TooSlow``."""
    dead = rows.filter(state=State.DEAD, finished_at__isnull=False).order_by("-finished_at", "-id")
    if chosen.queue:
        dead = dead.filter(queue=chosen.queue)
    with statement_timeout(rows.db, timeouts.page):
        now = transitions.now(rows.db)
        if chosen.period:
            dead = dead.filter(finished_at__gt=now - PERIODS[chosen.period])
        newest = list(dead.values_list("topic", "error", "finished_at", "pk", "queue")[: tuning.counted + 1])
    found: list[DeadRow] = [
        (topic, error, at, pk, queue) for topic, error, at, pk, queue in newest[: tuning.counted] if at is not None
    ]
    return DeadGroups(
        _groups(found, now, chosen, whole=True),
        _groups(found, now, chosen, whole=False),
        sorted({row[-1] for row in found}),
        len(found),
        len(newest) > tuning.counted,
    )


def _groups(rows: Iterable[DeadRow], now: datetime, chosen: DeadFilter, *, whole: bool) -> list[DeadGroup]:
    """Return the groups of rows with the same error, or of ``whole`` topics."""
    groups: dict[tuple[str, str | None], DeadGroup] = {}
    for topic, error, at, pk, _queue in rows:
        kind = None if whole else error
        # The newest come first.
        group = groups.setdefault((topic, kind), DeadGroup(topic, kind, at, at, pk, chosen))
        age = now - at
        group.count += 1
        group.first = at
        for period, length in PERIODS.items():
            group.recent[period] += age <= length
    return sorted(groups.values(), key=lambda group: group.burst, reverse=True)


# --- the page ---------------------------------------------------------------------------------------------------------

_PERIODS = (("", _("any time")), ("1h", _("the last hour")), ("24h", _("the last day")), ("7d", _("the last 7 days")))


class DeadLettersAdmin(Page):
    template = "delayq_console/deadletters.html"

    def content(self, request: HttpRequest) -> dict[str, Any]:
        acts_here = self.admin_site.is_registered(Message)
        offered = [
            (action, self.url(Message, "action", action.name))
            for action in (CONSOLE_ACTIONS["requeue"], CONSOLE_ACTIONS["purge"])
            if acts_here and self.may(request, action.name, "bulk")
        ]
        using = self.get_queryset(request).db
        chosen = _chosen(request)
        shared = {"chosen": chosen, "filtered": chosen != DeadFilter(), "periods": _PERIODS}
        try:
            found = group_dead(Message.objects.using(using), chosen)
        except TooSlow:
            return {**shared, "too_slow": True, "queues": _queues(using, chosen, [])}
        return {
            **shared,
            "queues": _queues(using, chosen, found.queues),
            "topics": [self._row(group) for group in found.topics[: self.list_per_page]],
            "errors": [self._row(group) for group in found.errors[: self.list_per_page]],
            "more_topics": max(0, len(found.topics) - self.list_per_page),
            "more_errors": max(0, len(found.errors) - self.list_per_page),
            "count": found.count,
            "cap": tuning.counted if found.capped else None,
            "offered": offered,
        }

    def _row(self, group: DeadGroup) -> SimpleNamespace:
        """Return a group as the page shows it, with the addresses of its messages."""
        links = partial(self.list_url, Message, state="all")
        return SimpleNamespace(
            group=group,
            list=links(group.search),
            # The numbers of those that died lately, with the addresses of their lists.
            recent=[(found, links(f"{group.search} finished:<{one}")) for one, found in group.recent.items()],
            sample=self.url(Message, "change", group.sample),
            first=moment(group.first, "seconds"),
            last=moment(group.last, "seconds"),
            ago=span(timezone.now() - group.last),
        )


def _chosen(request: HttpRequest) -> DeadFilter:
    period = request.GET.get("period", "")
    return DeadFilter(storable(request.GET.get("queue", "").strip()), period if period in PERIODS else "")


def _queues(using: str, chosen: DeadFilter, found: list[str]) -> list[str]:
    """Return the queues that can be chosen: those of the messages found, of scheduled ones, and of the settings."""
    settings = conf.get()
    waiting = in_time(using, timeouts.page, statements(using).queues) or ()
    names = {*found, *waiting, *settings.QUEUES, settings.DEFAULT_QUEUE, chosen.queue}
    return sorted(names - {""})
