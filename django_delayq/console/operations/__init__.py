"""One verb on many messages, done by a worker in batches: it outlives the page, the web server and the worker."""

from __future__ import annotations

from .bulk import BulkAction, Scope
from .comparison import CheckWork
from .lifecycle import OPEN, fail, give_back, has_open, is_resumable, resume, run_step, start, stop, take
from .restores import RestoreWork
from .work import BATCH, WORKS, Step, Work, register

__all__ = [
    "BATCH",
    "OPEN",
    "WORKS",
    "BulkAction",
    "CheckWork",
    "RestoreWork",
    "Scope",
    "Step",
    "Work",
    "fail",
    "give_back",
    "has_open",
    "is_resumable",
    "register",
    "resume",
    "run_step",
    "start",
    "stop",
    "take",
]
