"""The dead letters, by topic and by kind of error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from operator import attrgetter
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
from ...record import reads
from ...record.sql import statements
from ..console_tuning import timeouts, tuning
from ..search import texts
from ..statements import TooSlow, in_time, statement_timeout
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
    """Dead messages with the same topic, the same error, or both: None stands for any."""

    topic: str | None
    error: str | None
    last: datetime
    first: datetime
    # The id of the message that died last.
    sample: int
    # What the reader chose, which holds for every number here.
    chosen: DeadFilter
    count: int = 0
    # How many of them died within each of the periods.
    recent: Counter[str] = field(default_factory=Counter)
    # The groups of its topics, for those with the same error.
    topics: list[DeadGroup] = field(default_factory=list)

    @property
    def search(self) -> str:
        """The search that finds exactly these messages."""
        terms = [self.chosen.search]
        if self.topic is not None:
            terms.append(texts.term_text("topic", self.topic))
        if self.error is not None:
            terms.append(texts.exact_error_text(self.error))
        return " ".join(terms)

    @property
    def burst(self) -> tuple[list[int], int, datetime]:
        """The order of groups: most deaths in the last hour, then in the last day, the last week, and at any time."""
        return [self.recent[period] for period in PERIODS], self.count, self.last


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
        now = reads.now(rows.db)
        if chosen.period:
            dead = dead.filter(finished_at__gt=now - PERIODS[chosen.period])
        newest = list(dead.values_list("topic", "error", "finished_at", "pk", "queue")[: tuning.counted + 1])
    found: list[DeadRow] = [
        (topic, error, at, pk, queue) for topic, error, at, pk, queue in newest[: tuning.counted] if at is not None
    ]
    errors = _groups(found, now, chosen, by_topic=False, by_error=True)
    by_error = {group.error: group for group in errors}
    for group in _groups(found, now, chosen, by_topic=True, by_error=True):
        by_error[group.error].topics.append(group)
    return DeadGroups(
        _groups(found, now, chosen, by_topic=True, by_error=False),
        errors,
        sorted({row[-1] for row in found}),
        len(found),
        len(newest) > tuning.counted,
    )


def _groups(
    rows: Iterable[DeadRow], now: datetime, chosen: DeadFilter, *, by_topic: bool, by_error: bool
) -> list[DeadGroup]:
    """Return the groups of rows with the same topic, error, or both."""
    groups: dict[tuple[str | None, str | None], DeadGroup] = {}
    for topic, error, at, pk, _queue in rows:
        key = topic if by_topic else None, error if by_error else None
        # The newest come first.
        group = groups.setdefault(key, DeadGroup(*key, at, at, pk, chosen))
        age = now - at
        group.count += 1
        group.first = at
        group.recent.update(period for period, length in PERIODS.items() if age <= length)
    return sorted(groups.values(), key=attrgetter("burst"), reverse=True)


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
            recent=[(group.recent[period], links(f"{group.search} finished:<{period}")) for period in PERIODS],
            topics=[(each.topic, each.count, links(each.search)) for each in group.topics],
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
