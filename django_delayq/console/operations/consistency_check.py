"""The consistency check as an operation: the record against Redis, one queue in a step."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass

from ...inspector.consistency import ConsistencyCheck, Mismatch, queues, stuck
from ...project import conf
from ...record import transitions
from ..models import Operation
from .lifecycle import lease_from
from .work import RedisWork, Step, register

# Mismatches are checked again after the grace period, but after this time at most.
MAX_PAUSE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class QueueCheck:
    """The result for one queue: how many messages were compared, and how many mismatch in which way."""

    compared: int
    missing: int
    extra: int
    different: int
    stuck: int

    @property
    def agrees(self) -> bool:
        """True when no mismatch was found."""
        return not (self.missing or self.extra or self.different or self.stuck)


@register
class CheckWork(RedisWork):
    """Compares the record with Redis and changes nothing. The position of the operation keeps the results."""

    name = "check"

    def step(self, using: str, operation: Operation) -> Step:
        results = results_of(operation)
        with self.redis(using) as broker:
            left = [queue for queue in queues(using, broker) if queue not in results]
            if not left:
                return Step(position=operation.position, finished=True)
            check = ConsistencyCheck(using, broker, left[0], pause=min(conf.get().GRACE, MAX_PAUSE_SECONDS))
            found = check.run(_LeaseRenewal(using, operation))
        counts = {mismatch.value: found.counts[mismatch] for mismatch in Mismatch}
        results[left[0]] = QueueCheck(found.compared, **counts, stuck=stuck(using, left[:1]).count)
        outcomes = {word: number for word, number in counts.items() if number}
        position = json.dumps({queue: asdict(result) for queue, result in results.items()})
        return Step(found.compared, outcomes, position, finished=len(left) == 1)


def results_of(operation: Operation) -> dict[str, QueueCheck]:
    """Return what a check has found so far, by queue."""
    return {queue: QueueCheck(**facts) for queue, facts in json.loads(operation.position or "{}").items()}


class _LeaseRenewal:
    """Renews the lease of an operation while a long step goes on."""

    def __init__(self, using: str, operation: Operation) -> None:
        self._rows = Operation.objects.using(using).filter(pk=operation.pk, worker=operation.worker)
        self._using = using
        self._renewed_at = time.monotonic()

    def __call__(self, done: int) -> None:
        if time.monotonic() - self._renewed_at >= 1.0:
            self._renewed_at = time.monotonic()
            self._rows.update(leased_until=lease_from(transitions.now(self._using)))
