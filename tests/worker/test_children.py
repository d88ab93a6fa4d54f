"""Worker processes that are replaced in order: --max-tasks-per-child and --max-memory-per-child."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest

from django_delayq import schedule_message, schedule_messages
from django_delayq.core.states import State
from django_delayq.models import Transition
from tests.support.metrics import scrape
from tests.support.processes import Gate, Start
from tests.support.record_of import effects_per_message, once_each, states, wait_until, wait_until_all
from tests.support.workers import eventually

REPLACED = "; another one takes its place"
CONSUMED = "delayq_outcomes_total{outcome=consumed,queue=default,topic=t.effect}"


@pytest.fixture
def patient(set_pace: Callable[[dict[str, float]], None]) -> None:
    """Have a spent process wait for its successor, and a message for a thread, for as long as a slow machine needs."""
    set_pace({"lifetime.PATIENCE": 90.0, "pool.LONGEST_QUEUED": 90.0})


def deliveries_per_process() -> Counter[str]:
    """Return the number of deliveries that each worker process has begun."""
    actors = Transition.objects.filter(to_state=State.RUNNING).values_list("actor", flat=True)
    return Counter(actors)


@pytest.mark.parametrize(("processes", "timed_by"), [(1, "no-redis"), (2, "redis")], indirect=["timed_by"])
def test_each_process_delivers_its_share_and_no_message_is_lost(
    start: Start, gate: Gate, processes: int, timed_by: str
) -> None:
    options = ["--processes", str(processes), "--threads", "2", "--metrics-port", "127.0.0.1:0"]
    worker = start(*options, "--max-tasks-per-child", "5")
    port = int(worker.wait_for(r"Metrics are served on port (\d+)")[1])
    first = schedule_messages({"topic": "t.effect"} for _ in range(23))
    wait_until_all(State.CONSUMED, 23)
    each = deliveries_per_process()
    assert len(each) > 1
    assert max(each.values()) >= 5

    def shares_are_kept() -> bool:
        # A process for whose successor there was no place in time has a further share.
        went_on = Counter(re.findall(r"Worker process (\S+) goes on", worker.log))
        return all(number <= 5 * (1 + went_on[actor.removeprefix("worker:")]) for actor, number in each.items())

    eventually(shares_are_kept, "no process claims more than its share")

    slow = schedule_message("t.gate", gate.payload)
    eventually(partial(gate.begun, slow.pk), "it begins")
    second = schedule_messages({"topic": "t.effect"} for _ in range(20))
    # The process in which the slow one runs is spent too: others take turns meanwhile.
    eventually(lambda: states() == {State.CONSUMED: 43, State.RUNNING: 1}, "the others are delivered")
    eventually(lambda: scrape(port)[CONSUMED] == 43, "no count is lost")
    gate.open()
    wait_until(slow, State.CONSUMED)
    slow.refresh_from_db()
    assert slow.deliveries == 1
    assert effects_per_message() == once_each([*first, *second, slow])
    assert worker.stop() == 0
    assert worker.count(REPLACED) >= 5
    assert worker.count("died|ERROR|CRITICAL") == 0


@pytest.mark.usefixtures("patient")
def test_a_signal_ends_a_worker_whose_processes_are_being_replaced(start: Start, gate: Gate) -> None:
    worker = start("--processes", "2", "--threads", "2", "--max-tasks-per-child", "1")
    messages = [schedule_message("t.gate", gate.payload) for _ in range(4)]
    eventually(lambda: gate.how_many_began() == 4, "all begin")
    # Two processes finish, and so do their successors.
    assert len(deliveries_per_process()) == 4
    worker.send(signal.SIGTERM)
    worker.wait_for("Stopping")
    gate.open()
    assert worker.wait() == 0
    assert effects_per_message() == once_each(messages)
    assert states() == {State.CONSUMED: 4}


@pytest.mark.usefixtures("patient")
def test_a_process_that_is_killed_while_it_finishes_has_lost_its_place_only(start: Start, gate: Gate) -> None:
    worker = start("--threads", "2", "--max-tasks-per-child", "1")
    (first,) = worker.wait_for_children(1)
    slow = schedule_message("t.gate", gate.payload)
    eventually(partial(gate.begun, slow.pk), "it begins")
    worker.wait_for(f"/{first}/.* has claimed 1 messages{REPLACED}")
    worker.wait_for_children(2)
    os.kill(first, signal.SIGKILL)
    worker.wait_for("died .killed by signal 9")
    eventually(partial(gate.begun, slow.pk, 2), "its successor delivers the message again")
    gate.open()
    wait_until(slow, State.CONSUMED)
    quick = schedule_message("t.effect")
    wait_until(quick, State.CONSUMED)
    assert effects_per_message() == once_each([slow, quick])
    assert deliveries_per_process().most_common(1)[0][1] == 1
    # No process was started for the dead one, whose place its successor had.
    worker.wait_for_children(1)
    assert worker.stop() == 0


@pytest.mark.usefixtures("patient")
def test_a_process_that_has_grown_is_replaced(start: Start) -> None:
    worker = start("--threads", "1", "--max-memory-per-child", "250M")
    messages = schedule_messages({"topic": "t.leak", "payload": {"megabytes": 100}} for _ in range(3))
    wait_until_all(State.CONSUMED, 3)
    worker.wait_for(f"uses [23][0-9][0-9]M of memory{REPLACED}")
    late = schedule_message("t.ok")
    wait_until(late, State.CONSUMED)
    assert len(deliveries_per_process()) == 2
    assert sum(deliveries_per_process().values()) == len(messages) + 1
    assert worker.stop() == 0
    assert worker.count("died|ERROR") == 0
