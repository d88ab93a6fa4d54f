"""Lets messages begin as far as their limits allow, and says which limit keeps the others.

A claim decides in one transaction that holds the locks of its limits. What runs is counted by the rows of messages: no
count exists that could get lost. Nothing is written about a message that is refused: it stays *scheduled*.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

from django.db import DEFAULT_DB_ALIAS, connections

from ..core import failpoints
from ..core.bounds import OVERDUE_AFTER
from ..core.clock import NO_TIME, from_tenths
from ..core.limits import Limit, Usage, any_key, parts, queue_name, topic_name
from ..models.messages import Lease
from ..project import conf, pulled, registry
from . import overrides, reads, transitions
from .sql import limit_statements
from .sql.limited import Candidate, Count, Taking
from .sql.moves import writing
from .sql.rows import Claimed, Claiming, LeaseRenewal, Ticket, urgency

# The most limits that one statement reads to find those that are full.
LIMITS_READ = 100_000
# A limit counts as full until this time after it last was full: between the end of a delivery and the next claim it has
# a free permit for a moment. Otherwise a message that waits for the limit would count as overdue at such a moment.
LATELY = OVERDUE_AFTER


def any_declared() -> bool:
    """Return whether this process knows a limit, of a handler or of a queue."""
    return bool(conf.get().LIMITS) or any(handler.limit for handler in registry.handlers().values())


def any_known(using: str) -> bool:
    """Return whether this process knows a limit, from the code or from an override."""
    return bool(overrides.known(using).in_force) or any_declared()


def limits_of(topic: str, queue: str, key: str | None, using: str = DEFAULT_DB_ALIAS) -> dict[str, Limit]:
    """Return the limits under which a message stands, by their names."""
    handler = registry.find(topic)
    declared = None if handler is None else handler.limit, (conf.get().LIMITS or {}).get(queue)
    if declared == (None, None) and not overrides.known(using).in_force:
        # The usual case: it is asked of each message that waits for a thread.
        return {}
    names = topic_name(topic, key), queue_name(queue)
    found = ((name, overrides.over(using, name, limit)) for name, limit in zip(names, declared, strict=True))
    return {name: limit for name, limit in found if limit is not None}


def limit_of(using: str, name: str) -> Limit | None:
    """Return the limit of this name; None when there is none (any more). Raises ``KeyError`` for an unknown topic."""
    try:
        code = declared(name)
    except KeyError:
        if overrides.deciding(using, name) is None:
            raise
        code = None
    return overrides.over(using, name, code)


def declared(name: str) -> Limit | None:
    """Return the limit of this name as the code declares it. Raises ``KeyError`` for an unknown topic."""
    kind, what, _key = parts(name)
    if kind == "queue":
        return (conf.get().LIMITS or {}).get(what)
    if (handler := registry.find(what)) is None:
        raise KeyError(what)
    return handler.limit


def is_paused(using: str, name: str) -> bool:
    """Return whether somebody lets nothing begin under a limit, as far as this process knows."""
    override = overrides.deciding(using, name)
    return override is not None and override.is_pause


def full(using: str) -> set[str]:
    """Return the names of the limits that let no message begin now, as far as this process knows them."""
    return set(closed(using))


def closed(using: str) -> dict[str, float | None]:
    """Return the limits of ``full``, each with the seconds until its rate has a slot; None: its permits are taken."""
    full = {usage.name: usage.opens_in if usage.has_permits else None for usage in _used(using) if usage.is_full}
    return full | dict.fromkeys(_paused(using))


def full_lately(using: str) -> set[str]:
    """Return the names of the limits that are full, or were a moment ago: messages that are due wait for them.

    A due message that waits for none of these is overdue: no worker claims it, as when all workers have died. Expired
    leases do not count here; in ``full`` they do until the reaper ends them.
    """
    overrides.read_again(using)
    return {usage.name for usage in _used(using, LATELY) if usage.is_full}.union(_paused(using))


def _paused(using: str) -> Iterator[str]:
    """Yield the names of the limits under which somebody lets nothing begin."""
    for name, override in overrides.known(using).in_force.items():
        if override.is_pause:
            kind, what, key = parts(name)
            yield from (name, any_key(what)) if kind == "topic" and key is None else (name,)


def refusing(closed: Collection[str], topic: str, queue: str, key: str | None, using: str) -> str | None:
    """Return the first limit of ``closed`` under which a message stands; None: it stands under none of them."""
    if pulled.terms(queue) is not None:
        # No limit holds for a pulled queue.
        return None
    if any_key(topic) in closed:
        return topic_name(topic, None)
    return next((name for name in limits_of(topic, queue, key, using) if name in closed), None)


def _used(using: str, since: timedelta | None = None) -> Iterator[Usage]:
    """Yield the usage of those limits of which something is used up, or was ``since`` ago."""
    for name, count in limit_statements(using).used(LIMITS_READ, since).items() if any_known(using) else ():
        with suppress(KeyError):
            limit = limit_of(using, name)
            if limit is not None:
                yield _usage(name, limit, count, since or NO_TIME)


def _usage(name: str, limit: Limit, count: Count, since: timedelta = NO_TIME) -> Usage:
    return Usage(name, limit, count.now, count.running, count.full_at, since=since)


@dataclass(slots=True)
class Admitted:
    """The messages that an admission claimed, and those that limits refused."""

    claimed: list[Claimed] = field(default_factory=list)
    # The id of a message → the name of the limit that refuses it.
    refused: dict[int, str] = field(default_factory=dict)
    # The name of a limit whose rate refuses messages → the seconds until its next slot.
    opens: dict[str, float] = field(default_factory=dict)


def admit(using: str, asked: Claiming, limits: Mapping[int, Collection[str]]) -> Admitted:
    """Claim messages as ``transitions.claim`` does, as far as limits allow, and tell which limits refuse the others.

    ``limits`` are the names of the limits of each message that was scheduled a moment ago, by their ids. Messages
    without a limit are claimed first, and wait for nothing. A message that could not be claimed anyway is not refused:
    it is not due, for example, or paused, or locked by another move.
    """
    # A message whose limits are not known is left out: it was not scheduled a moment ago, and could be at the claim.
    tickets, admitted = [ticket for ticket in asked.tickets if ticket.id in limits], Admitted()
    if free := [ticket for ticket in tickets if not limits[ticket.id]]:
        admitted.claimed += transitions.claim_asked(using, asked._replace(tickets=free))
    if rest := [ticket for ticket in tickets if limits[ticket.id]]:
        names = {name for ticket in rest for name in limits[ticket.id]}
        _admit_limited(using, names, asked._replace(tickets=rest), admitted)
        order = {ticket.id: number for number, ticket in enumerate(tickets)}
        admitted.claimed.sort(key=lambda row: order[row.id])
    return admitted


def _admit_limited(using: str, names: Collection[str], asked: Claiming, admitted: Admitted) -> None:
    """Claim what the limits ``names`` allow, in one transaction that holds their locks. Adds to ``admitted``."""
    statements = limit_statements(using)
    tickets = {ticket.id: ticket for ticket in asked.tickets}
    # Without Redis one transaction makes several claims: one that took the locks of each in turn could wait for another
    # in a circle.
    makes_others = connections[using].in_atomic_block
    with writing(using):
        statements.lock(None if makes_others else names)
        counts, rows = statements.read_candidates(names, asked)
        of_kind = {kind: limits_of(*kind, using) for kind in {row.kind for row in rows}}
        limits = {row.id: of_kind[row.kind] for row in rows}
        # A message that was replaced meanwhile may stand under other limits, which are not locked. A message that is
        # due later than Redis said is not claimed, and must use up no rate.
        rows = [row for row in rows if limits[row.id].keys() <= counts.keys() and _is_due(row, tickets[row.id])]
        known = {name: limit for some in of_kind.values() for name, limit in some.items() if name in counts}
        usages = {name: _usage(name, limit, counts[name]) for name, limit in known.items()}
        chosen = _choose(rows, limits, usages, admitted)
        failpoints.reach("before_limited_claim")
        if chosen:
            rates = {name: usage.full_at for name, usage in usages.items() if usage.is_charged and usage.full_at}
            # Permits of ended deliveries are deleted once they outnumber the others: each claim reads all permits.
            with_dead_permits = [name for name, count in counts.items() if count.ended > count.running]
            asked = asked._replace(tickets=[tickets[pk] for pk in chosen])
            admitted.claimed += transitions.claim_asked(using, asked, Taking(limits, rates, with_dead_permits))


def _choose(
    rows: Sequence[Candidate],
    limits: Mapping[int, Collection[str]],
    usages: Mapping[str, Usage],
    admitted: Admitted,
) -> list[int]:
    """Return the ids of the messages that may begin, the most urgent ones first. Adds to ``usages`` and ``admitted``.

    ``limits`` has the names of the limits of each message.
    """
    chosen = []
    for row in sorted(rows, key=urgency):
        own = [usages[name] for name in limits[row.id]]
        refusing = next((usage for usage in own if not usage.admits(row.due_at)), None)
        if refusing is None:
            chosen.append(row.id)
            for usage in own:
                usage.begin(row.due_at)
            continue
        admitted.refused[row.id] = refusing.name
        if refusing.has_permits and refusing.opens_in:
            admitted.opens[refusing.name] = refusing.opens_in
    return chosen


def _is_due(row: Candidate, ticket: Ticket) -> bool:
    return ticket.ready_tenths is None or row.due_at <= from_tenths(ticket.ready_tenths)


def keep_permits(using: str, renewals: Iterable[LeaseRenewal]) -> None:
    """Keep the permits of deliveries that run on though an earlier one has ended their message.

    Those that have no permit, or whose lease was over, get none.
    """
    now = reads.now(using)
    for renewal in renewals:
        kept = Lease.objects.using(using).filter(message_id=renewal.id, delivery=-renewal.delivery, until__gte=now)
        kept.update(until=now + timedelta(seconds=renewal.lease))


def free_permits(using: str, message_id: int, delivery: int) -> None:
    """Free the permits that ``keep_permits`` has kept for a delivery, which has ended now."""
    Lease.objects.using(using).filter(message_id=message_id, delivery=-delivery).delete()


def tidy(using: str) -> None:
    """Delete permits that are free, and rates of which nothing was used up lately."""
    statements = limit_statements(using)
    with writing(using):
        statements.lock(None)
        statements.drop_permits()
        statements.drop_rates(LATELY)
