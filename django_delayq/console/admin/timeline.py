"""What happened to one message, step by step and attempt by attempt, from its log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from django.utils.translation import gettext as _

from ... import conf
from ...models import Message, Transition
from ...states import State
from .explanation import label, moment, span

# Steps shown; of a longer log the latest.
LONGEST = 200


@dataclass(frozen=True, slots=True)
class Step:
    """One row of the log, or what is to come, ready to be shown. Empty where there is nothing to say."""

    at: datetime
    moment: str
    before: str
    after: str
    delivery: int = 0
    took: str = ""
    waited: str = ""
    due: str = ""
    actor: str = ""
    reason: str = ""
    error: str = ""
    future: bool = False


@dataclass(frozen=True, slots=True)
class Attempt:
    """One delivery: who had it, how late, how long, and what it came to (empty while it runs)."""

    number: int
    at: datetime
    started: str
    late: str
    waited: str
    took: str
    worker: str
    outcome: str = ""
    state: str = ""
    error: str = ""
    traceback: str = ""


def log(message: Message) -> list[Transition]:
    """The latest moves, in order."""
    return list(Transition.objects.using(message._state.db).filter(message=message).order_by("-number")[:LONGEST])[::-1]


def steps(message: Message, moves: Sequence[Transition], now: datetime) -> list[Step]:
    """The moves as steps, the due time only where it is new; then what comes next."""
    found = []
    previous: Transition | None = None
    for move in moves:
        found.append(
            Step(
                move.at,
                moment(move.at),
                label(move.from_state),
                label(move.to_state),
                move.attempt,
                span(move.at - previous.at) if previous else "",
                _waited(move),
                "" if previous and previous.due_at == move.due_at else moment(move.due_at),
                move.actor,
                move.reason,
                move.error,
            )
        )
        previous = move
    return found + [step for step in _to_come(message, now) if step.at > now]


def _to_come(message: Message, now: datetime) -> list[Step]:
    def step(at: datetime, before: str, after: str) -> Step:
        return Step(at, moment(at), before, after, took=span(at - now), future=True)

    if message.state == State.SCHEDULED:
        coming = [step(message.due_at, label(State.SCHEDULED), _("due"))]
        if message.expires_at is not None:
            coming.append(step(message.expires_at, label(State.SCHEDULED), label(State.EXPIRED)))
        return coming
    if message.leased_until is not None:
        return [step(message.leased_until, label(State.RUNNING), _("end of the lease"))]
    settings = conf.get()
    kept = settings.DEAD_RETENTION if message.state == State.DEAD else settings.RETENTION
    if message.finished_at is None or kept is None:
        return []
    return [step(message.finished_at + timedelta(seconds=kept), label(message.state), _("purged"))]


def attempts(moves: Sequence[Transition], now: datetime) -> list[Attempt]:
    """The deliveries that began within these moves, in order."""
    found = []
    for place, move in enumerate(moves):
        if move.from_state != State.SCHEDULED or move.to_state != State.RUNNING:
            continue
        end = next((m for m in moves[place + 1 :] if m.to_state != State.RUNNING), None)
        begun = Attempt(
            move.attempt,
            move.at,
            moment(move.at),
            span(move.at - move.due_at),
            _waited(move),
            span((end.at if end else now) - move.at),
            move.actor,
        )
        found.append(begun if end is None else _ended(begun, end))
    return found


def _ended(attempt: Attempt, end: Transition) -> Attempt:
    outcome = f"{label(end.to_state)}: {end.reason}" if end.reason else label(end.to_state)
    return replace(attempt, outcome=outcome, state=end.to_state, error=end.error, traceback=end.traceback)


def _waited(move: Transition) -> str:
    if move.to_state != State.RUNNING or move.ready_at is None:
        return ""
    return span(move.at - move.ready_at)
