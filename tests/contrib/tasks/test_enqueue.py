"""Tasks of Django's framework become messages: with the caller's transaction, and only if a worker can run them."""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime, timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.utils import timezone

from django_delayq.contrib.tasks import DelayqBackend, known, options
from django_delayq.contrib.tasks.compat import (
    AnyResult,
    InvalidTask,
    InvalidTaskBackend,
    TaskResultDoesNotExist,
    TaskResultStatus,
    task_backends,
)
from django_delayq.core.retry import RetryPolicy
from django_delayq.models import Message
from django_delayq.project import registry
from tests.app import tasks as typed_tasks
from tests.support.workers import ROOT

pytestmark = pytest.mark.django_db

ADD = "tests.app.tasks.add"
# Here they are called in ways that their types forbid.
tasks: Any = typed_tasks


def message_of(result: AnyResult) -> Message:
    return Message.objects.get(pk=int(result.id))


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


def test_a_time_before_all_others_in_the_east_is_read() -> None:
    at = datetime.min.replace(tzinfo=timezone.get_fixed_timezone(14 * 60))
    result = tasks.add.using(run_after=at).enqueue(1)
    assert tasks.add.get_result(result.id).status == TaskResultStatus.READY


def test_another_alias_of_the_backend_keeps_its_name(settings: Any) -> None:
    settings.TASKS = {**settings.TASKS, "second": settings.TASKS["default"]}
    result = tasks.add.using(backend="second").enqueue(1)
    assert result.backend == "second"
    assert tasks.add.get_result(result.id) == result


def test_a_task_that_was_declared_for_another_backend_is_refused() -> None:
    with pytest.raises(InvalidTask, match=r"stay was declared for the backend 'here'.*@task\(backend='default'\)"):
        tasks.stay.using(backend="default").enqueue()
    assert not Message.objects.exists()


@pytest.mark.parametrize("argument", [object, "\x00", {1: 2}, 2**63, float("nan")], ids=repr)
def test_an_argument_that_is_not_json_is_refused_at_the_call(argument: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        tasks.add.enqueue(argument)
    assert not Message.objects.exists()


def test_an_id_that_no_message_can_have_has_no_result() -> None:
    given: list[Any] = ["", "0", "-1", "01", " 1", "1.0", "x", "9" * 30, "٣", str(2**63), None, 1.5]
    for id_ in given:
        with pytest.raises(TaskResultDoesNotExist):
            tasks.add.get_result(id_)


def test_the_options_of_a_task_win_over_those_of_its_backend() -> None:
    backend = DelayqBackend("default", {"QUEUES": [], "OPTIONS": {"retry": ["1m"], "lease": "3m"}})
    cases: list[Any] = [(tasks.add, ADD, 180), (tasks.have_another_topic, "t.short_path", 120)]
    try:
        for task, topic, lease in cases:
            known._known.pop(topic)
            backend.validate_task(task)
            found = registry.find(topic)
            assert found is not None
            assert (found.retry, found.lease) == (RetryPolicy.fixed(["1m"]), lease)
    finally:
        for task, topic, _lease in cases:
            known._known.pop(topic)
            task_backends["default"].validate_task(task)


# --- what is wrong ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (
            {"retries": 3},
            r"a task has no option retries \(write retry=RetryPolicy.exponential\(max_attempts=4\)\); it has batch, ",
        ),
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


def function(name: str) -> Any:
    """Make a function that could be a task, with this name."""

    def made() -> None: ...

    made.__qualname__ = name
    return made


@pytest.mark.parametrize(
    ("name", "reason"), [("x" * 101, r"cannot be a topic: .*@options\(topic=…\)"), ("naïve", "cannot be a topic")]
)
def test_a_path_that_cannot_be_a_topic_is_refused_when_the_task_is_declared(name: str, reason: str) -> None:
    with pytest.raises(InvalidTask, match=reason):
        type(tasks.add)(func=function(name), backend="default", queue_name="mails")


def test_a_queue_that_the_queue_cannot_have_is_refused(settings: Any) -> None:
    settings.TASKS = {**settings.TASKS, "default": {**settings.TASKS["default"], "QUEUES": []}}
    with pytest.raises(InvalidTask, match="queue must be"):
        type(tasks.add)(func=function("function"), backend="default", queue_name="a b")


def test_a_topic_that_has_a_handler_is_refused() -> None:
    with pytest.raises(InvalidTask, match=r"topic 't\.ok' has two handlers"):
        type(tasks.add)(func=options(topic="t.ok")(function("function")))


def test_the_check_knows_queues_that_nobody_serves(settings: Any) -> None:
    backend = task_backends["default"]
    assert list(backend.check()) == []
    settings.DELAYQ = {**settings.DELAYQ, "QUEUES": ["default"]}
    (warning,) = backend.check()
    assert (warning.id, "mails" in warning.msg) == ("delayq.W002", True)
    settings.INSTALLED_APPS = [app for app in settings.INSTALLED_APPS if not app.startswith("django_delayq")]
    assert [error.id for error in backend.check()] == ["delayq.E013"]


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
