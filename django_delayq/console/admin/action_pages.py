"""Actions on messages: a selection or a search leads to a confirmation page, and its answer to the changes.

No other page of the admin changes messages; one puts a message back into Redis. A few messages are changed at once;
many messages, and all that a search finds, become an operation for a worker.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from types import SimpleNamespace
from typing import Any

from django.contrib import messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.views.main import SEARCH_VAR
from django.core import signing
from django.core.exceptions import BadRequest
from django.db import IntegrityError, OperationalError
from django.db.models import Count, Max, Min, Q, QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ...api.actions import ToCome, to_come
from ...core.states import State
from ...core.values import row_id
from ...inspector.numbers import Capped, capped
from ...models import Message
from ...record import reads
from ...record.sql.moves import locked
from ...record.sql.troubles import Trouble, trouble
from ..console_tuning import timeouts, tuning
from ..id_lists import packed, unpacked
from ..models import AuditEvent, DeadLetters
from ..operations.work import WORKS, BulkAction, Scope
from ..search import language
from ..search.conditions import of_states
from ..statements import TooSlow, answering_within, in_time, statement_timeout
from . import action_table, explanation, page, search_box
from .action_table import CONSOLE_ACTIONS, ConsoleAction
from .forms import ReasonForm
from .readonly import ReadOnly

logger = logging.getLogger("django_delayq")

_SALT, _SALT_FOUND = "django_delayq.action", "django_delayq.found"
_SELECT_ACROSS = "select_across"
# Django's parameter of addresses that holds the query string of the list from which the user came.
LIST_VAR = "_changelist_filters"
_CONSUMED = frozenset({State.CONSUMED})


@dataclass(frozen=True, slots=True)
class Question:
    """The content of a confirmation page's token: the action, the user, the messages and their number at that time."""

    action: ConsoleAction
    user: str
    scope: Scope
    number: int | None
    # The audit accepts each nonce once, so an answer that is sent twice is taken once.
    nonce: str = field(default_factory=lambda: secrets.token_urlsafe(12))

    def sign(self) -> str:
        """Return the question as a signed token, without the ids that a search has found."""
        value: dict[str, Any] = {"action": self.action.name, "user": self.user, "scope": self.scope.to_json()}
        value |= {"number": self.number, "nonce": self.nonce}
        return signing.dumps(value, salt=_SALT, compress=True)

    def sign_found(self) -> str:
        """Return the ids that a search has found, signed for this question; "" where they are not known."""
        is_known = self.scope.search is not None and self.scope.ids
        return signing.dumps([self.nonce, packed(self.scope.ids)], salt=_SALT_FOUND) if is_known else ""

    @classmethod
    def read(cls, token: str, found: str = "") -> Question:
        """Read a token, and what its search has found. Raises ``signing.BadSignature``."""
        value = signing.loads(token, salt=_SALT)
        action, scope = CONSOLE_ACTIONS[value["action"]], Scope.from_json(value["scope"])
        nonce, ids = signing.loads(found, salt=_SALT_FOUND) if found else ("", "")
        if scope.search is not None and nonce == value["nonce"]:
            scope = replace(scope, ids=unpacked(ids))
        return cls(action, value["user"], scope, value["number"], value["nonce"])


