"""The renewal of leases, by which a handler learns of a cancel request and of a lost lease."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections, transaction
from django.db.models import F

from django_delayq import LeaseLost, cancel_message
from django_delayq.core.verdicts import Verdict
from django_delayq.models import Message
from django_delayq.record import crashes
from django_delayq.record.sql import statements
from django_delayq.record.sql.rows import LeaseRenewal
from django_delayq.worker.parts.delivery import Delivery
from django_delayq.worker.processes.assembly import Parts
from django_delayq.worker.run.recorder import LeaseRenewer
from tests.support.claims import DB, claimed, locked_by_a_cancel, needs_row_locks
from tests.support.workers import PATIENCE

pytestmark = pytest.mark.django_db(transaction=True)


def hold_with_old_leases(parts: Parts, *deliveries: Delivery) -> None:
    """Have a worker hold deliveries whose leases are half over. The renewer of its recorder sees them from now on."""
    for delivery in deliveries:
        delivery.leased_mono -= 40
    parts.pool.threads.held.add(deliveries)


def test_a_long_transaction_that_cancels_one_message_costs_the_others_no_lease(parts: Parts) -> None:
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
        assert (one.leased_mono < before - 30, other.leased_mono >= before) == (True, True)
    renewer._renew_at = 0.0
    renewer.tick()
    assert one.cancel_requested
    assert one.leased_mono >= before


def test_a_lost_lease_is_noticed(parts: Parts) -> None:
    (one,) = claimed("t.ok")
    crashes.release_worker(DB, "w", actor="test", shutdown=False)
    hold_with_old_leases(parts, one)
    LeaseRenewer(DB, parts.pool.held).tick()
    assert one.lost


def test_an_extension_within_the_handlers_transaction_counts_at_once_and_locks_nothing() -> None:
    needs_row_locks()
    (one,) = claimed("t.ok")
    before = Message.objects.get(pk=one.id).lease_ends_at
    assert before is not None
    answers: list[Any] = []

    def cancel() -> None:
        try:
            answers.append(cancel_message(one.id).verdict)
            answers.append(Message.objects.get(pk=one.id).lease_ends_at)
        finally:
            connections.close_all()

    with transaction.atomic():
        one.extend("10m")
        thread = threading.Thread(target=cancel)
        thread.start()
        thread.join(60)
        assert answers, "the cancel waits for the handler's transaction"
    thread.join()
    assert answers[0] == Verdict.REQUESTED
    assert answers[1] > before + timedelta(minutes=5)


def test_an_extension_does_not_wait_for_the_handlers_own_transaction() -> None:
    """It has locked the row of the message, as it does with the next one under its own key."""
    needs_row_locks()
    (one,) = claimed("t.ok")

    def handle() -> None:
        try:
            with transaction.atomic():
                assert Message.objects.select_for_update().filter(pk=one.id).exists()
                one.extend("10m")
        finally:
            connections.close_all()

    thread = threading.Thread(target=handle, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert not one.lost
    Message._base_manager.filter(pk=one.id).update(deliveries=F("deliveries") + 1)
    with transaction.atomic(), pytest.raises(LeaseLost):
        one.extend("10m")


def test_a_renewal_and_an_interrupt_wait_for_no_lock_of_the_handlers_thread() -> None:
    (one,) = claimed("t.ok")
    before = one.leased_mono

    def note() -> None:
        one.interrupt()
        one.note_renewal(before + 5, cancel_requested=True)
        one.note_renewal(before + 3, cancel_requested=False)

    with one._lock:
        thread = threading.Thread(target=note, daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
    assert (one.leased_mono, one.cancel_requested) == (before + 5, True)


def test_a_renewal_does_not_shorten_what_the_handler_has_extended() -> None:
    (one,) = claimed("t.ok")
    one.extend("10m")
    extended = Message.objects.get(pk=one.id).lease_ends_at
    assert statements(DB).extend([LeaseRenewal(one.id, one.deliveries, 30.0)]) == {one.id: False}
    assert Message.objects.get(pk=one.id).lease_ends_at == extended
