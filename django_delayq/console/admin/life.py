"""Draws the life of a message as a line of time, to scale: its waits, its runs, and the wait for its next step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ...core.states import State
from ...models import Message, Transition
from ...project import pulled
from . import charts
from .explanation import moment, span

# The kinds of parts, in the order of the legend: the colour class, and the name.
_KINDS = {
    "delayed": ("due", gettext_lazy("before its due time")),
    "waiting": ("3", gettext_lazy("due, waiting to start")),
    "run": ("0", gettext_lazy("running")),
    "failed": ("bad", gettext_lazy("failed")),
    "next": ("none", gettext_lazy("until it is due next")),
    "lease": ("none", gettext_lazy("until its lease ends")),
}


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a life; ``delivery`` is the number of a run."""

    kind: str
    start: datetime
    end: datetime
    delivery: int = 0
    note: str = ""

    @property
    def length(self) -> timedelta:
        """The length of the part; zero where two clocks differ."""
        return max(timedelta(0), self.end - self.start)

    @property
    def text(self) -> str:
        """The part in words, for a note under the mouse."""
        text = f"{_KINDS[self.kind][1]}: {span(self.length)}"
        if self.delivery:
            text = _("delivery %(number)s") % {"number": self.delivery} + f", {text}"
        return f"{text}, {self.note}" if self.note else text


def line(message: Message, moves: Sequence[Transition], now: datetime) -> SafeString:
    """Draw the life of a message from these transitions, its latest ones, in order."""
    parts = [part for part in _parts(message, moves, now) if part.length]
    if not parts:
        return SafeString("")
    start, lengths = parts[0].start, defaultdict[str, timedelta](timedelta)
    for part in parts:
        lengths[part.kind] += part.length
    whole = max(timedelta(microseconds=1), parts[-1].end - start)
    timespec = "milliseconds" if whole < timedelta(minutes=1) else "seconds"
    since, until = moment(start, timespec), moment(parts[-1].end, timespec)
    return charts.life(
        # A life of one day has the date once.
        _("From %(start)s to %(end)s, to scale") % {"start": since, "end": until.removeprefix(since[:11])},
        [(_KINDS[each.kind][0], (each.start - start) / whole, each.length / whole, each.text) for each in parts],
        [
            (fill, f"{name}: {span(lengths[kind])}")
            for kind, (fill, name) in _KINDS.items()
            if lengths[kind] > timedelta(milliseconds=0.5)
        ],
    )


def _parts(message: Message, moves: Sequence[Transition], now: datetime) -> Iterator[Part]:
    """Yield the parts of the life of a message, from its log."""
    # A request to cancel is a move, too, but it ends no run.
    steps = [move for move in moves if move.from_state != move.to_state or move.to_state != State.RUNNING]
    for move, after in zip(steps, (*steps[1:], None), strict=True):
        end = now if after is None else after.at
        if move.to_state == State.SCHEDULED:
            due = min(max(move.at, move.due_at), end)
            yield Part("delayed", move.at, due)
            yield Part("waiting", due, end)
        elif move.to_state == State.RUNNING:
            error = "" if after is None else after.error
            yield Part("failed" if error else "run", move.at, end, move.delivery, error)
    if message.state == State.SCHEDULED:
        yield Part("next", now, message.due_at)
    elif (until := message.lease_ends_at) is not None:
        yield Part("lease", now, until, note=after_lease(message))


def after_lease(message: Message) -> str:
    """Return in words what follows when the lease of a running message ends."""
    text = _("then delivery %(number)d, unless its worker renews it")
    if pulled.terms(message.queue) is not None:
        text = _("then delivery %(number)d, unless its program extends it")
    return text % {"number": message.deliveries + 1}
