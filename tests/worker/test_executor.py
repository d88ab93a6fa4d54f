"""The outcome of a handler: work that nobody has run is run or fails, and the policy answers what it raises."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from asgiref.sync import sync_to_async
from django.db import connection, transaction

from django_delayq import Reject, RetryLater, RetryPolicy, handler, schedule_message, signals
from django_delayq.core.outcomes import Ack, GiveUp, Outcome, Recorded, Release, Retry, Unentered
from django_delayq.core.states import State
from django_delayq.middleware import Middleware
from django_delayq.models import Message
from django_delayq.project import registry
from django_delayq.record import transitions
from django_delayq.record.sql.rows import Ticket
from django_delayq.worker.run.delivery import Delivery
from django_delayq.worker.shared.connections import after_task
from tests.app.handlers import leave
from tests.app.models import Effect
from tests.support.claims import DB, claimed, needs_row_locks
from tests.support.middlewares import installed
from tests.support.receivers import heard, receiving
from tests.support.rows import unguarded
from tests.support.workers import PATIENCE
from tests.worker.bench import TOPIC, cut, delivery_to, execute, raises, returns, run

pytestmark = pytest.mark.django_db(transaction=True)


# --- conflicts --------------------------------------------------------------------------------------------------------


class Serialization(Exception):
    """The error of a driver whose transaction met another one."""

    sqlstate = "40001"


@pytest.mark.parametrize(("conflicts", "counts"), [(0, False), (49, False), (50, True)])
def test_a_conflict_costs_no_attempt_until_that_has_happened_fifty_times(conflicts: int, counts: bool) -> None:
    handler(TOPIC, transactional=True, retry=False)(raises(Serialization("of card 4711")))
    message = schedule_message(TOPIC)
    # As after many deliveries that cost no attempt for other reasons.
    uncounted = {"deliveries": 99, "reported": 99, "conflicts": conflicts}
    unguarded(Message).filter(pk=message.pk).update(**uncounted)
    (row,) = transitions.claim(DB, [Ticket(message.pk)], {TOPIC: 60.0}, "w")
    outcome = execute(Delivery(row, registry.handlers()[TOPIC], DB))
    assert isinstance(outcome, GiveUp if counts else Release)
    assert counts or outcome.conflict  # type: ignore[union-attr]
    # It is logged, and what the handler raised may hold secrets.
    assert counts or outcome.reason == "its transaction met another one: Serialization"  # type: ignore[union-attr]


# --- awaitables -------------------------------------------------------------------------------------------------------


async def affect(message: Delivery) -> None:
    await asyncio.sleep(0)
    await sync_to_async(leave)(message)


class Lazy:
    """An awaitable that is no coroutine."""

    def __init__(self, message: Delivery) -> None:
        self.message = message

    def __await__(self) -> Generator[Any, None, None]:
        return affect(self.message).__await__()


def decorated(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Decorate a function as if it were a plain one, whatever it is."""

    @functools.wraps(function)
    def call(message: Delivery) -> Any:
        return function(message)

    return call


async def twice(message: Delivery) -> Awaitable[None]:
    return affect(message)


async def in_a_task(message: Delivery) -> Awaitable[None]:
    return asyncio.create_task(affect(message))


async def gathered(message: Delivery) -> Awaitable[Any]:
    return asyncio.gather(affect(message))


AWAITED: dict[str, Callable[[Any], Any]] = {
    "coroutine": decorated(affect),
    "awaitable": decorated(Lazy),
    "async that returns a coroutine": twice,
    "async that returns a task": in_a_task,
    "async that returns a gather": gathered,
    "async that returns an awaitable by a sync one": decorated(twice),
}


@pytest.mark.parametrize("transactional", [False, True], ids=["plain", "transactional"])
@pytest.mark.parametrize("name", AWAITED)
def test_an_awaitable_that_a_handler_returns_is_awaited_before_the_message_is_consumed(
    name: str, transactional: bool
) -> None:
    outcome = run(AWAITED[name], transactional=transactional)
    assert outcome == (Recorded() if transactional else Ack())
    assert Effect.objects.count() == 1


def test_a_returned_awaitable_is_not_interrupted_like_a_sync_handler() -> None:
    """The interrupt of a thread that waits for an event loop would come when the loop has ended."""
    interrupted = []

    async def look(message: Delivery) -> None:
        message.interrupt()
        interrupted.append(message._is_interrupted)

    assert run(decorated(look)) == Ack()
    assert interrupted == [False]


# --- work that nobody runs --------------------------------------------------------------------------------------------


