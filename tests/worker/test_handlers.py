"""Handlers that run too long, raise unusual errors, change settings or start processes affect no other message."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis

from django_delayq import Delivered, HandlerTimeout, handler, run_message, schedule_message, schedule_messages
from django_delayq.broker.keys import keys
from django_delayq.core.states import State
from django_delayq.core.worker_options import Options
from django_delayq.models import Message
from django_delayq.project import registry
from tests.app.children import WAYS
from tests.app.models import Effect
from tests.support.assembled import drain
from tests.support.processes import Gate, Start
from tests.support.record_of import effects_per_message, log_of, once_each, states, wait_until, wait_until_all
from tests.support.rows import unguarded
from tests.support.workers import PATIENCE, eventually

pytestmark = pytest.mark.usefixtures("transactional_db")


def test_a_handler_past_its_timeout_is_ended(start: Start) -> None:
    worker = start("--threads", "1")
    for topic in ("t.slow", "t.slow_async", "t.slow_returned"):
        message = wait_until(schedule_message(topic), State.DEAD)
        end = log_of(message)[-1]
        assert end.error.startswith("HandlerTimeout: ran longer than its timeout of 0.3 s")
        assert (end.at - log_of(message)[1].at).total_seconds() >= 0.3
    wait_until(schedule_message("t.effect"), State.CONSUMED)
    assert worker.count("replaced") == 0


def test_a_handler_that_extends_after_its_timeout_is_ended_at_the_next() -> None:
    caught = []

    def work() -> None:
        while True:
            time.sleep(0.01)

    @handler("t.goes_on", timeout=PATIENCE, retry=False)
    def go_on(message: Delivered[None]) -> None:
        try:
            # The timeout does not end before this block has begun.
            message.extend(0.2)
            work()
        except HandlerTimeout:
            caught.append("first")
            try:
                message.extend(0.2)
                work()
            except HandlerTimeout:
                caught.append("second")
                message.extend(60)

    message = schedule_message("t.goes_on")
    assert drain(Options("default", threads=1)) == 1
    assert caught == ["first", "second"]
    message.refresh_from_db()
    assert message.state == State.CONSUMED


def give_later_deliveries_time() -> None:
    """Change the timeout of all messages. The deliveries that run keep the one that they were claimed with."""
    unguarded(Message).update(timeout=60.0)


def test_handlers_that_do_not_let_go_get_their_process_replaced_and_are_retried_elsewhere(start: Start) -> None:
    worker = start("--threads", "2")
    children = worker.wait_for_children(1)
    messages = [schedule_message("t.hang"), schedule_message("t.hang", delay=0.5)]
    eventually(lambda: states()[State.RUNNING] == 2, "both run")
    give_later_deliveries_time()
    others = schedule_messages({"topic": "t.tx", "delay": 0.2 * n} for n in range(20))
    worker.wait_for_children(1, other_than=children)
    wait_until_all(State.CONSUMED, 22)
    assert effects_per_message() == once_each([*messages, *others])
    for message in messages:
        message.refresh_from_db()
        assert (message.attempts, message.deliveries, message.crashes) == (1, 2, 0)
        assert "did not end at its timeout" in log_of(message)[2].error
    assert worker.count("does not end at its timeout") == 2
    assert worker.count("died") == 0


@pytest.mark.parametrize("mode", ["--once", "--reload"])
def test_a_handler_that_does_not_let_go_ends_a_worker_without_a_supervisor_and_that_says_so(
    start: Start, mode: str
) -> None:
    stuck = schedule_message("t.hang")
    worker = start(mode, "--threads", "1", "--graceful-timeout", "0")
    if mode == "--once":
        assert worker.wait() == 1
        worker.wait_for("due messages may be left: the log says why")
    else:
        worker.wait_for("The worker has ended; it starts again when code changes")
    assert "did not end at its timeout; its process ended" in log_of(wait_until(stuck, State.SCHEDULED))[2].error
    assert "replaced" not in worker.log


def test_a_process_whose_interpreter_is_held_is_killed_and_its_messages_go_on(
    start: Start, set_pace: Callable[[dict[str, float]], None]
) -> None:
    longest = max(handler.lease for handler in registry.handlers().values())
    # Together they run for five seconds.
    set_pace({"supervisor.USUAL.hung_after": 5 - 2 * longest})
    worker = start("--threads", "2", "--graceful-timeout", "0")
    message = schedule_message("t.seize")
    eventually(lambda: states()[State.RUNNING], "it runs")
    give_later_deliveries_time()
    worker.wait_for(r"has shown no life for \d+ s; it is killed")
    wait_until(message, State.CONSUMED)
    message.refresh_from_db()
    assert message.attempts == 0
    assert message.crashes == message.deliveries - 1 >= 1


def test_handlers_that_have_all_threads_for_long_are_named_once(
    start: Start, gate: Gate, set_pace: Callable[[dict[str, float]], None]
) -> None:
    set_pace({"process.Parts.run_tuning.all_taken_for": 0.3})
    worker = start("--threads", "2")
    said = "All 2 handler threads .* Topics: "
    gate.running("t.gate")
    gate.running("t.short_lease")
    worker.wait_for(f"{said}t.gate, t.short_lease")
    gate.open("go-1")
    wait_until_all(State.CONSUMED, 2)
    (gate.folder / "go-1").unlink()
    for topic in ("t.gate", "t.once_tx"):
        gate.running(topic)
    # Of these one is not known yet.
    worker.wait_for(f"{said}t.gate, t.once_tx")
    assert worker.count(said) == 2


def test_an_open_transaction_harms_neither_the_record_nor_the_next_message(start: Start) -> None:
    worker = start("--threads", "1")
    after: list[Message] = []
    for how in ("autocommit", "atomic", "begin"):
        dirty = schedule_message("t.dirty", how)
        after += [schedule_message(topic) for topic in ("t.effect", "t.tx", "t.async")]
        for message in (dirty, *after):
            wait_until(message, State.CONSUMED)
    assert effects_per_message() == once_each(after)
    worker.wait_for("The handler of t.dirty left a database connection in a transaction; that connection is closed")


def test_messages_of_a_new_topic_go_from_old_workers_to_a_new_one_at_once(
    redis_client: redis.Redis, start: Start, configure: Callable[..., None]
) -> None:
    """No sweep helps."""
    configure(GRACE=300)
    old = [start("--threads", "2", unknown=("t.new",)) for _ in range(2)]
    early = schedule_messages({"topic": "t.new"} for _ in range(10))
    known = schedule_messages({"topic": "t.tx"} for _ in range(5))
    eventually(lambda: states() == {State.SCHEDULED: 10, State.CONSUMED: 5}, "the others are delivered")
    eventually(lambda: any(worker.count("No handler for topic t.new") for worker in old), "they are blocked")
    new = start("--threads", "2")
    [child] = new.wait_for_children(1)
    wait_until_all(State.CONSUMED, 15)
    # The new one stands still, so the old ones take all.
    os.kill(child, signal.SIGSTOP)
    late = schedule_messages({"topic": "t.new", "delay": 0.01 * n} for n in range(20))
    blocked = keys("delayq", "default").blocked
    eventually(lambda: redis_client.hlen(blocked) == len(late), "the old ones have blocked each of them")
    os.kill(child, signal.SIGCONT)
    wait_until_all(State.CONSUMED, 35)
    assert effects_per_message() == once_each([*early, *known, *late])
    assert {message.deliveries for message in Message.objects.all()} == {1}
    assert all(worker.count("No handler for topic t.new") <= 1 for worker in old)


def test_more_messages_without_a_handler_than_a_worker_takes_at_once_are_not_in_the_way(
    start: Start, timed_by: str
) -> None:
    # A query reads the first thousand due messages. From Redis a worker of one thread takes some at a time.
    schedule_messages({"topic": "t.new", "priority": 100} for _ in range(200 if timed_by == "redis" else 1500))
    known = [schedule_message("t.tx") for _ in range(3)]
    start("--threads", "1", unknown=("t.new",))
    for message in known:
        wait_until(message, State.CONSUMED)


UNREADABLE: list[dict[str, Any]] = [
    {"retry": {"kind": "of a later version"}},
    {"retry": "nonsense"},
    {"retry": [1, 2]},
    {"headers": [1]},
    {"payload": {"of": ["another", "version"]}},
    {"max_attempts": -5},
]


def test_unreadable_columns_are_in_nobodys_way(start: Start) -> None:
    broken = []
    for column in UNREADABLE:
        message = schedule_message("t.fail", delay=3600)
        unguarded(Message).filter(pk=message.pk).update(**column)
        assert run_message(message)
        broken.append(message)
    others = [schedule_message("t.tx") for _ in range(3)]
    worker = start("--threads", "1")
    for other in others:
        wait_until(other, State.CONSUMED)
    for message in broken:
        eventually(message.transitions.filter(error="RuntimeError: it never works").exists, "its failure is recorded")
    assert worker.count("died") == 0


# --- processes that handlers start ------------------------------------------------------------------------------------


# What handlers start, and the codes with which that may end. Python ends with code 1 after KeyboardInterrupt, and by
# the signal when that comes before the interpreter is up.
STARTED = [
    *(("t.child", {"way": way, "signal": signal.SIGTERM}, {"-15"}) for way in WAYS),
    *(("t.child", {"way": way, "signal": signal.SIGINT}, {"1", "-2"}) for way in WAYS),
    *(
        (topic, {"signal": number}, {str(-number)})
        # From an event loop, and by a signal that comes right after the fork.
        for topic in ("t.child_async", "t.child_early")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    ),
    # The child of a child has the handlers that its parent chose.
    ("t.child_of_child", None, {"42"}),
    # The signals that the handler, its child and a program block.
    ("t.mask", None, {"[] [] []"}),
]


@pytest.mark.parametrize("mode", [[], ["--once"]], ids=["worker", "once"])
def test_a_process_that_a_handler_starts_has_plain_signals_and_is_ended_by_them(start: Start, mode: list[str]) -> None:
    messages = [schedule_message(topic, payload) for topic, payload, _codes in STARTED]
    start(*mode, "--threads", "1")
    wait_until_all(State.CONSUMED, len(messages))
    for message, (topic, payload, codes) in zip(messages, STARTED, strict=True):
        assert Effect.objects.get(message_id=message.pk).note in codes, (topic, payload)


def test_pools_of_processes_end(start: Start) -> None:
    schedule_messages({"topic": "t.pools", "payload": {"pools": 10}} for _ in range(4))
    worker = start("--threads", "2")
    wait_until_all(State.CONSUMED, 4)
    # The worker has kept its own handlers.
    assert worker.stop() == 0
    assert worker.count("died|ERROR|CRITICAL") == 0
