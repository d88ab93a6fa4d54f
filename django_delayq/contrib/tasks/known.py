"""The tasks that this process has imported, and the handlers that run them.

A task gets here when its ``@task`` decorator runs. A path that stands in a row is only ever looked up here: nothing is
imported because a row names it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, reduce
from string import Formatter
from typing import Any, Literal, TypedDict, TypeVar, Unpack, cast

from ...core import merging, names, values
from ...core.durations import Duration
from ...core.exceptions import HandlerConflict
from ...core.retry import RetryLike, RetryPolicy, StorableRetry
from ...core.text import shown
from ...project import registry, validation
from ...project.message_options import MessageOptions, OnConflictLike, Unique
from .compat import AnyTask, InvalidTask, Task

F = TypeVar("F", bound=Callable[..., Any])


# A text with names of the task's arguments in it, or a function of these arguments; None: there is no key.
ByArguments = str | Callable[..., str | None] | None


class _Both(TypedDict, total=False):
    """Options that a task has for all its messages, and that ``using`` may give to the next ones."""

    lease: Duration | None
    timeout: Duration | Literal[False] | None
    limit_key: ByArguments
    key: ByArguments
    unique: Unique
    on_conflict: OnConflictLike
    expires: Duration | None


class TaskOptions(_Both, total=False):
    """The options of a task. They mean what they mean to ``@handler`` and to ``schedule_message``."""

    retry: RetryLike | None
    transactional: bool
    limit: int | None
    rate: str | None
    burst: int | None
    on_dead: str | None
    on_expired: str | None
    batch: int | None
    linger: Duration
    redeliver: bool


class MessageTerms(_Both, total=False):
    """The options of single messages of a task."""

    retry: StorableRetry | None


_OF_MESSAGE = {*_Both.__annotations__, *MessageTerms.__annotations__}
_NAMES = sorted({*_OF_MESSAGE, *TaskOptions.__annotations__})
# The options that go with the message, and not with the handler.
_SENT = ("key", "unique", "on_conflict", "expires")
_BY_ARGUMENTS = ("key", "limit_key")
_MEANT = {
    **{name: meant for name, meant in registry.MEANT.items() if meant.partition("=")[0] in _NAMES},
    **dict.fromkeys(("queueing_lock", "unique_key", "dedup_key", "dedupe_key", "idempotency_key", "job_id"), "key"),
    **dict.fromkeys(("unique_for", "unique_until", "dedup_ttl", "unique_ttl"), "unique"),
    **dict.fromkeys(("max_age", "ttl", "expires_in", "expires_at"), "expires"),
}
# The attribute in which a function keeps its ``options``.
_ATTRIBUTE = "delayq_options"
_known: dict[str, AnyTask] = {}
# By topic: the options that go with each message.
_sent: dict[str, dict[str, Any]] = {}


def options(*, topic: str | None = None, **terms: Unpack[TaskOptions]) -> Callable[[F], F]:
    """Give the function of a task options of its own. Write it below ``@task``.

    ``retry``, ``lease``, ``timeout``, ``transactional``, ``limit``, ``rate``, ``burst``, ``on_dead``, ``on_expired``
    and ``redeliver`` are those of ``@handler``; ``unique``, ``on_conflict`` and ``expires`` those of
    ``schedule_message``. ``key`` and ``limit_key`` are a text with names of the task's arguments, such as
    ``"order-{order_id}"``, or a function of these arguments. With ``batch``, and ``linger``, the task takes one list:
    those of up to ``batch`` calls are joined to one. They win over the ``OPTIONS`` of the backend, and the arguments of
    ``@task`` win over them. ``topic`` replaces the path of the function as the topic of its messages.

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
    """Return the options as a dict. Raises ``TypeError`` and ``ValueError`` for impossible options."""
    if terms.keys() - set(_NAMES):
        said = names.unknown(terms, _NAMES, _MEANT)
        raise TypeError(f"a task has no option {said}; it has {', '.join(_NAMES)}")
    of_handler = {name: value for name, value in terms.items() if name not in (*_SENT, "limit_key")}
    # This checks the values, and registers nothing.
    registry.handler("task", **of_handler)
    _check_sent({name: terms[name] for name in (*_SENT, "limit_key") if name in terms})
    return dict(terms)


