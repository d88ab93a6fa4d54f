"""The results of tasks, made of messages and their log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

from django.db import router

from ...core.outcomes import class_path
from ...core.states import State
from ...models import Message, Transition
from . import known
from .compat import AnyResult, AnyTask, TaskError, TaskResultDoesNotExist, TaskResultStatus
from .errors import TaskCancelled, TaskExpired, TaskGivenUp
from .task import DelayqResult

# The header in which a message keeps the attributes of a task that have no column.
HEADER = "task"
# The greatest id of a message.
_GREATEST = 2**63 - 1

_STATUS = {
    State.SCHEDULED: TaskResultStatus.READY,
    State.RUNNING: TaskResultStatus.RUNNING,
    State.CONSUMED: TaskResultStatus.SUCCESSFUL,
    State.DEAD: TaskResultStatus.FAILED,
    State.CANCELLED: TaskResultStatus.FAILED,
    State.EXPIRED: TaskResultStatus.FAILED,
}
_ENDS = {State.CANCELLED: TaskCancelled, State.EXPIRED: TaskExpired, State.DEAD: TaskGivenUp}


def headers(task: AnyTask, base: AnyTask | None) -> dict[str, Any]:
    """Return the headers of a task's message: the differences between the task and the declared one."""
    own: dict[str, Any] = {}
    if base is None or task.backend != base.backend:
        own["backend"] = task.backend
    if task.run_after is not None:
        own["run_after"] = task.run_after.isoformat()
    return {HEADER: own} if own else {}


def find(result_id: str) -> AnyResult:
    """Return the result of the message with this id. Raises ``TaskResultDoesNotExist`` when it is no task's."""
    found = _read(result_id)
    if found is None:
        raise TaskResultDoesNotExist(str(result_id))
    return found


def of_delivery(task: AnyTask, delivery: Any) -> AnyResult | None:
    """Return the result of a task that begins to run; None when the payload is none of a task's."""
    log = getattr(delivery, "log", None)
    if log is None:
        log = [*Transition.objects.using(delivery.using).filter(message_id=delivery.id).order_by("number")]
    return _result(task, delivery, log, State.RUNNING)


def _read(result_id: object) -> AnyResult | None:
    """Return the result with an id from the record. None: no task has it."""
    text = str(result_id)
    pk = int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else 0
    if str(pk) != text or not 0 < pk <= _GREATEST:
        return None
    using = router.db_for_write(Message)
    # The log comes first: a success that it shows has its result in the row, which is read after it.
    log = [*Transition.objects.using(using).filter(message_id=pk).order_by("number")]
    message = Message.objects.using(using).filter(pk=pk).first() if log else None
    task = None if message is None else known.find(message.topic)
    if message is None or task is None:
        return None
    result = _result(task, message, log, State(log[-1].to_state))
    if result is not None and result.status == TaskResultStatus.SUCCESSFUL:
        object.__setattr__(result, "_return_value", message.result)
    return result


def _result(base: AnyTask, message: Any, log: Sequence[Transition], state: State) -> AnyResult | None:
    arguments = message.payload
    match arguments:
        case {"args": list(args), "kwargs": dict(kwargs), **others} if not others:
            pass
        case _:
            return None
    claims = [move for move in log if (move.from_state, move.to_state) == (State.SCHEDULED, State.RUNNING)]
    task = _task(base, message)
    status = _STATUS[state]
    return DelayqResult(
        task=task,
        id=str(message.id),
        status=status,
        enqueued_at=log[0].at if log else None,
        started_at=claims[0].at if claims else None,
        finished_at=log[-1].at if status in (TaskResultStatus.SUCCESSFUL, TaskResultStatus.FAILED) else None,
        last_attempted_at=claims[-1].at if claims else None,
        args=args,
        kwargs=kwargs,
        backend=task.backend,
        errors=_errors(log),
        worker_ids=[move.actor.removeprefix("worker:") for move in claims],
    )


def _task(base: AnyTask, message: Any) -> AnyTask:
    """Return the task as it was enqueued. It is not checked again: the settings may have changed since."""
    own = message.headers.get(HEADER, {}) if isinstance(message.headers, dict) else {}
    own = own if isinstance(own, dict) else {}
    values = {field.name: getattr(base, field.name) for field in fields(base)}
    values |= {"priority": message.priority, "queue_name": message.queue, "run_after": _moment(own.get("run_after"))}
    values["backend"] = str(own.get("backend", base.backend))
    made = object.__new__(type(base))
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def _moment(text: object) -> datetime | None:
    try:
        return datetime.fromisoformat(str(text)).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def _errors(log: Sequence[Transition]) -> list[TaskError]:
    """Return the errors of all attempts, and at last what ended the message without one."""
    found = [
        TaskError(exception_class_path=move.exception, traceback=move.traceback or f"{move.error}\n")
        for move in log
        if move.exception
    ]
    if log and not log[-1].exception and (kind := _ENDS.get(State(log[-1].to_state))):
        path = class_path(kind())
        found.append(TaskError(exception_class_path=path, traceback=f"{path}: {log[-1].reason or kind()}\n"))
    return found
