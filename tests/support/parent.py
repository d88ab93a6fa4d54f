"""Ties processes that tests start to the process that started them. Settings import this before Django is set up."""

from __future__ import annotations

import ctypes
import signal
import sys


def end_with_parent() -> None:
    """Have this process killed when its parent ends, however that ends. Does nothing but on Linux."""
    if sys.platform == "linux":
        # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
