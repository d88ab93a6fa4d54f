"""The options of a worker, as ``run_delayq`` takes them."""

from __future__ import annotations

from typing import NamedTuple


class Options(NamedTuple):
    """The options of one ``run_delayq``. Times are seconds."""

    using: str
    queues: tuple[str, ...] = ()
    # The weight of each of these queues; empty: they are served in strict order.
    weights: tuple[int, ...] = ()
    processes: int = 1
    threads: int = 8
    async_concurrency: int = 200
    # None: all of them.
    roles: frozenset[str] | None = None
    max_messages: int | None = None
    max_runtime: float | None = None
    max_tasks_per_child: int | None = None
    # Bytes.
    max_memory_per_child: int | None = None
    graceful_timeout: float = 30.0
    name: str = ""
    heartbeat_file: str | None = None

    def has(self, role: str) -> bool:
        """Return whether a process with these options has a role."""
        return self.roles is None or role in self.roles

    @property
    def most_processes(self) -> int:
        """The most processes at a time: one more isolates a message, and retired ones may have successors."""
        has_successors = self.max_tasks_per_child is not None or self.max_memory_per_child is not None
        return (2 if has_successors else 1) * self.processes + 1
