"""Runs the handler of one delivery. Only this module and ``batches`` catch the exceptions of handlers."""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import logging
import traceback
from asyncio import CancelledError
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import starmap
from types import FunctionType, MethodType
from typing import Any

from asgiref.sync import async_to_sync, sync_to_async
from django.db import connections
from django.db.transaction import TransactionManagementError

from ... import middleware, signals
from ...core import actors, failpoints, once, retry
from ...core.bounds import LENGTHS
from ...core.exceptions import HandlerTimeout, InvalidMessage, MessageCancelled, Superseded
from ...core.outcomes import (
    Ack,
    GiveUp,
    Outcome,
    Raised,
    Recorded,
    Release,
    Retry,
    Unentered,
    class_path,
    event,
    storable,
)
from ...project import validation
from ...project.answers import Reject, RetryLater
from ...record import transitions
from ...record.sql.rows import Success
from ...record.sql.sessions import conflict_in
from ..shared import guard
from ..shared.connections import note_error
from ..shared.due_services import backoff
from .delivery import Delivery, all_of
from .reporting import emit, logs_whole_errors, report_after_commit

logger = logging.getLogger("django_delayq")

# Types of values whose work may never have run when a handler returns one.
_UNRUN = (
    *(Generator, AsyncGenerator, map, filter, starmap, Future),
    *(partial, FunctionType, MethodType, contextlib.ContextDecorator, contextlib.AsyncContextDecorator),
)
_NO_KEY = contextlib.nullcontext()
# The usual outcome: the handler has returned, and no value is kept.
_DONE = Ack()
# The number of serialization failures and deadlocks of a message that cost no attempt.
MOST_CONFLICTS = 50
# The message is delivered again after 0.1 s, 0.2 s, 0.4 s …, and after this time at most. Seconds.
LONGEST_CONFLICT_WAIT = 5.0


def not_entered(delivery: Delivery) -> Release:
    """Return the release of a delivery whose handler got no connection or no transaction. It costs no attempt."""
    error = delivery.entry_error
    text = storable(f"no transaction for its handler: {type(error).__name__}: {_text(error)}")
    if conflict_in(error) is not None:
        # A SQLite file that somebody else has locked.
        return Release(text, timedelta(seconds=LONGEST_CONFLICT_WAIT))
    return Unentered(text)


def execute(delivery: Delivery, actor: str) -> Outcome:
    """Run the handler, and return the outcome."""
    outcome: Outcome | BaseException | None = None
    try:
        try:
            outcome = _run(delivery, actor)
            if isinstance(outcome, BaseException):
                outcome = _answered(delivery, outcome)
            if delivery.on_end is not None:
                delivery.on_end(outcome)
        finally:
            delivery.close()
    except HandlerTimeout as error:
        # The interrupt came after the handler had ended, and before close() could take it back.
        if outcome is None or isinstance(outcome, BaseException):
            return _failure(delivery, error, "ran longer than its timeout")
    return outcome


def _answered(delivery: Delivery, error: BaseException) -> Outcome:
    """Answer what a handler raised, and keep that until the end of the delivery."""
    outcome = answer(delivery, error)
    delivery.raised = error
    return outcome


def _run(delivery: Delivery, actor: str) -> Outcome | BaseException:
    """Run the handler. Return the outcome, or what it raised.

    The caller answers the error when no ``except`` block handles it any more: otherwise the errors of receivers and
    policies would have it in their chains, and their logged tracebacks would show it.
    """
    try:
        delivery.begin()
        chain = middleware.chain()
        with own_key(delivery):
            return _perform_inside(chain, delivery, actor) if chain else _perform(delivery, actor)
    except BaseException as error:  # noqa: BLE001
        # SystemExit and KeyboardInterrupt too: a handler does not end the worker.
        return error


async def execute_on_loop(delivery: Delivery, ended: Callable[[], Awaitable[None]]) -> Outcome:
    """Run an async handler in this task, and return the outcome. ``ended`` waits for the sync calls that it made."""
    try:
        outcome = await _run_on_loop(delivery)
        if isinstance(outcome, BaseException):
            outcome = _answered(delivery, outcome)
        # One of these calls may set ``on_end``.
        await ended()
        if delivery.on_end is not None:
            await sync_to_async(delivery.on_end)(outcome)
        return outcome
    finally:
        # A call that runs on belongs to this delivery: the next one must not overlap with it.
        await ended()
        delivery.close()


async def _run_on_loop(delivery: Delivery) -> Outcome | BaseException:
    """Await the handler as ``_run`` runs it."""
    try:
        delivery.begin()
        with own_key(delivery):
            return await _perform_on_loop(delivery)
    except BaseException as error:  # noqa: BLE001
        return error


async def _perform_on_loop(delivery: Delivery) -> Outcome:
    """Await the handler, inside of its middleware if there is any."""

    async def perform() -> Outcome:
        failpoints.reach("before_handler")
        returned = await delivery.await_with_timeout(delivery.handler.called, delivery)
        result = None if returned is None else _settle(delivery, returned)
        failpoints.reach("after_handler")
        delivery.decided = Ack(result)
        return delivery.decided

    chain = middleware.chain()
    if chain:
        contexts = (one.handling(delivery) for one in chain)
        return await middleware.await_inside(contexts, perform, partial(_decide, delivery))
    return await perform()


