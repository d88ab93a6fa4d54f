"""The backend with what Django's tests ask of a backend besides: to list its results, and to run a task at once."""

from __future__ import annotations

from typing import Any, ParamSpec, TypeVar

from django_delayq.contrib.tasks import DelayqBackend
from django_delayq.contrib.tasks.compat import AnyResult, Task, TaskResult
from tests.support.rows import unguarded

P = ParamSpec("P")
R = TypeVar("R")


class Inspectable(DelayqBackend):
    """Lists and deletes all results, as Django's dummy backend does."""

    @property
    def results(self) -> list[AnyResult]:
        from django_delayq.models import Message

        return [self.get_result(str(pk)) for pk in Message.objects.order_by("pk").values_list("pk", flat=True)]

    def clear(self) -> None:
        from django_delayq.models import Message

        unguarded(Message).delete()


class Eager(DelayqBackend):
    """Has a worker run each task before ``enqueue`` returns, as Django's immediate backend does."""

    def enqueue(self, task: Task[P, R], args: list[Any], kwargs: dict[str, Any]) -> TaskResult[P, R]:
        from django_delayq.core.worker_options import Options
        from tests.support.assembled import drain

        result = super().enqueue(task, args, kwargs)
        drain(Options("default", queues=(task.queue_name,), threads=1))
        result.refresh()
        if any(error.exception_class is KeyboardInterrupt for error in result.errors):
            # Ctrl-C never reaches the thread of a task. Here the caller gets what the task itself has raised.
            raise KeyboardInterrupt
        return result
