"""A lock between the processes of a worker that none of them can take into its grave."""

from __future__ import annotations

import fcntl
import os
import tempfile
import weakref


class ProcessLock:
    """Of the processes forked after it was made, one has it at a time.

    A lock of POSIX: it belongs to a process, not to what that forks, and the kernel frees it when the process dies. It
    says nothing about the threads of one process.
    """

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            # Needs no folder that can be written to. Some builds of Python have it not.
            self._file = os.memfd_create("delayq")
        else:
            self._file, path = tempfile.mkstemp(prefix="delayq")
            os.unlink(path)
        weakref.finalize(self, os.close, self._file)

    def acquire(self, *, wait: bool = True) -> bool:
        """Whether this process has it now."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def release(self) -> None:
        """Leave it to another; nothing happens when this process has not got it."""
        fcntl.lockf(self._file, fcntl.LOCK_UN)
