"""All arguments are checked at the call."""

from __future__ import annotations

import json
import math
import re
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import pytest
from django.core.serializers.json import DjangoJSONEncoder
from django.http import QueryDict
from django.utils import timezone as django_timezone
from django.utils.datastructures import MultiValueDict
from django.utils.functional import lazystr
from hypothesis import given
from hypothesis import strategies as st

from django_delayq.core.exceptions import InvalidMessage, PayloadTooLarge
from django_delayq.project import validation
from tests.support.payloads import good

if TYPE_CHECKING:
    from pytest_django import Settings

BERLIN = ZoneInfo("Europe/Berlin")


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def cyclic_list() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def cyclic_dict() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["self"] = [value]
    return value


# --- payloads ---------------------------------------------------------------------------------------------------------

wild_text = st.text(st.characters() | st.sampled_from(["\x00", "\ud800", "\udfff", "\\", '"']), max_size=8)
wild = st.recursive(
    st.none() | st.integers() | st.floats() | wild_text | st.binary(max_size=3) | st.datetimes() | st.decimals(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.sets(st.integers(), max_size=2)
        | st.dictionaries(wild_text | st.integers() | st.none(), inner, max_size=4)
    ),
    max_leaves=20,
)


def no_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


flat = st.dictionaries(
    wild_text | st.integers(), st.none() | st.integers() | st.floats() | wild_text | good, max_size=4
)


@given(good | flat | wild)
def test_a_value_that_is_known_without_decoding_is_the_one_that_decoding_finds(value: Any) -> None:
    try:
        text, known = validation.payload_and_value(value)
    except InvalidMessage:
        return
    # By their representations, since 1, 1.0 and True are equal.
    assert known is None or (repr(known) == repr(json.loads(text)) and known is not value)


def test_most_payloads_need_no_careful_look() -> None:
    assert validation.payload_and_value({"order": 5, "mail": "a@b", "sum": 1.5, "paid": False, "note": None})[1]


class Number(int):
    pass


@pytest.mark.parametrize("value", [[1], {"a": []}, {"a": Number(1)}, {"a": date(2020, 1, 1)}, {"a": ("b",)}, "a", None])
def test_other_payloads_are_decoded(value: Any) -> None:
    assert validation.payload_and_value(value)[1] is None


@given(good)
def test_a_payload_is_written_as_json_with_the_encoder_of_django(value: Any) -> None:
    plain = json.dumps(value, cls=DjangoJSONEncoder, ensure_ascii=False, separators=(",", ":"))
    assert validation.payload(value) == plain


@given(wild)
def test_an_accepted_payload_is_strict_json_that_a_database_takes(value: Any) -> None:
    try:
        text = validation.payload(value)
    except InvalidMessage:
        return
    text.encode()
    again = json.loads(text, parse_constant=no_constant)
    assert validation.payload(again) == text


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (math.nan, "not JSON"),
        ({"a": -math.inf}, "not JSON"),
        ("a\x00b", "NUL"),
        ({"a\x00": 1}, "NUL"),
        ({"a": "\x00"}, "NUL"),
        (lazystr("a\x00b"), "NUL"),
        ({"a": 2**63}, "64 bits"),
        ({"a": -(2**63) - 1}, "64 bits"),
        (1e20, "float"),
        ({"a": 2.0**63}, "float"),
        ({"a": [-1e300]}, "float"),
        ({"a": "\ud800"}, "surrogate"),
        ("\ud800", "surrogate"),
        ([lazystr("\ud800")], "surrogate"),
        ({"\udfff": 1}, "surrogate"),
        (2**63, "64 bits"),
        ([-(2**63) - 1], "64 bits"),
        (10**5000, "64 bits"),
        ({1: "a"}, "not a string"),
        ({None: "a"}, "not a string"),
        ({("a", "b"): 1}, "not a string"),
        ({1.5: "a"}, "not a string"),
        (nested(100_000), "too deep"),
        (cyclic_list(), "too deep"),
        (cyclic_dict(), "too deep"),
        (time(12, tzinfo=UTC), "not JSON"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isprintable() else type(value).__name__,
)
def test_a_payload_that_is_not_json_or_cannot_be_stored_is_refused(value: Any, why: str) -> None:
    with pytest.raises(InvalidMessage, match=why):
        validation.payload(value)


