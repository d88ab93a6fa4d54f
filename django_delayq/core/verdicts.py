"""The verdicts: the results that a cancel, reschedule, run now, requeue, move, give-up or purge has for one message."""

from __future__ import annotations

from enum import StrEnum


class Verdict(StrEnum):
    """The result of an action for one message. It is true at the moment at which the action commits.

    The comments are a table of ``docs/reference/api.rst``: run ``python -m docs.tables`` after a change.
    """

    # Cancelled. No delivery is running, none has crashed with an unknown result, and none will start.
    CANCELLED = "cancelled"
    # The message is running, or was claimed a moment ahead of its due time. A handler that goes on for more than a
    # second can see the request. No retry will follow.
    REQUESTED = "requested"
    # Cancelled. No delivery will start, but an earlier one crashed and may have had its effect.
    OUTCOME_UNKNOWN = "outcome unknown"
    # The due time was moved.
    RESCHEDULED = "rescheduled"
    # The message waits in the queue and with the priority that the call named.
    MOVED = "moved"
    # The message is scheduled again, and its attempts count anew.
    REQUEUED = "requeued"
    # The message is dead without a delivery (``delayq_restore --overdue dead``).
    GIVEN_UP = "given up"
    # The finished message and its log were deleted (the console's purge).
    PURGED = "purged"
    # Not purged: a row of another table refers to the message by a foreign key.
    REFERRED_TO = "referred to"
    # Nothing was done: ``answer.state`` says why.
    TOO_LATE = "too late"
    # Nothing was done: another message holds the topic and key (requeue).
    KEY_TAKEN = "key taken"
    # There is no such message; by key: no live one.
    NOT_FOUND = "not found"


# The verdicts that mean that the action was done: all but these.
DONE = frozenset(set(Verdict) - {Verdict.REFERRED_TO, Verdict.TOO_LATE, Verdict.KEY_TAKEN, Verdict.NOT_FOUND})
