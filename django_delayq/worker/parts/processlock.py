"""A lock between the processes of a worker that is free again when its holder dies."""

from __future__ import annotations

import os
import tempfile
import weakref


class ProcessLock:
    """Lets one process at a time hold it. It serves the processes that were forked after it was made.

    It is a lock of POSIX: it belongs to a process, not to the children of that process, and the kernel frees it when
    the process dies. It does not exclude the threads of one process from each other.
    """

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            # This needs no folder that can be written to. Some builds of Python lack it.
            self._file = os.memfd_create("delayq")
        else:
            self._file, path = tempfile.mkstemp(prefix="delayq")
            os.unlink(path)
        weakref.finalize(self, os.close, self._file)

    def acquire(self, *, wait: bool = True) -> bool:
        """Take the lock. Return whether this process has it now."""
        # Imported here: where it is missing, run_delayq is to say so in a sentence.
        import fcntl

        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def release(self) -> None:
        """Free the lock. Does nothing when this process does not have it."""
        import fcntl

        fcntl.lockf(self._file, fcntl.LOCK_UN)
