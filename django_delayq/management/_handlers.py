"""The part of ``delayq_check`` that lists the topics that this project handles, and those that nobody does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.db import DatabaseError, InterfaceError

from ..core.durations import brief
from ..core.retry import RetryPolicy
from ..inspector.lines import limit_facts
from ..inspector.unserved import topics_without_handler
from ..inspector.worker_list import list_workers
from ..project import registry
from ..project.registry import Handler
from ..record import transitions
from ..record.sql.troubles import in_words
from . import _common as common

HEAD = ("TOPIC", "FUNCTION", "QUEUE", "RETRY", "TIMEOUT", "LEASE", "LIMIT", "TRANSACTIONAL")


def list_handlers(command: common.DelayqCommand, using: str, options: dict[str, Any]) -> None:
    """List the handlers, and warn of topics of waiting messages that have none here and in no live worker."""
    handlers = [handler for _topic, handler in sorted(registry.handlers().items())]
    unhandled = _unhandled(command, using)
    if options["json"]:
        command.say_json(
            database=using,
            handlers=[_plain(handler) for handler in handlers],
            unhandled=None if unhandled is None else [*unhandled],
        )
    elif handlers:
        for line in _table([HEAD, *map(_row, handlers)]):
            command.say(line)
    else:
        command.say("This project has no handlers.")
    for topic, like in (unhandled or {}).items():
        meant = f" Did you mean {like}?" if like else ""
        text = f"Messages of topic {topic} wait, and no handler is known for it.{meant}"
        command.stderr.write(text, command.style.WARNING)


def _unhandled(command: common.DelayqCommand, using: str) -> dict[str, str | None] | None:
    """Return the topics that nobody handles; None when the database cannot be asked, which is no error here."""
    try:
        return topics_without_handler(using, list_workers(using, transitions.now(using)))
    except (DatabaseError, InterfaceError) as error:
        command.stderr.write(f"Waiting messages were not looked at: {in_words(error)}", command.style.WARNING)
        return None


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _row(handler: Handler) -> tuple[str, ...]:
    return (
        handler.topic,
        f"{handler.name} (async)" if handler.is_async else handler.name,
        registry.default_queue(handler.topic),
        _described(handler.retry),
        "none" if handler.timeout is None else brief(handler.timeout),
        brief(handler.lease),
        _limit(handler),
        "yes" if handler.transactional else "no",
    )


def _limit(handler: Handler) -> str:
    """Return the limit of a topic in words."""
    if handler.limit is None:
        return "none"
    return f"{handler.limit}, each key" if handler.limit_key else str(handler.limit)


def _plain(handler: Handler) -> dict[str, Any]:
    policy = handler.retry
    return {
        "topic": handler.topic,
        "function": handler.name,
        "async": handler.is_async,
        "queue": registry.default_queue(handler.topic),
        # A policy that is a function has no other form than its words.
        "retry": _described(policy) if policy.chooser is not None else policy.to_json(),
        "timeout": handler.timeout,
        "lease": handler.lease,
        "limit": limit_facts(handler.limit),
        "limit_by_key": handler.limit_key is not None,
        "transactional": handler.transactional,
    }


def _described(policy: RetryPolicy) -> str:
    """Return a retry policy in words."""
    if policy.kind == "fixed":
        words = "after " + ", ".join(map(brief, policy.delays)) if policy.delays else "never"
    elif policy.kind == "exponential":
        words = f"after {brief(policy.base)}, × {policy.factor:g} each time, at most {brief(policy.cap)}"
    else:
        words = f"as {getattr(policy.chooser, '__qualname__', 'a function')} says"
    return words if policy.max_attempts is None else f"{words}, {policy.max_attempts} attempts"
