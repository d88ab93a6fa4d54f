"""The settings of ``tests.support.worker_settings``, in a process with the names of the test."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from tests.support.names import Names
from tests.support.worker_settings import *  # noqa: F403

socket.getaddrinfo = Names(Path(os.environ["DELAYQ_TEST_NAMES"]))
