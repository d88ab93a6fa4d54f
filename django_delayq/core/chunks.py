"""Divides what is too much for one statement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def chunks(all_of_them: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Return a sequence in parts of this size; the last one may be shorter."""
    return (all_of_them[start : start + size] for start in range(0, len(all_of_them), size))
