"""Charts as inline SVG, drawn on the server without script and style, each with its numbers in a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext as _

from ...core.durations import brief

# In the units of the drawing, which are also those of its text: a chart for half of a page is narrower.
WIDE, NARROW, HEIGHT = 720, 440, 200
# The margins, and the least distance of two ticks under the axis.
_LEFT, _RIGHT, _TOP, _BOTTOM, _TICK = 52, 8, 10, 24, 55
_FLOOR = HEIGHT - _BOTTOM

_NOTHING = SafeString("")


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a chart: a number for each series, or None where there is none.

    ``text`` gives the numbers in words, ``tick`` stands under the axis, the bar links to ``url``, ``alert`` sets it
    apart from the others, and ``filling`` marks a time that is not over yet.
    """

    label: str
    values: Sequence[float | None]
    text: str = ""
    tick: str = ""
    url: str = ""
    alert: bool = False
    filling: bool = False


def bars(
    name: str,
    title: str,
    description: str,
    series: Sequence[str],
    columns: Sequence[Column],
    *,
    width: int = WIDE,
    fills: Sequence[str] = ("0", "1", "2", "3", "4", "5"),
) -> SafeString:
    """Draw stacked bars. ``name`` (ASCII letters and dashes) is unique on its page; ``fills`` are colour classes."""
    # A column that is set apart may be far higher than the others: it does not set the axis, unless it is alone.
    heights = [(column.alert, sum(value or 0 for value in column.values)) for column in columns]
    top = nice(
        max((height for alert, height in heights if not alert), default=0) or max(heights, default=(False, 0))[1]
    )
    step = (width - _LEFT - _RIGHT) / max(1, len(columns))
    drawn = [
        _hatch(name),
        _grid([(_y(share), f"{top * share:,.1f}".removesuffix(".0")) for share in (0, 0.5, 1)], width),
        _ticks(columns, step, width),
        *(_bar(name, column, _LEFT + place * step, step, top, fills) for place, column in enumerate(columns)),
    ]
    linked = any(column.url for column in columns)
    svg = _svg(name, title, description, drawn, width, linked=linked)
    legend = _legend(series, lambda place: _square(fills[place]))
    return _figure(title, svg, legend, _table(title, series, columns, rounded), width)


def lines(name: str, title: str, description: str, series: Sequence[str], columns: Sequence[Column]) -> SafeString:
    """Draw lines of lengths of time in seconds, on a logarithmic scale from 1 ms to 10 minutes and more."""
    step = (NARROW - _LEFT - _RIGHT) / max(1, len(columns))
    drawn = [
        _grid([(_log_y(seconds), brief(seconds)) for seconds in _DECADES], NARROW),
        _ticks(columns, step, NARROW),
        *(_line(place, columns, step) for place in range(len(series))),
        *(_marker(column, _LEFT + place * step, step) for place, column in enumerate(columns)),
    ]
    svg = _svg(name, title, description, drawn, NARROW, linked=False)
    return _figure(title, svg, _legend(series, _stroke), _table(title, series, columns, bound), NARROW)


def nice(highest: float) -> int:
    """Return a round number that is not below ``highest``."""
    if highest <= 4:
        return max(2, 2 * math.ceil(highest / 2))
    scale = 10.0 ** math.floor(math.log10(highest))
    step = next(step for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if step * scale >= highest)
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


def _svg(
    name: str, title: str, description: str, parts: Iterable[SafeString], width: int, *, linked: bool
) -> SafeString:
    # Assistive technology reaches nothing within an image, so a chart with links is a group.
    return format_html(
        '<svg viewBox="0 0 {} {}" role="{}" aria-labelledby="{name}-title {name}-text" focusable="false">'
        '<title id="{name}-title">{}</title><desc id="{name}-text">{}</desc>{}</svg>',
        width,
        HEIGHT,
        "group" if linked else "img",
        title,
        description,
        _joined(parts),
        name=name,
    )


def _grid(levels: Iterable[tuple[float, str]], width: int) -> SafeString:
    return _joined(
        format_html(
            '<line class="dq-grid" x1="{}" x2="{}" y1="{y}" y2="{y}"/><text x="{}" y="{}" text-anchor="end">{}</text>',
            _LEFT,
            width - _RIGHT,
            _LEFT - 6,
            _short(y + 4),
            text,
            y=_short(y),
        )
        for y, text in levels
    )


def _ticks(columns: Sequence[Column], step: float, width: int) -> SafeString:
    # The text of a tick in the last places would be cut off.
    fitting = columns[: max(1, int(len(columns) - _TICK / 2 / step))]
    named = [(place, column.tick) for place, column in enumerate(fitting) if column.tick]
    every = max(1, math.ceil(len(named) * _TICK / width))
    return format_html(
        '<line class="dq-axis" x1="{}" x2="{}" y1="{y}" y2="{y}"/>{}',
        _LEFT,
        width - _RIGHT,
        _joined(
            format_html(
                '<text x="{}" y="{}" text-anchor="middle">{}</text>',
                _short(_LEFT + (place + 0.5) * step),
                HEIGHT - 8,
                tick,
            )
            for place, tick in named[::every]
        ),
        y=_FLOOR,
    )


