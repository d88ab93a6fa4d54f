"""The backend with what Django's tests ask of a backend besides: to list its results, and to run a task at once."""

from __future__ import annotations

from typing import Any

from django_delayq.contrib.tasks import DelayqBackend
from django_delayq.contrib.tasks.compat import Task, TaskResult


class Inspectable(DelayqBackend):
    """Lists and deletes all results, as Django's dummy backend does."""

    @property
    def results(self) -> list[TaskResult]:
        from django_delayq.models import Message

        return [self.get_result(str(pk)) for pk in Message.objects.order_by("pk").values_list("pk", flat=True)]

    def clear(self) -> None:
        from django_delayq.models import Message

        Message._base_manager.all().delete()


class Eager(DelayqBackend):
    """Has a worker run each task before ``enqueue`` returns, as Django's immediate backend does."""

    def enqueue(self, task: Task, args: Any, kwargs: Any) -> TaskResult:
        from django_delayq.worker.once import drain
        from django_delayq.worker.options import Options

        result = super().enqueue(task, args, kwargs)
        drain(Options("default", queues=(task.queue_name,), threads=1))
        result.refresh()
        if any(error.exception_class is KeyboardInterrupt for error in result.errors):
            # Ctrl-C never reaches the thread of a task. Here the caller gets what the task itself has raised.
            raise KeyboardInterrupt
        return result
