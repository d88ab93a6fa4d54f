"""The documentation of the admin describes every permission, search term and action."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from django.utils import timezone

from django_delayq.console.admin import action_table, search_box
from django_delayq.console.search.language import parse
from tests.browser.middleware import POLICY

ROOT = Path(__file__).resolve().parents[3]
TEXT = "".join((ROOT / f"docs/reference/{page}.rst").read_text("utf-8") for page in ("console", "permissions"))


@pytest.mark.parametrize("example", [example for example, _meaning in search_box.HELP])
def test_every_kind_of_term_is_described(example: str) -> None:
    assert f"``{example}``" in TEXT
    assert not parse(example, now=timezone.now()).problems


def test_every_example_of_a_search_can_be_read() -> None:
    table = TEXT.partition("term                             finds")[2].partition("The page says below the box")[0]
    terms = [term for term in re.findall(r"``([^`]+)``", table) if term not in ("*", "created:", '"42"')]
    assert len(terms) > 20
    assert [term for term in terms if parse(term, now=timezone.now()).problems] == []


def test_every_action_is_described() -> None:
    for action in action_table.CONSOLE_ACTIONS.values():
        assert re.search(rf"^{action.label}  ", TEXT, re.MULTILINE)


def test_the_policy_is_that_of_the_tests() -> None:
    assert POLICY.rstrip(";") in " ".join(TEXT.split())
