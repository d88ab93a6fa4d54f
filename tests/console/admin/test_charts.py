"""Charts: their drawing, their texts, and hostile names in them."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from django_delayq.console.admin import charts
from django_delayq.console.admin.charts import Column, Marks

HOSTILE = '<script>alert("x")&\'</script>'


def tree(html: Any) -> ET.Element:
    """Parse a chart as XML, so that it must be well-formed."""
    return ET.fromstring(str(html))


def found(html: Any, tag: str, kind: str = "") -> list[ET.Element]:
    return [one for one in tree(html).iter(tag) if kind in one.get("class", "").split() or not kind]


def draw(*columns: Column, series: tuple[str, ...] = ("a", "b"), **terms: Any) -> Any:
    return charts.bars("dq-x", "Title", "What it shows.", series, columns, **terms)


def test_bars_are_stacked_from_the_ground_in_the_order_of_the_series() -> None:
    html = draw(Column("10:00", [30, 10], "40 messages"), Column("10:05", [0, 40], "40 messages"))
    low, [high, alone] = found(html, "rect", "dq-fill-0")[0], found(html, "rect", "dq-fill-1")[:2]
    heights = [float(rect.get("height", "")) for rect in (low, high, alone)]
    assert heights[0] == pytest.approx(3 * heights[1], abs=0.3)
    assert heights[2] == pytest.approx(4 * heights[1], abs=0.3)
    assert float(high.get("y", "")) + heights[1] == pytest.approx(float(low.get("y", "")), abs=0.2)


def test_marks_stand_over_the_bars_and_the_most_sets_the_axis_unless_it_is_far_higher() -> None:
    columns = [Column("10:00", [10, 0]), Column("10:05", [6, 0])]
    html = draw(*columns, marks=Marks(1, "10:05", 16, "most: 16", "3 overdue"))
    [line] = found(html, "line", "dq-now")
    [most] = found(html, "line", "dq-line-most")
    assert line.get("x1") == "50%"
    assert 0 < float(most.get("y1", "")) < float(found(html, "rect", "dq-fill-0")[0].get("y", ""))
    assert [flag.text for flag in found(html, "p", "dq-flag")] == ["3 overdue"]
    assert "most: 16" in html
    far = draw(*columns, marks=Marks(1, "10:05", 21, "most: 21"))
    assert not found(far, "line", "dq-line-most")
    assert "most: 21" not in far
    assert not found(far, "p", "dq-flag")


def test_a_sparkline_is_as_high_as_its_highest_number() -> None:
    _area, line = found(charts.spark([0, 5, None, 10], "warn"), "path")
    assert re.findall(r" ([\d.]+)", line.get("d", "")) == ["25", "14.55", "25", "4.09"]
    assert charts.spark([1]) == ""


def test_shares_fill_a_bar_and_a_gauge() -> None:
    parts = [("0", 3), ("3", 0), ("bad", 1)]
    widths = [(one.get("class"), one.get("x"), one.get("width")) for one in found(charts.mix(parts), "rect")]
    assert widths == [("dq-fill-0", "0", "75"), ("dq-fill-bad", "75", "25")]
    assert [one.get("class") for one in found(charts.mix([("0", 0)]), "rect")] == ["dq-fill-none"]
    for share, fill in ((0.5, "dq-fill-0"), (1.5, "dq-fill-1")):
        assert found(charts.gauge(share), "rect")[0].get("class") == fill


def test_a_busy_thread_is_a_full_square() -> None:
    assert [one.get("class") for one in found(charts.squares(1, 3), "i")] == ["dq-busy", "", ""]


def test_an_image_has_a_name_and_a_group_of_links_too() -> None:
    for columns, role in (([Column("10:00", [1])], "img"), ([Column("10:00", [1], url="/")], "group")):
        [svg] = [one for one in tree(draw(*columns, series=("a",))).iter("svg") if one.get("role")]
        assert svg.get("role") == role
        names = {one.get("id"): one.text for one in svg if one.get("id")}
        assert [names[id_] for id_ in svg.get("aria-labelledby", "").split()] == ["Title", "What it shows."]


def test_hostile_names_stay_text() -> None:
    column = Column(HOSTILE, [1, 2], HOSTILE, HOSTILE, f"/?q={HOSTILE}")
    for draw_ in (charts.bars, charts.lines):
        html = draw_("dq-x", HOSTILE, HOSTILE, (HOSTILE, "b"), [column])
        assert "<script" not in html
        assert not list(tree(html).iter("script"))
        assert HOSTILE in [one.text for one in tree(html).iter("title")]


def test_the_table_holds_the_numbers_without_the_empty_lines() -> None:
    html = draw(Column("10:00", [1234, 0]), Column("10:05", [0, 0]), Column("10:10", [1, 2], filling=True))
    [table] = found(html, "table")
    rows = [[cell.text for cell in row] for row in table.iter("tr")]
    assert rows == [["Time", "a", "b"], ["10:00", "1,234", "0"], ["10:10 (not over yet)", "1", "2"]]


def test_an_unfinished_bar_is_paler() -> None:
    html = draw(Column("09:55", [1, 1]), Column("10:00", [1, 0], filling=True))
    assert len(found(html, "rect", "dq-filling")) == 1


def test_a_line_has_gaps_and_a_longer_time_is_higher_but_never_outside() -> None:
    values = [0.0001, 0.001, 0.05, None, 3.0, 600.0, math.inf]
    columns = [Column(str(place), [value]) for place, value in enumerate(values)]
    html = charts.lines("dq-y", "T", "D", ("a",), columns)
    [path] = found(html, "path", "dq-line-0")
    assert path.get("d", "").count("M") == 2
    heights = [float(height) for height in re.findall(r" ([\d.]+)", path.get("d", ""))]
    assert heights == sorted(heights, reverse=True)
    assert (heights[0], heights[-1]) == (heights[1], heights[-2])
    assert "&gt; 10 m" in html


@pytest.mark.parametrize(
    ("highest", "top"), [(0, 2), (1, 2), (3, 4), (5, 5), (11, 15), (60, 60), (61, 80), (8120, 10_000)]
)
def test_the_axis_ends_at_a_round_number_and_tells_half_of_it_as_it_is(highest: int, top: int) -> None:
    [half, whole] = re.findall(r">([\d.,]+)</text>", str(draw(Column("c", [highest]), series=("a",))))[1:3]
    assert (float(half.replace(",", "")), float(whole.replace(",", ""))) == (top / 2, top)


def test_a_chart_without_columns_is_drawn() -> None:
    assert found(draw(), "svg")
    assert found(charts.lines("dq-y", "T", "D", ("a",), []), "svg")


def test_ticks_do_not_crowd() -> None:
    columns = [Column(str(place), [1], tick=f"{place:02}:00") for place in range(60)]
    texts = [one.text for one in tree(draw(*columns, series=("a",))).iter("text") if one.get("text-anchor") == "middle"]
    assert 5 < len(texts) < 15
