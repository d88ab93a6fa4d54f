"""What becomes of ids that were taken: they are sorted before a claim, and what it refused goes where it belongs.

A claim without an answer is undone.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from django.db import Error as DatabaseError

from ...broker.base import Broker, Entry
from ...broker.publisher import by_queue
from ...core.clock import from_tenths
from ...core.exceptions import BrokerUnavailable
from ...core.names import near
from ...core.states import State
from ...project import registry
from ...record import admission, crashes, transitions
from ...record.sql import statements
from ...record.sql.rows import Claimed, Facts, Moved, Ticket
from ..parts.broker_switch import BrokerSwitch
from ..run.pool import ClaimAhead, Lane
from .queues import KnownPauses
from .sidings import HANDLER, Sidings
from .wanted import Wanted

logger = logging.getLogger("django_delayq")

# An id that another move has locked just now becomes ready again after this time. Seconds.
RECLAIM_LOCKED_AFTER = 0.25
# A claim through Redis may be earlier than claiming ahead allows by this time, for what this process is wrong about the
# record's clock. The message waits in the worker until it is due by the record's clock. Seconds.
CLOCK_TOLERANCE = 0.1

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


class Unclaimed:
    """Used by the thread that makes the consumer's turns."""

    def __init__(
        self, using: str, brokers: BrokerSwitch, pauses: KnownPauses, sidings: Sidings, claim_ahead: ClaimAhead
    ) -> None:
        self.using = using
        self.brokers = brokers
        self.pauses = pauses
        self.sidings = sidings
        self.claim_ahead = claim_ahead
        self._unknown: set[str] = set()

    def earliest(self, broker: Broker) -> float:
        """Return how many seconds before its due time a message may be claimed, by the record's clock."""
        longest = self.claim_ahead.longest if broker.holds_ids else 0.0
        return longest + CLOCK_TOLERANCE if longest else 0.0

    def put_back(self, broker: Broker, found: Sorted, refused: Tickets) -> int:
        """Put ids back, and return how many of them stand aside now. Count in ``found`` those that nobody needs.

        Claimed messages must run, whatever happens here: a sweep finds what is left.
        """
        aside = 0
        if not broker.holds_ids:
            return aside
        try:
            for queue, tickets in found.left.items():
                broker.put_back(queue, tickets)
            for queue, names in found.aside.items():
                aside += self._set_aside(broker, queue, names)
            for queue, tickets in refused.items():
                aside += self._put_back(broker, found, queue, tickets)
        except BrokerUnavailable as error:
            self.brokers.report_failure(error)
        except DatabaseError as error:
            logger.warning(
                "Ids that were not claimed could not be put back into Redis; a sweep will find them: %s: %s",
                type(error).__name__,
                error,
            )
        return aside

    def _set_aside(self, broker: Broker, queue: str, names: Tickets) -> int:
        if not names:
            return 0
        for name in names:
            if name.startswith(HANDLER):
                self._warn_unknown(name.removeprefix(HANDLER))
        broker.stand_aside(queue, names)
        numbers = {name: len(tickets) for name, tickets in names.items()}
        self.sidings.note(queue, numbers)
        return sum(numbers.values())

    def _put_back(self, broker: Broker, found: Sorted, queue: str, tickets: Sequence[Ticket]) -> int:
        """Put ids that the claim refused where they belong, and drop those of finished and running messages.

        Return how many stand aside.
        """
        facts = statements(self.using).facts([ticket.id for ticket in tickets])
        if not facts:
            found.gone += len(tickets)
            return 0
        earliest = transitions.now(self.using) + timedelta(seconds=self.earliest(broker))
        known = registry.handlers()
        elsewhere: list[tuple[str, Entry]] = []
        unknown: Tickets = {}
        locked: list[Ticket] = []
        for ticket in tickets:
            row = facts.get(ticket.id)
            if row is None or row.state != State.SCHEDULED:
                found.gone += 1
            elif row.queue != queue or row.due_at > min(earliest, from_tenths(ticket.ready_tenths or 0)):
                elsewhere.append((row.queue, Entry.at(row.id, row.due_at, row.priority)))
            elif row.topic not in known:
                unknown.setdefault(HANDLER + row.topic, []).append(ticket)
            else:
                locked.append(ticket)
        for name, entries in by_queue(elsewhere).items():
            broker.put(name, entries)
        aside = self._set_aside(broker, queue, unknown)
        if locked and self.pauses.is_paused(queue):
            broker.put_back(queue, locked)
        elif locked:
            broker.park(queue, locked, RECLAIM_LOCKED_AFTER)
        return aside

    def _warn_unknown(self, topic: str) -> None:
        if topic not in self._unknown and registry.find(topic) is None:
            self._unknown.add(topic)
            self.claim_ahead.leave_to_others()
            like = near(topic, registry.handlers())
            hint = f". Did you mean {like}?" if like else ""
            logger.warning("No handler for topic %s here; its messages are left for another worker%s", topic, hint)


class OrphanedClaims:
    """Releases messages that this process claimed without learning of it: otherwise their leases would have to run out.

    One thread claims, one claim at a time (it alone uses this object). So a claim that is newer than every claim whose
    answer came is an orphan.
    """

    def __init__(self, using: str, worker: str) -> None:
        self.using = using
        self.worker = worker
        self._ids: set[int] = set()
        # The time of the newest claim whose answer came, by the record's clock.
        self._newest: datetime | None = None

    def note_answered(self, claimed: Sequence[Claimed]) -> None:
        """Take note of a claim whose answer came."""
        if claimed:
            # The clock of the database may be set back.
            newest = max([row.claimed_at for row in claimed])
            self._newest = newest if self._newest is None else max(newest, self._newest)

    def note_unanswered(self, ids: Iterable[int]) -> None:
        """Take note of ids that the database was asked to claim, without an answer."""
        self._ids.update(ids)

    def release(self) -> list[Moved]:
        """Release the noted ids that turn out to be claimed, and return their moves.

        Call this before the next claim: messages that it claims could be among them otherwise.
        """
        if not self._ids:
            return []
        moved = crashes.release_orphaned(
            self.using,
            self._ids,
            self.worker,
            since=self._newest,
            actor=f"worker:{self.worker}",
        )
        self._ids.clear()
        return moved
