"""Loads the public names of a package when they are first used."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

# The module of Python that asks a package for a name in ``from … import``.
_IMPORTING = ("importlib._bootstrap", "_frozen_importlib")


def at_first_use(
    package: str, home: Mapping[str, str], meant: Mapping[str, str] = MappingProxyType({})
) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package that loads its public names at first use, each from its module ``home``.

    A package that loads them at once could not be imported before Django is set up. ``meant`` has names that somebody
    looks for there, and what to write instead.
    """

    def load(name: str) -> Any:
        module = home.get(name)
        if module is None:
            frame = inspect.currentframe() if name in meant else None
            asking = frame.f_back.f_globals.get("__name__") if frame is not None and frame.f_back is not None else None
            hint = f": write {meant[name]}" if name in meant else ""
            # ``from … import`` drops the text of an ``AttributeError``.
            error = ImportError if asking in _IMPORTING else AttributeError
            raise error(f"module {package!r} has no attribute {name!r}{hint}")
        value = getattr(import_module(f".{module}", sys.modules[package].__package__), name)
        # The next use finds the name without this function.
        setattr(sys.modules[package], name, value)
        return value

    return load
