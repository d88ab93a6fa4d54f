"""The states of a message and the moves between them: the whole state machine.

::

                     cancel ┌───────────► cancelled
                            │
     schedule ──► scheduled ┼── claim ──► running ── ok ─────────► consumed
                     ▲  ▲   │               │ │
                     │  │   └─ expires ─►expired └─ given up ────► dead
                     │  └──── retry (due = now + backoff) ──┘       │
                     └────────────── requeue ──────────────────────┘
"""

from __future__ import annotations

from django.db.models import TextChoices
from django.utils.translation import gettext_lazy as _


class State(TextChoices):
    """The state of a message."""

    SCHEDULED = "scheduled", _("scheduled")
    RUNNING = "running", _("running")
    CONSUMED = "consumed", _("consumed")
    DEAD = "dead", _("dead")
    CANCELLED = "cancelled", _("cancelled")
    EXPIRED = "expired", _("expired")


# The states of a message that is not finished.
LIVE = frozenset({State.SCHEDULED, State.RUNNING})
# The states of a finished message.
FINAL = frozenset(set(State) - LIVE)
# The states from which a message can be requeued.
REQUEUEABLE = frozenset({State.DEAD, State.EXPIRED, State.CANCELLED})

# (from, to) → the name of the move. A message that did not exist before comes from None. The comments are the table of
# docs/reference/states.rst: run ``python -m docs.tables`` after a change.
MOVES: dict[tuple[State | None, State], str] = {
    # It was scheduled.
    (None, State.SCHEDULED): "schedule",
    # It was rescheduled, moved, replaced, debounced or merged.
    (State.SCHEDULED, State.SCHEDULED): "reschedule",
    # A worker claimed it.
    (State.SCHEDULED, State.RUNNING): "claim",
    # It was cancelled, by itself or as overdue (``delayq_restore --overdue cancel``).
    (State.SCHEDULED, State.CANCELLED): "cancel",
    # It was not started within ``expires`` after its due time.
    (State.SCHEDULED, State.EXPIRED): "expire",
    # It was given up before a delivery: ``delayq_restore --overdue dead``.
    (State.SCHEDULED, State.DEAD): "given up before a delivery (restore with overdue=dead)",
    # A delivery whose lease had run out reported its success after all.
    (State.SCHEDULED, State.CONSUMED): "late success of a delivery whose lease had run out",
    # The handler returned, also after a cancel was requested.
    (State.RUNNING, State.CONSUMED): "success",
    # No cancel was requested, and the handler failed and will be tried again; or the delivery was released, or crashed.
    (State.RUNNING, State.SCHEDULED): "retry, release, or lease run out",
    # No cancel was requested, and the handler failed for the last time, or ``Reject`` was raised, or it crashed too
    # often.
    (State.RUNNING, State.DEAD): "given up",
    # A cancel was requested while it ran, and then it ended in any other way than by success: the handler stopped
    # (``raise_if_cancelled()``), failed or was rejected, or the delivery was released, or crashed. At REPEATABLE READ
    # and above a transactional handler fails by the request itself.
    (State.RUNNING, State.CANCELLED): "cancel that was requested while it ran",
    # A cancel was requested.
    (State.RUNNING, State.RUNNING): "cancel requested",
    # It was requeued.
    (State.DEAD, State.SCHEDULED): "requeue",
    # It was requeued.
    (State.EXPIRED, State.SCHEDULED): "requeue",
    # It was requeued.
    (State.CANCELLED, State.SCHEDULED): "requeue",
}


def is_legal(before: State | None, after: State) -> bool:
    """Tell whether the state machine has this move."""
    return (before, after) in MOVES
