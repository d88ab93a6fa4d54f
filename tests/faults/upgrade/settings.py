"""The settings of all processes of both versions. The environment names the servers."""

from __future__ import annotations

import ctypes
import signal
import sys

from testproject.settings import *  # noqa: F403
from testproject.settings import INSTALLED_APPS

DEBUG = False
INSTALLED_APPS = [*INSTALLED_APPS, "tests.app", "tests.faults.upgrade"]

if sys.platform == "linux":
    # PR_SET_PDEATHSIG: no process survives the trial, however that ends.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
