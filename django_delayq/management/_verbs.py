"""The verbs of ``delayq_act``: what the command says about each of ``actions.ACTIONS``, and the options it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from ..api import actions
from ..api.actions import Action, ToCome
from ..core.clock import NO_TIME, iso
from ..core.durations import brief
from ..core.verdicts import Verdict
from ..record.transitions import DueTimes


def _nothing(times: DueTimes, number: int, to_come: ToCome) -> str:
    return ""


class CommandVerb(NamedTuple):
    """An action as ``delayq_act`` offers it."""

    action: Action
    help: str
    # The lines for people, and those of --dry-run that differ. With --json the verdicts themselves are the keys.
    lines: Mapping[Verdict, str]
    would: Mapping[Verdict, str]
    # The reasons why a message cannot be changed, for the last line.
    refusals: str
    # Options besides those that every verb has.
    options: tuple[str, ...] = ()
    # Returns in words when this number of messages will be due, of which some have due times that are still to come.
    when: Callable[[DueTimes, int, ToCome], str] = _nothing
    # True: a due time that is still to come stays, unless the call gives one.
    keeps_due_times: bool = False


def _when_rescheduled(times: DueTimes, number: int, to_come: ToCome) -> str:
    if times.due_at is not None:
        when = f"due at {iso(times.due_at)}"
    elif times.delay is not None:
        when = f"due in {brief(times.delay.total_seconds())}"
    elif times.shift is not None and times.shift < NO_TIME:
        when = f"earlier by {brief(-times.shift.total_seconds())}, but not before now"
    else:
        when = f"later by {brief((times.shift or NO_TIME).total_seconds())}"
    return f"{when}, spread over {brief(times.spread.total_seconds())}" if times.spread else when


def _when_run(times: DueTimes, number: int, to_come: ToCome) -> str:
    return f"due over {brief(times.spread.total_seconds())} from now on" if times.spread else "due now"


def _when_requeued(times: DueTimes, number: int, to_come: ToCome) -> str:
    """Return in words how many messages will be due when."""
    later = min(to_come.number, number) if times.name_none else 0
    parts, start = [], ""
    if times.due_at is not None:
        start = f"at {iso(times.due_at)}"
    elif times.delay:
        start = f"in {brief(times.delay.total_seconds())}"
    if later:
        first, last = iso(to_come.first), iso(to_come.last)
        parts.append(f"{later:,} at their own due times, from {first} to {last}")
    if others := number - later:
        since = "then" if start else "now"
        over = f"over {brief(times.spread.total_seconds())} from {since} on" if times.spread else ""
        parts.append(f"{others:,} {' '.join(filter(None, (start, over))) or 'at once'}")
    return ", ".join(parts)


_NOT_FOUND = {Verdict.NOT_FOUND: "{} not found"}
_UNKNOWN = "an earlier delivery crashed and may have had its effect"

VERBS = {
    verb.action.name: verb
    for verb in (
        CommandVerb(
            actions.CANCEL,
            "Cancel live messages. Verdicts: cancelled (no delivery will start), requested (running: the handler can "
            "see the request, and no retry follows), outcome unknown (cancelled, but a delivery that crashed may have "
            "had its effect), too late (finished already), not found.",
            {
                Verdict.CANCELLED: "{} cancelled",
                Verdict.REQUESTED: "{} running, asked to stop",
                Verdict.OUTCOME_UNKNOWN: f"{{}} cancelled, but {_UNKNOWN}",
                Verdict.TOO_LATE: "{} not cancelled: finished already",
                **_NOT_FOUND,
            },
            {
                Verdict.CANCELLED: "{} would be cancelled",
                Verdict.REQUESTED: "{} running, would be asked to stop",
                Verdict.OUTCOME_UNKNOWN: f"{{}} would be cancelled, but {_UNKNOWN}",
            },
            "finished already, or not found",
        ),
        CommandVerb(
            actions.RESCHEDULE,
            "Give messages that wait another due time: --due-at, or --shift from the due time that each has. The time "
            "of expiry moves by as much. Verdicts: rescheduled, too late (running, or finished), not found.",
            {
                Verdict.RESCHEDULED: "{} rescheduled",
                Verdict.TOO_LATE: "{} not rescheduled: running, or finished already",
                **_NOT_FOUND,
            },
            {Verdict.RESCHEDULED: "{} would be rescheduled"},
            "running, finished already, or not found",
            ("due_at", "shift", "spread"),
            _when_rescheduled,
        ),
        CommandVerb(
            actions.RUN,
            "Make messages that wait due now: workers run them at once, except in paused queues and over a limit. (The "
            "worker itself is the command run_delayq.) The time of expiry moves by as much. Verdicts: rescheduled, too "
            "late (running, or finished), not found.",
            {
                Verdict.RESCHEDULED: "{} due now",
                Verdict.TOO_LATE: "{} not changed: running, or finished already",
                **_NOT_FOUND,
            },
            {Verdict.RESCHEDULED: "{} would be due now"},
            "running, finished already, or not found",
            ("spread",),
            _when_run,
        ),
        CommandVerb(
            actions.REQUEUE,
            "Schedule dead, expired and cancelled messages again; their attempts start anew. A message whose due time "
            "is still to come keeps it, and any other is due at once; with --due-at all are due then. Verdicts: "
            "requeued, too late (live, or consumed), key taken (another message holds the topic and key), not found.",
            {
                Verdict.REQUEUED: "{} requeued",
                Verdict.TOO_LATE: "{} not requeued: live, or consumed",
                Verdict.KEY_TAKEN: "{} not requeued: another message holds the topic and key",
                **_NOT_FOUND,
            },
            {Verdict.REQUEUED: "{} would be requeued"},
            "live, consumed, their key is taken, or not found",
            ("due_at", "spread", "finished"),
            _when_requeued,
            keeps_due_times=True,
        ),
        CommandVerb(
            actions.PURGE,
            "Delete finished messages, with their log: by id, or with --finished-before and other selectors, which "
            "leave out those that still hold their keys, and count nothing with --yes. The janitor of a worker prunes "
            "by itself what is older than DELAYQ['RETENTION']. Verdicts: purged, too late (live), referred to (by a "
            "row of another table), not found.",
            {
                Verdict.PURGED: "{} purged",
                Verdict.TOO_LATE: "{} not purged: live, or locked by another transaction",
                Verdict.REFERRED_TO: "{} not purged: rows of other tables refer to them",
                **_NOT_FOUND,
            },
            {Verdict.PURGED: "{} would be purged"},
            "live, locked, referred to by other tables, or not found",
            ("finished",),
        ),
    )
}
