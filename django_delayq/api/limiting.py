"""Overrides limits, and resets them. Each claim looks for changes of limits, so every worker obeys."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.db import router

from ..core import actors, limits
from ..core.bounds import LENGTHS
from ..core.clock import iso
from ..core.commits import on_commit
from ..core.durations import Duration
from ..core.exceptions import InvalidMessage
from ..core.twins import async_twin
from ..models import LimitOverride, Message
from ..project import validation
from ..record import overrides, reads
from ..record.sql import limit_statements
from ..record.sql.moves import writing
from . import pausing


def override_limit(
    *,
    topic: str | None = None,
    limit_key: str | int | None = None,
    queue: str | None = None,
    limit: int | None = None,
    rate: str | None = None,
    burst: int | None = None,
    until: datetime | None = None,
    duration: Duration | None = None,
    reason: str = "",
    using: str | None = None,
) -> LimitOverride:
    """Change the limit of a topic, of one ``limit_key`` of a topic, or of a queue, in all workers.

    ``limit``, ``rate`` and ``burst`` mean what they mean in the code; those that are not given stay as the code
    declares them, or leaves them undeclared. ``limit=0`` pauses: no delivery begins, and what runs goes on. ``until``
    (an aware datetime) or ``duration`` ends the override by itself; without either it lasts until ``reset_limit``. The
    override of a topic counts for each limit key by itself, and one of a key goes before it, unless the topic is
    paused.

    Once this has returned, or the caller's transaction is committed, workers begin nothing by the former limit; within
    a second they begin what the new one allows. Deliveries that run already count. Workers of version 0.9.0 know no
    overrides. The signal ``operator_action`` is sent on commit. Raises ``InvalidMessage`` for impossible values.
    """
    using = using or router.db_for_write(Message)
    name = name_of(topic=topic, limit_key=limit_key, queue=queue)
    made = override(using, name, limit=limit, rate=rate, burst=burst, until=until, duration=duration, reason=reason)
    pausing.tell(using, "override", name, made.reason)
    return made


def reset_limit(
    *,
    topic: str | None = None,
    limit_key: str | int | None = None,
    queue: str | None = None,
    reason: str = "",
    using: str | None = None,
) -> bool:
    """End an override: within a second workers go by the declaration in the code. Return whether there was one.

    If there was, the signal ``operator_action`` is sent on commit, with the ``reason``.
    """
    using = using or router.db_for_write(Message)
    name, reason = name_of(topic=topic, limit_key=limit_key, queue=queue), validation.reason(reason)
    was_overridden = reset(using, name)
    if was_overridden:
        pausing.tell(using, "reset", name, reason)
    return was_overridden


aoverride_limit = async_twin(override_limit)
areset_limit = async_twin(reset_limit)


def name_of(*, topic: str | None = None, limit_key: str | int | None = None, queue: str | None = None) -> str:
    """Return the name of the limit that a call means. Raises ``InvalidMessage``."""
    if (topic is None) == (queue is None) or (limit_key is not None and topic is None):
        raise InvalidMessage("give the topic, with a limit_key or without, or the queue")
    if topic is None:
        return limits.queue_name(validation.queue(queue))
    return limits.topic_name(validation.topic(topic), None if limit_key is None else validation.limit_key(limit_key))


def override(
    using: str,
    name: str,
    *,
    limit: int | None = None,
    rate: str | None = None,
    burst: int | None = None,
    until: datetime | None = None,
    duration: Duration | None = None,
    reason: str = "",
) -> LimitOverride:
    """Do what ``override_limit`` does, but send no signal: the caller records the action."""
    if limit is None and not rate and burst is None:
        raise InvalidMessage("give a limit, a rate or a burst")
    try:
        limits.override(None, limit, rate or "", burst)
        if rate and len(rate) > LENGTHS.rate:
            raise ValueError(f"rate must have at most {LENGTHS.rate} characters")
    except ValueError as error:
        raise InvalidMessage(str(error)) from error
    row = LimitOverride(name=name, limit=limit, rate=rate or "", burst=burst, reason=validation.reason(reason))
    row.set_by = actors.current()
    with writing(using):
        row.since = reads.now(using)
        row.until = pausing.end_of(row.since, until, duration, "override")
        _replace(using, row)
    on_commit(using, _obey, using, row)
    return row


def reset(using: str, name: str) -> bool:
    """Do what ``reset_limit`` does, but send no signal: the caller records the action."""
    with writing(using):
        was_overridden = LimitOverride.objects.using(using).filter(LimitOverride.IN_FORCE, name=name).exists()
        if was_overridden:
            # A row that is over tells the workers of the change.
            now = reads.now(using)
            _replace(using, LimitOverride(name=name, since=now, until=now))
    return was_overridden


def _replace(using: str, row: LimitOverride) -> None:
    limit_statements(using).lock_overrides()
    LimitOverride.objects.using(using).filter(name=row.name).delete()
    row.save(using=using, force_insert=True)
    overrides.doubt(using)


def _obey(using: str, row: LimitOverride) -> None:
    pausing.await_claims(using, pausing.PATIENCE)
    limit_statements(using).take_permits(row)


def in_force(using: str) -> dict[str, LimitOverride]:
    """Return the overrides that are in force now, by the names of their limits."""
    overrides.read(using)
    return dict(sorted(overrides.known(using).in_force.items()))


def described(row: LimitOverride) -> str:
    """Return in one line what an override says, until when it holds, by whom it was made and why."""
    said = "paused" if row.is_pause else ", ".join(f"{name} {value}" for name, value in _values(row).items() if value)
    return f"{said} {pausing.lasting(row.until, 'it is reset', row.set_by, row.reason)}"


def facts(row: LimitOverride) -> dict[str, Any]:
    """Return an override for ``--json``."""
    times = {"since": iso(row.since), "until": iso(row.until)}
    return {"name": row.name, **_values(row), **times, "by": row.set_by, "reason": row.reason}


def _values(row: LimitOverride) -> dict[str, Any]:
    return {"limit": row.limit, "rate": row.rate or None, "burst": row.burst}
