"""Lets messages begin as far as their limits allow: claims those that may, and moves the others to *limited* and back.

An admission decides and claims in one transaction that holds the locks of its limits. What runs is counted by the rows
of messages: no count exists that could get lost. A promotion only wakes up as many messages as may soon begin: each of
them is admitted like any other, so a promotion too many costs a move, and one too few is repeated by the next look at
the lines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from django.db import connections

from ..core import failpoints
from ..core.clock import ceil_tenth, from_tenths
from ..core.limits import KEPT_FOR, Limit, Line, LinePlace, queue_name, topic_name
from ..core.states import State
from ..project import conf, registry
from . import transitions
from .sql import limit_statements
from .sql.limited import Candidate, LimitStatements, Promoted, Refused, TakenPlace
from .sql.moves import writing
from .sql.rows import Claimed, Moved, Ticket

# One transaction locks and looks at this many limits at most.
LINES_TOGETHER = 100
# One transaction moves this many messages out of each line at most.
PROMOTED_TOGETHER = 500


def any_declared() -> bool:
    """Return whether this process knows a limit, of a handler or of a queue."""
    return bool(conf.get().LIMITS) or any(handler.limit for handler in registry.handlers().values())


def limits_of(topic: str, queue: str, key: str | None) -> dict[str, Limit]:
    """Return the limits under which a message stands, by their names."""
    found = {}
    handler = registry.find(topic)
    if handler is not None and handler.limit is not None:
        found[topic_name(topic, key)] = handler.limit
    of_queue = (conf.get().LIMITS or {}).get(queue)
    if of_queue is not None:
        found[queue_name(queue)] = of_queue
    return found


def declared(name: str) -> Limit | None:
    """Return the limit of this name; None when the code has it no more. Raises ``KeyError`` for an unknown topic."""
    kind, what = name.split(" ", 2)[:2]
    if kind == "queue":
        return (conf.get().LIMITS or {}).get(what)
    handler = registry.find(what)
    if handler is None:
        raise KeyError(what)
    return handler.limit


def _limits(row: Candidate) -> dict[str, Limit]:
    return limits_of(row.topic, row.queue, row.limit_key)


def _place(row: Candidate) -> LinePlace:
    return LinePlace(-row.priority, row.due_at, row.id)


@dataclass(slots=True)
class Admitted:
    """The messages that an admission claimed, and the limits whose lines may move up since."""

    claimed: list[Claimed] = field(default_factory=list)
    lines: set[str] = field(default_factory=set)


def claim(
    using: str,
    tickets: Sequence[Ticket],
    leases: dict[str, float],
    worker: str,
    *,
    queue: str | None = None,
    ahead: float = 0.0,
) -> Admitted:
    """Claim messages as ``transitions.claim`` does, as far as limits allow; the others become *limited*.

    Messages without a limit are claimed first, and wait for nothing.
    """
    ids = [ticket.id for ticket in tickets]
    # A message that is not scheduled yet could be when it is claimed, and nothing is known of its limits.
    found = {
        pk: limits_of(topic, name, key).keys()
        for pk, topic, name, key in limit_statements(using).topics_of(ids)
        if topic in leases
    }
    admitted = Admitted()
    free = [ticket for ticket in tickets if ticket.id in found and not found[ticket.id]]
    if free:
        admitted.claimed += transitions.claim(using, free, leases, worker, queue=queue, ahead=ahead)
    rest = [ticket for ticket in tickets if found.get(ticket.id)]
    if rest:
        names = {name for limits in found.values() for name in limits}
        _claim_limited(using, rest, names, leases, worker, queue, ahead, admitted)
        order = {pk: place for place, pk in enumerate(ids)}
        admitted.claimed.sort(key=lambda row: order[row.id])
    return admitted


def _claim_limited(
    using: str,
    tickets: Sequence[Ticket],
    names: Collection[str],
    leases: dict[str, float],
    worker: str,
    queue: str | None,
    ahead: float,
    admitted: Admitted,
) -> None:
    by_id = {ticket.id: ticket for ticket in tickets}
    statements = limit_statements(using)
    lines_to_promote: set[str] = set()
    # Without Redis one transaction makes several claims: one that took the locks of each in turn could wait for another
    # in a circle.
    makes_others = connections[using].in_atomic_block
    with writing(using):
        statements.lock(None if makes_others else names)
        rows = statements.claimable(list(by_id), leases, queue, ahead)
        # A message that was replaced meanwhile may stand under other limits, which are not locked. One that is due
        # later than Redis said is not claimed, and must use up no rate.
        rows = [row for row in rows if _limits(row).keys() <= {*names} and _is_due(row, by_id[row.id])]
        lines = _lines(statements, {name: limit for row in rows for name, limit in _limits(row).items()})
        chosen: list[Candidate] = []
        refused: list[Refused] = []
        for row in sorted(rows, key=_place):
            name, reason = _refusal(row, lines)
            if name:
                refused.append(Refused(row.id, State.SCHEDULED, name, reason))
                line = lines[name]
                if line.slot() is not None or line.limit.interval is not None:
                    lines_to_promote.add(name)
                continue
            chosen.append(row)
            for name in _limits(row):
                lines[name].begin(_place(row), is_kept=row.is_kept)
        failpoints.reach("before_limited_claim")
        claimed = transitions.claim(using, [by_id[row.id] for row in chosen], leases, worker, queue=queue, ahead=ahead)
        rates = {name: line.full_at for name, line in lines.items() if line.is_charged and line.full_at is not None}
        begun = {row.id for row in claimed}
        places = [
            TakenPlace(name, row.id, row.deliveries + 1) for row in chosen if row.id in begun for name in _limits(row)
        ]
        statements.write(places, rates)
        if refused:
            transitions.limit(using, refused, f"worker:{worker}")
    admitted.claimed += claimed
    admitted.lines |= lines_to_promote


def _is_due(row: Candidate, ticket: Ticket) -> bool:
    return ticket.ready_tenths is None or row.due_at <= from_tenths(ticket.ready_tenths)


def _refusal(row: Candidate, lines: dict[str, Line]) -> tuple[str, str]:
    """Return the limit that refuses a message, and why; two empty texts when it may begin."""
    for name in _limits(row):
        reason = lines[name].refusal(_place(row), is_kept=row.is_kept)
        if reason:
            return name, reason
    return "", ""


def _lines(statements: LimitStatements, limits: dict[str, Limit]) -> dict[str, Line]:
    """Return the lines of these limits as they are now."""
    if not limits:
        return {}
    counts = statements.counts(limits)
    lines = {}
    for name, limit in limits.items():
        count = counts[name]
        first = None if count.first is None else LinePlace(-count.first[0], count.first[1], count.first[2])
        lines[name] = Line(name, limit, count.now, count.running, count.kept, first, count.full_at)
    return lines


def lines_that_move(using: str, after: str, limit: int) -> tuple[set[str], set[str], str]:
    """Look at some lines after a name: return those that have room, those without a limit, and the last name.

    The last name is "" when there are no more. A line of a topic that is not known here belongs to other processes.
    """
    statements = limit_statements(using)
    names = statements.lines(after, limit)
    known = _known(names)
    lines = _lines(statements, {name: limit for name, limit in known.items() if limit is not None})
    with_room = {name for name, line in lines.items() if line.room(1)}
    return with_room, known.keys() - lines.keys(), names[-1] if len(names) == limit else ""


def promote(using: str, names: Collection[str], actor: str) -> tuple[list[Moved], set[str]]:
    """Move the first messages of lines to *scheduled*, as many as may begin soon.

    Returns them, and the lines to go on with. The limits that the code has no more let everybody go.
    """
    statements = limit_statements(using)
    with writing(using):
        statements.lock(names, hastily=True)
        known = _known(statements.drop_places(names))
    if not known:
        return [], set()
    # In a transaction of its own: the places that are written here may be under limits that it does not lock, and must
    # not wait for another promotion that has deleted them and waits for this one.
    moved: list[Moved] = []
    left: Counter[str | None] = Counter()
    with writing(using):
        statements.lock(known, hastily=True)
        lines = _lines(statements, {name: limit for name, limit in known.items() if limit is not None})
        rooms = {name: lines[name].room(PROMOTED_TOGETHER) if name in lines else PROMOTED_TOGETHER for name in known}
        full: set[str] = set()
        while rooms := {name: room for name, room in rooms.items() if room}:
            rows = statements.waiting(rooms, full)
            others = _promote_rows(using, rows, lines, actor, moved)
            left.update(row.limited_by for row in rows)
            # Messages that another limit refused have left their room to the next ones of the line. Those that it would
            # refuse too stay where they are: it may have room before the line gets to them.
            full |= {other for _name, other in others}
            rooms = {
                name: lines[name].room(PROMOTED_TOGETHER) if name in lines else rooms[name] for name, _other in others
            }
    return moved, {name for name, number in left.items() if name is not None and number >= PROMOTED_TOGETHER}


def _promote_rows(
    using: str,
    rows: Sequence[Candidate],
    lines: dict[str, Line],
    actor: str,
    moved: list[Moved],
) -> set[tuple[str, str]]:
    """Promote the first messages of lines; return the lines whose messages another limit refused, each with that one.

    Adds to ``moved`` and ``lines``.
    """
    statements = limit_statements(using)
    lines |= _lines(
        statements, {name: limit for row in rows for name, limit in _limits(row).items() if name not in lines}
    )
    promoted: list[Promoted] = []
    refused: list[Refused] = []
    places: list[TakenPlace] = []
    others: set[tuple[str, str]] = set()
    for row in sorted(rows, key=_place):
        own = [lines[name] for name in _limits(row)]
        full = next((line for line in own if line.slot() is None), None)
        if full is not None:
            if row.limited_by is not None and full.name != row.limited_by:
                reason = f"{full.name}: no place is free, while {row.limited_by} has one"
                refused.append(Refused(row.id, State.LIMITED, full.name, reason))
                others.add((row.limited_by, full.name))
            continue
        slots = [slot for line in own if (slot := line.slot()) is not None]
        due = ceil_tenth(max(slots) if slots else statements.now())
        reason = f"{row.limited_by} has room" if row.limited_by in _limits(row) else f"{row.limited_by} was removed"
        promoted.append(Promoted(row.id, due, reason))
        for line in own:
            line.keep()
            places.append(TakenPlace(line.name, row.id, row.deliveries + 1, due + KEPT_FOR))
    failpoints.reach("before_promotion")
    if promoted:
        statements.write(places, {})
        moved += transitions.promote(using, promoted, actor)
    if refused:
        transitions.limit(using, refused, actor)
    return others


def _known(names: Iterable[str]) -> dict[str, Limit | None]:
    """Return the limits of these names as the code has them (None: no more), without those of unknown topics."""
    known: dict[str, Limit | None] = {}
    for name in names:
        with suppress(KeyError):
            known[name] = declared(name)
    return known


def names_of(using: str, ids: Collection[int]) -> set[str]:
    """Return the limits under which these messages have places."""
    return limit_statements(using).names_of(ids)


def tidy(using: str) -> None:
    """Delete places that are free, and rates of which nothing is used up."""
    statements = limit_statements(using)
    with writing(using):
        statements.lock(None)
        statements.drop_all_places()
        statements.drop_rates()
