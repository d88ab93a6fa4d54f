"""Tasks of Django's framework are run by workers, and seen as results and by signals."""

from __future__ import annotations

import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import connection
from django.dispatch import Signal
from django.utils import timezone

from django_delayq import (
    Reject,
    RetryLater,
    RetryPolicy,
    cancel_message,
    requeue_message,
    reschedule_message,
    schedule_message,
    signals,
)
from django_delayq.contrib.tasks.compat import (
    AnyResult,
    TaskResultDoesNotExist,
    TaskResultStatus,
    task_backends,
    task_enqueued,
    task_finished,
    task_started,
)
from django_delayq.core.exceptions import HandlerTimeout
from django_delayq.core.states import State
from django_delayq.middleware import Middleware
from django_delayq.models import Message
from django_delayq.project import registry
from django_delayq.record import purge, transitions
from django_delayq.recurring import declarations, recurring, run_schedule
from django_delayq.recurring.services import Declarer
from django_delayq.testing import Delayq
from tests.app import tasks
from tests.app.handlers import succeed
from tests.app.models import Effect
from tests.support.assembled import deliver
from tests.support.middlewares import installed
from tests.support.receivers import heard, receiving
from tests.support.record_of import log_of, path_of
from tests.support.transactions import lock_table, unfinished
from tests.support.workers import ROOT

pytestmark = pytest.mark.django_db(transaction=True)

ADD = "tests.app.tasks.add"


def done(task: Any, *args: Any, **kwargs: Any) -> AnyResult:
    """Enqueue a task, run it, and return its result."""
    result: AnyResult = task.enqueue(*args, **kwargs)
    deliver()
    result.refresh()
    return result


def message_of(result: AnyResult) -> Message:
    return Message.objects.get(pk=int(result.id))


@pytest.fixture
def signalled() -> Iterator[list[str]]:
    """The signals that were sent: "started RUNNING", "finished FAILED" …"""
    seen: list[str] = []
    names = {task_enqueued: "enqueued", task_started: "started", task_finished: "finished"}

    def note(signal: Signal, task_result: AnyResult, **facts: Any) -> None:
        seen.append(f"{names[signal]} {task_result.status}")

    with receiving(note, *names):
        yield seen


# --- run --------------------------------------------------------------------------------------------------------------


