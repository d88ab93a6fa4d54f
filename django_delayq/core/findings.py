"""A finding: what ``delayq_check``, the pages of the console and health checks say about one part of the queue."""

from __future__ import annotations

from enum import IntEnum, auto
from typing import NamedTuple


class Level(IntEnum):
    """The severity of a finding. ``INFO`` is for a value that is neither good nor bad."""

    INFO = -1
    OK = auto()
    WARN = auto()
    CRITICAL = auto()


class Cause(IntEnum):
    """The cause of a critical finding; the value is the exit code. Of several findings the greatest cause decides."""

    PROBLEM = 3
    UNREACHABLE = 69
    MISCONFIGURED = 78


class Finding(NamedTuple):
    """The answer to one question: ``detail`` says what was found, and ``advice`` what follows, or what to do.

    *Now* in the console shows, at its top, the findings that have a ``link`` and are not ``Level.OK``.
    """

    name: str
    level: Level
    detail: str
    cause: Cause = Cause.PROBLEM
    advice: str = ""
    # The page of the console that shows more: a key of ``console/admin/needs.py:PAGES``.
    link: str = ""
    # The sentence at the top of *Now*, if ``text`` cannot be understood without ``name``.
    headline: str = ""

    @property
    def text(self) -> str:
        """The detail and the advice, in one line."""
        return f"{self.detail}; {self.advice}" if self.advice else self.detail

    @property
    def is_banner(self) -> bool:
        """Whether *Now* in the console shows it at its top."""
        return bool(self.link) and self.level != Level.OK
