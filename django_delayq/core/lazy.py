"""Loads the public names of a package when they are first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def at_first_use(package: str, home: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package that loads its public names at first use, each from its module ``home``.

    A package that loads them at once could not be imported before Django is set up.
    """

    def load(name: str) -> Any:
        module = home.get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f".{module}", sys.modules[package].__package__), name)
        # The next use finds the name without this function.
        setattr(sys.modules[package], name, value)
        return value

    return load
