"""Draws the results as SVG: bars for rates and lateness, and lines for growth.

Bars have a logarithmic scale: rates with their spread, and lateness from the median to the 99th percentile. Lines show
what grows with the number of rows, or of processes, and what does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from .measures import Results, figure, levels
from .systems import SYSTEMS
from .targets import OURS
from .workloads import WITH_NONE, WORKLOADS, Workload

WIDTH, LABELS, FIGURES = 900, 210, 110
ROW, GAP, HEAD = 20, 34, 22
COLOURS = {"ours": "#0b6e4f", "peer": "#7a8fa6", "floor": "#c9a227"}
RATES = ("schedule", "schedule-bulk", "drain", "drain-2", "insert")
LATE = ("late-200", "late-1000", "late-3000", "late-long")
# Lateness below this is drawn as this.
LEAST_MS = 0.1
# A panel of lines: its height, and the room at its left for the scale and at its right for the names.
TALL, SCALE, NAMES = 100, 70, 190
INKS = ("#0b6e4f", "#7a8fa6")

STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f } .title { font-weight: 600; font-size: 14px }
.axis { stroke: #d0d7de } .line { fill: none; stroke-width: 2 } .spread { stroke: #24292f; stroke-width: 1.5 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .axis { stroke: #444c56 } .spread { stroke: #e6edf3 } }
"""


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar from ``start`` (None: the left edge) to ``value``, with a line from ``least`` to ``most``."""

    label: str
    kind: str
    value: float
    least: float
    most: float
    note: str
    start: float | None = None


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    bars: Sequence[Bar]


def panels(results: Results) -> list[Panel]:
    """Return the panels of all measured workloads."""
    titles = {workload.name: workload.title for workload in WORKLOADS}
    drawn = [Panel(f"{titles[name]}: messages/s", _rates(results, name)) for name in RATES]
    drawn += [Panel(f"{titles[name]}: ms, p50 to p99", _lateness(results, name)) for name in LATE]
    return [panel for panel in drawn if panel.bars]


def _rates(results: Results, workload: str) -> list[Bar]:
    bars = []
    for system in SYSTEMS:
        spread = results.spread(workload, system.name, "rate")
        if spread is not None:
            note = figure(spread.median)
            bars.append(Bar(system.title, system.kind, spread.median, spread.least, spread.most, note))
    return sorted(bars, key=lambda bar: -bar.value)


def _lateness(results: Results, workload: str) -> list[Bar]:
    bars = []
    for system in SYSTEMS:
        p50, p99 = (results.median(workload, system.name, name) for name in ("p50", "p99"))
        if p50 is not None and p99 is not None:
            low, high = max(LEAST_MS, p50), max(LEAST_MS, p99)
            note = f"{figure(p50)} / {figure(p99)}"
            bars.append(Bar(system.title, system.kind, high, high, high, note, start=low))
    return sorted(bars, key=lambda bar: bar.value)


def scale(values: Sequence[float]) -> tuple[int, int]:
    """Return the powers of ten around the values."""
    low = math.floor(math.log10(min(values)))
    return low, max(low + 1, math.ceil(math.log10(max(values))))


def draw(results: Results) -> str:
    """Return the picture of rates and lateness."""
    parts: list[str] = []
    top = 10
    for panel in panels(results):
        parts += _panel(panel, top)
        top += HEAD + ROW * len(panel.bars) + GAP
    return _whole(parts, top)


def _whole(parts: Sequence[str], top: int) -> str:
    size = f'width="{WIDTH}" height="{top}" viewBox="0 0 {WIDTH} {top}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{STYLE}</style>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _panel(panel: Panel, top: int) -> list[str]:
    ends = [end for bar in panel.bars for end in (bar.start or bar.least, bar.value, bar.most)]
    low, high = scale(ends)
    room = WIDTH - LABELS - FIGURES

    def x(value: float) -> float:
        return round(LABELS + room * (math.log10(value) - low) / (high - low), 1)

    bottom = top + HEAD + ROW * len(panel.bars)
    parts = [f'<text class="title" x="0" y="{top + 12}">{escape(panel.title)}</text>']
    for power in range(low, high + 1):
        at = x(10**power)
        parts.append(f'<line class="axis" x1="{at}" y1="{top + HEAD}" x2="{at}" y2="{bottom}"/>')
        parts.append(f'<text x="{at}" y="{bottom + 13}" text-anchor="middle">{figure(10.0**power)}</text>')
    for number, bar in enumerate(panel.bars):
        parts += _bar(bar, top + HEAD + ROW * number, x)
    return parts


def _bar(bar: Bar, y: int, x: Callable[[float], float]) -> list[str]:
    left = LABELS if bar.start is None else x(bar.start)
    width = max(2.0, round(x(bar.value) - left, 1))
    parts = [
        f'<text x="{LABELS - 8}" y="{y + 14}" text-anchor="end">{escape(bar.label)}</text>',
        f'<rect x="{left}" y="{y + 3}" width="{width}" height="{ROW - 6}" fill="{COLOURS[bar.kind]}"/>',
        f'<text x="{max(x(bar.most), left + width) + 6}" y="{y + 14}">{escape(bar.note)}</text>',
    ]
    if bar.least < bar.most:
        middle = y + ROW / 2
        parts.append(f'<line class="spread" x1="{x(bar.least)}" y1="{middle}" x2="{x(bar.most)}" y2="{middle}"/>')
    return parts


# --- lines ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines by their names, over levels: numbers of rows, or of processes."""

    title: str
    levels: Sequence[int]
    lines: dict[str, Sequence[float]]


