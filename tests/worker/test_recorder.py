"""The recorder: it renews leases, by which handlers learn of cancels, and gathers outcomes, which it writes."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import OperationalError, connections, transaction
from django.db.models import F
from django.dispatch import Signal
from django.utils import timezone

from django_delayq import LeaseLost, cancel_message, handler, schedule_message, signals
from django_delayq.core.outcomes import Ack, GiveUp, Outcome, Release, Retry
from django_delayq.core.states import State
from django_delayq.core.verdicts import Verdict
from django_delayq.models import Message
from django_delayq.models.messages import Lease
from django_delayq.project import registry
from django_delayq.record import crashes, reads, transitions
from django_delayq.record.sql import statements
from django_delayq.record.sql.rows import Success
from django_delayq.worker.processes.process import Parts
from django_delayq.worker.run import recorder as module
from django_delayq.worker.run.delivery import Delivery
from django_delayq.worker.run.recorder import Ended, LeaseRenewer, Recorder
from django_delayq.worker.run.run_tuning import RunTuning
from tests.support import limits
from tests.support.assembled import Assemble, deliver
from tests.support.claims import DB, claimed, last_move, locked_by_a_cancel, needs_row_locks, state
from tests.support.limits import admit, admit_rows, refused
from tests.support.receivers import heard, receiving
from tests.support.rows import unguarded
from tests.support.steps import lose
from tests.support.workers import PATIENCE, eventually

pytestmark = pytest.mark.django_db(transaction=True)


def hold_with_old_leases(parts: Parts, *deliveries: Delivery) -> None:
    """Have a worker hold deliveries whose leases are half over. The renewer of its recorder sees them from now on."""
    for delivery in deliveries:
        delivery.leased_mono -= 40
    parts.pool.threads.held.add(deliveries)


@pytest.fixture
def limits_of_one(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One message of a queue runs at once."""
    settings.DELAYQ = {**settings.DELAYQ, "LIMITS": {"default": {"limit": 1}}}
    monkeypatch.setitem(limits.LEASES, "t.ok", 60.0)


def claimed_by_a_worker(recorder: Recorder, topic: str = "t.ok") -> Delivery:
    """Claim a message, as a worker with this recorder does."""
    (delivery,) = claimed(topic)
    delivery.extend_lease = recorder.extend
    return delivery


def finishes(act: Callable[[], object]) -> bool:
    """Call a function in another thread, and tell whether it returns."""

    def run() -> None:
        try:
            act()
        finally:
            connections.close_all()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    return not thread.is_alive()


def test_a_long_transaction_that_cancels_one_message_costs_nobody_a_lease(parts: Parts) -> None:
    needs_row_locks()
    one, other = claimed("t.ok", "t.ok")
    renewer = LeaseRenewer(DB, parts.pool.held)
    with locked_by_a_cancel(one.id):
        before = time.monotonic()
        hold_with_old_leases(parts, one, other)
        renewer.tick()
        # The other transaction ends when the block does, or else after PATIENCE.
        assert time.monotonic() - before < PATIENCE / 2
        assert not one.lost
        assert (one.leased_mono >= before, other.leased_mono >= before) == (True, True)
        assert not one.cancel_requested
    renewer._renew_at = 0.0
    one.claimed_mono -= 40
    renewer.tick()
    assert one.cancel_requested


def test_a_lost_lease_is_noticed(parts: Parts) -> None:
    (one,) = claimed("t.ok")
    crashes.release_worker(DB, "w", actor="test", shutdown=False)
    hold_with_old_leases(parts, one)
    LeaseRenewer(DB, parts.pool.held).tick()
    assert one.lost


@pytest.mark.usefixtures("limits_of_one")
@pytest.mark.parametrize(
    ("outcome", "write"),
    [(Ack(), Recorder.write_successes), (GiveUp("failed"), Recorder.write_failures)],
    ids=["success", "failure"],
)
def test_a_delivery_keeps_its_place_until_it_ends_though_an_earlier_one_has_succeeded(
    parts: Parts, outcome: Outcome, write: Callable[[Recorder, list[Ended], bool], None]
) -> None:
    first, other = (schedule_message("t.ok") for _ in range(2))
    assert admit(first, other) == [first.pk]
    lose(first.pk)
    (row,) = admit_rows(first)
    delivery = Delivery(row, registry.handlers()["t.ok"], DB)
    transitions.succeed(DB, [Success(first.pk, 1, "test")])
    hold_with_old_leases(parts, delivery)
    renewer = LeaseRenewer(DB, parts.pool.held)
    renewer.tick()
    assert delivery.lost
    # The lease is half over once more, and later the one that it had would be over.
    Lease.objects.update(until=reads.now(DB) + timedelta(seconds=10))
    delivery.leased_mono -= 40
    renewer.tick()
    assert Lease.objects.get().until > reads.now(DB) + timedelta(seconds=30)
    assert refused(other)
    write(parts.recorder, [Ended(delivery, outcome, "test")], False)
    assert admit(other) == [other.pk]


