"""What a process knows of limits without room, so that it takes and tries no messages in vain."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from ...api.limiting import described
from ...broker.base import IDS_PER_CALL
from ...core.callables import nothing
from ...extensions import WorkerExtension
from ...record import admission, overrides
from ...record.admission import Admitted
from ...record.sql.rows import Claiming, Moved
from ...signals import MessageFacts
from .tuning import Tuning

logger = logging.getLogger("django_delayq")


class KnownLimits(WorkerExtension):
    """The limits that are full, the rates that are used up, and the permits that this process holds or has freed.

    The record decides which messages begin; this only saves work. As an extension it is told of each delivery that has
    ended, as soon as that is recorded, by any thread. The thread that makes the consumer's rounds does all the rest.
    ``_lock`` guards all changes but those of ``_opens_at``, which that thread alone uses.
    """

    def __init__(self, using: str, worker: str, tuning: Tuning) -> None:
        super().__init__(using, worker)
        self.tuning = tuning
        self.any_declared = admission.any_declared()
        # The overrides of limits by which this round goes.
        self.overrides = overrides.known(using)
        # Set before the threads start: called when a permit became free for which a message may wait.
        self.on_freed: Callable[[], None] = nothing
        self._lock = threading.Lock()
        # The limits of each delivery, by its id.
        self._held: dict[int, Collection[str]] = {}
        # The limits whose permits are taken, and when this was found (monotonic).
        self._full: dict[str, float] = {}
        # By limit: the number of permits that deliveries of this process freed, and for which no message was tried yet.
        self._freed: Counter[str] = Counter()
        # The rates that are used up, and when the next message may begin (monotonic).
        self._opens_at: dict[str, float] = {}
        # True from before a claim asks the limits until its answer is noted.
        self._is_asked = False
        self._by_query = False

    # --- what is known ------------------------------------------------------------------------------------------------

    def refusing(self, names: Collection[str]) -> str:
        """Return the first of these limits that is known to have no room; "" when a claim is worth a try."""
        return next((name for name in names if self.room_under(name) <= 0), "")

    @property
    def any_known(self) -> bool:
        """True when the code declares a limit, or somebody made one at run time."""
        return self.any_declared or bool(self.overrides.in_force)

    def room_under(self, name: str) -> int:
        """Return how many messages are worth a try under a limit."""
        if admission.is_paused(self.using, name):
            return 0
        if name in self._opens_at and self._opens_at[name] > time.monotonic():
            return 0
        return self._freed[name] if name in self._full and not self._by_query else IDS_PER_CALL

    @property
    def closed(self) -> Collection[str]:
        """The limits that are full, and the rates that are used up."""
        return self._full.keys() | self._opens_at.keys()

    @property
    def seconds_to_opening(self) -> float | None:
        """The seconds until a rate lets a message begin; None when no rate is known to be used up."""
        return max(0.0, min(self._opens_at.values()) - time.monotonic()) if self._opens_at else None

    # --- what a round does --------------------------------------------------------------------------------------------

    def begin_round(self, *, by_query: bool) -> None:
        """Forget the rates that let a message begin again.

        ``by_query``: a query finds the messages of this round, and leaves out those under full limits itself.
        """
        self._by_query = by_query
        self.learn_overrides()
        now = time.monotonic()
        self._opens_at = {name: at for name, at in self._opens_at.items() if at > now}

    def learn_overrides(self) -> None:
        """Go by the overrides that this process has read last."""
        before, self.overrides = self.overrides.in_force, overrides.known(self.using)
        if (now := self.overrides.in_force) == before:
            return
        for name, override in now.items():
            if before.get(name) != override:
                logger.info("The limit %s is overridden: %s", name, described(override))
        for name in before.keys() - now.keys():
            logger.info("The limit %s is overridden no more: the code decides", name)
        # A limit that was full before the change may have room now.
        self._opens_at.clear()
        with self._lock:
            self._full.clear()

    def ask_again(self, after: float) -> None:
        """Ask the record about the limits that were found full ``after`` seconds ago: others may have freed permits."""
        before = time.monotonic() - after
        old = [name for name, at in self._full.items() if at <= before]
        still = admission.closed(self.using) if old else {}
        with self._lock:
            for name in old:
                if name in still:
                    self._close(name, still[name])
                else:
                    del self._full[name]

    def try_under(self, names: Collection[str]) -> None:
        """Take note that a message under these limits is tried: it uses up a freed permit of each."""
        if not names:
            return
        with self._lock:
            for name in names:
                if self._freed[name] > 1:
                    self._freed[name] -= 1
                else:
                    self._freed.pop(name, None)

    def admit(self, asked: Claiming, limits: Mapping[int, Collection[str]], *, others_wait: bool) -> Admitted:
        """Claim as ``admission.admit`` does, and take note of the limits that refuse messages.

        ``others_wait``: some messages were left out for want of room. If a limit refuses a message then, the record is
        asked for all full limits at once: otherwise messages would be tried under each of thousands of full limits,
        until it refuses one.

        Deliveries may end while the record is asked, and its answer may still call their limits full. So each permit
        that becomes free is counted from before the question on. The answer is noted in one step: the limits that
        refused are full; a message that did not begin for another reason gives back the permits that it was tried for;
        and the counts of limits with room are forgotten. If a full limit then has a count, a permit of it became free
        meanwhile, and the next round begins at once.
        """
        with self._lock:
            self._is_asked = True
        admitted = admission.admit(self.using, asked, limits)
        refused = admitted.refused
        closed = {name: admitted.opens.get(name) for name in refused.values()}
        if closed and others_wait:
            closed |= admission.closed(self.using)
        begun = {row.id for row in admitted.claimed}
        left = {ticket.id for ticket in asked.tickets} - begun
        with self._lock:
            self._is_asked = False
            for name, opens_in in closed.items():
                self._close(name, opens_in)
            self._freed.update(name for pk in left for name in limits[pk] if name != refused.get(pk))
            self._freed = Counter({name: number for name, number in self._freed.items() if name in self._full})
            is_free = any(self._freed[name] for name in closed)
            self._held.update({row.id: limits[row.id] for row in admitted.claimed if limits[row.id]})
            while len(self._held) > self.tuning.most_remembered:
                del self._held[next(iter(self._held))]
        if is_free:
            self.on_freed()
        return admitted

    def _close(self, name: str, opens_in: float | None) -> None:
        """Take note that a limit is full: its permits are taken, or its rate opens ``opens_in`` seconds from now."""
        if opens_in is None:
            self._full[name] = time.monotonic()
        else:
            self._full.pop(name, None)
            self._opens_at[name] = time.monotonic() + opens_in

    # --- what has ended -----------------------------------------------------------------------------------------------

    def consumed(self, messages: Sequence[MessageFacts]) -> None:
        """Count the permits that became free."""
        self._free(message.id for message in messages)

    retried = consumed

    def ended(self, moves: Sequence[Moved]) -> None:
        """Count the permits that became free."""
        self._free(move.id for move in moves)

    def _free(self, ids: Iterable[int]) -> None:
        """Count the permits that these deliveries held as free, and wake the consumer if a message waits for one."""
        if not self._held:
            return
        with self._lock:
            names = [name for pk in ids for name in self._held.pop(pk, ())]
            self._freed.update(name for name in names if self._is_asked or name in self._full)
            is_waited_for = any(name in self._full for name in names)
        if is_waited_for:
            self.on_freed()
