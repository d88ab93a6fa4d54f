"""What was once wrong at the seams between the roles, and must not come back."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from django.conf import settings as django_settings
from django.db import connection, connections, transaction

from django_delayq import (
    Verdict,
    cancel_message,
    conf,
    registry,
    schedule_message,
    schedule_messages,
    signals,
    transitions,
)
from django_delayq.broker.base import Entry, Taken
from django_delayq.broker.keys import BAND
from django_delayq.broker.listener import wait_readable
from django_delayq.broker.redis import RedisBroker
from django_delayq.clock import SECOND
from django_delayq.exceptions import BrokerUnavailable, KeyConflict
from django_delayq.extensions import WorkerExtensions
from django_delayq.models import Message
from django_delayq.outcomes import Ack, Release, Retry
from django_delayq.sql.rows import Success, Ticket
from django_delayq.states import State
from django_delayq.worker import connections as upkeep
from django_delayq.worker.broker_switch import Source
from django_delayq.worker.budget import Budget
from django_delayq.worker.consumer import MOST_LOOK, Consumer
from django_delayq.worker.delivery import Delivery
from django_delayq.worker.lease_renewer import WAITED, LeaseRenewer, Watch
from django_delayq.worker.once import drain
from django_delayq.worker.options import Options
from django_delayq.worker.pool import Pool
from django_delayq.worker.process import BROKEN, WorkerProcess
from django_delayq.worker.quarantine import PATIENCE
from django_delayq.worker.queue_finder import QueueFinder
from django_delayq.worker.reaper import Reaper
from django_delayq.worker.recorder import Recorder
from testproject.servers import PostgresServer, RedisServer
from tests.transactions import unfinished
from tests.workers import eventually

pytestmark = pytest.mark.django_db(transaction=True)

DB = "default"


def needs_row_locks() -> None:
    if not connection.features.has_select_for_update:
        pytest.skip("needs row locks")


def held(*topics: str, worker: str = "w") -> list[Delivery]:
    """Messages of these topics, claimed."""
    ids = [schedule_message(topic).pk for topic in topics]
    handlers = registry.handlers()
    leases = {topic: handlers[topic].lease for topic in topics}
    rows = {row.id: row for row in transitions.claim(DB, [Ticket(pk) for pk in ids], leases, worker)}
    return [Delivery(rows[pk], handlers[rows[pk].topic], DB) for pk in ids]


def locked(message_id: int) -> AbstractContextManager[threading.Event]:
    """Somebody asks for a cancel in a transaction that goes on for long."""
    return unfinished(lambda: cancel_message(message_id))


def state(delivery: Delivery) -> str:
    return Message.objects.get(pk=delivery.id).state


# --- rows that somebody else has locked -------------------------------------------------------------------------------


def test_a_long_transaction_that_cancels_one_message_costs_the_others_no_lease(recorder: Recorder) -> None:
    needs_row_locks()
    one, other = held("t.ok", "t.ok")
    pool = Pool(1, recorder, "w", lambda: None)
    keeper = LeaseRenewer(DB, pool)
    for delivery in (one, other):
        delivery.leased_mono -= 40
        pool._held[delivery.id, delivery.deliveries] = delivery
    before = time.monotonic()
    with locked(one.id):
        keeper.tick()
        assert time.monotonic() - before < 5
        assert not one.lost
        assert (one.leased_mono < before - 30, other.leased_mono >= before) == (True, True)
    keeper._keep_at = 0.0
    keeper.tick()
    assert one.requested
    assert one.leased_mono >= before


def test_a_lease_that_is_lost_is_still_noticed(recorder: Recorder) -> None:
    (one,) = held("t.ok")
    pool = Pool(1, recorder, "w", lambda: None)
    pool._held[one.id, one.deliveries] = one
    one.leased_mono -= 40
    transitions.release_worker(DB, "w", max_crashes=3, actor="test", shutdown=False)
    LeaseRenewer(DB, pool).tick()
    assert one.lost


def test_a_handler_whose_lease_runs_out_on_its_threshold_does_not_start(recorder: Recorder) -> None:
    """The process froze after everything else was asked."""
    (one,) = held("t.ok")
    pool = Pool(1, recorder, "w", lambda: None)

    def freeze(**facts: Any) -> None:
        one.leased_mono -= one.handler.lease + 1

    signals.message_delivered.connect(freeze)
    try:
        pool.start()
        pool.submit([one])
        eventually(lambda: state(one) != State.RUNNING, "the end of the delivery")
    finally:
        signals.message_delivered.disconnect(freeze)
        pool.stop()
    last = Message.objects.get(pk=one.id).transitions.last()
    assert last is not None
    assert (state(one), last.reason) == (State.SCHEDULED, "lease ran out before it began")


def test_what_is_given_back_unfinished_has_cost_no_attempt(recorder: Recorder) -> None:
    (one,) = held("t.ok")
    recorder.submit(one, Release("shutdown"), "worker:w")
    assert recorder.flush(20)
    message = Message.objects.get(pk=one.id)
    assert (message.state, message.attempts, message.reported, message.deliveries) == (State.SCHEDULED, 0, 1, 1)
    last = message.transitions.last()
    assert last is not None
    assert (last.reason, last.error) == ("shutdown", "")


@pytest.mark.parametrize("outcome", [Ack(), Retry(timedelta(0), "failed")])
def test_a_long_transaction_that_cancels_one_message_holds_up_no_other_outcome(
    recorder: Recorder, outcome: Ack | Retry
) -> None:
    needs_row_locks()
    one, other = held("t.ok", "t.ok")
    with locked(one.id):
        recorder.submit(one, outcome, "worker:w")
        recorder.submit(other, Ack(), "worker:w")
        eventually(lambda: state(other) == State.CONSUMED, "the other outcome", timeout=15)
        assert state(one) == State.RUNNING
        assert not recorder.flush(0.2)
    assert recorder.flush(10)
    assert state(one) == (State.CONSUMED if isinstance(outcome, Ack) else State.CANCELLED)


def test_an_extension_within_the_handlers_transaction_counts_at_once_and_locks_nothing() -> None:
    needs_row_locks()
    (one,) = held("t.ok")
    before = Message.objects.get(pk=one.id).leased_until
    assert before is not None
    answers: list[Any] = []

    def cancel() -> None:
        try:
            answers.append(cancel_message(one.id).verdict)
            answers.append(Message.objects.get(pk=one.id).leased_until)
        finally:
            connections.close_all()

    with transaction.atomic():
        one.extend("10m")
        thread = threading.Thread(target=cancel)
        thread.start()
        thread.join(5)
        assert answers, "the cancel waits for the handler's transaction"
    thread.join()
    assert answers[0] == Verdict.REQUESTED
    assert answers[1] > before + timedelta(minutes=5)


def test_two_callers_with_the_same_keys_in_opposite_order_do_not_wait_in_a_circle() -> None:
    needs_row_locks()
    names = [f"k{number}" for number in range(30)]
    errors: list[BaseException] = []
    barrier = threading.Barrier(2)

    def schedule(keys: list[str]) -> None:
        try:
            for turn in range(10):
                barrier.wait(10)
                schedule_messages([{"topic": f"t.{turn}", "key": key, "on_conflict": "keep"} for key in keys])
        except BaseException as error:  # noqa: BLE001
            errors.append(error)
            barrier.abort()
        finally:
            connections.close_all()

    threads = [threading.Thread(target=schedule, args=(keys,)) for keys in (names, names[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert Message.objects.count() == 300


# --- connections ------------------------------------------------------------------------------------------------------


def test_a_connection_that_the_server_has_closed_is_noticed_before_a_handler_meets_it(
    postgres_server: PostgresServer,
) -> None:
    upkeep.before_task()
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    upkeep.after_task()
    postgres_server.stop()
    postgres_server.start()
    upkeep.before_task()
    assert Message.objects.count() == 0


def test_a_thread_without_a_pause_notices_it_as_well(postgres_server: PostgresServer) -> None:
    if connection.vendor != "postgresql":
        pytest.skip("needs PostgreSQL")
    upkeep.before_task()
    connection.ensure_connection()
    raw = connection.connection
    with psycopg.connect(postgres_server.url, autocommit=True) as other:
        assert other.execute("SELECT pg_terminate_backend(%s, 5000)", [raw.info.backend_pid]).fetchone() == (True,)
    deadline = time.monotonic() + 10
    while connection.connection is raw and time.monotonic() < deadline:
        upkeep.after_task()
        upkeep.before_task()
    assert connection.connection is not raw
    assert Message.objects.count() == 0


def test_a_worker_uses_no_pool_of_connections() -> None:
    if connection.vendor != "postgresql":
        pytest.skip("needs PostgreSQL")
    pytest.importorskip("psycopg_pool")
    options = connections.settings[DB].setdefault("OPTIONS", {})
    connections.close_all()
    options["pool"] = True
    try:
        assert Message.objects.count() == 0
        upkeep.leave_pools()
        assert "pool" not in options
        assert Message.objects.count() == 0
    finally:
        options.pop("pool", None)


# --- errors that must not end or stop a role --------------------------------------------------------------------------


class Rude(BaseException):
    """Nobody catches it."""


@pytest.fixture
def rude_receiver() -> Iterator[list[str]]:
    calls: list[str] = []

    def receiver(**facts: Any) -> None:
        calls.append("called")
        raise Rude

    for signal in (signals.message_delivered, signals.message_succeeded):
        signal.connect(receiver)
    yield calls
    for signal in (signals.message_delivered, signals.message_succeeded):
        signal.disconnect(receiver)


def test_a_receiver_that_raises_anything_ends_no_thread(recorder: Recorder, rude_receiver: list[str]) -> None:
    (one, other) = held("t.ok", "t.ok")
    pool = Pool(1, recorder, "w", lambda: None)
    pool.start()
    pool.submit([one])
    assert pool.wait_idle(10)
    assert recorder.flush(10)
    recorder.submit(other, Ack(), "worker:w")
    assert recorder.flush(10)
    assert rude_receiver == ["called", "called"]
    assert (state(one), state(other)) == (State.SCHEDULED, State.CONSUMED)
    assert recorder.is_alive()
    assert all(member.is_alive() for member in pool.members)
    pool.stop()


def test_a_process_that_has_lost_a_thread_ends_to_be_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Recorder, "run", lambda self: None)
    process = WorkerProcess(Options(DB, threads=1, graceful_timeout=0), Budget(None))
    assert process.run() == BROKEN
    assert "delayq-recorder has died" in caplog.text


def test_stopping_from_a_signal_handler_takes_no_lock() -> None:
    process = WorkerProcess(Options(DB, threads=1, graceful_timeout=0), Budget(None))
    threading.Timer(0.2, process.stop).start()
    began = time.monotonic()
    assert process.run() == 0
    assert time.monotonic() - began < 10


def test_what_was_claimed_runs_although_redis_goes_away_while_the_rest_is_put_back(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = schedule_message("t.ok")
    early = schedule_message("t.ok", delay=60)
    source = Source(DB, registry.handlers)
    assert source.redis is not None
    pool = Pool(1, recorder, "w", lambda: None)
    consumer = Consumer(DB, source, pool, lambda: ("default",), "w", Budget(None), 1.0, WorkerExtensions(DB, "w"))
    now_tenths = int((time.time() + 0.01) * SECOND)

    def take(queue: str, limit: int, _within: float) -> Taken:
        tickets = [Ticket(pk, now_tenths, 0) for pk in (ready.pk, early.pk)]
        return Taken(tickets)

    def put(queue: str, entries: list[Entry], *, fill: bool = False) -> None:
        raise BrokerUnavailable

    monkeypatch.setattr(source.redis, "take", take)
    monkeypatch.setattr(source.redis, "put", put)
    deliveries, _taken = consumer._take(source.redis, "default", 10)
    assert [delivery.id for delivery in deliveries] == [ready.pk]
    assert source.current() is source.database
    source.close()


def test_what_falls_due_while_others_are_claimed_is_not_slept_through(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source(DB, registry.handlers)
    assert source.redis is not None
    pool = Pool(1, recorder, "w", lambda: None)
    consumer = Consumer(DB, source, pool, lambda: ("default",), "w", Budget(None), 1.0, WorkerExtensions(DB, "w"))

    def look(ago: float) -> float:
        answer = Taken(next_due=1.5, at=time.monotonic() - ago)
        monkeypatch.setattr(source.redis, "take", lambda queue, limit, within: answer)
        return consumer.turn()

    assert look(ago=1.0) <= 0.5
    assert look(ago=60.0) == 0.0
    source.close()


@pytest.fixture
def consumer(recorder: Recorder) -> Iterator[Consumer]:
    """One that delivers by query, and with nobody to run what it claims."""
    source = Source(DB, registry.handlers, redis=False)
    yield Consumer(
        DB,
        source,
        Pool(1, recorder, "w", lambda: None),
        lambda: ("default",),
        "w",
        Budget(None),
        1.0,
        WorkerExtensions(DB, "w"),
    )
    source.close()


def test_an_idle_worker_with_many_queues_looks_at_each_in_time(consumer: Consumer) -> None:
    assert consumer.source.redis is None
    consumer.source.redis = RedisBroker(conf.get(), DB, timeout=1.0)
    consumer.pauses.queues = lambda: tuple(f"queue-{number}" for number in range(50))
    assert consumer.turn() <= MOST_LOOK


def test_one_that_is_to_run_alone_waits_longer_each_time(consumer: Consumer, recorder: Recorder) -> None:
    """Or it would never be run by a process that is always busy with handlers of a minute."""
    (busy,) = held("t.ok")
    consumer.pool.threads = 2
    consumer.pool._held[busy.id, busy.deliveries] = busy
    message = schedule_message("t.ok")
    Message.objects.filter(pk=message.pk).update(deliveries=2)
    patience = []
    for _time in range(3):
        consumer.turn()
        assert consumer.pool.aside is not None
        patience.append(consumer.quarantine.patience)
        assert consumer.turn() <= patience[-1]
        consumer.quarantine._until = 0.0
        consumer.turn()
        assert recorder.flush(5)
        assert Message.objects.get(pk=message.pk).due_at > transitions.now(DB)
        Message.objects.filter(pk=message.pk).update(due_at=message.due_at)
    assert [round(seconds / PATIENCE) for seconds in patience] == [1, 2, 4]
    del consumer.pool._held[busy.id, busy.deliveries]
    consumer.pool.start()
    consumer.turn()
    consumer.turn()
    eventually(lambda: Message.objects.get(pk=message.pk).state == State.CONSUMED, "it runs alone")
    consumer.pool.stop()


def test_once_runs_what_is_to_run_alone_though_no_more_may_be_delivered() -> None:
    message = schedule_message("t.ok")
    Message.objects.filter(pk=message.pk).update(deliveries=2)
    assert drain(Options(DB, threads=2, max_messages=1)) == 1
    assert Message.objects.get(pk=message.pk).state == State.CONSUMED


def test_nothing_is_asked_for_again_and_again_when_no_more_may_be_delivered(consumer: Consumer) -> None:
    consumer.budget = Budget(1)
    schedule_messages([{"topic": "t.ok"}] * 3)
    consumer.turn()
    assert len(consumer.pool.held()) == 1
    consumer.pool.threads = 3
    assert not consumer._may_go_on
    assert consumer.turn() > 0.5


@pytest.mark.parametrize("threads", [1, 8, 20, 100])
def test_nothing_is_held_ahead_of_handlers_that_are_not_known_to_be_quick(recorder: Recorder, threads: int) -> None:
    assert Pool(threads, recorder, "w", lambda: None).size == threads


def test_what_waits_behind_a_handler_that_turned_out_slow_is_given_back(recorder: Recorder) -> None:
    first, *others = held("t.ok", "t.ok", "t.ok")
    returned: list[None] = []
    pool = Pool(1, recorder, "w", lambda: None, lambda: returned.append(None))
    pool._mean = 0.0001
    room = pool.size
    pool.submit([first, *others])
    # As if a thread had it.
    assert pool._waiting.get_nowait() is first
    first.started_mono = time.monotonic()
    Watch(pool, lambda deliveries: None).tick()
    assert len(pool.held()) == 3
    for delivery in others:
        delivery.queued_mono -= WAITED + 0.1
    Watch(pool, lambda deliveries: None).tick()
    assert pool.held() == [first]
    assert recorder.flush(5)
    assert [state(delivery) for delivery in (first, *others)] == [State.RUNNING, State.SCHEDULED, State.SCHEDULED]
    assert room > 2
    assert pool.size == 1
    assert len(returned) == 2


def test_a_queue_that_runs_empty_is_still_listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    message = schedule_message("t.ok", queue="found")
    queues = QueueFinder(DB)
    queues.tick()
    assert "found" in queues()
    cancel_message(message)
    queues.tick()
    assert "found" in queues()
    monkeypatch.setattr("django_delayq.worker.queue_finder.REMEMBERED", 0.0)
    queues.tick()
    assert "found" not in queues()


def test_no_lease_is_reaped_before_its_holder_could_report_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    (one,) = held("t.ok")
    Message.objects.filter(pk=one.id).update(leased_until=transitions.now(DB) - timedelta(seconds=1))
    monkeypatch.setattr(transitions, "may_reap", lambda using: False)
    Reaper(DB, "test", WorkerExtensions(DB, "w")).tick()
    assert state(one) == State.RUNNING
    monkeypatch.setattr(transitions, "may_reap", lambda using: True)
    Reaper(DB, "test", WorkerExtensions(DB, "w")).tick()
    assert state(one) == State.SCHEDULED


def test_who_reads_before_writing_waits_for_a_writer_even_as_sqlite_comes() -> None:
    if connection.vendor != "sqlite":
        pytest.skip("needs SQLite")
    options = connections.settings[DB]["OPTIONS"]
    mode = options.pop("transaction_mode")
    connections.close_all()
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(15):
                key = f"{number}-{turn}"
                schedule_message("t.ok", key=key, delay=60)
                assert cancel_message(topic="t.ok", key=key)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)
        finally:
            connections.close_all()

    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
    finally:
        connections.close_all()
        options["transaction_mode"] = mode


# --- Redis ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def broker(redis_server: RedisServer) -> Iterator[RedisBroker]:
    made = RedisBroker(conf.get(), DB, timeout=1.0)
    yield made
    made.close()


def test_ids_that_no_database_can_hold_are_dropped(broker: RedisBroker) -> None:
    k = broker.keys("default")
    broker.client.zadd(k.ready, {str(2**63): 1, "9" * 5000: 2, "x": 3, "7": 4, "-3": 5})
    assert [ticket.id for ticket in broker.take("default", 10).tickets] == [7]


def test_an_id_is_never_said_to_be_ready_later_than_now(broker: RedisBroker) -> None:
    k = broker.keys("default")
    broker.client.zadd(k.ready, {"7": 101 * BAND - 1})
    (ticket,) = broker.take("default", 10).tickets
    assert ticket.rank == 100
    assert ticket.ready_tenths is not None
    assert ticket.ready_tenths <= (time.time() + 0.005) * SECOND


def test_the_wait_for_a_token_begins_anew_after_redis_did_not_answer(broker: RedisBroker) -> None:
    assert not broker.listen(["default"], 0.05)
    assert broker._listener is not None
    first = broker._listener._connection._sock
    source = Source(DB, registry.handlers)
    source.redis = broker
    source.failed(BrokerUnavailable())
    # Woken, to look into the database.
    assert wait_readable([broker._listener._read], 0)
    assert not broker.listen(["default"], 5)
    notifying = threading.Timer(0.1, lambda: broker.notify("default"))
    notifying.start()
    assert broker.listen(["default"], 5)
    notifying.join()
    assert broker._listener._connection._sock is not first


@pytest.mark.parametrize("how", ["after a token", "told to stop listening"])
def test_a_process_that_is_busy_takes_no_token_from_an_idle_one(
    broker: RedisBroker, redis_server: RedisServer, how: str
) -> None:
    """Redis answers those first who have waited longest."""
    idle = RedisBroker(conf.get(), DB, timeout=1.0)

    def waiting() -> int:
        return int(broker.client.info("clients")["blocked_clients"])

    if how == "after a token":
        broker.notify("default")
        assert broker.listen(["default"], 5)
    else:
        assert not broker.listen(["default"], 0.01)
        broker.stop_listening()
        eventually(lambda: waiting() == 0, "nobody waits")
    heard: list[bool] = []
    listener = threading.Thread(target=lambda: heard.append(idle.listen(["default"], 30)))
    listener.start()
    eventually(waiting, "the idle one waits")
    assert waiting() == 1
    broker.notify("default")
    listener.join(30)
    assert heard == [True]
    idle.close()


def test_a_connection_that_the_server_closed_while_nobody_waited_is_no_end_of_redis(broker: RedisBroker) -> None:
    broker.notify("default")
    assert broker.listen(["default"], 5)
    assert broker._listener is not None
    first = broker._listener._connection._sock
    broker.client.client_kill_filter(skipme=True, _type="normal")
    broker.notify("default")
    assert broker.listen(["default"], 5)
    assert broker._listener._connection._sock is not first


def test_a_server_that_accepts_and_says_nothing_ends_the_wait_for_a_token() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        settings, _problems = conf.parse({**django_settings.DELAYQ, "REDIS": f"redis://127.0.0.1:{port}/0"})
        broker = RedisBroker(settings, DB, timeout=0.3)
        began = time.monotonic()
        with pytest.raises(BrokerUnavailable):
            broker.listen(["default"], 1.0)
        assert time.monotonic() - began < 5
        broker.close()


def test_sentinels_that_say_nothing_keep_nobody_waiting(settings: Any, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        settings.CACHES = {
            **settings.CACHES,
            "sentinels": {
                "BACKEND": "django_redis.cache.RedisCache",
                "LOCATION": "redis://mymaster/0",
                "OPTIONS": {
                    "CLIENT_CLASS": "django_redis.client.SentinelClient",
                    "CONNECTION_POOL_CLASS": "redis.sentinel.SentinelConnectionPool",
                    "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
                    "SENTINELS": [mute.getsockname()],
                },
            },
        }
        settings.DELAYQ = {**settings.DELAYQ, "REDIS": "sentinels"}
        began = time.monotonic()
        schedule_message("t.ok", delay=5)
        assert time.monotonic() - began < 3
    assert "MasterNotFoundError" in caplog.text


def test_what_may_still_succeed_can_be_neither_replaced_nor_put_off() -> None:
    message = schedule_message("t.ok", {"v": 1}, key="k")
    (row,) = transitions.claim(DB, [Ticket(message.pk)], {"t.ok": 60.0}, "frozen")
    Message.objects.filter(pk=message.pk).update(leased_until=message.created_at - timedelta(seconds=1))
    assert transitions.reap(DB, max_crashes=3, actor="test")
    for policy in ("replace", "debounce"):
        with pytest.raises(KeyConflict):
            schedule_message("t.ok", {"v": 2}, key="k", on_conflict=policy, delay=60)
    assert transitions.succeed(DB, [Success(row.id, row.deliveries, "frozen")])
    message.refresh_from_db()
    assert (message.state, message.payload) == (State.CONSUMED, {"v": 1})


def test_a_reason_may_be_any_text() -> None:
    message = schedule_message("t.ok", delay=60)
    assert cancel_message(message, reason="\x00\ud800" + "x" * 100_000)
    reason = message.transitions.get(to_state=State.CANCELLED).reason
    assert reason.startswith("\ufffd?")
    assert len(reason) < 5_000


def test_redis_is_not_back_by_what_was_asked_before_it_failed(caplog: pytest.LogCaptureFixture) -> None:
    """Some commands succeed in a Redis that is full; and one thread may have asked before another one failed."""
    source = Source(DB, registry.handlers)
    source.has_loader = True
    asked = time.monotonic()
    source.failed(BrokerUnavailable("used memory"))
    source.answered(asked)
    source.failed(BrokerUnavailable("used memory"))
    assert source.current() is source.database
    source.answered(time.monotonic())
    assert source.current() is source.redis
    told = [record.getMessage() for record in caplog.records if "Redis is" in record.getMessage()]
    assert [text.split(";")[0] for text in told] == ["Redis is away", "Redis is back"]
    source.close()