def test_an_extension_within_the_handlers_transaction_counts_at_once_and_locks_nothing(recorder: Recorder) -> None:
    needs_row_locks()
    one = claimed_by_a_worker(recorder)
    before = Message.objects.get(pk=one.id).lease_ends_at
    assert before is not None
    answers: list[Any] = []

    def cancel() -> None:
        answers.append(cancel_message(one.id).verdict)
        answers.append(Message.objects.get(pk=one.id).lease_ends_at)

    with transaction.atomic():
        one.extend("10m")
        assert finishes(cancel), "the cancel waits for the handler's transaction"
    assert answers[0] == Verdict.REQUESTED
    assert answers[1] > before + timedelta(minutes=5)


@pytest.mark.parametrize("by_hand", [False, True])
def test_an_extension_outlasts_a_rollback_or_else_the_worker_renews_the_lease(parts: Parts, by_hand: bool) -> None:
    one = claimed_by_a_worker(parts.recorder)
    before = Message.objects.get(pk=one.id).lease_ends_at
    assert before is not None
    if by_hand:
        transaction.set_autocommit(False)
        one.extend("10m")
        transaction.rollback()
        transaction.set_autocommit(True)
    else:
        with transaction.atomic():
            one.extend("10m")
            transaction.set_rollback(True)
    hold_with_old_leases(parts, one)
    LeaseRenewer(DB, parts.pool.held).tick()
    after = Message.objects.get(pk=one.id).lease_ends_at
    assert after is not None
    assert after > before


def test_an_extension_does_not_wait_for_the_handlers_own_transaction(recorder: Recorder) -> None:
    """It has locked the row of the message, as it does with the next one under its own key."""
    needs_row_locks()
    one = claimed_by_a_worker(recorder)

    def handle() -> None:
        with transaction.atomic():
            assert Message.objects.select_for_update().filter(pk=one.id).exists()
            one.extend("10m")

    assert finishes(handle)
    assert not one.lost
    unguarded(Message).filter(pk=one.id).update(deliveries=F("deliveries") + 1)
    with transaction.atomic(), pytest.raises(LeaseLost):
        one.extend("10m")


