"""Figures of several rounds, and how they are written."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

Measures = dict[str, float]


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the sorted values does not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]


def figure(value: float) -> str:
    """Write a number with three digits and separators: 17,400 · 4.12 · 0.0381."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.3g}")
    digits = max(0, 2 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:,.{digits}f}"


def spread(values: Sequence[float]) -> str:
    """Write the median of the rounds with the least and the most, ``17,400 (16,900–18,200)``; a dash for no round."""
    if not values:
        return "–"
    median, least, most = map(figure, (statistics.median(values), min(values), max(values)))
    return median if least == most else f"{median} ({least}–{most})"
