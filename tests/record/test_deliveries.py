"""Claims of messages, and the reports of their deliveries."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from django_delayq import cancel_message, requeue_message, reschedule_message
from django_delayq.core.clock import to_tenths
from django_delayq.core.states import State
from django_delayq.core.verdicts import Verdict
from django_delayq.models import Message
from django_delayq.record import crashes, reads, transitions
from django_delayq.record.sql import statements
from django_delayq.record.sql.rows import Failure, LeaseRenewal, Success, Ticket
from tests.support.claims import needs_row_locks
from tests.support.rows import unguarded
from tests.support.steps import (
    LEASES,
    TOPIC,
    ago,
    claim,
    claimed,
    due,
    fail,
    later,
    log,
    lose,
    message,
    moves,
    snapshot,
    state,
    succeed,
    until_due,
)
from tests.support.transactions import unfinished

pytestmark = pytest.mark.django_db
committed = pytest.mark.django_db(transaction=True)

# --- claim ------------------------------------------------------------------------------------------------------------


def test_a_message_that_was_moved_to_another_queue_is_not_claimed_from_the_old_one() -> None:
    message = due()
    unguarded(Message).filter(pk=message.pk).update(queue="other")
    tickets = [Ticket(message.pk)]
    assert transitions.claim("default", tickets, LEASES, "a", queue=message.queue) == []
    assert [row.id for row in transitions.claim("default", tickets, LEASES, "a", queue="other")] == [message.pk]


def test_a_claim_returns_the_message_as_it_was_scheduled() -> None:
    scheduled = due({"order": 7}, queue="fast", priority=5, key="k", headers={"h": 1}, max_attempts=3, retry=["4m"])
    (row,) = claim(scheduled.pk, worker="a")
    assert (row.id, row.topic, row.queue, row.key, row.priority) == (scheduled.pk, TOPIC, "fast", "k", 5)
    assert (row.payload, row.headers, row.due_at) == ({"order": 7}, {"h": 1}, scheduled.due_at)
    assert (row.attempts, row.deliveries, row.reported, row.max_attempts) == (0, 1, 0, 3)
    assert row.retry == {"fixed": [240.0]}
    now = message(scheduled.pk)
    assert (now.state, now.worker, now.deliveries) == (State.RUNNING, "a", 1)
    assert now.leased_until is not None
    assert timedelta(seconds=50) < now.leased_until - timezone.now() <= timedelta(seconds=60)
    assert row.claimed_at == now.transitions.get(to_state=State.RUNNING).at
    assert (row.timeout, row.lease) == (None, None)


def test_a_claim_holds_a_message_for_its_own_lease() -> None:
    own, handlers = due(lease="10m", timeout=False), due(timeout=2)
    rows = claim(own.pk, handlers.pk)
    assert {row.id: (row.timeout, row.lease) for row in rows} == {own.pk: (0.0, 600.0), handlers.pk: (2.0, None)}
    until = message(own.pk).leased_until, message(handlers.pk).leased_until
    assert until[0] is not None
    assert until[1] is not None
    assert timedelta(seconds=535) < until[0] - until[1] < timedelta(seconds=545)


def test_a_ticket_is_believed_no_more_than_a_tolerance_ahead_of_the_records_clock() -> None:
    row = later()
    ticket = Ticket(row.pk, to_tenths(row.due_at))
    assert claim(row.pk) == []
    for ahead in (0.0, 300.0):
        assert transitions.claim("default", [ticket], LEASES, "w", ahead=ahead) == []
    earlier = ticket._replace(ready_tenths=to_tenths(row.due_at) - 1)
    assert transitions.claim("default", [earlier], LEASES, "w", ahead=900.0) == []
    assert [claimed.id for claimed in transitions.claim("default", [ticket], LEASES, "w", ahead=900.0)] == [row.pk]


def test_a_message_moved_to_later_than_it_became_ready_is_not_claimed() -> None:
    id_ = due(due_at=ago(20)).pk
    ready_tenths = to_tenths(ago(10))
    reschedule_message(id_, due_at=ago(5))
    assert transitions.claim("default", [Ticket(id_, ready_tenths)], LEASES, "w") == []
    assert [row.id for row in claim(id_)] == [id_]


def test_a_message_past_its_expiry_is_not_claimed() -> None:
    gone, still = due(due_at=ago(30), expires=10).pk, due(due_at=ago(30), expires=60).pk
    assert [row.id for row in claim(gone, still)] == [still]


def test_a_topic_without_a_handler_here_is_left_to_another_worker() -> None:
    id_ = due().pk
    assert claim(id_, leases={"another.topic": 60.0}) == []
    assert claim(id_, leases={}) == []
    assert state(id_) == State.SCHEDULED


def test_unknown_ids_and_ids_given_or_claimed_twice_are_ignored() -> None:
    id_ = due().pk
    assert [row.id for row in claim(id_, 10**12, id_)] == [id_]
    assert claim(id_, worker="b") == claim() == []
    assert moves(id_) == ["scheduled", "scheduled>running"]


def test_the_log_of_a_claim_separates_waiting_in_redis_from_lateness() -> None:
    timed, queried = due(due_at=ago(20)).pk, due(due_at=ago(20)).pk
    ready_tenths = to_tenths(ago(3))
    transitions.claim("default", [Ticket(timed, ready_tenths)], LEASES, "a")
    claim(queried)
    by_redis, by_query = (log(id_)[-1] for id_ in (timed, queried))
    assert by_redis.ready_at is not None
    assert to_tenths(by_redis.ready_at) == ready_tenths
    assert by_query.ready_at is None


@committed
def test_a_claim_passes_over_locked_rows_and_does_not_wait() -> None:
    needs_row_locks()
    locked, free = due().pk, due().pk
    with unfinished(lambda: Message.objects.select_for_update().get(pk=locked)):
        assert [row.id for row in claim(locked, free)] == [free]


# --- success is absorbing ---------------------------------------------------------------------------------------------


def test_a_success_given_twice_in_one_batch_is_recorded_once() -> None:
    row = claimed()
    assert transitions.succeed("default", [Success(row.id, 1, "a")] * 2) == {row.id}
    assert moves(row.id)[-1:] == ["running>consumed"]
    assert message(row.id).reported == 1


def test_a_late_success_after_a_requeue_is_counted_within_bounds() -> None:
    row = claimed()
    lose(row.id)
    cancel_message(row.id)
    requeue_message(row.id)
    assert succeed(row.id, 1)
    now = message(row.id)
    assert now.reported + now.excused <= now.deliveries


# --- failure is fenced ------------------------------------------------------------------------------------------------


def test_a_failure_is_retried_after_its_delay_by_the_databases_clock() -> None:
    row = claimed()
    before = reads.now("default")
    assert fail(row.id, delay=timedelta(seconds=90), error="it broke", traceback="line 1")
    now = message(row.id)
    assert (now.state, now.attempts, now.reported, now.worker) == (State.SCHEDULED, 1, 1, "")
    assert timedelta(seconds=90) <= now.due_at - before < timedelta(seconds=100)
    assert now.due_at.microsecond % 100 == 0
    last = log(row.id)[-1]
    assert (last.error, last.traceback) == ("it broke", "line 1")


def test_a_failure_for_good_is_dead_and_stays_where_it_was_due() -> None:
    row = claimed()
    assert fail(row.id, dead=True, reason="given up")
    now = message(row.id)
    assert (now.state, now.due_at) == (State.DEAD, row.due_at)
    assert now.finished_at is not None


@pytest.mark.parametrize("delivery", [0, 1, 3])
@pytest.mark.parametrize("terms", [{}, {"dead": True}, {"counts": False}], ids=["retry", "dead", "release"])
def test_a_failure_of_another_delivery_changes_nothing(delivery: int, terms: dict[str, Any]) -> None:
    row = claimed()
    lose(row.id)
    claim(row.id, worker="b")
    before = snapshot(row.id)
    assert not fail(row.id, delivery, **terms)
    assert snapshot(row.id) == before
    assert fail(row.id, 2, **terms)
    # Nor does one that was recorded already.
    assert not fail(row.id, 2, **terms)


def test_the_report_of_the_later_delivery_in_a_batch_counts() -> None:
    row = claimed()
    lose(row.id)
    claim(row.id)
    reports = [Failure(row.id, 2, "b", error="current"), Failure(row.id, 1, "a", error="stale")]
    assert [moved.id for moved in transitions.fail("default", reports)] == [row.id]
    last = log(row.id)[-1]
    assert (last.error, last.actor) == ("current", "b")


def test_a_release_costs_no_attempt_and_keeps_the_due_time() -> None:
    row = claimed()
    assert fail(row.id, delay=None, counts=False, reason="shutdown", error="")
    now = message(row.id)
    assert (now.state, now.attempts, now.deliveries, now.reported) == (State.SCHEDULED, 0, 1, 1)
    assert now.due_at == row.due_at
    assert now.crashes == 0


def test_conflicts_are_counted_apart_and_anew_after_a_requeue() -> None:
    row = claimed()
    assert fail(row.id, 1, counts=False)
    for delivery in (2, 3):
        assert claim(row.id)
        assert fail(row.id, delivery, counts=False, conflict=True)
    (again,) = claim(row.id)
    assert (again.conflicts, again.attempts, again.reported) == (2, 0, 3)
    assert fail(row.id, 4, dead=True)
    assert requeue_message(row.id)
    (anew,) = claim(row.id)
    assert (anew.conflicts, anew.attempts, anew.reported) == (0, 0, 4)


def test_a_requested_cancel_wins_over_the_last_failure() -> None:
    row = claimed()
    assert cancel_message(row.id).verdict == Verdict.REQUESTED
    assert fail(row.id, dead=True, error="Reject: not wanted", exception="django_delayq.project.answers.Reject")
    now = message(row.id)
    assert (now.state, now.attempts, now.reported) == (State.CANCELLED, 1, 1)
    assert now.finished_at is not None
    last = log(row.id)[-1]
    assert (last.to_state, last.error) == (State.CANCELLED, "Reject: not wanted")
    assert last.reason.startswith("cancel requested")


def test_a_success_after_a_requested_cancel_is_a_success() -> None:
    row = claimed()
    cancel_message(row.id)
    assert succeed(row.id)
    assert state(row.id) == State.CONSUMED


def test_hundreds_of_reports_are_recorded_in_one_call() -> None:
    ids = [due().pk for _ in range(120)]
    assert len(claim(*ids)) == 120
    done = transitions.succeed("default", [Success(id_, 1, "a") for id_ in ids[:60]])
    failed = transitions.fail("default", [Failure(id_, 1, "a", delay=timedelta(0)) for id_ in ids])
    assert done == set(ids[:60])
    assert sorted(moved.id for moved in failed) == ids[60:]


# --- leases -----------------------------------------------------------------------------------------------------------


def test_a_lease_is_extended_by_its_own_delivery_only_and_never_shortened() -> None:
    row = claimed()
    until = message(row.id).lease_ends_at
    assert until is not None
    assert statements("default").extend([LeaseRenewal(row.id, 1, 1.0)]) == {row.id: False}
    assert message(row.id).lease_ends_at == until
    assert statements("default").extend([LeaseRenewal(row.id, 1, 300.0)]) == {row.id: False}
    longer = message(row.id).lease_ends_at
    assert longer is not None
    assert longer > until + timedelta(seconds=200)
    assert statements("default").extend([LeaseRenewal(row.id, 1, 1.0)]) == {row.id: False}
    assert message(row.id).lease_ends_at == longer
    assert statements("default").extend([LeaseRenewal(row.id, 2, 300.0), LeaseRenewal(10**12, 1, 9.0)]) == {}
    assert statements("default").extend([]) == {}


def test_a_lease_that_ran_out_accuses_nobody_and_the_message_can_be_claimed_again() -> None:
    row = claimed()
    assert crashes.reap("default", actor="reaper") == []
    lose(row.id)
    now = message(row.id)
    assert (now.state, now.attempts, now.reported, now.excused, now.crashes) == (State.SCHEDULED, 0, 0, 1, 0)
    assert now.due_at == row.due_at
    assert claim(row.id, worker="b")[0].deliveries == 2


def test_a_reap_with_a_limit_leaves_the_rest_to_the_next() -> None:
    ids = [claimed().id for _ in range(5)]
    unguarded(Message).update(leased_until=ago())
    sizes = [len(crashes.reap("default", limit=2, actor="r")) for _ in range(4)]
    assert sizes == [2, 2, 1, 0]
    assert {state(id_) for id_ in ids} == {State.SCHEDULED}


def test_the_messages_of_a_dead_worker_are_released_and_no_others() -> None:
    own, other = claimed(worker="host/1/child-2/thread"), claimed(worker="host/1/child-3/thread")
    moved = crashes.release_worker("default", "host/1/child-2", actor="s", shutdown=False)
    assert [one.id for one in moved] == [own.id]
    assert message(own.id).crashes == 1
    assert state(other.id) == State.RUNNING


# --- expiry -----------------------------------------------------------------------------------------------------------


def test_a_message_past_its_expiry_expires_and_no_other() -> None:
    gone = due(due_at=ago(30), expires=10).pk
    still, forever = due(due_at=ago(30), expires=60).pk, due(due_at=ago(30)).pk
    running = due(due_at=ago(30), expires=31).pk
    claim(running)
    unguarded(Message).filter(pk=running).update(expires_at=ago())
    assert [moved.id for moved in transitions.expire("default", actor="janitor")] == [gone]
    assert [state(id_) for id_ in (still, forever, running)] == ["scheduled", "scheduled", "running"]


# --- delivery by query ------------------------------------------------------------------------------------------------


def test_a_look_by_query_finds_neither_another_queue_or_topic_nor_what_expired_or_is_not_due() -> None:
    id_ = due().pk
    for other in ({"queue": "other"}, {"due_at": ago(30), "expires": 1}):
        due(**other)
    later()
    assert [ticket.id for ticket in statements("default").due("default", [TOPIC], 10)] == [id_]
    assert statements("default").due("default", ["another"], 10) == []
    assert until_due("default", ["another"]) is None
    assert until_due("default", [TOPIC]) is not None
