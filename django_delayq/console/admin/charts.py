"""Charts as inline SVG, drawn on the server without script and style, the larger ones with their numbers in a table.

The bars of a chart are stretched to the width of the page. Texts stand beside the bars, at shares of the width: so the
size of the letters does not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from django.template.loader import render_to_string
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString, mark_safe

from ...core.durations import brief

# The height of a drawing, its margins, and the most texts under its axis. Pixels.
HEIGHT, _TOP, _BOTTOM, _TICKS = 200, 28, 24, 9
_FLOOR = HEIGHT - _BOTTOM
# The size of a sparkline, which is stretched too.
_SPARK_WIDTH, _SPARK_HEIGHT = 96, 26

_NOTHING = SafeString("")


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a chart: a number for each series, or None where there is none.

    ``text`` gives the numbers in words, ``tick`` stands under the axis, the bar links to ``url``, and ``filling`` marks
    a time that is not over yet.
    """

    label: str
    values: Sequence[float | None]
    text: str = ""
    tick: str = ""
    url: str = ""
    filling: bool = False

    @property
    def link(self) -> str:
        """The address to which the bar leads; None: it leads nowhere."""
        return self.url if any(self.values) else ""


@dataclass(frozen=True, slots=True)
class Marks:
    """The lines over the bars: one before the column ``now``, and a dashed one at the height ``most``."""

    now: int
    now_text: str
    most: float = 0
    most_text: str = ""
    # Stands at the line of now.
    flag: str = ""


def bars(
    name: str,
    title: str,
    description: str,
    series: Sequence[str],
    columns: Sequence[Column],
    *,
    fills: Sequence[str] = ("0", "1", "2", "3"),
    marks: Marks | None = None,
) -> SafeString:
    """Draw stacked bars. ``name`` (ASCII letters and dashes) is unique on its page; ``fills`` are colour classes."""
    highest = max((sum(value or 0 for value in column.values) for column in columns), default=0)
    most = marks.most if marks is not None and marks.most <= 2 * highest else 0
    top = nice(max(highest, most * 1.1))
    labels = legend(zip(fills, series, strict=False))
    if marks is not None and most:
        labels.append((_stroke("most"), marks.most_text))
    return _figure(
        columns,
        [_stack(column, place, top, fills) for place, column in enumerate(columns)],
        [(_y(share), f"{top * share:,.1f}".removesuffix(".0")) for share in (0, 0.5, 1)],
        rounded,
        name=name,
        title=title,
        description=description,
        series=series,
        legend=labels,
        marks=marks,
        now_x="" if marks is None else _percent(marks.now, columns),
        most_y=_short(_y(most / top)) if most else "",
    )


def lines(name: str, title: str, description: str, series: Sequence[str], columns: Sequence[Column]) -> SafeString:
    """Draw lines of lengths of time in seconds, on a logarithmic scale from 1 ms to 10 minutes and more."""
    return _figure(
        columns,
        [_NOTHING] * len(columns),
        [(_log_y(seconds), brief(seconds)) for seconds in _DECADES],
        bound,
        name=name,
        title=title,
        description=description,
        series=series,
        legend=[(_stroke(place), label) for place, label in enumerate(series)],
        paths=[_path([column.values[place] for column in columns]) for place in range(len(series))],
    )


def spark(values: Sequence[float | None], level: str = "") -> SafeString:
    """Draw a sparkline. ``level`` is "critical", "warn" or empty."""
    numbers = [value or 0.0 for value in values]
    if len(numbers) < 2:
        return _NOTHING
    top, step = 1.1 * max(numbers) or 1, _SPARK_WIDTH / (len(numbers) - 1)
    points = "L".join(
        f"{_short(place * step)} {_short(_SPARK_HEIGHT - 1 - number / top * (_SPARK_HEIGHT - 3))}"
        for place, number in enumerate(numbers)
    )
    return format_html(
        '<svg class="dq-spark{}" viewBox="0 0 {w} {h}" preserveAspectRatio="none" aria-hidden="true">'
        '<path d="M{points}L{w} {h}L0 {h}Z"/><path d="M{points}"/></svg>',
        f" dq-{level}" if level else "",
        points=points,
        w=_SPARK_WIDTH,
        h=_SPARK_HEIGHT,
    )


def mix(parts: Sequence[tuple[str, float]], *, kind: str = "mix") -> SafeString:
    """Draw the shares of a whole side by side: colour classes with their numbers."""
    whole, left, drawn = sum(number for _fill, number in parts), 0.0, []
    for fill, number in parts:
        if number > 0:
            drawn.append(_rect(f"dq-fill-{fill}", left, 0, 100 * number / whole, 1))
            left += 100 * number / whole
    empty = _rect("dq-fill-none", 0, 0, 100, 1)
    inside = _joined(drawn or [empty])
    box = '<svg class="dq-{}" viewBox="0 0 100 1" preserveAspectRatio="none" aria-hidden="true">{}</svg>'
    return format_html(box, kind, inside)


def gauge(share: float) -> SafeString:
    """Draw which share of something is used up."""
    used = min(1.0, max(0.0, share))
    return mix([("1" if used >= 1 else "0", used), ("none", 1 - used)], kind="gauge")


