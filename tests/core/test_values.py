"""A value is checked by the same rules, and refused in the same words, wherever it is given."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from django_delayq import RetryLater
from django_delayq.core import values
from django_delayq.core.exceptions import InvalidMessage
from django_delayq.management import _common as common
from django_delayq.project import conf, validation
from django_delayq.recurring import definition


def refused(check: Callable[..., Any], *given: Any) -> str:
    with pytest.raises((ValueError, argparse.ArgumentTypeError)) as error:
        check(*given)
    return str(error.value)


def hint(name: str, value: Any) -> str:
    _settings, (problem,) = conf.parse({name: value})
    return problem.hint.removesuffix(".")


@pytest.mark.parametrize("value", ["", "two words", "x" * 65, "-a"])
def test_the_name_of_a_queue_is_refused_in_the_same_words_everywhere(value: str) -> None:
    words = refused(values.word, value, 64)
    assert hint("DEFAULT_QUEUE", value) == hint("QUEUES", [value]) == words
    assert refused(common.queue_name, value) == refused(validation.queue, value) == f"queue {words}"
    assert refused(lambda: definition.checked("t.ok", every="1h", queue=value)) == f"queue {words}"


@pytest.mark.parametrize("value", ["soon", "-5s", "1000000w"])
def test_a_span_is_refused_in_the_same_words_everywhere(value: str) -> None:
    words = refused(values.span, value)
    assert hint("RETENTION", value) == refused(common.duration, value) == words
    assert refused(validation.delay, value) == f"delay {words}"


@pytest.mark.parametrize(
    ("lowest", "highest", "words"),
    [
        (0.01, 30 * values.DAY, "must be between 10 ms and 30 days, not 'x'"),
        (1, values.DAY, "must be between 1 second and 1 day, not 'x'"),
        (values.SHORTEST, values.CENTURY, "must be more than 0 and at most 100 years, not 'x'"),
        (0.0, values.YEAR, "must be between 0 and 1 year, not 'x'"),
    ],
)
def test_the_bounds_of_a_span_are_told_as_people_say_them(lowest: float, highest: float, words: str) -> None:
    outside = highest * 2
    assert refused(values.span, outside, lowest, highest).partition(", not")[0] == words.partition(", not")[0]
    assert values.span(lowest, lowest, highest) == lowest
    assert values.span(highest, lowest, highest) == highest


@pytest.mark.parametrize("value", [0, 10, True, 2.0, "3", None, 10**30])
def test_a_whole_number_is_within_its_bounds_and_no_other_type(value: Any) -> None:
    assert "must be a whole number from 1 to 9, not " in refused(values.whole, value, 1, 9)
    assert [values.whole(number, 1, 9) for number in (1, 9)] == [1, 9]


@pytest.mark.parametrize("text", ["x", "1.5", "", "0"])
def test_a_command_says_of_a_number_what_it_must_be(text: str) -> None:
    assert refused(common.positive, text).startswith("must be a whole number of 1 or more, not ")


@pytest.mark.parametrize(("text", "number"), [("1", 1), ("007", 7), (f"{2**63 - 1}", 2**63 - 1), ("0" * 5000 + "1", 1)])
def test_an_id_is_read(text: str, number: int) -> None:
    assert values.row_id(text) == number


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "1.0", "x", "²", "٣", f"{2**63}", "0" * 10 + "1" + "0" * 20, "9" * 5000]
)
def test_what_no_row_can_have_is_no_id(text: str) -> None:
    assert refused(values.row_id, text).startswith("must be the id of a row, not ")


@pytest.mark.parametrize("delay", [-1, 1e15, "99999999999d", "soon"])
def test_an_impossible_delay_of_a_retry_is_a_value_error(delay: Any) -> None:
    assert refused(RetryLater, delay).startswith(("delay must be between 0 and 100 years", "delay is not a duration"))


def test_a_moment_is_aware_and_kept_in_utc() -> None:
    there = datetime(2030, 1, 1, 12, tzinfo=timezone(timedelta(hours=2)))
    assert (values.moment(there), values.moment(there).tzinfo) == (there, UTC)
    assert "no time zone" in refused(values.moment, datetime(2030, 1, 1))  # noqa: DTZ001
    assert "aware datetime, not 'now'" in refused(values.moment, "now")
    assert "out of range" in refused(values.moment, datetime.max.replace(tzinfo=timezone(-timedelta(hours=2))))


@pytest.mark.parametrize("value", ["x" * 1000, b"secret", 10**30, ["secret"]])
def test_no_error_shows_a_whole_value(value: Any) -> None:
    for check in (validation.topic, validation.queue, validation.key, validation.priority, validation.delay):
        with pytest.raises(InvalidMessage) as error:
            check(value)
        assert "secret" not in str(error.value)
        assert len(str(error.value)) < 250
