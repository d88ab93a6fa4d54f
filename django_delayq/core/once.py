"""What a process has logged already, and logs once."""

from __future__ import annotations

# By subject and name, such as ("returns a value", "orders.close").
logged: set[tuple[str, str]] = set()


def is_first(subject: str, name: str) -> bool:
    """Return True for the first call with these two in this process."""
    if (subject, name) in logged:
        return False
    logged.add((subject, name))
    return True
