"""Assembled workers, for the tests of the seams between their parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from django_delayq.core.worker_options import Options
from django_delayq.worker.processes.process import OnceProcess, Parts
from django_delayq.worker.run.recorder import Recorder

Assemble = Callable[..., Parts]


def drain(options: Options) -> int:
    """Deliver what is due, as ``run_delayq --once`` does. Return how many deliveries were recorded."""
    process = OnceProcess(options)
    process.run()
    return process.delivered


def deliver() -> None:
    """Run what is due in one thread, as ``run_delayq --once`` does."""
    drain(Options("default", threads=1))


@pytest.fixture
def assembled() -> Iterator[Assemble]:
    """Assemble workers whose recorder runs and whose other threads do not; close them after the test.

    ``threads``, ``tasks`` (that run at once on an event loop; 0: there is none), ``queues``, ``weights`` and
    ``max_messages`` are options of the worker, whatever else is given goes to ``Parts``.
    """
    made: list[Parts] = []

    def make(
        threads: int = 1,
        queues: tuple[str, ...] = ("default",),
        max_messages: int | None = None,
        tasks: int = 0,
        weights: tuple[int, ...] = (),
        **given: Any,
    ) -> Parts:
        numbers: dict[str, Any] = {"threads": threads, "async_concurrency": tasks, "max_messages": max_messages}
        options = Options("default", queues, weights, **numbers)
        parts = Parts(options, **{"name": "w", **given})
        made.append(parts)
        parts.recorder.start()
        return parts

    yield make
    for parts in made:
        parts.recorder.stop()
        parts.recorder.join(60)
        parts.brokers.close()


@pytest.fixture
def parts(assembled: Assemble) -> Parts:
    """A worker with one thread for handlers."""
    return assembled()


@pytest.fixture
def recorder(parts: Parts) -> Recorder:
    """The running recorder of that worker."""
    return parts.recorder