def charts(results: Results) -> list[Chart]:
    """Return a chart for each measure of each growth workload."""
    return [chart for workload in WORKLOADS if workload.grows for chart in _charts(workload, results)]


def _charts(workload: Workload, results: Results) -> list[Chart]:
    rounds = results.rounds.get(workload.name, {}).get(OURS)
    if not rounds:
        return []
    by_level = dict(sorted(levels(rounds[0]).items()))
    panels: dict[str, dict[str, Sequence[float]]] = {}
    for measure in next(iter(by_level.values())):
        name, _comma, unit = measure.rpartition(", ")
        lines = panels.setdefault(f"{name.removesuffix(WITH_NONE)}, {unit}", {})
        lines[name] = [found[measure] for found in by_level.values()]
    return [Chart(f"{name}, over {workload.grows}", list(by_level), lines) for name, lines in panels.items()]


def draw_growth(results: Results) -> str:
    """Return the picture of growth, on a linear scale from zero, so that constant values look flat."""
    parts: list[str] = []
    top = 10
    for chart in charts(results):
        parts += _chart(chart, top)
        top += HEAD + TALL + GAP
    return _whole(parts, top)


def nice(value: float) -> float:
    """Round up to 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value)


def _chart(chart: Chart, top: int) -> list[str]:
    most = nice(max(max(values) for values in chart.lines.values()))
    bottom, right = top + HEAD + TALL, WIDTH - NAMES
    places = _places(chart.levels)

    def x(number: int) -> float:
        return round(SCALE + (right - SCALE) * places[number], 1)

    def y(value: float) -> float:
        return round(bottom - TALL * value / most, 1)

    parts = [f'<text class="title" x="0" y="{top + 12}">{escape(chart.title)}</text>']
    for value in (0.0, most / 2, most):
        parts.append(f'<line class="axis" x1="{SCALE}" y1="{y(value)}" x2="{right}" y2="{y(value)}"/>')
        parts.append(f'<text x="{SCALE - 8}" y="{y(value) + 4}" text-anchor="end">{figure(value)}</text>')
    for number, level in enumerate(chart.levels):
        parts.append(f'<text x="{x(number)}" y="{bottom + 15}" text-anchor="middle">{level:,}</text>')
    ends = _apart([y(values[-1]) for values in chart.lines.values()])
    for (name, values), ink, end in zip(chart.lines.items(), INKS, ends, strict=False):
        points = " ".join(f"{x(number)},{y(value)}" for number, value in enumerate(values))
        parts.append(f'<polyline class="line" points="{points}" stroke="{ink}"/>')
        parts += [f'<circle cx="{x(n)}" cy="{y(value)}" r="3" fill="{ink}"/>' for n, value in enumerate(values)]
        parts.append(f'<text x="{right + 10}" y="{end + 4}">{escape(name)} {figure(values[-1])}</text>')
    return parts


def _places(steps: Sequence[int]) -> list[float]:
    """Return the places of the levels from 0 to 1; numbers of rows are on a logarithmic scale."""
    ordered: list[float] = [math.log10(step) for step in steps] if max(steps) >= 10 else list(map(float, steps))
    width = (ordered[-1] - ordered[0]) or 1.0
    return [(place - ordered[0]) / width for place in ordered]


def _apart(heights: Sequence[float]) -> list[float]:
    """Return the heights of two labels, moved apart so far that both can be read."""
    if len(heights) != 2 or abs(heights[0] - heights[1]) >= 14:
        return list(heights)
    middle, up = sum(heights) / 2, 1 if heights[0] <= heights[1] else -1
    return [middle - 7 * up, middle + 7 * up]
