"""Failures that differ only in numbers, ids or quoted text have the same error kind."""

from __future__ import annotations

import pytest

from django_delayq.core.bounds import KIND_LENGTH
from django_delayq.core.outcomes import error_kind


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Timeout: no answer in 30 s", "Timeout: no answer in 2.5 s"),
        ("KeyError: 'order-7'", "KeyError: 'order-8'"),
        ("Gone: 3f2504e0-4f89-11d3-9a0c-0305e82c3301", "Gone: 00000000-0000-0000-0000-000000000000"),
        ("Bad: <object at 0x7f966d122a10>", "Bad: <object at 0x7f966d046110>"),
        ("outer\nValueError: 1", "other\nValueError: 2"),
    ],
)
def test_like_failures_have_one_error_kind(one: str, other: str) -> None:
    assert error_kind(one) == error_kind(other)


def test_other_failures_have_another_error_kind() -> None:
    assert error_kind("Timeout: no answer") != error_kind("Refused: no answer")
    assert error_kind("Timeout: connect") != error_kind("Timeout: read")


def test_an_error_kind_is_short_and_empty_without_an_error() -> None:
    assert len(error_kind("Error: " + "x " * 10_000)) == KIND_LENGTH
    assert error_kind("") == ""
