"""Fills Redis again from the record while producers and workers go on."""

from __future__ import annotations

from .engine import Restore
from .filling import LOADER_LEASE, Batch, Load, fill
from .horizon import ensure_horizon, is_current, is_too_far, refuse_foreign, writable_server
from .reading import any_scheduled, page, pages, queues, still_scheduled
from .selection import InvalidPosition, Overdue, Position, Report, Selection, Stage, Tally
from .skew import SKEW_WARNING, describe_skew, measure_skew

__all__ = [
    "LOADER_LEASE",
    "SKEW_WARNING",
    "Batch",
    "InvalidPosition",
    "Load",
    "Overdue",
    "Position",
    "Report",
    "Restore",
    "Selection",
    "Stage",
    "Tally",
    "any_scheduled",
    "describe_skew",
    "ensure_horizon",
    "fill",
    "is_current",
    "is_too_far",
    "measure_skew",
    "page",
    "pages",
    "queues",
    "refuse_foreign",
    "still_scheduled",
    "writable_server",
]
