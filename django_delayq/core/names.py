"""Names that somebody writes wrong, or knows from another queue, and the one that is meant."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, NoReturn, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C")

_NUMBER = re.compile(r"\d+")

# The hint for arguments that other queues need and this one does without.
NOTHING = ""

# The hint for a link to the next task.
NEXT = "the next schedule_message() at the end of the handler"

# Names of a delay and of a due time in other queues.
DELAYS = dict.fromkeys(("countdown", "schedule_in", "defer_by", "after"), "delay")
DUE_TIMES = dict.fromkeys(("at", "eta", "run_at", "run_after", "schedule_at", "scheduled_at", "defer_until"), "due_at")


def near(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like ``name``; None when none is like it, or ``name`` itself is known.

    Names that differ only in a number, such as ``tenant-16`` and ``tenant-17``, do not count as misspelt.
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


def instead(name: str, known: Iterable[str], meant: Mapping[str, str], value: Any = None) -> str | None:
    """Return what to write instead of a name: what it means here, or else a name that is like it; None: no idea.

    In the text in ``meant``, ``{value}`` stands for the number that was given under the name, ``{more}`` for one more.
    """
    found = meant.get(name)
    if found is None:
        return _like(name, known, 0.65)
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return found.replace("{value}", str(value) if is_number else "…").replace(
        "{more}", str(value + 1) if is_number else "…"
    )


def unknown(given: Mapping[Any, Any], known: Iterable[str], meant: Mapping[str, str], otherwise: str = "") -> str:
    """Name arguments that do not exist, each with what to write instead, if that can be guessed.

    ``otherwise`` is the hint for a name of which nothing is known.
    """
    known = set(known)
    said = []
    for name in sorted(given.keys() - known, key=str):
        found = instead(str(name), known, meant, given[name])
        hint = otherwise if found is None else f"write {found}" if found else "leave it out"
        said.append(str(name)[:40] + (hint and f" ({hint})"))
    return ", ".join(said)


def with_hints(meant: Mapping[str, str], called: str = "", options: Any = None) -> Callable[[F], F]:
    """Have a function that is called with an argument which it does not have say what to write instead.

    ``meant`` has names of other queues, and ``called`` the function as the caller writes it. ``options`` is the class
    of its ``**options``. Raises ``TypeError``, as Python does.
    """

    def decorate(function: F) -> F:
        parameters = inspect.signature(function).parameters
        known = (parameters.keys() | getattr(options, "__annotations__", {}).keys()) - {"self", "cls"}
        unnamed = [one.name for one in parameters.values() if one.kind is one.POSITIONAL_OR_KEYWORD]
        own = {name: text for name, text in meant.items() if not text.isidentifier() or text in known}
        name = called or f"{function.__name__}()"

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not kwargs.keys() <= known:
                raise TypeError(f"{name} has no such argument: {unknown(kwargs, known, own)}")
            if len(args) > len(unnamed):
                without = ", ".join(one for one in unnamed if one in known)
                named = ", ".join(f"{one}=" for one in sorted(known.difference(unnamed)))
                raise TypeError(f"{name} takes without a name only {without}: name the others ({named})")
            return function(*args, **kwargs)

        return cast(F, call)

    return decorate


class _Refused:
    """An attribute that objects of other queues have. To read it raises ``AttributeError``, so ``hasattr`` is false."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __get__(self, instance: Any, owner: Any = None) -> NoReturn:
        raise AttributeError(self._text)


def refuse_attributes(what: str, meant: Mapping[str, str]) -> Callable[[type[C]], type[C]]:
    """Have the objects of a class, and the class itself, say what to write instead of these attributes.

    A decorator sets them, so that a type checker goes on to find them missing. Any other attribute is as before.
    """

    def decorate(decorated: type[C]) -> type[C]:
        for name, found in meant.items():
            setattr(decorated, name, _Refused(f"{what} has no {name!r}: write {found}"))
        return decorated

    return decorate
