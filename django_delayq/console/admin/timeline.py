"""The history of one message from its log: every transition as a step, every delivery as a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from django.utils.translation import gettext as _

from ...core.states import State
from ...models import Message, Transition
from ...project import conf
from .explanation import moment, span, state_label

# Steps that the page shows at most: the latest ones.
STEPS_SHOWN = 200


@dataclass(frozen=True, slots=True)
class TimelineStep:
    """A transition, or one that is to come, as the page shows it. Fields without a value are empty."""

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
class DeliveryRow:
    """A delivery as the page shows it: its worker, lateness, duration and outcome (empty while it runs)."""

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
    """Return the latest transitions of a message, in order."""
    return list(Transition.objects.using(message._state.db).filter(message=message).order_by("-number")[:STEPS_SHOWN])[
        ::-1
    ]


def steps(message: Message, moves: Sequence[Transition], now: datetime) -> list[TimelineStep]:
    """Return the transitions as steps, the due time only where it is new; then the steps that are expected next."""
    found = []
    previous: Transition | None = None
    for move in moves:
        found.append(
            TimelineStep(
                move.at,
                moment(move.at),
                state_label(move.from_state),
                state_label(move.to_state),
                move.delivery,
                span(move.at - previous.at) if previous else "",
                _waited(move, previous),
                "" if previous and previous.due_at == move.due_at else moment(move.due_at),
                move.actor,
                move.reason,
                move.error,
            )
        )
        previous = move
    return found + [step for step in _to_come(message, now) if step.at > now]


def _to_come(message: Message, now: datetime) -> list[TimelineStep]:
    def step(at: datetime, before: str, after: str) -> TimelineStep:
        return TimelineStep(at, moment(at), before, after, took=span(at - now), future=True)

    if message.state == State.SCHEDULED:
        coming = [step(message.due_at, state_label(message.state), _("due"))]
        if message.expires_at is not None:
            coming.append(step(message.expires_at, state_label(message.state), state_label(State.EXPIRED)))
        return coming
    if (until := message.lease_ends_at) is not None:
        return [step(until, state_label(State.RUNNING), _("end of the lease"))]
    settings = conf.get()
    kept = settings.DEAD_RETENTION if message.state == State.DEAD else settings.RETENTION
    if message.finished_at is None or kept is False:
        return []
    return [step(message.finished_at + timedelta(seconds=kept), state_label(message.state), _("purged"))]


def deliveries(moves: Sequence[Transition], now: datetime) -> list[DeliveryRow]:
    """Return the deliveries that began within these transitions, in order."""
    found = []
    for place, move in enumerate(moves):
        if move.from_state != State.SCHEDULED or move.to_state != State.RUNNING:
            continue
        end = next((m for m in moves[place + 1 :] if m.to_state != State.RUNNING), None)
        begun = DeliveryRow(
            move.delivery,
            move.at,
            moment(move.at),
            span(move.at - move.due_at),
            _waited(move, moves[place - 1] if place else None),
            span((end.at if end else now) - move.at),
            move.actor,
        )
        found.append(begun if end is None else _ended(begun, end))
    return found


def _ended(delivery: DeliveryRow, end: Transition) -> DeliveryRow:
    outcome = f"{state_label(end.to_state)}: {end.reason}" if end.reason else state_label(end.to_state)
    return replace(delivery, outcome=outcome, state=end.to_state, error=end.error, traceback=end.traceback)


def _waited(move: Transition, before: Transition | None) -> str:
    """Return how long a message was ready before its claim: since it was due, and scheduled by the move before."""
    if move.to_state != State.RUNNING:
        return ""
    ready_at = move.ready_at or move.due_at
    return span(move.at - (ready_at if before is None else max(ready_at, before.at)))
