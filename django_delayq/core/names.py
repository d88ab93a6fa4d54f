"""Names that somebody writes wrong, or knows from another queue, and the one that is meant."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

_NUMBER = re.compile(r"\d+")

# What another queue asks for and this one does without.
NOTHING = ""

# Names of a delay and of a due time in other queues.
DELAYS = dict.fromkeys(("countdown", "schedule_in", "defer_by", "after"), "delay")
DUE_TIMES = dict.fromkeys(("at", "eta", "run_at", "run_after", "schedule_at", "scheduled_at", "defer_until"), "due_at")


def near(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like ``name``; None when none is like it, or ``name`` itself is known.

    Names that differ in a number only, such as ``tenant-16`` and ``tenant-17``, are none that were misspelt.
    """
    known = set(known)
    if name in known:
        return None
    shape = _NUMBER.sub("0", name)
    return _like(name, {other for other in known if _NUMBER.sub("0", other) != shape}, 0.75)


def _like(name: str, known: Iterable[str], share: float) -> str | None:
    """Return the known name that has the most in common with ``name``: at least this share of its letters."""
    # Only a mistake needs this module.
    from difflib import get_close_matches

    return next(iter(get_close_matches(name, sorted(known), 1, share)), None)


def unknown(names: Iterable[Any], known: Iterable[str], meant: Mapping[str, str]) -> str:
    """Name arguments that do not exist, each with what to write instead, if that can be guessed."""
    known = set(known)
    said = []
    for name in sorted(map(str, names)):
        instead = meant.get(name)
        if instead is None:
            instead = _like(name, known, 0.65)
        hint = "" if instead is None else f" (write {instead})" if instead else " (leave it out)"
        said.append(name[:40] + hint)
    return ", ".join(said)


def with_hints(meant: Mapping[str, str], called: str = "", options: Any = None) -> Callable[[F], F]:
    """Have a function that is called with an argument which it does not have say what to write instead.

    ``meant`` has names of other queues, and ``called`` the function as the caller writes it. ``options`` is the class
    of its ``**options``. Raises ``TypeError``, as Python does.
    """

    def decorate(function: F) -> F:
        known = inspect.signature(function).parameters.keys() | getattr(options, "__annotations__", {}).keys()
        name = called or f"{function.__name__}()"

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not kwargs.keys() <= known:
                raise TypeError(f"{name} has no such argument: {unknown(kwargs.keys() - known, known, meant)}")
            return function(*args, **kwargs)

        return cast(F, call)

    return decorate
