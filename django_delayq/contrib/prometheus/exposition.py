"""The gauges of queues whose names begin alike, as text: what the HTTP door answers at ``/metrics``."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric, generate_latest
from prometheus_client.registry import Collector

from .server import Gauges


class NamespaceGauges(Collector):
    """The gauges that have no label, and those of queues and topics that begin with a prefix."""

    def __init__(self, using: str, prefix: str) -> None:
        self._gauges = Gauges(using)
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        """Yield them, of which each is read anew."""
        for family in self._gauges.collect():
            family.samples = [sample for sample in family.samples if self._is_of_it(sample.labels)]
            if family.samples:
                yield family

    def _is_of_it(self, labels: dict[str, str]) -> bool:
        name = labels.get("queue", labels.get("topic", ""))
        return not labels or name.startswith(self._prefix)


def expose(using: str, prefix: str) -> bytes:
    """Return the gauges as Prometheus reads text."""
    return generate_latest(NamespaceGauges(using, prefix))
