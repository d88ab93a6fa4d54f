"""Fills Redis again from the record while producers and workers go on."""

from __future__ import annotations

from ..record.sql.rows import BEGINNING
from .engine import Restore
from .filling import LOADER_LEASE, Load, fill
from .horizon import ensure_horizon, is_current, is_too_far, refuse_foreign, writable_server
from .reading import Batch, in_turn, merged, queues, still_scheduled
from .selection import Overdue, Position, Report, Selection, Stage, Tally

__all__ = [
    "BEGINNING",
    "LOADER_LEASE",
    "Batch",
    "Load",
    "Overdue",
    "Position",
    "Report",
    "Restore",
    "Selection",
    "Stage",
    "Tally",
    "ensure_horizon",
    "fill",
    "in_turn",
    "is_current",
    "is_too_far",
    "merged",
    "queues",
    "refuse_foreign",
    "still_scheduled",
    "writable_server",
]
