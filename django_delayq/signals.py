"""The signals that other code may listen to.

Every signal is sent by ``send_robust`` with the ``Message`` class as its ``sender``: a receiver that raises is logged
and harms nothing. (One exception: when the database refuses what a receiver of ``operator_action`` writes, the action
is not done, and a command exits with an error; ``delayq_act`` has done it by then.) The arguments are plain values,
never the payload; only ``message_failed`` has an object, the exception. Two signals are sent in the handler's thread:
``message_delivered`` before it starts, and ``message_failed`` when it has raised, in its context and inside of its
middleware. Each other signal is sent after the transaction that made it true has committed, but for
``operator_action`` of commands (other than ``delayq_act``) and of pages of schedules and tokens, which is sent in it;
a worker sends those of outcomes in a thread of their own.

==========================  ==================================================================
signal                      arguments
==========================  ==================================================================
``message_scheduled``       message_id, topic, queue, due_at, using
``message_delivered``       message_id, topic, queue, delivery, lateness (seconds), using
``message_failed``          message_id, topic, queue, delivery, attempt, exception, outcome, using
``message_succeeded``       message_id, topic, queue, delivery, runtime (seconds), using
``message_retried``         message_id, topic, queue, delivery, due_at, error, using
``message_dead``            message_id, topic, queue, delivery, error, using
``message_cancelled``       message_id, topic, queue, using
``message_expired``         message_id, topic, queue, using
``messages_restored``       queue, found, put, actor, using
``operator_action``         action, target, message_id, reason, outcomes (text → count), actor, using
==========================  ==================================================================
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from django.db import DatabaseError, InterfaceError, connections
from django.dispatch import Signal

from .core import actors
from .core.commits import on_commit
from .core.states import State

if TYPE_CHECKING:
    from .record.sql.rows import Moved

logger = logging.getLogger("django_delayq")

message_scheduled = Signal()
message_delivered = Signal()
message_failed = Signal()
message_succeeded = Signal()
message_retried = Signal()
message_dead = Signal()
message_cancelled = Signal()
message_expired = Signal()
messages_restored = Signal()
operator_action = Signal()


def emit(signal: Signal, sender: Any, **arguments: Any) -> list[Exception]:
    """Call the receivers of a signal; log those that fail, go on, and return their errors."""
    failed: list[Exception] = []
    if not signal.receivers:
        return failed
    try:
        answers = signal.send_robust(sender, **arguments)
    except Exception as error:
        # ``send_robust`` has called the sync receivers by then.
        logger.exception("Async receivers of a signal were not called: it was sent on an event loop")
        return [error]
    for receiver, answer in answers:
        # send_robust catches Exception only, and returns it.
        if isinstance(answer, Exception):
            logger.error("A signal receiver failed: %r", receiver, exc_info=answer)
            failed.append(answer)
    return failed


def emit_action(
    sender: Any,
    using: str,
    action: str,
    target: str,
    *,
    message_id: int | None = None,
    reason: str = "",
    outcomes: Mapping[str, int] | None = None,
) -> None:
    """Send ``operator_action``: the current actor did this to this target (in words), with these outcomes.

    Raises the error of a receiver that the database refused: an action without its audit must not look complete.
    """
    said = {"action": action, "target": target, "message_id": message_id, "reason": reason}
    told = {"outcomes": dict(outcomes or {}), "actor": actors.current(), "using": using}
    for error in emit(operator_action, sender, **said, **told):
        if isinstance(error, DatabaseError | InterfaceError):
            raise error
    if connections[using].in_atomic_block:
        # A receiver may have hidden an error, after which PostgreSQL rolls back at the commit without a word.
        with connections[using].cursor() as cursor:
            cursor.execute("SELECT 1")


def emit_on_commit(signal: Signal, sender: Any, using: str, **arguments: Any) -> None:
    """Call the receivers of a signal when the transaction on ``using`` commits; at once outside of one."""

    def emit_now() -> None:
        emit(signal, sender, using=using, **arguments)

    on_commit(using, emit_now)


class MessageFacts(Protocol):
    """The attributes that every view of a message has: the model, and the rows of a move or a delivery."""

    @property
    def id(self) -> int: ...
    @property
    def topic(self) -> str: ...
    @property
    def queue(self) -> str: ...


def message_arguments(message: MessageFacts, using: str) -> dict[str, Any]:
    """Return the arguments that every signal about one message has."""
    return {"message_id": message.id, "topic": message.topic, "queue": message.queue, "using": using}


def emit_end(sender: Any, moved: Moved, using: str, error: str = "") -> None:
    """Send the signal of a message that is dead, cancelled or expired; none for a message in another state."""
    if moved.after == State.DEAD:
        arguments = message_arguments(moved, using)
        emit(message_dead, sender, delivery=moved.deliveries, error=error or moved.reason, **arguments)
    elif moved.after == State.CANCELLED:
        emit(message_cancelled, sender, **message_arguments(moved, using))
    elif moved.after == State.EXPIRED:
        emit(message_expired, sender, **message_arguments(moved, using))
