"""A file of JSON lines that survives the death of its writer at any moment."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, Self


class Journal:
    """Appends one line per call, written through to the disk."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_DSYNC, 0o600)

    @classmethod
    def of(cls, who: str) -> Self:
        """Return the journal of this process in the folder of the torture."""
        return cls(Path(os.environ["TORTURE_DIR"], "journals", f"{who}-{os.getpid()}.jsonl"))

    def write(self, what: str, **facts: Any) -> None:
        """Note an event and its time (``at``, seconds since the epoch)."""
        line = json.dumps({"what": what, "at": time.time(), "pid": os.getpid(), **facts})
        os.write(self._file, line.encode() + b"\n")
