"""Leases that ran out, and the rows that show which worker processes are alive."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import connections, transaction
from django.db.models.signals import post_delete

from django_delayq import cancel_message, run_message, schedule_message
from django_delayq.core import actors, clock, in_tests
from django_delayq.core.outcomes import Ack
from django_delayq.core.states import State
from django_delayq.models import Message, Worker
from django_delayq.models.messages import Lease, lease_is_over
from django_delayq.record import crashes, reads, transitions
from django_delayq.record.sql import moves, statements
from django_delayq.record.sql.rows import Failure, LeaseRenewal, Success, Ticket
from django_delayq.worker.processes.process import Parts
from django_delayq.worker.run.delivery import Delivery
from django_delayq.worker.run.recorder import Ended, LeaseRenewer
from django_delayq.worker.shared.due_services import DueServices
from django_delayq.worker.upkeep.janitor import Janitor
from django_delayq.worker.upkeep.reaper import Reaper
from django_delayq.worker.upkeep.upkeep_tuning import UpkeepTuning
from tests.support.claims import DB, claimed, last_move, locked_by_a_cancel, needs_row_locks, state
from tests.support.receivers import receiving
from tests.support.rows import unguarded
from tests.support.statements import count_statements
from tests.support.transactions import lock_table, unfinished
from tests.support.workers import eventually

pytestmark = pytest.mark.django_db(transaction=True)


def expired(*topics: str, **options: Any) -> list[Delivery]:
    """Claim messages of these topics, and let their leases run out."""
    deliveries = claimed(*topics, **options)
    over = reads.now(DB) - timedelta(seconds=1)
    unguarded(Message).filter(pk__in=[delivery.id for delivery in deliveries]).update(leased_until=over)
    return deliveries


@pytest.fixture
def reaper(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> Reaper:
    """A reaper that ends leases which are still over at its next look, however late that is."""
    monkeypatch.setattr(crashes, "may_reap", lambda using: True)
    parts.reaper.tuning = UpkeepTuning(confirm_after=0.0)
    return parts.reaper


@pytest.fixture
def has_time(reaper: Reaper) -> None:
    """Let a look take long on a busy machine."""
    reaper.tuning.longest_look = 60.0


@pytest.mark.usefixtures("has_time")
def test_no_lease_is_reaped_before_its_holder_could_report_after_a_restart(
    reaper: Reaper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (one,) = expired("t.ok")
    with monkeypatch.context() as patch:
        patch.setattr(crashes, "may_reap", lambda using: False)
        reaper.tick()
        reaper.tick()
    assert state(one) == State.RUNNING
    reaper.tick()
    assert state(one) == State.SCHEDULED
    assert [record.delayq_event for record in caplog.records if hasattr(record, "delayq_event")] == ["released"]


def test_a_lease_that_ran_out_is_ended_only_when_it_is_still_over_later(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = expired("t.ok", "t.ok")
    now = 0.0
    monkeypatch.setattr("django_delayq.worker.upkeep.reaper.time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(crashes, "may_reap", lambda using: True)
    wait = parts.reaper.tick()
    # A renewal that has failed is tried before.
    assert wait > LeaseRenewer.longest_backoff
    now = LeaseRenewer.longest_backoff
    assert parts.reaper.tick() == wait
    assert (state(one), state(other), parts.reaper.is_confirming) == (State.RUNNING, State.RUNNING, True)
    assert statements(DB).extend([LeaseRenewal(one.id, one.deliveries, 60.0)])
    now = wait
    assert parts.reaper.tick() == parts.reaper.tuning.reap_interval
    assert (state(one), state(other)) == (State.RUNNING, State.SCHEDULED)
    assert parts.reaper.tick() == parts.reaper.tuning.reap_interval
    assert (state(one), parts.reaper.is_confirming) == (State.RUNNING, False)


@pytest.mark.postgresql("the ORM asks for each kind, and for the time")
def test_a_look_that_finds_no_lease_over_is_one_statement(reaper: Reaper) -> None:
    claimed("t.ok", "t.ok")
    reaper.tick()
    assert count_statements(reaper.tick) == 1


def test_a_process_that_does_not_lead_looks_again_at_leases_that_ran_out(reaper: Reaper) -> None:
    """The leader may live and do nothing. And a look of two minutes ago would confirm a lease that was
    renewed meanwhile."""
    reaper.tuning.confirm_after = 0.001
    (one,) = expired("t.ok")
    turns = DueServices([reaper], lambda: False)
    assert turns.run_due() < 1.0
    eventually(lambda: turns.run_due() > 0 and state(one) == State.SCHEDULED, "the message is taken back")


def test_a_new_delivery_is_not_ended_for_the_lease_of_an_earlier_one(reaper: Reaper) -> None:
    (one,) = expired("t.ok")
    reaper.tick()
    crashes.release_worker(DB, "w", actor="test", shutdown=True)
    assert transitions.claim(DB, [Ticket(one.id)], {"t.ok": 60.0}, "w")
    unguarded(Message).filter(pk=one.id).update(leased_until=reads.now(DB) - timedelta(seconds=1))
    assert crashes.reap(DB, actor="test", among={(one.id, 1)}) == []
    reaper.tick()
    assert state(one) == State.RUNNING


@pytest.mark.parametrize("table", ["delayq_message", "delayq_lease"])
@pytest.mark.postgresql("needs locks on tables")
def test_a_reaper_that_waited_for_a_lock_on_a_table_waits_for_the_renewals_too(reaper: Reaper, table: str) -> None:
    (one,) = expired("t.ok")
    reaper.tick()

    def tick() -> None:
        try:
            reaper.tick()
        finally:
            connections.close_all()

    thread = threading.Thread(target=tick)
    # Everybody may read.
    with unfinished(lambda: lock_table(table, "EXCLUSIVE")):
        began = time.monotonic()
        thread.start()
        eventually(lambda: time.monotonic() - began > 2 * reaper.tuning.longest_look, "the reaper waits for long")
        assert thread.is_alive(), "the reaper takes no notice of the lock"
    thread.join()
    assert state(one) == State.RUNNING

    def ends() -> bool:
        reaper.tick()
        return state(one) == State.SCHEDULED

    # A look that is slow for another reason confirms nothing either.
    eventually(ends, "the lease is ended")


def hand_the_key_over(message_id: int) -> None:
    """Do what a handler does that schedules the next message under the key of its own, in a transaction."""
    with actors.handling(DB, "t.ok", "chain", message_id):
        schedule_message("t.ok", key="chain", delay="1h")


# What locks the row of a running message until its transaction ends, and does not end the delivery.
LOCKS = {
    "an action that is too late": run_message,
    "a cancel": cancel_message,
    "the next one of a chain": hand_the_key_over,
}


@pytest.mark.usefixtures("has_time")
@pytest.mark.parametrize("lock", LOCKS.values(), ids=LOCKS)
@pytest.mark.parametrize("is_rolled_back", [False, True], ids=["committed", "rolled back"])
def test_a_holder_that_could_not_renew_a_locked_row_has_its_time_when_the_lock_goes(
    reaper: Reaper, lock: Callable[[int], object], is_rolled_back: bool
) -> None:
    """The reaper is the first who comes after the lock, each time."""
    needs_row_locks()
    (one,) = expired("t.ok", key="chain")
    # Its worker knows that it is late.
    one.leased_mono -= one.lease

    def act() -> None:
        lock(one.id)
        transaction.set_rollback(is_rolled_back)

    with unfinished(act):
        reaper.tick()
        reaper.tick()
    reaper.tick()
    LeaseRenewer(DB, lambda: [one]).tick()
    reaper.tick()
    assert (state(one), one.lost) == (State.RUNNING, False)


@pytest.mark.usefixtures("has_time")
@pytest.mark.parametrize("lock", [cancel_message, run_message], ids=["cancel", "reschedule"])
def test_a_success_that_waits_for_a_locked_row_is_recorded_when_the_lock_goes(
    reaper: Reaper, parts: Parts, lock: Callable[[int], object]
) -> None:
    """Nobody renews the lease of a handler that has returned."""
    needs_row_locks()
    (one,) = expired("t.ok")
    ended = Ended(one, Ack(), "test")
    with unfinished(lambda: lock(one.id)):
        parts.recorder.write_successes([ended], False)
        reaper.tick()
        reaper.tick()
    reaper.tick()
    parts.recorder.write_successes([ended], False)
    assert (last_move(one).from_state, state(one)) == (State.RUNNING, State.CONSUMED)


@pytest.mark.usefixtures("has_time")
def test_the_lease_of_a_dead_holder_is_ended_after_the_lock_and_others_do_not_wait_for_it(reaper: Reaper) -> None:
    needs_row_locks()
    one, other = expired("t.ok", "t.ok")
    with locked_by_a_cancel(one.id):
        reaper.tick()
        reaper.tick()
        assert (state(one), state(other)) == (State.RUNNING, State.SCHEDULED)
    reaper.tick()
    reaper.tick()
    assert state(one) == State.CANCELLED


@pytest.mark.usefixtures("has_time")
def test_a_lease_is_renewed_while_its_row_is_locked(reaper: Reaper) -> None:
    """Else whoever reads leases takes the delivery for a dead one."""
    needs_row_locks()
    (one,) = expired("t.ok")
    # Its worker knows that it is late.
    one.leased_mono -= one.lease
    with locked_by_a_cancel(one.id):
        LeaseRenewer(DB, lambda: [one]).tick()
        assert not Message.objects.filter(lease_is_over(reads.now(DB))).exists()
    crashes.release_worker(DB, "w", actor="test", shutdown=True)
    one.leased_mono -= one.lease
    LeaseRenewer(DB, lambda: [one]).tick()
    assert one.lost


def test_a_lease_that_is_renewed_while_the_reaper_looks_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The renewal is committed after the reaper has found the row, and before it has locked it."""
    (one,) = expired("t.ok")
    move = moves.move

    def renew_first(using: str, where: Any, decide: Any, **options: Any) -> Any:
        def late(message: Message, at: datetime) -> Any:
            Lease.objects.create(message_id=one.id, delivery=one.deliveries, until=at + timedelta(minutes=1))
            return decide(message, at)

        return move(using, where, late, **options)

    monkeypatch.setattr(transitions, "move", renew_first)
    assert crashes.reap(DB, actor="test") == []
    assert state(one) == State.RUNNING


