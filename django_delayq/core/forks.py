"""Calls functions in the processes that are forked from this one. Windows forks none."""

from __future__ import annotations

import os
from collections.abc import Callable


def after_fork(function: Callable[[], object]) -> None:
    """Have each process that is forked from this one call a function before anything else."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)
