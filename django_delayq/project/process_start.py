"""``@worker_started``: what the project does in each worker process before its first message, and after its last."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[[], Any])

# Types of values whose work waits for somebody who awaits, continues or enters them.
_UNRUN = (Awaitable, Generator, AsyncGenerator, contextlib.ContextDecorator, contextlib.AsyncContextDecorator)

# By their qualified names: a module that is imported again registers its functions again.
functions: dict[str, Callable[[], Any]] = {}


def worker_started(function: F) -> F:
    """Have each worker process call a function before its first message, also with ``--once`` and ``--reload``.

    A worker process is forked from one that has loaded the project, and the threads that were started until then do not
    run in it: start them here. A sync function is called in the main thread. An async one is awaited on the event loop,
    in processes that have async handlers.

    A function that yields once is continued after the last message, when the process ends in order. A function that
    raises ends its process, and the supervisor starts another one; an error behind its ``yield`` is logged.

    ::

        @worker_started
        def listen():
            listener.start()
            yield
            listener.stop()

    Raises ``TypeError`` for what cannot be called without arguments.
    """
    if not inspect.isfunction(function):
        raise TypeError(f"@worker_started decorates a function, not a {type(function).__name__} object")
    name = f"{function.__module__}.{function.__qualname__}"
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise TypeError(f"{name} cannot be called without arguments: {error}") from None
    functions[name] = function
    return function


@contextmanager
def in_process() -> Iterator[None]:
    """Call the sync functions, and continue those that yield at the end."""
    with ExitStack() as stack:
        for function in functions.values():
            if inspect.isgeneratorfunction(function):
                stack.enter_context(contextmanager(function)())
            elif not (inspect.isasyncgenfunction(function) or inspect.iscoroutinefunction(function)):
                _refuse_unrun(function, function())
        yield


def _refuse_unrun(function: Callable[[], Any], returned: Any) -> None:
    """Raise for work that nobody would do: a decorator hides that the function is async, or yields."""
    if isinstance(returned, _UNRUN):
        if inspect.iscoroutine(returned):
            returned.close()
        raise TypeError(
            f"{function.__module__}.{function.__qualname__} returned a {type(returned).__name__}, which nobody runs; "
            "put @worker_started below the other decorators"
        )


@asynccontextmanager
async def on_loop() -> AsyncIterator[None]:
    """Await the async functions, and continue those that yield at the end."""
    async with AsyncExitStack() as stack:
        for function in functions.values():
            if inspect.isasyncgenfunction(function):
                await stack.enter_async_context(asynccontextmanager(function)())
            elif inspect.iscoroutinefunction(function):
                await function()
        yield
