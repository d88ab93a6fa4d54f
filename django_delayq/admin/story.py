"""The story of one message: why it is where it is, and every step it took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.utils import timezone
from django.utils.translation import gettext as _

from ..durations import brief
from ..models import Message, Transition, Worker
from ..states import State

# Steps shown; of a longer log the latest.
LONGEST = 200


def moment(at: datetime, timespec: str = "milliseconds") -> str:
    """A moment in the current time zone."""
    return timezone.localtime(at).replace(tzinfo=None).isoformat(sep=" ", timespec=timespec)


def span(length: timedelta) -> str:
    """A length of time in words; never negative, whatever two clocks say."""
    return brief(max(0.0, length.total_seconds()))


def label(state: str | None) -> str:
    """A state in words."""
    return str(State(state).label) if state else _("new")


@dataclass(frozen=True, slots=True)
class Step:
    """One row of the log, ready to be shown. Empty where there is nothing to say."""

    at: datetime
    moment: str
    before: str
    after: str
    delivery: int
    took: str
    waited: str
    due: str
    actor: str
    reason: str
    error: str
    traceback: str


def log(message: Message) -> list[Transition]:
    """The latest moves, in order."""
    return list(Transition.objects.using(message._state.db).filter(message=message).order_by("-number")[:LONGEST])[::-1]


def timeline(moves: Sequence[Transition]) -> list[Step]:
    """The moves as steps; the due time only where it is new."""
    steps = []
    previous: Transition | None = None
    for move in moves:
        is_claim = move.to_state == State.RUNNING and move.ready_at is not None
        steps.append(
            Step(
                move.at,
                moment(move.at),
                label(move.from_state),
                label(move.to_state),
                move.attempt,
                span(move.at - previous.at) if previous else "",
                span(move.at - move.ready_at) if is_claim and move.ready_at else "",
                "" if previous and previous.due_at == move.due_at else moment(move.due_at),
                move.actor,
                move.reason,
                move.error,
                move.traceback,
            )
        )
        previous = move
    return steps


def when(message: Message, now: datetime) -> str:
    """In a few words, when it runs or how late it is; for lists."""
    if message.state != State.SCHEDULED:
        return ""
    if message.due_at > now:
        return _("in %(span)s") % {"span": _unbroken(message.due_at - now)}
    return _("overdue by %(span)s") % {"span": _unbroken(now - message.due_at)}


def _unbroken(length: timedelta) -> str:
    return span(length).replace(" ", "\N{NO-BREAK SPACE}")


def why(message: Message, last: Transition | None, now: datetime) -> list[str]:
    """Sentences that say why the message is where it is."""
    if message.state == State.SCHEDULED:
        return _scheduled(message, now)
    if message.state == State.RUNNING:
        return _running(message, now)
    return [_finished(message, last)]


def _scheduled(message: Message, now: datetime) -> list[str]:
    facts = {
        "span": span(abs(message.due_at - now)),
        "queue": message.queue,
        "failed": message.attempts,
    }
    if message.expires_at is not None and message.expires_at <= now:
        said = [_("Not started in its time: it will not run, and is about to be marked as expired.")]
    elif message.due_at <= now:
        said = [_("Overdue by %(span)s: it waits for a free worker of the queue %(queue)s.") % facts]
        if not _is_served(message, now):
            said.append(_("No live worker serves the queue %(queue)s.") % facts)
    else:
        said = [_("Runs in %(span)s.") % facts]
    if message.attempts:
        said.append(_("Failed attempts so far: %(failed)d.") % facts)
    return said


def _is_served(message: Message, now: datetime) -> bool:
    alive = Worker.objects.using(message._state.db).filter(seen_at__gt=now - timedelta(seconds=Worker.ALIVE))
    return any(message.queue in queues for queues in alive.values_list("queues", flat=True))


def _running(message: Message, now: datetime) -> list[str]:
    assert message.leased_until is not None
    facts = {
        "worker": message.worker,
        "delivery": message.deliveries,
        "until": moment(message.leased_until),
        "span": span(now - message.leased_until),
    }
    if message.leased_until > now:
        said = [_("Running on %(worker)s (delivery %(delivery)d), whose lease lasts until %(until)s.") % facts]
    else:
        text = _("Taken by %(worker)s, but its lease ran out %(span)s ago: it will be given to another worker.")
        said = [text % facts]
    if message.cancel_requested:
        said.append(_("A cancel was requested: the handler can see it, and no retry follows."))
    return said


def _finished(message: Message, last: Transition | None) -> str:
    facts = {
        "at": moment(message.finished_at) if message.finished_at else "",
        "actor": last.actor if last else "",
        "reason": ((last.reason or last.error.strip().rpartition("\n")[2]) if last else "")[:300],
    }
    text = {
        State.CONSUMED: _("Done by %(actor)s at %(at)s."),
        State.DEAD: _("Given up by %(actor)s at %(at)s."),
        State.CANCELLED: _("Cancelled by %(actor)s at %(at)s."),
        State.EXPIRED: _("Expired at %(at)s: it was not started in its time."),
    }[State(message.state)]
    if facts["reason"] and message.state in (State.DEAD, State.CANCELLED):
        text = {
            State.DEAD: _("Given up by %(actor)s at %(at)s: “%(reason)s”"),
            State.CANCELLED: _("Cancelled by %(actor)s at %(at)s: “%(reason)s”"),
        }[State(message.state)]
    return text % facts
