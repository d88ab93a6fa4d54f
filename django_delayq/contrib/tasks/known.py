"""The tasks that this process has imported, and the handlers that run them.

A task gets here when its ``@task`` decorator runs. A path that stands in a row is only ever looked up here: nothing is
imported because a row names it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, Literal, TypedDict, TypeVar, Unpack

from ...core import names
from ...core.durations import Duration
from ...core.exceptions import HandlerConflict
from ...core.retry import RetryLike, RetryPolicy
from ...project import registry, validation
from .compat import AnyTask, InvalidTask, Task

F = TypeVar("F", bound=Callable[..., Any])


class TaskOptions(TypedDict, total=False):
    """The options with which a task is run. They mean what they mean to ``@handler``."""

    retry: RetryLike
    lease: Duration
    timeout: Duration | Literal[False] | None
    transactional: bool


_NAMES = sorted(TaskOptions.__annotations__)
_MEANT = {name: meant for name, meant in registry.MEANT.items() if meant.partition("=")[0] in _NAMES}
# Where a function keeps what ``options`` has given it.
_ATTRIBUTE = "delayq_options"
_known: dict[str, AnyTask] = {}


def options(*, topic: str | None = None, **terms: Unpack[TaskOptions]) -> Callable[[F], F]:
    """Give the function of a task options of its own. Write it below ``@task``.

    ``retry``, ``lease``, ``timeout`` and ``transactional`` are those of ``@handler``, and win over the ``OPTIONS`` of
    the backend. ``topic`` replaces the path of the function as the topic of its messages.

    Raises ``TypeError`` and ``ValueError`` for options that cannot be.
    """
    found = checked(terms)
    if topic is not None:
        found["topic"] = validation.topic(topic)

    def give(function: F) -> F:
        if isinstance(function, Task):
            raise TypeError("@options is for the function of a task: write it below @task")
        setattr(function, _ATTRIBUTE, found)
        return function

    return give


def checked(terms: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options as a dict. Raises ``TypeError`` and ``ValueError`` for options that cannot be."""
    if terms.keys() - set(_NAMES):
        said = names.unknown(terms, _NAMES, _MEANT)
        raise TypeError(f"a task has no option {said}; it has {', '.join(_NAMES)}")
    # This checks the values, and registers nothing.
    registry.handler("task", **terms)
    return dict(terms)


def topic_of(task: AnyTask) -> str:
    """Return the topic of the messages of a task."""
    topic: str = getattr(task.func, _ATTRIBUTE, {}).get("topic", task.module_path)
    return topic


def find(topic: str) -> AnyTask | None:
    """Return the task whose messages have this topic; None when this process has imported none."""
    return _known.get(topic)


def register(task: AnyTask, terms: Mapping[str, Any], function: Callable[[Any], Any]) -> None:
    """Register the function that runs a task as the handler of its topic, with the options of its backend and its own.

    Raises ``InvalidTask`` when the topic is impossible or taken.
    """
    topic = topic_of(task)
    known = _known.get(topic)
    if known is not None and known.func is task.func:
        return
    own = {name: value for name, value in getattr(task.func, _ATTRIBUTE, {}).items() if name != "topic"}
    # Django's own backends run a task once: to repeat one is for its author to say.
    chosen: dict[str, Any] = {"retry": RetryPolicy.never(), **terms, **own}
    try:
        validation.topic(topic)
    except ValueError as error:
        raise InvalidTask(f"{task.module_path} cannot be a topic: {error}; give it one: @options(topic=…)") from None
    try:
        queue = validation.queue(task.queue_name)
        priority = int(task.priority)
        registry.handler(topic, queue=queue, priority=priority, keep_result=True, **chosen)(function)
    except (ValueError, HandlerConflict) as error:
        raise InvalidTask(f"{task.module_path}: {error}") from error
    _known[topic] = task


def declared(task: AnyTask) -> Any:
    """Return what the module of a task has under the name of its function; None when there is nothing."""
    names = task.func.__qualname__.split(".")
    return reduce(lambda found, name: getattr(found, name, None), names, sys.modules.get(task.func.__module__))
