"""The page about the tests shows what the tests keep to."""

from __future__ import annotations

import re

from tests.conftest import OF_ANY_DATABASE

from .blocks import text_of


def test_the_page_shows_which_tests_a_second_database_leaves_out() -> None:
    """Each row is a place in ``tests`` and the reason, which may go on in the lines below it."""
    table = text_of("explanation/testing").partition("why once is enough\n")[2].partition("\n\n")[0]
    rows = re.findall(r"^``([\w./]+)`` +(.+(?:\n +.+)*)", table, re.MULTILINE)
    assert {place: " ".join(reason.split()) for place, reason in rows} == OF_ANY_DATABASE
