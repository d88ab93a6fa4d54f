"""Makes the sentences that explain the state of a message, and the texts of times on pages."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ...core.actors import display_name
from ...core.durations import brief
from ...core.limits import Limit, parts
from ...core.retry import RetryPolicy
from ...core.states import State
from ...inspector import diagnostics
from ...inspector.consistency import Mismatch
from ...inspector.numbers import Capped
from ...inspector.stats import LimitState, overdue_cutoff
from ...models import LimitOverride, Message, Queue, Transition, Worker
from ...models.workers import seen_lately
from ...project import pulled, registry
from ...record import admission
from ..whereabouts import Whereabouts


def moment(at: datetime, timespec: str = "milliseconds") -> str:
    """Return a moment as text, in the current time zone."""
    return timezone.localtime(at).replace(tzinfo=None).isoformat(sep=" ", timespec=timespec)


def short_moment(at: datetime, now: datetime) -> str:
    """Return a moment as text for lists, in the current time zone: without the date if it is within half a day."""
    local = timezone.localtime(at)
    return f"{local:%H:%M:%S}" if abs(at - now) < timedelta(hours=12) else f"{local:%Y-%m-%d %H:%M}"


def clock(at: datetime) -> str:
    """Return the time of day of a moment as text, in the current time zone."""
    return f"{timezone.localtime(at):%H:%M}"


def universal(at: datetime) -> str:
    """Return a moment as text, in UTC, to the millisecond."""
    return f"{at.astimezone(UTC).replace(tzinfo=None).isoformat(sep=' ', timespec='milliseconds')} UTC"


def span(length: timedelta) -> str:
    """Return a length of time in words, which no line breaks; a negative one, from two clocks that differ, is zero."""
    return brief(max(0.0, length.total_seconds())).replace(" ", "\N{NO-BREAK SPACE}")


def state_label(state: str | None) -> str:
    """Return a state in words; the state before the first is "new"."""
    return str(State(state).label) if state else _("new")


class Standing(NamedTuple):
    """What the badge of a message shows: the kind of its colour, a word, and what it waits for: a limit, or a pause."""

    kind: str
    word: str
    why: str = ""


def standing(message: Message, now: datetime, limit: str | None, pause: str | None) -> Standing:
    """Return the state of a message, or that it waits for a limit or for the end of a pause, or is overdue.

    ``pause`` is the reason for the pause of its queue; None: the queue is not paused.
    """
    if limit is not None:
        return Standing("limited", _("limited"), limit)
    if message.state == State.SCHEDULED and message.due_at <= now:
        if pause is not None:
            return Standing("paused", _("paused"), pause)
        if message.due_at < overdue_cutoff(now) and pulled.terms(message.queue) is None:
            return Standing("overdue", _("overdue"))
    return Standing(message.state, state_label(message.state))


def timing(message: Message, now: datetime, kind: str = "") -> str:
    """Return in a few words, for lists, when a message is due, how late it is, or when it ended.

    ``kind`` is that of its ``Standing``, if known.
    """
    if message.finished_at is not None:
        return _("ended %(span)s ago") % {"span": unbroken(now - message.finished_at)}
    if kind == "limited":
        return _("limited for %(span)s") % {"span": unbroken(now - message.due_at)}
    if message.state != State.SCHEDULED:
        return ""
    if message.due_at > now:
        return distance(message.due_at, now)
    is_meant_to_wait = kind == "paused" or pulled.terms(message.queue) is not None
    text = _("due for %(span)s") if is_meant_to_wait else _("overdue by %(span)s")
    return text % {"span": unbroken(now - message.due_at)}


def distance(at: datetime, now: datetime) -> str:
    """Return in words how long ago or ahead a moment is."""
    return (_("in %(span)s") if at > now else _("%(span)s ago")) % {"span": unbroken(abs(at - now))}


def unbroken(length: timedelta) -> str:
    """Return a length of time in words for a list: in whole seconds, at least one."""
    return span(timedelta(seconds=max(1, round(length.total_seconds())))).replace(".0", "")


@dataclass(frozen=True, slots=True)
class InLine:
    """A limit for which a message waits, and the number of messages that go before it; None: not known."""

    limit: LimitState
    before: Capped | None


def explain(
    message: Message,
    last: Transition | None,
    now: datetime,
    where: Whereabouts | None = None,
    in_line: InLine | None = None,
    pause: Queue | None = None,
) -> list[str]:
    """Return sentences that explain why a message is in its state and what happens next.

    ``pause`` is that of its queue.
    """
    if message.state != State.SCHEDULED:
        return _running(message, now) if message.state == State.RUNNING else [_finished(message, last)]
    if message.expires_at is not None and message.expires_at <= now:
        sentences = [
            _("No worker started it before it expired: it will not run, and a worker is about to mark it as expired.")
        ]
    elif in_line is not None:
        sentences = _limited(message, now, in_line) + _obstacles(message, now, where, pause, is_due=False)
    else:
        is_due = message.due_at <= now
        sentences = [_scheduled(message, now, pause), *_obstacles(message, now, where, pause, is_due=is_due)]
    if message.attempts:
        sentences.append(_("Failed attempts so far: %(failed)d.") % {"failed": message.attempts})
    return sentences


def limit_text(limit: LimitState, now: datetime) -> str:
    """Return in a few words how much of a limit is used up, e.g. "5 of 5 run; 100 a minute"."""
    if limit.limit is None:
        return _("the code declares none") if limit.is_known else _("not known to this process")
    if limit.limit.count == 0:
        return _("paused")
    said = []
    if limit.limit.count is not None:
        said.append(_("%(running)d of %(most)d run") % {"running": limit.running, "most": limit.limit.count})
    if limit.limit.interval is not None:
        said.append(diagnostics.rate_text(limit.limit))
        if limit.slot is not None:
            said.append(_("next slot in %(span)s") % {"span": span(limit.slot - now)})
    return "; ".join(said)


def terms_text(limit: Limit | None) -> str:
    """Return what a limit allows, e.g. "5 at once; 100 a minute"."""
    if limit is None:
        return _("no limit")
    said = [] if limit.count is None else [_("%(number)d at once") % {"number": limit.count}]
    return "; ".join([*said, diagnostics.rate_text(limit)] if limit.interval else said)


def limit_words(name: str) -> str:
    """Return what a limit counts, e.g. "topic crm.sync, key acme"."""
    kind, what, key = parts(name)
    if key is not None:
        return _("topic %(topic)s, key %(key)s") % {"topic": what, "key": key}
    return (_("topic %(name)s") if kind == "topic" else _("queue %(name)s")) % {"name": what}


def _limited(message: Message, now: datetime, in_line: InLine) -> list[str]:
    """Return what to say of a message that a limit holds back."""
    values = {"limit": in_line.limit.name, "use": limit_text(in_line.limit, now)}
    sentences = [_("Limited: it waits for %(limit)s (%(use)s).") % values]
    if in_line.before is not None:
        sentences.append(_next_in_line(in_line.before))
    return [*sentences, _("It has been due for %(span)s.") % {"span": span(now - message.due_at)}]


def _next_in_line(before: Capped) -> str:
    if not before.count:
        return _("It is the next one.")
    text = ngettext("%(count)s message goes before it.", "%(count)s messages go before it.", before.count)
    return text % {"count": before}


def _scheduled(message: Message, now: datetime, pause: Queue | None) -> str:
    """Return when a scheduled message runs that no limit holds back."""
    if pulled.terms(message.queue) is not None:
        due = _("Due for %(span)s: it waits for a program that pulls the queue %(queue)s.")
        text = _("Due in %(span)s.") if message.due_at > now else due
    else:
        late = _("Overdue by %(span)s.") if pause is None else _("It has been due for %(span)s.")
        text = _("Runs in %(span)s.") if message.due_at > now else late
    return text % {"span": span(abs(message.due_at - now)), "queue": message.queue}


def _obstacles(
    message: Message, now: datetime, where: Whereabouts | None, pause: Queue | None, *, is_due: bool
) -> list[str]:
    """Return what keeps a scheduled message from its worker: a pause, no worker, or Redis without it."""
    values = {"queue": message.queue, "topic": message.topic}
    sentences = [] if pause is None else [pause_text(pause)]
    if pulled.terms(message.queue) is not None:
        return sentences
    served = _served_topics(message, now)
    if message.due_at <= now and not served:
        sentences.append(_("Waiting: no live worker listens to the queue %(queue)s.") % values)
    elif message.due_at <= now and message.topic not in served:
        sentences.append(_("Waiting: no live worker of the queue %(queue)s handles the topic %(topic)s.") % values)
    if where is not None and where.mismatch == Mismatch.MISSING:
        sentences.append(
            _("Missing in Redis: a worker puts it back once it is overdue; “Put it back” does so at once.")
        )
    if where is not None and where.mismatch == Mismatch.DIFFERENT:
        sentences.append(
            _("Redis has another due time: a worker corrects it once it is overdue; “Put it back” does so at once.")
        )
    if not sentences and is_due:
        sentences.append(_("Waiting for a free worker of the queue %(queue)s.") % values)
    return sentences


def pause_facts(queue: Queue, now: datetime) -> str:
    """Return in a few words by whom, since when, until when and why a queue is paused."""
    assert queue.paused_at is not None
    return change_facts(queue.paused_by, queue.paused_at, queue.resumes_at, queue.reason, now)


def override_facts(row: LimitOverride, now: datetime) -> str:
    """Return in a few words what the code declares, and by whom, since when, until when and why it is overridden."""
    said = [change_facts(row.set_by, row.since, row.until, row.reason, now)]
    with suppress(KeyError):
        said.insert(0, _("declared %(limit)s") % {"limit": terms_text(admission.declared(row.name))})
    return " · ".join(said)


def change_facts(actor: str, since: datetime, until: datetime | None, reason: str, now: datetime) -> str:
    """Return in a few words by whom, since when, until when and why something holds."""
    said = [_("by %(actor)s") % {"actor": display_name(actor)}] if actor else []
    said.append(_("%(span)s ago") % {"span": span(now - since)})
    if until is not None:
        said.append(_("until %(until)s, in %(span)s") % {"until": short_moment(until, now), "span": span(until - now)})
    return " · ".join([*said, f"“{reason}”"] if reason else said)


def pause_text(queue: Queue) -> str:
    """Return in a sentence since when, by whom, until when and why a queue is paused."""
    actor = display_name(queue.paused_by) or "?"
    values = {"queue": queue.name, "since": moment(queue.paused_at, "seconds"), "actor": actor}
    text = _("Queue %(queue)s has been paused since %(since)s by %(actor)s")
    if queue.resumes_at is not None:
        values["until"] = moment(queue.resumes_at, "seconds")
        text = _("Queue %(queue)s has been paused since %(since)s by %(actor)s until %(until)s")
    return _sentence(text % values, queue.reason)


def _sentence(text: str, reason: str) -> str:
    """Return a text that ends with the reason that somebody gave, or with a full stop when there is none."""
    return _("%(text)s: “%(reason)s”") % {"text": text, "reason": reason} if reason else _("%(text)s.") % {"text": text}


def _served_topics(message: Message, now: datetime) -> set[str]:
    """Return the topics that live workers of the queue of a message handle."""
    alive = Worker.objects.using(message._state.db).filter(seen_lately(now)).values_list("queues", "topics")
    return {topic for queues, topics in alive if message.queue in queues for topic in topics}


def _running(message: Message, now: datetime) -> list[str]:
    """Return what to say of a running message."""
    until = message.lease_ends_at
    if until is None:
        return [_("It runs without a lease, as no worker writes it: “delayq_check record” finds such messages.")]
    values = {
        "worker": message.worker,
        "delivery": message.deliveries,
        "until": moment(until, "seconds"),
        "span": span(now - until),
    }
    if until > now:
        sentences = [_("Running on %(worker)s (delivery %(delivery)d), whose lease lasts until %(until)s.") % values]
        sentences.append(_attempt(message))
    elif pulled.terms(message.queue) is not None:
        sentences = [_("Taken by %(worker)s, whose lease ran out %(span)s ago: that is a failed attempt.") % values]
    else:
        text = _("Claimed by %(worker)s, whose lease ran out %(span)s ago: another worker will take it over.")
        sentences = [text % values]
    if message.cancel_requested:
        sentences.append(_("A cancel was requested: the handler can see it, and no retry follows."))
    return sentences


def _attempt(message: Message) -> str:
    """Return the number of the attempt that runs, and how many there may be, if this process knows that."""
    if pulled.terms(message.queue) is not None:
        number = message.attempts + message.crashes + 1
        return _attempt_text(number, pulled.policy(message.queue, message.retry, message.max_attempts).attempts)
    handler, most = registry.find(message.topic), message.max_attempts
    policy = None if handler is None else handler.retry
    with suppress(ValueError):
        policy = policy if message.retry is None else RetryPolicy.from_json(message.retry)
    if policy is not None:
        most = policy.limited(most).max_attempts
    return _attempt_text(message.attempts + 1, most)


def _attempt_text(number: int, most: int | None) -> str:
    if most is None:
        return _("It is attempt %(number)d.") % {"number": number}
    return _("It is attempt %(number)d of %(most)d.") % {"number": number, "most": most}


def timeout_of(message: Message) -> timedelta | None:
    """Return the time after which the handler of a message is ended; None: never, or this process does not know."""
    handler = registry.find(message.topic)
    found = (handler and handler.timeout) if message.timeout is None else message.timeout
    return timedelta(seconds=found) if found else None


def _why(last: Transition) -> str:
    """Return why a message ended: its last error if it is dead, unless it has none, else the reason in the log."""
    error = last.error.strip().rpartition("\n")[2]
    return (error or last.reason) if last.to_state == State.DEAD else (last.reason or error)


def _finished(message: Message, last: Transition | None) -> str:
    """Say how, when and by whom a message was finished."""
    values = {
        "at": moment(message.finished_at, "seconds") if message.finished_at else "",
        "actor": display_name(last.actor) if last else "",
    }
    text = {
        State.CONSUMED: _("Consumed by %(actor)s at %(at)s"),
        State.DEAD: _("Given up by %(actor)s at %(at)s"),
        State.CANCELLED: _("Cancelled by %(actor)s at %(at)s"),
        State.EXPIRED: _("Expired at %(at)s: no worker started it in time"),
    }[State(message.state)]
    has_reason = message.state in (State.DEAD, State.CANCELLED)
    return _sentence(text % values, _why(last)[:300] if last and has_reason else "")
