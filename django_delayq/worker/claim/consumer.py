"""Takes ids that are due or fall due in a moment, claims their messages, and hands them to the pool."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain

from django.db import Error as DatabaseError
from django.db import connections as django_connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ...broker.base import Broker
from ...core import failpoints
from ...core.exceptions import BrokerUnavailable
from ...core.outages import Outage
from ...core.outcomes import Release
from ...core.worker_options import Options
from ...project import conf, registry
from ...record import transitions
from ...record.sql.rows import Claimed, Claiming, Ticket
from ...record.sql.sessions import is_waiting
from ...record.sql.troubles import Trouble, in_words, trouble
from ..run.delivery import Delivery
from ..run.reporting import report_moves
from ..shared import connections
from ..shared.broker_switch import BrokerSwitch
from ..shared.due_services import backoff
from .blocked import Blocked, OrphanedClaims, Split, Tickets
from .known_limits import KnownLimits
from .queues import Found, KnownPauses, QueueFinder, Queues
from .wake_ups import WakeUps
from .wanted import Wanted

logger = logging.getLogger("django_delayq")


def due_in(row: Claimed, until: float, took: float) -> float:
    """Return how many seconds after its claim was sent a message falls due.

    Redis said: after ``until`` seconds. The record's clock decides. The claim read it at an unknown moment of the
    ``took`` seconds for which it ran, which gives two bounds. Between them Redis is right; else the later bound counts.
    """
    if until <= 0 and row.due_at <= row.claimed_at:
        # Redis and the record agree that it was due already.
        return until
    left = (row.due_at - row.claimed_at).total_seconds()
    return until if left <= until <= left + took else left + took


class Consumer(threading.Thread):
    """Fills the pool, one per process. A take also makes due ids ready, so a process with a consumer needs no mover.

    The thread that makes the rounds (this one, or the main thread with ``--once``) owns all state; the main thread asks
    for ``beat``. ``stop`` may be called by any thread.
    """

    def __init__(
        self,
        options: Options,
        brokers: BrokerSwitch,
        wanted: Wanted,
        finder: QueueFinder,
        worker: str,
        limits: KnownLimits,
        on_idle: Callable[[], None] | None,
    ) -> None:
        """With ``on_idle`` the consumer ends as soon as nothing can begin, and calls it."""
        super().__init__(name="delayq-consumer", daemon=True)
        self.using = using = options.using
        self.tuning = wanted.tuning
        self.brokers = brokers
        self.wanted = wanted
        self.pool = pool = wanted.pool
        self.worker = worker
        self.budget = wanted.budget
        self.extensions = pool.recorder.extensions
        self.claim_ahead = pool.claim_ahead
        self.isolation = wanted.isolation
        self.orphaned_claims = OrphanedClaims(using, worker)
        self.limits = limits
        self.pauses = KnownPauses(using, finder)
        self.blocked = Blocked(using, brokers, wanted, limits, self.pauses.is_paused)
        weights = dict(zip(options.queues, options.weights, strict=True)) if options.weights else {}
        self.queues = Queues(finder, self.pauses, self.blocked, weights)
        # When the last round began, or last waited for an isolated message (monotonic); and the round's connection.
        self._beat = time.monotonic()
        self._connection: BaseDatabaseWrapper | None = None
        self._stopping = threading.Event()
        self.wake_ups = WakeUps(brokers, self.queues.listens, self._may_go_on, self._stopping, self.tuning)
        self._on_idle = on_idle
        # True when the consumer has ended because nothing can begin, or with an error of the database.
        self.is_done = False
        self.error: DatabaseError | None = None
        # True when the last round claimed nothing.
        self._found_nothing = False
        self._errors = 0
        # From an error of the database until the next claim, as the log says.
        self._outage = Outage()
        # True when the last round left ready ids, and the process has enough to do for a while.
        self._fills_later = False
        # Both are called when the consumer may go on.
        pool.recorder.sender.on_room = limits.on_freed = self.wake_ups.wake

    def stop(self) -> None:
        """End the thread after its present round."""
        self._stopping.set()
        self.wake_ups.wake()

    def run(self) -> None:
        """Make rounds until stopped; wait longer after each error in a row."""
        try:
            while not (self._stopping.is_set() or self.is_done):
                self._beat = time.monotonic()
                connections.before_task()
                self._connection = django_connections[self.using]
                try:
                    seconds = self._run_round_or_end()
                    wait = self.wake_ups.wait_for_room if self._fills_later else self.wake_ups.wait
                    self._errors = 0
                except DatabaseError as error:
                    seconds, wait = self._note_error(error), self.wake_ups.stand_back
                except Exception:
                    self._errors += 1
                    seconds, wait = backoff(self._errors, 5.0), self.wake_ups.stand_back
                    logger.exception("The consumer failed and is tried again in %.1f s", seconds)
                finally:
                    connections.after_task()
                if seconds > 0 and not self.is_done:
                    wait(seconds)
        finally:
            # Handlers may run for long after this. Meanwhile other processes get the wake-ups.
            self.wake_ups.stand_back(0.0)
            self.release()
            connections.close_all()
            if self._on_idle is not None:
                self._on_idle()

    def _run_round_or_end(self) -> float:
        """Make a round, and end with ``--once`` after two quiet ones: a limit may have been full in the first one."""
        if self._on_idle is None:
            return self.run_round()
        was_quiet = self._found_nothing and self._is_quiet
        seconds = self.run_round()
        self.is_done = was_quiet and self._is_quiet and self._found_nothing
        return min(seconds, self.tuning.last_wait)

    def _note_error(self, error: DatabaseError) -> float:
        """Tell of an error, and return how long to wait. With ``--once`` the process ends after some in a row."""
        connections.note_error(error)
        self._errors += 1
        if self._outage.is_news(error):
            logger.warning("The consumer claims nothing, and tries again: %s", in_words(error))
        is_last = self._on_idle is not None and self._errors >= self.tuning.last_tries
        if is_last and trouble(error) != Trouble.REFUSED:
            self.error, self.is_done = error, True
        return backoff(self._errors, 2.0)

    @property
    def beat(self) -> float:
        """When the consumer last showed life (monotonic). A database that does not answer does not count against it."""
        connection = self._connection
        return time.monotonic() if connection is not None and is_waiting(connection) else self._beat

    @property
    def _is_quiet(self) -> bool:
        """True when this process holds no message, and owes the record no outcome and receivers no signal."""
        recorder = self.pool.recorder
        return not self.pool.held() and recorder.flush(0.0) and not recorder.sender.waiting

    def release(self) -> None:
        """Release, at the end, the message that waits to run alone and the orphaned claims."""
        self.isolation.release(Release("shutdown"))
        with contextlib.suppress(DatabaseError):
            self._release_orphaned()

    def run_round(self) -> float:
        """Take from each queue in order while there is room. Return how many seconds to wait until the next round."""
        broker, began, self._fills_later = self.brokers.current(), time.monotonic(), False
        try:
            wait = self._round(broker)
        except BrokerUnavailable as error:
            self.brokers.report_failure(error)
            return 0.0
        if broker is not self.brokers.database:
            self.brokers.report_answer(began)
        return wait

    def _round(self, broker: Broker) -> float:
        """Make a round with this broker. Return how many seconds to wait until the next one."""
        self._release_orphaned()
        self._look_for_pauses(broker)
        self.isolation.run(self._beat_and_check_stop, self.wake_ups.pass_on, broker)
        if self._stopping.is_set():
            # A message may still run alone: no other one may begin beside it.
            return 0.0
        found = self._serve_queues(broker)
        self._found_nothing = not (found.claimed or found.goes_on)
        if found.goes_on:
            return 0.0
        self.wake_ups.note_round(claimed=found.claimed > 0, any_blocked=found.any_blocked)
        if found.any_blocked and self.blocked.look() and self.queues.with_blocked:
            return 0.0
        return self._wait_after(broker, found)

    def _look_for_pauses(self, broker: Broker) -> None:
        for queue in self.pauses.check():
            # Ids that fall due during a pause become ready, so that the best priority goes first afterwards.
            broker.promote(queue)

    def _serve_queues(self, broker: Broker) -> Found:
        """Take from each group of queues in order. A lower group gets no ids while a higher one has more than fit."""
        self.wanted.see()
        self.blocked.begin_round(broker)
        within = self.claim_ahead.reach(quick=self.wanted.are_quick)
        whole, is_full, calls = Found(), False, iter(range(self.tuning.catch_up))
        for queues in self.queues.in_order():
            room = 0 if is_full else self.blocked.ids_for(self.wanted.messages)
            found = self._serve(broker, queues, room, within)
            more = self._catch_up(broker, found, calls)
            found.goes_on = more and self.wanted.is_worth_filling and self.wanted.messages > 0
            whole.add(found)
            if self.blocked.are_most:
                # Most of the taken messages cannot run here: lower queues need not wait for them.
                continue
            if whole.goes_on and not self.queues.deferred:
                break
            is_full = is_full or found.has_filled(room)
        return whole

    def _wait_after(self, broker: Broker, found: Found) -> float:
        """Return the seconds until the next known change: a message falls due, a slot comes, a pause may have ended."""
        self.wanted.see()
        waits_for_room = found.leaves_some or self.isolation.is_waiting
        waits_for = (*(self.wanted.usual if waits_for_room else ()), *self.wanted.full)
        for lane in self.pool.lanes:
            lane.await_room(self.wake_ups.wake if lane in waits_for else None)
        # The next take begins this many seconds before the next due time; 0 where no id can be taken early.
        can_take = self.wanted.messages > 0 and self.blocked.holds_ids
        lead = self.claim_ahead.lead(quick=self.wanted.are_quick) if can_take else 0.0
        # Computed after the claims: the next message may have fallen due meanwhile.
        waits = [max(0.0, wait - lead) for wait in found.waits]
        wait = min([conf.get().POLL_INTERVAL if broker is self.brokers.database else self.tuning.idle_wait, *waits])
        fills_up = waits_for_room and self.wanted.is_worth_filling
        if self._may_go_on() and (fills_up or self.queues.with_blocked):
            # A slot or a permit became free between the take and the line above.
            return min(wait, 0.001)
        self._fills_later = found.leaves_some and self.wanted.can_fill_later
        others = [self.pauses.seconds_to_check, self.limits.seconds_to_opening]
        if found.any_blocked:
            others.append(self.blocked.seconds_to_look)
        if self.isolation.is_waiting:
            others.append(self.isolation.seconds_left)
        return min(wait, *(seconds for seconds in others if seconds is not None))

    def _release_orphaned(self) -> None:
        moved = self.orphaned_claims.release()
        if moved:
            report_moves(self.using, moved, self.extensions, self.pool.recorder.sender.send)

    def _catch_up(self, broker: Broker, found: Found, calls: Iterator[int]) -> bool:
        """Make further ids ready that fell due together, while the threads are at work.

        ``calls`` are those that are left to the round; none is made while another queue has ids and its turn comes
        next. Return whether a take found ids and left others.
        """
        more, take_turns = False, self.queues.finder.named is None and not self.pauses.known
        for queue, taken in found.taken.items():
            later = taken
            while later.behind and not (take_turns and later.other_due == 0) and next(calls, None) is not None:
                later = broker.promote(queue)
            more = more or (queue not in self.pauses.known and taken.left > 0 and bool(taken.tickets or taken.behind))
        return more

    def _serve(self, broker: Broker, queues: tuple[str, ...], room: int, within: float) -> Found:
        """Take ids, claim their messages, and hand these over; an id that is not claimed is blocked or put back."""
        tickets: Tickets = {}
        claimed: list[Claimed] = []
        try:
            with broker.exclusively():
                failpoints.reach("before_take")
                found = self.queues.find(broker, queues, room, within)
                tickets = found.tickets
                if not tickets:
                    return found
                split = self.blocked.split(tickets)
                asked = time.monotonic()
                if split.claimable:
                    claimed = self._claim_split(split)
                took = time.monotonic() - asked
        except DatabaseError:
            self.orphaned_claims.note_unanswered(ticket.id for some in tickets.values() for ticket in some)
            for queue, some in tickets.items():
                # Each further try would take more ids out of Redis.
                broker.delay(queue, some, self.tuning.retry_unclaimed_after)
            raise
        self.orphaned_claims.note_answered(claimed)
        if claimed and self._outage.end():
            logger.info("The consumer claims again")
        if not (claimed or split.blocked or self.blocked.holds_ids):
            self.pauses.look()
        self.extensions.claimed(claimed)
        mine = {row.id: row for row in claimed}
        self._hand_over(tickets, mine, asked, took)
        found.blocked = self.blocked.give_back(split, mine)
        # The ids that were put back for want of room are ready.
        found.left_out = found.left_out or bool(split.left)
        self._learn(found, split, claimed)
        return found

    def _claim_split(self, split: Split) -> list[Claimed]:
        """Claim the messages that may be claimed, as far as their limits allow. Return those that were claimed."""
        failpoints.reach("after_take")
        tickets = split.claimable
        if len(tickets) > 1 and self.queues.finder.named is None:
            # The process serves all queues, so one statement may claim messages of any.
            parts: list[tuple[str | None, list[Ticket]]] = [(None, [*chain.from_iterable(tickets.values())])]
        else:
            parts = [*tickets.items()]
        leases, ahead, known = self.wanted.leases, self.blocked.earliest, self.limits.overrides.last
        claimed: list[Claimed] = []
        for queue, some in parts:
            asked = Claiming(some, leases, self.worker, queue, ahead, known)
            if self.limits.any_known:
                admitted = self.limits.admit(asked, split.limits, others_wait=any(split.left.values()))
                split.refuse(admitted.refused)
                claimed += admitted.claimed
            else:
                claimed += transitions.claim_asked(self.using, asked)
        failpoints.reach("after_claim")
        return claimed

    def _hand_over(self, tickets: Tickets, mine: Mapping[int, Claimed], asked: float, took: float) -> None:
        """Give claimed messages to the pool and the isolation, in the order of their tickets."""
        if not mine:
            return
        handlers = registry.handlers()
        # An id may have been taken from two queues.
        until = {ticket.id: ticket.until for some in tickets.values() for ticket in some}
        extend = self.pool.recorder.extend
        deliveries = [
            Delivery(row, handlers[row.topic], self.using, asked, due_in(row, left, took), extend)
            for pk, left in until.items()
            if (row := mine.get(pk)) is not None
        ]
        suspects = [d for d in deliveries if self.isolation.is_suspect(d)]
        self.pool.submit([d for d in deliveries if d not in suspects] if suspects else deliveries)
        # Counted after they are held: a process without budget that holds nothing ends.
        self.budget.count(len(deliveries) - len(suspects))
        self.isolation.admit(suspects)

    def _learn(self, found: Found, split: Split, claimed: Sequence[Claimed]) -> None:
        """Adjust the next takes to the result of this one."""
        found.claimed = len(claimed)
        self.wanted.use(claimed)
        self.wanted.learn(split.topics)
        self.queues.learn(found, Counter(row.queue for row in claimed))

    def _may_go_on(self) -> bool:
        """True when the next round would take ids, or run the message that waits to run alone."""
        self.wanted.see()
        return not self.pool.is_busy if self.isolation.is_waiting else self.wanted.messages > 0

    def _beat_and_check_stop(self) -> bool:
        """Show that the consumer lives, and return whether it is to stop."""
        self._beat = time.monotonic()
        return self._stopping.is_set()
