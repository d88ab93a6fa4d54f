"""Tasks of Django's framework are messages: enqueued with the caller's transaction, run by workers, seen as results."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.utils import timezone

from django_delayq import cancel_message, registry, requeue_message, reschedule_message, schedule_message, transitions
from django_delayq.contrib.tasks import DelayqBackend, known, options
from django_delayq.contrib.tasks.compat import (
    InvalidTask,
    InvalidTaskBackend,
    TaskResult,
    TaskResultDoesNotExist,
    TaskResultStatus,
    task_backends,
    task_enqueued,
    task_finished,
    task_started,
)
from django_delayq.exceptions import HandlerTimeout, InvalidMessage
from django_delayq.models import Message
from django_delayq.retry import RetryPolicy
from django_delayq.states import State
from django_delayq.worker.once import drain
from django_delayq.worker.options import Options
from tests.app import tasks
from tests.app.models import Effect
from tests.record_of import path_of
from tests.workers import ROOT

pytestmark = pytest.mark.django_db(transaction=True)

ADD = "tests.app.tasks.add"


def deliver() -> None:
    """Run what is due, as ``run_delayq --once`` does."""
    drain(Options("default", threads=1))


def done(task: Any, *args: Any, **kwargs: Any) -> TaskResult:
    """Enqueue a task, run it, and return its result."""
    result: TaskResult = task.enqueue(*args, **kwargs)
    deliver()
    result.refresh()
    return result


def message_of(result: TaskResult) -> Message:
    return Message.objects.get(pk=int(result.id))


@pytest.fixture
def signalled() -> Iterator[list[str]]:
    """The signals that were sent: "started RUNNING", "finished FAILED" …"""
    seen: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda sender, task_result, **kwargs: seen.append(f"{name} {task_result.status}")

    receivers = [(task_enqueued, note("enqueued")), (task_started, note("started")), (task_finished, note("finished"))]
    for signal, receiver in receivers:
        signal.connect(receiver)
    yield seen
    for signal, receiver in receivers:
        signal.disconnect(receiver)


# --- enqueue ----------------------------------------------------------------------------------------------------------


def test_a_task_is_a_message_under_its_module_path() -> None:
    at = timezone.now() + timedelta(hours=1)
    result = tasks.greet.using(run_after=at).enqueue("Anna")
    message = message_of(result)
    assert (message.topic, message.queue, message.priority) == ("tests.app.tasks.greet", "mails", 7)
    assert message.payload == {"args": ["Anna"], "kwargs": {}}
    assert timedelta(0) <= message.due_at - at <= timedelta(milliseconds=0.1)
    assert message_of(tasks.add.enqueue(1)).headers == {}


def test_a_task_is_enqueued_by_the_callers_transaction() -> None:
    with transaction.atomic():
        result = tasks.add.enqueue(1)
        assert tasks.add.get_result(result.id).status == TaskResultStatus.READY
        transaction.set_rollback(True)
    with pytest.raises(TaskResultDoesNotExist, match=result.id):
        tasks.add.get_result(result.id)


@pytest.mark.parametrize("ahead", [None, timedelta(days=-400), timedelta(days=400)], ids=["now", "past", "ahead"])
def test_the_result_that_is_read_equals_the_one_that_was_enqueued(ahead: timedelta | None) -> None:
    at = None if ahead is None else timezone.now() + ahead
    result = tasks.add.using(run_after=at, priority=-3, queue_name="mails").enqueue(1, other=[{"ü": 1.5}])
    assert tasks.add.get_result(result.id) == result
    assert async_to_sync(tasks.add.aget_result)(result.id) == result
    assert message_of(result).due_at <= timezone.now() or ahead == timedelta(days=400)


def test_another_alias_of_the_backend_keeps_its_name(settings: Any) -> None:
    settings.TASKS = {**settings.TASKS, "second": settings.TASKS["default"]}
    result = tasks.add.using(backend="second").enqueue(1)
    assert result.backend == "second"
    assert tasks.add.get_result(result.id) == result


def test_a_task_that_was_declared_for_another_backend_is_refused() -> None:
    with pytest.raises(InvalidTask, match=r"stay was declared for the backend 'here'.*@task\(backend='default'\)"):
        tasks.stay.using(backend="default").enqueue()
    assert not Message.objects.exists()


@pytest.mark.parametrize("argument", [object(), "\x00", {1: 2}, 2**63, float("nan")], ids=repr)
def test_an_argument_that_is_not_json_is_refused_at_the_call(argument: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        tasks.add.enqueue(argument)
    assert not Message.objects.exists()


# --- run --------------------------------------------------------------------------------------------------------------


def test_a_worker_finds_the_tasks_and_another_process_reads_the_result() -> None:
    result = tasks.add.enqueue(20, other=22)
    command = [sys.executable, "-m", "django", "run_delayq", "--once"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    ended = tasks.add.get_result(result.id)
    assert (ended.status, ended.return_value, ended.attempts) == (TaskResultStatus.SUCCESSFUL, 42, 1)
    assert ended.enqueued_at is not None
    assert ended.started_at is not None
    assert ended.finished_at is not None
    assert ended.enqueued_at <= ended.started_at == ended.last_attempted_at <= ended.finished_at
    assert ended.errors == []
    assert message_of(result).result == 42


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


def test_the_options_of_a_task_win_over_those_of_its_backend() -> None:
    backend = DelayqBackend("default", {"QUEUES": [], "OPTIONS": {"retry": ["1m"], "lease": "3m"}})
    try:
        for task, topic, lease in [(tasks.add, ADD, 180), (tasks.have_another_topic, "t.short_path", 120)]:
            known._known.pop(topic)
            backend.validate_task(task)
            found = registry.find(topic)
            assert found is not None
            assert (found.retry, found.lease) == (RetryPolicy.fixed(["1m"]), lease)
    finally:
        for task, topic in [(tasks.add, ADD), (tasks.have_another_topic, "t.short_path")]:
            known._known.pop(topic)
            task_backends["default"].validate_task(task)


def test_a_handler_of_a_task_has_its_name_and_runs_once() -> None:
    found = registry.find(ADD)
    assert found is not None
    assert (found.name, found.queue, found.retry) == (ADD, "default", RetryPolicy.never())


def test_a_task_may_have_another_topic() -> None:
    result = done(tasks.have_another_topic)
    assert (result.return_value, message_of(result).topic) == ("done", "t.short_path")


def test_a_message_of_the_right_shape_runs_a_task_and_another_is_dead() -> None:
    by_hand = schedule_message(ADD, {"args": [1], "kwargs": {"other": 2}}, key="sum")
    others = [schedule_message(ADD, payload) for payload in (None, [], {"args": [1]}, {"args": {}, "kwargs": {}})]
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


@pytest.mark.parametrize("id_", ["", "0", "-1", "01", " 1", "1.0", "x", "9" * 30, "٣", str(2**63), None, 1.5])
def test_an_id_that_no_message_can_have_has_no_result(id_: Any) -> None:
    tasks.add.enqueue(1)
    with pytest.raises(TaskResultDoesNotExist):
        tasks.add.get_result(id_)


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


@pytest.mark.parametrize("id_", ["", "0", "1.0", "x", "٣", "9" * 30])
def test_text_that_is_no_id_is_refused(id_: str) -> None:
    with pytest.raises(InvalidMessage, match="not the id of a message"):
        cancel_message(id_)


def test_an_expired_or_given_up_task_has_failed_by_a_class_that_says_so() -> None:
    expired, given_up = (schedule_message(ADD, {"args": [1], "kwargs": {}}, expires="1ms") for _ in range(2))
    transitions.give_up("default", [given_up.pk], actor="restore", reason="too late for it")
    deliver()
    transitions.expire("default", actor="janitor")
    for message, name, text in [(expired, "TaskExpired", ""), (given_up, "TaskGivenUp", "too late for it")]:
        result = tasks.add.get_result(str(message.pk))
        assert (result.status, result.attempts) == (TaskResultStatus.FAILED, 0)
        assert result.errors[-1].exception_class.__name__ == name
        assert text in result.errors[-1].traceback


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


def test_the_success_of_a_transactional_task_is_told_after_its_commit() -> None:
    seen: list[bool] = []

    def look(sender: Any, task_result: TaskResult, **kwargs: Any) -> None:
        seen.append(message_of(task_result).state == State.CONSUMED)

    task_finished.connect(look)
    try:
        done(tasks.affect, "done")
    finally:
        task_finished.disconnect(look)
    assert seen == [True]


def test_an_async_task_past_its_timeout_has_failed(signalled: list[str]) -> None:
    result = done(tasks.outlast)
    assert result.errors[0].exception_class is HandlerTimeout
    assert signalled[1:] == ["started RUNNING", "finished FAILED"]


def test_a_receiver_that_raises_does_not_harm_the_task() -> None:
    def refuse(**kwargs: Any) -> None:
        raise RuntimeError("no")

    for signal in (task_started, task_finished):
        signal.connect(refuse)
    try:
        assert done(tasks.add, 1).return_value == 1
    finally:
        for signal in (task_started, task_finished):
            signal.disconnect(refuse)


# --- what is wrong ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"retries": 3}, "a task has no option retries; it has lease, retry, timeout, transactional"),
        ({"retry": "often"}, "retry is a RetryPolicy"),
        ({"lease": 0}, "lease must be between"),
    ],
)
def test_impossible_options_are_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidTaskBackend, match=reason) as refused:
        DelayqBackend("main", {"OPTIONS": given})
    assert isinstance(refused.value, ImproperlyConfigured)
    with pytest.raises((TypeError, ValueError), match=reason):
        options(**given)


def test_options_above_the_decorator_are_refused() -> None:
    with pytest.raises(TypeError, match="write it below @task"):
        options(retry=[1])(tasks.add)


@pytest.mark.parametrize(
    ("name", "reason"), [("x" * 101, r"cannot be a topic: .*@options\(topic=…\)"), ("naïve", "cannot be a topic")]
)
def test_a_path_that_cannot_be_a_topic_is_refused_when_the_task_is_declared(name: str, reason: str) -> None:
    def function() -> None: ...

    function.__qualname__ = name
    with pytest.raises(InvalidTask, match=reason):
        type(tasks.add)(func=function, backend="default", queue_name="mails")


def test_a_queue_that_the_queue_cannot_have_is_refused() -> None:
    def function() -> None: ...

    function.__qualname__ = "function"
    backend = DelayqBackend("main", {"QUEUES": []})
    task = object.__new__(type(tasks.add))
    for name, value in {"func": function, "priority": 0, "queue_name": "a b", "run_after": None}.items():
        object.__setattr__(task, name, value)
    object.__setattr__(task, "takes_context", False)
    object.__setattr__(task, "backend", "default")
    with pytest.raises(InvalidTask, match="not a queue"):
        backend.validate_task(task)


def test_a_topic_that_has_a_handler_is_refused() -> None:
    def function() -> None: ...

    function.__qualname__ = "function"
    options(topic="t.ok")(function)
    with pytest.raises(InvalidTask, match=r"topic 't\.ok' has two handlers"):
        type(tasks.add)(func=function)


def test_the_check_knows_queues_that_nobody_serves(settings: Any) -> None:
    backend = task_backends["default"]
    assert list(backend.check()) == []
    settings.DELAYQ = {**settings.DELAYQ, "QUEUES": ["default"]}
    (warning,) = backend.check()
    assert (warning.id, "mails" in warning.msg) == ("delayq.W001", True)
    settings.INSTALLED_APPS = [app for app in settings.INSTALLED_APPS if not app.startswith("django_delayq")]
    assert [error.id for error in backend.check()] == ["delayq.E012"]


def test_the_backend_costs_nothing_where_no_task_runs_here() -> None:
    program = (
        "import sys, django; django.setup(); "
        "loaded = [m for m in sys.modules if m.startswith(('django_delayq.contrib', 'django.tasks', 'django_tasks'))]; "
        "sys.exit(repr(loaded) if loaded else 0)"
    )
    command = [
        sys.executable,
        "-c",
        f"import os; os.environ['DJANGO_SETTINGS_MODULE'] = 'testproject.settings'; {program}",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
