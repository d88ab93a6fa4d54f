"""All arguments are checked at the call."""

from __future__ import annotations

import json
import math
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import pytest
from django.http import QueryDict
from django.utils import timezone as django_timezone
from django.utils.datastructures import MultiValueDict
from django.utils.functional import lazystr

from django_delayq.core.exceptions import InvalidMessage, PayloadTooLarge
from django_delayq.project import validation

if TYPE_CHECKING:
    from pytest_django import Settings

BERLIN = ZoneInfo("Europe/Berlin")


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def cyclic() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["self"] = [value]
    return value


# --- payloads ---------------------------------------------------------------------------------------------------------


class Order:
    pk = 7


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, "the payload is not JSON: Out of range float values are not JSON compliant"),
        ({"a": [0.5, math.inf]}, "payload['a'][1] is not JSON: Out of range float values are not JSON compliant"),
        (Order(), "the payload is of type Order, which is not JSON; pass its pk"),
        ({"orders": [1, {"a": Order()}]}, "payload['orders'][1]['a'] is of type Order, which is not JSON; pass its pk"),
        ({"a": ({1},)}, "payload['a'][0] is of type set, which is not JSON; pass a list"),
        ([MappingProxyType({})], "payload[0] is of type mappingproxy, which is not JSON; pass a dict"),
        ({"a": b"x"}, "payload['a'] is of type bytes, which is not JSON; pass text"),
        ({"k" * 100: object()}, f"payload['{'k' * 40}'…] is of type object, which is not JSON"),
        (time(12, tzinfo=UTC), "the payload is not JSON"),
        ("a\x00b", "the payload holds a NUL character, which PostgreSQL cannot store"),
        ({"a": "\x00"}, "payload['a'] holds a NUL character, which PostgreSQL cannot store"),
        ({"a": [lazystr("\x00")]}, "payload['a'][0] holds a NUL character, which PostgreSQL cannot store"),
        ({"a\x00": 1}, "the payload has a key with a NUL character"),
        ({"a": {"\x00": 1}}, "payload['a'] has a key with a NUL character, which PostgreSQL cannot store"),
        (
            QueryDict("a=1&a=2"),
            "the payload is a QueryDict, of which JSON keeps only the last value of each name; pass",
        ),
        ({"form": MultiValueDict()}, "payload['form'] is a MultiValueDict, of which JSON keeps only the last value"),
        ({"a": "\ud800"}, "payload['a'] holds a lone surrogate, which no UTF-8 text can"),
        ([lazystr("\ud800")], "payload[0] holds a lone surrogate"),
        ({"\udfff": 1}, "the payload holds a lone surrogate"),
        ({"a": -(2**63) - 1}, "payload['a'] holds an integer of more than 64 bits; send it as a string"),
        ([[1, 1, 2**63]], "payload[0][2] holds an integer of more than 64 bits; send it as a string"),
        (10**5000, "the payload holds an integer of more than 64 bits"),
        ({"a": 2.0**63}, "payload['a'] holds a float of 2**63 or more, which PostgreSQL returns as an integer; send"),
        ([-1e300], "payload[0] holds a float of 2**63 or more"),
        ({"a": {1: 2}}, "payload['a'] has a key that is not a string: 1"),
        ({None: "a"}, "the payload has a key that is not a string: None"),
        (nested(65), "payload[0][0][0][0][0][0][0][0][…] is nested too deep"),
        (nested(100_000), "payload[0][0][0][0][0][0][0][0][…] is nested too deep"),
        (cyclic(), "payload['self'][0]['self'][0]['self'][0]['self'][0][…] is nested too deep"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isprintable() else type(value).__name__,
)
def test_a_payload_that_cannot_be_stored_is_refused_with_the_place_in_it(value: Any, message: str) -> None:
    with pytest.raises(InvalidMessage) as caught:
        validation.payload(value)
    assert str(caught.value).startswith(message)


def test_an_error_names_the_place_in_the_headers() -> None:
    words = (
        r"^headers\['trace'\]\[0\] is of type object, which is not JSON; pass a dict of what is needed of the object$"
    )
    with pytest.raises(InvalidMessage, match=words):
        validation.headers({"trace": [object()]})


def test_a_text_that_looks_like_an_escaped_nul_is_accepted() -> None:
    for value in ("\\u0000", {"\\u0000": [lazystr("\\u0000")]}):
        assert json.loads(validation.payload(value)) == value


def test_the_limits_themselves_are_accepted() -> None:
    for value in (2**63 - 1, -(2**63), nested(64)):
        assert json.loads(validation.payload(value)) == value


def test_a_payload_over_the_limit_is_refused_with_its_size(settings: Settings) -> None:
    settings.DELAYQ = {"PAYLOAD_MAX_BYTES": 10}
    assert validation.payload("x" * 8) == '"xxxxxxxx"'
    with pytest.raises(PayloadTooLarge, match=r"11 bytes.*= 10"):
        validation.payload("x" * 9)
    with pytest.raises(PayloadTooLarge):
        validation.payload("ä" * 5)


def test_no_error_shows_the_values_of_the_payload() -> None:
    for secret in ("s3cret\x00", ["s3cret", math.nan], {"name": {"s3cret"}}, "s3cret\ud800", "s3cret" * 100_000):
        with pytest.raises(InvalidMessage) as caught:
            validation.payload(secret)
        assert "s3cret" not in str(caught.value)