def _hatch(name: str) -> SafeString:
    return format_html(
        '<defs><pattern id="{}-hatch" width="5" height="5" patternUnits="userSpaceOnUse"'
        ' patternTransform="rotate(45)"><line class="dq-hatch-line" y2="5" stroke-width="4"/></pattern></defs>',
        name,
    )


def _bar(name: str, column: Column, left: float, width: float, top: float, fills: Sequence[str]) -> SafeString:
    gap = min(1.0, width / 6)
    parts = [_hit(left, width)]
    seen = 0.0
    # One that is higher than the axis is cut there, with a gap under its end.
    whole = sum(value or 0 for value in column.values)
    shrunk = min(1.0, top / whole) if whole else 1.0
    for place, value in enumerate(column.values):
        if not value:
            continue
        low, seen = seen, seen + value * shrunk
        kind = f"dq-fill-{'bad' if column.alert else fills[place]}"
        parts.append(_rect("class", kind, left + gap, _y(seen / top), width - 2 * gap, _y(low / top)))
    if column.filling and seen:
        parts.append(_rect("fill", f"url(#{name}-hatch)", left + gap, _y(seen / top), width - 2 * gap, _FLOOR))
    if shrunk < 1:
        parts.append(_rect("class", "dq-cut-bar", left, _TOP + 8, width, _TOP + 12))
    inside = format_html("<title>{}: {}</title>{}", column.label, _text(column), _joined(parts))
    if not column.url or not seen:
        return format_html("<g>{}</g>", inside)
    return format_html('<a href="{}" aria-label="{}: {}">{}</a>', column.url, column.label, _text(column), inside)


def _text(column: Column) -> str:
    return _unfinished(column.text) if column.filling else column.text


def _unfinished(text: str) -> str:
    return _("%(text)s (not over yet)") % {"text": text}


def _rect(attribute: str, value: str, left: float, top: float, width: float, bottom: float) -> SafeString:
    box = [_short(each) for each in (left, top, width, max(0.0, bottom - top))]
    return format_html('<rect {}="{}" x="{}" y="{}" width="{}" height="{}"/>', attribute, value, *box)


def _hit(left: float, width: float) -> SafeString:
    """Draw nothing in the whole height of a column, for the mouse."""
    return _rect("class", "dq-hit", left, _TOP, width, _FLOOR)


def _line(series: int, columns: Sequence[Column], width: float) -> SafeString:
    drawn, pen = [], "M"
    for place, column in enumerate(columns):
        value = column.values[series]
        if value is None:
            pen = "M"
            continue
        x, y = _short(_LEFT + (place + 0.5) * width), _short(_log_y(value))
        # A move alone draws nothing, so a point without neighbours gets a short dash.
        drawn.append(f"{pen}{x} {y}" + ("h1" if pen == "M" else ""))
        pen = "L"
    return format_html('<path class="dq-line dq-line-{}" d="{}"/>', series, "".join(drawn)) if drawn else _NOTHING


def _marker(column: Column, left: float, width: float) -> SafeString:
    return format_html("<g><title>{}: {}</title>{}</g>", column.label, _text(column), _hit(left, width))


# --- the parts around the drawing -------------------------------------------------------------------------------------


def _figure(title: str, svg: SafeString, legend: SafeString, table: SafeString, width: int) -> SafeString:
    return format_html(
        '<figure class="dq-chart{}"><div class="dq-chart-scroll" role="region" tabindex="0" aria-label="{}">{}</div>{}'
        "<details><summary>{}</summary>{}</details></figure>",
        " dq-wide" if width == WIDE else "",
        title,
        svg,
        legend,
        _("Show the numbers"),
        table,
    )


def _legend(series: Sequence[str], draw: Callable[[int], SafeString]) -> SafeString:
    if len(series) < 2:
        return _NOTHING
    items = format_html_join(
        "", '<li><svg viewBox="0 0 14 14" aria-hidden="true" focusable="false">{}</svg> {}</li>',
        ((draw(place), label) for place, label in enumerate(series)),
    )  # fmt: skip
    return format_html('<ul class="dq-legend">{}</ul>', items)


def _square(fill: str) -> SafeString:
    return format_html('<rect class="dq-fill-{}" width="14" height="14"/>', fill)


def _stroke(place: int) -> SafeString:
    return format_html('<path class="dq-line dq-line-{}" d="M0 7h14"/>', place)


def _table(
    title: str, series: Sequence[str], columns: Sequence[Column], show: Callable[[float | None], str]
) -> SafeString:
    heads = format_html_join("", '<th scope="col" class="dq-number">{}</th>', ((label,) for label in series))
    rows = _joined(
        format_html(
            '<tr><th scope="row">{}</th>{}</tr>',
            _unfinished(column.label) if column.filling else column.label,
            format_html_join("", '<td class="dq-number">{}</td>', ((show(value),) for value in column.values)),
        )
        for column in columns
        if any(column.values)
    )
    return format_html(
        '<table class="dq-table"><caption class="dq-hidden">{}</caption>'
        '<thead><tr><th scope="col">{}</th>{}</tr></thead><tbody>{}</tbody></table>',
        title,
        _("Time"),
        heads,
        rows,
    )


def _joined(parts: Iterable[SafeString]) -> SafeString:
    return mark_safe("".join(parts))  # noqa: S308  each part is safe


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