def own_key(delivery: Delivery) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the handler may schedule the next message under the key of its own."""
    if delivery.key is None:
        return _NO_KEY
    return actors.handling(delivery.using, delivery.topic, delivery.key, delivery.id)


def _perform_inside(chain: tuple[middleware.Middleware, ...], delivery: Delivery, actor: str) -> Outcome:
    """Run the handler inside of its middleware, which sees the outcome before it ends."""

    def perform() -> Outcome:
        delivery.decided = _perform(delivery, actor)
        return delivery.decided

    contexts = (one.handling(delivery) for one in chain)
    return middleware.run_inside(contexts, perform, partial(_decide, delivery))


def _decide(delivery: Delivery, error: BaseException) -> None:
    """Let what a handler raised decide its outcome, unless its success is recorded."""
    if not isinstance(delivery.decided, Recorded):
        delivery.decided, delivery.raised = answer(delivery, error), error


def _perform(delivery: Delivery, actor: str) -> Outcome:
    """Call the handler. A transactional one records its success, and commits, as its last statement."""
    if not delivery.handler.transactional:
        result = call(delivery)
        return _DONE if result is None else Ack(result)
    with delivery.transaction():
        result = call_in_transaction(delivery)
        # The last statement: a handler that swallowed a database error leaves a transaction that would be rolled back
        # without an error, and this statement is the one that raises it.
        failpoints.reach("before_succeed")
        success = Success(delivery.id, delivery.deliveries, actor, result)
        # A transaction around the handler's, as that of a test case, goes on.
        thread = delivery.thread_number if delivery.has_own_transaction else None
        if not transitions.commit_success(delivery.using, success, thread):
            raise Superseded
        failpoints.reach("after_succeed")
    failpoints.reach("after_commit")
    return Recorded()


def call_in_transaction(delivery: Delivery, batch: list[Delivery] | None = None) -> str | None:
    """Call a transactional handler as ``call`` does, and raise when it ends its transaction or leaves a block open.

    Django would take the end of the transaction for that of the open block, and commit nothing. On a connection that
    the handler has made anew only what it did there would be committed.
    """
    connection = connections[delivery.using]
    raw, savepoints, blocks = connection.connection, [*connection.savepoint_ids], [*connection.atomic_blocks]
    try:
        with connection.execute_wrapper(guard.refuse_end):
            result = call(delivery, batch)
        if connections[delivery.using] is not connection or connection.connection is not raw:
            raise TransactionManagementError("The handler closed the connection of its transaction.")
        if len(connection.atomic_blocks) > len(blocks):
            raise TransactionManagementError("The handler entered transaction.atomic() and did not leave it.")
    finally:
        if connection.connection is raw and connection.in_atomic_block:
            # The end of the next block is that of the transaction, or of a test case around it.
            connection.savepoint_ids[:], connection.atomic_blocks[:] = savepoints, blocks
    return result


def call(delivery: Delivery, batch: list[Delivery] | None = None) -> str | None:
    """Call the handler, with the deliveries of a batch if it takes them, and see to it that its work is done when this
    returns.

    Returns the result to keep, as JSON; None: there is none.
    """
    function, given = delivery.handler.called, delivery if batch is None else batch
    failpoints.reach("before_handler")
    try:
        if delivery.handler.is_async:
            returned = async_to_sync(delivery.await_with_timeout)(function, given)
        else:
            returned = function(given)
    finally:
        delivery.end_fork()
    result = None if returned is None else _settle(delivery, returned)
    failpoints.reach("after_handler")
    return result


def _settle(delivery: Delivery, returned: Any) -> str | None:
    """Await what a sync handler returned, and raise for work that nobody has run.

    Returns any other value as JSON if the handler keeps its results; else warns of the first one.
    """
    if inspect.isawaitable(returned):
        # For example, a decorator that knows nothing of async functions has returned the coroutine of one.
        returned = async_to_sync(delivery.await_with_timeout)(all_of, returned)
    if returned is None:
        return None
    if isinstance(returned, _UNRUN):
        if isinstance(returned, Generator):
            returned.close()
        elif isinstance(returned, Future):
            returned.cancel()
        raise TypeError(
            f"the handler returned a value of type {type(returned).__name__}, whose work may never run; "
            "return when the work is done, or return an awaitable, which the worker awaits"
        )
    if delivery.handler.keep_result:
        try:
            return validation.result(returned)
        except InvalidMessage as error:
            raise TypeError(f"what the handler returned cannot be kept: {error}") from None
    if once.is_first("ignored value", delivery.topic):
        logger.warning(
            "The handler of topic %s returned %s, which is ignored: the message is consumed; "
            "to fail, raise an exception",
            delivery.topic,
            returned if isinstance(returned, bool) else f"a value of type {type(returned).__name__}",
        )
    return None


def answer(delivery: Delivery, error: BaseException) -> Outcome:
    """Return the outcome of a delivery that raised, and tell the receivers of a failure about the exception."""
    note_error(error)
    if isinstance(delivery.decided, Recorded):
        # The effects are committed: another delivery would repeat them.
        delivery.note_error(error)
        report_after_commit(delivery, error)
        return delivery.decided
    if delivery.raised is error and delivery.decided is not None:
        return delivery.decided
    if delivery.entry_error is not None:
        return not_entered(delivery)
    if not isinstance(error, Superseded):
        delivery.note_error(error)
    outcome = outcome_of(delivery, error)
    if not isinstance(outcome, Retry | GiveUp):
        return outcome
    if signals.message_failed.receivers and event(outcome) != "released":
        attempt, fate = delivery.attempt, delivery.fate(outcome)
        try:
            emit(signals.message_failed, delivery, exception=error, attempt=attempt, outcome=fate)
        except HandlerTimeout:
            # The handler itself has ended: nothing changes of what becomes of the message.
            logger.error("A receiver of message_failed ran past the timeout of topic %s, and was ended", delivery.topic)
    shown = error if logs_whole_errors() else None
    return replace(outcome, cause=Raised(shown, contextvars.copy_context()))


def outcome_of(delivery: Delivery, error: BaseException) -> Outcome:
    """Return the outcome of a delivery whose handler raised ``error``."""
    match error:
        case HandlerTimeout():
            # A handler may raise one of its own.
            of = "" if delivery.timeout is None else f" of {delivery.timeout:g} s"
            return _failure(delivery, error, f"ran longer than its timeout{of}")
        case Superseded():
            return Release(str(error))
        # A subclass may lack what it does not pass on to ``super().__init__()``.
        case RetryLater(delay=timedelta(), counts=_, payload=str() | None):
            return _retry_later(delivery, error)
        case Reject():
            text = _text(getattr(error, "reason", error))
            return GiveUp(storable(f"Reject: {text}"), exception=class_path(error))
        case MessageCancelled() if delivery.cancel_requested:
            return Release("the handler stopped")
        case CancelledError() if delivery.cancel_reason:
            return Release(delivery.cancel_reason)
        case _:
            return _conflict(delivery, error) or _failure(delivery, error)


def _failure(delivery: Delivery, error: BaseException, text: str = "") -> Outcome:
    """Return the outcome of a delivery that raised: another attempt, or none."""
    described = storable(f"{type(error).__name__}: {text or _text(error)}")
    trace = storable("".join(_trace(error)), LENGTHS.traceback)
    try:
        delay = delivery.policy.delay(delivery.attempt, error)
    except BaseException as raised:
        # A retry policy that raises, or runs past the timeout, must not decide the fate of a message.
        told = raised is not error or logs_whole_errors()
        logger.error("The retry policy of topic %s failed; the default policy decides", delivery.topic, exc_info=told)
        delay = retry.DEFAULT.limited(delivery.claimed.max_attempts).delay(delivery.attempt)
    path = class_path(error)
    return GiveUp(described, trace, path) if delay is None else Retry(delay, described, trace, exception=path)


def _conflict(delivery: Delivery, error: BaseException) -> Release | None:
    """Return the release of a delivery whose transaction another one got in the way of; None for any other failure.

    Nothing has happened in the database, so it costs no attempt, unless that has happened to the message many times.
    """
    conflicts = delivery.claimed.conflicts
    met = conflict_in(error) if delivery.handler.transactional and conflicts < MOST_CONFLICTS else None
    if met is None:
        return None
    wait = timedelta(seconds=backoff(conflicts + 1, LONGEST_CONFLICT_WAIT))
    return Release(storable(f"its transaction met another one: {type(met).__name__}"), wait, conflict=True)


def _retry_later(delivery: Delivery, error: RetryLater) -> Outcome:
    """Return the outcome of a handler that raised ``RetryLater``."""
    limit = delivery.policy.max_attempts
    described = storable(f"RetryLater: {_text(error)}")
    if error.counts and limit is not None and delivery.attempt >= limit:
        text = f"{described} (attempt {delivery.attempt} of {limit})"
        return GiveUp(text, exception=class_path(error), payload=error.payload)
    delay = min(error.delay, validation.FARTHEST)
    return Retry(delay, described, counts=bool(error.counts), exception=class_path(error), payload=error.payload)


def _trace(error: BaseException) -> list[str]:
    try:
        return traceback.format_exception(error)
    except Exception:  # noqa: BLE001
        # For example, a SyntaxError whose line number is none.
        return traceback.format_tb(error.__traceback__)


def _text(error: object) -> str:
    try:
        return str(error)
    except BaseException:  # noqa: BLE001
        return "(its text cannot be read)"


def timed_out(delivery: Delivery) -> Outcome:
    """Return the outcome of a delivery whose handler does not end at its timeout. Its process is about to end."""
    outcome = _failure(delivery, HandlerTimeout(), "did not end at its timeout; its process ended")
    if isinstance(outcome, Retry):
        # The process lives on for a moment: the next delivery must not overlap with it.
        return Retry(max(outcome.delay, timedelta(seconds=1)), outcome.error, exception=outcome.exception)
    return outcome
