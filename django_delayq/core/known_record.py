"""What a process knows of a record without asking: the time by its clock, and its identity.

The scripts in Redis get their time from here. Redis carries the identity too, so that a wrong Redis is refused.
"""

from __future__ import annotations

import time
import uuid
from datetime import datetime
from functools import cache

from django.db import connections

from . import in_tests
from .durations import brief

# By alias: the name of the database behind it, which a test runner changes, and its identity.
_known: dict[str, tuple[str, str]] = {}
# The aliases whose identity the next statement is to read again.
_doubted: set[str] = set()

# A host's clock that differs from the record's by less counts as right. Seconds.
CLOCK_OFF = 10.0


class RecordClock:
    """Follows this host's clock until an answer of the record proves it wrong. Any thread may use it.

    An answer proves that the record's clock showed a moment between the question and the answer. A clock that agrees
    with that is left as it is, so it does not jitter by the round trip. When somebody sets the host's clock, nothing
    changes. No attribute belongs to one thread, and none has a lock: each is replaced as a whole. Of two threads that
    learn at once the later one wins, and both have learned from true answers.
    """

    def __init__(self, sure_for: float = 30.0) -> None:
        """``sure_for``: an answer that is older than this (seconds) is asked for again."""
        self._sure_for = sure_for
        # By how many seconds the record's clock is ahead of the monotonic one.
        self._ahead = time.time() - time.monotonic()
        # When the record answered the last time (monotonic, seconds).
        self._learned = float("-inf")

    def learn(self, asked: float, shown: datetime) -> None:
        """Learn from an answer that has just come to a question sent at ``asked`` (monotonic): the record's time."""
        if in_tests.clock is not None:
            return
        answered, seconds = time.monotonic(), shown.timestamp()
        self._ahead = min(max(self._ahead, seconds - answered), seconds - asked)
        self._learned = answered

    def seconds(self) -> float:
        """Return the time by the record's clock, in seconds since 1970."""
        return time.monotonic() + self._ahead

    @property
    def is_sure(self) -> bool:
        """True when the record has answered lately."""
        return time.monotonic() - self._learned < self._sure_for


def clocks_differ(using: str) -> str:
    """Say by how much this host's clock differs from the record's, as its last answer showed; empty if by little."""
    ahead = time.time() - record_clock(using).seconds()
    if abs(ahead) < CLOCK_OFF:
        return ""
    return f"this host's clock is {brief(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} the database's"


@cache
def record_clock(using: str) -> RecordClock:
    """Return this process's knowledge of the clock of a database alias."""
    return RecordClock()


def known_identity(using: str) -> str:
    """Return the identity of the database ``using`` as this process knows it, without a query.

    "" while it is unknown, or to be read again.
    """
    return "" if using in _doubted else last_identity(using)


def last_identity(using: str) -> str:
    """Return the identity that was read last, also while it is to be read again: mostly it is still the same."""
    name, value = _known.get(using, ("", ""))
    return value if value and name == str(connections.settings[using]["NAME"]) else ""


def learn_identity(using: str, value: uuid.UUID | None) -> None:
    """Remember the identity that a statement has read. None: the database has none yet."""
    if value is not None:
        _known[using] = (str(connections.settings[using]["NAME"]), str(value))
    elif using in _doubted:
        _known.pop(using, None)
    _doubted.discard(using)


def doubt_identity(using: str) -> None:
    """Have the identity read again: Redis carries another one, and somebody may have emptied the table."""
    _doubted.add(using)