class ActionPages(ReadOnly):
    """The actions of the list, and the page that confirms them."""

    actions = ()

    def get_actions(self, request: HttpRequest) -> dict[str, Any]:
        """Return the actions that the user may do, and those that the project added to its site."""
        found: dict[str, Any] = super().get_actions(request)
        for action in self._allowed(request):
            name = f"{action.name}_selected"
            found[name] = (partial(type(self).ask_for_selection, action=action), name, f"{action.label}…")
        return found

    def buttons(self, request: HttpRequest, states: frozenset[State]) -> list[SimpleNamespace]:
        """Return the buttons of a list of messages in these states: for the actions that change such messages, and for
        those of the project.
        """
        ours = {f"{action.name}_selected": action for action in CONSOLE_ACTIONS.values()}
        return [
            SimpleNamespace(name=name, label=label, final=name in ours and ours[name].final)
            for _do, name, label in self.get_actions(request).values()
            if name not in ours or ours[name].action.states & states
        ]

    def _allowed(self, request: HttpRequest) -> Iterator[ConsoleAction]:
        return (action for action in CONSOLE_ACTIONS.values() if self.may(request, action.name))

    def offered(self, request: HttpRequest, message: Message) -> list[ConsoleAction]:
        """Return the actions that change this message and that the user may do."""
        return [action for action in self._allowed(request) if message.state in action.action.states]

    def action_view(self, request: HttpRequest, name: str) -> HttpResponse:
        """Show the question for a POST of ``ids`` or ``search``, and act on a POST of that question's ``token``."""
        action = CONSOLE_ACTIONS.get(name)
        if action is None:
            raise Http404
        self.require(request, name)
        if request.method != "POST":
            return HttpResponseRedirect(self.list_as_it_was(request))
        if "token" in request.POST:
            return self._answer(request, action)
        if "search" in request.POST:
            given = {SEARCH_VAR: request.POST["search"], search_box.TAB_VAR: "all"}
            return self._ask_for_search(request, action, given)
        return self._ask(request, action, Scope(ids=_ids(request.POST.get("ids", ""))))

    def resend(self, request: HttpRequest, form: QueryDict, name: str = "", **kwargs: Any) -> HttpResponse:
        """Show the question again with the answer that was given, or the question of a button."""
        action, scope = CONSOLE_ACTIONS.get(name), None
        if action is not None and "ids" in form:
            scope = Scope(ids=_ids(str(form["ids"])))
        elif action is not None and (question := _read(request, action, form)) is not None:
            scope = question.scope
        if action is None or scope is None:
            return super().resend(request, form)
        self.require(request, name)
        request.POST = QueryDict(form.urlencode())
        return self._ask(request, action, scope, form if "token" in form else None)

    # --- the question -------------------------------------------------------------------------------------------------

    def ask_for_selection(
        self, request: HttpRequest, queryset: QuerySet[Message], action: ConsoleAction
    ) -> HttpResponse:
        """Ask about the messages that are selected in the list, or about all that its search finds."""
        if request.POST.get(_SELECT_ACROSS) == "1":
            return self._ask_for_search(request, action, request.GET)
        # The posted ids: the queryset would silently drop messages that no longer match the search.
        return self._ask(request, action, Scope(ids=_ids(",".join(request.POST.getlist(ACTION_CHECKBOX_NAME)))))

    def _ask_for_search(self, request: HttpRequest, action: ConsoleAction, given: Mapping[str, str]) -> HttpResponse:
        """Ask about all that a search finds, on all pages of the list."""
        self.require(request, "bulk")
        found = search_box.read_search(request, given, self.using).whole
        if found.problems:
            return self.leave(request, self._back(request, Scope()), "; ".join(found.problems), messages.ERROR)
        # Relative times become absolute.
        return self._ask(request, action, Scope(search=found.frozen))

    def _ask(
        self, request: HttpRequest, action: ConsoleAction, scope: Scope, data: QueryDict | None = None
    ) -> HttpResponse:
        """Show the question about a scope as it is now; ``data``: an answer that has errors."""
        if len(scope.ids) > tuning.at_once:
            self.require(request, "bulk")
        is_longer = search_box.LONGER_VAR in request.POST
        limit = timeouts.long if is_longer else timeouts.answer // 2
        with answering_within(limit):
            with statement_timeout(self.using, timeouts.page):
                scope = scope.renewed(self.using)
            shown = preview(self._rows(request), action, scope, limit)
        question = Question(action, str(request.user.pk), replace(scope, ids=scope.ids or shown.ids), shown.number)
        form = _form(action, scope, shown.number, shown.to_come, data)
        facts = {
            "action": action,
            "form": form,
            "token": question.sign(),
            "found": question.sign_found(),
            "live": "",
            "kept": self.kept(request),
            "origin": _origin(request),
            "preview": shown,
            "in_batches": _is_work_for_a_worker(scope),
            "most": action_table.number(tuning.most_messages),
            "limit": f"{limit / 1000:g} s",
            "longer": is_longer,
            "longer_limit": f"{timeouts.long / 1000:g} s",
            "search": scope.search,
            "read_at": explanation.moment(scope.at, "seconds") if scope.at is not None else "",
            "back": self._back(request, scope),
        }
        return page.response(self, request, str(action.question), "message/confirm", facts)

    # --- the answer ---------------------------------------------------------------------------------------------------

    def _answer(self, request: HttpRequest, action: ConsoleAction) -> HttpResponse:
        """Do what the user confirmed, or show the question again and say why."""
        question = _read(request, action, request.POST)
        if question is None:
            raise BadRequest("token")
        scope = question.scope
        if _is_work_for_a_worker(scope):
            self.require(request, "bulk")
        if scope.at is None or reads.now(self.using) - scope.at > tuning.question_valid:
            text = _("This page was shown some time ago. Check it and confirm again.")
            self.message_user(request, text, messages.WARNING)
            return self._ask(request, action, scope)
        form = _form(action, scope, question.number, None, request.POST)
        if not form.is_valid():
            return self._ask(request, action, scope, request.POST)
        try:
            if _is_work_for_a_worker(scope):
                return self._do_in_batches(request, question, form)
            return self._do_at_once(request, question, form)
        except IntegrityError:
            if not self._is_answered(question.nonce):
                raise
            return self._tell_answered(request, self._back(request, scope))

    def _is_answered(self, nonce: str) -> bool:
        return AuditEvent.objects.using(self.using).filter(nonce=nonce).exists()

    def _tell_answered(self, request: HttpRequest, back: str) -> HttpResponse:
        text = _("This was confirmed already: nothing more was done.")
        return self.leave(request, back, text, messages.WARNING)

    def _frozen(self, request: HttpRequest, question: Question) -> tuple[Scope, Mapping[str, int]]:
        """Return the messages that have not changed since the question, and by reason the number of the others."""
        scope, rows = question.scope, self._rows(request)
        frozen = scope.frozen(rows, question.action.action)
        if scope.search is not None:
            return frozen, +Counter({"changed": (question.number or 0) - len(frozen.ids)})
        there = rows.filter(pk__in=scope.ids).count()
        return frozen, +Counter({"changed": there - len(frozen.ids), "not found": len(scope.ids) - there})

    def _do_in_batches(self, request: HttpRequest, question: Question, form: ReasonForm) -> HttpResponse:
        """Start the action on the messages that the question has counted and that have not changed since."""
        scope, counted = question.scope, question.number or 0
        if self._is_answered(question.nonce):
            return self._tell_answered(request, self._back(request, scope))
        if counted > tuning.most_messages:
            return self._ask(request, question.action, scope)
        found = in_time(self.using, timeouts.long, self._frozen, request, question)
        if found is None:
            text = _("The messages could not be found within %(seconds)d s: nothing was done. Narrow the search.")
            text %= {"seconds": timeouts.long // 1000}
            return self.leave(request, self._back(request, scope), text, messages.ERROR)
        frozen, left = found
        if scope.search is not None and has_changed(counted, len(frozen.ids)):
            text = _("The number of messages has changed meanwhile. Check it and confirm again.")
            self.message_user(request, text, messages.WARNING)
            return self._ask(request, question.action, scope)
        operation = page.start_operation(
            request,
            question.action.name,
            frozen.to_json(),
            form.arguments(reads.now(self.using)),
            described=describe(scope),
            reason=form.cleaned_data["reason"],
            nonce=question.nonce,
            outcomes=left,
        )
        text = _("Operation #%(id)d is queued: a worker does it in batches.") % {"id": operation.pk}
        self.message_user(request, text, messages.SUCCESS)
        if left:
            self.message_user(request, action_table.outcomes_text(left), messages.WARNING)
        return HttpResponseRedirect(page.operation_url(self, request, operation) or self._back(request, frozen))

    def _do_at_once(self, request: HttpRequest, question: Question, form: ReasonForm) -> HttpResponse:
        """Do the action for the few messages it is about, in this request, and show what happened."""
        action, scope, reason = question.action, question.scope, form.cleaned_data["reason"]
        try:
            with page.acting_as_user(request), statement_timeout(self.using, timeouts.long):
                self._lock(scope)
                frozen, left = self._frozen(request, question)
                work = WORKS[action.name](frozen.to_json(), form.arguments(reads.now(self.using)))
                assert isinstance(work, BulkAction)
                counts = work.act(self.using, work.ids, work.times, reason) + Counter(left)
                one = scope.ids[0] if len(scope.ids) == 1 else None
                facts = {"message_id": one, "reason": reason, "outcomes": counts, "nonce": question.nonce}
                page.record(request, action.name, _named(scope), **facts)
        except (TooSlow, OperationalError) as error:
            if trouble(error) == Trouble.READ_ONLY:
                raise
            # Another transaction kept a row locked for too long, or the database ended a deadlock.
            logger.warning(
                "%s by %s was rolled back and changed nothing: %r", action.name, page.actor_of(request), error
            )
            text = _("The database could not finish this in time: nothing was done. Try again in a moment.")
            return self.leave(request, self._back(request, scope), text, messages.ERROR)
        level = messages.SUCCESS if action_table.is_all_done(counts) else messages.WARNING
        text = ngettext(
            "%(action)s, %(count)s message: %(outcome)s.",
            "%(action)s, %(count)s messages: %(outcome)s.",
            len(scope.ids),
        )
        values = {
            "action": action.label,
            "count": action_table.number(len(scope.ids)),
            "outcome": action_table.outcomes_text(counts),
        }
        return self.leave(request, self._back(request, scope, gone=bool(counts["purged"])), text % values, level)

    # --- for both -----------------------------------------------------------------------------------------------------

    def _lock(self, scope: Scope) -> None:
        """Lock the messages, so that none changes between the look at what has changed and the action."""
        rows = Message.objects.using(self.using).filter(pk__in=scope.ids).order_by("pk")
        list(locked(self.using, rows, wait=True).values_list("pk"))

    def _rows(self, request: HttpRequest) -> QuerySet[Message]:
        return self.get_queryset(request).using(self.using)

    def kept(self, request: HttpRequest) -> str:
        """Return the query string that leads through pages of messages back to the list, as the reader left it."""
        found = self.get_preserved_filters(request)
        return f"?{found}" if found else ""

    def list_as_it_was(self, request: HttpRequest) -> str:
        """Return the address of the list with the search, the page and the order in which the reader left it."""
        query = QueryDict(QueryDict(self.kept(request)[1:]).get(LIST_VAR, "")).urlencode()
        return self.url(Message) + (f"?{query}" if query else "")

    def message_url(self, request: HttpRequest, pk: int) -> str:
        """Return the address of the page of a message, from which the way back leads to the list as it was."""
        return self.url(Message, "change", pk) + self.kept(request)

    def _back(self, request: HttpRequest, scope: Scope, *, gone: bool = False) -> str:
        """Return the address where the action began: another page, the list as it was, or the message."""
        origin = _origin(request)
        if origin == "deadletters":
            return self.url(DeadLetters)
        is_of_one = scope.search is None and len(scope.ids) == 1 and origin != "list" and not gone
        return self.message_url(request, scope.ids[0]) if is_of_one else self.list_as_it_was(request)


def _read(request: HttpRequest, action: ConsoleAction, form: QueryDict) -> Question | None:
    """Return the question whose token is in a form; None when the token is forged, or for another action or user."""
    try:
        question = Question.read(form.get("token", ""), form.get("found", ""))
    except signing.BadSignature:
        return None
    return question if question.action is action and question.user == str(request.user.pk) else None


def _is_work_for_a_worker(scope: Scope) -> bool:
    return scope.search is not None or len(scope.ids) > tuning.at_once


def _form(action: ConsoleAction, scope: Scope, number: int | None, to_come: ToCome | None, data: Any) -> ReasonForm:
    """Return the form of a question about ``number`` messages; ``to_come`` is None for an answer."""
    many, found = scope.search is not None or len(scope.ids) > 1, number or 0
    # The user types the number when it is large or the action final.
    typed = f"{found:,}" if found > tuning.at_once or action.final else ""
    return action.form(data, many=many, number=found, to_come=to_come, typed=typed)


def _origin(request: HttpRequest) -> str:
    """Return the word for the page on which the action began; "" for the page of a message."""
    return "list" if "action" in request.POST else request.POST.get("origin", "")


def _named(scope: Scope) -> str:
    """Return the messages by their ids, for the audit."""
    ids = ", ".join(f"#{pk}" for pk in scope.ids[:50])
    return f"{describe(scope)}: {ids}{', …' if len(scope.ids) > 50 else ''}" if len(scope.ids) > 1 else describe(scope)


def _ids(text: str) -> tuple[int, ...]:
    """Return the ids in a text with commas between them, each once."""
    parts = text.split(",")
    if len(parts) > tuning.counted:
        raise BadRequest("ids")
    try:
        return tuple(sorted({row_id(part) for part in parts}))
    except ValueError as error:
        raise BadRequest("ids") from error


# --- the preview: how many messages an action would change, by state and in words, and the first of them --------------


@dataclass(slots=True)
class ActionPreview:
    """The messages and effects that the confirmation page shows."""

    described: str
    forecast: list[SimpleNamespace]
    # Messages that will change; None when they could not be counted in time.
    number: int | None
    # The messages among them whose due time is still to come.
    to_come: ToCome = field(default_factory=ToCome)
    missing: int = 0
    rows: list[tuple[int, str, str]] = field(default_factory=list)
    topics: list[tuple[str, int]] = field(default_factory=list)
    # The number of messages that are not named.
    more: int = 0
    # True when there are more messages than those whose topics were counted.
    partly: bool = False
    # The number of messages that were counted, when there may be more.
    least: int = 0
    # The ids that a search has found, while they are few.
    ids: tuple[int, ...] = ()

    @property
    def changes(self) -> bool:
        """True when the action changes something, and the number of messages is known."""
        return bool(self.number) and not self.too_many

    @property
    def too_many(self) -> bool:
        """True for more messages than one operation takes."""
        return self.number is not None and self.number > tuning.most_messages


def preview(rows: QuerySet[Message], action: ConsoleAction, scope: Scope, most: int) -> ActionPreview:
    """Return the preview of an action on those of ``rows`` that belong to ``scope``, counted for ``most`` ms."""
    if scope.search is None:
        return _preview_of_ids(rows, action, scope)
    return _preview_of_search(rows, action, scope, most)


def has_changed(then: int, now: int) -> bool:
    """Tell whether there are more messages than the page showed, or fewer by more than a tenth."""
    return now > then or (then - now) * 10 > then


def _preview_of_ids(rows: QuerySet[Message], action: ConsoleAction, scope: Scope) -> ActionPreview:
    """Return the preview of an action on messages that the user has selected: all of them are read."""
    found = list(rows.filter(pk__in=scope.ids).order_by("pk").values_list("pk", "topic", "state"))
    counts = Counter(State(state) for _pk, _topic, state in found)
    return ActionPreview(
        describe(scope),
        _forecast(action, {state: Capped(number) for state, number in counts.items()}),
        sum(counts[state] for state in action.action.states),
        to_come(_changing(rows, action, scope)),
        len(scope.ids) - len(found),
        found[: tuning.messages_named],
        _topics(found),
        max(0, len(found) - tuning.messages_named),
    )


def _preview_of_search(rows: QuerySet[Message], action: ConsoleAction, scope: Scope, most: int) -> ActionPreview:
    """Return the preview of an action on all that a search finds.

    The messages that change are counted exactly, since this many must be confirmed; the others up to a cap. The topics
    are those of the first messages. A part is left out when the database does not answer in time.
    """
    assert scope.search is not None
    states = language.parse(scope.search, now=timezone.now()).states
    counts: dict[State, Capped | None] = {**_unchanged(rows, scope, states - action.action.states)}
    exact, due_later, ids = _count_exactly(rows, scope, states & action.action.states, most)
    counts |= {state: None if found is None else Capped(found) for state, found in exact.items() if found != 0}
    least = sum(found or 0 for found in exact.values())
    number = None if None in exact.values() else least
    known = replace(scope, ids=() if len(ids) != number else tuple(sorted(ids)))
    first_ids = replace(known, ids=known.ids[: tuning.topics_read + 1])
    sample = _changing(rows, action, first_ids).values_list("pk", "topic", "state")[: tuning.topics_read + 1]
    first = in_time(rows.db, timeouts.page, list, sample) or []
    return ActionPreview(
        describe(scope),
        _forecast(action, counts),
        number,
        due_later,
        least=least,
        rows=first[: tuning.messages_named],
        topics=_topics(first[: tuning.topics_read]),
        more=max(0, (number or 0) - tuning.messages_named),
        partly=len(first) > tuning.topics_read,
        ids=known.ids,
    )


def _changing(rows: QuerySet[Message], action: ConsoleAction, scope: Scope) -> QuerySet[Message]:
    """Return the messages whose state the action changes."""
    return rows.filter(scope.condition(), of_states(action.action.states)).order_by()


def _count_exactly(
    rows: QuerySet[Message], scope: Scope, states: frozenset[State], most: int
) -> tuple[dict[State, int | None], ToCome, set[int]]:
    """Count the messages of each state (None: that takes too long), and those due in the future; and return their ids,
    where they are few.

    The consumed ones are counted apart: they alone may be too many.
    """
    assert scope.at is not None
    to_come, ids = ToCome(), set[int]()
    counts: dict[State, int | None] = dict.fromkeys(states)
    for some in filter(None, (states - _CONSUMED, states & _CONSUMED)):
        matching = rows.filter(scope.condition(), of_states(some)).order_by()
        first = matching.values_list("pk", "state", "due_at")[: tuning.counted + 1]
        if (few := in_time(rows.db, most, list, first)) is None:
            continue
        if len(few) <= tuning.counted:
            number = Counter(state for _pk, state, _due_at in few)
            counts |= {state: number[state] for state in some}
            ids.update(pk for pk, _state, _due_at in few)
            to_come += _to_come([due_at for _pk, _state, due_at in few if due_at > scope.at])
        elif (found := in_time(rows.db, most, matching.aggregate, **_wanted(some, scope))) is not None:
            counts |= {state: found.pop(state.value) for state in some}
            to_come += ToCome(**found)
    return counts, to_come, ids


def _to_come(due: Sequence[datetime]) -> ToCome:
    return ToCome(len(due), min(due, default=None), max(due, default=None))


def _wanted(states: Iterable[State], scope: Scope) -> dict[str, Any]:
    """Return what is counted where the messages are too many to read: those of each state, and those to come."""
    later = Q(due_at__gt=scope.at)
    return {
        **{state.value: Count("pk", filter=Q(state=state)) for state in states},
        "number": Count("pk", filter=later),
        "first": Min("due_at", filter=later),
        "last": Max("due_at", filter=later),
    }


def _unchanged(rows: QuerySet[Message], scope: Scope, states: frozenset[State]) -> dict[State, Capped]:
    """Count the messages of the states that the action leaves alone, each up to a cap, until the time is over."""
    counts = {}
    with answering_within(timeouts.beside):
        # Consumed messages last: there are more of them than of any other state.
        for state in [*sorted(states - _CONSUMED), *(states & _CONSUMED)]:
            matching = rows.filter(scope.condition(), of_states(frozenset({state}))).order_by()
            found = in_time(rows.db, timeouts.beside, matching.values("pk")[: tuning.counted + 1].count)
            if found:
                counts[state] = capped(found, tuning.counted)
    return counts


def _forecast(action: ConsoleAction, counts: Mapping[State, Capped | None]) -> list[SimpleNamespace]:
    """Return what the action does to the messages of each state; a count of None: not counted in time."""
    return [
        SimpleNamespace(state=state, count=counts[state], effect=action.effect_on(state))
        for state in State
        if state in counts
    ]


def _topics(rows: Iterable[tuple[int, str, str]]) -> list[tuple[str, int]]:
    return Counter(topic for _pk, topic, _state in rows).most_common(5)


def describe(scope: Scope) -> str:
    """Return in words which messages belong to a scope."""
    if scope.search is not None:
        return language.parse(scope.search, now=timezone.now()).described
    if len(scope.ids) == 1:
        return _("message #%(id)d") % {"id": scope.ids[0]}
    text = ngettext("%(count)s selected message", "%(count)s selected messages", len(scope.ids))
    return text % {"count": action_table.number(len(scope.ids))}
