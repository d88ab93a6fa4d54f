"""The verbs of operators: what people may do to messages and queues.

The table has the states and the permission of each verb, the options of a call, and what ``delayq_act`` says of each
verdict. Models, API, commands, operations, pages and audit loop over it. ``api/actions.py`` adds the functions, and the
console the words of its pages, whose translations are in its own catalogue.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .states import FINAL, LIVE, REQUEUEABLE, State
from .verdicts import Verdict


class Line(NamedTuple):
    """What a command says of the messages with one verdict; ``{}`` is their number."""

    text: str
    # The line of --dry-run, where it differs.
    would: str = ""


class Verb(NamedTuple):
    """Something that an operator may do. ``permits`` is the name of its own permission where Django lists it."""

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
    # What a call may give: due_at, shift, spread, expires, or the queue; finished selects by the time of the end.
    options: frozenset[str] = frozenset()
    # True: a due time that is still to come stays, unless the call gives one.
    keeps_due_times: bool = False
    # True: nobody can undo it, so that the console always asks for the number of messages.
    is_final: bool = False
    # The help of delayq_act.
    help: str = ""
    # The lines of delayq_act for people, in their order. With --json the verdicts themselves are the keys.
    lines: Mapping[Verdict, Line] = {}
    # Why a message cannot be changed, for the last line of delayq_act.
    refusals: str = ""

    @property
    def codename(self) -> str:
        """The permission, as the model has it."""
        return f"{self.like or self.name}_{self.model}"

    @property
    def permission(self) -> str:
        """The permission, as users have it."""
        return f"delayq.{self.codename}"


SCHEDULED = frozenset({State.SCHEDULED})

_NOT_FOUND = {Verdict.NOT_FOUND: Line("{} not found")}
_CRASHED = "an earlier delivery crashed and may have had its effect"

_ACTIONS = (
    Verb(
        "cancel",
        "Can cancel messages",
        LIVE,
        help="Cancel live messages. Verdicts: cancelled (no delivery will start), requested (running: the handler can "
        "see the request, and no retry follows), outcome unknown (cancelled, but a delivery that crashed may have "
        "had its effect), too late (finished already), not found.",
        lines={
            Verdict.CANCELLED: Line("{} cancelled", "{} would be cancelled"),
            Verdict.REQUESTED: Line("{} running, asked to stop", "{} running, would be asked to stop"),
            Verdict.OUTCOME_UNKNOWN: Line(
                f"{{}} cancelled, but {_CRASHED}", f"{{}} would be cancelled, but {_CRASHED}"
            ),
            Verdict.TOO_LATE: Line("{} not cancelled: finished already"),
            **_NOT_FOUND,
        },
        refusals="finished already, or not found",
    ),
    Verb(
        "reschedule",
        "Can reschedule messages",
        SCHEDULED,
        options=frozenset({"due_at", "shift", "spread"}),
        help="Give messages that wait another due time: --due-at, or --shift from the due time that each has. The time "
        "of expiry moves by as much. Verdicts: rescheduled, too late (running, or finished), not found.",
        lines={
            Verdict.RESCHEDULED: Line("{} rescheduled", "{} would be rescheduled"),
            Verdict.TOO_LATE: Line("{} not rescheduled: running, or finished already"),
            **_NOT_FOUND,
        },
        refusals="running, finished already, or not found",
    ),
    Verb(
        "run",
        "Can run messages now",
        SCHEDULED,
        options=frozenset({"spread"}),
        help="Make messages that wait due now: workers run them at once, except in paused queues and over a limit. "
        "(The worker itself is the command run_delayq.) The time of expiry moves by as much. Verdicts: rescheduled, "
        "too late (running, or finished), not found.",
        lines={
            Verdict.RESCHEDULED: Line("{} due now", "{} would be due now"),
            Verdict.TOO_LATE: Line("{} not changed: running, or finished already"),
            **_NOT_FOUND,
        },
        refusals="running, finished already, or not found",
    ),
    Verb(
        "move",
        "",
        SCHEDULED,
        like="reschedule",
        options=frozenset({"queue"}),
        help="Move messages that wait to another queue (--to), to another priority (--priority), or to both. They "
        "keep their due times, and begin under the limits and pauses of the new queue. Verdicts: moved (also when a "
        "message is there already), too late (running, or finished), not found.",
        lines={
            Verdict.MOVED: Line("{} moved", "{} would be moved"),
            Verdict.TOO_LATE: Line("{} not moved: running, or finished already"),
            **_NOT_FOUND,
        },
        refusals="running, finished already, or not found",
    ),
    Verb(
        "requeue",
        "Can requeue dead, expired and cancelled messages",
        REQUEUEABLE,
        options=frozenset({"due_at", "spread", "finished", "expires"}),
        keeps_due_times=True,
        help="Schedule dead, expired and cancelled messages again; their attempts start anew. A message whose due time "
        "is still to come keeps it, and any other is due at once; with --due-at all are due then. The time to live of "
        "each stays as long as it was, unless --expires gives another. Verdicts: "
        "requeued, too late (live, or consumed), key taken (another message holds the topic and key), not found.",
        lines={
            Verdict.REQUEUED: Line("{} requeued", "{} would be requeued"),
            Verdict.TOO_LATE: Line("{} not requeued: live, or consumed"),
            Verdict.KEY_TAKEN: Line("{} not requeued: another message holds the topic and key"),
            **_NOT_FOUND,
        },
        refusals="live, consumed, their key is taken, or not found",
    ),
    Verb(
        "purge",
        "Can purge finished messages",
        FINAL,
        options=frozenset({"finished"}),
        is_final=True,
        help="Delete finished messages, with their log: by id, or with --finished-before or --oldest and other "
        "selectors, which leave out those that still hold their keys, and count nothing with --yes. The janitor of a "
        "worker prunes by itself what is older than DELAYQ['RETENTION']. Verdicts: purged, too late (live), referred "
        "to (by a row of another table), not found.",
        lines={
            Verdict.PURGED: Line("{} purged", "{} would be purged"),
            Verdict.TOO_LATE: Line("{} not purged: live, or locked by another transaction"),
            Verdict.REFERRED_TO: Line("{} not purged: rows of other tables refer to them"),
            **_NOT_FOUND,
        },
        refusals="live, locked, referred to by other tables, or not found",
    ),
)

VERBS = {
    verb.name: verb
    for verb in (
        *_ACTIONS,
        Verb("repeat", "", FINAL, like="requeue"),
        Verb(
            "rehearse",
            "",
            frozenset(State) - {State.RUNNING},
            changes=False,
            like="run",
            help="Run the transactional handler of a message in a transaction, and roll that back: print the outcome, "
            "the statements and the traceback. Nothing is written, and Redis is told nothing; what the handler does "
            "outside of its database stays, such as mails. Handlers that are not transactional, and messages that "
            "run, are refused. Exit code 1: the handler did not succeed.",
        ),
        Verb("bulk", "Can act on everything that a filter finds"),
        Verb("export", "Can export messages", changes=False),
        Verb("reveal", "Can see payloads unmasked", changes=False),
        Verb("restore", "Can restore Redis from the record"),
        Verb("pause", "Can pause and resume queues", model="queue"),
        Verb("resume", "Can pause and resume queues", model="queue", like="pause"),
        Verb("override", "Can override and reset limits", model="limit"),
        Verb("reset", "Can override and reset limits", model="limit", like="override"),
    )
}


def permissions(model: str) -> list[tuple[str, Any]]:
    """Return the permissions of a model, for its ``Meta``."""
    return [(verb.codename, verb.permits) for verb in VERBS.values() if verb.model == model and not verb.like]
