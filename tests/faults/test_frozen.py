"""A worker freezes for longer than its lease and thaws after another one has taken its message over."""

from __future__ import annotations

import signal

import pytest

from django_delayq import schedule_message
from django_delayq.core.states import State
from django_delayq.models import Message
from django_delayq.record.sql.rows import Ticket
from tests.support.limits import DB, claim_limited
from tests.support.processes import Configure, Gate, Start
from tests.support.record_of import effects_per_message, log_of, path_of, wait_past_the_lease, wait_until
from tests.support.rows import unguarded
from tests.support.workers import Worker, eventually

pytestmark = [
    pytest.mark.usefixtures("quick_take_over"),
    pytest.mark.postgresql("a process that freezes in a transaction keeps the place of SQLite's one writer"),
]


def taken_over(start: Start, gate: Gate, topic: str) -> tuple[Message, Worker, Worker]:
    """Return a message whose first delivery is frozen, the frozen worker, and the one that runs the second delivery."""
    frozen = start()
    message = schedule_message(topic, gate.payload)
    eventually(lambda: gate.begun(message.pk, 1), "the first delivery begins")
    frozen.send_all(signal.SIGSTOP)
    wait_past_the_lease(message)
    # The second delivery keeps its lease, however slow the machine is.
    unguarded(Message).update(lease=60.0)
    other = start()
    eventually(lambda: gate.begun(message.pk, 2), "the second delivery begins")
    assert log_of(message)[2].reason == "lease ran out"
    return message, frozen, other


def test_the_late_failure_of_a_frozen_worker_is_refused(start: Start, gate: Gate) -> None:
    message, frozen, _other = taken_over(start, gate, "t.short_lease")
    gate.open("fail-1")
    gate.open("go-1")
    frozen.send_all(signal.SIGCONT)
    frozen.wait_for("Outcome refused")
    message.refresh_from_db()
    assert (message.state, message.attempts, message.deliveries) == (State.RUNNING, 0, 2)
    gate.open("go-2")
    wait_until(message, State.CONSUMED)
    assert (message.attempts, message.deliveries) == (0, 2)
    assert path_of(message) == ["scheduled", "running", "scheduled", "running", "consumed"]


def test_the_late_success_of_a_frozen_worker_counts_while_the_message_is_live(start: Start, gate: Gate) -> None:
    message, frozen, other = taken_over(start, gate, "t.short_lease")
    gate.open("go-1")
    frozen.send_all(signal.SIGCONT)
    wait_until(message, State.CONSUMED)
    assert log_of(message)[-1].delivery == 1
    gate.open("fail-2")
    gate.open("go-2")
    other.wait_for("Outcome refused")
    message.refresh_from_db()
    assert (message.state, message.attempts) == (State.CONSUMED, 0)


def test_a_late_success_gives_no_place_away_while_the_next_delivery_runs(
    start: Start, gate: Gate, configure: Configure
) -> None:
    """Until that delivery has ended no other message begins, and then the next one does."""
    configure(LIMITS={"default": {"limit": 1}})
    message, frozen, worker = taken_over(start, gate, "t.short_lease")
    other = schedule_message("t.short_lease", gate.payload)
    gate.open("go-1")
    frozen.send_all(signal.SIGCONT)
    wait_until(message, State.CONSUMED)
    frozen.send_all(signal.SIGTERM)
    assert frozen.wait() == 0
    admitted = claim_limited(DB, [Ticket(other.pk)], {other.topic: 60.0}, "a third worker")
    assert admitted.refused, "another message may begin beside the one that runs"
    gate.open("go-2")
    worker.wait_for("Outcome refused")
    eventually(lambda: gate.begun(other.pk, 1), "the other one begins")


@pytest.mark.parametrize(
    ("topic", "words", "effects"),
    [
        ("t.short_lease", "Outcome refused", 2),
        ("t.short_lease_tx", "finished this message first|Superseded|refused|released", 1),
    ],
    ids=["plain", "transactional"],
)
def test_a_frozen_worker_that_is_late_changes_nothing_once_another_has_succeeded(
    start: Start, gate: Gate, topic: str, words: str, effects: int
) -> None:
    message, frozen, _other = taken_over(start, gate, topic)
    gate.open("go-2")
    wait_until(message, State.CONSUMED)
    moves = message.moves
    gate.open("go-1")
    frozen.send_all(signal.SIGCONT)
    frozen.wait_for(words)
    assert effects_per_message() == {message.pk: effects}
    message.refresh_from_db()
    assert (message.state, message.moves, log_of(message)[-1].delivery) == (State.CONSUMED, moves, 2)
