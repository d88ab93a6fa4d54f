"""The registry of handlers: which function receives which topic, and with which options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol, TypeVar

from django.conf import settings
from django.utils.module_loading import autodiscover_modules

from . import conf, retry, validation
from .durations import Duration, seconds
from .exceptions import HandlerConflict


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
    due: datetime
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
        return f"{self.function.__module__}.{getattr(self.function, '__qualname__', repr(self.function))}"

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

    Raises ``HandlerConflict`` when the topic has a handler already, and ``ValueError`` for impossible options.
    """
    topic = validation.topic(topic)
    policy = None if retry is _DEFAULT else _policy(retry)
    own_lease = None if lease is None else seconds(lease)
    own_timeout = None if timeout is _DEFAULT or timeout is None else seconds(timeout)
    if own_lease is not None and not 1 <= own_lease <= 86_400:
        raise ValueError("lease must be between 1 second and 1 day")
    if own_timeout is not None and not 0.01 <= own_timeout <= 30 * 86_400:
        raise ValueError("timeout must be between 10 ms and 30 days, or None")
    if queue is not None:
        validation.queue(queue)

    def register(function: F) -> F:
        present = _handlers.get(topic)
        if present is not None and not _same(present.function, function):
            raise HandlerConflict(
                f"topic {topic!r} has two handlers: {present.name} and "
                f"{function.__module__}.{getattr(function, '__qualname__', function)}"
            )
        _handlers[topic] = Handler(
            topic,
            function,
            policy,
            own_lease,
            own_timeout,
            timeout is not _DEFAULT,
            transactional,
            queue,
            inspect.iscoroutinefunction(function),
        )
        return function

    return register


def _policy(value: Any) -> retry.RetryPolicy:
    return retry.as_policy(value)


def _same(one: Any, other: Any) -> bool:
    """Tell whether two functions are the same one: a module that is imported again registers its handlers again."""
    return (one.__module__, getattr(one, "__qualname__", None)) == (
        other.__module__,
        getattr(other, "__qualname__", None),
    ) and "<locals>" not in getattr(one, "__qualname__", "")


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
