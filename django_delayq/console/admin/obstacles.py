"""What keeps due messages from workers: a pause, a limit, a handler that no worker has, or workers that are busy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from datetime import datetime
from operator import attrgetter
from typing import NamedTuple

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ...api import pausing
from ...core.limits import parts, queue_name, topic_name
from ...inspector import worker_list
from ...inspector.numbers import CAPS, Capped
from ...inspector.stats import overdue_cutoff
from ...inspector.waiting import Due, may_be_more, read_due
from ...models import LimitOverride, Message, Queue, Worker
from ...models.workers import WorkerState
from ...project import pulled
from ...record import admission, overrides, reads
from ...record.sql import statements
from ..models import Limits
from .explanation import limit_words, override_facts, pause_facts, span
from .readonly import ReadOnly

_PAUSED = gettext_lazy("%(number)s waiting: %(what)s is paused")
# By the cause: the class and the text of its badge, a sentence about what it keeps, and the text of a link.
_WORDS = {
    "queue paused": ("paused", gettext_lazy("queue paused"), _PAUSED, gettext_lazy("See queues")),
    "paused": ("paused", gettext_lazy("paused"), _PAUSED, gettext_lazy("See limits")),
    "limited": (
        "limited",
        gettext_lazy("limited"),
        gettext_lazy("%(number)s waiting for the limit of %(what)s"),
        gettext_lazy("See limits"),
    ),
    "no handler": (
        "critical",
        gettext_lazy("no handler"),
        gettext_lazy("%(number)s waiting: no live worker of %(what)s has the handler"),
        gettext_lazy("See workers"),
    ),
    "overdue": (
        "late",
        gettext_lazy("overdue"),
        gettext_lazy("%(number)s overdue: the workers of %(what)s are busy, or too few"),
        gettext_lazy("See them"),
    ),
}


class DueNow(NamedTuple):
    """The messages that are due at a moment, and what may keep them from workers."""

    at: datetime
    due: list[Due]
    # Others may stand behind those that were read.
    more: bool
    paused: dict[str, Queue]
    overridden: Mapping[str, LimitOverride]
    # The queues and topics for which a live worker has the handler.
    handled: set[tuple[str, str]]


class Obstacle(NamedTuple):
    """Why some messages wait: the cause, what it is of, the class and text of a badge, a sentence, by whom, where.

    ``label`` is the text of a link to there. ``topics`` and ``number`` are those of the messages.
    """

    cause: str
    what: str
    kind: str
    badge: str
    text: str
    note: str
    url: str
    label: str
    topics: list[str]
    number: Capped

    @property
    def stops(self) -> bool:
        """Whether nothing begins until somebody acts. A limit lets messages begin, and busy workers come to them."""
        return self.kind in ("paused", "critical")


class Backlog(NamedTuple):
    """The due messages of a topic or a queue: how many, for how long the oldest has been due, and their obstacles."""

    number: Capped
    age: str
    obstacles: list[Obstacle]


def read_due_now(using: str) -> DueNow:
    """Read what is due, up to a number of messages of each queue."""
    at, caps = reads.now(using), CAPS.shared(len(statements(using).queues()))
    closed = admission.full_lately(using)
    due = [*read_due(using, closed, now=at, overdue_since=overdue_cutoff(at), caps=caps)]
    alive = worker_list.list_workers(using, at).of(WorkerState.ALIVE)
    handled = {(queue, topic) for worker in alive for queue in worker.queues for topic in worker.topics}
    return DueNow(at, due, may_be_more(due, caps), pausing.paused(using), overrides.known(using).in_force, handled)


def backlogs(shown: ReadOnly, now: DueNow | None, column: str, only: str = "") -> dict[str, Backlog]:
    """Return what is due by a column, "topic" or "queue"; ``only``: that of one topic or queue, by the other column."""
    found: defaultdict[str, list[Due]] = defaultdict(list)
    for each in now.due if now else ():
        name, other = (each.topic, each.queue) if column == "topic" else (each.queue, each.topic)
        if only in ("", other):
            found[name].append(each)
    return {name: _backlog(shown, now, some) for name, some in found.items()} if now else {}


def of_all_topics(shown: ReadOnly, now: DueNow) -> list[Obstacle]:
    """Return what keeps messages of any topic: first what stops them, then what keeps most."""
    found = _backlog(shown, now, now.due).obstacles if now.due else []
    return sorted(found, key=lambda each: (not each.stops, -each.number.count))


def _backlog(shown: ReadOnly, now: DueNow, due: list[Due]) -> Backlog:
    by_cause: defaultdict[tuple[str, str], list[Due]] = defaultdict(list)
    for each in due:
        if (cause := _cause(shown.using, now, each)) is not None:
            by_cause[cause].append(each)
    found = [_obstacle(shown, now, *cause, some) for cause, some in by_cause.items()]
    number, age = _summed(now, due)
    return Backlog(number, age, sorted(found, key=attrgetter("kind")))


def _cause(using: str, now: DueNow, due: Due) -> tuple[str, str] | None:
    """Return why messages wait, a key of ``_WORDS``, and the name of the limit, or that of a limit of the queue."""
    queue = queue_name(due.queue)
    if due.queue in now.paused:
        return "queue paused", queue
    if due.limit is not None:
        kind, what, _key = parts(due.limit)
        override = overrides.deciding(using, due.limit)
        if override is not None and override.is_pause:
            return "paused", override.name
        # The lines of the keys of a topic are told together.
        return "limited", queue if kind == "queue" else topic_name(what, None)
    if pulled.terms(due.queue) is not None:
        return None
    if (due.queue, due.topic) not in now.handled:
        return "no handler", queue
    return ("overdue", queue) if due.overdue else None


def _obstacle(shown: ReadOnly, now: DueNow, cause: str, what: str, due: list[Due]) -> Obstacle:
    kind, badge, text, label = _WORDS[cause]
    number, age = _summed(now, due)
    note, url = "", shown.url(Limits)
    if cause == "queue paused":
        note, url = pause_facts(now.paused[due[0].queue], now.at), shown.url(Queue, "detail", due[0].queue)
    elif cause == "paused" and (row := overrides.deciding(shown.using, what)):
        note = override_facts(row, now.at)
    elif cause == "no handler":
        url = shown.url(Worker)
    elif cause == "overdue":
        number = Capped(sum(each.overdue for each in due), now.more)
        url = shown.list_url(Message, "is:overdue")
    told = text % {"number": number, "what": limit_words(what)}
    sentence = _("%(text)s, the oldest for %(age)s") % {"text": told, "age": age}
    topics = sorted({each.topic for each in due})
    return Obstacle(cause, what, kind, str(badge), sentence, note, url, str(label), topics, number)


def _summed(now: DueNow, due: list[Due]) -> tuple[Capped, str]:
    """Return how many messages these are, and for how long the oldest has been due."""
    return Capped(sum(each.number for each in due), now.more), span(now.at - min(each.oldest for each in due))
