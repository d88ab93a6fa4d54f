"""The page about the findings of ``delayq_check``: its table is made from the code, and each row has its section."""

from __future__ import annotations

import re

from docs.findings import findings

from .blocks import text_of


def sections() -> dict[str, str]:
    """The sections of the page."""
    parts = re.split(r"^([^=\n]+)\n=+\n", text_of("howto/findings"), flags=re.MULTILINE)[3:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_each_finding_of_the_table_has_a_section_and_no_other_has() -> None:
    assert len(findings()) > 10
    assert sections().keys() == findings().keys()


def test_a_section_tells_how_bad_its_finding_can_be() -> None:
    words = {"WARN": "A warning", "CRITICAL": "ritical"}
    told = {name: {level for level, word in words.items() if word in text} for name, text in sections().items()}
    only = {name: known.levels - {"OK"} for name, known in findings().items()}
    assert {name for name, levels in only.items() if levels == {"WARN"} and "WARN" not in told[name]} == set()
    assert {name for name, levels in only.items() if "CRITICAL" in levels and "CRITICAL" not in told[name]} == set()
