"""The gauges of queues whose names begin alike, as text: the answer of the HTTP door at ``/metrics``."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric, generate_latest
from prometheus_client.registry import Collector

from .server import Gauges

# They count the messages of all namespaces together.
OF_ALL = {f"delayq_{name}" for name in ("scheduled_messages_estimate", "running_messages", "dead_messages")}


class NamespaceGauges(Collector):
    """The gauges of the servers and workers, and those of queues and topics that begin with a prefix."""

    def __init__(self, using: str, prefix: str) -> None:
        self._gauges = Gauges(using, prefix=prefix)

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges, with values that are read now."""
        for family in self._gauges.collect():
            family.samples = [each for each in family.samples if not each.labels or {"queue", "topic"} & {*each.labels}]
            if family.samples and family.name not in OF_ALL:
                yield family


def expose(using: str, prefix: str) -> bytes:
    """Return the gauges as Prometheus reads text."""
    return generate_latest(NamespaceGauges(using, prefix))
