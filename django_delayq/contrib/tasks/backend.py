"""The backend. Its module and its constructor reach no models: tasks are declared before the apps are ready."""

from __future__ import annotations

from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

from django.apps import apps
from django.conf import settings
from django.core import checks
from django.db import router
from django.utils import timezone

from ...project import conf
from ...project.message_options import MessageOptions
from . import known
from .compat import (
    AnyResult,
    AnyTask,
    BaseTaskBackend,
    InvalidTask,
    InvalidTaskBackend,
    Task,
    TaskResult,
    TaskResultStatus,
    task_backends,
    task_enqueued,
)
from .running import handler_of
from .task import DelayqResult, DelayqTask

P = ParamSpec("P")
R = TypeVar("R")


class DelayqBackend(BaseTaskBackend):
    """Enqueues tasks as messages. The id of a result is the id of its message.

    ``OPTIONS`` are the options of all its tasks, those that ``options`` has; without ``retry`` a task runs once.
    ``@task`` and ``options`` give a single task its own, and ``task.using()`` its next messages.
    """

    task_class = DelayqTask

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True
    # Workers import the module of this name in each app, and find the tasks there.
    handlers_module = "tasks"

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        try:
            self._terms = known.checked(self.options)
        except (TypeError, ValueError) as error:
            raise InvalidTaskBackend(f"TASKS[{alias!r}]['OPTIONS']: {error}") from error

    def validate_task(self, task: AnyTask) -> None:
        """Check a task, and register its function as the handler of its topic. Raises ``InvalidTask``."""
        super().validate_task(task)
        known.register(task, self._terms, handler_of)

    def enqueue(self, task: Task[P, R], args: list[Any], kwargs: dict[str, Any]) -> TaskResult[P, R]:
        """Schedule the message of a task in the caller's transaction, and return the result of the task, READY."""
        from ...api import scheduling
        from ...broker import publisher
        from ...models import Message
        from . import results

        self.validate_task(task)
        self._refuse_unknown_to_workers(task)
        topic = known.topic_of(task)
        result: Any = DelayqResult(
            task=task,
            id="",
            status=TaskResultStatus.READY,
            enqueued_at=None,
            started_at=None,
            finished_at=None,
            last_attempted_at=None,
            args=args,
            kwargs=kwargs,
            backend=self.alias,
            errors=[],
            worker_ids=[],
        )

        options: MessageOptions = {
            # A time in the past means now, however long ago it was.
            "due_at": task.run_after if task.run_after is not None and task.run_after > timezone.now() else None,
            "queue": task.queue_name,
            "priority": int(task.priority),
            "headers": results.headers(task, known.find(topic)),
            **known.sent_with(task, result.args, result.kwargs),
        }
        using = router.db_for_write(Message)
        payload = {"args": result.args, "kwargs": result.kwargs}
        message = scheduling.write(using, topic, payload, options, partial(known.joined, task))
        if message.existed:
            # Another message has the key: this is its result, and no task was enqueued.
            publisher.run_at_once(using, [message.pk])
            return cast("TaskResult[P, R]", results.find(str(message.pk)))
        object.__setattr__(result, "id", str(message.pk))
        object.__setattr__(result, "enqueued_at", message.created_at)
        task_enqueued.send_robust(type(self), task_result=result)
        publisher.run_at_once(using, [message.pk])
        return cast("TaskResult[P, R]", result)

    def get_result(self, result_id: str) -> AnyResult:
        """Return the result with this id, whichever backend has enqueued the task.

        Raises ``TaskResultDoesNotExist`` when no message has the id, and when it is not the message of a task that this
        process has imported.
        """
        from . import results

        return results.find(result_id)

    def check(self, **kwargs: Any) -> list[checks.CheckMessage]:
        """Check that the queue is installed, and that its workers serve the queues of this backend."""
        if not apps.is_installed("django_delayq"):
            return [
                checks.Error(
                    f"TASKS[{self.alias!r}] is a backend of django_delayq, which is not installed.",
                    hint="Add 'django_delayq' to INSTALLED_APPS.",
                    id="delayq.E013",
                )
            ]
        own, _problems = conf.parse(getattr(settings, "DELAYQ", {}))
        unserved = sorted(self.queues - set(own.QUEUES)) if own.QUEUES else []
        if not unserved:
            return []
        return [
            checks.Warning(
                f"TASKS[{self.alias!r}]['QUEUES'] has queues that DELAYQ['QUEUES'] lacks: {', '.join(unserved)}.",
                hint="No worker serves them, unless it is started with --queue. Add them to DELAYQ['QUEUES'].",
                id="delayq.W002",
            )
        ]

    @staticmethod
    def _refuse_unknown_to_workers(task: AnyTask) -> None:
        """Refuse a task that was declared for a backend of another kind: no worker would know it."""
        declared = known.declared(task)
        if isinstance(declared, Task) and not isinstance(task_backends[declared.backend], DelayqBackend):
            raise InvalidTask(
                f"{task.module_path} was declared for the backend {declared.backend!r}, and workers do not know it: "
                f"declare it with @task(backend={task.backend!r})"
            )
