"""The arithmetic of ``python -m tools.sizing``, without servers."""

from __future__ import annotations

import pytest

from tools import sizing
from tools.pythons import ROOT


@pytest.mark.parametrize(
    ("amount", "text"), [(0, "0 B"), (999, "999 B"), (1246, "1.2 kB"), (305e9, "305 GB"), (3.05e12, "3 TB")]
)
def test_a_size_has_the_unit_that_a_reader_wants(amount: float, text: str) -> None:
    assert sizing.size(amount) == text


def test_the_page_has_the_table_of_the_figures_that_it_names() -> None:
    page = (ROOT / "docs/howto/sizing.rst").read_text("utf-8")
    assert "1,176 bytes on disk, 1,246 bytes of write-ahead log, 133 bytes in Redis" in page
    head, *rows = sizing.table(sizing.Cost(1176, 1246, 133)).splitlines()[1:-1]
    assert head in page
    # What is rounded twice may differ in its last digit.
    assert [row.split()[0] for row in rows if row.startswith("1")] == ["1", "10", "100", "1,000"]
    assert all(" ".join(row.split()[:5]) in " ".join(page.split()) for row in rows if row.startswith("1"))
