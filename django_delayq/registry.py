"""The registry of handlers: which function receives which topic, and with which options."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import datetime
from types import MethodType
from typing import Any, Protocol, TypeVar

from asgiref.sync import iscoroutinefunction
from django.conf import settings
from django.utils.module_loading import autodiscover_modules

from . import conf, retry, validation
from .durations import Duration, seconds
from .exceptions import HandlerConflict, InvalidMessage


class Delivered(Protocol):
    """One delivery of a message, as its handler receives it.

    ``attempt`` counts from 1 the deliveries that the retry policy counts. ``deliveries`` counts every claim; together
    with ``id`` it makes a fence that is never used twice. The timeout ends the handler at ``deadline`` (None: never).
    """

    id: int
    topic: str
    queue: str
    key: str | None
    priority: int
    payload: Any
    headers: dict[str, Any]
    due_at: datetime
    attempt: int
    deliveries: int

    @property
    def deadline(self) -> datetime | None: ...

    @property
    def cancel_requested(self) -> bool:
        """True when a cancel was requested while the handler runs. No retry follows. Known within about a second."""

    def extend(self, more: Duration) -> datetime | None:
        """Move the deadline and the lease to ``more`` seconds from now; return the new deadline.

        Raises ``LeaseLost`` when the delivery is not the current one any more. Async handlers await ``aextend``.
        """

    async def aextend(self, more: Duration) -> datetime | None: ...


HandlerFunction = Callable[[Any], Any] | Callable[[Any], Coroutine[Any, Any, Any]]
F = TypeVar("F", bound=HandlerFunction)


@dataclass(frozen=True, slots=True)
class Handler:
    """A function and the options with which it receives messages. Times are in seconds."""

    topic: str
    function: HandlerFunction
    policy: retry.RetryPolicy | None
    own_lease: float | None
    own_timeout: float | None
    has_timeout: bool
    transactional: bool
    queue: str | None
    is_async: bool

    @property
    def name(self) -> str:
        return _name(self.function)

    @property
    def retry(self) -> retry.RetryPolicy:
        return conf.get().RETRY if self.policy is None else self.policy

    @property
    def lease(self) -> float:
        return conf.get().LEASE if self.own_lease is None else self.own_lease

    @property
    def timeout(self) -> float | None:
        return self.own_timeout if self.has_timeout else conf.get().TIMEOUT


_DEFAULT: Any = object()
_handlers: dict[str, Handler] = {}


def handler(
    topic: str,
    *,
    retry: retry.RetryLike | Any = _DEFAULT,
    lease: Duration | None = None,
    timeout: Duration | Any | None = _DEFAULT,
    transactional: bool = False,
    queue: str | None = None,
) -> Callable[[F], F]:
    """Register the decorated function, sync or async, as the receiver of ``topic``.

    Returning is success; raising is failure, answered by ``retry`` (a ``RetryPolicy``, a list of delays, a function, or
    None for never; default ``DELAYQ["RETRY"]``). ``lease``: how long a delivery belongs to its worker before another
    worker may claim the message (default ``DELAYQ["LEASE"]``; the worker extends it while the handler runs).
    ``timeout``: the handler is ended after this time (default ``DELAYQ["TIMEOUT"]``; None: never). Times are seconds,
    timedeltas, or text such as ``"90s"``.

    ``transactional``: run it in a transaction on the message's database whose last statement records the success, so
    that its effects in that database happen exactly once. ``queue``: where messages of this topic go when
    ``schedule_message`` names no queue.

    Raises ``HandlerConflict`` when the topic has a handler already, ``TypeError`` for what cannot handle a message (a
    class, a generator function, a function that does not take one argument), and ``ValueError`` for impossible options.
    """
    if callable(topic):
        raise InvalidMessage('@handler needs the topic of its messages: write @handler("orders.close")')
    topic = validation.topic(topic)
    policy = None if retry is _DEFAULT else _policy(retry)
    own_lease = None if lease is None else _seconds("lease", lease)
    own_timeout = None if timeout is _DEFAULT or timeout is None else _seconds("timeout", timeout)
    if own_lease is not None and not 1 <= own_lease <= 86_400:
        raise ValueError("lease must be between 1 second and 1 day")
    if own_timeout is not None and not 0.01 <= own_timeout <= 30 * 86_400:
        raise ValueError("timeout must be between 10 ms and 30 days, or None")
    if queue is not None:
        validation.queue(queue)

    def register(function: F) -> F:
        _check(function)
        present = _handlers.get(topic)
        if present is not None and not _same(present.function, function):
            raise HandlerConflict(f"topic {topic!r} has two handlers: {present.name} and {_name(function)}")
        _handlers[topic] = Handler(
            topic,
            function,
            policy,
            own_lease,
            own_timeout,
            timeout is not _DEFAULT,
            transactional,
            queue,
            any(map(iscoroutinefunction, _layers(function))),
        )
        return function

    return register


def _layers(function: Any) -> list[Any]:
    """Return the object and the functions that a call of it runs: behind partials, methods and ``__call__``.

    A function behind ``functools.wraps`` is not among them: only its wrapper knows what becomes of it.
    """
    layers = [function]
    while not inspect.isfunction(function) and not inspect.isclass(function):
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, MethodType | staticmethod):
            function = function.__func__
        else:
            function = getattr(type(function), "__call__", None)  # noqa: B004
            if not inspect.isfunction(function):
                break
        layers.append(function)
    return layers


def _check(function: Any) -> None:
    """Refuse what would never run, or never with one message."""
    if not callable(function) or inspect.isclass(function):
        raise TypeError(f"a handler is a function or an object that can be called, not {_described(function)}")
    for layer in _layers(function):
        if inspect.isgeneratorfunction(layer) or inspect.isasyncgenfunction(layer):
            raise TypeError(
                f"{_name(function)} is a generator function: a call of it runs none of its code; "
                "a handler returns when its work is done, and does not yield"
            )
    try:
        # The signature of the wrapper itself is the one that is called.
        signature = inspect.signature(function, follow_wrapped=False)
    except ValueError:
        # Functions in C may have none.
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise TypeError(
            f"{_name(function)}{signature} cannot be called with one message: {error}; "
            "a handler takes the message as its only argument"
        ) from None


def _described(function: Any) -> str:
    return f"the class {function.__qualname__}" if inspect.isclass(function) else type(function).__name__


def _name(function: Any) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', repr(function))}"


def _seconds(option: str, value: Any) -> float:
    try:
        return seconds(value)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def _policy(value: Any) -> retry.RetryPolicy:
    return retry.as_policy(value)


def _same(one: Any, other: Any) -> bool:
    """Tell whether two handlers are the same one: a module that is imported again registers its functions again."""
    if one is other:
        return True
    names = [(function.__module__, getattr(function, "__qualname__", None)) for function in (one, other)]
    # Two partials, or two objects of one class, have no names by which they could be told apart.
    return names[0] == names[1] and names[0][1] is not None and "<locals>" not in names[0][1]


def find(topic: str) -> Handler | None:
    """Return the handler of a topic; None when it has none."""
    return _handlers.get(topic)


def handlers() -> dict[str, Handler]:
    """Return all handlers by topic."""
    return dict(_handlers)


def unregister(topic: str) -> None:
    """Forget the handler of a topic (for tests)."""
    _handlers.pop(topic, None)


def default_queue(topic: str) -> str:
    """Return the queue of a message when the call names none."""
    found = _handlers.get(topic)
    return found.queue if found is not None and found.queue is not None else conf.get().DEFAULT_QUEUE


def autodiscover() -> None:
    """Import the handlers module of each installed app."""
    own, _problems = conf.parse(getattr(settings, "DELAYQ", {}))
    autodiscover_modules(own.HANDLERS_MODULE)
