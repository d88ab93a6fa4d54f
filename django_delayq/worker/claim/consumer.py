"""Takes ids that are due or will be in a moment, claims their messages, and hands these to the handler threads."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from itertools import chain
from typing import Protocol

from django.db import Error as DatabaseError

from ... import restore
from ...broker.base import Broker, DueQueues, Entry, Taken
from ...broker.publisher import by_queue
from ...core import failpoints
from ...core.clock import from_tenths
from ...core.exceptions import BrokerUnavailable
from ...core.outcomes import Release
from ...core.states import State
from ...extensions import WorkerExtensions
from ...models import Message
from ...project import registry
from ...record import transitions
from ...record.sql.rows import Claimed, Ticket
from ...record.sql.troubles import in_words
from ..parts import connections
from ..parts.broker_switch import BrokerSwitch
from ..parts.budget import Budget
from ..parts.delivery import Delivery
from ..parts.processlock import ProcessLock
from ..parts.queue_finder import QueueFinder
from ..parts.reporting import report_moves
from ..parts.service import backoff
from ..run.lane import Lane
from ..run.pool import Pool
from .known_pauses import KnownPauses
from .orphaned_claims import OrphanedClaims
from .quarantine import Quarantine
from .rooms import Offer, Rooms
from .shares import Shares
from .unknown_topics import LEFT_TO_OTHERS, UnknownTopics

logger = logging.getLogger("django_delayq")

# While no message is due, the consumer asks again after this time. A wake-up that was lost together with the process
# that got it is repeated earlier, by the mover of the process that has the duty. Seconds.
IDLE_WAIT = 10.0
# An id that another move has locked just now becomes ready again after this time. Seconds.
RECLAIM_LOCKED_AFTER = 0.25
# Ids that were taken when the database did not answer become ready again after this time. Seconds.
RETRY_UNCLAIMED_AFTER = 1.0
# A claim through Redis may be earlier than claiming ahead allows by this time, for what the clocks of Redis and the
# record still differ by. The message waits in the worker until it is due by the record's clock. Seconds.
CLOCK_TOLERANCE = 0.1
# The most calls to Redis by which a turn makes further ids ready, a thousand ids each.
CATCH_UP = 10
# A worker that names at most so many queues takes from one after another. One with more asks the index of queues first.
FEW_QUEUES = 3
# The index of queues counts the ids of the next queues until it has found so many, or as many as there is room for.
ENOUGH_IDS = 100
# A process that could not record outcomes for this long takes nothing: that work might have to be repeated. Seconds.
LONGEST_BEHIND = 5.0


class Claim(Protocol):
    """Claims messages as ``transitions.claim`` does; a gate does so within limits (``worker/claim/line_keeper.py``)."""

    def __call__(
        self,
        using: str,
        tickets: Sequence[Ticket],
        leases: dict[str, float],
        worker: str,
        *,
        queue: str | None = None,
        ahead: float = 0.0,
    ) -> list[Claimed]: ...


def due_in(row: Claimed, until: float, took: float) -> float:
    """Return how many seconds after its claim was sent a message falls due.

    Redis said: after ``until`` seconds. The record's clock decides, which was read at some moment of the ``took``
    seconds that the claim took. So Redis is believed within these bounds. Otherwise the later bound counts.
    """
    if until <= 0 and row.due_at <= row.claimed_at:
        # Both say that it was due already.
        return until
    left = (row.due_at - row.claimed_at).total_seconds()
    return until if left <= until <= left + took else left + took


@dataclass(slots=True)
class _Found:
    """What was taken from each queue, and what is known of the other queues."""

    taken: dict[str, Taken] = field(default_factory=dict)
    due: DueQueues = field(default_factory=DueQueues)
    # True when a queue had ids that are ready, and there was no room for them.
    left_out: bool = False

    @property
    def tickets(self) -> dict[str, list[Ticket]]:
        """The tickets of the queues that gave some."""
        return {queue: taken.tickets for queue, taken in self.taken.items() if taken.tickets}


class Consumer(threading.Thread):
    """Fills the pool, one per process. A take also makes due ids ready, so a process with a consumer needs no mover.

    The thread that makes the turns (this one, or the main thread with ``--once``) owns all state, with two exceptions:
    the lanes' threads clear ``_waits_for``, which at worst wakes the consumer needlessly, and the main thread reads
    ``beat``. ``stop`` and ``on_freed`` may be called by any thread.
    """

    def __init__(
        self,
        using: str,
        brokers: BrokerSwitch,
        pool: Pool,
        queues: QueueFinder,
        worker: str,
        budget: Budget,
        poll: float,
        extensions: WorkerExtensions,
        quarantine_lock: ProcessLock | None = None,
        stopping: threading.Event | None = None,
        claim: Claim | None = None,
        weights: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(name="delayq-consumer", daemon=True)
        self.using = using
        self.brokers = brokers
        self.pool = pool
        self.queues = queues
        self.worker = worker
        self.budget = budget
        self.poll = poll
        self.extensions = extensions
        self.quarantine = Quarantine(pool, worker, budget, quarantine_lock)
        self.pauses = KnownPauses(using, queues)
        self.orphaned_claims = OrphanedClaims(using, worker)
        self.unknown_topics = UnknownTopics(using, worker)
        self.claim_ahead = pool.claim_ahead
        self.rooms = Rooms(pool, registry.handlers)
        # None: the queues are served in strict order.
        self.shares = Shares(weights) if weights else None
        # When the last turn began, or a wait within it went on (monotonic).
        self.beat = time.monotonic()
        self._stopping = threading.Event() if stopping is None else stopping
        self._claim_within_limits = claim
        # Messages that are to run alone often come together: after one of them, take one message at a time.
        self._takes_one = False
        # The queue from which the last turn took last, when there was more than room for; "" otherwise.
        self._served_last = ""
        self._unknown: set[str] = set()
        self._errors = 0
        # True when ids were put back for other workers in this turn.
        self._leaves_to_others = False
        # The consumer can go on as soon as one of these lanes has room.
        self._waits_for: Sequence[Lane] = ()

    def on_freed(self) -> None:
        """Wake the consumer if it waits for room: a delivery has ended. Called by the lanes' threads."""
        if self._waits_for and any(lane.is_worth_filling for lane in self._waits_for):
            self._waits_for = ()
            self.brokers.wake()

    def stop(self) -> None:
        """End the thread after its present turn."""
        self._stopping.set()
        self.brokers.wake()

    def run(self) -> None:
        """Make turns until stopped; wait longer after each error in a row."""
        try:
            while not self._stopping.is_set():
                self.beat = time.monotonic()
                connections.before_task()
                try:
                    seconds, wait = self.turn(), self._wait
                    self._errors = 0
                except DatabaseError as error:
                    self._errors += 1
                    if self._errors == 1:
                        logger.warning(
                            "The consumer claims nothing, and tries again until it can: %s",
                            in_words(error),
                        )
                    seconds, wait = backoff(self._errors, 2.0), self._stand_back
                except Exception:
                    self._errors += 1
                    seconds, wait = backoff(self._errors, 5.0), self._stand_back
                    logger.exception("The consumer failed and is tried again in %.1f s", seconds)
                finally:
                    connections.after_task()
                if self._leaves_to_others:
                    self._wait_for_others()
                elif seconds > 0:
                    wait(seconds)
        finally:
            self.release()
            connections.close_all()

    def release(self) -> None:
        """Release, at the end, the message that waits to run alone and the orphaned claims."""
        self.quarantine.release(Release("shutdown"))
        with contextlib.suppress(DatabaseError):
            self._release_orphaned()

    def turn(self) -> float:
        """Take from each queue in order while there is room. Return how many seconds to wait until the next turn."""
        broker, began = self.brokers.current(), time.monotonic()
        try:
            wait = self._turn(broker)
        except BrokerUnavailable as error:
            self.brokers.report_failure(error)
            return 0.0
        if broker is not self.brokers.database:
            self.brokers.report_answer(began)
        return wait

    def _turn(self, broker: Broker) -> float:
        self._release_orphaned()
        self._check_pauses(broker)
        queues = self.pauses.served
        longest = self.poll if broker is self.brokers.database else IDLE_WAIT
        self.quarantine.run(lambda: self._pass_on_wake_ups(broker), self._beat_and_check_stop)
        if self._stopping.is_set():
            # A message may still run alone, and no other may begin beside it.
            return 0.0
        if self.shares is not None and queues:
            steps = [partial(self._take_shares, self.shares, broker, queues)]
        elif self.queues.named is not None and len(queues) <= FEW_QUEUES:
            # A thread that becomes free during this turn serves the highest queue first, in the next turn.
            steps = [partial(self._take, broker, queue) for queue in queues]
        else:
            steps = [partial(self._take_due, broker, queues)]
        waits: list[float | None] = []
        waits_for_room = is_full = False
        self.rooms.open()
        for take in steps:
            room = 0 if is_full else self.budget.grant(self._room)
            kept = 0
            try:
                deliveries, found = self._take_and_claim(broker, partial(take, room))
                kept = self._hand_over(deliveries)
            finally:
                self.budget.count(kept)
            if self.shares is not None:
                self.shares.learn(Counter(delivery.queue for delivery in deliveries))
            for queue, taken in found.taken.items():
                self._catch_up(broker, queue, taken)
                if queue in self.pauses:
                    continue
                if taken.left and (taken.tickets or taken.behind) and self.rooms.is_worth_filling and self._room:
                    # More ids are ready and there is room: begin the next turn at once. Lower queues wait.
                    return 0.0
                waits_for_room = waits_for_room or taken.left > 0
                is_full = is_full or (taken.left > 0 and len(taken.tickets) >= room)
                waits.append(taken.wait)
            waits_for_room = waits_for_room or found.left_out
            waits.append(found.due.wait)
        self.rooms.open()
        if self.quarantine.is_waiting:
            waits_for_room, longest = True, min(longest, self.quarantine.seconds_left)
        full = self.rooms.full
        if full and self.rooms.seconds_to_look:
            longest = min(longest, self.rooms.seconds_to_look)
        self._waits_for = (*self.rooms.usual, *full) if waits_for_room else full
        # Computed only now: during the claims the next message may have fallen due.
        lead = self._lead(broker)
        wait = min([longest, *(max(0.0, wait - lead) for wait in waits if wait is not None)])
        if waits_for_room and self.rooms.is_worth_filling and self._may_go_on:
            # A thread became free between the take and the line above.
            return min(wait, 0.001)
        return min(wait, self.pauses.seconds_to_check) if queues else self.pauses.seconds_to_check

    def _release_orphaned(self) -> None:
        moved = self.orphaned_claims.release()
        if moved:
            self.extensions.ended(moved)
            report_moves(self.using, moved)

    def _catch_up(self, broker: Broker, queue: str, taken: Taken) -> None:
        """Make further ids ready that fell due together, while the threads are at work."""
        for _ in range(CATCH_UP):
            if not taken.behind:
                return
            taken = broker.promote(queue)

    def _check_pauses(self, broker: Broker) -> None:
        for queue in self.pauses.check():
            # Ids that fall due during a pause become ready, so that the best priority goes first afterwards.
            broker.promote(queue)

    def _take(self, broker: Broker, queue: str, room: int) -> _Found:
        """Take from one queue."""
        return _Found({queue: broker.take(queue, room, self._reach)})

    def _take_shares(self, shares: Shares, broker: Broker, queues: Sequence[str], room: int) -> _Found:
        """Take from each queue as much as its weight allows."""
        return _Found(shares.take(queues, room, lambda queue, some: broker.take(queue, some, self._reach)))

    def _take_due(self, broker: Broker, queues: Sequence[str], room: int) -> _Found:
        """Take from the first queue, and then from those others that have ids which are due.

        While there is more than room for, the queues that no command line and no setting puts in order take turns.
        """
        within = self._reach
        found = _Found()
        if queues and not self._served_last:
            taken = broker.take(queues[0], room, within)
            found.taken[queues[0]] = taken
            room -= len(taken.tickets)
            if broker is self.brokers.database:
                # Where all queues are served, one may have its first message.
                others = self.queues.named is None or len(queues) > 1
            else:
                found.due = DueQueues(next_due=taken.other_due, at=taken.at)
                others = taken.other_due is not None and taken.other_due <= within
            if not others:
                return found
        named = self.queues.named is not None
        pauses = self.pauses.any_known
        found.due = due = broker.due_queues(
            queues if named else None,
            within,
            after=self._served_last,
            enough=None if named or pauses else max(room, ENOUGH_IDS),
        )
        rest = [queue for queue in due.queues if queue.name not in found.taken and queue.name not in self.pauses]
        self.queues.note([queue.name for queue in rest])
        found.taken |= broker.take_many(rest, room, within)
        found.left_out = due.more > 0 or any(queue.name not in found.taken for queue in rest)
        if not named:
            is_short = found.left_out or (len(due.queues) > 1 and any(taken.left for taken in found.taken.values()))
            self._served_last = [self._served_last, *found.tickets][-1] if is_short else ""
        return found

    def _take_and_claim(self, broker: Broker, take: Callable[[], _Found]) -> tuple[list[Delivery], _Found]:
        handlers = registry.handlers()
        found, offer = _Found(), self.rooms.offer()
        tickets: dict[str, list[Ticket]] = {}
        try:
            with broker.exclusively():
                failpoints.reach("before_take")
                found = take()
                tickets = found.tickets
                asked = time.monotonic()
                claimed = self._claim(broker, tickets, offer) if tickets else []
                answered = time.monotonic()
        except (DatabaseError, BrokerUnavailable):
            # A process that cannot reach the database may fail to reach Redis too, when it parks the ids.
            self.orphaned_claims.note_unanswered(ticket.id for some in tickets.values() for ticket in some)
            raise
        self.orphaned_claims.note_answered(claimed)
        self.extensions.claimed(claimed)
        mine = {row.id: row for row in claimed}
        # The topics of the ids for which there was no room.
        left_over: list[str] = []
        if broker.forgets_taken:
            for queue, some in tickets.items():
                rest = [ticket for ticket in some if ticket.id not in mine]
                if rest:
                    left_over += self._try_to_put_back(broker, queue, rest, offer)
        self.rooms.close(offer.full)
        self.rooms.learn([*[row.topic for row in claimed], *left_over])
        if left_over:
            self.rooms.note_put_back(claimed=bool(claimed))
        # In the order of the tickets. An id may have been taken from two queues.
        until = {ticket.id: ticket.until for some in tickets.values() for ticket in some}
        took = answered - asked
        return [
            Delivery(row, handlers[row.topic], self.using, asked, due_in(row, left, took))
            for pk, left in until.items()
            if (row := mine.get(pk)) is not None
        ], found

    def _try_to_put_back(self, broker: Broker, queue: str, tickets: Sequence[Ticket], offer: Offer) -> list[str]:
        """Put unclaimed ids back. Claimed messages must run, whatever happens here: a sweep finds what is left."""
        try:
            return self._put_back(broker, queue, tickets, offer)
        except BrokerUnavailable as error:
            self.brokers.report_failure(error)
        except DatabaseError as error:
            logger.warning(
                "%d ids could not be put back into Redis; a sweep will find them: %s: %s",
                len(tickets),
                type(error).__name__,
                error,
            )
        return []

    def _claim(self, broker: Broker, tickets: dict[str, list[Ticket]], offer: Offer) -> list[Claimed]:
        if len(tickets) > 1 and self.queues.named is None:
            # All queues are served, so one statement claims whatever queue each message is in.
            parts: list[tuple[str | None, list[Ticket]]] = [(None, [*chain.from_iterable(tickets.values())])]
        else:
            parts = [*tickets.items()]
        claimed: list[Claimed] = []
        try:
            failpoints.reach("after_take")
            for queue, some in parts:
                claim = partial(
                    self._claim_within_limits or transitions.claim, self.using, worker=self.worker, queue=queue
                )
                claimed += offer.claim(some, partial(claim, ahead=self._earliest(broker)))
            failpoints.reach("after_claim")
            return claimed
        except DatabaseError:
            # These ids were taken but not claimed. Without putting them back Redis would lose more ids with each try.
            for name, some in tickets.items():
                broker.park(name, some, RETRY_UNCLAIMED_AFTER)
            raise

    def _put_back(self, broker: Broker, queue: str, tickets: Sequence[Ticket], offer: Offer) -> list[str]:
        """Put unclaimed ids into the places where they belong, and drop ids of finished and running messages.

        Return the topics of those for which there was no room.
        """
        by_id = {ticket.id: ticket for ticket in tickets}
        known = registry.handlers()
        earliest: datetime | None = None
        early = False
        elsewhere: list[tuple[str, Entry]] = []
        unknown: list[tuple[Ticket, str]] = []
        locked: list[Ticket] = []
        left_over: list[tuple[Ticket, str]] = []
        rows = Message.objects.using(self.using).filter(pk__in=list(by_id))
        for message in rows.only("id", "state", "due_at", "priority", "topic", "queue"):
            ticket = by_id[message.pk]
            if earliest is None:
                earliest = transitions.now(self.using) + timedelta(seconds=self._earliest(broker))
            # The state is compared in Python: otherwise the database might read all scheduled messages to find these.
            if message.state != State.SCHEDULED:
                continue
            is_early = message.due_at > earliest
            early = early or is_early
            if is_early or message.queue != queue or message.due_at > from_tenths(ticket.ready_tenths or 0):
                elsewhere.append((message.queue, Entry.at(message.pk, message.due_at, message.priority)))
            elif message.topic not in known:
                unknown.append((ticket, message.topic))
                self._warn_unknown(message.topic)
            elif offer.is_full(message.topic):
                left_over.append((ticket, message.topic))
            else:
                locked.append(ticket)
        index = self.brokers.redis
        if early and index is not None and index is broker:
            # The clock of Redis was set, and no loader has noticed yet: the ids would be ready again at once.
            index.tick(restore.measure_skew(self.using, index))
        for name, entries in by_queue(elsewhere).items():
            broker.put(name, entries)
        if unknown:
            self._leaves_to_others |= self.unknown_topics.park(broker, queue, unknown)
        if left_over:
            broker.put_back(queue, [ticket for ticket, _topic in left_over])
        if locked and self.pauses.is_paused(queue):
            broker.put_back(queue, locked)
        elif locked:
            broker.park(queue, locked, RECLAIM_LOCKED_AFTER)
        if left_over:
            # Other processes may have room for them.
            broker.notify(self._listens)
        return [topic for _ticket, topic in left_over]

    def _warn_unknown(self, topic: str) -> None:
        if topic not in self._unknown:
            self._unknown.add(topic)
            self.claim_ahead.leave_to_others()
            logger.warning("No handler for topic %s here; its messages are left for another worker", topic)

    def _earliest(self, broker: Broker) -> float:
        """Return how many seconds before its due time a message may be claimed, by the record's clock."""
        longest = self.claim_ahead.longest if broker.claims_ahead else 0.0
        return longest + CLOCK_TOLERANCE if longest else 0.0

    def _lead(self, broker: Broker) -> float:
        """Return the seconds before the next due time at which to take: 0 where no id can be taken early."""
        can_take = self._room > 0 and self.budget.left and broker.claims_ahead
        return self.claim_ahead.lead(quick=self.rooms.are_quick) if can_take else 0.0

    @property
    def _reach(self) -> float:
        """Messages due within this many seconds are taken."""
        return self.claim_ahead.reach(quick=self.rooms.are_quick)

    @property
    def _room(self) -> int:
        """The number of messages that may be claimed now."""
        if self.quarantine.is_waiting or self.pool.recorder.behind > LONGEST_BEHIND or self.pool.page.replaced:
            return 0
        return min(1, self.rooms.limit) if self._takes_one else self.rooms.limit

    @property
    def _may_go_on(self) -> bool:
        """True when the next turn would take ids, or run the message that waits to run alone."""
        return not self.pool.is_busy if self.quarantine.is_waiting else self._room > 0 and self.budget.left

    def _hand_over(self, deliveries: Sequence[Delivery]) -> int:
        """Give deliveries to the pool and the quarantine. Return how many of them they kept."""
        suspects = [d for d in deliveries if self.quarantine.is_suspect(d)]
        self.pool.submit([d for d in deliveries if d not in suspects] if suspects else deliveries)
        admitted = self.quarantine.admit(suspects)
        if deliveries:
            self._takes_one = admitted
        return len(deliveries) - len(suspects) + admitted

    def _beat_and_check_stop(self) -> bool:
        """Show that the consumer lives, and return whether it is to stop."""
        self.beat = time.monotonic()
        return self._stopping.is_set()

    def _stand_back(self, seconds: float) -> None:
        """Wait, and leave wake-ups to other processes; only ``stop`` cuts this short."""
        try:
            self._pass_on_wake_ups(self.brokers.current())
        except BrokerUnavailable as error:
            self.brokers.report_failure(error)
        self._stopping.wait(seconds)

    def _wait_for_others(self) -> None:
        """Have another worker take, before the next turn, the ids that were put back for it."""
        self._leaves_to_others = False
        self._stand_back(LEFT_TO_OTHERS)

    def _pass_on_wake_ups(self, broker: Broker) -> None:
        """Leave wake-ups to other processes for a while. Repeat one for each queue: it may just have come here."""
        broker.stop_listening()
        broker.notify(self._listens)

    @property
    def _listens(self) -> tuple[str, ...] | None:
        """The queues whose wake-ups are for this process; None: those of all queues."""
        return None if self.queues.named is None else self.pauses.served

    def _wait(self, seconds: float) -> None:
        """Wait until ``seconds`` have passed or a message may be due."""
        broker = self.brokers.current()
        queues = self._listens
        if queues == ():
            self._stopping.wait(seconds)
            return
        try:
            notified = broker.listen(queues, seconds)
            if notified and not self._may_go_on:
                # The wake-up was meant for a process with room: pass it on, and do not take the next one either.
                broker.notify(queues)
                self._wait_for_room(seconds)
        except BrokerUnavailable as error:
            self.brokers.report_failure(error)

    def _wait_for_room(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._may_go_on and not self._stopping.is_set() and time.monotonic() < deadline:
            time.sleep(0.005)
