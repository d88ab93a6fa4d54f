"""The roles of a worker process, and its name."""

from __future__ import annotations

import os
import secrets

from ... import extensions
from ...core import actors
from ...core.worker_options import Options

# The roles that a worker has by itself; extensions add theirs.
ROLES = ("loader", "sweeper", "mover", "consumer", "recorder", "reaper", "janitor")


def all_roles() -> tuple[str, ...]:
    """Return the names that ``--roles`` takes."""
    return (*ROLES, *extensions.roles())


def worker_name(options: Options) -> str:
    """Return a name that only this run of this process has: a pid that is used again must not inherit claims."""
    base = options.name or actors.host()
    return f"{base}/{os.getpid()}/{secrets.token_hex(3)}"
