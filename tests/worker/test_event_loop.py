"""The event loop: async handlers beside each other, their timeouts and cancellations, and the sync code they call."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from functools import partial
from queue import Queue
from typing import Any

import pytest
from asgiref.sync import SyncToAsync, sync_to_async
from django.conf import settings
from django.db import DatabaseError, connection, connections
from django.utils import translation

from django_delayq import MessageCancelled, Reject, aschedule_message, cancel_message, handler, signals, worker_started
from django_delayq.core.states import State
from django_delayq.models import Transition
from django_delayq.project import process_start, registry
from django_delayq.project.registry import Delivered
from django_delayq.worker.processes.process import Parts
from django_delayq.worker.run import event_loop, sync_calls
from django_delayq.worker.run.delivery import Delivery
from django_delayq.worker.run.event_loop import EventLoop, LoopWatch
from django_delayq.worker.run.pool import TimeoutWatch
from django_delayq.worker.run.recorder import LeaseRenewer
from django_delayq.worker.run.run_tuning import RunTuning
from tests.app.handlers import leave
from tests.app.models import Effect
from tests.support import claims
from tests.support.assembled import Assemble
from tests.support.claims import DB, last_move, state
from tests.support.receivers import receiving
from tests.support.refused_threads import refused
from tests.support.workers import PATIENCE, eventually

pytestmark = pytest.mark.django_db(transaction=True)

TOPIC = "integration.loop"
Run = Callable[..., list[Delivery]]
Cancelled = Callable[..., Delivery]


@pytest.fixture
def parts(assembled: Assemble) -> Iterator[Parts]:
    """A worker with two threads and 50 places on the loop, which run."""
    parts = assembled(2, tasks=50)
    parts.pool.start()
    yield parts
    loop = loop_of(parts)
    # With those that a test has left, neither the thread nor the process of the tests would end.
    for task in list(loop._tasks):
        call_soon(parts, task.cancel)
    parts.pool.wait_idle(60)
    parts.pool.stop()
    loop.thread.join(60)
    assert not loop.thread.is_alive()


def loop_of(parts: Parts) -> EventLoop:
    assert isinstance(parts.pool.loop, EventLoop)
    return parts.pool.loop


def call_soon(parts: Parts, function: Callable[[], Any]) -> None:
    """Have a function called on the loop."""
    loop = loop_of(parts)._loop
    assert loop is not None
    loop.call_soon_threadsafe(function)


@pytest.fixture
def submit(parts: Parts) -> Run:
    """Register a handler, and submit deliveries to it."""

    def submit(function: Callable[[Any], Any], number: int = 1, **terms: Any) -> list[Delivery]:
        handler(TOPIC, **terms)(function)
        deliveries = claims.claimed(*[TOPIC] * number)
        parts.pool.submit(deliveries)
        return deliveries

    return submit


@pytest.fixture
def run(parts: Parts, submit: Run) -> Run:
    """Register a handler, and run it for messages until their outcomes are recorded."""

    def run(function: Callable[[Any], Any], number: int = 1, **terms: Any) -> list[Delivery]:
        deliveries = submit(function, number, **terms)
        finish(parts)
        return deliveries

    return run


def finish(parts: Parts) -> None:
    """Wait until the outcomes of all deliveries are recorded."""
    assert parts.pool.wait_idle(60)
    assert parts.recorder.flush(60)


def request_cancel(parts: Parts, delivery: Delivery) -> None:
    """Request a cancel, and have the worker hear of it."""
    cancel_message(delivery.id)
    delivery.claimed_mono -= 2.0
    LeaseRenewer(DB, parts.pool.held).tick()


@pytest.fixture
def cancelled(parts: Parts, submit: Run) -> Cancelled:
    """Run a handler, and request a cancel when it has begun: its task is cancelled."""

    def cancel(function: Callable[[Any], Any], **terms: Any) -> Delivery:
        begun: Queue[asyncio.Task[Any]] = Queue()
        heard = threading.Event()

        async def begin(message: Delivered) -> None:
            task = asyncio.current_task()
            assert task is not None
            begun.put(task)
            await function(message)

        (one,) = submit(begin, **terms)
        task = begun.get(timeout=60)
        request_cancel(parts, one)
        loop = task.get_loop()
        with suppress(RuntimeError):
            # The loop of a transactional handler ends with it.
            loop.call_soon_threadsafe(heard.set)
            eventually(lambda: heard.is_set() or loop.is_closed(), "the loop has heard of the request")
        is_cancelled = bool(task.cancelling())
        if not is_cancelled:
            # Else the handler, and with it the process of the tests, would not end.
            loop.call_soon_threadsafe(task.cancel)
        assert is_cancelled
        return one

    return cancel


async def outlast(message: Delivered) -> None:
    await asyncio.Event().wait()


# --- beside each other ------------------------------------------------------------------------------------------------


def test_async_handlers_run_beside_each_other_up_to_the_concurrency(parts: Parts, submit: Run) -> None:
    gates: dict[int, asyncio.Event] = {}
    opened = threading.Event()

    async def wait(message: Delivered) -> None:
        gate = gates[message.id] = asyncio.Event()
        if not opened.is_set():
            await gate.wait()

    deliveries = submit(wait, 60)
    eventually(lambda: len(gates) == 50, "as many handlers as there are places")
    assert parts.pool.shared.begun == set(gates)
    call_soon(parts, gates[deliveries[0].id].set)
    eventually(lambda: len(gates) == 51, "the next one in the free place")
    assert parts.pool.shared.begun == set(gates)
    opened.set()
    for gate in list(gates.values()):
        call_soon(parts, gate.set)
    finish(parts)
    assert {state(delivery) for delivery in deliveries} == {State.CONSUMED}


def test_a_loop_that_runs_nothing_takes_on_no_more(parts: Parts, submit: Run) -> None:
    """It is on time while it waits for a claim, whatever its handlers do to each other when they run."""
    loop = loop_of(parts)
    submit(_pass)
    for _ in range(6):
        assert parts.pool.wait_idle(60)
        eventually(lambda: loop._pace_at is None, "the last appointment is over")
        parts.pool.submit(claims.claimed(TOPIC))
    assert loop.slots < 50


def test_a_process_without_async_handlers_has_no_event_loop(
    assembled: Assemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = {topic: one for topic, one in registry.handlers().items() if not one.runs_on_loop}
    monkeypatch.setattr(registry, "declared", sync)
    assert assembled(tasks=50).pool.loop is None


def test_a_transactional_async_handler_runs_in_a_thread(run: Run) -> None:
    threads = []

    async def note(message: Delivered) -> None:
        threads.append(threading.current_thread().name)
        await sync_to_async(leave)(message)

    (one,) = run(note, transactional=True)
    assert "delayq-event-loop" not in threads
    assert (state(one), Effect.objects.count()) == (State.CONSUMED, 1)


def test_what_a_handler_sets_in_its_context_ends_with_it_and_the_actor_is_the_loop(run: Run) -> None:
    number: contextvars.ContextVar[int] = contextvars.ContextVar("number", default=0)
    seen = []

    async def change(message: Delivered) -> None:
        seen.append((number.get(), translation.get_language()))
        number.set(message.id)
        translation.activate("de")
        await asyncio.sleep(0)
        assert (number.get(), translation.get_language()) == (message.id, "de")
        await aschedule_message("t.ok", delay=3600)

    deliveries = run(change, 20)
    assert {state(delivery) for delivery in deliveries} == {State.CONSUMED}
    assert set(seen) == {(0, settings.LANGUAGE_CODE)}
    assert set(Transition.objects.filter(message__topic="t.ok").values_list("actor")) == {("worker:w/async",)}


def test_a_task_that_tries_to_end_the_worker_does_not(parts: Parts, run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def leave() -> None:
        raise SystemExit(3)

    async def start(message: Delivered) -> None:
        if message.deliveries == 1:
            await asyncio.wait([asyncio.create_task(leave())])

    first, second = run(start, 2)
    assert (state(first), state(second)) == (State.CONSUMED, State.CONSUMED)
    assert "tried to end the worker" in caplog.text


# --- timeouts, cancellation and the end of the process ----------------------------------------------------------------


@pytest.mark.parametrize("transactional", [False, True])
def test_a_handler_that_extends_after_its_timeout_is_cancelled_at_the_next(run: Run, transactional: bool) -> None:
    caught = []

    async def go_on(message: Delivered) -> None:
        try:
            # The timeout does not end before this block has begun.
            await message.aextend(0.2)
            await outlast(message)
        except asyncio.CancelledError:
            caught.append("first")
            try:
                await message.aextend(0.2)
                await outlast(message)
            except asyncio.CancelledError:
                caught.append("second")
                await message.aextend(60)

    (one,) = run(go_on, timeout=PATIENCE, retry=False, transactional=transactional)
    assert (state(one), caught) == (State.CONSUMED, ["first", "second"])


@pytest.mark.parametrize("transactional", [False, True])
def test_the_traceback_of_a_timeout_shows_where_the_handler_waited(run: Run, transactional: bool) -> None:
    (one,) = run(outlast, timeout=0.2, retry=False, transactional=transactional)
    end = last_move(one)
    assert end.exception == "django_delayq.core.exceptions.HandlerTimeout"
    assert "in outlast" in end.traceback


def test_a_requested_cancel_cancels_the_task_of_a_transactional_handler(parts: Parts, cancelled: Cancelled) -> None:
    # On SQLite, the open transaction would keep the cancel from writing.
    claims.needs_row_locks()
    one = cancelled(outlast, transactional=True)
    finish(parts)
    assert (state(one), one.cancel_requested) == (State.CANCELLED, True)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
@pytest.mark.parametrize("is_async", [True, False])
def test_a_receiver_of_a_failure_that_raises_anything_gives_no_attempt_that_the_policy_refuses(
    run: Run, is_async: bool, error: type[BaseException]
) -> None:
    def receiver(**_facts: Any) -> None:
        raise error

    async def fail(message: Delivered) -> None:
        raise ValueError

    def fail_in_a_thread(message: Delivered) -> None:
        raise ValueError

    with receiving(receiver, signals.message_failed):
        deliveries = run(fail if is_async else fail_in_a_thread, 2, retry=False)
    assert {state(delivery) for delivery in deliveries} == {State.DEAD}


def test_an_async_receiver_of_a_failure_hinders_no_outcome(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def receiver(**_facts: Any) -> None: ...

    async def reject(message: Delivered) -> None:
        raise Reject("no")

    with receiving(receiver, signals.message_failed):
        (one,) = run(reject)
    assert state(one) == State.DEAD
    assert "Async receivers of a signal were not called" in caplog.text


def test_a_cancel_that_was_requested_before_the_handler_began_cancels_it(parts: Parts, submit: Run) -> None:
    begun = threading.Event()
    with receiving(lambda **facts: begun.wait(60), signals.message_delivered):
        (one,) = submit(outlast, retry=False)
        request_cancel(parts, one)
        assert one.cancel_requested
        begun.set()
        finish(parts)
    assert state(one) == State.CANCELLED


def test_a_handler_that_was_cancelled_before_its_first_step_is_retried(parts: Parts, run: Run) -> None:
    async def cancel_others(message: Delivered) -> None:
        while not (others := asyncio.all_tasks() - {asyncio.current_task()}):
            await asyncio.sleep(0)
        for task in others:
            task.cancel()

    two = run(cancel_others, 2)
    assert sorted(map(state, two)) == [State.CONSUMED, State.SCHEDULED]
    assert "the worker failed: CancelledError" in {last_move(one).error for one in two}


@pytest.mark.parametrize(
    ("stops", "end"),
    [(False, (State.CONSUMED, "")), (True, (State.CANCELLED, "cancel requested; the handler stopped"))],
    ids=["goes on", "stops"],
)
def test_a_handler_that_catches_the_cancellation_decides_how_its_message_ends(
    parts: Parts, cancelled: Cancelled, stops: bool, end: tuple[State, str]
) -> None:
    async def clean_up(message: Delivered) -> None:
        message.raise_if_cancelled()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            assert message.cancel_requested
        if stops:
            message.raise_if_cancelled()

    one = cancelled(clean_up, retry=False)
    finish(parts)
    assert (state(one), last_move(one).reason) == end


def test_a_second_cancel_does_not_interrupt_how_a_handler_cleans_up(parts: Parts, cancelled: Cancelled) -> None:
    cleaning, go_on = threading.Event(), threading.Event()
    told: list[str] = []

    async def clean_up(message: Delivered) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaning.set()
            while not go_on.is_set():
                await asyncio.sleep(0.01)
            told.append("cleaned up")

    one = cancelled(clean_up, retry=False)
    assert cleaning.wait(60)
    one.cancel_task("cancel requested")
    go_on.set()
    finish(parts)
    assert (state(one), told) == (State.CANCELLED, ["cleaned up"])


@pytest.mark.parametrize("error", [MessageCancelled, asyncio.CancelledError])
def test_a_cancellation_that_nobody_requested_is_a_failure(run: Run, error: type[BaseException]) -> None:
    async def end(message: Delivered) -> None:
        raise error

    (one,) = run(end, retry=False)
    assert (state(one), last_move(one).error) == (State.DEAD, f"{error.__name__}: ")


@pytest.mark.parametrize(("outside", "then"), [(False, State.SCHEDULED), (True, State.DEAD)])
def test_what_decides_is_raised_outside_of_a_group_of_tasks(run: Run, outside: bool, then: State) -> None:
    async def reject() -> None:
        raise Reject("no")

    async def work(message: Delivered) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(reject())
        except ExceptionGroup as raised:
            raise (raised.exceptions[0] if outside else raised) from None

    (one,) = run(work, retry=["1h"])
    assert state(one) == then


def test_a_cancel_that_comes_after_the_end_of_a_handler_does_nothing(run: Run) -> None:
    (one,) = run(_pass)
    assert not one.cancel_task("too late")
    one._cancel("too late")
    assert (state(one), one.cancel_reason) == (State.CONSUMED, "")


# --- a blocked loop ---------------------------------------------------------------------------------------------------


def test_a_handler_that_blocks_the_loop_is_named_in_the_log_and_nothing_is_claimed_meanwhile(
    parts: Parts, submit: Run, caplog: pytest.LogCaptureFixture
) -> None:
    blocking, release = threading.Event(), threading.Event()

    async def block(message: Delivered) -> None:
        blocking.set()
        release.wait(60)

    loop = loop_of(parts)
    watch = LoopWatch(loop)
    assert loop.claimable > 0
    submit(block)
    assert blocking.wait(60)
    eventually(lambda: loop.claimable == 0, "the appointment is missed")
    assert loop.slots > len(loop.held)
    watch.tick()
    watch.tick()
    assert not caplog.records
    watch._say_at = time.monotonic()
    watch.tick()
    watch.tick()
    (record,) = caplog.records
    assert f"The handler of topic {TOPIC} has blocked the event loop" in record.getMessage()
    assert "release.wait(60)" in record.getMessage()
    release.set()
    eventually(lambda: loop.claimable > 0 and watch._answer.is_set(), "the loop goes on")
    watch.tick()
    assert "The event loop goes on" in caplog.records[-1].getMessage()


def test_a_loop_that_is_busy_with_many_tasks_is_not_blocked(
    parts: Parts, submit: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = LoopWatch(loop_of(parts))
    watch.tuning.blocked_after = 0.0
    watch._answer.clear()
    for _ in range(5):
        task: Any = object()
        monkeypatch.setattr(event_loop.EventLoop, "step", task)
        watch.tick()
    assert not caplog.records


# --- sync code --------------------------------------------------------------------------------------------------------


def test_sync_calls_of_one_handler_run_in_one_thread_and_those_of_several_in_several(run: Run) -> None:
    threads: dict[int, set[str]] = {}
    both = threading.Barrier(2)

    def call(message: Delivered) -> None:
        threads.setdefault(message.id, set()).add(threading.current_thread().name)
        both.wait(60)

    async def call_twice(message: Delivered) -> None:
        await sync_to_async(call)(message)
        await sync_to_async(call)(message)

    deliveries = run(call_twice, 2)
    assert {state(delivery) for delivery in deliveries} == {State.CONSUMED}
    first, second = threads.values()
    assert (len(first), len(second)) == (1, 1)
    assert first != second


@pytest.fixture
def _no_executors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(SyncToAsync, "context_to_thread_executor")


def test_a_thread_for_sync_calls_that_the_system_refuses_is_started_later(parts: Parts, run: Run) -> None:
    async def work(message: Delivered) -> None:
        await sync_to_async(leave)(message)

    with refused("delayq-sync"):
        (one,) = run(work, retry=[0])
    assert (state(one), last_move(one).error) == (State.SCHEDULED, "RuntimeError: can't start new thread")
    others = claims.claimed(TOPIC, TOPIC)
    parts.pool.submit(others)
    finish(parts)
    assert [state(other) for other in others] == [State.CONSUMED] * 2


@pytest.mark.usefixtures("_no_executors")
def test_without_its_table_of_executors_asgirefs_own_makes_the_sync_calls(run: Run) -> None:
    threads = []

    async def call(message: Delivered) -> None:
        threads.append(await sync_to_async(threading.current_thread)())

    (delivery,) = run(call)
    assert state(delivery) == State.CONSUMED
    assert not threads[0].name.startswith("delayq-")


def test_nothing_is_left_of_the_threads_of_a_loop_that_has_ended() -> None:
    loop = asyncio.new_event_loop()
    calls = sync_calls.SyncCalls(loop, 1, RunTuning())
    before = len(SyncToAsync.context_to_thread_executor)
    context = contextvars.copy_context()
    context.run(calls.enter)
    assert len(SyncToAsync.context_to_thread_executor) == before + 1
    calls.stop()
    loop.close()
    del context
    assert len(SyncToAsync.context_to_thread_executor) == before


def test_the_async_orm_uses_a_few_connections_and_keeps_them(run: Run) -> None:
    used = set()

    def note() -> None:
        used.add(connections[DB].connection)

    async def work(message: Delivered) -> None:
        await sync_to_async(leave)(message)
        await sync_to_async(note)()
        await asyncio.to_thread(leave, message)

    deliveries = run(work, 30)
    assert {state(delivery) for delivery in deliveries} == {State.CONSUMED}
    assert Effect.objects.count() == 60
    assert len(used) == 2


def test_an_async_iterator_goes_on_after_a_pause_and_the_connection_is_closed_later(parts: Parts, run: Run) -> None:
    parts.recorder.tuning.idle_closed_after = 0.02
    Effect.objects.bulk_create(Effect(message_id=number, delivery=1) for number in range(5))
    found, used = [], []

    async def iterate(message: Delivered) -> None:
        async for effect in Effect.objects.order_by("message_id").aiterator(chunk_size=2):
            found.append(effect.message_id)
            # Longer than a thread without a delivery keeps its connection.
            await asyncio.sleep(0.1)
        used.append(await sync_to_async(lambda: connections[DB])())

    (one,) = run(iterate, retry=False)
    assert (state(one), found) == (State.CONSUMED, [0, 1, 2, 3, 4])
    if settings.DATABASES[DB]["ENGINE"].endswith("postgresql"):
        eventually(lambda: used[0].connection is None, "the connection is closed")


def test_a_dirty_connection_of_a_sync_call_is_closed_before_another_handler_gets_it(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    def leave_open(message: Delivered) -> None:
        connection.set_autocommit(False)
        leave(message, "never committed")

    found = []

    async def work(message: Delivered) -> None:
        await sync_to_async(leave_open)(message)
        found.append(await sync_to_async(lambda: connection.get_autocommit())())  # noqa: PLW0108

    run(work, 2)
    assert found == [True, True]
    assert not Effect.objects.exists()
    # Of both handlers, if they ran at the same time.
    (text,) = {record.getMessage() for record in caplog.records if record.levelname == "WARNING"}
    assert f"The handler of topic {TOPIC} left a database connection" in text


def test_a_delivery_ends_only_when_its_sync_calls_have_ended(
    parts: Parts, submit: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts.pool.tuning.stuck_after = 0.1
    calling, release = threading.Event(), threading.Event()
    queued: list[int] = []

    def hang() -> None:
        calling.set()
        release.wait(60)

    async def call(message: Delivered) -> None:
        await asyncio.gather(sync_to_async(hang)(), sync_to_async(queued.append)(message.id))

    stuck: list[Delivery] = []
    (one,) = submit(call, timeout="0.1s", retry=False)
    assert calling.wait(60)
    eventually(lambda: one.is_overtime(0.2), "the end of the timeout")
    TimeoutWatch(parts.pool, stuck.extend).tick()
    assert stuck == [one]
    assert state(one) == State.RUNNING
    release.set()
    finish(parts)
    assert (state(one), queued) == (State.DEAD, [])


def test_a_task_of_a_function_with_worker_started_gets_a_new_connection(
    assembled: Assemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_start, "functions", {})
    threads: list[str] = []
    counted = threading.Event()

    def lose_connection() -> None:
        Effect.objects.count()
        threads.append(threading.current_thread().name)
        connections[DB].connection.close()

    async def count() -> None:
        await sync_to_async(lose_connection)()
        while not counted.is_set():
            with suppress(DatabaseError):
                await Effect.objects.acount()
                counted.set()

    @worker_started
    async def begin() -> AsyncIterator[None]:
        task = asyncio.create_task(count())
        yield
        task.cancel()

    parts = assembled(2, tasks=50)
    parts.pool.start()
    try:
        assert counted.wait(60)
        assert threads == ["delayq-sync-2"]
    finally:
        parts.pool.stop()
    loop_of(parts).thread.join(60)


@pytest.mark.parametrize(
    ("hangs", "told"), [(False, "failed at the end of its process"), (True, "does not end in 0.1 s")]
)
def test_a_function_with_worker_started_that_ends_badly_is_told(
    assembled: Assemble, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hangs: bool, told: str
) -> None:
    monkeypatch.setattr(process_start, "functions", {})
    ends: Queue[Callable[[], Any]] = Queue()

    @worker_started
    async def begin() -> AsyncIterator[None]:
        yield
        if hangs:
            waits = asyncio.Event()
            ends.put(partial(asyncio.get_running_loop().call_soon_threadsafe, waits.set))
            await waits.wait()
        else:
            raise LookupError("no such client")

    parts = assembled(2, tasks=50, run_tuning=RunTuning(loop_end_time=0.1 if hangs else 60.0))
    parts.pool.start()
    parts.pool.stop()
    if hangs:
        ends.get(timeout=60)()
    loop_of(parts).thread.join(60)
    assert not loop_of(parts).thread.is_alive()
    assert f"An async function with @worker_started {told}" in caplog.text


def test_a_receiver_of_a_signal_may_use_the_database(run: Run) -> None:
    with receiving(lambda **facts: leave(claims.claimed("t.ok")[0]), signals.message_delivered):
        (one,) = run(_pass)
    assert (state(one), Effect.objects.count()) == (State.CONSUMED, 1)


async def _pass(message: Delivered) -> None:
    await asyncio.sleep(0)
