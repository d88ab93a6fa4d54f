"""The settings of a worker that a test starts: those of the tests, with the test's DELAYQ. The worker ends with it."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys

from tests.settings import *  # noqa: F403

DELAYQ = json.loads(os.environ["DELAYQ_TEST_SETTINGS"])

if sys.platform == "linux":
    # PR_SET_PDEATHSIG: the worker ends with the test process, however that ends, and its children end with it.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
