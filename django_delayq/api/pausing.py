"""Pauses and resumes queues. The claim itself checks for a pause, so every worker obeys."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import Any

from django.db import Error as DatabaseError
from django.db import router

from .. import signals
from ..core import actors
from ..core.clock import iso
from ..core.commits import on_commit
from ..core.durations import Duration
from ..core.exceptions import InvalidMessage
from ..core.names import near
from ..core.outcomes import storable
from ..core.twins import async_twin
from ..models import Message, Queue
from ..project import registry, validation
from ..record import reads
from ..record.sql import statements
from ..record.sql.moves import writing

logger = logging.getLogger("django_delayq")

# The longest time that a pause waits for claims that were under way when it was committed. They take a few ms. Seconds.
PATIENCE = 2.0


def pause_queue(
    name: str,
    *,
    until: datetime | None = None,
    duration: Duration | None = None,
    reason: str = "",
    using: str | None = None,
) -> Queue:
    """Pause a queue: once this has returned, no worker claims a message of the queue any more.

    Running messages go on and their outcomes are recorded; messages can be scheduled, cancelled and expire as before.
    Messages that fall due wait. ``until`` (an aware datetime) or ``duration`` ends the pause by itself; without either
    it lasts until ``resume_queue``. A queue that is paused already gets the new end and reason.

    In a transaction the pause begins with the commit. Then the signal ``operator_action`` is sent, so that the audit
    names who paused the queue. A queue that nothing names yet is paused, too; the log asks about one that is like a
    known queue. Raises ``InvalidMessage`` for an impossible name or time.
    """
    using = using or router.db_for_write(Message)
    queue = pause(using, name, until=until, duration=duration, reason=reason)
    if like := _meant(using, queue.name):
        unknown = "no setting and no handler names it, and no message waits in it"
        logger.warning("The queue %s is paused: %s. Did you mean %s?", queue.name, unknown, like)
    tell(using, "pause", queue.name, queue.reason)
    return queue


def resume_queue(name: str, *, reason: str = "", using: str | None = None) -> bool:
    """Resume a paused queue: workers see it within about a second. Return whether the queue was paused.

    If it was, the signal ``operator_action`` is sent on commit, with the ``reason``. If it was not, and nothing knows
    the queue, the log asks about a paused one that is like it.
    """
    using = using or router.db_for_write(Message)
    reason = validation.reason(reason)
    was_paused = resume(using, name)
    if was_paused:
        tell(using, "resume", name, reason)
    elif like := _meant(using, name, paused(using)):
        logger.warning("The queue %s was not paused. Did you mean %s, which is paused?", name, like)
    return was_paused


def _meant(using: str, name: str, among: Collection[str] | None = None) -> str | None:
    """Return the queue that a caller probably means; None when ``name`` is known or resembles no known queue.

    Settings, handlers and waiting messages make queues known. With ``among`` the answer is one of these.
    """
    known = registry.queues()
    if name in known:
        return None
    known.update(statements(using).queues())
    return None if name in known else near(name, known if among is None else among)


apause_queue = async_twin(pause_queue)
aresume_queue = async_twin(resume_queue)


def tell(using: str, action: str, name: str, reason: str) -> None:
    """Tell on commit what was done to a queue or a limit."""
    facts: dict[str, Any] = {"message_id": None, "outcomes": {}, "actor": actors.current()}
    signals.emit_on_commit(
        signals.operator_action, Message, action=action, target=name, reason=reason, using=using, **facts
    )


def pause(
    using: str,
    name: str,
    *,
    until: datetime | None = None,
    duration: Duration | None = None,
    reason: str = "",
    patience: float = PATIENCE,
) -> Queue:
    """Do what ``pause_queue`` does, but send no signal: the caller records the action.

    It waits for claims that are under way, ``patience`` seconds at most.
    """
    name = validation.queue(name)
    reason = validation.reason(reason)
    rows = Queue.objects.using(using)
    with writing(using):
        now = reads.now(using)
        until = end_of(now, until, duration, "pause")
        # The row may be left from a pause that is over: this pause has a beginning of its own.
        rows.filter(name=name).exclude(Queue.PAUSED).delete()
        values = {"resumes_at": until, "paused_by": actors.current(), "reason": reason}
        created = {"paused_at": now, **values}
        queue, _created = rows.update_or_create(name=name, defaults=values, create_defaults=created)
    on_commit(using, await_claims, using, patience)
    return queue


def end_of(now: datetime, until: datetime | None, duration: Duration | None, what: str) -> datetime | None:
    """Return the time at which a pause or an override ends by itself; None: never. Raises ``InvalidMessage``."""
    if until is not None and duration is not None:
        raise InvalidMessage("give until or duration, not both")
    if until is not None:
        until = validation.due(until, "until")
    if duration is not None:
        until = now + validation.delay(duration, "duration")
    if until is not None and until <= now:
        raise InvalidMessage(f"the {what} would be over already")
    return until


def resume(using: str, name: str) -> bool:
    """Do what ``resume_queue`` does, but send no signal: the caller records the action."""
    rows = Queue.objects.using(using).filter(name=validation.queue(name))
    was_paused = rows.filter(Queue.PAUSED).exists()
    rows.delete()
    return was_paused


def paused(using: str) -> dict[str, Queue]:
    """Return the queues that are paused now, by name."""
    return {queue.name: queue for queue in Queue.objects.using(using).filter(Queue.PAUSED).order_by("name")}


def described(queue: Queue) -> str:
    """Return in one line until when a queue is paused, by whom and why."""
    return lasting(queue.resumes_at, "it is resumed", queue.paused_by, queue.reason)


def lasting(until: datetime | None, ended_by: str, actor: str, reason: str) -> str:
    """Return in one line until when something holds, by whom it was made and why. ``ended_by`` ends it otherwise."""
    text = f"until {iso(until) or ended_by}" + (f", by {actor}" if actor else "")
    return f"{text}: {' '.join(reason.split())}" if reason else text


def log_paused(queue: Queue) -> None:
    """Log, for a worker that serves a queue, that it is paused."""
    logger.info("The queue %s is paused %s: its messages wait", queue.name, described(queue))


def hold(using: str, names: Sequence[str], *, holder: str, seconds: float | None, reason: str) -> None:
    """Pause those of the queues that are not paused, for ``seconds`` (None: until ``release``).

    Once this has returned, or the caller's transaction was committed, no worker claims a message of them any more.
    """
    rows = Queue.objects.using(using).filter(name__in=names)
    with writing(using):
        now = reads.now(using)
        until = None if seconds is None else now + timedelta(seconds=seconds)
        rows.filter(paused_by=holder, resumes_at__isnull=False).update(resumes_at=until)
        rows.exclude(Queue.PAUSED).delete()
        held = set(rows.values_list("name", flat=True))
        fresh = [
            Queue(name=name, paused_at=now, resumes_at=until, paused_by=holder, reason=storable(reason))
            for name in names
            if name not in held
        ]
        # Somebody may pause one of them at this moment.
        Queue.objects.using(using).bulk_create(fresh, ignore_conflicts=True)
    if fresh:
        on_commit(using, await_claims, using, PATIENCE)


def take_over(using: str, name: str, holder: str) -> None:
    """Give the pause of a queue to this holder, also if somebody else made it: it lasts until ``release``."""
    Queue.objects.using(using).filter(Queue.PAUSED, name=name).update(paused_by=holder, resumes_at=None)


def release(using: str, holder: str) -> None:
    """End the pauses of this holder, by ``hold`` or ``take_over``; pauses that somebody else made or changed go on."""
    Queue.objects.using(using).filter(paused_by=holder).delete()


def await_claims(using: str, patience: float, interval: float = 0.005) -> None:
    """Wait up to ``patience`` seconds for the claims that began before the pause was committed: they do not see it.

    The database is asked every ``interval`` seconds whether they have ended.
    """
    deadline = time.monotonic() + patience
    try:
        begun = statements(using).claims_under_way()
        while begun and time.monotonic() < deadline:
            time.sleep(interval)
            begun &= statements(using).claims_under_way()
        if begun:
            logger.warning(
                "The queue is paused, but a claim from before has not ended within %g s and may start messages",
                patience,
            )
    except DatabaseError as error:
        logger.warning("The queue is paused; claims from before may start messages for a moment: %s", error)
