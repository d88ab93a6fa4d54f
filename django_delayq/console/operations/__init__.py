"""Operations: a bulk action, restore or check that a worker does in steps. It outlives page, web server and worker."""

from __future__ import annotations

# Each of these adds its kind of work to ``WORKS``.
from . import consistency_check, restore_work  # noqa: F401
from .bulk import MOST_MESSAGES, BulkAction, Scope
from .lifecycle import OPEN, fail, is_resumable, lease_next, newest, release, resume, run_step, start, stop
from .work import MESSAGES_PER_STEP, WORKS, OperationWork, Step, holder

__all__ = [
    "MESSAGES_PER_STEP",
    "MOST_MESSAGES",
    "OPEN",
    "WORKS",
    "BulkAction",
    "OperationWork",
    "Scope",
    "Step",
    "fail",
    "holder",
    "is_resumable",
    "lease_next",
    "newest",
    "release",
    "resume",
    "run_step",
    "start",
    "stop",
]
