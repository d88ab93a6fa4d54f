"""What a child process runs. A process that is spawned imports this module before Django is set up."""

from __future__ import annotations

import time
from ctypes import c_byte


def wait_for_a_signal(is_up: c_byte | None = None) -> None:
    """Say that the process is up, and wait until a signal ends it.

    In short sleeps: Python looks at a signal that comes just before a system call only after that call has ended.
    """
    if is_up is not None:
        is_up.value = 1
    while True:
        time.sleep(0.05)
