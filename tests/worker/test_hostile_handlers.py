"""A handler that harms its process, its connection or the log harms its own message and no other."""

from __future__ import annotations

import ast
from functools import partial
from typing import Any

import pytest
from django.db import connection

from django_delayq import schedule_message, schedule_messages
from django_delayq.core.states import LIVE, State
from django_delayq.models import Message
from tests.app.models import Effect
from tests.support.hostile.handlers import RAISES
from tests.support.processes import Start
from tests.support.record_of import effects_per_message, log_of, once_each, wait_until
from tests.support.workers import Worker, eventually

pytestmark = pytest.mark.usefixtures("transactional_db")

SETTINGS = "env DJANGO_SETTINGS_MODULE=tests.support.hostile.worker_settings"

on_postgresql = pytest.mark.postgresql("a session of PostgreSQL")


@pytest.fixture
def worker(start: Start) -> Start:
    """Start a worker that has the hostile handlers too."""
    return partial(start, prefix=SETTINGS)


def all_are_final() -> bool:
    return not Message.objects.filter(state__in=LIVE).exists()


def wait_until_told(there: Worker, pattern: str, times: int) -> None:
    """Wait until so many lines of the log match the pattern: they may come later than what they tell is recorded."""
    eventually(lambda: there.count(pattern) == times, f"{times} lines with {pattern}")


# --- the process ------------------------------------------------------------------------------------------------------


def test_exhausted_memory_and_endless_recursion_are_failures_like_any_other(worker: Start) -> None:
    there = worker("--threads", "2")
    for topic, error in (("h.memory", "MemoryError"), ("h.recursion", "RecursionError")):
        message = wait_until(schedule_message(topic), State.DEAD)
        assert log_of(message)[-1].error.startswith(error)
        wait_until(schedule_message("t.tx"), State.CONSUMED)
    assert there.count("died") == 0


def test_a_handler_that_ends_its_process_does_not_end_the_worker_whatever_code_it_chose(worker: Start) -> None:
    there = worker("--threads", "1")
    for code in (0, 70, 72):
        poison = wait_until(schedule_message("h.exit", code), State.DEAD)
        assert (poison.deliveries, poison.crashes) == (3, 3)
        wait_until_told(there, rf"died \(exit code {code}\)", 3)
        wait_until(schedule_message("t.tx"), State.CONSUMED)
    assert there.process.poll() is None


def test_leaked_threads_and_a_closed_stdout_do_not_keep_a_worker_from_ending_in_order(worker: Start) -> None:
    there = worker("--threads", "1")
    for topic in ("h.thread", "h.stdout", "h.closes_stdout"):
        wait_until(schedule_message(topic), State.CONSUMED)
    wait_until(schedule_message("t.tx"), State.CONSUMED)
    assert there.stop() == 0
    assert there.count("died|Traceback|CRITICAL|ERROR") == 0, there.log


def test_a_forked_child_that_comes_out_of_its_handler_is_ended_there(worker: Start) -> None:
    there = worker("--threads", "1")
    # A process that is forked while other threads import modules, as at the start, may wait for their locks for ever.
    wait_until(schedule_message("t.tx"), State.CONSUMED)
    for topic in ("h.fork", "h.fork_tx", "h.fork_async"):
        for how, code in (("returns", "0"), ("raises", "1"), ("exits", "3")):
            message = wait_until(schedule_message(topic, how), State.CONSUMED)
            assert list(Effect.objects.filter(message_id=message.pk).values_list("note", flat=True)) == [code]
            wait_until(schedule_message("t.tx"), State.CONSUMED)
        # A child that exits has ended itself.
        told = f"A process that the handler of topic {topic} forked came out of the handler, and is ended"
        wait_until_told(there, told, 2)
    wait_until_told(there, "RuntimeError: in the child", 3)
    assert there.count("died") == 0


# --- the transaction --------------------------------------------------------------------------------------------------

# Which words end a transaction is told in test_guard.py.
ENDS = ["COMMIT", "ROLLBACK"]
if connection.vendor == "postgresql":
    ENDS.append("COMMIT; BEGIN")
# How psycopg takes a statement.
FORMS = ["text", "bytes", "composed"]


def test_a_transactional_handler_cannot_end_its_transaction_by_hand_and_savepoints_are_its_own(worker: Start) -> None:
    there = worker("--threads", "1")
    savepoints = wait_until(schedule_message("h.savepoints"), State.CONSUMED)
    assert there.count("ERROR") == 0
    messages = schedule_messages(
        {"topic": "h.ends_its_transaction", "payload": {"sql": sql, "then_fails": then_fails}}
        for sql in ENDS
        for then_fails in (False, True)
    )
    # It swallows the refusal, which changes nothing.
    swallows, after = schedule_message("h.ends_it_twice"), schedule_message("t.tx")
    for message in messages:
        wait_until(message, State.DEAD)
        assert "is ended by the worker" in log_of(message)[-1].error, message.payload
        assert message.deliveries == 2
    assert wait_until(swallows, State.CONSUMED).deliveries == 2
    wait_until(after, State.CONSUMED)
    assert effects_per_message() == once_each([savepoints, swallows, after])


@on_postgresql
def test_a_commit_on_the_drivers_own_connection_harms_no_other_message(worker: Start) -> None:
    there = worker("--threads", "1")
    for then_asks in (False, True):
        returned = wait_until(schedule_message("h.raw_commit", {"then_asks": then_asks}), State.CONSUMED)
        failed = schedule_message("h.raw_commit", {"then_asks": then_asks, "then_fails": True})
        after = wait_until(schedule_message("t.tx"), State.CONSUMED)
        wait_until(failed, State.DEAD)
        found = effects_per_message()
        assert (found[returned.pk], found[after.pk]) == (1, 1)
    assert there.count("died") == 0


