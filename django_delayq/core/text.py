"""Texts: how an error shows a bad value, and plain strings."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

# What a terminal obeys instead of showing it: control characters, and changes of the direction.
_OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def shown(value: Any) -> str:
    """Return a part of a bad value for an error message. The whole value may be a secret, or endless."""
    if isinstance(value, str):
        return ascii(value[:40]) + ("…" if len(value) > 40 else "")
    if isinstance(value, int | float):
        return ascii(value) if abs(value) < 1e18 else type(value).__name__
    return str(value) if isinstance(value, timedelta) else type(value).__name__


def plain(value: str) -> str:
    """Return a plain str: a subclass, such as a member of an enum, may print as something else."""
    return value if type(value) is str else str.__str__(value)


def visible(text: str) -> str:
    """Return a text that others wrote as a terminal may get it: with escapes for what that would obey."""
    return _OBEYED.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
