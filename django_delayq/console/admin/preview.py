"""The preview of an action: how many messages it would change, by state and in words, and the first of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace

from django.db.models import Count, Max, Min, Q, QuerySet
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ...api.actions import ToCome, to_come
from ...core.states import State
from ...inspector.numbers import Capped, capped
from ...models import Message
from ..operations.bulk import MOST_MESSAGES, Scope
from ..search import language
from ..search.conditions import of_states
from ..search.listing import COUNT_CAP
from ..statements import in_time
from . import action_table
from .action_table import ConsoleAction

# Messages that the page names one by one.
MESSAGES_NAMED = 10
# Messages whose topics are counted.
TOPICS_SAMPLE = 1000
# Topics that are shown.
TOPICS_SHOWN = 5
# How long the database may count exactly the messages that change.
EXACT_TIMEOUT_MS = 15_000
# How long it may look for the first of them.
HEAD_TIMEOUT_MS = 800
# How long it may count the messages that stay as they are, of all states together.
UNCHANGED_TIMEOUT_MS = 200


@dataclass(slots=True)
class ActionPreview:
    """The messages and effects that the confirmation page shows."""

    described: str
    forecast: list[SimpleNamespace]
    # Messages that will change; None when they could not be counted in time.
    number: int | None
    # Those of them whose due time is still to come.
    to_come: ToCome = field(default_factory=ToCome)
    missing: int = 0
    rows: list[tuple[int, str, str]] = field(default_factory=list)
    topics: list[tuple[str, int]] = field(default_factory=list)
    # The number of messages that are not named.
    more: int = 0
    # True when there are more messages than those whose topics were counted.
    partly: bool = False

    @property
    def changes(self) -> bool:
        """True when the action changes something, and the number of messages is known."""
        return bool(self.number) and not self.too_many

    @property
    def too_many(self) -> bool:
        """True for more messages than one operation takes."""
        return self.number is not None and self.number > MOST_MESSAGES


def preview(rows: QuerySet[Message], action: ConsoleAction, scope: Scope) -> ActionPreview:
    """Return the preview of an action on those of ``rows`` that belong to ``scope``."""
    if scope.search is None:
        return _of_ids(rows, action, scope)
    return _of_search(rows, action, scope)


def has_changed(then: int, now: int) -> bool:
    """Tell whether more messages were found than shown, or fewer by more than a tenth."""
    return now > then or (then - now) * 10 > then


def _of_ids(rows: QuerySet[Message], action: ConsoleAction, scope: Scope) -> ActionPreview:
    found = list(rows.filter(pk__in=scope.ids).order_by("pk").values_list("pk", "topic", "state"))
    counts = Counter(State(state) for _pk, _topic, state in found)
    return ActionPreview(
        describe(scope),
        _forecast(action, {state: Capped(number) for state, number in counts.items()}),
        sum(counts[state] for state in action.action.states),
        to_come(_changing(rows, action, scope)),
        len(scope.ids) - len(found),
        found[:MESSAGES_NAMED],
        _topics(found),
        max(0, len(found) - MESSAGES_NAMED),
    )


def _of_search(rows: QuerySet[Message], action: ConsoleAction, scope: Scope) -> ActionPreview:
    assert scope.search is not None
    states = language.parse(scope.search, now=timezone.now()).states
    counts: dict[State, Capped | None] = {**_unchanged(rows, scope, states - action.action.states)}
    exact, later = _exact(rows, action, scope) or (None, ToCome())
    if exact is None:
        counts |= dict.fromkeys(states & action.action.states)
    else:
        counts |= {state: Capped(found) for state, found in exact.items() if found}
    number = None if exact is None else sum(exact.values())
    first = _changing(rows, action, scope).values_list("pk", "topic", "state")[: TOPICS_SAMPLE + 1]
    head = in_time(rows.db, HEAD_TIMEOUT_MS, lambda: list(first)) or []
    return ActionPreview(
        describe(scope),
        _forecast(action, counts),
        number,
        later,
        rows=head[:MESSAGES_NAMED],
        topics=_topics(head[:TOPICS_SAMPLE]),
        more=max(0, (number or 0) - MESSAGES_NAMED),
        partly=len(head) > TOPICS_SAMPLE,
    )


def _changing(rows: QuerySet[Message], action: ConsoleAction, scope: Scope) -> QuerySet[Message]:
    return rows.filter(scope.condition(), of_states(action.action.states)).order_by()


def _exact(rows: QuerySet[Message], action: ConsoleAction, scope: Scope) -> tuple[dict[State, int], ToCome] | None:
    """Count the messages that will change, by state, and those whose due time is still to come; None: too slow."""
    later = Q(due_at__gt=scope.at)
    wanted = {
        **{state.value: Count("pk", filter=Q(state=state)) for state in action.action.states},
        "number": Count("pk", filter=later),
        "first": Min("due_at", filter=later),
        "last": Max("due_at", filter=later),
    }
    found = in_time(rows.db, EXACT_TIMEOUT_MS, lambda: _changing(rows, action, scope).aggregate(**wanted))
    if found is None:
        return None
    counts = {state: found.pop(state.value) for state in action.action.states}
    return counts, ToCome(**found)


def _unchanged(rows: QuerySet[Message], scope: Scope, states: frozenset[State]) -> dict[State, Capped]:
    """Count the messages of states that stay as they are, each up to a cap, as far as there is time for it."""
    counts = {}
    end = time.monotonic() + UNCHANGED_TIMEOUT_MS / 1000
    # The consumed messages last: they are the most.
    for state in sorted(states, key=lambda state: (state == State.CONSUMED, state)):
        matching = rows.filter(scope.condition() & of_states(frozenset({state})))
        # PostgreSQL takes 0 for no limit.
        left = max(1, int((end - time.monotonic()) * 1000))
        found = in_time(rows.db, left, matching.order_by().values("pk")[: COUNT_CAP + 1].count)
        if found:
            counts[state] = capped(found, COUNT_CAP)
    return counts


def _forecast(action: ConsoleAction, counts: Mapping[State, Capped | None]) -> list[SimpleNamespace]:
    """Return what the action does to the messages of each state; a count of None: they could not be counted in time."""
    return [
        SimpleNamespace(state=state, count=counts[state], effect=action.effect_on(state))
        for state in State
        if state in counts
    ]


def _topics(rows: Iterable[tuple[int, str, str]]) -> list[tuple[str, int]]:
    return Counter(topic for _pk, topic, _state in rows).most_common(TOPICS_SHOWN)


def describe(scope: Scope) -> str:
    """Return in words which messages belong to a scope."""
    if scope.search is not None:
        return language.parse(scope.search, now=timezone.now()).described
    if len(scope.ids) == 1:
        return _("message #%(id)d") % {"id": scope.ids[0]}
    text = ngettext("%(count)s selected message", "%(count)s selected messages", len(scope.ids))
    return text % {"count": action_table.number(len(scope.ids))}
