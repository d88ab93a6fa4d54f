"""Tells which of the errors in a row are worth a line of the log: the first one, and one that takes its place."""

from __future__ import annotations

import time

from .outcomes import error_kind


class Outage:
    """An outage ends with ``end``. Until then errors of one class are alike if their texts differ only in numbers."""

    def __init__(self, told_again_after: float = 60.0) -> None:
        """Of errors that take turns, each is news again after ``told_again_after`` seconds."""
        self._told_again_after = told_again_after
        # The kinds of error that were told, and when (monotonic). The last one lasts, as far as the log knows.
        self._told: dict[str, float] = {}

    def is_news(self, error: object) -> bool:
        """Take note of an error, or of its text, and return whether it is to be logged."""
        kind = f"{type(error).__name__}: {error_kind(' '.join(str(error).split()))}"
        now, told = time.monotonic(), self._told.get(kind)
        if told is not None and (kind == next(reversed(self._told)) or now - told < self._told_again_after):
            return False
        # The newest is the last one.
        self._told.pop(kind, None)
        self._told[kind] = now
        return True

    def end(self) -> bool:
        """Take note that all is well, and return whether there was an outage."""
        lasted, self._told = bool(self._told), {}
        return lasted
