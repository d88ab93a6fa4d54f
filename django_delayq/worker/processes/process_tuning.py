"""The numbers by which a supervisor and its worker processes live."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ProcessTuning:
    """Times are seconds."""

    # --- what a supervisor does about its children --------------------------------------------------------------------

    # The time between two checks of the children, and the least time between two tries of what has failed.
    check_interval: float = 1.0
    # A child that lived longer than this was healthy: its successor starts at once.
    healthy: float = 5.0
    # The heartbeat file is touched no more when the consumer of a child has begun no round for this long.
    stale_after: float = 30.0
    # A child without a sign of life for this long, plus two of its longest leases and two graceful timeouts, is killed:
    # code that never releases the interpreter's lock stops its timeouts too. Another worker has its messages then.
    hung_after: float = 30.0
    # A child that isolates a message claims nothing meanwhile: it is replaced after this time.
    replaced_after: float = 2.0

    # --- the release of what dead children had claimed ----------------------------------------------------------------

    # Children that are killed within this time died together.
    together: float = 0.25
    # A process that releases claims is killed after this time.
    longest_release: float = 30.0
    # A worker that ends waits for the releases up to this time.
    final_release: float = 5.0

    # --- one process --------------------------------------------------------------------------------------------------

    # The time between two looks for a change of code that could not be loaded.
    reload_interval: float = 0.5
    # A worker process looks for garbage in cycles after this many new objects. A drain has ten thousand at once, which
    # live for milliseconds: the collector would look at them again and again, for an eighth of the CPU time after
    # Python's own number (700, and 2,000 from 3.13 on), and for a twentieth after 5,000.
    young_objects: int = 20_000


USUAL = ProcessTuning()
