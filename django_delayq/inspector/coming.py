"""Counts due messages by topic, and those that fall due soon with the work that they mean. It reads a bounded part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from itertools import pairwise
from typing import NamedTuple

from ..core.states import State
from ..models import Message, Transition
from ..record import admission
from ..record.sql import statements
from .numbers import CAPS, NONE, Capped, Caps
from .waiting import may_be_more, read_coming, read_due

# The time spans for which the messages are counted that fall due within them. Seconds.
WITHIN = {"1m": 60, "5m": 300, "1h": 3600}


class TopicDue(NamedTuple):
    """The messages of a topic that are due; among them those that are ready, and those that are overdue."""

    due: Capped = NONE
    ready: Capped = NONE
    overdue: Capped = NONE


class Coming(NamedTuple):
    """The messages of a queue that fall due within a span, and the seconds for which handlers will run for them.

    ``seconds`` is None where no run time is known.
    """

    number: Capped = NONE
    seconds: float | None = None


class Runtimes(NamedTuple):
    """The mean run times, in seconds, of the messages that finished last: by topic, and of all of them."""

    by_topic: Mapping[str, float]
    of_all: float | None

    def of(self, topic: str) -> float | None:
        """Return the mean of a topic; if none of its messages is among those measured, the mean of all topics."""
        return self.by_topic.get(topic, self.of_all)


def due_by_topic(
    using: str, now: datetime, overdue_since: datetime, paused: Collection[str], caps: Caps = CAPS
) -> dict[str, TopicDue]:
    """Return the messages that are due of each topic, those with most first.

    Those of paused queues and those that wait for limits are neither ready nor overdue.
    """
    caps = caps.shared(len(statements(using).queues()))
    counts: dict[str, list[int]] = {}
    rows = [*read_due(using, admission.full_lately(using), now=now, overdue_since=overdue_since, caps=caps)]
    for each in rows:
        may_begin = each.limit is None and each.queue not in paused
        overdue = each.overdue * may_begin
        found = (each.number, each.number * may_begin - overdue, overdue)
        counts[each.topic] = [*map(sum, zip(counts.get(each.topic, (0, 0, 0)), found, strict=True))]
    more = may_be_more(rows, caps)
    ordered = sorted(counts, key=lambda topic: (-counts[topic][0], topic))
    return {topic: TopicDue(*(Capped(number, more) for number in counts[topic])) for topic in ordered}


def due_soon(using: str, now: datetime, queues: Collection[str], caps: Caps = CAPS) -> dict[str, dict[str, Coming]]:
    """Count what falls due in these queues within each span of ``WITHIN``, by queue and name of the span."""
    caps, runtimes = caps.shared(len(statements(using).queues())), mean_runtimes(using)
    ends = [now + timedelta(seconds=seconds) for seconds in WITHIN.values()]
    # By queue: the number of messages within each span, and their seconds of work.
    sums = {queue: [(0, 0.0)] * len(WITHIN) for queue in queues}
    for queue, topic, found in read_coming(using, now, ends, caps.rows):
        if queue in sums:
            mean = runtimes.of(topic) or 0.0
            sums[queue] = [
                (number + more, seconds + mean * more)
                for (number, seconds), more in zip(sums[queue], found, strict=True)
            ]
    return {
        queue: {
            within: Coming(Capped(number, number >= caps.rows), None if runtimes.of_all is None else seconds)
            for within, (number, seconds) in zip(WITHIN, each, strict=True)
        }
        for queue, each in sums.items()
    }


def mean_runtimes(using: str) -> Runtimes:
    """Measure the run times of the messages that finished last, from each claim to the record of its outcome."""
    last = Message.objects.using(using).filter(finished_at__isnull=False).order_by("-finished_at", "-id")
    topics = dict(last.values_list("pk", "topic")[: CAPS.lateness])
    moves = Transition.objects.using(using).filter(message_id__in=topics).order_by("message_id", "number")
    runs: Counter[str] = Counter()
    spans: Counter[str] = Counter()
    for (pk, _from, state, begun), (other, _state, _to, ended) in pairwise(
        moves.values_list("message_id", "from_state", "to_state", "at")
    ):
        if pk == other and state == State.RUNNING:
            runs[topics[pk]] += 1
            spans[topics[pk]] += (ended - begun) // timedelta(microseconds=1)
    means = {topic: spans[topic] / 1e6 / number for topic, number in runs.items()}
    return Runtimes(means, sum(spans.values()) / 1e6 / runs.total() if runs else None)
