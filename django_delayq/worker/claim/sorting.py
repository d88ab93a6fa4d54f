"""Sorts ids before a claim: which messages may begin here now, and what is to become of the other ids."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ...core.states import State
from ...record import admission
from ...record.sql import statements
from ...record.sql.rows import Facts, Ticket
from ..run.pool import Lane
from .sidings import HANDLER, Sidings
from .wanted import Wanted

Tickets = dict[str, list[Ticket]]


@dataclass(slots=True)
class Sorted:
    """Tickets by what is to become of them."""

    # By queue: to be claimed.
    claimable: Tickets = field(default_factory=lambda: defaultdict(list))
    # By queue: there was room for others only. They belong into their former places.
    left: Tickets = field(default_factory=lambda: defaultdict(list))
    # By queue and name: to stand aside.
    aside: defaultdict[str, Tickets] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    # The number of those whose messages have ended or run: nobody needs their ids any more.
    gone: int = 0
    # The topics of all that this process has a handler for.
    topics: list[str] = field(default_factory=list)
    # The names of the limits of the claimable messages, by id.
    limits: dict[int, Collection[str]] = field(default_factory=dict)


@dataclass(slots=True)
class Kind:
    """Messages of one topic, queue and limit key: thousands of them may be taken together."""

    # None: no handler of this process receives them.
    lane: Lane | None
    # The names of their limits.
    limits: Collection[str]
    # The name under which they stand aside, from the first one on that has to.
    siding: str = ""


class Sorter:
    """Sorts by topic and limit. A process with one lane and without limits rarely does: its claim says it all."""

    def __init__(self, using: str, wanted: Wanted, sidings: Sidings) -> None:
        self.using = using
        self.wanted = wanted
        self.sidings = sidings
        self.knows_limits = admission.any_declared()

    def sort(self, tickets: Tickets) -> Sorted:
        """Sort tickets by queue; the most urgent ones get what room there is."""
        if not self.knows_limits and len(self.wanted.lanes) == 1 and not self.wanted.looks_past:
            return Sorted(claimable=tickets)
        facts = statements(self.using).facts([ticket.id for some in tickets.values() for ticket in some])
        found = Sorted(gone=sum(map(len, tickets.values())))
        rooms = {lane: self.wanted.room(lane) for lane in self.wanted.lanes}
        full = {lane for lane, room in rooms.items() if room <= 0}
        messages = self.wanted.messages
        kinds: dict[tuple[str, str, str | None], Kind] = {}
        for queue, ticket, row in _scheduled(tickets, facts):
            found.gone -= 1
            key = (row.topic, row.queue, row.limit_key)
            kind = kinds.get(key)
            if kind is None:
                kind = kinds[key] = self._kind(*key, full)
            if kind.lane is not None:
                found.topics.append(row.topic)
            if not kind.siding:
                kind.siding = self.sidings.refusing(kind.limits)
            if kind.siding:
                found.aside[queue][kind.siding].append(ticket)
            elif kind.lane is None or rooms[kind.lane] <= 0 or messages <= 0:
                found.left[queue].append(ticket)
            else:
                self.sidings.use_up(kind.limits)
                found.claimable[queue].append(ticket)
                rooms[kind.lane] -= 1
                messages -= 1
                found.limits[row.id] = kind.limits
        return found

    def _kind(self, topic: str, queue: str, limit_key: str | None, full: set[Lane]) -> Kind:
        lane = self.wanted.lane_of(topic)
        limits = admission.limits_of(topic, queue, limit_key).keys() if self.knows_limits else ()
        return Kind(lane, limits, HANDLER + topic if lane is None or lane in full else "")


def _scheduled(
    tickets: Mapping[str, Sequence[Ticket]], facts: Mapping[int, Facts]
) -> Iterator[tuple[str, Ticket, Facts]]:
    for queue, some in tickets.items():
        for ticket in some:
            row = facts.get(ticket.id)
            if row is not None and row.state == State.SCHEDULED:
                yield queue, ticket, row
