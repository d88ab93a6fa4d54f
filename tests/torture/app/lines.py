"""Lines that survive any death: each is written through to the disk, in a file of its process."""

from __future__ import annotations

import os
import time
from pathlib import Path

_files: dict[int, int] = {}


def note(what: str, message_id: int, delivery: int) -> None:
    """Note what this process does with a delivery, and when."""
    pid = os.getpid()
    if pid not in _files:
        path = Path(os.environ["TORTURE_DIR"], "lines", f"{pid}.log")
        _files[pid] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_DSYNC, 0o600)
    os.write(_files[pid], f"{what} {message_id} {delivery} {pid} {time.time():.6f}\n".encode())
