"""A finding: what ``delayq_check``, the console and checks of health say about one part of the queue."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


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


class Finding(NamedTuple):
    """The answer to one question: ``detail`` says what was found, and ``advice`` what follows, or what to do."""

    name: str
    level: Level
    detail: str
    cause: Cause = Cause.PROBLEM
    advice: str = ""

    @property
    def text(self) -> str:
        """All that it says, in one line."""
        return f"{self.detail}; {self.advice}" if self.advice else self.detail
