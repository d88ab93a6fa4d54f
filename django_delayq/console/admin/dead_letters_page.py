"""The dead letters, by kind of error and by topic, and the errors that somebody acknowledged."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from operator import attrgetter
from types import MappingProxyType, SimpleNamespace
from typing import Any

from django import forms
from django.db.models import QuerySet
from django.db.models.functions import Right
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from ...core.bounds import LENGTHS
from ...core.outcomes import storable
from ...core.states import State
from ...models import Message
from ...models.messages import LogRow
from ...project import conf
from ...record import reads
from ...record.sql import statements
from ..console_tuning import timeouts, tuning
from ..models import Acknowledgement, DeadLetters
from ..search import texts
from ..statements import TooSlow, in_time, statement_timeout
from . import charts, page
from .action_table import CONSOLE_ACTIONS
from .explanation import moment, span
from .page import Page

# The columns by which the reader may choose, with their names in a search.
CHOSEN = ("queue", "topic")
# The number of steps of a trend, which covers the chosen time or a week.
TREND = 28
# The times before now that the reader can choose, each with its own count, in the words of the search.
PERIODS = {"1h": timedelta(hours=1), "24h": timedelta(days=1), "7d": timedelta(days=7)}


@dataclass(frozen=True, slots=True)
class DeadFilter:
    """The reader's choice of dead messages: queue, topic, and one of the ``PERIODS``; "" is all, and any time."""

    queue: str = ""
    topic: str = ""
    period: str = ""

    @property
    def columns(self) -> dict[str, str]:
        return {name: given for name in CHOSEN if (given := getattr(self, name))}

    @property
    def search(self) -> str:
        """The terms of the search that find these messages."""
        terms = [f"state:{State.DEAD}"]
        terms += [texts.term_text(name, given) for name, given in self.columns.items()]
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
    # The reader's choice, which holds for every number here.
    chosen: DeadFilter
    count: int = 0
    # The ids of the three that died last.
    samples: list[int] = field(default_factory=list)
    # The numbers of messages that died within each of the periods.
    recent: Counter[str] = field(default_factory=Counter)
    # For a group of one error: the groups of its topics.
    topics: list[DeadGroup] = field(default_factory=list)
    # The numbers of messages that died in each of the steps, the latest last.
    trend: list[int] = field(default_factory=lambda: [0] * TREND)
    # The acknowledgement of the error, and the number of messages of the last day that died of it since then.
    noted: Acknowledgement | None = None
    since: int = 0

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
    def is_known(self) -> bool:
        """True for an error that somebody acknowledged, and that is no more frequent than before."""
        return self.noted is not None and self.since <= self.noted.in_a_day

    def count_in(self, at: datetime, pk: int, now: datetime) -> None:
        """Count a message; each is older than the one before."""
        age = now - at
        self.count += 1
        self.first = at
        if self.count <= 3:
            self.samples.append(pk)
        self.recent.update(period for period, length in PERIODS.items() if age <= length)
        step = int(age / PERIODS[self.chosen.period or "7d"] * TREND)
        if 0 <= step < TREND:
            self.trend[-1 - step] += 1
        self.since += self.noted is not None and at > max(self.noted.at, now - PERIODS["24h"])

    @property
    def burst(self) -> tuple[list[int], int, datetime]:
        """The order of groups: most deaths in the last hour, then in the last day, the last week, and at any time."""
        return [self.recent[period] for period in PERIODS], self.count, self.last


def group_dead(rows: QuerySet[Message], chosen: DeadFilter) -> tuple[list[DeadRow], list[DeadGroup], list[DeadGroup]]:
    """Return the newest dead messages among ``rows`` that the reader chose, and their groups by error and by topic.

    There may be one message more than the groups have. The newest burst comes first. Raises ``TooSlow``.
    """
    dead = rows.filter(state=State.DEAD, finished_at__isnull=False, **chosen.columns).order_by("-finished_at", "-id")
    with statement_timeout(rows.db, timeouts.page):
        now = reads.now(rows.db)
        if chosen.period:
            dead = dead.filter(finished_at__gt=now - PERIODS[chosen.period])
        noted = Acknowledgement.objects.using(rows.db).in_bulk()
        newest: list[Any] = list(dead.values_list("topic", "error", "finished_at", "pk", "queue")[: tuning.counted + 1])
    found = newest[: tuning.counted]
    errors = _groups(found, now, chosen, noted, by_topic=False, by_error=True)
    by_error = {group.error: group for group in errors}
    for group in _groups(found, now, chosen, {}, by_topic=True, by_error=True):
        by_error[group.error].topics.append(group)
    return newest, errors, _groups(found, now, chosen, {}, by_topic=True, by_error=False)


def _groups(
    rows: Iterable[DeadRow],
    now: datetime,
    chosen: DeadFilter,
    noted: Mapping[str, Acknowledgement],
    *,
    by_topic: bool,
    by_error: bool,
) -> list[DeadGroup]:
    """Return the groups of rows with the same topic, error, or both."""
    groups: dict[tuple[str | None, str | None], DeadGroup] = {}
    for topic, error, at, pk, _queue in rows:
        key = topic if by_topic else None, error if by_error else None
        # The newest come first.
        group = groups.get(key) or groups.setdefault(key, DeadGroup(*key, at, at, chosen, noted=noted.get(error)))
        group.count_in(at, pk, now)
    return sorted(groups.values(), key=attrgetter("burst"), reverse=True)


