"""Retry policies decide whether a message is delivered again, and when."""

from __future__ import annotations

import json
import math
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_delayq.core.durations import Duration
from django_delayq.core.exceptions import HandlerTimeout
from django_delayq.core.retry import LONGEST, RetryPolicy, as_policy

PAYMENT = ["4m", "10m", "10m", "1h", "2h", "6h", "15h"]


def waits(policy: RetryPolicy, attempts: int) -> list[float | None]:
    delays = [policy.delay(attempt) for attempt in range(1, attempts + 1)]
    return [None if delay is None else delay.total_seconds() for delay in delays]


def test_fixed_delays_come_one_after_the_other_and_exponential_ones_double_up_to_the_cap() -> None:
    assert waits(RetryPolicy.fixed(PAYMENT), 9) == [240, 600, 600, 3600, 7200, 21_600, 54_000, None, None]
    assert waits(RetryPolicy.exponential(10, cap=60, jitter=0, max_attempts=None), 5) == [10, 20, 40, 60, 60]


@given(
    base=st.floats(0, 1e6),
    factor=st.floats(1, 1e3),
    cap=st.floats(0, 1e6),
    jitter=st.floats(0, 1),
    attempt=st.integers(1, 100_000),
)
def test_an_exponential_delay_stays_within_its_bounds(
    base: float, factor: float, cap: float, jitter: float, attempt: int
) -> None:
    policy = RetryPolicy.exponential(base, factor=factor, cap=cap, jitter=jitter, max_attempts=None)
    delay = policy.delay(attempt)
    assert delay is not None
    lowest = timedelta(seconds=min(base, cap))
    highest = timedelta(seconds=min(cap, math.inf if base else 0) * (1 + jitter))
    tick = timedelta(microseconds=1)
    assert timedelta(0) <= delay
    assert lowest - tick <= delay <= highest + tick


def test_jitter_spreads_messages_that_failed_together() -> None:
    policy = RetryPolicy.exponential(100, cap=100, jitter=0.5)
    delays = {policy.delay(1) for _ in range(50)}
    assert len(delays) > 40
    assert all(delay is not None and 100 <= delay.total_seconds() <= 150 for delay in delays)


def test_a_custom_policy_decides_by_attempt_and_error() -> None:
    def chooser(attempt: int, error: BaseException | None) -> Duration | None:
        return "1m" if isinstance(error, TimeoutError) and attempt < 3 else None

    policy = RetryPolicy.custom(chooser)
    assert policy.delay(1, TimeoutError()) == timedelta(minutes=1)
    assert policy.delay(3, TimeoutError()) is None
    assert policy.delay(1, KeyError()) is None


@pytest.mark.parametrize("chosen", [-1, math.nan, math.inf, "soon", LONGEST + timedelta(days=1)], ids=repr)
def test_an_impossible_answer_of_a_custom_policy_is_an_error(chosen: Any) -> None:
    with pytest.raises(ValueError):
        RetryPolicy.custom(lambda attempt, error: chosen).delay(1)


@pytest.mark.parametrize(
    ("option", "values", "words"),
    [
        ("factor", [0.5, math.nan, math.inf, "2"], "factor must be a number, 1 or more, not "),
        ("jitter", [-0.1, 1.1, math.nan, None], "jitter must be a number between 0 and 1, not "),
        ("max_attempts", [0, 1.5, "3"], "max_attempts must be a whole number, 1 or more, or None, not "),
        ("base", [-1, "soon"], ""),
        ("cap", [math.inf], ""),
    ],
)
def test_an_impossible_term_is_refused_by_its_name_when_the_policy_is_made(
    option: str, values: list[Any], words: str
) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"^{words}"):
            RetryPolicy.exponential(**{option: value})


def test_attempts_are_counted_from_1() -> None:
    with pytest.raises(ValueError, match="from 1"):
        RetryPolicy.never().delay(0)


@pytest.mark.parametrize(
    ("limit", "expected"), [(None, [240, 600, None]), (2, [240, None, None]), (9, [240, 600, None])]
)
def test_a_limit_only_ever_shortens_a_policy(limit: int | None, expected: list[float | None]) -> None:
    assert waits(RetryPolicy.fixed(["4m", "10m"]).limited(limit), 3) == expected
    assert waits(RetryPolicy.custom(lambda attempt, error: 5).limited(2), 3) == [5, None, None]
    tight = RetryPolicy.exponential(1, jitter=0, max_attempts=2)
    assert waits(tight.limited(limit), 3) == [1, None, None]


policies = st.one_of(
    st.lists(st.floats(0, 1e6), max_size=8).map(RetryPolicy.fixed),
    st.builds(
        RetryPolicy.exponential,
        st.floats(0, 1e6),
        factor=st.floats(1, 100),
        cap=st.floats(0, 1e6),
        jitter=st.floats(0, 1),
        max_attempts=st.none() | st.integers(1, 100),
    ),
).flatmap(lambda policy: st.none().map(lambda _: policy) | st.integers(1, 50).map(policy.limited))


