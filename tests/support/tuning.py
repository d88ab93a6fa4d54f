"""Other numbers for the time of a test, for the rooms whose numbers stand in one object."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def tunable(numbers: Any) -> Iterator[Callable[..., None]]:
    """Return what sets some of the numbers, by name; they are as before at the end."""
    before = {name: getattr(numbers, name) for name in numbers.__slots__}

    def give(**others: Any) -> None:
        assert others.keys() <= before.keys()
        for name, number in others.items():
            setattr(numbers, name, number)

    try:
        yield give
    finally:
        give(**before)
