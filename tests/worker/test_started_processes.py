"""Processes that handlers start have the signals of a plain process, so that a signal ends them."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from django_delayq import schedule_message, schedule_messages
from django_delayq.core.states import State
from django_delayq.models import Message
from tests.app.children import WAYS
from tests.app.models import Effect
from tests.support.processes import Start
from tests.support.record_of import wait_until, wait_until_all

pytestmark = pytest.mark.usefixtures("transactional_db")

SIGNALS = pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=["SIGTERM", "SIGINT", "SIGHUP"]
)


@pytest.fixture(params=["worker", "once"])
def deliver(request: pytest.FixtureRequest, start: Start) -> Callable[[Message], str]:
    """Deliver a message by a worker, or by ``--once``. Return the note that its handler leaves."""

    def run(message: Message) -> str:
        if request.param == "once":
            assert start("--once", "--threads", "2").wait() == 0
        else:
            start("--threads", "2")
        wait_until(message, State.CONSUMED)
        return Effect.objects.get(message_id=message.pk).note

    return run


@pytest.mark.parametrize("way", WAYS)
# Python ends with code 1 after KeyboardInterrupt, and by the signal when that comes before the interpreter is up.
@pytest.mark.parametrize(("number", "codes"), [(signal.SIGTERM, {"-15"}), (signal.SIGINT, {"1", "-2"})])
def test_a_process_that_a_handler_starts_is_ended_by_a_signal(
    start: Start, way: str, number: signal.Signals, codes: set[str]
) -> None:
    message = schedule_message("t.child", {"way": way, "signal": number})
    start("--threads", "2")
    wait_until(message, State.CONSUMED)
    assert Effect.objects.get().note in codes


@SIGNALS
def test_a_process_that_an_async_handler_starts_is_ended_by_a_signal(start: Start, number: signal.Signals) -> None:
    message = schedule_message("t.child_async", {"signal": number})
    start("--threads", "2")
    wait_until(message, State.CONSUMED)
    assert Effect.objects.get().note == str(-number)


@SIGNALS
def test_a_signal_that_comes_right_after_the_fork_is_not_lost(
    deliver: Callable[[Message], str], number: signal.Signals
) -> None:
    assert deliver(schedule_message("t.child_early", {"signal": number})) == str(-number)


def test_the_child_of_a_child_has_the_handlers_that_its_parent_chose(deliver: Callable[[Message], str]) -> None:
    assert deliver(schedule_message("t.child_of_child")) == "42"


def test_neither_a_handler_nor_what_it_starts_blocks_a_signal(deliver: Callable[[Message], str]) -> None:
    assert deliver(schedule_message("t.mask")) == "[] [] []"


def test_pools_of_processes_end(start: Start) -> None:
    schedule_messages({"topic": "t.pools", "payload": {"pools": 10}} for _ in range(4))
    worker = start("--threads", "2")
    wait_until_all(State.CONSUMED, 4)
    # The worker has kept its own handlers.
    assert worker.stop() == 0
    assert worker.count("died|ERROR|CRITICAL") == 0