class Order:
    pk = 7


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Order(), "the payload is of type Order, which is not JSON; pass its pk"),
        ({"order": Order()}, "payload['order'] is of type Order, which is not JSON; pass its pk"),
        ({"orders": [1, {"a": Order()}]}, "payload['orders'][1]['a'] is of type Order, which is not JSON; pass its pk"),
        ({"a": ({1},)}, "payload['a'][0] is of type set, which is not JSON; pass a list"),
        ([MappingProxyType({})], "payload[0] is of type mappingproxy, which is not JSON; pass a dict"),
        ({"a": b"x"}, "payload['a'] is of type bytes, which is not JSON; pass text"),
        ({"a": object()}, "payload['a'] is of type object, which is not JSON"),
        ({"a": [0.5, math.inf]}, "payload['a'][1] is not JSON: Out of range float values are not JSON compliant"),
        ({"a": ["b", "\x00"]}, "payload['a'][1] holds a NUL character, which PostgreSQL cannot store"),
        ({"a": [lazystr("\x00")]}, "payload['a'][0] holds a NUL character, which PostgreSQL cannot store"),
        (
            QueryDict("a=1&a=2"),
            "the payload is a QueryDict, of which JSON keeps only the last value of each name; pass its .dict() for",
        ),
        ({"form": MultiValueDict()}, "payload['form'] is a MultiValueDict, of which JSON keeps only the last value"),
        ({"a": {"\x00": 1}}, "payload['a'] has a key with a NUL character, which PostgreSQL cannot store"),
        ({"a": ["\ud800"]}, "payload['a'][0] holds a lone surrogate, which no UTF-8 text can"),
        ([[1, 1, 2**63]], "payload[0][2] holds an integer of more than 64 bits; send it as a string"),
        ({"a": [1e20]}, "payload['a'][0] holds a float of 2**63 or more, which PostgreSQL returns as an integer; send"),
        ({"a": {1: 2}}, "payload['a'] has a key that is not a string: 1"),
        (nested(65), "payload[0][0][0][0][0][0][0][0][…] is nested too deep"),
        ({"k" * 100: object()}, f"payload['{'k' * 40}'…] is of type object, which is not JSON"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isprintable() else type(value).__name__,
)
def test_an_error_names_the_place_in_the_payload(value: Any, message: str) -> None:
    with pytest.raises(InvalidMessage) as caught:
        validation.payload(value)
    assert str(caught.value).startswith(message)


def test_an_error_names_the_place_in_the_headers() -> None:
    with pytest.raises(InvalidMessage, match=r"^headers\['trace'\]\[0\] is of type object, which is not JSON$"):
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


# --- names ------------------------------------------------------------------------------------------------------------

NO_NAME = ["", " ", "a b", "a\n", "\na", "a{b}", "a}", "{", "a'b", 'a"b', "a\x00", "ä", "a;b", "a*", "-a", ".a", "_a"]
NOT_TEXT = [None, 3, b"a", ["a"], True]


@pytest.mark.parametrize("name", ["a", "orders.close", "Orders_1", "a/b:c-d.e", "9", "x" * 100])
def test_a_topic_is_a_word_with_a_few_signs(name: str) -> None:
    assert validation.topic(name) == name


@pytest.mark.parametrize("name", [*NO_NAME, *NOT_TEXT, "x" * 101, "/a", ":a"], ids=ascii)
def test_any_other_topic_is_refused(name: Any) -> None:
    with pytest.raises(InvalidMessage, match="topic must be"):
        validation.topic(name)


