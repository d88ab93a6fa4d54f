"""Restores as operations: started by people, commands and loaders; and checks of what Redis holds."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
import redis
from django.db import DatabaseError, connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_delayq import cancel_message, pause_queue
from django_delayq.broker.base import Put
from django_delayq.console.models import Operation, OperationState
from django_delayq.console.operations import lifecycle
from django_delayq.console.operations import work as restoring
from django_delayq.console.operations.work import RestoreOperation
from django_delayq.core import bounds, in_tests
from django_delayq.core.actors import acting_as
from django_delayq.core.exceptions import BrokerUnavailable
from django_delayq.core.states import State
from django_delayq.management import _common as common
from django_delayq.models import Message, Queue, Transition
from django_delayq.record import reads, transitions
from django_delayq.record.sql.rows import Ticket
from django_delayq.restore.engine import Restore
from django_delayq.restore.horizon import ensure_horizon
from django_delayq.restore.selection import Overdue, Selection
from django_delayq.worker.shared.broker_switch import BrokerSwitch
from django_delayq.worker.upkeep.loader import Loader, _ObservedLoad
from django_delayq.worker.upkeep.upkeep_tuning import UpkeepTuning
from testproject.servers import RedisServer
from tests.support.commands import broker, due_tenths, held, run, schedule, set_batch_size
from tests.support.processes import Start
from tests.support.record_of import states
from tests.support.rows import unguarded
from tests.support.workers import eventually

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("redis_client")]

DB = "default"
OPERATOR = "host/1-operator"


@pytest.fixture(autouse=True)
def small_steps(tuned: Callable[..., None]) -> None:
    """Make a step of a restore one batch long."""
    tuned(step_seconds=0.0)


Lost = Callable[..., list[int]]


@pytest.fixture
def lost(redis_client: redis.Redis) -> Lost:
    """Schedule messages, and lose Redis."""

    def do(number: int, **options: Any) -> list[int]:
        ids = schedule(number, **options)
        redis_client.flushall()
        return ids

    return do


def begin(
    selection: Selection | None = None, overdue: Overdue = Overdue.RUN, spread: float = 0.0, *, no_expired: bool = False
) -> Operation:
    """Start a restore as the admin does."""
    scope = restoring.scope_of(selection or Selection())
    arguments = restoring.arguments_of(overdue, spread, no_expired=no_expired)
    with acting_as("user:anna"):
        return lifecycle.start(DB, "restore", scope, arguments, described="all queues", reason="")


def work_off(operation: Operation, *, steps: int = 50) -> Operation:
    """Do so many steps as a worker does them."""
    for _ in range(steps):
        if not lifecycle.run_step(DB, operation, OPERATOR):
            break
    operation.refresh_from_db()
    return operation


def claims(*ids: int) -> set[int]:
    """Try to claim messages, as any worker may at any moment."""
    return {claimed.id for claimed in transitions.claim(DB, [Ticket(pk) for pk in ids], {"t.ok": 60.0}, "any")}


def only() -> Operation:
    return Operation.objects.get()


# --- started by people ------------------------------------------------------------------------------------------------


def test_expired_messages_are_handled_in_steps_too() -> None:
    together = transitions.MOVES_PER_TRANSACTION
    schedule(together + 1)
    unguarded(Message).update(due_at=timezone.now() - timedelta(60), expires_at=timezone.now() - timedelta(50))
    operation = begin(no_expired=True)
    lifecycle.run_step(DB, operation, OPERATOR)
    assert states() == {State.SCHEDULED: 1, State.EXPIRED: together}
    done = work_off(operation)
    assert (done.state, done.outcomes) == (OperationState.DONE, {"expired": together + 1})


def test_a_count_that_outlasts_the_lease_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule(3)
    operation = begin()
    count, counted = restoring.RestoreWork.count, []

    def slow(work: restoring.RestoreWork, using: str) -> int | None:
        counted.append(using)
        # Meanwhile the lease runs out, and another worker takes it.
        Operation.objects.update(leased_until=timezone.now() - timedelta(1))
        other = lifecycle.lease_next(DB, "another")
        if other is not None and len(counted) < 3:
            lifecycle.run_step(DB, other, "another")
        return count(work, using)

    monkeypatch.setattr(restoring.RestoreWork, "count", slow)
    lifecycle.run_step(DB, operation, OPERATOR)
    assert len(counted) == 1
    assert only().done == 3


def test_a_restore_is_stopped_between_two_steps_and_resumed(lost: Lost) -> None:
    ids = [*schedule(3), *lost(3, queue="b")]
    operation = begin()
    work_off(operation, steps=1)
    assert lifecycle.stop(operation)
    assert work_off(operation).state == OperationState.STOPPED
    assert len(held() | held("b")) < 6
    assert lifecycle.resume(operation)
    done = work_off(operation)
    assert (done.state, done.done, done.outcomes) == (OperationState.DONE, 6, {"put": 6})
    assert held() | held("b") == due_tenths(*ids)


def overdue(number: int, **more: Any) -> list[int]:
    """Schedule messages that are overdue by 100 s."""
    return schedule(number, due=-100, **more)


def test_a_restore_with_a_spread_lets_no_overdue_message_run_at_once(start: Start, lost: Lost) -> None:
    """Redis was lost while no worker was there. The worker that comes up loads the queue beside the restore."""
    lost(1500, due=-100)
    before = reads.now(DB)
    operation = begin(Selection(), Overdue.SPREAD, 5400.0)
    worker = start()
    eventually(lambda: Operation.objects.get(pk=operation.pk).state == OperationState.DONE, "the restore is done")
    done = Operation.objects.get(pk=operation.pk)
    eventually(lambda: states()[State.CONSUMED] >= 1, "the first of them runs")
    worker.stop()
    claims = Transition.objects.filter(to_state=State.RUNNING)
    assert not claims.filter(due_at__lt=before).exists()
    assert claims.count() < 100
    assert (done.outcomes["spread"], done.total) == (1500, 1500)
    # Each message is in Redis, or is due beyond the horizon. The horizon moves on, so some are counted as both.
    placed = sum(number for outcome, number in done.outcomes.items() if outcome != "spread")
    assert placed == done.done
    assert placed >= 1500
    counts = Counter(done.outcomes)
    assert max(counts["put"] + counts["there already"], counts["beyond"]) <= 1500
    assert not Queue.objects.exists()


def test_a_spread_in_many_steps_is_even(monkeypatch: pytest.MonkeyPatch) -> None:
    set_batch_size(monkeypatch, 3, Restore.__init__)
    overdue(12)
    operation = begin(Selection(), Overdue.SPREAD, 1200.0)
    for steps in range(1, 4):
        work_off(operation, steps=1)
        assert Transition.objects.filter(reason__startswith="spread").count() == 3 * steps
    assert work_off(operation).outcomes["spread"] == 12
    due = Message.objects.order_by("due_at").values_list("due_at", flat=True)
    gaps = [(after - before).total_seconds() for before, after in pairwise(due)]
    assert gaps == pytest.approx([100.0] * 11, abs=0.01)


@pytest.mark.parametrize("is_stopped", [True, False], ids=["stopped", "without workers"])
def test_a_spread_that_stood_still_goes_on_from_now(monkeypatch: pytest.MonkeyPatch, *, is_stopped: bool) -> None:
    set_batch_size(monkeypatch, 2, Restore.__init__)
    overdue(10)
    schedule(2)
    operation = begin(Selection(), Overdue.SPREAD, 600.0)
    work_off(operation, steps=1)
    if is_stopped:
        assert lifecycle.stop(operation)
        assert work_off(operation).state == OperationState.STOPPED
    later = timezone.now() + timedelta(hours=1)
    monkeypatch.setattr(in_tests, "clock", lambda: later)
    # Resumed, it counts all that is overdue by then, also the two that were spread and the two that were not overdue.
    assert lifecycle.resume(operation) == is_stopped
    assert work_off(operation).state == OperationState.DONE
    found = Message.objects.filter(due_at__gte=later).order_by("due_at").values_list("due_at", flat=True)
    expected = [50.0 * place for place in range(12)] if is_stopped else [60.0 * place for place in range(8)]
    assert [(due - later).total_seconds() for due in found] == pytest.approx(expected, abs=0.01)


def test_queues_are_held_from_the_question_to_the_end_of_the_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "OVERDUE_AFTER", timedelta(seconds=60))
    ids = overdue(6)
    soon = schedule(2, due=-1)
    pause_queue("busy", reason="by hand")
    schedule(1, queue="busy", due=-1)
    operation = begin(Selection(), Overdue.SPREAD, 600.0)
    assert claims(*ids, *soon) == set()
    held_by = {queue.name: (queue.paused_by, queue.resumes_at) for queue in Queue.objects.all()}
    assert held_by["default"] == (f"restore #{operation.pk}", None)
    assert held_by["busy"][0] != held_by["default"][0]
    while Queue.objects.filter(name="default").exists():
        assert claims(*ids, *soon) == set()
        assert lifecycle.run_step(DB, operation, OPERATOR)
    assert claims(*ids[1:]) == set()
    assert claims(*soon) == set(soon)
    assert work_off(operation).state == OperationState.DONE
    assert Queue.objects.get().name == "busy"


@pytest.mark.parametrize(("policy", "step"), [(Overdue.SPREAD, 0.0), (Overdue.CANCEL, 60.0)])
def test_no_queue_stays_held_while_redis_is_away(
    redis_server: RedisServer, tuned: Callable[..., None], policy: Overdue, step: float
) -> None:
    """The record is changed all the same. The rest waits until Redis is back."""
    tuned(step_seconds=step)
    ids, soon, later = overdue(3), schedule(1, due=-1), schedule(1, due=300)
    gone = schedule(1, due=-100, expires=30)
    operation = begin(Selection(), policy, 600.0, no_expired=True)
    redis_server.stop()
    with pytest.raises(BrokerUnavailable):
        work_off(operation)
    assert not Queue.objects.exists()
    assert claims(*ids[1:], *gone) == set()
    assert claims(*soon) == set(soon)
    redis_server.start()
    assert work_off(operation).state == OperationState.DONE
    assert held().keys() == {*later, *(ids if policy == Overdue.SPREAD else ())}
    assert (
        operation.outcomes["expired"],
        sum(operation.outcomes.get(word, 0) for word in ("spread", "cancelled")),
    ) == (1, 3)


@pytest.mark.parametrize("end", ["stop", "stop while a worker has it", "failure"])
def test_a_restore_that_ends_early_holds_no_queue(end: str) -> None:
    ids = overdue(6)
    operation = begin(Selection(), Overdue.SPREAD, 600.0)
    if end == "stop":
        assert lifecycle.stop(operation)
    elif end == "failure":
        assert lifecycle.lease_next(DB, OPERATOR) == operation
        assert lifecycle.fail(DB, operation, OPERATOR, "no")
    else:
        assert lifecycle.lease_next(DB, OPERATOR) == operation
        assert lifecycle.stop(operation)
        assert Queue.objects.exists()
        lifecycle.release(DB, OPERATOR)
    assert not Queue.objects.exists()
    operation.refresh_from_db()
    assert lifecycle.resume(operation)
    assert Queue.objects.exists()
    assert work_off(operation).outcomes["spread"] == 6
    assert not Queue.objects.exists()
    assert len(claims(*ids)) <= 1


@pytest.mark.parametrize("policy", [Overdue.SPREAD, Overdue.DEAD, Overdue.CANCEL])
def test_no_overdue_message_is_claimed_while_a_command_restores(policy: Overdue) -> None:
    ids, other = overdue(9), overdue(9, queue="other")
    there = broker()
    job = Restore(DB, there, overdue=policy, spread=3600.0, batch_size=3)
    job.preview()
    caught: set[int] = set()
    seen: list[int] = []

    def look(done: int) -> None:
        seen.append(done)
        caught.update(claims(*ids, *other) if len(seen) < 6 else ())
        assert all(queue.resumes_at is not None for queue in Queue.objects.all())

    job.run(progress=look)
    there.close()
    # The first of those that were spread is due at once.
    assert caught <= {ids[0]}
    assert len(seen) >= 6
    assert not Queue.objects.exists()


def test_a_loader_beside_a_restore_undoes_no_spread(loader: Loader) -> None:
    ids = overdue(30)
    operation = begin(Selection(), Overdue.SPREAD, 300.0)
    loader.tick()
    assert held() == dict.fromkeys(ids, 0)
    while lifecycle.run_step(DB, operation, OPERATOR):
        loader.tick()
    operation.refresh_from_db()
    assert (operation.state, operation.done) == (OperationState.DONE, operation.total)
    later = ids[1:]
    assert {pk: place for pk, place in held().items() if pk in later} == due_tenths(*later)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (Overdue.RUN, {"put": 10, "no longer scheduled": 2}),
        (Overdue.CANCEL, {"cancelled": 4, "put": 6, "no longer scheduled": 2}),
        (Overdue.DEAD, {"given up": 4, "put": 6, "no longer scheduled": 2}),
        (Overdue.SPREAD, {"spread": 4, "put": 7, "beyond": 3, "no longer scheduled": 2}),
    ],
)
def test_a_restore_does_all_and_tells_what_was_left(lost: Lost, policy: Overdue, expected: dict[str, int]) -> None:
    ids = overdue(6)
    lost(6)
    operation = begin(Selection(), policy, 4 * 700.0 if policy == Overdue.SPREAD else 0.0)
    # Two of the overdue ones are cancelled after a worker has counted the messages.
    Operation.objects.update(started_at=timezone.now(), total=12)
    cancel_message(Message.objects.filter(pk__in=ids[:2]))
    done = work_off(operation)
    assert (done.state, done.outcomes, done.done) == (OperationState.DONE, expected, 12)


def test_a_restore_in_steps_never_counts_as_a_whole_load(redis_client: redis.Redis, loader: Loader, lost: Lost) -> None:
    """Redis may be lost between two steps, and then only a loader puts what an earlier step had put."""
    ids = [*schedule(3), *lost(3, queue="other")]
    operation = begin()
    while lifecycle.run_step(DB, operation, OPERATOR):
        redis_client.flushall()
    for _ in range(4):
        loader.tick()
    assert held() | held("other") == due_tenths(*ids)


def test_a_restore_puts_selected_messages_and_no_others(lost: Lost) -> None:
    schedule(2, queue="elsewhere")
    ids = [*schedule(1, topic="t.effect"), *schedule(1, due=-20), *lost(3)]
    chosen = Selection(queues=("default",), topics=("t.ok",), ids=tuple(ids[:4]), due_after=timezone.now())
    assert work_off(begin(chosen)).outcomes == {"put": 2}
    assert held().keys() == set(ids[2:4])
    assert not held("elsewhere")


def test_restores_and_checks_are_refused_at_the_start_without_redis(settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": None}
    for action in ("restore", "check"):
        with pytest.raises(ValueError, match="REDIS"):
            lifecycle.start(DB, action, {}, {}, described="", reason="")
    assert not Operation.objects.exists()


@pytest.mark.postgresql("ends a statement by itself")
def test_a_count_that_takes_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch, timed: Callable[..., None]) -> None:
    def sleep(self: Restore) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_sleep(30)")

    timed(20, "count")
    monkeypatch.setattr(Restore, "preview", sleep)
    operation = work_off(begin())
    assert (operation.state, operation.total) == (OperationState.DONE, None)


# --- done by commands -------------------------------------------------------------------------------------------------


def test_a_restore_by_command_is_shown_among_the_operations_and_a_dry_run_is_not(lost: Lost) -> None:
    lost(5)
    assert run("delayq_restore", "--dry-run").code == 0
    assert not Operation.objects.exists()
    assert run("delayq_restore", "--queue", "default").code == 0
    shown = only()
    assert (shown.action, shown.state, shown.described) == ("restore", OperationState.DONE, "default")
    assert shown.started_by.startswith("command:delayq_restore ")
    assert (shown.total, shown.done, shown.outcomes) == (5, 5, {"put": 5})
    assert (shown.worker, shown.leased_until, shown.position) == ("", None, "")
    assert shown.started_at is not None
    assert shown.finished_at is not None


EveryBatch = Callable[[Callable[[], object]], None]


@pytest.fixture
def every_batch(monkeypatch: pytest.MonkeyPatch) -> EveryBatch:
    """Call something after each batch of a restore; the operation is updated after each batch too."""

    def do(what: Callable[[], object]) -> None:
        original = RestoreOperation.progress

        def progress(self: RestoreOperation, *facts: Any) -> bool:
            self._written = float("-inf")
            answer = original(self, *facts)
            what()
            return answer

        monkeypatch.setattr(RestoreOperation, "progress", progress)

    return do


def test_a_restore_by_command_is_leased_to_the_command(lost: Lost, every_batch: EveryBatch) -> None:
    seen: list[Any] = []

    def look() -> None:
        row = only()
        seen.append((row.state, row.done, lifecycle.lease_next(DB, OPERATOR)))
        assert row.leased_until is not None
        assert row.leased_until > reads.now(DB)

    lost(9)
    every_batch(look)
    assert run("delayq_restore", batch_size=3).code == 0
    assert seen == [(OperationState.RUNNING, number, None) for number in (3, 6, 9)]
    assert only().state == OperationState.DONE


def test_a_command_stops_when_the_admin_asks(lost: Lost, every_batch: EveryBatch) -> None:
    ids = lost(9)
    every_batch(lambda: lifecycle.stop(only()))
    ran = run("delayq_restore", batch_size=3)
    assert ran.code == 1
    assert "Stopped from outside" in ran.err
    assert "not complete" in ran.out
    stopped = only()
    assert (stopped.state, stopped.worker) == (OperationState.STOPPED, "")
    assert stopped.done < 9
    # A worker goes on from where the command stopped.
    assert lifecycle.resume(stopped)
    done = work_off(stopped)
    assert (done.state, done.done) == (OperationState.DONE, 9)
    assert held() == due_tenths(*ids)


@pytest.mark.parametrize(
    ("words", "put"), [((), 3), (("--due-after", "2020-01-01T00:00:00+02:00", "--overdue", "spread=5m", "--yes"), 0)]
)
def test_a_restore_whose_command_was_killed_is_finished_by_a_worker(
    lost: Lost, every_batch: EveryBatch, words: tuple[str, ...], put: int
) -> None:
    class Killed(BaseException):
        """Nothing is written any more."""

    def die() -> None:
        Operation.objects.update(worker="the killed one", leased_until=timezone.now() - timedelta(seconds=1))
        raise Killed

    ids = [*schedule(3), *lost(6, due=-100)]
    every_batch(die)
    with pytest.raises(Killed):
        run("delayq_restore", *words, batch_size=3)
    left = only()
    # The first batch of a spread gets new due times, and is put later.
    assert (left.state, left.done, left.outcomes) == (OperationState.RUNNING, put, {"put": 3} if put else {"spread": 3})
    assert work_off(left).state == OperationState.DONE
    assert held().keys() == set(ids)


def test_a_command_that_loses_redis_has_failed(lost: Lost, redis_server: RedisServer, every_batch: EveryBatch) -> None:
    lost(9)
    every_batch(redis_server.stop)
    assert run("delayq_restore", batch_size=3).code == common.UNREACHABLE
    failed = only()
    assert failed.state == OperationState.FAILED
    assert "BrokerUnavailable" in failed.error
    assert failed.state in lifecycle.ENDED_EARLY


# --- done by loaders --------------------------------------------------------------------------------------------------


@pytest.fixture
def loader(redis_client: redis.Redis) -> Iterator[Loader]:
    brokers = BrokerSwitch(DB, dict)
    yield Loader(DB, brokers, "host/1-loader", UpkeepTuning())
    brokers.close()


def test_a_load_is_shown_unless_ordinary_or_empty(loader: Loader, redis_client: redis.Redis, lost: Lost) -> None:
    loader.tick()
    assert not Operation.objects.exists()
    ids = lost(5)
    for _ in range(4):
        loader.tick()
    shown = only()
    assert (shown.action, shown.state, shown.described) == ("restore", OperationState.DONE, "all queues")
    assert (shown.started_by, shown.done, shown.outcomes) == ("worker:host/1-loader", 5, {"put": 5})
    assert held() == due_tenths(*ids)

    redis_client.flushall()
    for _ in range(4):
        loader.tick()
    assert [row.outcomes for row in Operation.objects.all()] == [{"put": 5}] * 2


def test_nothing_depends_on_the_table_of_operations(
    loader: Loader, lost: Lost, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **facts: Any) -> Any:
        raise DatabaseError("no")

    monkeypatch.setattr(Operation.objects, "using", refuse)
    ids = lost(3)
    assert run("delayq_restore").code == 0
    assert held() == due_tenths(*ids)
    ids += lost(2)
    loader.tick()
    assert held() == due_tenths(*ids)


def test_a_load_that_is_given_up_says_so_in_words(loader: Loader, lost: Lost) -> None:
    loader.tuning.pages_per_tick = 1
    lost(5)
    loader.tick()
    loader.release()
    assert (only().state, only().error) == (
        OperationState.FAILED,
        "given up by its worker, which ends or begins anew; the rest is loaded all the same",
    )


def test_a_load_that_is_left_to_the_garbage_collector_asks_nobody(redis_client: redis.Redis, lost: Lost) -> None:
    """The collector may run in the middle of a query on the same connection, where another one would wait for ever."""
    brokers = BrokerSwitch(DB, dict)
    left = Loader(DB, brokers, "host/1-loader", UpkeepTuning(pages_per_tick=1))
    lost(5)
    assert left.tick() == 0.0
    commands = redis_client.info("stats")["total_commands_processed"]
    with CaptureQueriesContext(connection) as asked:
        del left
        gc.collect()
    assert not asked.captured_queries
    # The question itself is one.
    assert redis_client.info("stats")["total_commands_processed"] == commands + 1
    brokers.close()


def test_a_load_that_fails_with_an_error_without_text_is_shown_as_failed() -> None:
    with pytest.raises(TimeoutError), _ObservedLoad(DB, "host/1", from_beginning=True) as observed:
        observed.progress(Put(put=3), 3)
        raise TimeoutError
    failed = only()
    assert (failed.state, failed.outcomes) == (OperationState.FAILED, {"put": 3})
    assert "TimeoutError" in failed.error


# --- checks -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("puts_are_flushed")
def test_a_check_counts_mismatches_by_queue_also_those_only_in_redis(redis_client: redis.Redis, settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "GRACE": 0.1}
    there = broker()
    ensure_horizon(DB, there, lease=0.001, worker="test")
    missing, _held = schedule(2)
    there.remove("default", [missing])
    redis_client.zadd(there.keys("default").ready, {"999999999": 1.0})
    [stuck] = schedule(1, due=-1, queue="other")
    assert claims(stuck)
    unguarded(Message).filter(pk=stuck).update(leased_until=timezone.now() - timedelta(hours=1))
    unguarded(Message).filter(pk__in=schedule(1, queue="gone")).delete()
    there.close()

    with acting_as("user:anna"):
        done = work_off(lifecycle.start(DB, "check", {}, {}, described="", reason=""))

    assert (done.state, done.error, done.outcomes) == (OperationState.DONE, "", {"missing": 1, "extra": 2})
    found = restoring.results_of(done)
    differ = {queue: each for queue, each in found.items() if sum(each.values()) > each["compared"]}
    wrong = {queue: (each["missing"], each["extra"], each["stuck"]) for queue, each in differ.items()}
    assert wrong == {"default": (1, 1, 0), "gone": (0, 1, 0), "other": (0, 0, 1)}
