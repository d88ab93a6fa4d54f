"""The page of one message, with its history from its log."""

from __future__ import annotations

import pprint
import secrets
from collections.abc import Sequence
from datetime import datetime, timedelta
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

from django.contrib import messages
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.db import IntegrityError
from django.db.models import Q
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ...api.repeating import repeat_message
from ...broker import publisher
from ...core.actors import display_name
from ...core.durations import brief
from ...core.exceptions import BrokerUnavailable, InvalidMessage, KeyConflict
from ...core.outcomes import storable
from ...core.own_header import own_part, without_own_part
from ...core.retention import kept_for
from ...core.states import FINAL, LIVE, State
from ...inspector import stats
from ...inspector.consistency import Mismatch
from ...models import Message, Queue, Transition
from ...project import conf, pulled
from ...record import reads
from ...record.sql import statements
from ...record.sql.expressions import UnderLimits
from ...restore.engine import Restore
from ...restore.selection import Selection
from ..console_tuning import timeouts, tuning
from ..search import texts as searches
from ..statements import in_time
from ..whereabouts import Whereabouts, locate
from . import explanation, life, page, payload
from .action_pages import ActionPages
from .explanation import moment, span, state_label
from .forms import PayloadForm
from .limits_page import running_text

# The audit has room for this many characters of a nonce.
LONGEST_NONCE = 32
# Why a message is not repeated.
_REFUSALS = (InvalidMessage, KeyConflict)
# The errors of a repetition. The last ones are those of a handler's function for limit keys, when it gets an edited
# payload.
_REFUSALS_OF_EDITED = (*_REFUSALS, AttributeError, LookupError, TypeError, ValueError)


