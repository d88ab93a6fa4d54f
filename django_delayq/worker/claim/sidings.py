"""Sidings: where ids stand aside in Redis whose messages no process could begin, and who takes them from there.

An id stands aside under a name: ``handler t`` when the topic ``t`` has no handler in the process that took it, or no
place free for one; the name of a limit when that is full. Nobody takes it before a process opens the name, because it
can serve it. So no id is taken again and again in vain, and a worker that comes later serves what others set aside.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence

from ...broker.base import IDS_PER_CALL, Broker
from ...core import limits
from ...extensions import WorkerExtension
from ...record import admission
from ...record.sql.rows import Moved
from ...signals import MessageFacts

# Ids of topics stand aside under this word and their topic.
HANDLER = "handler "
# A process that knows of ids which stand aside reads their names this often. Then it also tries limits again that
# refused a message so long ago, for places that other processes made free. Seconds.
LOOK_INTERVAL = 1.0
# The names that one take opens at most.
MOST_NAMES = 200
# The deliveries of which a process remembers the limits. One whose lease was lost is never told to have ended.
MOST_REMEMBERED = 10_000


class FreedPlaces(WorkerExtension):
    """The places under limits that this process has taken, and those that its deliveries have made free again.

    Exists only in a process that knows a limit. The consumer's thread notes what it has claimed; any thread tells what
    has ended, when that is recorded. ``_lock`` guards all. Nothing is decided by it: the record counts what runs.
    """

    def __init__(self, using: str, worker: str, wake: Callable[[], None]) -> None:
        """``wake`` is called when a place became free for which a message may wait."""
        super().__init__(using, worker)
        self._wake = wake
        self._lock = threading.Lock()
        self._held: dict[int, Collection[str]] = {}
        self._freed: Counter[str] = Counter()
        # The names of the limits that are full as far as this process knows.
        self.waited_for: Container[str] = ()
        # True while a claim asks limits. It may refuse what becomes free a moment later.
        self._is_asked = False

    def hold(self, names: Mapping[int, Collection[str]]) -> None:
        """Take note of the limits under which messages begin, by their ids."""
        with self._lock:
            self._held.update(names)
            while len(self._held) > MOST_REMEMBERED:
                del self._held[next(iter(self._held))]

    def ask(self) -> None:
        """Take note that a claim asks limits."""
        with self._lock:
            self._is_asked = True

    def answer(self, full: Collection[str]) -> None:
        """Take note of the limits that are full by the answer; go on at once if a place became free there meanwhile."""
        with self._lock:
            self._is_asked = False
            self._freed = Counter({name: freed for name, freed in self._freed.items() if name in self.waited_for})
            is_free = any(self._freed[name] for name in full)
        if is_free:
            self._wake()

    def under(self, name: str) -> int:
        """Return how many places under a limit became free and were not used up."""
        return self._freed[name]

    def use_up(self, names: Collection[str]) -> None:
        """Take note that a message under these limits is tried."""
        with self._lock:
            for name in names:
                if self._freed[name] > 1:
                    self._freed[name] -= 1
                else:
                    self._freed.pop(name, None)

    def hand_back(self, names: Iterable[str]) -> None:
        """Take note that messages were tried under these limits, and did not begin for another reason."""
        with self._lock:
            self._freed.update(name for name in names if name in self.waited_for)

    def consumed(self, messages: Sequence[MessageFacts]) -> None:
        """Note the places that became free."""
        self._free(message.id for message in messages)

    retried = consumed

    def ended(self, moves: Sequence[Moved]) -> None:
        """Note the places that became free."""
        self._free(move.id for move in moves)

    def _free(self, ids: Iterable[int]) -> None:
        with self._lock:
            names = [name for pk in ids for name in self._held.pop(pk, ())]
            self._freed.update(name for name in names if self._is_asked or name in self.waited_for)
            is_waited_for = any(name in self.waited_for for name in names)
        if is_waited_for:
            self._wake()


class Sidings:
    """What this process knows of ids that stand aside.

    Used by the thread that makes the consumer's turns. ``_full`` stays one object: other threads look into it
    (``FreedPlaces``).
    """

    def __init__(self, using: str, places_for: Callable[[str], int], freed: FreedPlaces | None) -> None:
        """``places_for`` returns how many messages of a topic may begin in this process now."""
        self.using = using
        self._places_for = places_for
        # The numbers of ids by queue and name, as far as this process knows.
        self._aside: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._look_at = 0.0
        self._sets_aside = True
        # The limits that are full, and when they were found to be; and the rates, and when their next slots come.
        self._full: dict[str, float] = {}
        self._slots: dict[str, float] = {}
        # None: this process knows no limit.
        self._freed = freed
        if freed is not None:
            freed.waited_for = self._full

    # --- limits -------------------------------------------------------------------------------------------------------

    def close(self, name: str, slot_in: float | None = None) -> None:
        """Take note that a limit is full; ``slot_in`` is in how many seconds its rate has a slot, if it has places."""
        if slot_in is None:
            self._full[name] = time.monotonic()
        else:
            self._full.pop(name, None)
            self._slots[name] = time.monotonic() + slot_in

    def refusing(self, names: Collection[str]) -> str:
        """Return the first of these limits that is known to have no room; "" when a claim is worth a try."""
        return next((name for name in names if self._room_under(name) <= 0), "")

    def use_up(self, names: Collection[str]) -> None:
        """Take note that a message under these limits is tried: of each, a place that became free is used up."""
        if self._freed is not None:
            self._freed.use_up(names)

    def see(self, *, sets_aside: bool) -> None:
        """Begin a turn: try the rates again whose slots have come.

        ``sets_aside``: ids stand aside. Without Redis none do, and the query leaves out what is full.
        """
        now = time.monotonic()
        self._slots = {name: at for name, at in self._slots.items() if at > now}
        self._sets_aside = sets_aside
        if not sets_aside and now >= self._look_at:
            self._look_at = now + LOOK_INTERVAL
            self._retry(now)

    @property
    def seconds_to_slot(self) -> float | None:
        """The seconds until a rate has a slot for ids that stand aside; None when no rate is known to be used up."""
        return max(0.0, min(self._slots.values()) - time.monotonic()) if self._slots else None

    def _room_under(self, name: str) -> int:
        if name in self._slots and self._slots[name] > time.monotonic():
            return 0
        if name in self._full and self._sets_aside:
            return 0 if self._freed is None else self._freed.under(name)
        return IDS_PER_CALL

    def _retry(self, now: float) -> None:
        """Ask the record about the limits that have been full for long: other processes may have freed places."""
        old = [name for name, at in self._full.items() if at + LOOK_INTERVAL <= now]
        closed = admission.closed(self.using) if old else {}
        for name in old:
            if name in closed:
                self.close(name, closed[name])
            else:
                del self._full[name]

    # --- ids ----------------------------------------------------------------------------------------------------------

    def note(self, queue: str, numbers: Mapping[str, int]) -> None:
        """Take note of ids that this process has set aside: their numbers by name."""
        self._aside[queue].update(numbers)

    def look(self, broker: Broker) -> bool:
        """Read what stands aside, if it is time. Return whether it was."""
        now = time.monotonic()
        if now < self._look_at:
            return False
        self._look_at = now + LOOK_INTERVAL
        self._retry(now)
        self._aside = defaultdict(Counter, {queue: Counter(names) for queue, names in broker.asides().items()})
        return True

    @property
    def seconds_to_look(self) -> float:
        """The seconds until it is time to read what stands aside."""
        return max(0.0, self._look_at - time.monotonic())

    @property
    def queues(self) -> list[str]:
        """The queues in which ids stand aside that this process can serve."""
        return [queue for queue, names in self._aside.items() if any(map(self._servable, names))]

    def open(self, queue: str, room: int) -> dict[str, int]:
        """Return the names to open in a take of up to ``room`` ids, each with the number of its ids to make ready.

        Each name may use the whole room: the take then pops the best ids of all names, by priority and due time.
        """
        opened: dict[str, int] = {}
        names = self._aside[queue]
        for name, aside in list(names.items()) if room > 0 else ():
            if len(opened) == MOST_NAMES:
                break
            number = min(self._servable(name), aside, room)
            if number > 0:
                opened[name] = number
                names[name] -= number
                if not names[name]:
                    del names[name]
        return opened

    def _servable(self, name: str) -> int:
        """Return how many ids of a name this process could serve now."""
        if name.startswith(HANDLER):
            return self._places_for(name.removeprefix(HANDLER))
        # Asked first: of thousands of names most may be full.
        room = self._room_under(name)
        if room <= 0:
            return 0
        kind, what, _key = limits.parts(name)
        return min(room, self._places_for(what) if kind == "topic" else IDS_PER_CALL)
