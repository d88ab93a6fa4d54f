"""One verb on many messages, done by a worker in batches: it outlives the page, the web server and the worker."""

from __future__ import annotations

from .drift import CheckWork
from .restore import Journal, RestoreWork
from .steer import Scope, Steer
from .steps import OPEN, fail, give_back, has_open, is_resumable, resume, run_step, start, stop, take
from .work import BATCH, WORKS, Step, Work, register

__all__ = [
    "BATCH",
    "OPEN",
    "WORKS",
    "CheckWork",
    "Journal",
    "RestoreWork",
    "Scope",
    "Steer",
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
