"""Calls either refuse an argument clearly and write nothing, or store it exactly as given."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from decimal import Decimal
from functools import cache, partial
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import redis
from django.core.serializers.json import DjangoJSONEncoder
from django.http import QueryDict
from django.utils.functional import Promise, lazystr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from django_delayq import (
    InvalidMessage,
    KeyConflict,
    OnConflict,
    Verdict,
    cancel_message,
    move_message,
    pause_queue,
    requeue_message,
    reschedule_message,
    resume_queue,
    run_message,
    schedule_message,
    schedule_messages,
)
from django_delayq.broker.keys import keys
from django_delayq.core.clock import from_tenths, to_tenths
from django_delayq.models import Message, Transition
from django_delayq.record import reads
from tests import settings as servers
from tests.support.steps import TOPIC, ago, claim

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("puts_are_flushed")]

some = settings(
    max_examples=60,
    deadline=None,
    # The tables may keep rows of earlier examples: each example looks at its own.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
TENTH = timedelta(microseconds=100)


@pytest.fixture(autouse=True)
def horizon(transactional_db: None) -> Iterator[redis.Redis]:
    """Give Redis a horizon so far ahead that it takes every id, as if a worker had loaded it."""
    assert servers.REDIS_SERVER is not None
    with redis.Redis(port=servers.REDIS_SERVER.port) as client:
        client.flushall()
        client.hset(keys("delayq", "default").meta, "horizon", 2**46)
        yield client


def everything(client: redis.Redis) -> tuple[int, int, dict[Any, Any]]:
    """Return all rows that a call could have written."""
    return Message.objects.count(), Transition.objects.count(), {key: client.dump(key) for key in client.scan_iter()}


@contextmanager
def refused_whole(client: redis.Redis) -> Iterator[list[Exception]]:
    """Allow an InvalidMessage in the block, and then check that nothing is written. Any other error is a fault.

    But earlier examples may have left a message with the key of this one.
    """
    before = everything(client)
    refusals: list[Exception] = []
    try:
        yield refusals
    except (InvalidMessage, KeyConflict) as error:
        refusals.append(error)
    for refusal in refusals:
        assert 0 < len(str(refusal)) < 500
        assert everything(client) == before


def read(message: Message) -> Message:
    return Message.objects.get(pk=message.pk)


# --- due times --------------------------------------------------------------------------------------------------------

ZONES = ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "America/St_Johns", "Africa/Casablanca", "UTC"]


@cache
def edges(zone: str) -> list[datetime]:
    """Return the hours of the coming two years, in UTC, at whose end the clocks of a zone change."""
    there = ZoneInfo(zone)
    start = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) + timedelta(days=2)
    hours = [start + timedelta(hours=n) for n in range(2 * 365 * 24)]
    offsets = [hour.astimezone(there).utcoffset() for hour in hours]
    return [hour for hour, this, before in zip(hours[1:], offsets[1:], offsets, strict=False) if this != before]


@st.composite
def near_an_edge(draw: st.DrawFn) -> datetime:
    """Return a wall clock's time around a change of the clocks, in either fold, existing or not."""
    zone = draw(st.sampled_from([zone for zone in ZONES if edges(zone)]))
    wall = draw(st.sampled_from(edges(zone))).astimezone(ZoneInfo(zone)).replace(tzinfo=None)
    moved = wall + draw(st.timedeltas(timedelta(hours=-3), timedelta(hours=3)))
    return moved.replace(tzinfo=ZoneInfo(zone), fold=draw(st.integers(0, 1)))


