"""Why a message is where it is, in sentences; and how times are written."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from django.utils import timezone
from django.utils.translation import gettext as _

from ...durations import brief
from ...inspector.consistency import Mismatch
from ...models import Message, Queue, Transition, Worker
from ...states import State
from ..whereabouts import Whereabouts


def moment(at: datetime, timespec: str = "milliseconds") -> str:
    """A moment in the current time zone."""
    return timezone.localtime(at).replace(tzinfo=None).isoformat(sep=" ", timespec=timespec)


def universal(at: datetime) -> str:
    """A moment in UTC, to the millisecond."""
    return f"{at.astimezone(UTC).replace(tzinfo=None).isoformat(sep=' ', timespec='milliseconds')} UTC"


def span(length: timedelta) -> str:
    """A length of time in words; never negative, whatever two clocks say."""
    return brief(max(0.0, length.total_seconds()))


def label(state: str | None) -> str:
    """A state in words."""
    return str(State(state).label) if state else _("new")


def when(message: Message, now: datetime) -> str:
    """In a few words, when it runs, how late it is, or when it ended; for lists."""
    if message.finished_at is not None:
        return _("ended %(span)s ago") % {"span": _unbroken(now - message.finished_at)}
    if message.state != State.SCHEDULED:
        return ""
    if message.due_at > now:
        return _("in %(span)s") % {"span": _unbroken(message.due_at - now)}
    return _("overdue by %(span)s") % {"span": _unbroken(now - message.due_at)}


def _unbroken(length: timedelta) -> str:
    return span(length).replace(" ", "\N{NO-BREAK SPACE}")


def why(message: Message, last: Transition | None, now: datetime, where: Whereabouts | None = None) -> list[str]:
    """Sentences that say why the message is where it is."""
    if message.state == State.SCHEDULED:
        return _scheduled(message, now, where)
    if message.state == State.RUNNING:
        return _running(message, now)
    return [_finished(message, last)]


def _scheduled(message: Message, now: datetime, where: Whereabouts | None) -> list[str]:
    facts = {"span": span(abs(message.due_at - now)), "failed": message.attempts}
    if message.expires_at is not None and message.expires_at <= now:
        said = [_("Not started in its time: it will not run, and is about to be marked as expired.")]
    else:
        said = [(_("Runs in %(span)s.") if message.due_at > now else _("Overdue by %(span)s.")) % facts]
        said += _obstacles(message, now, where)
    if message.attempts:
        said.append(_("Failed attempts so far: %(failed)d.") % facts)
    return said


def _obstacles(message: Message, now: datetime, where: Whereabouts | None) -> list[str]:
    facts, said = {"queue": message.queue}, []
    pause = Queue.objects.using(message._state.db).filter(Queue.PAUSED, name=message.queue).first()
    if pause is not None:
        said.append(_paused(pause))
    if message.due_at <= now and not _is_served(message, now):
        said.append(_("Waiting: no live worker listens to the queue %(queue)s.") % facts)
    if where is not None and where.mismatch == Mismatch.MISSING:
        said.append(_("Missing in Redis: it runs at the next sweep, or put it back."))
    if where is not None and where.mismatch == Mismatch.DIFFERENT:
        said.append(_("Redis has it at another time than the record: the next sweep mends that, or put it back."))
    if not said and message.due_at <= now:
        said.append(_("Waiting: for a free worker of the queue %(queue)s.") % facts)
    return said


def _paused(pause: Queue) -> str:
    facts = {
        "queue": pause.name,
        "since": moment(pause.paused_at, "seconds"),
        "actor": pause.paused_by or "?",
        "end": moment(pause.resumes_at, "seconds") if pause.resumes_at else "",
        "reason": pause.reason,
    }
    text = _("Waiting: the queue %(queue)s is paused since %(since)s by %(actor)s.")
    if pause.reason:
        text = _("Waiting: the queue %(queue)s is paused since %(since)s by %(actor)s: “%(reason)s”")
    if pause.resumes_at is not None:
        text = _("Waiting: the queue %(queue)s is paused since %(since)s by %(actor)s, until %(end)s.")
        if pause.reason:
            text = _("Waiting: the queue %(queue)s is paused since %(since)s by %(actor)s, until %(end)s: “%(reason)s”")
    return text % facts


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
