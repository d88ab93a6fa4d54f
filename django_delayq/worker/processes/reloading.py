"""``run_delayq --reload``: runs a worker under Django's reloader. Code that cannot be loaded does not end it."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from django.utils import autoreload

from .process_tuning import USUAL

logger = logging.getLogger("django_delayq")


def run(work: Callable[..., None], *arguments: Any) -> None:
    """Run ``work`` in a child process, and in another one whenever code changes. Ends with a child that ends by itself.

    The reloader takes a child that could not load the project for one that has ended. Nothing ends here for that: the
    next change may be the cure.
    """
    while True:
        try:
            autoreload.run_with_reloader(work, *arguments)
        except SystemExit as end:
            # A signal makes the code negative.
            has_failed = isinstance(end.code, int) and end.code > 0
            if not has_failed or os.environ.get(autoreload.DJANGO_AUTORELOAD_ENV) == "true":
                raise
            before = _code()
            logger.error("The worker has failed to start; it starts again when code changes")
            while _code() == before:
                time.sleep(USUAL.reload_interval)
        else:
            return


def _code() -> dict[Path, int]:
    """Return when each file of code was changed that is in a folder of a loaded module (ns)."""
    paths = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    changes = {}
    for folder in {Path(path).parent for path in paths if path}:
        for file in folder.glob("*.py"):
            try:
                changes[file] = file.stat().st_mtime_ns
            except FileNotFoundError:
                continue
    return changes