def life(title: str, parts: Sequence[tuple[str, float, float, str]], labels: Sequence[tuple[str, str]]) -> SafeString:
    """Draw parts of a time side by side: colour class, start and length as shares of the whole, and words for each."""
    # A run of a millisecond in a day must be visible, too.
    drawn = [
        (text, _rect(f"dq-fill-{fill}", 100 * start, 0, max(0.3, 100 * length), 1))
        for fill, start, length, text in parts
    ]
    shown = {"title": title, "parts": drawn, "legend": legend(labels)}
    return render_to_string("delayq_console/chart_life.html", {"chart": shown})


def squares(busy: int, of: int, most: int = 48) -> SafeString:
    """Draw a square for each thread, up to ``most`` squares; busy threads come first."""
    drawn = (("dq-busy" if place < busy else "",) for place in range(min(of, most)))
    return format_html(
        '<span class="dq-squares" aria-hidden="true">{}</span>', format_html_join("", '<i class="{}"></i>', drawn)
    )


def nice(highest: float) -> int:
    """Return a round number that is not below ``highest``."""
    if highest <= 4:
        return max(2, 2 * math.ceil(highest / 2))
    scale = 10.0 ** math.floor(math.log10(highest))
    step = next(step for step in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if step * scale >= highest)
    return math.ceil(step * scale)


def rounded(value: float | None) -> str:
    return "–" if value is None else f"{round(value):,}"


def bound(value: float | None) -> str:
    """Return a length of time in words as the upper bound of a class of lengths."""
    if value is None:
        return "–"
    return f"> {brief(_DECADES[-1])}" if math.isinf(value) else f"≤ {brief(value)}"


# --- the drawing ------------------------------------------------------------------------------------------------------

_DECADES = (0.001, 0.01, 0.1, 1.0, 10.0, 60.0, 600.0)


def _y(share: float) -> float:
    return _FLOOR - share * (_FLOOR - _TOP)


def _log_y(seconds: float) -> float:
    low, high = math.log10(_DECADES[0]), math.log10(_DECADES[-1])
    return _y((math.log10(min(max(seconds, _DECADES[0]), _DECADES[-1])) - low) / (high - low))


def _figure(
    columns: Sequence[Column],
    stacks: Iterable[SafeString],
    levels: Iterable[tuple[float, str]],
    show: Callable[[float | None], str],
    **shown: Any,
) -> SafeString:
    """Return a chart with its grid, the texts beside it, and its numbers in a table."""
    shown |= {
        "height": str(HEIGHT),
        "width": str(max(1, len(columns))),
        "floor": str(_FLOOR),
        "below": str(HEIGHT - 6),
        "levels": [(_short(y), text) for y, text in levels],
        "columns": [
            (column, _rect("dq-hit", place, _TOP, 1, _FLOOR) + stack)
            for place, (column, stack) in enumerate(zip(columns, stacks, strict=True))
        ],
        "ticks": _ticks(columns),
        # Assistive technology reaches nothing within an image, so a chart with links is a group.
        "role": "group" if any(column.url for column in columns) else "img",
        "rows": [(column, [show(value) for value in column.values]) for column in columns if any(column.values)],
    }
    return render_to_string("delayq_console/chart.html", {"chart": shown})


def _ticks(columns: Sequence[Column]) -> list[tuple[str, str]]:
    named = [(_percent(place + 0.5, columns), column.tick) for place, column in enumerate(columns) if column.tick]
    return named[:: max(1, math.ceil(len(named) / _TICKS))]


def _percent(place: float, columns: Sequence[Column]) -> str:
    return f"{_short(100 * place / max(1, len(columns)))}%"


def _stack(column: Column, left: float, top: float, fills: Sequence[str]) -> SafeString:
    """Draw one column: a rectangle for each value, one above the other."""
    parts, seen = [], 0.0
    filling = " dq-filling" if column.filling else ""
    for place, value in enumerate(column.values):
        if value:
            low, seen = seen, seen + value
            parts.append(_rect(f"dq-fill-{fills[place]}{filling}", left + 0.08, _y(seen / top), 0.84, _y(low / top)))
    return _joined(parts)


def _rect(kind: str, left: float, top: float, width: float, bottom: float) -> SafeString:
    box = [_short(each) for each in (left, top, width, max(0.0, bottom - top))]
    return format_html('<rect class="{}" x="{}" y="{}" width="{}" height="{}"/>', kind, *box)


def _path(values: Iterable[float | None]) -> str:
    """Return the path of a line through the values; None leaves a gap."""
    drawn, pen = [], "M"
    for place, value in enumerate(values):
        if value is None:
            pen = "M"
            continue
        # A lone "move to" of a path draws nothing, so a point without neighbours gets a short dash.
        drawn.append(f"{pen}{_short(place + 0.5)} {_short(_log_y(value))}" + ("h.1" if pen == "M" else ""))
        pen = "L"
    return "".join(drawn)


def legend(labels: Iterable[tuple[str, Any]]) -> list[tuple[SafeString, Any]]:
    """Return what ``chart_legend.html`` shows: a square of each colour class, and its label."""
    return [(_square(fill), label) for fill, label in labels]


def _square(fill: str) -> SafeString:
    return format_html('<rect class="dq-fill-{}" width="14" height="14"/>', fill)


def _stroke(place: object) -> SafeString:
    return format_html('<path class="dq-line-{}" d="M0 7h14"/>', place)


def _joined(parts: Iterable[SafeString]) -> SafeString:
    return mark_safe("".join(parts))  # noqa: S308  each part is safe


def _short(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
