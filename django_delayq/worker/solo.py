"""Which process of a worker runs a message alone."""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile


class Solo:
    """The right to run a message alone: of the processes forked after it was made, one has it at a time.

    A lock of POSIX: it belongs to a process, not to what that forks, and the kernel frees it when the process dies.
    """

    def __init__(self) -> None:
        if sys.platform == "linux":
            # Needs no folder that can be written to.
            self._file = os.memfd_create("delayq-solo")
        else:
            self._file, path = tempfile.mkstemp()
            os.unlink(path)

    def take(self) -> bool:
        """Whether this process has it now."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def release(self) -> None:
        """Leave it to another; nothing happens when this process has not got it."""
        fcntl.lockf(self._file, fcntl.LOCK_UN)
