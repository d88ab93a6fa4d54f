"""The verbs of operators: what people may do to messages and queues, and the permission that each needs.

The permissions of the models, the actions of API and commands, the operations and the pages of the console all come
from this table.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .states import FINAL, LIVE, REQUEUEABLE, State


class Verb(NamedTuple):
    """Something that an operator may do. ``permits`` is the name of its permission where Django lists it."""

    # The word in commands, addresses, operations and the audit.
    name: str
    permits: str
    # An action on messages leaves those in other states alone.
    states: frozenset[State] = frozenset()
    # The model that the permission belongs to.
    model: str = "message"
    # False for what only looks: a console that is read-only offers it all the same.
    changes: bool = True
    # The verb whose permission is needed, where it is not one of its own.
    like: str = ""

    @property
    def codename(self) -> str:
        """The permission, as the model has it."""
        return f"{self.like or self.name}_{self.model}"

    @property
    def permission(self) -> str:
        """The permission, as users have it."""
        return f"delayq.{self.codename}"


SCHEDULED = frozenset({State.SCHEDULED})

VERBS = {
    verb.name: verb
    for verb in (
        Verb("cancel", "Can cancel messages", LIVE),
        Verb("reschedule", "Can reschedule messages", SCHEDULED),
        Verb("run", "Can run messages now", SCHEDULED),
        Verb("requeue", "Can requeue dead, expired and cancelled messages", REQUEUEABLE),
        Verb("purge", "Can purge finished messages", FINAL),
        Verb("bulk", "Can act on everything that a filter finds"),
        Verb("export", "Can export messages", changes=False),
        Verb("reveal", "Can see payloads unmasked", changes=False),
        Verb("restore", "Can restore Redis from the record"),
        Verb("pause", "Can pause and resume queues", model="queue"),
        Verb("resume", "Can pause and resume queues", model="queue", like="pause"),
    )
}


def permissions(model: str) -> list[tuple[str, Any]]:
    """Return the permissions of a model, for its ``Meta``."""
    return [(verb.codename, verb.permits) for verb in VERBS.values() if verb.model == model and not verb.like]
