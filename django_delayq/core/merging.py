"""Joins the payload of a message that waits with that of a call that has its key: ``on_conflict="merge"``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .exceptions import InvalidMessage


def joined(old: Any, new: Any) -> Any:
    """Return both payloads as one: two lists appended, two objects by ``by_name``. None adds nothing.

    Raises ``InvalidMessage`` for a list and an object, and for what is neither.
    """
    if old is None or new is None:
        return new if old is None else old
    if isinstance(old, list) and isinstance(new, list):
        return [*old, *new]
    if isinstance(old, dict) and isinstance(new, dict):
        return by_name(old, new)
    raise InvalidMessage(
        f"a payload of type {type(new).__name__} cannot be merged into one of type {type(old).__name__}: "
        "two lists can, and two dicts"
    )


def by_name(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Join two objects: of a name in both, lists are appended, objects updated, and any other value is the new one."""
    return {**old, **{name: _of_name(old[name], value) if name in old else value for name, value in new.items()}}


def _of_name(old: Any, new: Any) -> Any:
    if isinstance(old, list) and isinstance(new, list):
        return [*old, *new]
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **new}
    return new