# --- the page ---------------------------------------------------------------------------------------------------------

_PERIODS = (("", _("any time")), ("1h", _("the last hour")), ("24h", _("the last day")), ("7d", _("the last 7 days")))


class AcknowledgeForm(forms.Form):
    """The error, and why nobody needs to see it for now."""

    error = forms.CharField(max_length=LENGTHS.kind, required=False, strip=False)
    note = forms.CharField(max_length=LENGTHS.text, required=False)


class DeadLettersAdmin(Page):
    """The dead letters, for users who may view messages."""

    template = "deadletters"

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
            newest, errors, topics = group_dead(Message.objects.using(using), chosen)
        except TooSlow:
            return {**shared, "too_slow": True, "queues": _queues(using, chosen, [])}
        shown = errors[: self.list_per_page]
        frames = in_time(using, timeouts.beside, last_frames, using, [group.samples[0] for group in shown]) or {}
        rows = [self._row(group, frames) for group in shown]
        return {
            **shared,
            "queues": _queues(using, chosen, [row[-1] for row in newest]),
            "topics": [self._row(group) for group in topics[: self.list_per_page]],
            "errors": [row for row in rows if not row.group.is_known],
            "known": [row for row in rows if row.group.is_known],
            "more_topics": max(0, len(topics) - self.list_per_page),
            "more_errors": max(0, len(errors) - self.list_per_page),
            "count": min(len(newest), tuning.counted),
            "cap": tuning.counted if len(newest) > tuning.counted else None,
            "offered": offered,
            "acknowledge_url": self.url(DeadLetters, "acknowledge") if self.may(request, "requeue") else "",
        }

    def _row(self, group: DeadGroup, frames: Mapping[int, str] = MappingProxyType({})) -> SimpleNamespace:
        """Return a group as the page shows it, with the addresses of its messages."""
        links = partial(self.list_url, Message, state="all")
        return SimpleNamespace(
            group=group,
            list=links(group.search),
            # The numbers of messages that died lately, with the addresses of their lists.
            recent=[(group.recent[period], links(f"{group.search} finished:<{period}")) for period in PERIODS],
            topics=[(each.topic, each.count, links(each.search)) for each in group.topics],
            samples=[(pk, self.url(Message, "change", pk)) for pk in group.samples],
            spark=charts.spark(group.trend, "critical"),
            frame=frames.get(group.samples[0], ""),
            noted="" if group.noted is None else moment(group.noted.at, "seconds"),
            first=moment(group.first, "seconds"),
            last=moment(group.last, "seconds"),
            ago=span(timezone.now() - group.last),
        )

    def acknowledge_view(self, request: HttpRequest) -> HttpResponse:
        """Note on POST that somebody knows of an error; with ``undo``, take that note back."""
        self.require(request, "requeue")
        form = AcknowledgeForm(request.POST)
        if request.method == "POST" and form.is_valid():
            self._acknowledge(request, storable(form.cleaned_data["error"]), storable(form.cleaned_data["note"]))
        return HttpResponseRedirect(self.url(DeadLetters))

    def _acknowledge(self, request: HttpRequest, error: str, note: str) -> None:
        """Record that the user knows of an error, or take that back."""
        known = Acknowledgement.objects.using(self.using)
        with page.acting_as_user(request), statement_timeout(self.using, timeouts.page):
            now = reads.now(self.using)
            if "undo" in request.POST:
                known.filter(pk=error).delete()
            else:
                day = {"state": State.DEAD, "error": error, "finished_at__gt": now - PERIODS["24h"]}
                number = Message.objects.using(self.using).filter(**day)[: tuning.counted].count()
                given = {"at": now, "actor": page.actor_of(request), "note": note, "in_a_day": number}
                known.update_or_create(pk=error, defaults=given)
            page.record(request, "notice" if "undo" in request.POST else "acknowledge", error, reason=note)


_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (.+)')
# Parts of the paths of code that is not the project's.
_LIBRARIES = ("/site-packages/", "/lib/python", "/django_delayq/")


def last_frames(using: str, ids: Sequence[int]) -> dict[int, str]:
    """Return the last frame of the handler, by the id of a message, from the traceback of the move to *dead*."""
    moves = LogRow.objects.using(using).filter(message_id__in=ids, to_state=State.DEAD).order_by("number")
    return {pk: _last_frame(traceback) for pk, traceback in moves.values_list("message_id", Right("traceback", 4000))}


def _last_frame(traceback: str) -> str:
    frames = _FRAME.findall(traceback)
    own = [frame for frame in frames if not any(part in frame[0] for part in _LIBRARIES)]
    return next((f"{path}:{line} {function}" for path, line, function in reversed(own or frames)), "")


def _chosen(request: HttpRequest) -> DeadFilter:
    period = request.GET.get("period", "")
    queue, topic = (storable(request.GET.get(name, "").strip()) for name in CHOSEN)
    return DeadFilter(queue, topic, period if period in PERIODS else "")


def _queues(using: str, chosen: DeadFilter, found: list[str]) -> list[str]:
    """Return the queues that can be chosen: those of the messages found, of scheduled ones, and of the settings."""
    settings = conf.get()
    waiting = in_time(using, timeouts.page, statements(using).queues) or ()
    names = {*found, *waiting, *settings.QUEUES, settings.DEFAULT_QUEUE, chosen.queue}
    return sorted(names - {""})
