"""Failpoints: named lines of code at which a test makes a process die, freeze, wait or fail.

They do nothing here: ``tests/support/failpoints.py`` has the names and what happens at each.
"""

from __future__ import annotations

from . import in_tests


def reach(name: str) -> None:
    """Tell the test, if one listens, that the process has reached the place with this name."""
    if in_tests.failpoint is not None:
        in_tests.failpoint(name)
