"""What a verb would do to messages, before it is done: by state, in words, with the first of them."""

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
from .action_table import Verb

if TYPE_CHECKING:
    from django.utils.functional import _StrPromise as Text
else:
    Text = str

# Messages that are named one by one.
SHOWN = 10
# Messages whose topics are counted.
LOOKED_AT = 1000
TOPICS = 5
# How long the database may count what changes in one state, and what does not. Milliseconds.
PATIENCE = 800
PATIENCE_FOR_THE_REST = 200


@dataclass(frozen=True, slots=True)
class Forecast:
    """What will become of the messages that are in one state now. ``count`` is None when nobody knows in time."""

    state: State
    count: Capped | None
    effect: Text
    changes: bool


@dataclass(slots=True)
class Preview:
    """What the confirmation page shows."""

    described: str
    forecast: list[Forecast]
    # Of those that will change; None: nobody knows in time.
    number: Capped | None
    missing: int = 0
    rows: list[tuple[int, str, str]] = field(default_factory=list)
    topics: list[tuple[str, int]] = field(default_factory=list)
    # The messages that are not named.
    more: int = 0
    # Whether there are others behind those whose topics were counted.
    partly: bool = False

    @property
    def changes(self) -> bool:
        """Whether there is anything to do."""
        return self.number is None or self.number.count > 0


def preview(rows: QuerySet[Message], verb: Verb, scope: Scope) -> Preview:
    """Look at the messages of ``scope`` among ``rows``."""
    if scope.search is None:
        return _of_ids(rows, verb, scope)
    return _of_search(rows, verb, scope)


def expected(rows: QuerySet[Message], verb: Verb, scope: Scope) -> Capped | None:
    """How many the verb would change now; None: nobody knows in time."""
    return _sum(_count(rows, scope, state, True) for state in verb.effects if state in _states(scope))


def has_changed(then: int | None, now: Capped | None) -> bool:
    """Whether it is by more than a tenth not what was shown."""
    return then is not None and now is not None and abs(now.count - then) * 10 > then


def _of_ids(rows: QuerySet[Message], verb: Verb, scope: Scope) -> Preview:
    found = list(rows.filter(pk__in=scope.ids).order_by("pk").values_list("pk", "topic", "state"))
    counts = Counter(state for _pk, _topic, state in found)
    forecast = [_forecast(verb, state, Capped(counts[state])) for state in State if counts[state]]
    return Preview(
        describe(scope),
        forecast,
        _sum(part.count for part in forecast if part.changes),
        len(scope.ids) - len(found),
        found[:SHOWN],
        _topics(found),
        max(0, len(found) - SHOWN),
    )


def _of_search(rows: QuerySet[Message], verb: Verb, scope: Scope) -> Preview:
    states = _states(scope)
    counts = {state: _count(rows, scope, state, state in verb.effects) for state in State if state in states}
    forecast = [
        _forecast(verb, state, count)
        for state, count in counts.items()
        if (state in verb.effects if count is None else count.count)
    ]
    number = _sum(counts[state] for state in verb.effects if state in counts)
    try:
        with statement_timeout(rows.db, PATIENCE):
            changing = rows.filter(scope.condition(), state__in=sorted(verb.effects)).order_by()
            head = list(changing.values_list("pk", "topic", "state")[: LOOKED_AT + 1])
    except TooSlow:
        head = []
    more = max(0, number.count - SHOWN) if number is not None else 0
    return Preview(
        describe(scope),
        forecast,
        number,
        rows=head[:SHOWN],
        topics=_topics(head[:LOOKED_AT]),
        more=more,
        partly=len(head) > LOOKED_AT,
    )


def _states(scope: Scope) -> frozenset[State]:
    return language.ALL_STATES if scope.search is None else language.parse(scope.search, now=timezone.now()).states


def _count(rows: QuerySet[Message], scope: Scope, state: State, changes: bool) -> Capped | None:
    matching = rows.filter(scope.condition() & language.of_states(frozenset({state})))
    try:
        with statement_timeout(rows.db, PATIENCE if changes else PATIENCE_FOR_THE_REST):
            count = matching.order_by().values("pk")[: COUNT_CAP + 1].count()
    except TooSlow:
        return None
    return Capped(min(count, COUNT_CAP), count > COUNT_CAP)


def _sum(counts: Iterable[Capped | None]) -> Capped | None:
    """The sum; what nobody knows does not matter when the rest is past the cap."""
    given = list(counts)
    known = [each for each in given if each is not None]
    total = sum(each.count for each in known)
    more = total > COUNT_CAP or any(each.more for each in known)
    return None if len(known) < len(given) and not more else Capped(min(total, COUNT_CAP), more)


def _forecast(verb: Verb, state: State, count: Capped | None) -> Forecast:
    return Forecast(state, count, verb.effects.get(state, action_table.UNCHANGED), state in verb.effects)


def _topics(rows: Iterable[tuple[int, str, str]]) -> list[tuple[str, int]]:
    return Counter(topic for _pk, topic, _state in rows).most_common(TOPICS)


def describe(scope: Scope) -> str:
    """The messages in words."""
    if scope.search is not None:
        return language.parse(scope.search, now=timezone.now()).described
    if len(scope.ids) == 1:
        return _("message #%(id)d") % {"id": scope.ids[0]}
    text = ngettext("%(count)s selected message", "%(count)s selected messages", len(scope.ids))
    return text % {"count": action_table.number(len(scope.ids))}
