"""Functions that stand for a callable argument that was not given."""

from __future__ import annotations


def nothing(*_given: object) -> None:
    """Do nothing."""


def never() -> bool:
    """Return False."""
    return False


def always() -> bool:
    """Return True."""
    return True
