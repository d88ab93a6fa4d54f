"""The answers that were recorded from a server of lmstfy: see the table in ``answers``."""

from __future__ import annotations

import re

import pytest

from tests.http.answers import ADMINISTRATION, ANSWERS, JSON, Row
from tests.http.conftest import Wire

# The most time between a publish and the answer that tells of it. Seconds.
PATIENCE = 90
# What stands in a table for what differs from answer to answer.
PATTERNS = {"<id>": "[0-9A-Z]{26}", r"<id\+>": "1[0-9A-Z]{26}", "<n>": "[0-9]+"}


def pattern(text: str) -> str:
    found = re.sub(r"<ttl\\ (\d+)>", _up_to, re.escape(text))
    for sign, meant in PATTERNS.items():
        found = found.replace(sign, meant)
    return found


def _up_to(given: re.Match[str]) -> str:
    most = int(given[1])
    return f"(?:{'|'.join(str(left) for left in range(max(1, most - PATIENCE), most + 1))})"


@pytest.mark.parametrize("row", ANSWERS, ids=[row.name for row in ANSWERS])
def test_answer(wire: Wire, row: Row) -> None:
    told = wire.row(row)
    assert told.status_code == row.ours.status
    assert re.fullmatch(pattern(wire.filled(row.ours.body)), told.content.decode())
    assert told.get("Content-Type") == (JSON if row.ours.body else None)
    assert re.fullmatch("[0-9A-Z]{26}", told["X-Request-Id"])


def test_the_table_has_all_answers_and_says_why_few_of_them_differ() -> None:
    names = [row.name for row in ANSWERS]
    assert (len(names), len({*names})) == (129, 129)
    different = [row for row in ANSWERS if row.because]
    assert all((row.recorded == row.ours) == (not row.because) for row in ANSWERS)
    # The administration's rows have one reason.
    assert len([row for row in different if row.because != ADMINISTRATION]) + 1 <= 12