def test_a_worker_finds_the_tasks_and_another_process_reads_the_result() -> None:
    result = tasks.add.enqueue(20, other=22)
    command = [sys.executable, "-m", "django", "run_delayq", "--once"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    ended = tasks.add.get_result(result.id)
    assert (ended.status, ended.return_value, ended.attempts) == (TaskResultStatus.SUCCESSFUL, 42, 1)
    assert ended.enqueued_at is not None
    assert ended.started_at is not None
    assert ended.last_attempted_at is not None
    assert ended.finished_at is not None
    assert ended.enqueued_at <= ended.started_at == ended.last_attempted_at <= ended.finished_at
    assert ended.errors == []
    assert message_of(result).result == 42


def test_a_result_is_waited_for() -> None:
    result: Any = tasks.add.enqueue(20, other=22)
    with pytest.raises(TimeoutError, match=f"message {result.id} of topic '{ADD}' has not ended: it is scheduled"):
        result.wait(0)
    deliver()
    assert result.wait("10s").return_value == result.return_value == 42
    waits: Any = tasks.add.get_result(result.id)
    assert async_to_sync(waits.await_end)("10s").return_value == 42
    purge.purge_ids("default", [int(result.id)])
    for gone in (result.wait, async_to_sync(result.await_end)):
        with pytest.raises(TaskResultDoesNotExist, match=result.id):
            gone(0)


def test_an_async_task_runs_and_its_value_is_kept() -> None:
    assert done(tasks.greet, "Anna").return_value == "hello Anna"
    assert Effect.objects.get().note == "Anna"


def test_a_task_that_raises_has_failed_with_its_class_and_traceback() -> None:
    result = done(tasks.fail)
    assert (result.status, result.attempts, len(result.worker_ids)) == (TaskResultStatus.FAILED, 1, 1)
    (error,) = result.errors
    assert error.exception_class is tasks.Broken
    assert "in fail\n" in error.traceback
    assert error.traceback.endswith("Broken: it never works\nos.system: not a class path\n")
    with pytest.raises(ValueError, match="Task failed"):
        result.return_value  # noqa: B018
    assert path_of(message_of(result)) == ["scheduled", "running", "dead"]


def test_a_task_is_tried_again_as_its_options_say() -> None:
    result = done(tasks.tell_attempt, 3)
    assert result.return_value == [result.id, 3, 2]
    assert [error.traceback.splitlines()[-1] for error in result.errors] == [
        f"tests.app.tasks.Broken: attempt {number}" for number in (1, 2)
    ]
    assert result.attempts == len(set(result.worker_ids)) + 2 == 3
    assert done(tasks.tell_attempt, 9).status == TaskResultStatus.FAILED


def test_a_task_that_waits_for_another_attempt_is_ready() -> None:
    result = done(tasks.affect, "fail")
    assert (result.status, result.is_finished, len(result.errors)) == (TaskResultStatus.READY, False, 1)
    assert not Effect.objects.exists()


@pytest.mark.postgresql("the database of the tests on SQLite has no connection to lose")
def test_a_task_that_loses_its_connection_before_it_begins_is_not_failed_by_that() -> None:
    def lose_connection(**facts: Any) -> None:
        Message.objects.exists()
        connection.connection.close()

    result = tasks.add.enqueue(1)
    with receiving(lose_connection, signals.message_delivered):
        deliver()
    message = message_of(result)
    assert (message.state, message.attempts) == (State.SCHEDULED, 0)
    reschedule_message(message.pk, delay=0)
    deliver()
    result.refresh()
    assert result.status == TaskResultStatus.SUCCESSFUL


@pytest.mark.parametrize(
    ("what", "value"), [("bytes", "text"), ("tuple", [1, [2]]), ("object", TypeError), ("nul", ValueError)]
)
def test_a_value_that_is_not_json_fails_the_task(what: str, value: Any) -> None:
    result = done(tasks.return_anything, what)
    if isinstance(value, type):
        assert result.status == TaskResultStatus.FAILED
        assert issubclass(result.errors[0].exception_class, value)
    else:
        assert result.return_value == value


def test_a_task_may_have_another_topic() -> None:
    result = done(tasks.have_another_topic)
    assert (result.return_value, message_of(result).topic) == ("done", "t.short_path")


def test_a_message_of_the_right_shape_runs_a_task_and_another_is_dead() -> None:
    by_hand = schedule_message(ADD, {"args": [1], "kwargs": {"other": 2}}, key="sum")
    shapes: list[Any] = [None, [], {"args": [1]}, {"args": {}, "kwargs": {}}]
    others = [schedule_message(ADD, payload) for payload in shapes]
    deliver()
    assert tasks.add.get_result(str(by_hand.pk)).return_value == 3
    for other in others:
        assert path_of(other) == ["scheduled", "running", "dead"]
        with pytest.raises(TaskResultDoesNotExist):
            tasks.add.get_result(str(other.pk))


def test_a_path_from_a_row_is_never_imported() -> None:
    message = schedule_message("tests.app.unheard_of.task", {"args": [], "kwargs": {}})
    also = schedule_message("this.zen", {"args": [], "kwargs": {}})
    deliver()
    for each in (message, also):
        assert path_of(each) == ["scheduled"]
        with pytest.raises(TaskResultDoesNotExist):
            task_backends["default"].get_result(str(each.pk))
    assert "this" not in sys.modules


# --- cancel, reschedule, requeue --------------------------------------------------------------------------------------


def test_a_task_is_cancelled_by_the_id_of_its_result() -> None:
    result = tasks.add.enqueue(1)
    assert cancel_message(result.id, reason="not wanted")
    result.refresh()
    assert result.status == TaskResultStatus.FAILED
    assert result.finished_at is not None
    assert result.errors[0].exception_class.__name__ == "TaskCancelled"
    assert "not wanted" in result.errors[0].traceback
    assert requeue_message(result.id)
    deliver()
    result.refresh()
    assert (result.return_value, result.errors) == (1, [])


def test_a_task_is_rescheduled_by_the_id_of_its_result() -> None:
    result = tasks.add.enqueue(1)
    assert reschedule_message(result.id, delay="1h")
    deliver()
    result.refresh()
    assert result.status == TaskResultStatus.READY
    assert message_of(result).due_at > timezone.now() + timedelta(minutes=59)


def test_an_expired_or_given_up_task_has_failed_by_a_class_that_says_so() -> None:
    expired, given_up = (schedule_message(ADD, {"args": [1], "kwargs": {}}, expires="1ms") for _ in range(2))
    transitions.give_up("default", [given_up.pk], reason="too late for it")
    deliver()
    transitions.expire("default", actor="janitor")
    for message, name, text in [(expired, "TaskExpired", ""), (given_up, "TaskGivenUp", "too late for it")]:
        result = tasks.add.get_result(str(message.pk))
        assert (result.status, result.attempts) == (TaskResultStatus.FAILED, 0)
        assert result.errors[-1].exception_class.__name__ == name
        assert text in result.errors[-1].traceback


def test_a_task_leaves_other_arguments_for_its_next_attempt() -> None:
    result = done(tasks.count_down, 3)
    assert (result.status, result.return_value, result.attempts) == (TaskResultStatus.SUCCESSFUL, 3, 4)


def test_a_task_that_leaves_what_are_no_arguments_ends() -> None:
    result = tasks.leave_nonsense.enqueue()
    deliver()
    message = message_of(result)
    assert (message.state, message.payload, message.deliveries) == (State.DEAD, ["no arguments"], 2)
    assert log_of(message)[-1].error == "Reject: the payload of a task is a dict of args, a list, and kwargs, a dict"


# --- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "argument", "ends"),
    [
        (tasks.add, 1, ["finished SUCCESSFUL"]),
        (tasks.greet, "Anna", ["finished SUCCESSFUL"]),
        (tasks.affect, "done", ["finished SUCCESSFUL"]),
        (tasks.affect, "reject", ["finished FAILED"]),
        (tasks.affect, "fail", []),
        (tasks.affect, "later", []),
        (tasks.return_anything, "nul", ["finished FAILED"]),
    ],
    ids=["sync", "async", "transactional", "rejected", "retried", "later", "not kept"],
)
def test_signals_tell_of_the_start_and_of_the_last_end(
    signalled: list[str], task: Any, argument: Any, ends: list[str]
) -> None:
    done(task, argument)
    assert signalled == ["enqueued READY", "started RUNNING", *ends]


