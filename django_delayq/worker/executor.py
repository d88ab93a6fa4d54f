"""Runs the handler of one delivery. No other module catches the exceptions of handlers."""

from __future__ import annotations

import contextlib
import inspect
import logging
import traceback
from collections.abc import AsyncGenerator, Generator
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from itertools import starmap
from types import FunctionType, MethodType
from typing import Any

from asgiref.sync import async_to_sync
from django.db import transaction

from .. import failpoints, retry, transitions
from ..exceptions import HandlerTimeout, Reject, RetryLater, Superseded
from ..outcomes import TRACEBACK_LIMIT, Ack, GiveUp, Outcome, Recorded, Release, Retry, storable
from ..sql.rows import Success
from ..sql.sessions import is_conflict
from . import guard
from .delivery import Delivery
from .service import backoff

logger = logging.getLogger("django_delayq")

# Types of values whose work may never have run when a handler returns one.
_UNRUN = (
    *(Generator, AsyncGenerator, map, filter, starmap, Future),
    *(partial, FunctionType, MethodType, contextlib.ContextDecorator, contextlib.AsyncContextDecorator),
)
# The topics whose handlers returned a value, which was logged.
_returning: set[str] = set()
# A serialization failure or a deadlock costs no attempt in the first deliveries of a message, and is repeated after at
# most this time (seconds): 0.1 s, 0.2 s, 0.4 s …, as errors of services are.
MOST_CONFLICTS = 50
LONGEST_CONFLICT_WAIT = 5.0


def execute(delivery: Delivery, actor: str) -> Outcome:
    """Run the handler, and return the outcome."""
    returned: Outcome | None = None
    try:
        try:
            delivery.begin()
            returned = _perform(delivery, actor)
        except HandlerTimeout as error:
            delivery.note_interrupt()
            return _failure(delivery, error, f"ran longer than its timeout of {delivery.timeout:g} s")
        except Superseded as error:
            return Release(str(error))
        except RetryLater as error:
            return _retry_later(delivery, error)
        except Reject as error:
            return GiveUp(storable(f"Reject: {_text(error.reason)}"))
        except BaseException as error:  # noqa: BLE001
            # SystemExit and KeyboardInterrupt too: a handler does not end the worker.
            return _conflict(delivery, error) or _failure(delivery, error)
        finally:
            delivery.close()
    except HandlerTimeout as error:
        # The interrupt came after the handler had ended, and before close() could wait for it.
        return returned or _failure(delivery, error, "ran longer than its timeout")
    return returned


def _perform(delivery: Delivery, actor: str) -> Outcome:
    if not delivery.handler.transactional:
        _call(delivery)
        return Ack()
    with transaction.atomic(using=delivery.using, durable=True):
        _call_in_transaction(delivery)
        # The last statement: a handler that swallowed a database error leaves a transaction that would be rolled back
        # without an error, and this statement is the one that raises it.
        failpoints.reach("before_succeed")
        if not transitions.succeed(delivery.using, [Success(delivery.id, delivery.deliveries, actor)]):
            raise Superseded
        failpoints.reach("after_succeed")
    failpoints.reach("after_commit")
    return Recorded()


def _call_in_transaction(delivery: Delivery) -> None:
    """Call the handler in its transaction, and reject a message whose handler ended that by hand and then failed."""
    with guard.HandlersTransaction(delivery.using) as guarded:
        try:
            _call(delivery)
        except Exception as error:
            if guarded.has_ended:
                # Another delivery would repeat effects that are committed already.
                raise Reject(f"committed its transaction by hand, and then {type(error).__name__}") from error
            raise
        if guarded.has_ended:
            logger.error("The handler of topic %s ended its transaction by hand; effects may repeat", delivery.topic)


def _call(delivery: Delivery) -> None:
    function = delivery.handler.function
    failpoints.reach("before_handler")
    try:
        if delivery.handler.is_async:
            returned = async_to_sync(delivery.await_with_timeout)(function)
        else:
            returned = function(delivery)
    finally:
        delivery.end_fork()
    if returned is not None:
        _settle(delivery, returned)
    failpoints.reach("after_handler")


def _settle(delivery: Delivery, returned: Any) -> None:
    """Await what a sync handler returned, raise for work that nobody has run, and warn once of any other value."""
    if inspect.isawaitable(returned):
        # For example, a decorator that knows nothing of async functions has returned the coroutine of one.
        returned = async_to_sync(delivery.await_with_timeout)(lambda _message: returned)
    if returned is None:
        return
    if isinstance(returned, _UNRUN):
        if isinstance(returned, Generator):
            returned.close()
        elif isinstance(returned, Future):
            returned.cancel()
        raise TypeError(
            f"the handler returned a value of type {type(returned).__name__}, whose work may never run; "
            "return when the work is done, or return an awaitable, which the worker awaits"
        )
    if delivery.topic not in _returning:
        _returning.add(delivery.topic)
        logger.warning(
            "The handler of topic %s returned %s, which is ignored: the message is consumed; "
            "to fail, raise an exception",
            delivery.topic,
            returned if isinstance(returned, bool) else f"a value of type {type(returned).__name__}",
        )


def _failure(delivery: Delivery, error: BaseException, text: str = "") -> Outcome:
    described = storable(f"{type(error).__name__}: {text or _text(error)}")
    trace = storable("".join(traceback.format_exception(error)), TRACEBACK_LIMIT)
    try:
        delay = delivery.policy.delay(delivery.attempt, error)
    except Exception:
        # A retry policy that raises must not decide the fate of a message.
        logger.exception("The retry policy of topic %s failed; the default policy decides", delivery.topic)
        delay = retry.DEFAULT.limited(delivery.claimed.max_attempts).delay(delivery.attempt)
    return GiveUp(described, trace) if delay is None else Retry(delay, described, trace)


def _conflict(delivery: Delivery, error: BaseException) -> Release | None:
    """Return the release of a delivery whose transaction another one got in the way of; None for any other failure.

    Nothing has happened in the database, so it costs no attempt, unless many deliveries of the message cost none.
    """
    uncounted = delivery.claimed.reported - delivery.claimed.attempts
    if not delivery.handler.transactional or uncounted >= MOST_CONFLICTS or not is_conflict(error):
        return None
    wait = backoff(uncounted + 1, LONGEST_CONFLICT_WAIT)
    return Release(storable(f"its transaction met another one: {_text(error)}"), timedelta(seconds=wait))


def _retry_later(delivery: Delivery, error: RetryLater) -> Outcome:
    limit = delivery.policy.max_attempts
    described = storable(f"RetryLater: {_text(error)}")
    if error.counts and limit is not None and delivery.attempt >= limit:
        return GiveUp(f"{described} (attempt {delivery.attempt} of {limit})")
    return Retry(min(error.delay, retry.LONGEST), described, counts=error.counts)


def _text(error: object) -> str:
    try:
        return str(error)
    except BaseException:  # noqa: BLE001
        return "(its text cannot be read)"


def timed_out(delivery: Delivery) -> Outcome:
    """Return the outcome of a delivery whose handler does not end at its timeout. Its process is about to end."""
    outcome = _failure(delivery, HandlerTimeout(), "did not end at its timeout; its process was replaced")
    if isinstance(outcome, Retry):
        # The process lives on for a moment: the next delivery must not overlap with it.
        return Retry(max(outcome.delay, timedelta(seconds=1)), outcome.error)
    return outcome