@given(policies)
def test_a_policy_comes_back_from_json_as_it_was(policy: RetryPolicy) -> None:
    assert RetryPolicy.from_json(json.loads(json.dumps(policy.to_json()))) == policy


@pytest.mark.parametrize("stored", [None, [], "x", 3, {}, {"base": 1}, {"fixed": 5}, {"fixed": [-1]}], ids=repr)
def test_json_that_is_no_stored_policy_is_refused(stored: Any) -> None:
    with pytest.raises(ValueError):
        RetryPolicy.from_json(stored)


# --- which exceptions -------------------------------------------------------------------------------------------------


class Timeout(ConnectionError): ...


@pytest.mark.parametrize("make", [RetryPolicy.exponential, partial(RetryPolicy.fixed, ["1s", "1s"])], ids=["", "fixed"])
def test_a_policy_retries_the_exceptions_that_it_names_and_none_that_it_excludes(make: Any) -> None:
    def is_retried(error: BaseException | None, **which: Any) -> bool:
        return make(**which).limited(9).delay(1, error) is not None

    assert is_retried(SystemExit())
    assert is_retried(Timeout(), on=ConnectionError)
    assert is_retried(KeyError(), on=(ConnectionError, LookupError))
    assert not is_retried(ValueError(), on=(ConnectionError,))
    assert not is_retried(HandlerTimeout(), on=(Exception,))
    assert not is_retried(Timeout(), on=ConnectionError, never=(Timeout,))
    assert not is_retried(UnicodeError(), never=ValueError)
    assert is_retried(KeyError(), never=ValueError)
    assert is_retried(None, on=KeyError)


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ({"on": ()}, "on names no exception"),
        ({"on": "ConnectionError"}, "on is a class of exceptions, or a tuple of such classes, not str"),
        ({"on": [ValueError]}, "on is a class of exceptions, or a tuple of such classes, not list"),
        ({"never": (ValueError, int)}, "never is a class of exceptions, or a tuple of such classes, not int"),
        ({"never": ValueError()}, "never is .* not ValueError"),
        ({"on": (Timeout,), "never": (ConnectionError,)}, "contradict each other: Timeout would never be retried"),
    ],
    ids=repr,
)
def test_an_impossible_choice_of_exceptions_is_refused_when_the_policy_is_made(which: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RetryPolicy.exponential(**which)
    with pytest.raises(ValueError, match=message):
        RetryPolicy.fixed([1], **which)


def test_a_policy_can_take_over_the_exceptions_of_another() -> None:
    policy = RetryPolicy.fixed([1]).for_errors_of(RetryPolicy.exponential(on=OSError, never=ConnectionError))
    assert policy.delay(1, OSError()) == timedelta(seconds=1)
    assert policy.delay(1, ConnectionError()) is None
    assert policy.delay(1, KeyError()) is None


@pytest.mark.parametrize(
    ("policy", "attempts"),
    [
        (RetryPolicy.never(), 1),
        (RetryPolicy.fixed(PAYMENT), 8),
        (RetryPolicy.fixed(PAYMENT).limited(3), 3),
        (RetryPolicy.fixed([1]).limited(3), 2),
        (RetryPolicy.exponential(), 10),
        (RetryPolicy.exponential(max_attempts=None), None),
        (RetryPolicy.custom(lambda attempt, error: 1), None),
        (RetryPolicy.custom(lambda attempt, error: 1).limited(4), 4),
    ],
)
def test_a_policy_tells_how_many_attempts_it_allows(policy: RetryPolicy, attempts: int | None) -> None:
    assert policy.attempts == attempts


def test_everything_that_retry_accepts_becomes_a_policy() -> None:
    policy = RetryPolicy.fixed([1])
    assert as_policy(policy) is policy
    assert as_policy(False).delay(1) is None
    assert as_policy(["4m"]).delay(1) == timedelta(minutes=4)
    assert as_policy(lambda attempt, error: 7).delay(1) == timedelta(seconds=7)


async def choose(attempt: int, error: BaseException | None) -> int:
    return 60


LIST = "a list of delays is wanted, such as .*, not "
FUNCTION = r"a function of \(attempt, error\) is wanted, not "


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (5, r"for 5 retries write RetryPolicy.exponential\(max_attempts=6\)"),
        ("5m", f"{LIST}str"),
        (None, f"{LIST}NoneType"),
        ({"10s": 1}, f"{LIST}dict"),
        ({"10s"}, f"{LIST}set"),
        (choose, f"{FUNCTION}an async one, which nobody awaits"),
        (lambda attempt: 5, f"{FUNCTION}.*too many positional arguments"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_value_that_is_no_policy_is_refused_in_a_sentence(value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"^retry is a RetryPolicy.*, or False for never: {words}$"):
        as_policy(value)