def generator(message: Delivery) -> Iterator[None]:
    try:
        leave(message)
        yield
        leave(message, "never reached")
    finally:
        leave(message, "closed")


def begun(message: Delivery) -> Iterator[None]:
    there = generator(message)
    next(there)
    return there


async def async_generator(message: Delivery) -> AsyncIterator[None]:
    leave(message, "never reached")
    yield


async def async_that_returns_a_generator(message: Delivery) -> Any:
    return generator(message)


UNRUN: dict[str, Callable[[Any], Any]] = {
    "generator": decorated(generator),
    "async generator": decorated(async_generator),
    "generator of an async handler": async_that_returns_a_generator,
    "map": lambda message: map(leave, [message]),
    "filter": lambda message: filter(leave, [message]),
    "starmap": lambda message: itertools.starmap(leave, [(message,)]),
    "future": lambda message: Future(),
    "partial": lambda message: functools.partial(leave, message),
    "function": lambda message: lambda: leave(message),
    "method": lambda message: message.extend,
    "context manager": contextlib.contextmanager(generator),
    "async context manager": contextlib.asynccontextmanager(async_generator),
}


@pytest.mark.parametrize("transactional", [False, True], ids=["plain", "transactional"])
@pytest.mark.parametrize("name", UNRUN)
def test_work_that_a_handler_returns_and_nobody_runs_is_a_failure(name: str, transactional: bool) -> None:
    error = error_of(run(UNRUN[name], transactional=transactional))
    assert error.startswith("TypeError: the handler returned a value of type ")
    assert "whose work may never run" in error
    assert not Effect.objects.exists()


def test_a_generator_that_a_handler_returns_half_way_is_closed_and_a_future_is_cancelled() -> None:
    assert "type generator" in error_of(run(begun))
    assert list(Effect.objects.order_by("pk").values_list("note", flat=True)) == ["", "closed"]
    future: Future[None] = Future()
    assert "type Future" in error_of(run(returns(future)))
    assert future.cancelled()


def error_of(outcome: Outcome) -> str:
    assert isinstance(outcome, Retry)
    return outcome.error


