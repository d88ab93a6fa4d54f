"""Makes the async twin of a function."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import update_wrapper
from typing import Any, ParamSpec, TypeVar

from asgiref.sync import sync_to_async

P = ParamSpec("P")
R = TypeVar("R")


def async_twin(function: Callable[P, R]) -> Callable[P, Coroutine[Any, Any, R]]:
    """Return an async function that does in a thread what ``function`` does, with its parameters and overloads.

    Its name is that of the function with an ``a`` before it.
    """
    run = sync_to_async(function, thread_sensitive=True)

    async def twin(*args: P.args, **kwargs: P.kwargs) -> R:
        return await run(*args, **kwargs)

    update_wrapper(twin, function)
    twin.__name__ = twin.__qualname__ = f"a{function.__name__}"
    twin.__doc__ = f"Do from async code what ``{function.__name__}`` does, with the same arguments."
    return twin