class Broken(tzinfo):
    """A zone with an offset that changes each time it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def utcoffset(self, moment: datetime | None, /) -> timedelta:
        self.asked += 1
        return timedelta(hours=self.asked % 20)

    def dst(self, moment: datetime | None, /) -> None:
        return None

    def tzname(self, moment: datetime | None, /) -> str:
        return "broken"


offsets = st.timedeltas(timedelta(hours=-23), timedelta(hours=23)).map(timezone)
ahead = st.datetimes(
    datetime.now(UTC).replace(tzinfo=None) + timedelta(days=2),
    datetime.now(UTC).replace(tzinfo=None) + timedelta(days=36_000),
    timezones=st.timezones() | offsets,
)
anywhen = st.datetimes(timezones=st.none() | st.timezones() | offsets | st.builds(Broken), allow_imaginary=True)


@some
@given(due=near_an_edge() | ahead)
def test_a_due_time_ahead_is_kept_to_the_millisecond_and_never_early(horizon: redis.Redis, due: datetime) -> None:
    offset = due.utcoffset()
    assert offset is not None
    meant = (due.replace(tzinfo=None) - offset).replace(tzinfo=UTC)
    row = read(schedule_message("c.due", due_at=due, expires="1h"))
    assert timedelta(0) <= row.due_at - meant < TENTH
    assert row.due_at.microsecond % 100 == 0
    assert row.expires_at == row.due_at + timedelta(hours=1)
    assert reschedule_message(row, due_at=due)
    assert read(row).due_at == row.due_at
    # A new message that is due so far ahead is not sent to Redis, another due time always is.
    score = horizon.zscore(keys("delayq", "default").delayed, str(row.pk))
    if to_tenths(meant) <= 2**46:
        assert score is not None
        assert from_tenths(int(score)) == row.due_at


durations = (
    st.floats()
    | st.integers()
    | st.timedeltas()
    | st.sampled_from(
        ["15m", "1h30m", "250ms", "1e3", "-5", "0x10", "soon", "", "٣s", "1_000", "9" * 400 + "s", "0.1ms"]
    )
    | st.decimals()
    | st.booleans()
    | st.just(b"1s")
)


# --- payloads and headers ---------------------------------------------------------------------------------------------

text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=12)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(-(2.0**63), 2.0**63, exclude_max=True)
    | text
    | st.decimals(allow_nan=False, allow_infinity=False)
    | st.datetimes(timezones=st.none() | st.timezones())
    | st.dates()
    | st.timedeltas()
    | st.uuids()
)
payloads = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4) | st.tuples(inner, inner),
    max_leaves=12,
)


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(value, cls=DjangoJSONEncoder))


def is_same(one: Any, other: Any) -> bool:
    """Tell whether two values are equal and of one type.

    But jsonb keeps decimals: 1e16 comes back as 10000000000000000, and -0.0 as 0.0.
    """
    if isinstance(one, float) or isinstance(other, float):
        return not isinstance(one, bool) and not isinstance(other, bool) and float(one) == float(other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)


@some
@given(payload=payloads, headers=st.dictionaries(text, scalars, max_size=3))
def test_a_payload_and_headers_come_back_and_are_delivered_as_django_encodes_them(
    horizon: redis.Redis, payload: Any, headers: dict[str, Any]
) -> None:
    single = schedule_message(TOPIC, payload, headers=headers, due_at=ago())
    (many,) = schedule_messages([{"topic": TOPIC, "payload": payload, "headers": headers, "due_at": ago()}])
    delivered: list[Any] = [*claim(single.pk, many.pk)]
    assert len(delivered) == 2
    for seen in (single, many, read(single), read(many), *delivered):
        assert is_same(seen.payload, as_json(payload))
        assert is_same(seen.headers, as_json(headers))


# --- everything else, and all of it at once ---------------------------------------------------------------------------

wild_text = st.text(
    st.characters() | st.sampled_from(list("\x00\ud800\udfff\n{}'\"\\%;* \u200b\u202eİ")), max_size=12
) | st.sampled_from(["x" * 64, "x" * 65, "x" * 100, "x" * 101, "x" * 200, "x" * 201, "default", "{a}:b", "Ⅷ", "a\n"])


class Nested(list[Any]):
    """A list that a failure can show, however deep it is."""

    def __repr__(self) -> str:
        return "nested()"


def nested() -> list[Any]:
    value = Nested()
    for _ in range(5000):
        value = Nested([value])
    return value


weird = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | wild_text
    | st.binary(max_size=4)
    | st.lists(st.integers(), max_size=2)
    | st.dictionaries(wild_text, st.integers() | wild_text, max_size=2)
    | st.just(10**5000)
    | st.just(object())
    | st.just(InvalidMessage)
    | st.sampled_from(["\x00", "\ud800", "a"]).map(lazystr)
    | st.sampled_from(["a=1&a=2", ""]).map(QueryDict)
    | st.builds(nested)
)
options = {
    "topic": wild_text | weird,
    "payload": weird,
    "delay": durations | st.floats(0, 1e9) | st.timedeltas(timedelta(0), timedelta(days=36_525)) | weird,
    "due_at": anywhen | st.dates() | weird,
    "queue": wild_text | weird,
    "priority": st.integers(-110, 110) | weird,
    "key": wild_text | weird,
    "on_conflict": st.sampled_from(list(OnConflict)) | weird,
    "expires": durations | weird,
    "max_attempts": st.integers(-2, 10_002) | weird,
    "retry": st.lists(durations, max_size=3) | weird,
    "timeout": durations | weird,
    "lease": durations | weird,
    "headers": weird,
}


# Each argument by itself, and several at once.
arguments = st.one_of([st.fixed_dictionaries({name: values}) for name, values in options.items()])
arguments |= st.fixed_dictionaries({}, optional=options)


@settings(some, max_examples=200)
@given(given=arguments)
def test_arguments_are_stored_as_given_or_refused_whole(horizon: redis.Redis, given: dict[str, Any]) -> None:
    terms: Any = {"topic": "c.one", **({} if "due_at" in given else {"delay": 3600}), **given}
    begin = reads.now("default")
    with refused_whole(horizon):
        message = schedule_message(**terms)
        end, row = reads.now("default"), read(message)
        if not message.existed:
            # Without a priority or a queue of its own a message has the default.
            for name in given.keys() & {"topic", "priority", "queue", "key", "max_attempts"}:
                assert getattr(row, name) == (DEFAULTS.get(name) if given[name] is None else given[name])
            assert begin - timedelta(minutes=2) < row.due_at == message.due_at < end + timedelta(days=36_526)
            if (span := span_of(terms.get("delay"))) is not None:
                assert begin + span <= row.due_at <= end + span + TENTH
            assert row.key is None or cancel_message(topic=row.topic, key=row.key)
    with refused_whole(horizon) as refusals:
        schedule_messages([{"topic": "c.first"}, terms, {"topic": "c.last"}])
    for refusal in refusals:
        assert isinstance(refusal, KeyConflict) or str(refusal).startswith("message 1: ")


DEFAULTS = {"priority": 0, "queue": "default"}


def span_of(delay: Any) -> timedelta | None:
    """Return the span of a delay that was accepted; None for a text, or where there is none."""
    if isinstance(delay, timedelta):
        return delay
    return timedelta(seconds=delay) if isinstance(delay, int | float) else None


@some
@given(due=anywhen | st.dates() | weird, delay=durations | weird)
def test_a_due_time_is_moved_or_refused_whole(horizon: redis.Redis, due: Any, delay: Any) -> None:
    message = schedule_message("c.due", delay="1d")
    for times in ({"due_at": due}, {"delay": delay}):
        with refused_whole(horizon):
            reschedule_message(message, **times)


@settings(some, max_examples=30)
@given(reason=weird)
def test_a_reason_is_text_or_refused_whole(horizon: redis.Redis, reason: Any) -> None:
    message = schedule_message("c.reason", delay=3600)
    calls: list[Callable[[], Any]] = [
        lambda: reschedule_message(message, delay=7200, reason=reason),
        lambda: pause_queue("c.reason", reason=reason),
        lambda: resume_queue("c.reason", reason=reason),
        lambda: cancel_message(message, reason=reason),
    ]
    for call in calls:
        with refused_whole(horizon) as refusals:
            call()
        assert bool(refusals) == (not isinstance(reason, str | Promise))


# --- ids --------------------------------------------------------------------------------------------------------------

VERBS: list[Callable[..., Any]] = [
    cancel_message,
    requeue_message,
    run_message,
    partial(reschedule_message, delay=1),
    partial(move_message, queue="b"),
]
ids = (
    st.sampled_from([0, -1, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63), 10**400, True, False, math.nan, b"1"])
    | st.integers()
    | st.floats()
    | weird
    | st.decimals()
    | st.just(Decimal(1))
    | st.just(Message())
    | st.just([1])
    | st.just({"pk": 1})
    # Text of digits is an id.
).filter(lambda target: not (isinstance(target, str) and target.isdecimal()))


@some
@given(target=ids, verb=st.sampled_from(VERBS))
def test_a_malformed_id_is_refused_and_an_unknown_one_is_not_found(
    horizon: redis.Redis, target: Any, verb: Callable[..., Any]
) -> None:
    message = schedule_message("c.id", delay=3600)
    if isinstance(target, int) and not isinstance(target, bool) and 0 < target <= message.pk:
        target += message.pk
    before = everything(horizon)
    with refused_whole(horizon):
        answer = verb(target)
        assert isinstance(target, int)
        assert not isinstance(target, bool)
        assert 0 < target < 2**63
        assert (answer.verdict, answer.state, bool(answer)) == (Verdict.NOT_FOUND, None, False)
    assert everything(horizon) == before


@some
@given(topic=wild_text | weird, key=wild_text | weird, verb=st.sampled_from(VERBS))
def test_a_topic_and_key_that_nobody_has_are_not_found_or_refused(
    horizon: redis.Redis, topic: Any, key: Any, verb: Callable[..., Any]
) -> None:
    before = everything(horizon)
    with refused_whole(horizon):
        assert verb(topic=topic, key=key).verdict == Verdict.NOT_FOUND
    assert everything(horizon) == before
