"""One handler thread takes deliveries as long as handlers are quick; those that are not keep nobody waiting."""

from __future__ import annotations

import threading

import pytest

from django_delayq import handler
from django_delayq.project.registry import Delivered
from django_delayq.worker.processes.assembly import Parts
from django_delayq.worker.run import handler_threads
from tests.support.assembled import Assemble
from tests.support.claims import claimed

pytestmark = pytest.mark.django_db(transaction=True)

TOPIC = "integration.turns"
NUMBER = 20


@pytest.fixture
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the watch sleep for as long as the test takes."""
    monkeypatch.setattr(handler_threads, "LONGEST_TURN", 600.0)


def turns(parts: Parts) -> handler_threads.Turns:
    threads = parts.pool.threads
    assert isinstance(threads, handler_threads.HandlerThreads)
    return threads.turns


def run(parts: Parts, number: int = NUMBER) -> None:
    """Run deliveries that are there together."""
    parts.pool.submit(claimed(*[TOPIC] * number))
    parts.pool.start()
    assert parts.pool.wait_idle(60)
    parts.pool.stop()


@pytest.mark.usefixtures("unwatched")
def test_quick_handlers_run_one_after_another_in_one_thread(
    assembled: Assemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handler_threads, "QUICK", 60.0)
    threads: list[int] = []
    handler(TOPIC)(lambda message: threads.append(threading.get_ident()))
    run(assembled(4))
    assert len(threads) == NUMBER
    assert len(set(threads)) == 1


@pytest.mark.usefixtures("unwatched")
def test_handlers_that_wait_run_side_by_side(assembled: Assemble) -> None:
    parts = assembled(4)
    for _time in range(10):
        turns(parts).end(0, TOPIC, 0.01)
    # Each waits until all four run.
    together = threading.Barrier(4)
    handler(TOPIC)(lambda message: together.wait(60) and None)
    run(parts, 4)
    assert not together.broken


def test_a_quick_handler_that_gets_stuck_keeps_nobody_waiting(assembled: Assemble) -> None:
    """None of these topics is known to be slow: all are taken for quick."""
    others_ran = threading.Semaphore(0)
    stuck = threading.Lock()
    waited: list[bool] = []

    def handle(message: Delivered) -> None:
        if stuck.acquire(blocking=False):
            waited.append(all(others_ran.acquire(timeout=60) for _ in range(NUMBER - 1)))
        else:
            others_ran.release()

    handler(TOPIC)(handle)
    run(assembled(2))
    assert waited == [True]


def test_deliveries_that_come_while_a_quick_handler_is_stuck_do_not_wait(assembled: Assemble) -> None:
    parts = assembled(2)
    begun, ended = threading.Event(), threading.Event()
    waited: list[bool] = []

    def handle(message: Delivered) -> None:
        if begun.is_set():
            ended.set()
        else:
            begun.set()
            waited.append(ended.wait(60))

    handler(TOPIC)(handle)
    parts.pool.start()
    parts.pool.submit(claimed(TOPIC))
    assert begun.wait(60)
    parts.pool.submit(claimed(TOPIC))
    assert parts.pool.wait_idle(60)
    parts.pool.stop()
    assert waited == [True]


def test_a_topic_is_quick_again_when_its_handler_is(assembled: Assemble) -> None:
    known = turns(assembled(2))
    for seconds, times in ((0.5, 10), (0.00001, 40)):
        for _time in range(times):
            known.end(0, TOPIC, seconds)
        known.take(0)
        known.begin(0, TOPIC)
        assert known.has(0) == (seconds < handler_threads.QUICK)
        known.pass_on(0)