class MessagePage(ActionPages):
    """The page of a message, and its buttons that reveal it, put it back into Redis and repeat it."""

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        if not self.has_view_permission(request) or request.method not in ("GET", "HEAD"):
            raise PermissionDenied
        message = self.get_object(request, unquote(object_id))
        if message is not None:
            return self._page(request, message, masked=True, extra=extra_context)
        text = _("There is no message #%(id)s. It may have been purged.") % {"id": unquote(object_id)}
        return self.leave(request, self.url(Message), text, messages.WARNING)

    def reveal_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Show the page once without masks, on POST, and write that to the audit."""
        self.require(request, "reveal")
        if request.method != "POST":
            return HttpResponseRedirect(self.message_url(request, pk))
        message = self._message(request, pk)
        page.record(request, "reveal", str(message), message_id=pk, outcomes={"revealed": 1})
        # Browsers and proxies do not cache it, as they cache no page of the admin.
        return self._page(request, message, masked=False)

    def restore_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Put a scheduled message back into Redis, on POST."""
        self.require(request, "restore")
        if request.method == "POST":
            message = self._message(request, pk)
            self.message_user(request, *self._restored(request, message))
        return HttpResponseRedirect(self.message_url(request, pk))

    def repeat_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Schedule a message that has ended once more, as a new one, on POST; and lead to that."""
        self.require(request, "repeat")
        back, nonce = HttpResponseRedirect(self.message_url(request, pk)), storable(request.POST.get("nonce", ""))
        if request.method != "POST" or not nonce:
            return back
        old = self._message(request, pk)
        edited: dict[str, Any] = {}
        if "payload" in request.POST:
            # A user who may write a payload may also read the values that are masked in it.
            self.require(request, "repeat", "reveal")
            form = PayloadForm(request.POST, old.payload)
            if not form.is_valid():
                return self._page(request, old, masked=True, form=form)
            edited = {"payload": form.cleaned_data["payload"]}
        # The audit takes each nonce once, so a form that is sent twice makes one message.
        facts: dict[str, Any] = {"message_id": pk, "outcomes": {"repeated": 1}, "nonce": nonce[:LONGEST_NONCE]}
        refusals = _REFUSALS_OF_EDITED if edited else _REFUSALS
        try:
            with page.acting_as_user(request):
                new = repeat_message(old, using=self.using, **edited)
                target = f"{old} → #{new.pk}"
                page.record(request, "repeat", f"{target}, with an edited payload" if edited else target, **facts)
        except refusals as error:
            text = _("Not repeated: %(error)s") % {"error": error}
            if edited:
                form.add_error(None, text)
                return self._page(request, old, masked=True, form=form)
            return self.leave(request, back.url, text, messages.ERROR)
        except IntegrityError:
            if not self._is_answered(facts["nonce"]):
                raise
            return self._tell_answered(request, back.url)
        text = _("This message repeats #%(id)s.") % {"id": pk}
        return self.leave(request, self.message_url(request, new.pk), text, messages.SUCCESS)

    def _restored(self, request: HttpRequest, message: Message) -> tuple[str, int]:
        """Put the message into Redis if it is missing there; return what happened, and its level."""
        redis_publisher = publisher.get(self.using)
        if redis_publisher is None:
            return _("No Redis is configured."), messages.WARNING
        selection = Selection(queues=(message.queue,), ids=(message.pk,))
        try:
            run = Restore(self.using, redis_publisher.broker, selection)
            run.preview()
            done = run.run().total()
        except BrokerUnavailable as error:
            text = _("Redis did not accept the message: %(error)s It is safe in the record and runs a little later.")
            return text % {"error": error}, messages.ERROR
        outcomes = {"put": done.put, "there already": done.present, "beyond": done.beyond}
        facts = {"message_id": message.pk, "outcomes": {word: count for word, count in outcomes.items() if count}}
        page.record(request, "restore", str(message), **facts)
        if done.put:
            return _("The message is in Redis again."), messages.SUCCESS
        if done.present:
            return _("The message was in Redis already."), messages.SUCCESS
        if done.found:
            return _("The message is due after the horizon: a worker puts it into Redis in time."), messages.INFO
        return _("The message is not scheduled any more: nothing was done."), messages.WARNING

    def _may_repeat(self, request: HttpRequest, message: Message) -> bool:
        return message.state in FINAL and self.may(request, "repeat")

    def _again(self, request: HttpRequest, message: Message, *, masked: bool) -> PayloadForm | None:
        """Return the form that repeats a message with an edited payload, if the page shows the whole payload."""
        if not self._may_repeat(request, message) or not self.may(request, "reveal"):
            return None
        form = PayloadForm(None, message.payload, masked=masked)
        return form if len(form.initial["payload"]) <= tuning.payload_characters else None

    def _message(self, request: HttpRequest, pk: int) -> Message:
        message: Message | None = self.get_object(request, str(pk))
        if message is None:
            raise Http404
        return message

    def _page(
        self,
        request: HttpRequest,
        message: Message,
        *,
        masked: bool,
        extra: dict[str, Any] | None = None,
        form: PayloadForm | None = None,
    ) -> HttpResponse:
        now = reads.now(message._state.db or "default")
        moves = log(message)
        told = deliveries(moves, now)
        where, in_line, pause = locate(message), _in_line(message, now), _pause(message)
        content = payload.pretty(message.payload, masked=masked)
        result = "" if message.result is None else payload.pretty(message.result, masked=masked)
        headers = payload.pretty(message.headers, masked=masked) if message.headers else ""
        has_masks = any(payload.MASK in shown for shown in (content, headers, result))
        facts = {
            "original": message,
            "kept": self.kept(request),
            "back": self.list_as_it_was(request),
            "standing": _standing(message, now, in_line, pause),
            "explanation": explanation.explain(message, moves[-1] if moves else None, now, where, in_line, pause),
            "pause_url": "" if pause is None else self.url(Queue, "detail", message.queue),
            "alike": _alike(message, now),
            "alike_url": self.list_url(Message, f"{_alike_text(message)} finished:<1h", state="all"),
            "life": life.line(message, moves, now),
            "timeline": steps(message, moves, told, now),
            "earlier": max(0, message.moves - len(moves)),
            "deliveries": told,
            "zone": timezone.get_current_timezone_name(),
            "actions": self.offered(request, message),
            "facts": self._facts(message, in_line, now),
            "copied": (_("id"), _("key")),
            "payload": content[: tuning.payload_characters],
            "cut": len(content) > tuning.payload_characters,
            "headers": headers,
            "result": result[: tuning.payload_characters],
            "result_cut": len(result) > tuning.payload_characters,
            "masked": masked,
            "again": form or self._again(request, message, masked=masked),
            "again_nonce": secrets.token_urlsafe(12),
            "nonce": secrets.token_urlsafe(12) if self._may_repeat(request, message) else "",
            "may_reveal": masked and has_masks and self.may(request, "reveal"),
            "call": _call(message) if len(content) <= tuning.payload_characters else "",
            "where": where,
            "compared": _compared(message, where),
            "may_restore": message.state == State.SCHEDULED and where is not None and self.may(request, "restore"),
            "related": self._related(message, in_line),
            **(extra or {}),
        }
        return page.response(self, request, str(message), "message/change_form", facts)

    def _facts(self, message: Message, in_line: explanation.InLine | None, now: datetime) -> list[tuple[str, str]]:
        limit = "" if message.max_attempts is None else f" / {message.max_attempts}"
        facts: list[tuple[Any, Any]] = [
            (_("id"), message.pk),
            (_("topic"), message.topic),
            (_("queue"), message.queue),
            (_("key"), message.key),
            (_("holds its key"), _holding(message)),
            (_("limit key"), message.limit_key),
            (_("limited by"), None if in_line is None else in_line.limit.name),
            (_("priority"), message.priority),
            (_("due"), message.due_at),
            (_("expires"), message.expires_at),
            (_("created"), message.created_at),
            (_("finished"), message.finished_at),
            (_("failed attempts"), f"{message.attempts}{limit}"),
            (_("crashed deliveries"), message.crashes),
            (_("last error"), message.error),
            (_("timeout"), _("none") if message.timeout == 0 else message.timeout and brief(message.timeout)),
            (_("lease"), message.lease and brief(message.lease)),
            (_("retry policy"), payload.compact(message.retry) if message.retry else _("the handler's")),
        ]
        told = ((name, _when(value, now) if isinstance(value, datetime) else value) for name, value in facts)
        return [(str(name), str(value)) for name, value in told if value not in (None, "")]

    def _related(self, message: Message, in_line: explanation.InLine | None) -> list[tuple[str, str]]:
        """Return labels and addresses of lists of related messages."""
        terms = (
            (_("same key"), "key", message.key),
            (_("same topic"), "topic", message.topic),
            (_("same error"), "error", message.error),
            (_("same queue"), "queue", message.queue),
            (_("same limit key"), "limit_key", message.limit_key),
            (_("the message that it repeats"), "id", message.repeats and str(message.repeats)),
        )
        texts = [(label, searches.term_text(name, value)) for label, name, value in terms if value]
        if in_line is not None:
            texts.append((_("running under its limit"), running_text(in_line.limit.name)))
            texts.append((_("waiting for the same limit"), searches.term_text("limit", in_line.limit.name)))
        return [(label, self.list_url(Message, text, state="all")) for label, text in texts]


def _when(at: datetime, now: datetime) -> str:
    """Return a moment, and in words how long ago or ahead it is."""
    return f"{moment(at)}, {explanation.distance(at, now)}"


def _alike_text(message: Message) -> str:
    """Return the text of a search for the dead messages with the last error of this one."""
    return f"state:{State.DEAD} {searches.exact_error_text(message.error)}"


def _alike(message: Message, now: datetime) -> str:
    """Return in words how many messages died of the last error of this one in an hour; empty: none, or unknown."""
    if not message.error:
        return ""
    using = message._state.db or "default"
    died = Message.objects.using(using).filter(~Q(error=""), error=message.error, state=State.DEAD)
    died = died.filter(finished_at__gte=now - timedelta(hours=1))
    found = in_time(using, timeouts.beside, stats.count_capped, died, tuning.counted)
    if found is None or not found.count:
        return ""
    text = ngettext(
        "%(count)s message died of this error in the last hour",
        "%(count)s messages died of this error in the last hour",
        found.count,
    )
    return text % {"count": found}


def _in_line(message: Message, now: datetime) -> explanation.InLine | None:
    """Return the limit for which a message waits, and its position among the messages that wait for it."""
    using = message._state.db or "default"
    name = stats.waits_for(using, [message], now).get(message.pk)
    if name is None:
        return None
    (limit,) = stats.read_limits(using, [name])
    line = Message.objects.using(using).filter(
        state=State.SCHEDULED, queue__in=pulled.without(statements(using).queues())
    )
    line = line.filter(Q(UnderLimits([name])), due_at__lte=now)
    same = Q(priority=message.priority)
    before = line.filter(
        Q(priority__gt=message.priority)
        | (same & Q(due_at__lt=message.due_at))
        | (same & Q(due_at=message.due_at, pk__lt=message.pk))
    )
    return explanation.InLine(limit, in_time(using, timeouts.beside, stats.count_capped, before, tuning.counted))


def _standing(
    message: Message, now: datetime, in_line: explanation.InLine | None, pause: Queue | None
) -> explanation.Standing:
    limit = None if in_line is None else in_line.limit.name
    return explanation.standing(message, now, limit, None if pause is None else pause.reason)


def _pause(message: Message) -> Queue | None:
    """Return the pause that keeps a scheduled message."""
    paused = Queue.objects.using(message._state.db).filter(Queue.PAUSED, name=message.queue)
    return paused.first() if message.state == State.SCHEDULED else None


_ABSENT = gettext_lazy("not in Redis")


def _compared(message: Message, where: Whereabouts | None) -> list[SimpleNamespace]:
    """Compare a message in the record with Redis; "?" where Redis does not answer."""
    if where is None:
        return []
    rows = [
        (_("state"), str(State(message.state).label), _place(where)),
        (_("due"), moment(message.due_at), moment(where.delayed_until) if where.delayed_until else "–"),
    ]
    if message.state in LIVE:
        rows.append((_("filled up to (horizon)"), "–", moment(where.horizon) if where.horizon else _("not filled yet")))
    expected = _expected(message, where) if message.state == State.SCHEDULED else str(_ABSENT)
    rows.append((_("expected in Redis"), expected, _mismatch(where)))
    return [
        SimpleNamespace(name=name, record=record, redis="?" if where.error else redis) for name, record, redis in rows
    ]


def _place(where: Whereabouts) -> str:
    """Say where the message is in Redis."""
    if where.ready_since is not None:
        values = {
            "since": moment(where.ready_since),
            "before": "?" if where.ahead is None else f"{where.ahead:,}",
        }
        return _("ready since %(since)s, with %(before)s before it") % values
    if where.delayed_until is not None:
        return _("delayed until %(at)s") % {"at": moment(where.delayed_until)}
    return str(_ABSENT)


def _expected(message: Message, where: Whereabouts) -> str:
    if where.horizon is not None and message.due_at > where.horizon:
        return _("not yet: it is due after the horizon")
    return _("delayed, or ready")


def _mismatch(where: Whereabouts) -> str:
    """Say whether Redis agrees with the record about the message."""
    if where.mismatch is None:
        return _("agrees")
    return {
        Mismatch.MISSING: _("differs: missing"),
        Mismatch.EXTRA: _("differs: only in Redis"),
        Mismatch.DIFFERENT: _("differs: another due time"),
    }[where.mismatch]


def _holding(message: Message) -> str:
    """Return how long a message holds its key; empty when it has none."""
    if message.key is None:
        return ""
    if message.key_for is not None:
        return _("until %(span)s after its end") % {"span": brief(message.key_for)}
    return _("while it is live") if message.unique == "live" else _("until its delivery begins")


def _call(message: Message) -> str:
    """Return the call that would schedule the same message, redacted."""
    content = pprint.pformat(payload.redacted(message.payload), sort_dicts=False, width=100)
    given = [repr(message.topic), content.replace("\n", "\n    ")]
    given.append(f"due_at=datetime.fromisoformat({message.due_at.isoformat()!r})")
    options = {
        "queue": message.queue,
        "priority": message.priority,
        "key": message.key,
        "unique": None if message.key is None or message.unique == "live" else message.key_for or message.unique,
        "limit_key": message.limit_key,
        "expires": message.expires_at and (message.expires_at - message.due_at).total_seconds(),
        "max_attempts": message.max_attempts,
        "timeout": False if message.timeout == 0 else message.timeout,
        "lease": message.lease,
        "headers": payload.redacted(without_own_part(message.headers)) or None,
        **{name: own_part(message.headers).get(name) for name in ("on_dead", "on_expired")},
    }
    if isinstance(message.retry, dict):
        terms = {"max_attempts": None, **message.retry}
        policy = repr(terms["fixed"]) if "fixed" in terms else f"RetryPolicy.exponential(**{terms!r})"
        given.append(f"retry={policy}")
    given += [f"{name}={value!r}" for name, value in options.items() if value is not None]
    return "schedule_message(\n    " + ",\n    ".join(given) + ",\n)"


# --- the history, from the log: every delivery as a row, every other transition as a step -----------------------------


def log(message: Message) -> list[Transition]:
    """Return the latest transitions of a message, in order."""
    moves = Transition.objects.using(message._state.db).filter(message=message)
    return list(moves.order_by("-number")[: tuning.steps_shown])[::-1]


def steps(
    message: Message, moves: Sequence[Transition], told: Sequence[SimpleNamespace], now: datetime
) -> list[SimpleNamespace]:
    """Return the moves that none of the deliveries ``told`` has, as steps; then the steps that are expected next.

    A step has its due time where that is new.
    """
    numbers = {number for delivery in told for number in delivery.moves}
    found: list[SimpleNamespace] = []
    for previous, move in zip((None, *moves), moves, strict=False):
        if move.number in numbers:
            continue
        found.append(
            SimpleNamespace(
                at=move.at,
                moment=moment(move.at),
                before=state_label(move.from_state),
                after=state_label(move.to_state),
                took=span(move.at - found[-1].at) if found else "",
                due="" if previous and previous.due_at == move.due_at else moment(move.due_at),
                actor=display_name(move.actor),
                reason=move.reason,
                error=move.error,
                future=False,
            )
        )
    return found + [step for step in _to_come(message, told[-1:], now) if step.at > now]


def _to_come(message: Message, last: Sequence[SimpleNamespace], now: datetime) -> list[SimpleNamespace]:
    """Return the rows of the timeline that are still to come."""

    def step(at: datetime, before: str, after: str, reason: str = "") -> SimpleNamespace:
        texts = {"moment": moment(at, "seconds"), "before": before, "after": after, "took": span(at - now)}
        return SimpleNamespace(at=at, future=True, reason=reason, **texts)

    if message.state == State.SCHEDULED:
        coming = [step(message.due_at, state_label(message.state), _("due"))]
        if message.expires_at is not None:
            coming.append(step(message.expires_at, state_label(message.state), state_label(State.EXPIRED)))
        return coming
    if (until := message.lease_ends_at) is not None:
        running, timeout = state_label(State.RUNNING), explanation.timeout_of(message)
        coming = [step(until, running, _("end of the lease"), life.after_lease(message))]
        if timeout is not None:
            coming += [step(delivery.at + timeout, running, _("timeout")) for delivery in last]
        return sorted(coming, key=attrgetter("at"))
    settings = conf.get()
    retention = settings.DEAD_RETENTION if message.state == State.DEAD else settings.RETENTION
    kept = kept_for(retention, message.topic, message.queue)
    if message.finished_at is None or kept is False:
        return []
    held = message.key_for or 0 if message.next_id is None else 0
    return [step(message.finished_at + timedelta(seconds=max(kept, held)), state_label(message.state), _("purged"))]


def deliveries(moves: Sequence[Transition], now: datetime) -> list[SimpleNamespace]:
    """Return the deliveries that began within these transitions, in order. The outcome of one that runs is empty.

    ``moves`` are the numbers of the moves by which each began and ended.
    """
    found = []
    for place, move in enumerate(moves):
        if move.from_state != State.SCHEDULED or move.to_state != State.RUNNING:
            continue
        end = next((m for m in moves[place + 1 :] if m.to_state != State.RUNNING), None)
        found.append(
            SimpleNamespace(
                moves=(move.number, end and end.number),
                number=move.delivery,
                at=move.at,
                started=moment(move.at),
                late=span(move.at - move.due_at),
                waited=_waited(move, moves[place - 1] if place else None),
                took=span((end.at if end else now) - move.at),
                worker=move.actor,
                outcome=_outcome(end, move.delivery) if end else "",
                due=moment(end.due_at) if end and end.to_state == State.SCHEDULED else "",
                actor=display_name(end.actor) if end and _worker(end) != _worker(move) else "",
                error=end.error if end else "",
                traceback=end.traceback if end else "",
            )
        )
    return found


def _outcome(end: Transition, delivery: int) -> str:
    text = f"{state_label(end.to_state)}: {end.reason}" if end.reason else state_label(end.to_state)
    # An earlier delivery, which was taken for lost, may be the one that succeeded.
    return text if end.delivery == delivery else f"{text} (#{end.delivery})"


def _worker(move: Transition) -> str:
    return move.actor.removeprefix("worker:")


def _waited(move: Transition, before: Transition | None) -> str:
    """Return how long a message was ready before its claim: since its due time, or a later move before the claim."""
    ready_at = move.ready_at or move.due_at
    return span(move.at - (ready_at if before is None else max(ready_at, before.at)))
