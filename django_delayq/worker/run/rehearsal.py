"""Rehearses a delivery: runs a transactional handler on a real message, and takes back all that it has written.

No state changes, no outcome is recorded, and nothing is committed: no function on commit runs, Redis learns nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.db import connections, transaction

from ... import middleware
from ...core.exceptions import DelayqError
from ...core.names import near
from ...core.outcomes import Ack, GiveUp, Outcome, Release, Retry
from ...core.states import REQUEUEABLE, State
from ...models import Message
from ...project import registry
from ...record import reads
from ...record.sql.moves import locked
from ...record.sql.rows import Claimed
from .delivery import Delivery
from .executor import call_in_transaction, outcome_of, own_key


class NotRehearsable(DelayqError):
    """The message cannot be rehearsed; the text says why."""


class RehearsedDelivery(Delivery):
    """A delivery that has no lease."""

    __slots__ = ()

    def _extend_lease(self, lease: float) -> None:
        pass


class Notes(middleware.Middleware):
    """The statements that a handler sends, ``using`` this alias or others.

    A message that it schedules is a comment: the statements for that pass Django's cursors by.
    """

    def __init__(self, using: str) -> None:
        self.using = using
        self.statements: list[str] = []

    def scheduling(self, drafts: Sequence[middleware.Draft]) -> contextlib.AbstractContextManager[Any]:
        self.statements += [f"-- schedules a message of topic {draft.topic} in queue {draft.queue}" for draft in drafts]
        return contextlib.nullcontext()

    def note(self, execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: dict[str, Any]) -> Any:
        """Note a statement with its parameters. An execute wrapper of Django."""
        connection, noted, place = context["connection"], self.statements, len(self.statements)
        noted.append(str(sql))
        try:
            return execute(sql, params, many, context)
        finally:
            if not many:
                with contextlib.suppress(Exception):
                    # One that was refused was not sent.
                    sent = connection.ops.last_executed_query(context["cursor"].cursor, sql, params)
                    noted[place] = sent or noted[place]
            if connection.alias != self.using:
                noted[place] = f"[{connection.alias}] {noted[place]}"


class Rehearsal(NamedTuple):
    """What a delivery of a message would have done now."""

    topic: str
    # "consumed", "retried", "released", "dead" or "cancelled".
    outcome: str
    # What the handler has raised, in the words of the log, and when it would be tried again.
    error: str
    delay: timedelta | None
    traceback: str
    # The SQL that the handler sent, in its order, with a comment for each message that it scheduled.
    statements: list[str]


def rehearse(using: str, message_id: int) -> Rehearsal:
    """Run the handler of a message in a transaction, roll that back, and return what happened.

    It runs in this thread, without a timeout. What it does outside of the database of the message stays.
    Raises ``NotRehearsable``.
    """
    notes = Notes(using)
    with transaction.atomic(using=using):
        message = _locked(using, message_id)
        handler = _handler_of(message)
        claimed = _as_claimed(message, reads.now(using))
        delivery = RehearsedDelivery(claimed, handler, using)
        outcome = _run(delivery, notes)
        word = delivery.fate(outcome)
        if connections[using].in_atomic_block:
            # A handler that made the connection anew has ended the block.
            transaction.set_rollback(True, using=using)
    statements = notes.statements
    match outcome:
        case Retry() | GiveUp():
            delay = outcome.delay if isinstance(outcome, Retry) else None
            return Rehearsal(message.topic, word, outcome.error, delay, outcome.traceback, statements)
        case Release():
            return Rehearsal(message.topic, word, outcome.reason, outcome.delay, "", statements)
    return Rehearsal(message.topic, word, "", None, "", statements)


def _locked(using: str, message_id: int) -> Message:
    """Return the message, locked against the workers."""
    rows = Message.objects.using(using).filter(pk=message_id)
    found = locked(using, rows, wait=False).first()
    if found is None:
        why = "is locked by another transaction: it is about to run or to change" if rows.exists() else "does not exist"
        raise NotRehearsable(f"Message {message_id} {why}.")
    if found.state == State.RUNNING:
        raise NotRehearsable(f"Message {message_id} is running: wait for the end of its delivery.")
    return found


def _handler_of(message: Message) -> registry.Handler:
    """Return the handler of a message. Raises ``NotRehearsable`` when that cannot be rehearsed."""
    handler = registry.find(message.topic)
    if handler is None:
        like = near(message.topic, registry.handlers())
        hint = f" Did you mean {like}?" if like else ""
        raise NotRehearsable(f"No handler here receives the topic {message.topic}.{hint}")
    for is_so, why in (
        (not handler.transactional, "is not transactional: what it does would stay"),
        (handler.is_async, "is async: what it has started could go on after the rollback"),
        (handler.batch > 1, "takes batches: its outcome depends on all messages of one"),
    ):
        if is_so:
            raise NotRehearsable(f"The handler of topic {message.topic} {why}.")
    return handler


def _as_claimed(message: Message, now: datetime) -> Claimed:
    """Return the message as its next delivery has it: after a requeue, if it has ended."""
    values: dict[str, Any] = {name: getattr(message, name, None) for name in Claimed._fields}
    values |= {"claimed_at": now, "deliveries": message.deliveries + 1}
    if message.state in REQUEUEABLE:
        values |= {"attempts": 0, "conflicts": 0, "excused": message.deliveries - message.reported}
    if message.is_expired(now):
        values["expires_at"] = None
    return Claimed(**values)


def _run(delivery: Delivery, notes: Notes) -> Outcome:
    """Run the handler as a worker does, and return the outcome, which nobody else learns of."""

    def decide(error: BaseException) -> None:
        delivery.decided = outcome_of(delivery, error)

    def perform() -> None:
        _perform(delivery, notes)
        delivery.decided = Ack()

    middleware.install(notes)
    try:
        delivery.begin()
        with own_key(delivery):
            middleware.run_inside((one.handling(delivery) for one in middleware.chain()), perform, decide)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # noqa: BLE001
        decide(error)
    finally:
        middleware.remove(notes)
    outcome = delivery.decided
    delivery.close()
    assert outcome is not None
    return outcome


def _perform(delivery: Delivery, notes: Notes) -> None:
    """Call the handler, and do what the commit would do."""
    connection = connections[delivery.using]
    with transaction.atomic(using=delivery.using):
        with contextlib.ExitStack() as stack:
            for alias in connections:
                stack.enter_context(connections[alias].execute_wrapper(notes.note))
            call_in_transaction(delivery)
        # As the commit does: constraints that are deferred are checked, and a failed transaction fails.
        connection.check_constraints()