BROKEN = ["h.set_rollback", "h.closes_tx", "h.closes_raw_tx"]
if connection.vendor == "postgresql":
    BROKEN.append("h.swallow_without_a_word")


def test_a_broken_transaction_is_a_failure_and_its_effects_happen_once_at_the_second_attempt(worker: Start) -> None:
    worker("--threads", "1")
    messages = [schedule_message(topic) for topic in BROKEN]
    after = schedule_message("t.tx")
    for message in messages:
        wait_until(message, State.CONSUMED)
        assert (message.deliveries, message.attempts) == (2, 1)
        assert log_of(message)[2].error
    wait_until(after, State.CONSUMED)
    assert effects_per_message() == once_each([*messages, after])


# --- what the next one finds ------------------------------------------------------------------------------------------

SESSIONS = [
    ["SET search_path TO nowhere"],
    ["SET default_transaction_isolation = 'serializable'"],
    ["CREATE TEMP TABLE delayq_message (id int)"],
    ["PREPARE mine AS SELECT 1", "LISTEN mine"],
    ["DISCARD ALL"],
    ["RESET ALL"],
]
PRAGMAS = [["PRAGMA query_only = 1"], ["PRAGMA foreign_keys = 0"]]


def test_the_settings_of_a_handlers_session_are_gone_for_the_next(worker: Start) -> None:
    there = worker("--threads", "1")
    before = wait_until(schedule_message("h.session"), State.CONSUMED)
    for sql in SESSIONS if connection.vendor == "postgresql" else PRAGMAS:
        wait_until(schedule_message("h.sets", {"sql": sql}), State.CONSUMED)
        after = wait_until(schedule_message("h.session"), State.CONSUMED)
        assert found_by(after) == found_by(before), sql
        wait_until(schedule_message("t.tx"), State.CONSUMED)
    wait_until(schedule_message("h.activates"), State.CONSUMED)
    after = wait_until(schedule_message("h.session"), State.CONSUMED)
    assert found_by(after) == found_by(before)
    assert found_by(after)["zone"] == "UTC"
    for how in ("django", "raw"):
        wait_until(schedule_message("h.closes", how), State.CONSUMED)
        for topic in ("t.effect", "t.tx"):
            assert wait_until(schedule_message(topic), State.CONSUMED).deliveries == 1
    assert there.count("Outcomes wait") == 0


@on_postgresql
def test_the_search_path_of_one_tenant_is_gone_for_the_next(worker: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session is made anew by Django: its time zone is that of DATABASES, and not that of the server."""
    monkeypatch.setenv("DELAYQ_TEST_TIME_ZONE", "Asia/Tokyo")
    worker("--threads", "1")
    for sets, shows in (("h.sets", "h.session"), ("h.sets_tx", "h.session"), ("h.sets_async", "h.session_async")):
        before = found_by(wait_until(schedule_message(shows), State.CONSUMED))
        assert before["TimeZone"] == "Asia/Tokyo"
        for sql in ("SET search_path TO tenant_a, public", "SET TIME ZONE 'Asia/Kathmandu'"):
            for form in FORMS:
                wait_until(schedule_message(sets, {"sql": [sql], "form": form}), State.CONSUMED)
                after = wait_until(schedule_message(shows), State.CONSUMED)
                assert found_by(after) == before, (sets, sql, form)


def found_by(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = ast.literal_eval(Effect.objects.get(message_id=message.pk).note)
    return found


# --- what it raises ---------------------------------------------------------------------------------------------------


# The topics of handlers that await something that raises.
AWAITING = ("h.raises_awaited", "h.raises_awaited_tx", "h.raises_awaitable")


def test_whatever_is_raised_ends_its_message_with_a_reason_and_harms_no_thread(worker: Start) -> None:
    there = worker("--threads", "2")
    topics = ("h.raises", "h.raises_tx", "h.raises_async")
    wanted: list[Any] = [{"topic": topic, "payload": name} for topic in topics for name in RAISES]
    wanted += [
        {"topic": topic, "payload": name, "headers": {"awaits": awaited}}
        for topic in AWAITING
        for awaited in ("task", "future")
        # No future takes it.
        for name in RAISES.keys() - {"stop_iteration"}
    ]
    for one in wanted:
        one["max_attempts"] = 1
    messages = schedule_messages(wanted)
    eventually(all_are_final, "all are final")
    for message in messages:
        message.refresh_from_db()
        end = log_of(message)[-1]
        assert message.state == State.DEAD, message.payload
        assert not end.error.startswith("NameError")
        assert end.error
        assert len(end.error) < 10_000
        assert len(end.traceback) < 100_000
    assert not Effect.objects.exists()
    # Both threads still exist.
    gates = schedule_messages({"topic": "t.sleep", "payload": {"seconds": 0.5}} for _ in range(2))
    for gate in gates:
        wait_until(gate, State.CONSUMED)
    assert min(gate.finished_at for gate in gates if gate.finished_at) > max(log_of(gate)[1].at for gate in gates)
    assert there.count("died") == 0
    assert there.count("CRITICAL") == 0
    assert "no words" not in there.log
    # A retry policy that fails on such an error does not decide.
    unanswered = schedule_message("h.bad_policy")
    eventually(lambda: log_of(unanswered)[-1].error, "its failure is recorded")
    unanswered.refresh_from_db()
    assert unanswered.state == State.SCHEDULED
    assert unanswered.due_at > log_of(unanswered)[-1].at
    wait_until(schedule_message("t.tx"), State.CONSUMED)
