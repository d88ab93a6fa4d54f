"""How long before its due time a message is claimed, so that its handler can begin on time."""

from __future__ import annotations

# Nobody's message is claimed earlier than this before its due time. Seconds.
MOST = 0.01
# Shares of the newest in the mean and in the mean deviation, and how many deviations are allowed for: RFC 6298, which
# has them for the time until an answer is missed.
MEAN, DEVIATION, DEVIATIONS = 1 / 8, 1 / 4, 4


class ClaimAhead:
    """Learns how long it takes from asking what is due until it is claimed and handed over."""

    def __init__(self) -> None:
        # None: who has claimed nothing yet leaves what is not due to others.
        self._mean: float | None = None
        self._deviation = 0.0
        # Does not know all that it may take: it would only be the first to take what others can handle.
        self.leaves_to_others = False

    def learn(self, seconds: float) -> None:
        """It has taken so long."""
        if self._mean is None:
            self._mean, self._deviation = seconds, seconds / 2
            return
        self._deviation += (abs(seconds - self._mean) - self._deviation) * DEVIATION
        self._mean += (seconds - self._mean) * MEAN

    @property
    def lead(self) -> float:
        """So many seconds before the next due time it is worth asking. Of several workers the slowest asks first."""
        if self._mean is None or self.leaves_to_others:
            return 0.0
        return min(MOST / 2, self._mean + DEVIATIONS * self._deviation)

    @property
    def reach(self) -> float:
        """What falls due within so many seconds is taken then: no further, and there would be a claim for each."""
        return 2 * self.lead
