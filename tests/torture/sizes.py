"""The sizes of a torture: its length, its load, and the settings of its workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Size:
    """One size of the torture. Times in seconds."""

    # Seconds that producers and the nemesis go on.
    seconds: float
    # Transactions per second of each producer; one in eight schedules several messages.
    rate: float
    producers: int
    workers: int
    processes: int
    threads: int
    # The longest delay.
    spread: float
    # Between two faults.
    rest: tuple[float, float]
    # Seconds until everything is finished after the last fault is healed.
    drain: float
    # Messages that kill their worker at every delivery.
    poison: int
    # Seconds that a network carries nothing.
    partition: tuple[float, float]
    # Times that a kind of fault comes in each round of all kinds; once if it is not named, never if it is 0.
    weights: dict[str, int]
    # Queues among which producers draw, beside those of the handlers.
    queues: int


# About a third of all faults kill a worker process.
LONG = {"kill-child": 7, "kill-worker": 4, "kill-producer": 4, "flush": 2, "freeze-child": 2, "restores": 2}

# Faults that need servers of their own, or more time than a smoke has.
LARGE = (
    *("clock", "database-full", "disk-full", "freeze-limited", "isolation", "long-locks", "pooler", "small-pool"),
    *("table-lock", "unread-log"),
)

SMOKE = Size(50, 60, 3, 2, 2, 4, 12, (0.2, 1.0), 75, 1, (1, 3), {"kill-child": 4, **dict.fromkeys(LARGE, 0)}, 3)
NIGHTLY = Size(13 * 60, 50, 3, 2, 2, 6, 60, (1, 6), 150, 8, (5, 20), LONG, 60)
SOAK = Size(3600, 40, 3, 2, 2, 6, 300, (1, 20), 420, 20, (5, 40), LONG, 60)

# Each fault comes once and by itself: the next one when the longest mark after the one before is over.
APART = Size(16 * 60, 50, 3, 2, 2, 6, 12, (16, 17), 75, 2, (3, 9), {}, 60)

SIZES = {"smoke": SMOKE, "nightly": NIGHTLY, "soak": SOAK, "apart": APART}

# The limits of two topics: so many of each key run at once, and so many begin in a second, some of them together.
LIMIT, KEYS = 2, 4
RATE, BURST = 30, 5
LIMITS = {
    "torture.limited": {"count": LIMIT},
    "torture.single": {"count": 1},
    "torture.rated": {"interval": 1 / RATE, "burst": BURST},
}

# The queue that programs pull, and the number of these programs.
PULLED, PULLERS = "pulled", 2

# The processes of the first worker are replaced after so many messages; its name in the log.
LIFETIME = 300
REPLACED = "replaced"

# Short times, so that every interval of the package passes many times in a run.
DELAYQ: dict[str, Any] = {
    "HORIZON": 8,
    "GRACE": 1,
    "POLL_INTERVAL": 0.25,
    "LEASE": 5,
    "TIMEOUT": 60,
    # More attempts than any fault can use up.
    "PULL_QUEUES": {PULLED: {"max_attempts": 1_000}},
}
GRACEFUL_TIMEOUT = "15s"
