"""Messages whose topics only some of the live workers know, as during a deploy: ids are handed on, and fetched."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from itertools import islice

from ... import restore
from ...broker.base import Broker
from ...core.exceptions import BrokerUnavailable
from ...extensions import Service
from ...models import Worker
from ...project import registry
from ...record import transitions
from ...record.sql.rows import Ticket
from ..parts.broker_switch import BrokerSwitch

# An id whose topic another live worker knows becomes ready again at once. For this long this process takes nothing, so
# that the other worker gets it. Seconds.
LEFT_TO_OTHERS = 0.01
# An id that this process takes again becomes ready after this time, since the other worker may be busy; then after
# twice that, and so on. Seconds.
SECOND_HAND_OVER = 0.05
# But after this time at the latest. Seconds.
LONGEST_HAND_OVER = 1.0
# An id whose topic no live worker knows becomes ready after this time, then after twice that, and so on: many such ids
# of a high priority must not come back before a slow worker has got past them. Seconds.
RETRY_UNKNOWN_AFTER = 30.0
# But after this time at the latest. Seconds.
LONGEST_UNKNOWN = 120.0
# The ids of which a process remembers how often it handed them over.
MOST_REMEMBERED = 10_000
# The answer to which topics the live workers know is used for this long. Seconds.
REMEMBERED = 1.0
# A worker that knows new topics fetches their ids when it starts, and once more after this time: until then others may
# go by an answer from before its start. Seconds.
FETCH_AGAIN_AFTER = 2 * REMEMBERED
# Pages of a queue that are fetched; the rest waits until it is parked no more.
MOST_PAGES = 5


def topics_of_others(using: str, worker: str) -> dict[str, set[str]]:
    """Return the topics that live workers other than ``worker`` know, by queue."""
    alive_since = transitions.now(using) - timedelta(seconds=Worker.ALIVE)
    rows = Worker.objects.using(using).filter(seen_at__gt=alive_since).exclude(name=worker)
    found: dict[str, set[str]] = defaultdict(set)
    for queues, topics in rows.values_list("queues", "topics"):
        for queue in queues:
            found[queue].update(topics)
    return found


class UnknownTopics:
    """Parks ids that this process took and whose topics it does not know. The consumer's thread owns it."""

    def __init__(self, using: str, worker: str) -> None:
        self.using = using
        self.worker = worker
        self._times: dict[int, int] = {}
        self._known: dict[str, set[str]] = {}
        self._asked: float | None = None

    def park(self, broker: Broker, queue: str, strays: Sequence[tuple[Ticket, str]]) -> bool:
        """Park ids with their topics: for a moment when another live worker can deliver them, else for long.

        Return whether there are ids of the first kind. Then the process leaves wake-ups and ids to others for
        ``LEFT_TO_OTHERS`` seconds: it would only take the same ids again.
        """
        known = self._known_in(queue)
        by_time: dict[float, list[Ticket]] = defaultdict(list)
        for ticket, topic in strays:
            by_time[self._time(ticket.id, is_known=topic in known)].append(ticket)
        for seconds, tickets in by_time.items():
            broker.park(queue, tickets, seconds)
        return any(topic in known for _ticket, topic in strays)

    def _time(self, pk: int, *, is_known: bool) -> float:
        """Return for how long to park an id. ``is_known``: another live worker can deliver it."""
        times = self._times[pk] = self._times.pop(pk, -1) + 1
        if len(self._times) > MOST_REMEMBERED:
            del self._times[next(iter(self._times))]
        if not is_known:
            return min(LONGEST_UNKNOWN, RETRY_UNKNOWN_AFTER * 2.0 ** min(times, 20))
        return min(LONGEST_HAND_OVER, SECOND_HAND_OVER * 2.0 ** min(times - 1, 20)) if times else 0.0

    def _known_in(self, queue: str) -> set[str]:
        now = time.monotonic()
        if self._asked is None or now - self._asked > REMEMBERED:
            self._known, self._asked = topics_of_others(self.using, self.worker), now
        return self._known.get(queue, set())


class NewTopics(Service):
    """Fetches, when a worker starts, the due messages of topics that no other live worker knows: they may be parked.

    It runs after the first heartbeat, so that other workers can know what this one can deliver.
    """

    name = "fetching of new topics"

    def __init__(self, using: str, brokers: BrokerSwitch, queues: Callable[[], tuple[str, ...]], worker: str) -> None:
        self.using = using
        self.brokers = brokers
        self.queues = queues
        self.worker = worker
        # The new topics by queue; None before the first tick.
        self._new: dict[str, list[str]] | None = None

    def tick(self) -> float:
        """Fetch at the first two ticks."""
        if self._new is None:
            self._new = self._find(registry.handlers())
            self._fetch(self._new)
            return FETCH_AGAIN_AFTER
        self._fetch(self._new)
        self._new = {}
        return 3600.0

    def _find(self, topics: Iterable[str]) -> dict[str, list[str]]:
        others = topics_of_others(self.using, self.worker)
        found = {queue: sorted(set(topics) - others.get(queue, set())) for queue in self.queues()}
        return {queue: new for queue, new in found.items() if new}

    def _fetch(self, new: dict[str, list[str]]) -> None:
        """Make the due messages of these topics ready. A query finds them where there is no Redis."""
        broker = self.brokers.redis
        now = transitions.now(self.using)
        if broker is None or self.brokers.current() is not broker or not new:
            return
        by_topics: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for queue, topics in new.items():
            by_topics[tuple(topics)].append(queue)
        for some, queues in by_topics.items():
            pages = restore.merged(self.using, queues, end=now, topics=some)
            try:
                for page in islice(pages, MOST_PAGES):
                    broker.fill(page.by_queue)
            except BrokerUnavailable as error:
                self.brokers.report_failure(error)
                return
