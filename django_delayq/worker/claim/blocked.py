"""Taken ids whose messages cannot begin here now: they are blocked or put back.

An id is blocked in Redis under a name: ``handler t`` when the topic ``t`` has no handler in the process that took it,
or no free slot there; the name of a limit when that is full. Redis has digests of these names (``blocked_names.py``).
No process takes the id before one that can serve the name unblocks it. So no id is taken again and again in vain, and
a worker that comes later serves what others blocked.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from django.db import Error as DatabaseError

from ...broker.base import IDS_PER_CALL, Broker, Entry
from ...broker.publisher import by_queue
from ...core import limits
from ...core.clock import from_tenths
from ...core.exceptions import BrokerUnavailable
from ...core.names import near
from ...core.states import State
from ...project import pulled, registry
from ...record import admission, crashes, overrides, reads
from ...record.sql import statements
from ...record.sql.rows import Claimed, Facts, Moved, Ticket
from ..shared.broker_switch import BrokerSwitch
from .blocked_names import HANDLER, digest, names_in_redis
from .known_limits import KnownLimits
from .wanted import Wanted

logger = logging.getLogger("django_delayq")


# By queue, or by the name under which they are blocked.
Tickets = dict[str, list[Ticket]]


def _no_tickets() -> Tickets:
    return defaultdict(list)


@dataclass(slots=True)
class Split:
    """The tickets of one take, split by what becomes of them."""

    # By queue: to be claimed.
    claimable: Tickets
    # The number of all tickets.
    total: int
    # The number of tickets whose messages have ended or run already: Redis need not keep their ids.
    gone: int = 0
    # By queue: those for which there is no room. They are put back where they were.
    left: Tickets = field(default_factory=_no_tickets)
    # By queue and name: to be blocked.
    blocked: defaultdict[str, Tickets] = field(default_factory=lambda: defaultdict(_no_tickets))
    # The topics of all messages that have a handler here.
    topics: list[str] = field(default_factory=list)
    # The names of the limits of the claimable messages, by id.
    limits: dict[int, Collection[str]] = field(default_factory=dict)

    def refuse(self, refused: Mapping[int, str]) -> None:
        """Take note that limits refuse messages: ``refused`` has the name of the limit by the id of the message."""
        for queue, some in self.claimable.items():
            for ticket in some:
                if ticket.id in refused:
                    self.blocked[queue][refused[ticket.id]].append(ticket)
            self.claimable[queue] = [ticket for ticket in some if ticket.id not in refused]


class Blocked:
    """The ids that this process took and cannot begin, and what it knows of blocked ones.

    ``split`` says which taken ids may be claimed. ``give_back`` blocks the others, or puts them back. ``unblock`` names
    blocked ids that may begin now: the next take makes them ready again. While the broker holds no ids, there are none
    to give back or to unblock.

    Used by the thread that makes the consumer's rounds.
    """

    def __init__(
        self, using: str, brokers: BrokerSwitch, wanted: Wanted, limits: KnownLimits, is_paused: Callable[[str], bool]
    ) -> None:
        self.using = using
        self.tuning = wanted.tuning
        self.brokers = brokers
        self.wanted = wanted
        self.limits = limits
        self.is_paused = is_paused
        self.claim_ahead = wanted.pool.claim_ahead
        # The broker of this round, and whether it holds ids: otherwise none are blocked, and none are given back.
        self._broker: Broker = brokers.database
        self.holds_ids = False
        # True when most ids of the last take could not begin here: the next one takes many, from both ends of a queue,
        # to get past them.
        self.are_most = False
        # The numbers of ids by queue and name in Redis, as far as this process knows.
        self._numbers: defaultdict[str, Counter[str]] = defaultdict(Counter)
        # What the names in Redis stand for: the topic by its digest, and the full limit by the whole name.
        self._topics: dict[str, str] = {}
        self._limits: dict[str, str] = {}
        self._look_at = 0.0
        # The topics without a handler here that the log has named.
        self._unknown: set[str] = set()

    def begin_round(self, broker: Broker) -> None:
        """Use this broker until the next round."""
        self._broker, self.holds_ids = broker, broker.holds_ids
        self.limits.begin_round(by_query=not self.holds_ids)
        if not self.holds_ids and time.monotonic() >= self._look_at:
            self._retry_limits()

    @property
    def earliest(self) -> float:
        """How many seconds before its due time a message may be claimed, by the record's clock."""
        longest = self.claim_ahead.longest if self.holds_ids else 0.0
        return longest + self.tuning.clock_tolerance if longest else 0.0

    def _retry_limits(self) -> None:
        """Find out which limits may have room again, and which were changed."""
        self._look_at = time.monotonic() + self.tuning.look_interval
        self.limits.ask_again(self.tuning.look_interval)
        if self.limits.closed or self.limits.overrides.in_force:
            # While nothing is claimed under these limits, no claim finds out that somebody changed them.
            overrides.read(self.using)
            self.limits.learn_overrides()
        closed = self.limits.closed
        self._limits = {
            name: limit for name, limit in self._limits.items() if limit in closed or not self.limits.room_under(limit)
        }

    # --- which may be claimed -----------------------------------------------------------------------------------------

    def ids_for(self, messages: int) -> int:
        """Return how many ids to take while this number of messages may be claimed."""
        return max(messages, self.tuning.looked_past) if messages and self.are_most else messages

    def split(self, tickets: Tickets) -> Split:
        """Split the tickets of a take; the most urgent ones get the room that there is.

        Where a process has one lane and no limits, the claim alone decides.
        """
        # Redis may still hold ids of a queue that has been declared as a pulled one since: they are dropped.
        tickets = {queue: tickets[queue] for queue in pulled.without(tickets)}
        total = sum(map(len, tickets.values()))
        if not self.limits.any_known and len(self.wanted.lanes) == 1 and not self.are_most:
            return Split(tickets, total)
        facts = statements(self.using).facts([ticket.id for some in tickets.values() for ticket in some])
        found = Split(defaultdict(list), total, gone=total)
        rooms = {lane: self.wanted.room(lane) for lane in self.wanted.lanes}
        full = {lane for lane, room in rooms.items() if room <= 0}
        messages = self.wanted.messages
        # By topic, queue and limit key: the names of the limits, and the first one that refused a message of this take.
        limits: dict[tuple[str, str, str | None], Collection[str]] = {}
        refused: dict[tuple[str, str, str | None], str] = {}
        for queue, ticket, row in _scheduled(tickets, facts):
            found.gone -= 1
            lane, kind = self.wanted.lane_of(row.topic), (row.topic, row.queue, row.limit_key)
            if lane is not None:
                found.topics.append(row.topic)
            if lane is None or lane in full:
                found.blocked[queue][HANDLER + row.topic].append(ticket)
                continue
            if kind not in limits:
                limits[kind] = admission.limits_of(*kind, self.using).keys() if self.limits.any_known else ()
            refused[kind] = name = refused.get(kind) or self.limits.refusing(limits[kind])
            if name:
                found.blocked[queue][name].append(ticket)
            elif rooms[lane] <= 0 or messages <= 0:
                found.left[queue].append(ticket)
            else:
                self.limits.try_under(limits[kind])
                found.claimable[queue].append(ticket)
                found.limits[row.id] = limits[kind]
                rooms[lane] -= 1
                messages -= 1
        return found

    # --- block, and put back ------------------------------------------------------------------------------------------

    def give_back(self, split: Split, claimed: Container[int]) -> bool:
        """Block the ids that were not claimed, or put them back. Return whether some are blocked now.

        The claimed messages run whatever happens here: a sweep finds ids that were lost.
        """
        number = 0
        if not self.holds_ids:
            self.are_most = False
            return False
        try:
            for queue, tickets in split.left.items():
                self._broker.put_back(queue, tickets)
            for queue, names in split.blocked.items():
                number += self._block(queue, names)
            for queue, tickets in split.claimable.items():
                refused = [ticket for ticket in tickets if ticket.id not in claimed]
                if refused:
                    number += self._return_refused(split, queue, refused)
        except BrokerUnavailable as error:
            self.brokers.report_failure(error)
        except DatabaseError as error:
            logger.warning(
                "Ids that were not claimed could not be put back into Redis; a sweep will find them: %s: %s",
                type(error).__name__,
                error,
            )
        self.are_most = 2 * (number + split.gone) >= split.total
        return number > 0

    def _block(self, queue: str, names: Tickets) -> int:
        """Block ids of a queue under the names of their reasons. Return how many."""
        if not names:
            return 0
        for name in names:
            if name.startswith(HANDLER):
                self._warn_unknown(name.removeprefix(HANDLER))
        named = {self._name_in_redis(name): tickets for name, tickets in names.items()}
        self._broker.block(queue, named)
        numbers = {name: len(tickets) for name, tickets in named.items()}
        self._numbers[queue].update(numbers)
        return sum(numbers.values())

    def _return_refused(self, split: Split, queue: str, tickets: Sequence[Ticket]) -> int:
        """Put ids that the claim refused where they belong, and drop those of finished and running messages.

        Return the number of those that are blocked now.
        """
        facts = statements(self.using).facts([ticket.id for ticket in tickets])
        if not facts:
            split.gone += len(tickets)
            return 0
        earliest = reads.now(self.using) + timedelta(seconds=self.earliest)
        known = registry.handlers()
        elsewhere: list[tuple[str, Entry]] = []
        unknown: Tickets = {}
        locked: list[Ticket] = []
        for ticket in tickets:
            row = facts.get(ticket.id)
            if row is None or row.state != State.SCHEDULED:
                split.gone += 1
            elif row.queue != queue or row.due_at > min(earliest, from_tenths(ticket.ready_tenths or 0)):
                elsewhere.append((row.queue, Entry.at(row.id, row.due_at, row.priority)))
            elif row.topic not in known:
                unknown.setdefault(HANDLER + row.topic, []).append(ticket)
            else:
                locked.append(ticket)
        for name, entries in by_queue(elsewhere).items():
            self._broker.put(name, entries)
        number = self._block(queue, unknown)
        if locked and self.is_paused(queue):
            self._broker.put_back(queue, locked)
        elif locked:
            self._broker.delay(queue, locked, self.tuning.reclaim_locked_after)
        return number

    def _warn_unknown(self, topic: str) -> None:
        """Log, once for each topic, that it has no handler here."""
        if topic not in self._unknown and registry.find(topic) is None:
            self._unknown.add(topic)
            self.claim_ahead.leave_to_others()
            like = near(topic, registry.handlers())
            hint = f". Did you mean {like}?" if like else ""
            logger.warning("No handler for topic %s here; its messages are left for another worker%s", topic, hint)

    def _name_in_redis(self, name: str) -> str:
        """Return the name in Redis of a reason for which ids are blocked now, and remember what it stands for."""
        found = names_in_redis(name)
        kind, what, _key = limits.parts(name)
        if kind != "queue":
            self._topics[digest(what)] = what
        if kind != "handler":
            self._limits.update(dict.fromkeys(found, name))
        return found[0]

    # --- unblock ------------------------------------------------------------------------------------------------------

    def look(self) -> bool:
        """Read the numbers of blocked ids, if it is time. Return whether it was."""
        if time.monotonic() < self._look_at:
            return False
        self._retry_limits()
        self._numbers = defaultdict(Counter, {queue: Counter(names) for queue, names in self._broker.blocked().items()})
        self._topics = {digest(topic): topic for topic in registry.handlers()} if self._numbers else {}
        return True

    @property
    def seconds_to_look(self) -> float:
        """The seconds until it is time to read the numbers of blocked ids."""
        return max(0.0, self._look_at - time.monotonic())

    @property
    def queues(self) -> list[str]:
        """The queues with blocked ids that this process can serve."""
        blocked = self._numbers.items() if self.holds_ids else ()
        return [queue for queue, names in blocked if any(map(self._servable, names))]

    def unblock(self, queue: str, room: int) -> dict[str, int]:
        """Return the names to unblock in a take of up to ``room`` ids, each with the number of its ids to make ready.

        Each name may use the whole room: the take then pops the best ids of all names, by priority and due time.
        """
        unblocked: dict[str, int] = {}
        if not self.holds_ids or room <= 0:
            return unblocked
        names = self._numbers[queue]
        for name, number in list(names.items()):
            if len(unblocked) == self.tuning.most_names:
                break
            some = min(self._servable(name), number, room)
            if some > 0:
                unblocked[name] = some
                names[name] -= some
                if not names[name]:
                    del names[name]
        return unblocked

    def _servable(self, name: str) -> int:
        """Return how many ids of a name in Redis this process could serve now."""
        # The limit is looked up first: of thousands of names most may be full, and the rest takes longer.
        room = self.limits.room_under(self._limits.get(name, name))
        if room <= 0:
            return 0
        kind, what, _key = limits.parts(name)
        if kind in ("h", "t"):
            return min(room, self.wanted.slots_for(self._topics.get(what, "")))
        # A name in clear is from a worker of version 0.9.0, or is the limit of a queue.
        return min(room, self.wanted.slots_for(what) if kind in ("handler", "topic") else IDS_PER_CALL)


def _scheduled(
    tickets: Mapping[str, Sequence[Ticket]], facts: Mapping[int, Facts]
) -> Iterator[tuple[str, Ticket, Facts]]:
    """Yield the tickets whose messages are scheduled, each with its queue and the facts of its row."""
    for queue, some in tickets.items():
        for ticket in some:
            row = facts.get(ticket.id)
            if row is not None and row.state == State.SCHEDULED:
                yield queue, ticket, row


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
