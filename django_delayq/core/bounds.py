"""The bounds of messages: what one may hold, and when it counts as overdue."""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple


class Lengths(NamedTuple):
    """The most characters of each text. Longer names and keys are refused; longer texts about a failure are cut.

    Most of them are lengths of columns, and change with a migration only.
    """

    topic: int = 100
    queue: int = 64
    key: int = 200
    # The name of a limit: "topic … key …" with the longest topic and the longest key, and some to spare.
    limit: int = 320
    # The rate of an override, such as "100/m".
    rate: int = 40
    # The process, user or command that a row of the log names.
    actor: int = 200
    # A reason, or an error.
    text: int = 4_000
    traceback: int = 16_000
    # The first line of an error without its numbers, ids and quoted text.
    kind: int = 200
    # The path by which Python imports the class of an exception.
    error_class: int = 200


LENGTHS = Lengths()
# The least and the greatest priority.
PRIORITIES = (-100, 100)
# A message that has not started this long after its due time counts as overdue, in statistics, checks and restores.
OVERDUE_AFTER = timedelta(seconds=5)