def test_headers_are_a_small_dict() -> None:
    assert validation.headers(None) == "{}"
    assert json.loads(validation.headers({"trace": "abc"})) == {"trace": "abc"}
    too_large = {"a": "x" * 20_000}
    wrong: Any
    for wrong in ([], "x", 3, {1: 2}, {"a": math.nan}, {"a": "\x00"}, too_large, {"a": nested(5)}):
        with pytest.raises(InvalidMessage):
            validation.headers(wrong)


# --- names and numbers ------------------------------------------------------------------------------------------------

NO_NAME = ["", " ", "a b", "a\n", "\na", "a{", "a}", "{", "a'b", 'a"b', "a\x00", "ä", "a;b", "a*", "-a", ".a", "_a"]
NOT_TEXT = [None, 3, b"a", ["a"], True]
RIGHT: dict[str, list[Any]] = {
    "topic": ["a", "orders.close", "Orders_1", "a/b:c-d.e", "9", "x" * 100],
    "queue": ["a", "fast-lane", "q_1.eu", "x" * 64],
    "key": [None, "42", "order 42", "a{b}'\"", "ключ", "✓", "x" * 200],
    "priority": [-100, 0, 100],
    "max_attempts": [None, 1, 10_000],
}
WRONG: dict[str, list[Any]] = {
    "topic": [*NO_NAME, *NOT_TEXT, "x" * 101, "/a", ":a", "\n" + "x" * 100_000],
    "queue": [*NO_NAME, *NOT_TEXT, "x" * 65, "a/b", "a:b", "\n" + "x" * 100_000],
    "key": ["", " ", " a", "a ", "a\n", "a\x00b", "\ud800", "\u200b", "x" * 201, 42, b"a", True],
    "priority": [-101, 101, 1.0, "1", True, None, 10**30, math.nan],
    "max_attempts": [0, -1, 10_001, 2.0, "3", True, 10**30],
    "delay": [
        *[-1, -0.001, timedelta(seconds=-1), timedelta.min, timedelta.max, timedelta(days=36_526), math.nan, math.inf],
        *[-math.inf, 1e300, 10**400, True, None, "soon", "101000w", [], date.max],
    ],
    "expires": [0, -1, math.nan, math.inf, 1e300, True, "never", timedelta(0)],
}


def cases(table: dict[str, list[Any]]) -> pytest.MarkDecorator:
    """Run a test with each value of each argument."""
    given = [(argument, value) for argument, values in table.items() for value in values]
    return pytest.mark.parametrize(("argument", "value"), given, ids=lambda value: ascii(value)[:30])


@cases(RIGHT)
def test_a_right_value_is_kept(argument: str, value: Any) -> None:
    assert getattr(validation, argument)(value) == value


@cases(WRONG)
def test_a_wrong_value_is_refused_by_the_name_of_its_argument(argument: str, value: Any) -> None:
    with pytest.raises(InvalidMessage, match=f"^{argument} (must be|is not a) ") as caught:
        getattr(validation, argument)(value)
    assert len(str(caught.value)) < 300


# --- times ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "meant"),
    [(0, 0), (0.001, 0.001), ("15m", 900), (timedelta(days=36_525), 36_525 * 86_400), (1e-300, 0)],
    ids=repr,
)
def test_a_delay_is_0_or_more(value: Any, meant: float) -> None:
    assert validation.delay(value) == timedelta(seconds=meant)


class Nowhere(tzinfo):
    """A time zone without an offset: a datetime with it is naive."""

    def utcoffset(self, moment: datetime | None, /) -> None: ...

    def dst(self, moment: datetime | None, /) -> None: ...

    def tzname(self, moment: datetime | None, /) -> None: ...


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (datetime(2050, 1, 1), "no time zone"),  # noqa: DTZ001
        (datetime(2050, 1, 1, tzinfo=Nowhere()), "no time zone"),
        (datetime(2020, 1, 1, tzinfo=UTC), "in the past"),
        (datetime.min.replace(tzinfo=UTC), "in the past"),
        (datetime.min.replace(tzinfo=timezone(timedelta(hours=23))), "past|out of range"),
        (datetime.max.replace(tzinfo=UTC), "100 years"),
        (datetime.max.replace(tzinfo=timezone(timedelta(hours=-23))), "100 years|out of range"),
        (datetime(9999, 12, 31, tzinfo=BERLIN), "100 years"),
        (date(2050, 1, 1), "aware datetime"),
        (math.inf, "aware datetime"),
        ("2050-01-01T00:00:00Z", "aware datetime"),
        (2_524_608_000, "aware datetime"),
        (None, "aware datetime"),
    ],
    ids=str,
)
def test_an_impossible_due_time_is_refused(value: Any, why: str) -> None:
    with pytest.raises(InvalidMessage, match=why):
        validation.due(value)


def test_a_due_time_a_moment_ago_means_now() -> None:
    moment = django_timezone.now() - timedelta(seconds=30)
    assert validation.due(moment) == moment


def test_an_expiry_is_a_span_or_none() -> None:
    assert validation.expires(None) is None
    assert validation.expires("1h") == timedelta(hours=1)