def test_the_end_of_a_task_that_was_asked_to_stop_is_told(signalled: list[str]) -> None:
    with heard(task_finished) as finished:
        result = done(tasks.have_itself_cancelled)
    assert signalled == ["enqueued READY", "started RUNNING", "finished FAILED"]
    assert message_of(result).state == State.CANCELLED
    for told in (finished[0]["task_result"], result):
        (error,) = told.errors
        assert error.exception_class.__name__ == "TaskCancelled"
        assert "cancel requested" in error.traceback


def test_the_success_of_a_transactional_task_is_told_after_its_commit() -> None:
    seen: list[bool] = []

    def look(sender: Any, task_result: AnyResult, **kwargs: Any) -> None:
        seen.append(message_of(task_result).state == State.CONSUMED)

    with receiving(look, task_finished):
        done(tasks.affect, "done")
    assert seen == [True]


def test_receivers_of_an_end_find_the_error_as_the_framework_promises() -> None:
    """Its own receiver logs it."""
    seen: list[BaseException | None] = []
    traces: list[str] = []

    def note(**facts: Any) -> None:
        seen.append(sys.exception())
        traces.append(traceback.format_exc())

    with receiving(note, task_finished):
        failed = done(tasks.fail)
        done(tasks.affect, "done")
    assert [type(error) for error in seen] == [tasks.Broken, type(None)]
    assert traces[0] == failed.errors[0].traceback


