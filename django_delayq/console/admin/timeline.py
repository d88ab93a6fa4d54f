"""The history of one message from its log: every transition as a step, every delivery as a row."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from types import SimpleNamespace

from django.utils.translation import gettext as _

from ...core.states import State
from ...models import Message, Transition
from ...project import conf
from .explanation import moment, span, state_label

# Steps that the page shows at most: the latest ones.
STEPS_SHOWN = 200


def log(message: Message) -> list[Transition]:
    """Return the latest transitions of a message, in order."""
    moves = Transition.objects.using(message._state.db).filter(message=message)
    return list(moves.order_by("-number")[:STEPS_SHOWN])[::-1]


def steps(message: Message, moves: Sequence[Transition], now: datetime) -> list[SimpleNamespace]:
    """Return the transitions as steps, the due time only where it is new; then the steps that are expected next."""
    found = [
        SimpleNamespace(
            at=move.at,
            moment=moment(move.at),
            before=state_label(move.from_state),
            after=state_label(move.to_state),
            delivery=move.delivery,
            took=span(move.at - previous.at) if previous else "",
            waited=_waited(move, previous),
            due="" if previous and previous.due_at == move.due_at else moment(move.due_at),
            actor=move.actor,
            reason=move.reason,
            error=move.error,
            future=False,
        )
        for previous, move in zip((None, *moves), moves, strict=False)
    ]
    return found + [step for step in _to_come(message, now) if step.at > now]


def _to_come(message: Message, now: datetime) -> list[SimpleNamespace]:
    def step(at: datetime, before: str, after: str) -> SimpleNamespace:
        texts = {"moment": moment(at), "before": before, "after": after, "took": span(at - now)}
        return SimpleNamespace(at=at, **texts, delivery=0, waited="", due="", future=True)

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
    held = message.key_for or 0 if message.next_id is None else 0
    return [step(message.finished_at + timedelta(seconds=max(kept, held)), state_label(message.state), _("purged"))]


def deliveries(moves: Sequence[Transition], now: datetime) -> list[SimpleNamespace]:
    """Return the deliveries that began within these transitions, in order. The outcome of one that runs is empty."""
    found = []
    for place, move in enumerate(moves):
        if move.from_state != State.SCHEDULED or move.to_state != State.RUNNING:
            continue
        end = next((m for m in moves[place + 1 :] if m.to_state != State.RUNNING), None)
        found.append(
            SimpleNamespace(
                number=move.delivery,
                at=move.at,
                started=moment(move.at),
                late=span(move.at - move.due_at),
                waited=_waited(move, moves[place - 1] if place else None),
                took=span((end.at if end else now) - move.at),
                worker=move.actor,
                outcome=_outcome(end, move.delivery) if end else "",
                error=end.error if end else "",
                traceback=end.traceback if end else "",
            )
        )
    return found


def _outcome(end: Transition, delivery: int) -> str:
    text = f"{state_label(end.to_state)}: {end.reason}" if end.reason else state_label(end.to_state)
    # An earlier delivery, which was taken for lost, may be the one that succeeded.
    return text if end.delivery == delivery else f"{text} (#{end.delivery})"


def _waited(move: Transition, before: Transition | None) -> str:
    """Return how long a message was ready before its claim: since it was due, and scheduled by the move before."""
    if move.to_state != State.RUNNING:
        return ""
    ready_at = move.ready_at or move.due_at
    return span(move.at - (ready_at if before is None else max(ready_at, before.at)))
