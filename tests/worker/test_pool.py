"""The threads that run handlers, and the deliveries that wait for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connections
from django.utils import translation

from django_delayq import handler, schedule_message, signals
from django_delayq.core.outcomes import Ack
from django_delayq.core.states import State
from django_delayq.middleware import Handled, Middleware
from django_delayq.models import Message
from django_delayq.project.registry import Delivered
from django_delayq.worker.processes.process import Parts
from django_delayq.worker.run.handler_threads import Baton, HandlerThreads
from django_delayq.worker.run.pool import TimeoutWatch
from django_delayq.worker.run.recorder import Recorder
from django_delayq.worker.run.run_tuning import RunTuning
from testproject.servers import PostgresServer
from tests.app.handlers import leave
from tests.support.assembled import Assemble, deliver
from tests.support.claims import claimed, last_move, state
from tests.support.middlewares import installed
from tests.support.no_handlers import forget_handlers
from tests.support.receivers import receiving
from tests.support.rows import unguarded
from tests.support.workers import PATIENCE, eventually
from tests.worker.bench import TOPIC, delivery_to, running

pytestmark = pytest.mark.django_db(transaction=True)

# So many deliveries in a row are no accident of a busy machine.
MANY = 5


def test_the_watch_over_the_baton_ends_when_it_is_told_so_while_it_falls_asleep() -> None:
    class Deliveries(SimpleQueue[Any]):
        """Finds that one waits, and then that none does; in between the end is told."""

        asked = 0

        def empty(self) -> bool:
            self.asked += 1
            if self.asked == 2:
                baton.stop()
            return self.asked > 1

    baton = Baton(Deliveries(), 2, RunTuning())
    (watch,) = baton.members
    watch.start()
    assert baton.acquire(0)
    baton.begin(0, TOPIC)
    watch.join(PATIENCE)
    assert not watch.is_alive()


def test_a_handler_whose_lease_ran_out_just_before_it_began_does_not_run(parts: Parts) -> None:
    """The process froze after everything else was checked."""
    (one,) = claimed("t.ok")

    def freeze(**facts: Any) -> None:
        one.leased_mono -= one.handler.lease + 1

    with receiving(freeze, signals.message_delivered), running(parts.pool):
        parts.pool.submit([one])
        eventually(lambda: state(one) != State.RUNNING, "the end of the delivery")
    assert (state(one), last_move(one).reason) == (State.SCHEDULED, "lease ran out before it began")


@pytest.mark.parametrize(
    ("terms", "waited", "begins"),
    [({}, 5, True), ({"limit": 1}, 5, True), ({"rate": "20/s"}, -60, True), ({"rate": "20/s"}, 0.2, False)],
    ids=str,
)
def test_a_message_under_a_rate_that_waited_for_a_place_is_not_begun(
    parts: Parts, terms: dict[str, Any], waited: float, begins: bool
) -> None:
    """Others would begin with it at one moment."""
    delivery = delivery_to(leave, **terms)
    delivery.queued_mono = delivery.due_mono = time.monotonic() - waited
    lane = parts.pool.threads
    lane.held.add([delivery])
    with running(parts.pool):
        lane.enqueue([delivery])
        eventually(lambda: state(delivery) != State.RUNNING, "the end of the delivery")
    assert state(delivery) == (State.CONSUMED if begins else State.SCHEDULED)
    # What has not begun says nothing of how long handlers take.
    assert bool(delivery.started_mono) == begins


def test_a_batch_handler_of_which_a_process_learns_late_gets_single_messages(assembled: Assemble) -> None:
    forget_handlers()
    parts, sizes = assembled(), list[int]()

    def work(messages: list[Delivered]) -> None:
        sizes.append(len(messages))

    handler(TOPIC, batch=5)(work)
    deliveries = claimed(TOPIC, TOPIC)
    with running(parts.pool):
        parts.pool.submit(deliveries)
        eventually(lambda: all(state(one) == State.CONSUMED for one in deliveries), "the end of the deliveries")
    assert sizes == [1, 1]


async def leave_async(message: Delivered) -> None:
    await sync_to_async(leave)(message)


@pytest.mark.parametrize("function", [leave, leave_async])
def test_a_slow_receiver_keeps_no_message_under_a_rate_from_running(function: Callable[[Any], Any]) -> None:
    deliveries: list[int] = []

    def be_slow(delivery: int, **facts: Any) -> None:
        if len(deliveries) < MANY:
            deliveries.append(delivery)
            time.sleep(0.3)

    handler(TOPIC, rate="100/s")(function)
    message = schedule_message(TOPIC)
    with receiving(be_slow, signals.message_delivered):
        deliver()
    message.refresh_from_db()
    assert message.state == State.CONSUMED
    assert len(deliveries) < MANY


def be_rude(**facts: Any) -> None:
    raise BaseException("rude")


@pytest.mark.parametrize("topic", ["t.ok", "t.async"])
@pytest.mark.parametrize("how", ["expired", "a receiver raised"])
def test_a_delivery_whose_handler_did_not_begin_does_not_count(assembled: Assemble, topic: str, how: str) -> None:
    parts = assembled(1, tasks=1, redis=False, max_messages=1)
    message = schedule_message(topic, expires=60 if how == "expired" else None)
    parts.consumer.run_round()
    assert parts.budget.empty
    (delivery,) = parts.pool.held()
    # Those before it took long.
    delivery.claimed_mono -= 60
    receivers = [signals.message_delivered] if how == "a receiver raised" else []
    with receiving(be_rude, *receivers), running(parts.pool):
        assert parts.pool.wait_idle(60)
        assert parts.recorder.flush(60)
        assert all(member.is_alive() for member in parts.pool.members)
    assert not delivery.started_mono
    assert parts.budget.grant(1) == 1
    move = last_move(message)
    told = "the worker failed: BaseException" if receivers else "expired before it began"
    assert (move.to_state, move.error or move.reason) == (State.SCHEDULED, told)
    assert Message.objects.get(pk=message.pk).attempts == 0
    if how == "expired":
        unguarded(Message).filter(pk=message.pk).update(expires_at=message.due_at + timedelta(seconds=0.01))
        eventually(lambda: parts.reaper.tick() and state(message) == State.EXPIRED, "the message expires")


def test_a_receiver_of_a_success_that_raises_anything_ends_no_thread(recorder: Recorder) -> None:
    (one,) = claimed("t.ok")
    with receiving(be_rude, signals.message_succeeded):
        recorder.submit(one, Ack(), "worker:w")
        assert recorder.flush(60)
        assert recorder.is_alive()
    assert state(one) == State.CONSUMED


def test_what_a_receiver_activates_ends_with_the_delivery() -> None:
    languages: list[str] = []

    def activate(topic: str, **_facts: Any) -> None:
        if topic == "t.first":
            translation.activate("de")

    for topic in ("t.first", "t.second"):
        handler(topic)(lambda message: languages.append(translation.get_language()))
        schedule_message(topic, priority=9 if topic == "t.first" else 0)
    with receiving(activate, signals.message_delivered):
        deliver()
    assert languages == ["de", "en-us"]


@pytest.mark.parametrize("threads", [1, 8, 20, 100])
def test_no_delivery_is_queued_before_handlers_are_known_to_be_quick(assembled: Assemble, threads: int) -> None:
    assert assembled(threads).pool.threads.size == threads


def test_deliveries_queued_behind_a_handler_that_turned_out_slow_are_released(assembled: Assemble) -> None:
    first, *others = claimed("t.ok", "t.ok", "t.ok")
    parts = assembled(max_messages=3, run_tuning=RunTuning(longest_queued=60.0))
    pool, budget = parts.pool, parts.budget
    budget.count(3)
    pool.threads._mean = 0.0001
    assert pool.threads.size > 2
    pool.submit([first, *others])
    # As if a thread had it.
    assert pool.threads._queue.get_nowait() is first
    first.started_mono = time.monotonic()
    watch = TimeoutWatch(pool, lambda deliveries: None)
    watch.tick()
    assert len(pool.held()) == 3
    for delivery in others:
        delivery.queued_mono -= 60.1
        delivery.due_mono -= 60.1
    watch.tick()
    assert pool.held() == [first]
    assert parts.recorder.flush(60)
    assert [state(delivery) for delivery in (first, *others)] == [State.RUNNING, State.SCHEDULED, State.SCHEDULED]
    assert (pool.threads.size, budget.grant(3)) == (1, 2)


# --- a database that takes no connection ------------------------------------------------------------------------------

Away = Callable[[], AbstractContextManager[None]]


@pytest.fixture
def away(postgres_server: PostgresServer) -> Away:
    """Stop the database for a block of a test. It is back when the block is left."""

    @contextmanager
    def stopped() -> Iterator[None]:
        postgres_server.stop()
        try:
            yield
        finally:
            postgres_server.start()
            connections.close_all()

    return stopped


@pytest.fixture
def seen() -> Iterator[list[str]]:
    """What of the project was called: the handler, a middleware, a receiver."""
    seen: list[str] = []

    class Watcher(Middleware):
        def handling(self, message: Handled) -> AbstractContextManager[Any]:
            seen.append("middleware")
            return nullcontext()

    def receiver(**facts: Any) -> None:
        seen.append("receiver")

    with installed(Watcher()), receiving(receiver, signals.message_delivered):
        yield seen


def noting(seen: list[str]) -> Callable[[Any], Any]:
    return lambda message: seen.append("handler")


def test_a_delivery_that_gets_no_connection_calls_nothing_and_its_thread_takes_part_again_after_a_rest(
    assembled: Assemble, away: Away, seen: list[str]
) -> None:
    handler(TOPIC, transactional=True, retry=False)(noting(seen))
    first, second = claimed(TOPIC, TOPIC)
    parts = assembled(run_tuning=RunTuning(first_rest=0.05))
    freed: list[int] = []
    parts.pool.threads.on_room = lambda: freed.append(parts.pool.threads.claimable)
    with running(parts.pool):
        with away():
            parts.pool.submit([first])
            # The slot is not free when the delivery ends, but after the rest.
            eventually(lambda: freed == [1], "the end of the rest")
            assert seen == []
        assert parts.recorder.flush(60)
        assert (state(first), Message.objects.get(pk=first.id).attempts) == (State.SCHEDULED, 0)
        assert last_move(first).reason.startswith("no transaction for its handler: ")
        parts.pool.submit([second])
        eventually(lambda: state(second) == State.CONSUMED, "the end of the second delivery")


def test_a_handler_that_needs_no_connection_runs_while_the_database_is_away(
    parts: Parts, away: Away, seen: list[str]
) -> None:
    one = delivery_to(noting(seen), retry=False)
    with running(parts.pool), away():
        parts.pool.submit([one])
        eventually(lambda: not parts.pool.is_busy, "the end of the delivery")
        assert seen == ["receiver", "middleware", "handler"]
        assert parts.pool.threads.slots == 1
    assert parts.recorder.flush(60)
    assert state(one) == State.CONSUMED


def test_a_thread_that_is_resting_ends_at_once(assembled: Assemble, away: Away, seen: list[str]) -> None:
    one = delivery_to(noting(seen), transactional=True, retry=False)
    pool = assembled(run_tuning=RunTuning(first_rest=3600.0, longest_rest=3600.0)).pool
    with away():
        pool.start()
        pool.submit([one])
        eventually(lambda: not pool.is_busy, "the end of the delivery")
        pool.stop()
        eventually(lambda: not any(member.is_alive() for member in pool.members), "the end of the threads")


def test_a_thread_rests_longer_after_each_refusal_up_to_a_minute() -> None:
    assert [RunTuning().rest(refusals) for refusals in (1, 2, 3, 4, 5, 6, 5000)] == [5, 10, 20, 40, 60, 60, 60]


# --- the baton --------------------------------------------------------------------------------------------------------


NUMBER = 20
# The watch sleeps for as long as the test takes.
UNWATCHED = 600.0


def baton_of(parts: Parts) -> Baton:
    threads = parts.pool.threads
    assert isinstance(threads, HandlerThreads)
    return threads.baton


def run(parts: Parts, number: int = NUMBER) -> None:
    """Run deliveries that are there together."""
    parts.pool.submit(claimed(*[TOPIC] * number))
    with running(parts.pool):
        assert parts.pool.wait_idle(60)


def test_quick_handlers_run_one_after_another_in_one_thread(assembled: Assemble) -> None:
    threads: list[int] = []
    handler(TOPIC)(lambda message: threads.append(threading.get_ident()))
    run(assembled(4, run_tuning=RunTuning(quick=60.0, longest_baton=UNWATCHED)))
    assert len(threads) == NUMBER
    assert len(set(threads)) == 1


def test_handlers_that_wait_run_side_by_side(assembled: Assemble) -> None:
    parts = assembled(4, run_tuning=RunTuning(longest_baton=UNWATCHED))
    for _time in range(10):
        baton_of(parts).end(0, TOPIC, 0.01)
    # Each waits until all four run.
    together = threading.Barrier(4)
    handler(TOPIC)(lambda message: together.wait(60) and None)
    run(parts, 4)
    assert not together.broken


@pytest.mark.parametrize("later", [False, True], ids=["that are there", "that come later"])
def test_a_quick_handler_that_gets_stuck_keeps_no_deliveries_waiting(assembled: Assemble, later: bool) -> None:
    """The topic is not known to be slow: its handler is taken for quick."""
    begun, others_ran = threading.Event(), threading.Semaphore(0)
    waited: list[bool] = []

    def handle(message: Delivered) -> None:
        if begun.is_set():
            others_ran.release()
        else:
            begun.set()
            waited.append(all(others_ran.acquire(timeout=60) for _ in range(NUMBER - 1)))

    handler(TOPIC)(handle)
    parts = assembled(2)
    first, *others = claimed(*[TOPIC] * NUMBER)
    with running(parts.pool):
        parts.pool.submit([first] if later else [first, *others])
        assert begun.wait(60)
        if later:
            parts.pool.submit(others)
        assert parts.pool.wait_idle(60)
    assert waited == [True]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("order", "begin"),
    [
        ((), ["bulk", "bulk", "little", "bulk"]),
        (("little", "bulk"), ["bulk", "little", "bulk", "bulk"]),
        (("bulk", "little"), ["bulk", "bulk", "bulk", "little"]),
    ],
    ids=["in turns", "a higher queue", "a lower queue"],
)
def test_a_message_waits_behind_no_backlog_of_another_queue_unless_that_is_higher(
    assembled: Assemble, order: tuple[str, ...], begin: list[str], is_async: bool
) -> None:
    """One slot is taken, and messages of one queue are claimed ahead when one of another queue comes."""
    begun: list[str] = []
    is_busy, gate = threading.Event(), threading.Event()

    def handle(message: Delivered) -> None:
        begun.append(message.queue)
        is_busy.set()
        gate.wait(60)

    async def handle_async(message: Delivered) -> None:
        # The loop has one slot, too.
        handle(message)

    handler(TOPIC)(handle_async if is_async else handle)
    parts = assembled(1, queues=order, tasks=int(is_async))
    with running(parts.pool):
        parts.pool.submit(claimed(*[TOPIC] * 3, queue="bulk"))
        assert is_busy.wait(60)
        parts.pool.submit(claimed(TOPIC, queue="little"))
        gate.set()
        assert parts.pool.wait_idle(60)
    assert begun == begin


def test_a_topic_is_quick_again_when_its_handler_is(assembled: Assemble) -> None:
    baton = baton_of(assembled(2))
    for seconds, times in ((0.5, 10), (0.00001, 40)):
        for _time in range(times):
            baton.end(0, TOPIC, seconds)
        baton.acquire(0)
        baton.begin(0, TOPIC)
        assert baton.has(0) == (seconds < baton.tuning.quick)
        baton.pass_on(0)
