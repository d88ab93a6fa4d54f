"""Fill Redis again from the record, while everything goes on."""

from __future__ import annotations

from .engine import Restore
from .horizon import begin, is_current, master, refuse_foreign
from .reading import any_scheduled, page, pages, queues, still_scheduled
from .selection import InvalidPosition, Overdue, Position, Report, Selection, Stage, Tally

__all__ = [
    "InvalidPosition",
    "Overdue",
    "Position",
    "Report",
    "Restore",
    "Selection",
    "Stage",
    "Tally",
    "any_scheduled",
    "begin",
    "is_current",
    "master",
    "page",
    "pages",
    "queues",
    "refuse_foreign",
    "still_scheduled",
]
