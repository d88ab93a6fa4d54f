"""Stops queues and lets them go on. The claim itself looks, so that every worker obeys."""

from __future__ import annotations

import logging
import time
from datetime import datetime, timedelta
from typing import Any

from asgiref.sync import sync_to_async
from django.db import Error as DatabaseError
from django.db import router, transaction

from . import actors, transitions, validation
from .durations import Duration
from .exceptions import InvalidMessage
from .models import Message, Queue
from .outcomes import storable
from .sql.moves import writing

logger = logging.getLogger("django_delayq")

# How long a pause waits for claims that were under way when it was committed. They take a few ms. Seconds.
UNDER_WAY = 2.0


def pause_queue(
    name: str,
    *,
    until: datetime | None = None,
    duration: Duration | None = None,
    reason: str = "",
    using: str | None = None,
) -> Queue:
    """Pause a queue: once this has returned, no worker takes a message of it any more.

    What is running goes on and its outcome is recorded; messages can be scheduled, cancelled and expire as before.
    Those that fall due wait. ``until`` (an aware datetime) or ``duration`` ends the pause by itself; without either
    it lasts until ``resume_queue``. A queue that is paused already gets the new end and reason.

    In a transaction it is true from the commit on. Raises ``InvalidMessage`` for an impossible name or time.
    """
    name = validation.queue(name)
    if until is not None and duration is not None:
        raise InvalidMessage("give until or duration, not both")
    if until is not None:
        until = validation.due(until)
    lasting = None if duration is None else validation.delay(duration)
    using = using or router.db_for_write(Message)
    queue = _pause(using, name, until, lasting, storable(reason))
    transaction.on_commit(lambda: _await_claims(using), using=using)
    return queue


def resume_queue(name: str, *, using: str | None = None) -> bool:
    """Let a paused queue go on: workers see it within about a second. Returns whether it was paused."""
    using = using or router.db_for_write(Message)
    rows = Queue.objects.using(using).filter(name=validation.queue(name))
    was_paused = rows.filter(Queue.PAUSED).exists()
    rows.delete()
    return was_paused


async def apause_queue(name: str, **options: Any) -> Queue:
    """``pause_queue`` for async code; the same arguments."""
    return await sync_to_async(pause_queue, thread_sensitive=True)(name, **options)


async def aresume_queue(name: str, *, using: str | None = None) -> bool:
    """``resume_queue`` for async code."""
    return await sync_to_async(resume_queue, thread_sensitive=True)(name, using=using)


def paused(using: str) -> dict[str, Queue]:
    """The queues that are paused now, by name."""
    return {queue.name: queue for queue in Queue.objects.using(using).filter(Queue.PAUSED).order_by("name")}


def _pause(using: str, name: str, until: datetime | None, lasting: timedelta | None, reason: str) -> Queue:
    rows = Queue.objects.using(using)
    with writing(using):
        now = transitions.now(using)
        if lasting is not None:
            until = now + lasting
        if until is not None and until <= now:
            raise InvalidMessage("the pause would be over already")
        # One that is over is another pause.
        rows.filter(name=name).exclude(Queue.PAUSED).delete()
        facts = {"resumes_at": until, "paused_by": actors.current(), "reason": reason}
        queue, _created = rows.update_or_create(name=name, defaults=facts, create_defaults={"paused_at": now, **facts})
    return queue


def _await_claims(using: str) -> None:
    """Claims that began before the pause was committed do not see it: let them end."""
    deadline = time.monotonic() + UNDER_WAY
    try:
        begun = transitions.claims_under_way(using)
        while begun and time.monotonic() < deadline:
            time.sleep(0.005)
            begun &= transitions.claims_under_way(using)
        if begun:
            logger.warning("The queue is paused, but a claim that began before has not ended in %g s", UNDER_WAY)
    except DatabaseError as error:
        logger.warning("The queue is paused, but claims under way could not be awaited: %s", error)
