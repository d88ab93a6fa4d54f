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

# (from, to) → the name of the move. A message that did not exist before comes from None.
MOVES: dict[tuple[State | None, State], str] = {
    (None, State.SCHEDULED): "schedule",
    (State.SCHEDULED, State.SCHEDULED): "reschedule",
    (State.SCHEDULED, State.RUNNING): "claim",
    (State.SCHEDULED, State.CANCELLED): "cancel",
    (State.SCHEDULED, State.EXPIRED): "expire",
    (State.SCHEDULED, State.DEAD): "given up before a delivery (restore with overdue=dead)",
    (State.SCHEDULED, State.CONSUMED): "late success of a delivery whose lease had run out",
    (State.RUNNING, State.CONSUMED): "success",
    (State.RUNNING, State.SCHEDULED): "retry, release, or lease run out",
    (State.RUNNING, State.DEAD): "given up",
    (State.RUNNING, State.CANCELLED): "cancel that was requested while it ran",
    (State.RUNNING, State.RUNNING): "cancel requested",
    (State.DEAD, State.SCHEDULED): "requeue",
    (State.EXPIRED, State.SCHEDULED): "requeue",
    (State.CANCELLED, State.SCHEDULED): "requeue",
}


def is_legal(before: State | None, after: State) -> bool:
    """Tell whether the state machine has this move."""
    return (before, after) in MOVES
