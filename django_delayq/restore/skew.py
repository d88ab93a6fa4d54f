"""Measures how far the clocks of the record and of Redis are apart."""

from __future__ import annotations

from ..broker.base import Index, Skew
from ..core.clock import to_us, us_to_tenths
from ..core.durations import brief
from ..record import transitions

# The difference between the two clocks that is worth a warning. Seconds.
SKEW_WARNING = 1.0


def measure_skew(using: str, broker: Index) -> Skew:
    """Read the record's clock between two readings of the Redis clock."""
    before = broker.server_time()
    now = to_us(transitions.now(using))
    after = broker.server_time()
    return Skew(-us_to_tenths(after - now), us_to_tenths(now - before))


def describe_skew(seconds: float) -> str:
    """Say how the Redis clock differs from the record's, of which it is ``seconds`` behind (negative: ahead).

    >>> describe_skew(-3600), describe_skew(0.25)
    ('1 h ahead of', '250 ms behind')
    """
    return f"{brief(abs(seconds))} {'behind' if seconds > 0 else 'ahead of'}"
