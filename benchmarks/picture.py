"""Bars on a logarithmic scale, as SVG: rates with their spread, and lateness from the median to the 99th percentile."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from .measures import Results, figure
from .systems import SYSTEMS
from .workloads import WORKLOADS

WIDTH, LABELS, FIGURES = 900, 210, 110
ROW, GAP, HEAD = 20, 34, 22
COLOURS = {"ours": "#0b6e4f", "peer": "#7a8fa6", "floor": "#c9a227"}
RATES = ("schedule", "schedule-bulk", "drain", "insert")
LATE = ("late-200", "late-1000")
# Lateness below this is drawn as this. ms
LEAST = 0.1

STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f } .title { font-weight: 600; font-size: 14px }
.axis { stroke: #d0d7de } .spread { stroke: #24292f; stroke-width: 1.5 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .axis { stroke: #444c56 } .spread { stroke: #e6edf3 } }
"""


@dataclass(frozen=True, slots=True)
class Bar:
    """From ``start`` (None: the left edge) to ``value``, with a line from ``least`` to ``most``."""

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
    """What there is to draw."""
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
            low, high = max(LEAST, p50), max(LEAST, p99)
            note = f"{figure(p50)} / {figure(p99)}"
            bars.append(Bar(system.title, system.kind, high, high, high, note, start=low))
    return sorted(bars, key=lambda bar: bar.value)


def scale(values: Sequence[float]) -> tuple[int, int]:
    """The powers of ten around the values."""
    low = math.floor(math.log10(min(values)))
    return low, max(low + 1, math.ceil(math.log10(max(values))))


def draw(results: Results) -> str:
    """The whole picture."""
    parts: list[str] = []
    top = 10
    for panel in panels(results):
        parts += _panel(panel, top)
        top += HEAD + ROW * len(panel.bars) + GAP
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
