"""The preview of an action: how many messages it would change, by state and in words, and the first of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from django.db.models import QuerySet
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ...inspector.numbers import Capped
from ...models import Message
from ...states import State
from ..operations import Scope
from ..search import language
from ..search.listing import COUNT_CAP
from ..statements import TooSlow, statement_timeout
from . import action_table
from .action_table import ConsoleAction

if TYPE_CHECKING:
    from django.utils.functional import _StrPromise as Text
else:
    Text = str

# Messages that the page names one by one.
MESSAGES_NAMED = 10
# Messages whose topics are counted, and topics that are shown.
TOPICS_SAMPLE = 1000
TOPICS_SHOWN = 5
# How long the database may count the messages of one state, when they change and when they do not. Milliseconds.
CHANGED_TIMEOUT_MS = 800
UNCHANGED_TIMEOUT_MS = 200


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the action does to the messages of one state. ``count`` is None when they could not be counted in time."""

    state: State
    count: Capped | None
    effect: Text
    changes: bool


@dataclass(slots=True)
class ActionPreview:
    """The messages and effects that the confirmation page shows."""

    described: str
    forecast: list[Forecast]
    # Messages that will change; None when they could not be counted in time.
    number: Capped | None
    missing: int = 0
    rows: list[tuple[int, str, str]] = field(default_factory=list)
    topics: list[tuple[str, int]] = field(default_factory=list)
    # The number of messages that are not named.
    more: int = 0
    # True when there are more messages than those whose topics were counted.
    partly: bool = False

    @property
    def changes(self) -> bool:
        """True when the action may change something."""
        return self.number is None or self.number.count > 0


def preview(rows: QuerySet[Message], action: ConsoleAction, scope: Scope) -> ActionPreview:
    """Return the preview of an action on those of ``rows`` that belong to ``scope``."""
    if scope.search is None:
        return _of_ids(rows, action, scope)
    return _of_search(rows, action, scope)


def expected(rows: QuerySet[Message], action: ConsoleAction, scope: Scope) -> Capped | None:
    """Count the messages that the action would change now; None when they could not be counted in time."""
    return _sum(_count(rows, scope, state, True) for state in action.effects if state in _states(scope))


def has_changed(then: int | None, now: Capped | None) -> bool:
    """Tell whether the number now differs by more than a tenth from the one that was shown."""
    return then is not None and now is not None and abs(now.count - then) * 10 > then


def _of_ids(rows: QuerySet[Message], action: ConsoleAction, scope: Scope) -> ActionPreview:
    found = list(rows.filter(pk__in=scope.ids).order_by("pk").values_list("pk", "topic", "state"))
    counts = Counter(state for _pk, _topic, state in found)
    forecast = [_forecast(action, state, Capped(counts[state])) for state in State if counts[state]]
    return ActionPreview(
        describe(scope),
        forecast,
        _sum(part.count for part in forecast if part.changes),
        len(scope.ids) - len(found),
        found[:MESSAGES_NAMED],
        _topics(found),
        max(0, len(found) - MESSAGES_NAMED),
    )


def _of_search(rows: QuerySet[Message], action: ConsoleAction, scope: Scope) -> ActionPreview:
    states = _states(scope)
    counts = {state: _count(rows, scope, state, state in action.effects) for state in State if state in states}
    forecast = [
        _forecast(action, state, count)
        for state, count in counts.items()
        if (state in action.effects if count is None else count.count)
    ]
    number = _sum(counts[state] for state in action.effects if state in counts)
    try:
        with statement_timeout(rows.db, CHANGED_TIMEOUT_MS):
            changing = rows.filter(scope.condition(), state__in=sorted(action.effects)).order_by()
            head = list(changing.values_list("pk", "topic", "state")[: TOPICS_SAMPLE + 1])
    except TooSlow:
        head = []
    more = max(0, number.count - MESSAGES_NAMED) if number is not None else 0
    return ActionPreview(
        describe(scope),
        forecast,
        number,
        rows=head[:MESSAGES_NAMED],
        topics=_topics(head[:TOPICS_SAMPLE]),
        more=more,
        partly=len(head) > TOPICS_SAMPLE,
    )


def _states(scope: Scope) -> frozenset[State]:
    return language.ALL_STATES if scope.search is None else language.parse(scope.search, now=timezone.now()).states


def _count(rows: QuerySet[Message], scope: Scope, state: State, changes: bool) -> Capped | None:
    matching = rows.filter(scope.condition() & language.of_states(frozenset({state})))
    try:
        with statement_timeout(rows.db, CHANGED_TIMEOUT_MS if changes else UNCHANGED_TIMEOUT_MS):
            count = matching.order_by().values("pk")[: COUNT_CAP + 1].count()
    except TooSlow:
        return None
    return Capped(min(count, COUNT_CAP), count > COUNT_CAP)


def _sum(counts: Iterable[Capped | None]) -> Capped | None:
    """Return the sum, or None when a part is unknown and the others together do not exceed the cap."""
    given = list(counts)
    known = [each for each in given if each is not None]
    total = sum(each.count for each in known)
    more = total > COUNT_CAP or any(each.more for each in known)
    return None if len(known) < len(given) and not more else Capped(min(total, COUNT_CAP), more)


def _forecast(action: ConsoleAction, state: State, count: Capped | None) -> Forecast:
    return Forecast(state, count, action.effects.get(state, action_table.UNCHANGED), state in action.effects)


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