def test_an_async_task_past_its_timeout_has_failed(signalled: list[str]) -> None:
    result = done(tasks.outlast)
    assert result.errors[0].exception_class is HandlerTimeout
    assert signalled[1:] == ["started RUNNING", "finished FAILED"]


@pytest.mark.postgresql("locks a table")
def test_the_end_of_an_async_task_that_still_begins_at_its_timeout_is_told(signalled: list[str]) -> None:
    with ExitStack() as stack:

        class LocksTheLog(Middleware):
            @contextmanager
            def handling(self, message: Any) -> Iterator[None]:
                ended = stack.enter_context(unfinished(partial(lock_table, "delayq_log")))
                try:
                    yield
                finally:
                    ended.set()

        stack.enter_context(installed(LocksTheLog()))
        result = done(tasks.outlast)
    assert result.status == TaskResultStatus.FAILED
    assert signalled[1:] == ["started RUNNING", "finished FAILED"]


@pytest.mark.parametrize(
    ("signal", "error"),
    [(task_enqueued, RuntimeError), (task_started, RuntimeError), (task_finished, SystemExit)],
    ids=["enqueued", "started", "finished"],
)
def test_a_receiver_that_raises_or_ends_its_thread_does_not_harm_the_task(signal: Signal, error: Any) -> None:
    def refuse(**kwargs: Any) -> None:
        raise error

    with receiving(refuse, signal):
        assert done(tasks.add, 1).return_value == 1


