"""Middleware: classes of the project that surround each handler, and each call that schedules messages.

Context travels from the code that schedules a message to its handler in the headers of the message: the trace, the
tenant, the language, the context of the log. Without middleware a call and a delivery cost one check each.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from .core.callables import nothing
from .core.forks import after_fork
from .project import conf
from .project.registry import Delivered

T = TypeVar("T")


@dataclass(slots=True)
class Draft:
    """A message that is about to be scheduled.

    A middleware may change ``headers``, which are stored with the message; the rest is for reading. ``id`` is None
    until the message is written.
    """

    topic: str
    queue: str
    key: str | None
    headers: dict[str, Any]
    id: int | None = None


class Handled(Delivered[Any], Protocol):
    """A delivery, as a middleware receives it: what the handler gets, and more."""

    using: str

    @property
    def lateness(self) -> float:
        """The seconds from the due time to the claim."""

    @property
    def outcome(self) -> str | None:
        """None until the handler has ended; then "consumed", "retried", "dead", "cancelled", or "released".

        A release costs no attempt. A cancel that the handler could know of wins over every outcome but a success. The
        record may still refuse the outcome, for example because of a cancel of the last moment.
        """


class Middleware:
    """Surrounds calls and handlers. Subclass it, override one method or both, and name the class in ``MIDDLEWARE``.

    One object is made for each process, and its methods are called by several threads. Each returns a context manager,
    for example by ``contextlib.contextmanager``, which is entered and left in the thread of the call or of the handler.
    For an async handler that is the thread of the event loop, which it must not block. The first middleware is the
    outermost.
    """

    def scheduling(self, drafts: Sequence[Draft]) -> AbstractContextManager[Any]:
        """Surround a call that schedules messages: one draft, or all of ``schedule_messages``.

        The arguments are checked already. What is raised on entry refuses the call, and nothing is written. On exit the
        messages are written, perhaps in a transaction that is still open.
        """
        return nullcontext()

    def handling(self, message: Handled) -> AbstractContextManager[Any]:
        """Surround a handler, sync or async; a transactional one with its transaction and its commit.

        On exit ``message.outcome`` says what follows. An exception that is raised instead of the handler's is the
        failure: ``Reject`` and ``RetryLater`` count as they do in a handler. An exception that is swallowed stays a
        failure.
        """
        return nullcontext()


_installed: list[Middleware] = []
_making = threading.RLock()


def install(middleware: Middleware) -> None:
    """Put a middleware around those of ``DELAYQ["MIDDLEWARE"]`` in this process: for integrations."""
    if middleware not in _installed:
        _installed.append(middleware)
        forget()


def remove(middleware: Middleware) -> None:
    """Take away a middleware that was installed."""
    _installed.remove(middleware)
    forget()


@lru_cache(maxsize=1)
def chain() -> tuple[Middleware, ...]:
    """Return the middleware of this process, the outermost first. Raises ``ImproperlyConfigured`` for a wrong path."""
    # Several threads may ask first.
    with _making:
        return _made()


@lru_cache(maxsize=1)
def _made() -> tuple[Middleware, ...]:
    return (*_installed, *(load(path)() for path in conf.get().MIDDLEWARE))


def forget() -> None:
    """Have the middleware made anew. A child of this process has its own: what an object has opened is not shared."""
    global _making  # noqa: PLW0603
    # A thread that the child does not have may hold the former lock.
    _making = threading.RLock()
    for made in (_made, chain):
        made.cache_clear()


after_fork(forget)


def load(path: str) -> type[Middleware]:
    """Return the class that a dotted path of the settings names. Raises ``ImproperlyConfigured``."""
    try:
        found = import_string(path)
    except ImportError as error:
        raise ImproperlyConfigured(f"DELAYQ['MIDDLEWARE'] names {path}, which cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Middleware)):
        raise ImproperlyConfigured(
            f"DELAYQ['MIDDLEWARE'] names {path}, which is no subclass of django_delayq.middleware.Middleware"
        )
    return found


def run_inside(
    contexts: Iterable[AbstractContextManager[Any]],
    function: Callable[[], T],
    on_error: Callable[[BaseException], None] = nothing,
) -> T:
    """Call a function inside of context managers, the first outermost, and return what it returns.

    A generator makes each of them when the one before it is entered.

    ``on_error`` is called with an error before the next of them is left, and again if that one raises another error.
    The last error is raised in the end, even if one of them swallows it.
    """
    inside = _Inside(on_error)
    try:
        inside.enter(contexts)
        returned = function()
    except BaseException as error:  # noqa: BLE001
        inside.raised.append(error)
    inside.leave()
    return returned


async def await_inside(
    contexts: Iterable[AbstractContextManager[Any]],
    function: Callable[[], Awaitable[T]],
    on_error: Callable[[BaseException], None],
) -> T:
    """Await what a function returns inside of context managers, as ``run_inside`` calls one."""
    inside = _Inside(on_error)
    try:
        inside.enter(contexts)
        returned = await function()
    except BaseException as error:  # noqa: BLE001
        inside.raised.append(error)
    inside.leave()
    return returned


class _Inside:
    """Context managers that were entered, and the errors that they are left with."""

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        self._stack = ExitStack()
        self.raised: list[BaseException] = []

    def enter(self, contexts: Iterable[AbstractContextManager[Any]]) -> None:
        for context in contexts:
            self._stack.enter_context(context)
            self._stack.push(self._note)

    def leave(self) -> None:
        """Leave all, raise the last error. Not called while an error is handled: that of ``on_error`` would name it."""
        try:
            with self._stack:
                if self.raised:
                    self._on_error(self.raised[0])
                    raise self.raised[0]
            if self.raised:
                raise self.raised[-1]
        finally:
            # The tracebacks of the errors refer to frames of this call.
            self.raised.clear()

    def _note(self, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
        # The hook raises the error with which the last one was left, or its own, which may be an earlier one.
        if error is not None and (not self.raised or self.raised[-1] is not error):
            self.raised.append(error)
            self._on_error(error)


for _cached in (_made, chain):
    conf.forget_on_change(_cached, "DELAYQ")
