"""The header in which a message keeps what only the queue notes: what follows its end, and what it repeats."""

from __future__ import annotations

from typing import Any

OWN_HEADER = "delayq"


def own_part(headers: Any) -> dict[str, Any]:
    """Return what the queue noted in the headers of a message, which may hold anything: SQL writes headers too."""
    own = headers.get(OWN_HEADER) if isinstance(headers, dict) else None
    return own if isinstance(own, dict) else {}


def without_own_part(headers: Any) -> dict[str, Any]:
    """Return the headers of the project alone."""
    return {name: value for name, value in headers.items() if name != OWN_HEADER} if isinstance(headers, dict) else {}
