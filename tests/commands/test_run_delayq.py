"""The options of run_delayq."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import redis

from django_delayq import schedule_message, schedule_messages
from django_delayq.core.states import State
from django_delayq.management.commands.run_delayq import Command
from django_delayq.models import Transition, Worker
from testproject.servers import PostgresServer
from tests.support.processes import Gate, Start
from tests.support.record_of import effects_per_message, log_of, once_each, states, wait_until, wait_until_all
from tests.support.workers import eventually

BOTH = pytest.mark.usefixtures("timed_by")


@BOTH
def test_once_delivers_what_is_due_and_leaves_the_rest_and_a_retry(start: Start) -> None:
    failing = schedule_message("t.fail_tx", retry=["1h"])
    due = schedule_messages({"topic": "t.tx"} for _ in range(30))
    schedule_message("t.tx", delay=3600)
    worker = start("--once", "--threads", "4")
    assert worker.wait() == 0
    assert worker.lines[-1] == "31 delivered"
    assert effects_per_message() == once_each(due)
    assert states() == {State.CONSUMED: 30, State.SCHEDULED: 2}
    failing.refresh_from_db()
    assert failing.attempts == 1


@pytest.mark.parametrize("others", [0, 20], ids=["during the last handler", "in a backlog"])
def test_a_run_with_once_does_not_wait_for_a_database_that_goes_away(
    start: Start, postgres_server: PostgresServer, gate: Gate, others: int
) -> None:
    first = schedule_message("t.gate", gate.payload)
    schedule_messages({"topic": "t.ok"} for _ in range(others))
    worker = start("--once", "--threads", "1", "--graceful-timeout", "1")
    eventually(lambda: gate.begun(first.pk), "the handler begins")
    postgres_server.stop()
    gate.open()
    assert worker.wait() == 69
    assert worker.count("The database does not answer") >= 1
    assert worker.count("Traceback") == 0


def test_each_process_delivers_exactly_max_messages(start: Start, timed_by: str) -> None:
    processes = 2 if timed_by == "redis" else 1
    schedule_messages({"topic": "t.effect"} for _ in range(60))
    worker = start("--max-messages", "25", "--processes", str(processes))
    assert worker.wait() == 0
    assert states() == {State.CONSUMED: 25 * processes, State.SCHEDULED: 60 - 25 * processes}
    assert sum(effects_per_message().values()) == 25 * processes


def test_max_messages_waits_for_slow_handlers(start: Start) -> None:
    schedule_messages({"topic": "t.sleep", "payload": {"seconds": 0.7}} for _ in range(12))
    assert start("--max-messages", "5", "--processes", "2", "--threads", "2").wait() == 0
    assert states() == {State.CONSUMED: 10, State.SCHEDULED: 2}


def test_max_messages_counts_what_was_claimed_ahead_of_a_slow_one(start: Start) -> None:
    schedule_messages({"topic": "t.ok", "priority": 10} for _ in range(60))
    schedule_messages({"topic": "t.sleep", "payload": {"seconds": 0.4}} for _ in range(8))
    assert start("--max-messages", "65", "--threads", "1").wait() == 0
    assert states() == {State.CONSUMED: 65, State.SCHEDULED: 3}


def test_max_runtime_ends_it_in_order_and_it_leaves_no_trace_of_being_alive(start: Start, gate: Gate) -> None:
    message = schedule_message("t.gate", gate.payload)
    worker = start("--max-runtime", "5s", "--processes", "2")
    eventually(lambda: gate.begun(message.pk), "the handler begins")
    gate.open()
    assert worker.wait() == 0
    assert worker.count("died") == 0
    assert not Worker.objects.exists()
    message.refresh_from_db()
    assert message.state == State.CONSUMED


@BOTH
@pytest.mark.usefixtures("puts_are_flushed")
def test_queues_are_served_in_strict_order(start: Start, gate: Gate) -> None:
    start("--queue", "a", "--queue", "b", "--threads", "1")
    first = schedule_message("t.gate", gate.payload, queue="b")
    eventually(lambda: gate.begun(first.pk), "the only thread is busy")
    low = schedule_messages({"topic": "t.tx", "queue": "b", "priority": 100} for _ in range(5))
    high = schedule_messages({"topic": "t.tx", "queue": "a"} for _ in range(5))
    schedule_message("t.tx", queue="c")
    gate.open()
    eventually(lambda: states() == {State.CONSUMED: 11, State.SCHEDULED: 1}, "both queues are worked off, not c")
    order = Transition.objects.filter(to_state=State.RUNNING).exclude(message=first).order_by("at")
    ids = list(order.values_list("message_id", flat=True))
    # Messages that were scheduled together go in any order.
    assert [sorted(ids[:5]), sorted(ids[5:])] == [[m.pk for m in high], [m.pk for m in low]]


@BOTH
@pytest.mark.usefixtures("puts_are_flushed")
def test_more_urgent_messages_go_first(start: Start, gate: Gate) -> None:
    start("--threads", "1")
    first = schedule_message("t.gate", gate.payload)
    eventually(lambda: gate.begun(first.pk), "the only thread is busy")
    by_priority = {p: schedule_message("t.tx", priority=p) for p in (-100, 0, 7, 100, -3)}
    gate.open()
    wait_until_all(State.CONSUMED, 6)
    claims = Transition.objects.filter(to_state=State.RUNNING).exclude(message=first).order_by("at")
    expected = [by_priority[p].pk for p in (100, 7, 0, -3, -100)]
    assert list(claims.values_list("message_id", flat=True)) == expected


@BOTH
def test_a_worker_without_queues_finds_those_that_hold_messages(start: Start) -> None:
    start()
    messages = [schedule_message("t.ok", queue=name) for name in ("default", "found.later", "x")]
    messages.append(schedule_message("t.queued"))
    for message in messages:
        wait_until(message, State.CONSUMED)
    assert messages[-1].queue == "special"


def test_a_heartbeat_file_is_touched_and_ends_no_worker_when_its_folder_is_gone(start: Start, tmp_path: Path) -> None:
    heartbeat = tmp_path / "run" / "heartbeat"
    worker = start("--heartbeat-file", str(heartbeat))

    def warnings() -> int:
        return worker.count("The heartbeat file cannot be touched")

    eventually(warnings, "the folder is not there yet")
    heartbeat.parent.mkdir()
    eventually(heartbeat.exists, "it is touched")
    first = heartbeat.stat().st_mtime_ns
    eventually(lambda: heartbeat.stat().st_mtime_ns > first, "it is touched again")
    heartbeat.parent.rename(tmp_path / "away")
    eventually(lambda: warnings() == 2, "one warning for each trouble")
    wait_until(schedule_message("t.ok"), State.CONSUMED)
    assert worker.stop() == 0
    assert worker.count("Traceback") == 0


def test_roles_may_be_shared_out_among_workers(start: Start) -> None:
    start("--roles", "loader,sweeper,mover,reaper,janitor", "--worker-name", "timing")
    message = schedule_message("t.tx", delay=0.2)
    consumer = start("--roles", "consumers,recorder", "--worker-name", "consuming")
    wait_until(message, State.CONSUMED)
    claim, end = log_of(message)[1:]
    assert re.fullmatch(r"worker:consuming/\d+/[0-9a-f]{6}", claim.actor)
    assert re.fullmatch(rf"{claim.actor}/\d+", end.actor)
    assert consumer.count("Loaded Redis") == 0


def test_a_worker_without_consumers_delivers_nothing_but_makes_it_ready(
    redis_client: redis.Redis, start: Start
) -> None:
    start("--roles", "loader,mover,sweeper")
    message = schedule_message("t.tx", delay=0.1)
    ready = "{delayq}:default:ready"
    eventually(lambda: redis_client.zscore(ready, str(message.pk)) is not None, "it is ready")
    message.refresh_from_db()
    assert message.state == State.SCHEDULED


@pytest.mark.parametrize(
    "arguments",
    [
        ["--queue", "a", "--queue", "a"],
        ["--queue", "{a}"],
        ["--roles", "cook"],
        ["--once", "--roles", "janitor"],
        ["--processes", "0"],
        ["--max-messages", "-1"],
        ["--max-runtime", "soon"],
        ["--max-tasks-per-child", "0"],
        ["--max-tasks-per-child", "9", "--max-messages", "9"],
        ["--max-tasks-per-child", "1", "--once"],
        ["--processes", "2", "--once"],
        ["--processes", "2", "--reload"],
        ["--heartbeat-file", "alive", "--once"],
        ["--reload", "--once"],
        ["--max-memory-per-child", "200"],
        ["--max-memory-per-child", "0M"],
        ["--max-memory-per-child", "9" * 400 + "G"],
        ["--max-memory-per-child", "1G", "--reload"],
        ["--max-memory-per-child", "1M"],
        ["--graceful-timeout", "-5"],
        ["--worker-name", "a/b"],
        ["--database", "nowhere"],
    ],
    ids=" ".join,
)
def test_an_impossible_option_is_refused_with_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        Command().run_from_argv(["manage.py", "run_delayq", *arguments])
    assert ended.value.code == 2
    assert arguments[0].lstrip("-").replace("-", "_") in capsys.readouterr().err.replace("-", "_")


def test_no_payload_and_no_error_text_in_the_log(start: Start) -> None:
    worker = start()
    message = schedule_message("t.fail", {"secret": "hunter2"}, key="hunter3", headers={"token": "hunter4"})
    wait_until(message, State.DEAD)
    worker.stop()
    assert worker.count("message dead") == 1
    assert "hunter" not in worker.log
    assert "never works" not in worker.log