def checked_for_message(terms: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of single messages. Raises ``TypeError`` and ``ValueError`` for impossible ones."""
    if of_all := sorted(terms.keys() & set(_NAMES) - _OF_MESSAGE):
        raise TypeError(
            f"using() has no {', '.join(of_all)}: give it to all messages of the task, by @task or @options"
        )
    if terms.keys() - _OF_MESSAGE:
        said = names.unknown(terms, _OF_MESSAGE, _MEANT)
        raise TypeError(f"using() has no option {said}; it has {', '.join(sorted(_OF_MESSAGE))}")
    _check_sent(terms)
    return dict(terms)


@cache
def _checks() -> dict[str, Callable[[Any], Any]]:
    # This is read at the first use: most projects have no such options, and to read it takes time at each start.
    return values.checks_of(MessageOptions)


def _check_sent(terms: Mapping[str, Any]) -> None:
    for name, value in terms.items():
        if name not in _BY_ARGUMENTS:
            _checks()[name](value)
        elif not (value is None or callable(value) or isinstance(value, str)):
            raise ValueError(f"{name} is a text with names of arguments, or a function of these, not {shown(value)}")


@cache
def by_arguments(name: str, given: Any, function: Callable[..., Any], takes_context: bool) -> Callable[..., Any]:
    """Return the function that makes a key of the arguments of a task.

    Raises ``ValueError`` for a text that names none of them.
    """
    if callable(given):
        return cast(Callable[..., Any], given)
    signature = _signature(function, takes_context)
    more = next((one.name for one in signature.parameters.values() if one.kind is one.VAR_KEYWORD), None)
    # The names stand before an index or an attribute.
    fields = [text for _, text, _, _ in Formatter().parse(given) if text is not None]
    wanted = {text.partition("[")[0].partition(".")[0] for text in fields}
    if more is None and (unknown := sorted(wanted - signature.parameters.keys())):
        raise ValueError(f"{name}={given!r} names no argument of the task: {', '.join(map(repr, unknown))}")

    def make(*args: Any, **kwargs: Any) -> str:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return str(given.format(**bound.arguments | bound.arguments.get(more or "", {})))

    return make


def joined(task: AnyTask, old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Join the arguments of two messages of a task by their names, as those of an object: ``on_conflict="merge"``."""
    signature = _signature(task.func, task.takes_context)
    bound = [signature.bind(*one["args"], **one["kwargs"]) for one in (old, new)]
    # The arguments of *args are a tuple.
    given = [
        {name: [*value] if isinstance(value, tuple) else value for name, value in one.arguments.items()}
        for one in bound
    ]
    bound[0].arguments = merging.by_name(*given)
    return {"args": [*bound[0].args], "kwargs": bound[0].kwargs}


def _signature(function: Callable[..., Any], takes_context: bool) -> inspect.Signature:
    """Return the signature of a task for its callers: the framework passes the context."""
    signature = inspect.signature(function)
    return signature.replace(parameters=[*signature.parameters.values()][takes_context:])


def sent_with(task: AnyTask, args: Sequence[Any], kwargs: Mapping[str, Any]) -> MessageOptions:
    """Return the options with which a message of a task is scheduled."""
    topic = topic_of(task)
    found: dict[str, Any] = {**_sent[topic], **getattr(task, "delayq_message", {})}
    if registry.declared[topic].batch > 1:
        list_of(task, args, kwargs)
    for name in _BY_ARGUMENTS:
        if found.get(name) is not None:
            found[name] = by_arguments(name, found[name], task.func, task.takes_context)(*args, **kwargs)
    if found.get("key") is None:
        for name in ("unique", "on_conflict"):
            found.pop(name, None)
    return cast(MessageOptions, found)


def topic_of(task: AnyTask) -> str:
    """Return the topic of the messages of a task."""
    topic: str = getattr(task.func, _ATTRIBUTE, {}).get("topic", task.module_path)
    return topic


def find(topic: str) -> AnyTask | None:
    """Return the task whose messages have this topic; None when this process has imported none."""
    return _known.get(topic)


def list_of(task: AnyTask, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the list that a call of a task with ``batch`` has. Raises ``TypeError`` for other arguments."""
    found = [*args, *kwargs.values()]
    if len(found) != 1 or not isinstance(found[0], list):
        raise TypeError(f"{task.name} has batch=: each call has one list, and those of several calls are joined to one")
    inspect.signature(task.func).bind(*args, **kwargs)
    return found[0]


def register(
    task: AnyTask, terms: Mapping[str, Any], runs: Callable[[AnyTask, int | None], Callable[[Any], Any]]
) -> None:
    """Register what runs a task as the handler of its topic, with the options of its backend and its own.

    ``runs`` makes the function that runs it, for its batches if it has them. Raises ``InvalidTask`` when the topic is
    impossible or taken.
    """
    topic = topic_of(task)
    known = _known.get(topic)
    if known is not None and known.func is task.func:
        return
    own = {name: value for name, value in getattr(task.func, _ATTRIBUTE, {}).items() if name != "topic"}
    # Django's own backends run a task once: only its author can say that it may be repeated.
    chosen = {"retry": RetryPolicy.never(), **terms, **own, **getattr(task, "delayq_options", {})}
    try:
        validation.topic(topic)
    except ValueError as error:
        raise InvalidTask(f"{task.module_path} cannot be a topic: {error}; give it one: @options(topic=…)") from None
    try:
        queue = validation.queue(task.queue_name)
        priority = int(task.priority)
        sent = _take_sent(task, chosen)
        batch = chosen.get("batch")
        if batch is not None:
            _check_takes_list(task)
        of_task: dict[str, Any] = {"queue": queue, "priority": priority, "keep_result": batch is None}
        registry.handler(topic, **of_task, **chosen)(runs(task, batch))
    except (ValueError, HandlerConflict) as error:
        raise InvalidTask(f"{task.module_path}: {error}") from error
    _known[topic], _sent[topic] = task, sent


def _check_takes_list(task: AnyTask) -> None:
    """Refuse a function that cannot take a joined list. It gets no context, since each context is that of one call."""
    try:
        if task.takes_context:
            raise TypeError("there is no context, for it is of one call")
        inspect.signature(task.func).bind([])
    except TypeError as error:
        raise ValueError(f"a task with batch= takes one list, as in def index(pages: list[int]): {error}") from None


def _take_sent(task: AnyTask, chosen: dict[str, Any]) -> dict[str, Any]:
    """Take out the options that go with messages, and return them. The limit key gets a message, and not arguments."""
    sent = {name: chosen.pop(name) for name in _SENT if name in chosen}
    if sent.get("key") is not None:
        by_arguments("key", sent["key"], task.func, task.takes_context)
    elif of_key := sorted({"unique", "on_conflict"} & sent.keys()):
        raise ValueError(f"{' and '.join(of_key)}: for messages with a key, and there is no key=")
    if (limit_key := chosen.get("limit_key")) is not None:
        make = by_arguments("limit_key", limit_key, task.func, task.takes_context)
        chosen["limit_key"] = lambda message: make(*message.payload["args"], **message.payload["kwargs"])
    return sent


def declared(task: AnyTask) -> Any:
    """Return the object that the module of a task has under the name of its function; None when there is none."""
    names = task.func.__qualname__.split(".")
    return reduce(lambda found, name: getattr(found, name, None), names, sys.modules.get(task.func.__module__))
