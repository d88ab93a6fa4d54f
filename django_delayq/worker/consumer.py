"""Takes what is due or will be in a moment, claims it in the record, and hands it to the threads."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence

from django.db import Error as DatabaseError

from .. import failpoints, registry, transitions
from ..broker.base import Broker, Entry, Taken
from ..clock import from_tenths
from ..exceptions import BrokerUnavailable
from ..extensions import WorkerExtensions
from ..models import Message
from ..outcomes import Release
from ..publisher import by_queue
from ..sql.rows import Claimed, Ticket
from ..states import State
from . import connections
from .broker_switch import Source
from .budget import Budget
from .claim_ahead import ClaimAhead
from .delivery import Delivery
from .known_pauses import KnownPauses
from .orphaned_claims import OrphanedClaims
from .pool import Pool
from .processlock import ProcessLock
from .quarantine import Quarantine
from .reaper import tell
from .service import backoff

logger = logging.getLogger("django_delayq")

# With nothing due known: look again after this time for each queue, in case a wake-up was lost. Seconds.
LOOK = 2.0
MOST_LOOK = 10.0
# An id that another move has locked just now is looked at again after this time. Seconds.
LOCKED = 0.25
# An id whose topic this process does not know is left for another, and looked at again after this time. Seconds.
UNKNOWN = 30.0
# Calls to Redis by which a turn makes more ready than it takes, a thousand ids each.
CATCH_UP = 10
# Ids that were taken when the database did not answer are looked at again after this time. Seconds.
AGAIN = 1.0
# A process that could not write outcomes down for so long takes nothing: it would all have to be done again. Seconds.
BEHIND = 5.0


class Consumer(threading.Thread):
    """One per process. On its way it also moves what falls due, so that such a process needs no mover."""

    def __init__(
        self,
        using: str,
        source: Source,
        pool: Pool,
        queues: Callable[[], tuple[str, ...]],
        worker: str,
        budget: Budget,
        poll: float,
        extensions: WorkerExtensions,
        quarantine_lock: ProcessLock | None = None,
        stopping: threading.Event | None = None,
    ) -> None:
        super().__init__(name="delayq-consumer", daemon=True)
        self.using = using
        self.source = source
        self.pool = pool
        self.queues = queues
        self.worker = worker
        self.budget = budget
        self.poll = poll
        self.extensions = extensions
        self.quarantine = Quarantine(pool, worker, budget, quarantine_lock)
        self.pauses = KnownPauses(using, queues)
        self.orphaned_claims = OrphanedClaims(using, worker)
        self.claim_ahead = ClaimAhead()
        self.beat = time.monotonic()
        self._stopping = threading.Event() if stopping is None else stopping
        # Where one is to run alone, there are likely more: take one at a time.
        self._careful = False
        self._unknown: set[str] = set()
        self._errors = 0
        # Whether there is something to do as soon as there is room.
        self._waiting = False

    def freed(self) -> None:
        """A thread has ended a delivery."""
        if self._waiting and self.pool.is_worth_filling:
            self._waiting = False
            self.source.wake()

    def stop(self) -> None:
        self._stopping.set()
        self.source.wake()

    def run(self) -> None:
        try:
            while not self._stopping.is_set():
                self.beat = time.monotonic()
                connections.before_task()
                try:
                    wait, rest = self.turn(), self._wait
                    self._errors = 0
                except DatabaseError as error:
                    self._errors += 1
                    if self._errors == 1:
                        logger.warning("The consumer waits for the database: %s: %s", type(error).__name__, error)
                    wait, rest = backoff(self._errors, 2.0), self._pause
                except Exception:
                    self._errors += 1
                    logger.exception("The consumer failed; it goes on")
                    wait, rest = backoff(self._errors, 5.0), self._pause
                finally:
                    connections.after_task()
                if wait > 0:
                    rest(wait)
        finally:
            self.give_back()
            connections.close_all()

    def give_back(self) -> None:
        """At the end: what waits to run alone, and what may have been claimed without anybody knowing."""
        self.quarantine.give_back(Release("shutdown"))
        with contextlib.suppress(DatabaseError):
            self._release_orphaned()

    def turn(self) -> float:
        """Take from each queue in turn as long as there is room; how long to wait until the next turn."""
        broker, began = self.source.current(), time.monotonic()
        try:
            wait = self._turn(broker)
        except BrokerUnavailable as error:
            self.source.failed(error)
            return 0.0
        if broker is not self.source.database:
            self.source.answered(began)
        return wait

    def _turn(self, broker: Broker) -> float:
        self._release_orphaned()
        self._look_at_pauses(broker)
        queues = self.pauses.served
        longest = min(LOOK * len(queues), MOST_LOOK) if broker is not self.source.database else self.poll
        self.quarantine.run(lambda: self._leave_wake_ups(broker), self._go_on_waiting)
        if self._stopping.is_set():
            # One may run alone still: nothing begins beside it.
            return 0.0
        looked: list[Taken] = []
        waiting = False
        for queue in queues:
            room = self.budget.reserve(self._room)
            kept = 0
            began = time.monotonic()
            try:
                deliveries, taken = self._take(broker, queue, room)
                kept = self._submit(deliveries)
            finally:
                self.budget.settle(room, kept)
            if deliveries:
                self.claim_ahead.learn(time.monotonic() - began)
            self._catch_up(broker, queue, taken)
            if queue in self.pauses:
                continue
            if taken.left and taken.tickets and self.pool.is_worth_filling and self._room:
                # More is ready and there is room: come back at once. Lower queues wait.
                return 0.0
            waiting = waiting or taken.left > 0
            looked.append(taken)
        if self.quarantine.waits:
            waiting, longest = True, min(longest, self.quarantine.patience)
        self._waiting = waiting
        # Only now: while what was taken was claimed, the next may have fallen due.
        lead = self._lead(broker)
        wait = min([longest, *(max(0.0, wait - lead) for taken in looked if (wait := taken.wait) is not None)])
        if waiting and self.pool.is_worth_filling and self._may_go_on:
            # A thread became free between the take and the line above.
            return min(wait, 0.001)
        return min(wait, self.pauses.wait) if queues else self.pauses.wait

    def _release_orphaned(self) -> None:
        moved = self.orphaned_claims.give_back()
        if moved:
            self.extensions.ended(moved)
            tell(self.using, moved)

    def _catch_up(self, broker: Broker, queue: str, taken: Taken) -> None:
        """Make ready what fell due together, while the threads are at work."""
        for _ in range(CATCH_UP):
            if not taken.behind:
                return
            taken = broker.promote(queue)

    def _look_at_pauses(self, broker: Broker) -> None:
        for queue in self.pauses.look():
            # What falls due meanwhile becomes ready: after the pause the best priority goes first.
            broker.promote(queue)

    def _take(self, broker: Broker, queue: str, room: int) -> tuple[list[Delivery], Taken]:
        handlers = registry.handlers()
        taken = Taken()
        try:
            with broker.exclusively():
                failpoints.reach("before_take")
                taken = broker.take(queue, room, self.claim_ahead.reach)
                asked = time.monotonic()
                claimed = self._claim(broker, queue, taken.tickets, handlers) if taken.tickets else []
        except (DatabaseError, BrokerUnavailable):
            # Who cannot reach the database may not reach Redis either, when the ids are parked.
            self.orphaned_claims.missed(ticket.id for ticket in taken.tickets)
            raise
        self.orphaned_claims.answered(claimed)
        if len(claimed) < len(taken.tickets) and broker.forgets_taken:
            mine = {row.id for row in claimed}
            rest = [ticket for ticket in taken.tickets if ticket.id not in mine]
            # What is claimed must be run whatever happens here; a sweep finds the rest.
            try:
                self._return(broker, queue, rest)
            except BrokerUnavailable as error:
                self.source.failed(error)
            except DatabaseError as error:
                logger.warning("%d ids are left to a sweep: %s: %s", len(rest), type(error).__name__, error)
        until = {ticket.id: ticket.until for ticket in taken.tickets}
        return [Delivery(row, handlers[row.topic], self.using, asked, until[row.id]) for row in claimed], taken

    def _claim(
        self, broker: Broker, queue: str, tickets: Sequence[Ticket], handlers: dict[str, registry.Handler]
    ) -> list[Claimed]:
        leases = {topic: handler.lease for topic, handler in handlers.items()}
        try:
            failpoints.reach("after_take")
            claimed = transitions.claim(self.using, tickets, leases, self.worker, queue=queue)
            failpoints.reach("after_claim")
            self.extensions.claimed(claimed)
            return claimed
        except DatabaseError:
            # Taken but not claimed: look at them again in a moment, or each try would cost Redis more of its ids.
            broker.park(queue, tickets, AGAIN)
            raise

    def _return(self, broker: Broker, queue: str, tickets: Sequence[Ticket]) -> None:
        """Ids that could not be claimed: finished and running ones are dropped, the others put where they belong."""
        by_id = {ticket.id: ticket for ticket in tickets}
        known = registry.handlers()
        elsewhere: list[tuple[str, Entry]] = []
        unknown: list[Ticket] = []
        locked: list[Ticket] = []
        rows = Message.objects.using(self.using).filter(pk__in=list(by_id))
        for message in rows.only("id", "state", "due_at", "priority", "topic", "queue"):
            ticket = by_id[message.pk]
            # Not asked of the database, which might read all that is scheduled to find these few.
            if message.state != State.SCHEDULED:
                continue
            if message.queue != queue or message.due_at > from_tenths(ticket.ready_tenths or 0):
                elsewhere.append((message.queue, Entry.at(message.pk, message.due_at, message.priority)))
            elif message.topic not in known:
                unknown.append(ticket)
                self._warn_unknown(message.topic)
            else:
                locked.append(ticket)
        for name, entries in by_queue(elsewhere).items():
            broker.put(name, entries)
        if unknown:
            broker.park(queue, unknown, UNKNOWN)
        if locked and self.pauses.learn(queue):
            broker.put_back(queue, locked)
        elif locked:
            broker.park(queue, locked, LOCKED)

    def _warn_unknown(self, topic: str) -> None:
        if topic not in self._unknown:
            self._unknown.add(topic)
            self.claim_ahead.leaves_to_others = True
            logger.warning("No handler for topic %s here; its messages are left for another worker", topic)

    def _lead(self, broker: Broker) -> float:
        """How long before the next due time to come back. Where nothing would be taken then, it would be a hot loop."""
        can_take = self._room > 0 and self.budget.left and broker.claims_ahead
        return self.claim_ahead.lead if can_take else 0.0

    @property
    def _room(self) -> int:
        """How many may be claimed now."""
        if self.quarantine.waits or self.pool.recorder.behind > BEHIND:
            return 0
        return min(1, self.pool.room) if self._careful else self.pool.room

    @property
    def _may_go_on(self) -> bool:
        return not self.pool.busy if self.quarantine.waits else self._room > 0 and self.budget.left

    def _submit(self, deliveries: Sequence[Delivery]) -> int:
        """Hand them to the threads, and let one wait that is to run alone; how many were not given back."""
        suspects = [d for d in deliveries if self.quarantine.concerns(d)]
        self.pool.submit([d for d in deliveries if not self.quarantine.concerns(d)])
        kept = self.quarantine.keep(suspects)
        if deliveries:
            self._careful = kept
        return len(deliveries) - len(suspects) + kept

    def _go_on_waiting(self) -> bool:
        self.beat = time.monotonic()
        return self._stopping.is_set()

    def _pause(self, seconds: float) -> None:
        """After an error nothing but the end cuts the wait short."""
        try:
            self._leave_wake_ups(self.source.current())
        except BrokerUnavailable as error:
            self.source.failed(error)
        self._stopping.wait(seconds)

    def _leave_wake_ups(self, broker: Broker) -> None:
        """To others, for a while; and one that may have come here in this moment too."""
        broker.stop_listening()
        for queue in self.pauses.served:
            broker.notify(queue)

    def _wait(self, seconds: float) -> None:
        broker = self.source.current()
        queues = self.pauses.served
        if not queues:
            self._stopping.wait(seconds)
            return
        try:
            notified = broker.listen(queues, seconds)
            if notified and not self._may_go_on:
                # The token was meant for somebody with room: pass it on, and do not take the next one either.
                for queue in queues:
                    broker.notify(queue)
                self._await_room(seconds)
        except BrokerUnavailable as error:
            self.source.failed(error)

    def _await_room(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._may_go_on and not self._stopping.is_set() and time.monotonic() < deadline:
            time.sleep(0.005)
