"""Runs tasks in workers: the handler that a task is registered with, and the signals of the task framework."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from inspect import iscoroutinefunction
from traceback import format_exception
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connections, transaction
from django.utils import timezone

from ...core.exceptions import HandlerTimeout
from ...core.outcomes import Release, class_path
from ...project import validation
from ...project.answers import Reject
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


def handler_of(task: AnyTask) -> Callable[[Any], Any]:
    """Return the handler that runs a task, under the name of its function."""
    handler = _async_handler(task) if iscoroutinefunction(task.func) else _sync_handler(task)
    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(handler, name, getattr(task.func, name))
    return handler


def _sync_handler(task: AnyTask) -> Callable[[Any], Any]:
    def handle(message: Any) -> Any:
        run = Run(task, message)
        try:
            args, kwargs = run.start()
            value = run.kept(task.func(*args, **kwargs))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            run.fail(error)
            raise
        run.succeed(value)
        return value

    return handle


def _async_handler(task: AnyTask) -> Callable[[Any], Any]:
    async def handle(message: Any) -> Any:
        run = Run(task, message)
        try:
            args, kwargs = await sync_to_async(run.start)()
            value = run.kept(await task.func(*args, **kwargs))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            # The end of the timeout cancels an async handler; the worker makes it a HandlerTimeout later.
            is_timeout = isinstance(error, asyncio.CancelledError) and not message.cancel_reason
            await sync_to_async(run.fail)(HandlerTimeout() if is_timeout else error)
            raise
        await sync_to_async(run.succeed)(value)
        return value

    return handle


class Run:
    """One delivery of a task, with the result of the task as far as it has come."""

    def __init__(self, task: AnyTask, delivery: Any) -> None:
        self.task = task
        self.delivery = delivery
        self.sender = type(task.get_backend())
        # None until the task is told to have started.
        self.result: AnyResult | None = None

    def start(self) -> tuple[list[Any], dict[str, Any]]:
        """Tell the receivers that the task starts, and return the arguments of its function."""
        from .results import of_delivery

        result = of_delivery(self.task, self.delivery)
        if result is None:
            raise Reject("the payload of a task is a dict of args, a list, and kwargs, a dict")
        self.result = result
        # As in the queue, a receiver that raises is logged and does not harm the task.
        task_started.send_robust(self.sender, task_result=result)
        context = [TaskContext(task_result=result)] if self.task.takes_context else []
        return [*context, *result.args], result.kwargs

    def kept(self, value: Any) -> Any:
        """Return the value that a task returned as JSON knows it. Raises ``TypeError`` when it cannot be kept."""
        value = normalize_json(value)
        validation.result(value)
        return value

    def succeed(self, value: Any) -> None:
        """Tell the receivers that the task succeeded; for a transactional task when that is committed."""
        self._end(TaskResultStatus.SUCCESSFUL, _return_value=value)
        using = self.delivery.using
        # A test may perform a transactional task without a transaction, and without a database.
        if self.delivery.handler.transactional and connections[using].in_atomic_block:
            transaction.on_commit(self._tell, using=using, robust=True)
        else:
            self._tell()

    def fail(self, error: BaseException) -> None:
        """Tell the receivers that the task failed, unless it will be tried again or has not started."""
        from ...worker.run.executor import outcome_of

        if self.result is None:
            return
        outcome = outcome_of(self.delivery, error)
        if self.delivery.fate(outcome) in ("dead", "cancelled"):
            if isinstance(outcome, Release):
                error = TaskCancelled(f"cancel requested; {outcome.reason}")
            trace = "".join(format_exception(error))
            failure = TaskError(exception_class_path=class_path(error), traceback=trace)
            self._end(TaskResultStatus.FAILED, errors=[*self.result.errors, failure])
            self._tell()

    def _end(self, status: TaskResultStatus, **values: Any) -> None:
        for name, value in {**values, "status": status, "finished_at": timezone.now()}.items():
            # Results are frozen, and this is the way in which the framework itself changes them.
            object.__setattr__(self.result, name, value)

    def _tell(self) -> None:
        task_finished.send_robust(self.sender, task_result=self.result)
