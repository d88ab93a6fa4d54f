"""What somebody has to do something about: only that, the most severe first, each with the one link that helps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ...durations import brief
from ...inspector.diagnostics import Limits
from ...models import Queue
from .explanation import moment
from .page_data import Facts

# Of the memory that Redis may take.
MEMORY = 0.9

_SEVERITY = ("error", "warning", "info")


@dataclass(frozen=True, slots=True)
class Banner:
    """One problem. ``level`` is "error", "warning" or "info"; ``page`` and ``query`` are where to go."""

    level: str
    text: str
    link: str
    page: str
    query: str = ""


def banners(facts: Facts) -> list[Banner]:
    """The problems that the facts tell."""
    checks: tuple[Callable[[Facts], Iterator[Banner]], ...] = (_migrations, _redis, _unserved, _overdue, _paused)
    found = [banner for check in checks for banner in check(facts)]
    return sorted(found, key=lambda banner: _SEVERITY.index(banner.level))


def _migrations(facts: Facts) -> Iterator[Banner]:
    names = facts.pending.facts
    if names:
        text = ngettext(
            "%(count)d migration is not applied: run migrate.",
            "%(count)d migrations are not applied: run migrate.",
            len(names),
        )
        yield Banner("error", text % {"count": len(names)}, _("Health"), "health")


def _redis(facts: Facts) -> Iterator[Banner]:
    redis = facts.redis.facts
    if redis is None or redis.reachable is None:
        return
    if not redis.reachable:
        text = _("Redis does not answer: messages are delivered from the database, less precisely.")
        yield Banner("error", text, _("Health"), "health")
        return
    health = redis.health
    if health is None:
        return
    if health.policy not in (None, "noeviction"):
        text = _("Redis may drop what waits in it: its maxmemory-policy is %(policy)s, and should be noeviction.")
        yield Banner("warning", text % {"policy": health.policy}, _("Health"), "health")
    if health.memory and health.max_memory and health.memory > MEMORY * health.max_memory:
        share = round(100 * health.memory / health.max_memory)
        text = _("Redis has used %(share)d %% of the memory that it may take.")
        yield Banner("warning", text % {"share": share}, _("Health"), "health")


def _unserved(facts: Facts) -> Iterator[Banner]:
    pulse, workers, paused = facts.pulse.facts, facts.workers.facts, facts.paused.facts
    if pulse is None or workers is None:
        return
    for name, queue in pulse.queues.items():
        if queue.overdue.count and not workers.serving(name) and name not in (paused or {}):
            text = _("No live worker serves queue %(queue)s, and %(count)s of its messages are overdue.")
            yield Banner("error", text % {"queue": name, "count": queue.overdue}, _("Workers"), "worker")


def _overdue(facts: Facts) -> Iterator[Banner]:
    pulse, paused = facts.pulse.facts, facts.paused.facts
    if pulse is None:
        return
    waiting = [q.oldest_overdue for name, q in pulse.queues.items() if q.oldest_overdue and name not in (paused or {})]
    if waiting and pulse.at - min(waiting) > timedelta(seconds=Limits().max_overdue_age):
        age = brief((pulse.at - min(waiting)).total_seconds())
        text = _("The oldest overdue message has waited for %(age)s.") % {"age": age}
        yield Banner("warning", text, _("Overdue messages"), "message", "is:overdue")


def _paused(facts: Facts) -> Iterator[Banner]:
    for queue in (facts.paused.facts or {}).values():
        yield Banner("info", _said(queue), _("Queues"), "queue")


def _said(queue: Queue) -> str:
    said = {"queue": queue.name, "since": moment(queue.paused_at, "seconds"), "actor": queue.paused_by or "?"}
    text = _("Queue %(queue)s is paused since %(since)s by %(actor)s")
    if queue.resumes_at is not None:
        said["until"] = moment(queue.resumes_at, "seconds")
        text = _("Queue %(queue)s is paused since %(since)s by %(actor)s until %(until)s")
    return text % said + (f": {queue.reason}" if queue.reason else ".")
