"""The verdicts: the results that a cancel, reschedule, run now, requeue, give-up or purge has for one message."""

from __future__ import annotations

from enum import StrEnum


class Verdict(StrEnum):
    """The result of an action for one message. It is true at the moment at which the action commits."""

    # Cancelled. No delivery is running, none has crashed with an unknown result, and none will start.
    CANCELLED = "cancelled"
    # A delivery is running or is about to start. Its handler can see the request, and no retry follows.
    REQUESTED = "requested"
    # Cancelled, and no delivery will start; but an earlier delivery crashed and may have had its effect.
    OUTCOME_UNKNOWN = "outcome unknown"
    # The message is in a state to which the action does not apply.
    TOO_LATE = "too late"
    # There is no such message (or no live message with this topic and key).
    NOT_FOUND = "not found"
    # The message has a new due time.
    RESCHEDULED = "rescheduled"
    # The finished message is scheduled again.
    REQUEUED = "requeued"
    # Not requeued: another message holds the topic and key.
    KEY_TAKEN = "key taken"
    # A restore made the overdue message dead before a delivery.
    GIVEN_UP = "given up"
    # The finished message and its log were deleted.
    PURGED = "purged"
    # Not purged: a row of another table refers to the message by a foreign key.
    REFERRED_TO = "referred to"


# The verdicts that mean that the action was done.
DONE = frozenset(
    {
        Verdict.CANCELLED,
        Verdict.REQUESTED,
        Verdict.OUTCOME_UNKNOWN,
        Verdict.RESCHEDULED,
        Verdict.REQUEUED,
        Verdict.GIVEN_UP,
        Verdict.PURGED,
    }
)
