"""The outcomes that a recorder writes while other transactions hold their rows."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

from django_delayq import signals
from django_delayq.core.outcomes import Ack, Release, Retry
from django_delayq.core.states import State
from django_delayq.models import Message
from django_delayq.record import transitions
from django_delayq.record.sql.rows import Success
from django_delayq.worker.run.recorder import Ended, Recorder
from tests.support.claims import DB, claimed, last_move, locked_by_a_cancel, needs_row_locks, state
from tests.support.workers import eventually

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("conflict", [False, True])
def test_a_released_delivery_costs_no_attempt(recorder: Recorder, conflict: bool) -> None:
    (one,) = claimed("t.ok")
    recorder.submit(one, Release("shutdown", conflict=conflict), "worker:w")
    assert recorder.flush(60)
    message = Message.objects.get(pk=one.id)
    assert (message.state, message.attempts, message.reported, message.deliveries) == (State.SCHEDULED, 0, 1, 1)
    assert message.conflicts == conflict
    assert (last_move(one).reason, last_move(one).error) == ("shutdown", "")


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


@pytest.mark.parametrize(("again", "told"), [(True, 1), (False, 0)])
def test_a_success_whose_reply_was_lost_is_told_once(recorder: Recorder, again: bool, told: int) -> None:
    seen: list[int] = []

    def note(sender: object, message_id: int, **facts: object) -> None:
        seen.append(message_id)

    (one,) = claimed("t.ok")
    # The first try was committed, and its reply was lost; or else another delivery has ended the message.
    assert transitions.succeed(DB, [Success(one.id, one.deliveries, "worker:w", None)]) == {one.id}
    signals.message_succeeded.connect(note)
    try:
        recorder.write_successes([Ended(one, Ack(), "worker:w", time.monotonic())], again)
    finally:
        signals.message_succeeded.disconnect(note)
    assert seen == [one.id] * told