@pytest.mark.usefixtures("has_time")
@pytest.mark.parametrize("extended", [False, True])
def test_a_live_holder_keeps_its_lease_when_the_databases_clock_is_set_ahead(
    reaper: Reaper, monkeypatch: pytest.MonkeyPatch, extended: bool
) -> None:
    shown = clock.ceil_tenth(reads.now(DB)) + timedelta(seconds=1)
    monkeypatch.setattr(in_tests, "clock", lambda: shown)
    (one,) = claimed("t.ok")
    # It has run for five seconds: less than a third of its lease.
    one.claimed_mono -= 5
    one.leased_mono -= 5
    if extended:
        one.extend("1h")
    shown += timedelta(hours=2)
    reaper.tick()
    LeaseRenewer(DB, lambda: [one]).tick()
    reaper.tick()
    assert (state(one), one.lost) == (State.RUNNING, False)


def test_leases_of_deliveries_that_ended_are_dropped() -> None:
    one, other, third = claimed("t.ok", "t.ok", "t.ok")
    for delivery in (one, other, third):
        assert statements(DB).extend([LeaseRenewal(delivery.id, delivery.deliveries, 60.0)])
    transitions.succeed(DB, [Success(one.id, one.deliveries, "test")])
    transitions.fail(DB, [Failure(other.id, other.deliveries, "test", delay=timedelta(0))])
    Janitor(DB).tick()
    assert list(Lease.objects.values_list("message_id", flat=True)) == [third.id]
    assert Message.objects.get(pk=third.id).lease_ends_at is not None


# --- rows of workers --------------------------------------------------------------------------------------------------


def test_the_rows_of_dead_workers_are_deleted_whatever_a_project_receives() -> None:
    """Some projects follow what is deleted of all models."""

    def refuse(**facts: object) -> None:
        raise AssertionError(facts["sender"])

    now = reads.now(DB)
    for name, seen_at in (
        ("dead", now - 2 * UpkeepTuning().dead_worker_retention),
        ("silent", now - timedelta(hours=1)),
    ):
        Worker.objects.create(name=name, host="h", pid=1, started_at=seen_at, seen_at=seen_at)
    with receiving(refuse, post_delete):
        Janitor(DB).tick()
    assert [worker.name for worker in Worker.objects.all()] == ["silent"]