@pytest.mark.parametrize("name", ["a", "fast-lane", "q_1.eu", "x" * 64])
def test_a_queue_is_a_word_with_fewer_signs(name: str) -> None:
    assert validation.queue(name) == name


@pytest.mark.parametrize("name", [*NO_NAME, *NOT_TEXT, "x" * 65, "a/b", "a:b"], ids=ascii)
def test_any_other_queue_is_refused(name: Any) -> None:
    with pytest.raises(InvalidMessage, match="queue must be"):
        validation.queue(name)


@given(st.text(st.characters(), max_size=70))
def test_no_accepted_queue_could_break_a_redis_key(name: str) -> None:
    try:
        validation.queue(name)
    except InvalidMessage:
        return
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name, re.ASCII)


@pytest.mark.parametrize("key", [None, "42", "order 42", "a{b}'\"", "ключ", "✓", "x" * 200])
def test_a_key_is_printable_text_or_none(key: str | None) -> None:
    assert validation.key(key) == key


@pytest.mark.parametrize(
    "key", ["", " ", " a", "a ", "a\n", "a\x00b", "\ud800", "\u200b", "x" * 201, 42, b"a", True], ids=ascii
)
def test_any_other_key_is_refused(key: Any) -> None:
    with pytest.raises(InvalidMessage, match="key must be"):
        validation.key(key)


@pytest.mark.parametrize("value", [-101, 101, 1.0, "1", True, None, 10**30, math.nan], ids=repr)
def test_a_priority_out_of_range_is_refused(value: Any) -> None:
    with pytest.raises(InvalidMessage, match="priority must be"):
        validation.priority(value)


def test_priorities_reach_from_minus_100_to_100() -> None:
    assert [validation.priority(value) for value in (-100, 0, 100)] == [-100, 0, 100]


@pytest.mark.parametrize("value", [0, -1, 10_001, 2.0, "3", True, 10**30], ids=repr)
def test_impossible_attempts_are_refused(value: Any) -> None:
    with pytest.raises(InvalidMessage, match="max_attempts"):
        validation.max_attempts(value)


# --- times ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "meant"),
    [(0, 0), (0.001, 0.001), ("15m", 900), (timedelta(days=36_525), 36_525 * 86_400), (1e-300, 0)],
    ids=repr,
)
def test_a_delay_is_0_or_more(value: Any, meant: float) -> None:
    assert validation.delay(value) == timedelta(seconds=meant)


@pytest.mark.parametrize(
    "value",
    [
        *[-1, -0.001, timedelta(seconds=-1), timedelta.min, timedelta.max, timedelta(days=36_526)],
        *[math.nan, math.inf, -math.inf, 1e300, 10**400, True, None, "soon", "101000w", [], date.max],
    ],
    ids=lambda value: repr(value)[:30],
)
def test_any_other_delay_is_refused(value: Any) -> None:
    with pytest.raises(InvalidMessage):
        validation.delay(value)


class Nowhere(tzinfo):
    """A time zone without an offset: a datetime with it is naive."""

    def utcoffset(self, moment: datetime | None, /) -> None:
        return None

    def dst(self, moment: datetime | None, /) -> None:
        return None

    def tzname(self, moment: datetime | None, /) -> str:
        return "nowhere"


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


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, 1e300, True, "never", timedelta(0)], ids=repr)
def test_an_impossible_expiry_is_refused(value: Any) -> None:
    with pytest.raises(InvalidMessage):
        validation.expires(value)


def test_an_expiry_is_a_span_or_none() -> None:
    assert validation.expires(None) is None
    assert validation.expires("1h") == timedelta(hours=1)


@pytest.mark.parametrize("check", ["topic", "queue", "key"])
def test_an_error_shows_only_a_little_of_a_wrong_name(check: str) -> None:
    with pytest.raises(InvalidMessage) as caught:
        getattr(validation, check)("\n" + "x" * 100_000)
    assert len(str(caught.value)) < 300
