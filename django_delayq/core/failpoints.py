"""Failpoints: places with names at which a test makes a process die, freeze, wait or fail.

They do nothing here: ``tests/support/failpoints.py`` has the names and what happens, and the settings of tests
install it.
"""

from __future__ import annotations

from collections.abc import Callable

# What the tests call at each place with its name.
hook: Callable[[str], None] | None = None


def reach(name: str) -> None:
    """Tell the hook, if there is one, that the place with this name is reached."""
    if hook is not None:
        hook(name)