class Turns(Middleware):
    """Replaces what a task raises, or fails after its first attempt if that succeeds."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    @contextmanager
    def handling(self, message: Any) -> Iterator[None]:
        try:
            yield
        except tasks.Broken:
            raise self.error from None
        if message.attempt == 1:
            raise self.error


@pytest.mark.parametrize(
    ("task", "arguments", "error", "ends"),
    [
        (tasks.affect, ["fail"], Reject("hopeless"), ["finished FAILED"]),
        (tasks.greet, ["Anna"], Reject("hopeless"), ["finished FAILED"]),
        (tasks.fail, [], RetryLater("1h"), []),
        (tasks.add, [1], RetryLater(0), ["started RUNNING", "finished SUCCESSFUL"]),
        (tasks.affect, ["done"], RetryLater(0), ["finished SUCCESSFUL"]),
    ],
    ids=["given up", "given up, async", "tried again", "tried again after a success", "after the commit"],
)
def test_the_end_that_middleware_decides_is_told(
    signalled: list[str], task: Any, arguments: list[Any], error: Exception, ends: list[str]
) -> None:
    with installed(Turns(error)), heard(task_finished) as finished:
        result = done(task, *arguments)
    assert signalled == ["enqueued READY", "started RUNNING", *ends]
    assert [told["task_result"].status for told in finished] == ([result.status] if ends else [])
    assert [told["task_result"].errors for told in finished] == ([result.errors] if ends else [])


def test_a_retry_function_is_asked_once_for_each_failure(signalled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def gives_up_on_odd_calls(attempt: int, error: BaseException | None) -> float | None:
        asked.append(attempt)
        return None if len(asked) % 2 else 3600

    topic = tasks.fail.module_path
    policy = RetryPolicy.custom(gives_up_on_odd_calls)
    monkeypatch.setitem(registry.declared, topic, registry.declared[topic]._replace(own_retry=policy))
    done(tasks.fail)
    assert asked == [1]
    assert signalled[-1] == "finished FAILED"


# --- again and again --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("own_schedules")
@pytest.mark.parametrize(
    ("task", "given", "args", "value"),
    [
        (tasks.add, {"args": [20], "kwargs": {"other": 22}}, [20], 42),
        (tasks.add, {"payload": {"args": [1], "kwargs": {"other": 2}}}, [1], 3),
        (tasks.tell_attempt, {"args": [1]}, [1], [1, 0]),
    ],
    ids=["args", "a payload made by hand", "with its context"],
)
def test_a_task_below_recurring_runs_with_its_arguments(
    task: Any, given: dict[str, Any], args: list[Any], value: Any
) -> None:
    assert recurring("0 3 * * *", **given)(task) is task
    Declarer("default", "w").tick()
    message = run_schedule(task.module_path)
    deliver()
    result = task.get_result(str(message.pk))
    assert (result.status, result.args) == (TaskResultStatus.SUCCESSFUL, args)
    assert result.return_value == ([result.id, *value] if task is tasks.tell_attempt else value)


@pytest.mark.usefixtures("own_schedules")
def test_a_recurring_task_has_its_own_queue_and_priority_and_may_have_no_arguments() -> None:
    recurring(every="1h", name="greet", kwargs={"name": "Anna"})(tasks.greet)
    recurring(every="1h", name="fail")(tasks.fail)
    Declarer("default", "w").tick()
    message = run_schedule("greet")
    assert (message.queue, message.priority) == ("mails", 7)
    assert message.payload == {"args": [], "kwargs": {"name": "Anna"}}
    assert run_schedule("fail").payload == {"args": [], "kwargs": {}}


@pytest.mark.usefixtures("own_schedules")
@pytest.mark.parametrize(
    ("decorated", "options", "words"),
    [
        (tasks.add, {}, "cannot be called with these args and kwargs: missing a required argument: 'one'"),
        (
            tasks.add,
            {"args": [1], "kwargs": {"one": 1}},
            "cannot be called with these args and kwargs: multiple",
        ),
        (tasks.add, {"args": [1], "payload": {"args": [1], "kwargs": {}}}, "or a payload that has them, not both"),
        (tasks.tell_attempt, {"args": [1, 2]}, "too many positional arguments"),
        (succeed, {"args": [1]}, "args and kwargs are those of a task"),
        (tasks.add, {"args": (30)}, "args must be a list or a tuple, such as [30], not 30"),
        (tasks.add, {"args": "1"}, "args must be a list or a tuple, such as [30], not '1'"),
        (tasks.add, {"args": b"1"}, "args must be a list or a tuple, such as [30], not bytes"),
        (tasks.add, {"kwargs": [1]}, 'kwargs must be a dict, such as {"days": 30}, not list'),
        (tasks.add, {"kwargs": {1: 1}}, "keywords must be strings"),
    ],
)
def test_a_recurring_task_that_could_not_run_is_a_mistake(decorated: Any, options: dict[str, Any], words: str) -> None:
    recurring(every="1h", **options)(decorated)
    [mistake] = declarations.collect()[1]
    assert words in mistake.reason


# --- in the tests of a project ----------------------------------------------------------------------------------------


def test_a_task_is_performed_without_the_database(signalled: list[str], django_db_blocker: Any) -> None:
    tell = tasks.tell_attempt.module_path
    connection.close()
    with Delayq() as delayq, django_db_blocker.block():
        delayq.perform(tell, {"args": [2], "kwargs": {}}, attempt=2)
        delayq.perform(tell, {"args": [3], "kwargs": {}}, attempt=2, deliveries=3)
        with pytest.raises(tasks.Broken, match="attempt 1"):
            delayq.perform(tell, {"args": [2], "kwargs": {}})
        delayq.perform(tasks.touch_nothing.module_path, {"args": [], "kwargs": {}})
    done = ["started RUNNING", "finished SUCCESSFUL"]
    assert signalled == [*done, *done, "started RUNNING", *done]


def test_a_task_that_runs_at_once_is_told_to_be_enqueued_before(signalled: list[str], settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "TESTING": "immediate", "REDIS": None}
    tasks.add.enqueue(1)
    assert signalled == ["enqueued READY", "started RUNNING", "finished SUCCESSFUL"]
