"""A finding: what ``delayq_check`` and the console say about one part of the queue."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Level(IntEnum):
    """The severity of a finding."""

    OK = 0
    WARN = 1
    CRITICAL = 2


class Cause(IntEnum):
    """The cause of a critical finding; the value is the exit code. Of several findings the greatest cause decides."""

    PROBLEM = 3
    UNREACHABLE = 69
    MISCONFIGURED = 78


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer to one question of the diagnostics."""

    name: str
    level: Level
    detail: str
    cause: Cause = Cause.PROBLEM