# --- other values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "shown"),
    [(False, "False"), (True, "True"), (0, "a value of type int"), ("secret", "a value of type str"), (None, "")],
)
def test_a_value_that_a_handler_returns_is_warned_of_once(
    value: object, shown: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _delivery in range(2):
        assert run(returns(value)) == Ack()
    told = (
        f"The handler of topic {TOPIC} returned {shown}, which is ignored: the message is consumed; "
        "to fail, raise an exception"
    )
    assert [record.getMessage() for record in caplog.records] == ([told] if shown else [])


# --- failures and the retry policy ------------------------------------------------------------------------------------


class Busy(ConnectionError): ...


@pytest.mark.parametrize("own", [None, {"fixed": [7, 7]}], ids=["the handler's", "the message's own"])
@pytest.mark.parametrize(
    ("error", "is_retried"),
    [(ConnectionError(), True), (Busy(), False), (ValueError(), False), (RetryLater("5m"), True)],
    ids=repr,
)
def test_only_exceptions_that_the_handlers_policy_names_are_retried(
    own: dict[str, Any] | None, error: Exception, is_retried: bool
) -> None:
    policy = RetryPolicy.fixed(["7s", "7s"], on=(OSError,), never=Busy)
    delivery = delivery_to(raises(error), retry=policy)
    delivery.claimed = delivery.claimed._replace(retry=own)
    outcome = execute(delivery)
    if is_retried:
        assert isinstance(outcome, Retry)
        assert outcome.delay.total_seconds() == (300 if isinstance(error, RetryLater) else 7)
    else:
        assert isinstance(outcome, GiveUp)


def with_terms(delivery: Delivery, **terms: Any) -> Delivery:
    """Return a delivery whose message brings other terms."""
    return Delivery(delivery.claimed._replace(**terms), delivery.handler, DB)


def test_a_delivery_knows_how_many_attempts_are_left_and_when_its_message_expires() -> None:
    delivery = delivery_to(leave, retry=["1s", "1s", "1s"])
    assert (delivery.attempt, delivery.attempts_left, delivery.expires_at) == (1, 3, None)
    until = delivery.due_at + timedelta(hours=1)
    later = with_terms(delivery, attempts=1, max_attempts=3, expires_at=until)
    assert (later.attempt, later.attempts_left, later.expires_at) == (2, 1, until)
    last = with_terms(delivery, attempts=5, retry={"fixed": []})
    assert (last.attempt, last.attempts_left) == (6, 0)
    delivery.handler = delivery.handler._replace(own_retry=RetryPolicy.exponential(max_attempts=None))
    assert delivery.attempts_left is None


# --- timeout and lease ------------------------------------------------------------------------------------------------


def test_a_message_brings_its_own_timeout_and_lease() -> None:
    delivery = delivery_to(leave, timeout="1m", lease="2m")
    assert (delivery.timeout, delivery.lease) == (60, 120)
    own = with_terms(delivery, timeout=5.0, lease=30.0)
    assert (own.timeout, own.lease) == (5, 30)
    endless = with_terms(delivery, timeout=0.0)
    endless.begin()
    assert (endless.timeout, endless.deadline) == (None, None)
    own.leased_mono -= 31
    assert execute(own) == Release("lease ran out before it began")


def spend(message: Delivery) -> None:
    """Do what takes time. The watch looks at this delivery meanwhile, as it may have before."""
    message.interrupt()
    for _step in range(1000):
        time.monotonic()


def outlast_in_thread(message: Delivery) -> None:
    while True:
        spend(message)


async def outlast_on_loop(message: Delivery) -> None:
    await asyncio.sleep(PATIENCE)


@pytest.mark.parametrize("outlast", [outlast_in_thread, outlast_on_loop])
def test_a_tracer_goes_on_after_a_timeout(outlast: Callable[[Any], Any]) -> None:
    """While CPython 3.11 believes that an interrupt is on its way, a call under a tracer never ends."""
    assert isinstance(run(outlast, retry=False, timeout="10ms"), GiveUp)

    def trace() -> None:
        sys.settrace(lambda *_event: None)
        returns(None)

    traced = threading.Thread(target=trace, daemon=True)
    traced.start()
    traced.join(PATIENCE)
    assert not traced.is_alive()


def test_what_follows_a_timeout_is_not_interrupted_again() -> None:
    told: list[str] = []

    class CleansUp(Middleware):
        @contextlib.contextmanager
        def handling(self, message: Any) -> Iterator[None]:
            try:
                yield
            finally:
                spend(message)
                told.append("middleware")

    def note(**facts: Any) -> None:
        spend(delivery)
        told.append("receiver")

    def outlast(message: Delivery) -> None:
        while True:
            spend(message)

    delivery = delivery_to(outlast, timeout="1h", retry=["1s"])
    with receiving(note, signals.message_failed), installed(CleansUp()):
        error = error_of(execute(delivery))
    assert told == ["receiver", "middleware"]
    assert error.startswith("HandlerTimeout")


@pytest.mark.parametrize("place", ["receiver", "policy"])
def test_what_answers_a_failure_and_runs_past_the_timeout_changes_nothing_of_it(place: str) -> None:
    def outlast(*args: Any, **facts: Any) -> None:
        spend(delivery)
        pytest.fail("It was not interrupted.")

    policy = outlast if place == "policy" else ["1h"]
    delivery = delivery_to(raises(ValueError("no")), timeout="1h", retry=policy)
    with receiving(outlast, *([signals.message_failed] if place == "receiver" else [])):
        outcome = execute(delivery)
    assert isinstance(outcome, Retry)
    assert outcome.error == "ValueError: no"
    assert place == "policy" or outcome.delay == timedelta(hours=1)


# --- the transaction --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_handler_whose_transaction_cannot_begin_is_not_called_and_loses_no_attempt(asynchronous: bool) -> None:
    needs_row_locks()
    called: list[str] = []

    async def call(message: Any) -> None:
        called.append("async")

    function: Callable[[Any], Any] = call if asynchronous else lambda message: called.append("sync")
    delivery = delivery_to(function, transactional=True, retry=False)
    cut()
    outcome = execute(delivery)
    assert isinstance(outcome, Unentered)
    assert (called, outcome.delay) == ([], None)
    assert outcome.reason.startswith("no transaction for its handler: ")
    # The connection that broke is replaced.
    (delivery,) = claimed(TOPIC)
    assert execute(delivery) == Recorded()


def test_a_connection_that_breaks_in_a_handler_is_a_failure_of_the_handler() -> None:
    needs_row_locks()

    def lose_the_connection(message: Delivery) -> None:
        leave(message)
        cut()
        leave(message)

    outcome = run(lose_the_connection, transactional=True, retry=False)
    assert isinstance(outcome, GiveUp)
    assert outcome.error.startswith("OperationalError: ")


def test_a_connection_that_a_handler_makes_anew_is_a_failure() -> None:
    def connect(message: Delivery) -> None:
        leave(message)
        connection.close()
        connection.connect()

    outcome = run(connect, transactional=True, retry=False)
    assert isinstance(outcome, GiveUp)
    assert outcome.error.startswith("TransactionManagementError: The handler closed the connection")
    after_task()
    assert not Effect.objects.exists()


def test_a_block_that_a_handler_leaves_open_is_a_failure_and_undoes_its_effects() -> None:
    def leave_open(message: Delivery) -> None:
        leave(message)
        transaction.atomic().__enter__()

    # The first success of a session is recorded by another statement than the following ones.
    for _ in range(2):
        outcome = run(leave_open, transactional=True, retry=False)
        assert isinstance(outcome, GiveUp)
        assert outcome.error.startswith("TransactionManagementError: The handler entered transaction.atomic()")
        after_task()
    assert not Effect.objects.exists()


def test_a_block_that_a_handler_leaves_open_ends_with_it_in_a_transaction_around_it(db: None) -> None:
    """As that of a test case."""

    def leave_open(message: Delivery) -> None:
        leave(message)
        transaction.atomic().__enter__()

    with transaction.atomic():
        run(leave_open, transactional=True, retry=False)
        assert not Effect.objects.exists()
        assert connection.in_atomic_block
    assert not connection.in_atomic_block


def test_a_handler_has_the_isolation_and_the_access_that_its_connection_asks_for() -> None:
    needs_row_locks()
    found = []

    def ask(message: Any) -> None:
        with connection.cursor() as cursor:
            for name in ("transaction_isolation", "transaction_read_only", "transaction_deferrable"):
                cursor.execute(f"SHOW {name}")
                found.append(cursor.fetchone()[0])
        raise Reject("a transaction that only reads records no success")

    delivery = delivery_to(ask, transactional=True)
    raw = connection.connection
    raw.isolation_level, raw.read_only, raw.deferrable = psycopg.IsolationLevel.SERIALIZABLE, True, True
    assert isinstance(execute(delivery), GiveUp)
    connection.close()
    assert found == ["serializable", "on", "on"]


@pytest.mark.parametrize("is_pooled", [False, True], ids=["direct", "pooled"])
def test_a_handler_may_choose_the_isolation_of_its_transaction(
    is_pooled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_row_locks()
    monkeypatch.setitem(connection.settings_dict, "DISABLE_SERVER_SIDE_CURSORS", is_pooled)

    def choose(message: Delivery) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
        leave(message)

    # The first delivery of a thread is also the first statement of its connection.
    for delivery in [delivery_to(choose, transactional=True, retry=False) for _ in range(2)]:
        connection.close()
        assert [execute(delivery), Effect.objects.filter(message_id=delivery.id).count()] == [Recorded(), 1]
    assert run(choose, transactional=True, retry=False) == Recorded()


SECRET = "the secret of order 4711"


class Careless(Exception): ...


def fail_on_commit(message: Delivery) -> None:
    def fail() -> None:
        raise Careless(SECRET)

    leave(message)
    transaction.on_commit(fail)


async def fail_on_commit_async(message: Delivery) -> None:
    await sync_to_async(fail_on_commit)(message)


@pytest.mark.parametrize("whole", [True, False], ids=["whole errors", "without texts"])
@pytest.mark.parametrize("surrounded", [False, True], ids=["bare", "inside of middleware"])
@pytest.mark.parametrize("function", [fail_on_commit, fail_on_commit_async])
def test_an_error_on_commit_is_logged_and_the_message_stays_consumed(
    function: Callable[[Any], Any],
    surrounded: bool,
    whole: bool,
    settings: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "LOG_ERRORS": whole}
    with heard(signals.message_failed) as failed, installed(Middleware()) if surrounded else contextlib.nullcontext():
        assert run(function, transactional=True, retry=False) == Recorded()
    (message,) = Message.objects.all()
    assert (message.state, Effect.objects.count(), failed) == (State.CONSUMED, 1, [])
    (record,) = caplog.records
    line = record.getMessage()
    assert f"topic={TOPIC}" in line
    assert "error=Careless" in line
    # Where it happened is told in any case, and the text of the error only where errors are logged whole.
    assert "in fail\n" in caplog.text
    assert (SECRET in caplog.text) is whole


def test_a_timeout_that_ends_functions_on_commit_leaves_the_message_consumed(caplog: pytest.LogCaptureFixture) -> None:
    def outlast(message: Delivery) -> None:
        transaction.on_commit(message.interrupt)
        transaction.on_commit(wait_for_ever)

    def wait_for_ever() -> None:
        while True:
            time.sleep(0.001)

    assert run(outlast, transactional=True, retry=False, timeout="1h") == Recorded()
    assert "error=HandlerTimeout" in caplog.text
