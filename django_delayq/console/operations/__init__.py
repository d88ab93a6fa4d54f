"""Operations: a bulk action, restore or check that a worker does in steps. It outlives page, web server and worker."""

from __future__ import annotations

from .bulk import MOST_MESSAGES, BulkAction, Scope
from .consistency_check import CheckWork
from .lifecycle import OPEN, fail, is_resumable, lease_next, newest, release, resume, run_step, start, stop
from .restore_work import RestoreWork
from .work import MESSAGES_PER_STEP, WORKS, OperationWork, Step, holder, register

__all__ = [
    "MESSAGES_PER_STEP",
    "MOST_MESSAGES",
    "OPEN",
    "WORKS",
    "BulkAction",
    "CheckWork",
    "OperationWork",
    "RestoreWork",
    "Scope",
    "Step",
    "fail",
    "holder",
    "is_resumable",
    "lease_next",
    "newest",
    "register",
    "release",
    "resume",
    "run_step",
    "start",
    "stop",
]