def test_an_extension_waits_for_a_silent_database_for_a_limited_time_and_is_made_when_that_answers(
    assembled: Assemble, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The timeout moves at once. The second call finds that the lease was lost meanwhile."""
    recorder, answers = assembled().recorder, threading.Event()
    one, other = claimed_by_a_worker(recorder), claimed_by_a_worker(recorder)
    for delivery in (one, other):
        delivery._deadline = time.monotonic() + 1
    extend = statements(DB).extend

    def ask(*arguments: Any, **options: Any) -> Any:
        if not answers.is_set():
            raise OperationalError("no server connection is free")
        return extend(*arguments, **options)

    monkeypatch.setattr(type(statements(DB)), "extend", lambda _self, *given, **options: ask(*given, **options))
    before = time.monotonic()
    ends = [delivery.extend("10m") for delivery in (one, other)]
    assert all(end is not None and end > timezone.now() + timedelta(minutes=5) for end in ends)
    assert [delivery.leased_mono < before for delivery in (one, other)] == [True, True]
    assert caplog.text.count("goes on before its lease is extended") == 1
    unguarded(Message).filter(pk=other.id).update(deliveries=F("deliveries") + 1)
    answers.set()
    eventually(lambda: one.leased_mono > before and other.lost, "the worker extends the lease")
    with pytest.raises(LeaseLost):
        other.extend("10m")
    until = Message.objects.get(pk=one.id).lease_ends_at
    assert until is not None
    assert until > timezone.now() + timedelta(minutes=5)


def test_a_renewal_and_an_interrupt_wait_for_no_lock_of_the_handlers_thread() -> None:
    (one,) = claimed("t.ok")
    before = one.leased_mono

    def note() -> None:
        one.interrupt()
        one.note_renewal(before + 5, cancel_requested=True)
        one.note_renewal(before + 3, cancel_requested=False)

    with one._lock:
        assert finishes(note)
    assert (one.leased_mono, one.cancel_requested) == (before + 5, True)


# --- outcomes ---------------------------------------------------------------------------------------------------------


def test_a_released_delivery_costs_no_attempt_and_counts_as_a_conflict_that_it_was(recorder: Recorder) -> None:
    (one,) = claimed("t.ok")
    recorder.submit(one, Release("met another", conflict=True), "worker:w")
    assert recorder.flush(60)
    message = Message.objects.get(pk=one.id)
    assert (message.state, message.attempts, message.conflicts) == (State.SCHEDULED, 0, 1)
    assert (last_move(one).reason, last_move(one).error) == ("met another", "")


@pytest.mark.parametrize("outcome", [Ack(), Retry(timedelta(0), "failed")])
def test_a_long_transaction_that_cancels_one_message_holds_up_no_other_outcome(
    recorder: Recorder, outcome: Ack | Retry
) -> None:
    needs_row_locks()
    one, other = claimed("t.ok", "t.ok")
    with locked_by_a_cancel(one.id):
        recorder.submit(one, outcome, "worker:w")
        recorder.submit(other, Ack(), "worker:w")
        eventually(lambda: state(other) == State.CONSUMED, "the other outcome")
        assert state(one) == State.RUNNING
        assert not recorder.flush(0.2)
    assert recorder.flush(60)
    assert state(one) == (State.CONSUMED if isinstance(outcome, Ack) else State.CANCELLED)


def test_a_receiver_that_takes_its_time_holds_up_neither_outcomes_nor_upkeep(
    parts: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[int] = []
    may_end = threading.Event()
    sender = parts.recorder.sender
    sender.start()

    def be_slow(message_id: int, **facts: Any) -> None:
        may_end.wait(PATIENCE)
        told.append(message_id)

    late = schedule_message("t.ok", expires=0.001)
    one, other = claimed("t.ok", "t.ok")
    with receiving(be_slow, signals.message_succeeded, signals.message_dead, signals.message_expired):
        parts.recorder.submit(one, Ack(), "worker:w")
        eventually(lambda: state(one) == State.CONSUMED, "the first outcome")
        parts.recorder.submit(other, GiveUp("ValueError: no"), "worker:w")
        eventually(lambda: state(other) == State.DEAD, "the other outcome")
        eventually(lambda: parts.reaper.tick() and not Message.objects.filter(state=State.SCHEDULED), "the expiry")
        assert parts.recorder.flush(60)
        assert told == []
        sender.finish(0.01)
        assert "not reported: 3" in caplog.text
        may_end.set()
        sender.join(60)
    assert told == [one.id, other.id, late.pk]


class Payload(dict[str, Any]):
    """A payload to which a weak reference is possible."""


def test_successes_that_wait_for_slow_receivers_keep_no_payload_in_memory(
    parts: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    # Otherwise the writer of the log keeps the last ones.
    caplog.set_level(logging.WARNING, "django_delayq")
    may_end, sender = threading.Event(), parts.recorder.sender
    sender.start()
    deliveries = claimed("t.ok", "t.ok")
    for delivery in deliveries:
        delivery.payload = Payload()
    kept = [weakref.ref(delivery.payload) for delivery in deliveries]
    del delivery
    with receiving(lambda **facts: may_end.wait(PATIENCE), signals.message_succeeded):
        while deliveries:
            parts.recorder.submit(deliveries.pop(), Ack(), "worker:w")
        assert parts.recorder.flush(60)
        eventually(lambda: [one() for one in kept] == [None, None], "both are forgotten")
        may_end.set()
        sender.finish(60)


def test_no_message_is_taken_while_receivers_are_far_behind(
    assembled: Assemble, caplog: pytest.LogCaptureFixture
) -> None:
    parts = assembled(redis=False, run_tuning=RunTuning(most_untold=2))
    consumer, sender = parts.consumer, parts.recorder.sender
    may_end = threading.Event()
    sender.start()
    before = claimed("t.ok", "t.ok")
    message = schedule_message("t.ok")
    with receiving(lambda **facts: may_end.wait(PATIENCE), signals.message_succeeded):
        for delivery in before:
            parts.recorder.submit(delivery, Ack(), "worker:w")
        assert parts.recorder.flush(60)
        consumer.run_round()
        assert Message.objects.get(pk=message.pk).state == State.SCHEDULED
        assert "2 signals and failures wait" in caplog.text
        may_end.set()
        sender.finish(60)
    consumer.run_round()
    assert [delivery.id for delivery in parts.pool.held()] == [message.pk]


def test_what_a_receiver_schedules_in_the_end_is_delivered_too() -> None:
    def go_on(topic: str, **facts: Any) -> None:
        time.sleep(0.2)
        if topic == "t.first":
            schedule_message("t.second")

    for topic in ("t.first", "t.second"):
        handler(topic)(lambda message: None)
    schedule_message("t.first")
    with receiving(go_on, signals.message_succeeded):
        deliver()
    assert Message.objects.get(topic="t.second").state == State.CONSUMED


def test_a_success_that_came_when_its_message_had_ended_is_not_told(recorder: Recorder) -> None:
    (one,) = claimed("t.ok")
    assert transitions.succeed(DB, [Success(one.id, one.deliveries, "another")]) == {one.id}
    with heard(signals.message_succeeded) as told:
        recorder.submit(one, Ack(), "worker:w")
        assert recorder.flush(60)
    assert told == []


@pytest.mark.parametrize(
    ("outcome", "event", "signal"),
    [
        (Ack(), None, signals.message_succeeded),
        (GiveUp("ValueError: no"), "dead", signals.message_dead),
        (Retry(timedelta(0), "ValueError: no"), "retried", signals.message_retried),
        (Release("shutdown"), "released", None),
    ],
    ids=["consumed", "dead", "retried", "released"],
)
def test_an_outcome_whose_reply_was_lost_is_told_once(
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    outcome: Any,
    event: str | None,
    signal: Signal | None,
) -> None:
    (one,) = claimed("t.ok")
    name = "succeed" if isinstance(outcome, Ack) else "fail"
    write = getattr(transitions, name)
    published: list[Any] = []

    def lose(*arguments: Any, **options: Any) -> None:
        monkeypatch.setattr(transitions, name, write)
        write(*arguments, **options)
        raise OperationalError("server closed the connection unexpectedly")

    monkeypatch.setattr(transitions, name, lose)
    monkeypatch.setattr(module, "publish_scheduled", lambda using, moves, send: published.extend(moves))
    with heard(*filter(None, [signal])) as seen:
        recorder.submit(one, outcome, "worker:w")
        assert recorder.flush(60)
    assert [facts["message_id"] for facts in seen] == [one.id] * bool(signal)
    events = [getattr(record, "delayq_event", None) for record in caplog.records]
    assert event is None or events.count(event) == 1
    assert "refused" not in caplog.text
    assert [m.id for m in published] == [one.id] * (event is not None)


# --- outcomes that are written together -------------------------------------------------------------------------------


def test_outcomes_that_follow_closely_are_written_together(
    assembled: Assemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write, and each sleep of the recorder, waits until the test lets it go on."""
    batches: list[int] = []
    sleeps: list[float] = []
    writing, may_write, asleep, may_wake = (threading.Semaphore(0) for _ in range(4))
    succeed = transitions.succeed

    def write(using: str, successes: list[Success], **options: Any) -> set[int]:
        batches.append(len(successes))
        writing.release()
        assert may_write.acquire(timeout=PATIENCE)
        return succeed(using, successes, **options)

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        asleep.release()
        assert may_wake.acquire(timeout=PATIENCE)

    monkeypatch.setattr(transitions, "succeed", write)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 1000.0, sleep=sleep))
    recorder, held = assembled().recorder, claimed(*["t.ok"] * 6)

    def submit(number: int) -> None:
        for _ in range(number):
            recorder.submit(held.pop(), Ack(), "worker:w")

    submit(1)
    assert writing.acquire(timeout=PATIENCE)
    submit(2)
    may_write.release(2)
    assert writing.acquire(timeout=PATIENCE)
    submit(1)
    assert asleep.acquire(timeout=PATIENCE)
    # After one alone nothing gathered.
    assert batches == [1, 2]
    assert sleeps == [pytest.approx(recorder.tuning.gather_time)]
    submit(1)
    may_wake.release()
    assert writing.acquire(timeout=PATIENCE)
    # Many do not wait for more.
    recorder.tuning.enough_outcomes = 1
    submit(1)
    may_write.release(2)
    assert writing.acquire(timeout=PATIENCE)
    assert (batches, len(sleeps)) == ([1, 2, 2, 1], 1)
