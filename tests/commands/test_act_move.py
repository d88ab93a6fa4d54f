"""``delayq_act move``: messages that wait go to another queue or priority, and run there."""

from __future__ import annotations

import pytest

from django_delayq.core.states import State
from django_delayq.models import Message
from tests.support.commands import held, run, schedule
from tests.support.record_of import log_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("puts_are_flushed")]


def queues() -> dict[int, tuple[str, int]]:
    return {message.pk: (message.queue, message.priority) for message in Message.objects.all()}


def test_selected_messages_go_to_another_queue() -> None:
    moved, other = schedule(3), schedule(1, queue="c")
    run("delayq_restore")
    words = ["delayq_act", "move", "--queue", "default", "--to", "c", "--priority", "-5"]
    asked = run(*words)
    assert (asked.code, asked.out) == (2, "")
    assert "This will move 3 messages: to the queue c with priority -5." in asked.err
    ran = run(*words, "--yes", "--reason", "default is slow")
    assert (ran.code, ran.out) == (0, "3 moved\n")
    assert queues() == {**dict.fromkeys(moved, ("c", -5)), other[0]: ("c", 0)}
    assert log_of(Message.objects.get(pk=moved[0]))[-1].reason == "queue default → c, priority 0 → -5: default is slow"
    assert not held()
    assert held("c").keys() == {*moved, *other}


def test_one_message_gets_another_priority_by_its_key() -> None:
    [pk] = schedule(key="k")
    assert run("delayq_act", "move", "--key", "k", "--priority", "9", "--yes").out == "1 moved\n"
    assert queues() == {pk: ("default", 9)}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "Say where to: --to QUEUE, --priority PRIORITY, or both."),
        (["--to", "a b"], "argument --to: queue"),
        (["--priority", "101"], "argument --priority: must be a whole number from -100 to 100"),
        (["--to-queue", "b"], "instead of --to-queue write --to"),
    ],
)
def test_a_move_to_nowhere_is_refused(words: list[str], said: str) -> None:
    [pk] = schedule()
    assert said in run("delayq_act", "move", str(pk), *words).err
    assert queues() == {pk: ("default", 0)}


def test_a_worker_of_the_new_queue_runs_it_and_one_of_the_old_one_does_not() -> None:
    ids = schedule(2, due=-1)
    run("delayq_restore")
    assert run("delayq_act", "move", str(ids[0]), "--to", "c", "--yes").code == 0
    assert run("run_delayq", "--once", "--queue", "default").code == 0
    assert [Message.objects.get(pk=pk).state for pk in ids] == [State.SCHEDULED, State.CONSUMED]
    assert run("run_delayq", "--once", "--queue", "c").code == 0
    assert Message.objects.get(pk=ids[0]).state == State.CONSUMED
