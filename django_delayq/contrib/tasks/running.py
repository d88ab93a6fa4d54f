"""Runs tasks in workers: the handler that a task is registered with, and the signals of the task framework."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from inspect import iscoroutinefunction
from itertools import chain
from typing import Any

from asgiref.sync import sync_to_async
from django.db import InterfaceError, OperationalError
from django.utils import timezone

from ...core.outcomes import GiveUp, Outcome, Release, Retry, class_path
from ...project import validation
from ...project.answers import Reject, RetryLater
from . import known
from .compat import (
    AnyResult,
    AnyTask,
    TaskContext,
    TaskError,
    TaskResultStatus,
    normalize_json,
    task_finished,
    task_started,
)
from .errors import TaskCancelled

logger = logging.getLogger("django_delayq")

# Begins a task, or a batch of tasks: it returns the call of the function, and the function that keeps its value.
Begun = tuple[Callable[[], Any], Callable[[Any], Any]]
Begin = Callable[[AnyTask, Any], Begun]

# A task that the database keeps from beginning is delivered again after this time. Seconds.
AGAIN_AFTER = 5.0


def handler_of(task: AnyTask, batch: int | None) -> Callable[[Any], Any]:
    """Return the handler that runs a task, or batches of it, under the name of its function."""
    begin = _begin if batch is None else _begin_together
    handler = (_async_handler if iscoroutinefunction(task.func) else _sync_handler)(task, begin)
    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(handler, name, getattr(task.func, name))
    return handler


def _sync_handler(task: AnyTask, begin: Begin) -> Callable[[Any], Any]:
    def handle(given: Any) -> Any:
        call, kept = begin(task, given)
        return kept(call())

    return handle


def _async_handler(task: AnyTask, begin: Begin) -> Callable[[Any], Any]:
    async def handle(given: Any) -> Any:
        call, kept = await sync_to_async(begin)(task, given)
        return kept(await call())

    return handle


def _begin(task: AnyTask, message: Any) -> Begun:
    run = Run(task, message)
    args, kwargs = run.start()
    return partial(task.func, *args, **kwargs), run.kept


def _begin_together(task: AnyTask, messages: list[Any]) -> Begun:
    """Start each task of a batch, and join their lists. The value of the function belongs to none of the tasks."""
    joined, refused = [], []
    for message in messages:
        try:
            joined.append(known.list_of(task, *Run(task, message).start()))
        except (Reject, TypeError) as error:
            message.reject(str(error))
            refused.append(Reject(str(error)))
    if not joined:
        raise refused[0]
    return partial(task.func, [*chain.from_iterable(joined)]), lambda value: value


class Run:
    """One delivery of a task, with the result of the task as far as it has come."""

    def __init__(self, task: AnyTask, delivery: Any) -> None:
        self.task = task
        self.delivery = delivery
        self.sender = type(task.get_backend())
        self.value: Any = None

    def start(self) -> tuple[list[Any], dict[str, Any]]:
        """Tell the receivers that the task starts, and return the arguments of its function."""
        from .results import of_delivery

        try:
            result = of_delivery(self.task, self.delivery)
        except (InterfaceError, OperationalError) as error:
            # The task has not begun: a database that is away must not end a task that runs only once.
            raise RetryLater(AGAIN_AFTER, f"the log of the task could not be read: {error}", counts=False) from error
        if result is None:
            raise Reject("the payload of a task is a dict of args, a list, and kwargs, a dict")
        self.delivery.on_end = partial(self.end, result)
        # As in the queue, a receiver that raises is logged and does not harm the task.
        task_started.send_robust(self.sender, task_result=result)
        context = [TaskContext(task_result=result)] if self.task.takes_context else []
        return [*context, *result.args], result.kwargs

    def kept(self, value: Any) -> Any:
        """Return the value that a task returned as JSON knows it. Raises ``TypeError`` when it cannot be kept."""
        self.value = normalize_json(value)
        validation.result(self.value)
        return self.value

    def end(self, result: AnyResult, outcome: Outcome) -> None:
        """Tell the receivers that the task succeeded or failed, unless it will be tried again."""
        ended = self.delivery.fate(outcome)
        values: dict[str, Any] = {"status": TaskResultStatus.SUCCESSFUL, "_return_value": self.value}
        if ended in ("dead", "cancelled"):
            values = {"status": TaskResultStatus.FAILED, "errors": [*result.errors, _error_of(outcome)]}
        elif ended != "consumed":
            return
        for name, value in {**values, "finished_at": timezone.now()}.items():
            # Results are frozen; the framework itself changes them in this way.
            object.__setattr__(result, name, value)
        try:
            self._tell(result, None if ended == "consumed" else self.delivery.raised)
        except BaseException:
            # The outcome stands, whatever a receiver raises, and also when the timeout ends it.
            logger.exception("A receiver of task_finished failed")

    def _tell(self, result: AnyResult, error: BaseException | None) -> None:
        """Send ``task_finished``. Receivers may ask ``sys.exc_info()`` for the error, as the framework's own does."""
        trace = None if error is None else error.__traceback__
        try:
            if error is not None:
                raise error
        except BaseException as raised:  # noqa: BLE001
            # Logs are to show where the task raised it, and not that it was raised here again.
            raised.__traceback__ = trace
            task_finished.send_robust(self.sender, task_result=result)
        else:
            task_finished.send_robust(self.sender, task_result=result)


def _error_of(outcome: Outcome) -> TaskError:
    """Return the error of a task that failed, as the log will have it."""
    if isinstance(outcome, GiveUp | Retry):
        trace = outcome.traceback or f"{outcome.error}\n"
        return TaskError(exception_class_path=outcome.exception, traceback=trace)
    path, reason = class_path(TaskCancelled()), outcome.reason if isinstance(outcome, Release) else ""
    return TaskError(exception_class_path=path, traceback=f"{path}: cancel requested; {reason}\n")
