"""Texts are changed until every database can store them, and errors are shortened to their kind."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_delayq.core.bounds import LENGTHS
from django_delayq.core.outcomes import error_kind, storable


def test_plain_text_is_left_alone() -> None:
    assert storable("Zahlung über 12 € ✓\n") == "Zahlung über 12 € ✓\n"


@pytest.mark.parametrize("wrong", ["a\x00b", "a\ud800b", "\udfff", "\x00" * 10_000], ids=ascii)
def test_characters_that_no_database_takes_are_replaced(wrong: str) -> None:
    text = storable(wrong)
    assert "\x00" not in text
    text.encode()


def test_the_beginning_and_the_end_of_a_long_text_remain() -> None:
    text = storable("first" + "x" * 1_000_000 + "last")
    assert len(text) <= LENGTHS.text
    assert text.startswith("first")
    assert text.endswith("last")
    assert "[...]" in text


@given(st.text(st.characters(), max_size=300), st.integers(20, 200))
def test_any_text_becomes_storable_within_the_limit(text: str, limit: int) -> None:
    stored = storable(text, limit)
    assert len(stored) <= limit
    assert "\x00" not in stored
    stored.encode()
    assert storable(stored, limit) == stored


def test_an_error_kind_is_short_and_empty_without_an_error() -> None:
    assert len(error_kind("Error: " + "x " * 10_000)) == LENGTHS.kind
    assert error_kind("") == ""
