"""Typed payloads: checked where a message is scheduled, converted before its handler."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, NamedTuple

import pytest
from asgiref.sync import async_to_sync
from django.db import OperationalError
from typing_extensions import TypedDict

from django_delayq import (
    Delivered,
    InvalidMessage,
    RetryLater,
    aschedule_message,
    handler,
    schedule_message,
    schedule_messages,
)
from django_delayq.core.states import State
from django_delayq.middleware import Handled, Middleware
from django_delayq.models import Message
from django_delayq.project import registry
from django_delayq.recurring import create_schedule, run_schedule
from django_delayq.testing import Delayq
from tests.support.assembled import deliver
from tests.support.middlewares import installed
from tests.support.record_of import log_of
from tests.support.workers import ROOT

pydantic = pytest.importorskip("pydantic")
pytestmark = pytest.mark.django_db(transaction=True)

TOPIC = "typed.close"
OTHER = "typed.other"
WHEN = datetime(2026, 12, 1, 9, tzinfo=UTC)


@dataclass
class CloseOrder:
    order: int
    at: datetime = WHEN
    lines: list[Decimal] = field(default_factory=list)


@dataclass
class Cart:
    items: list[int]


class Plain(TypedDict):
    order: int
    at: datetime


class Strict(pydantic.BaseModel):  # type: ignore[misc, name-defined, unused-ignore]
    model_config = pydantic.ConfigDict(strict=True, populate_by_name=False)

    order: int = pydantic.Field(alias="orderId")
    at: datetime


class Pair(NamedTuple):
    order: int


def load_pair(found: Any) -> Pair:
    if not isinstance(found, int):
        raise TypeError(f"{found!r} is no number")
    return Pair(found)


got: list[Any] = []


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    got.clear()
    yield
    for topic in (TOPIC, OTHER):
        registry.unregister(topic)


@pytest.fixture
def delayq() -> Iterator[Delayq]:
    with Delayq() as helper:
        yield helper


def close(message: Delivered[Any]) -> None:
    got.append(message.payload)


async def close_on_loop(message: Delivered[Any]) -> None:
    got.append(message.payload)


def close_together(messages: list[Delivered[Any]]) -> None:
    got.extend(message.payload for message in messages)


async def close_together_on_loop(messages: list[Delivered[Any]]) -> None:
    got.extend(message.payload for message in messages)


HANDLERS: list[Any] = [
    pytest.param(close, {}, id="sync"),
    pytest.param(close, {"transactional": True}, id="transactional"),
    pytest.param(close_on_loop, {}, id="async"),
    pytest.param(close_together, {"batch": 10}, id="batch"),
    pytest.param(close_together_on_loop, {"batch": 10, "transactional": True}, id="async batch"),
]


def write(payload: Any, topic: str = TOPIC) -> Message:
    """Write a message as a process does that does not know the handler."""
    known = registry.declared.pop(topic)
    try:
        return schedule_message(topic, payload)
    finally:
        registry.declared[topic] = known


# --- convert ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("function", "options"), HANDLERS)
def test_a_handler_gets_what_was_scheduled(function: Any, options: dict[str, Any]) -> None:
    registered = handler(TOPIC, payload=CloseOrder, **options)(function)
    given = CloseOrder(5, lines=[Decimal("1.50")])
    message = registered.schedule(given)
    assert message.payload == {"order": 5, "at": "2026-12-01T09:00:00Z", "lines": ["1.50"]}
    deliver()
    assert got == [given]


@pytest.mark.parametrize(
    ("kind", "given", "stored"),
    [
        (Plain, {"order": 5, "at": WHEN}, {"order": 5, "at": "2026-12-01T09:00:00Z"}),
        (Strict, Strict(orderId=5, at=WHEN), {"orderId": 5, "at": "2026-12-01T09:00:00Z"}),
        (list[CloseOrder], [CloseOrder(5)], [{"order": 5, "at": "2026-12-01T09:00:00Z", "lines": []}]),
        (CloseOrder | None, None, None),
        (int, 5, 5),
        ((load_pair, lambda pair: pair.order), Pair(5), 5),
    ],
    ids=["TypedDict", "strict model with an alias", "list", "union", "int", "pair of functions"],
)
def test_types_of_many_kinds_go_there_and_back(kind: Any, given: Any, stored: Any) -> None:
    registered = handler(TOPIC, payload=kind)(close)
    assert registered.schedule(given).payload == stored
    deliver()
    assert got == [given]


def test_what_json_has_of_it_may_be_scheduled_too() -> None:
    handler(TOPIC, payload=CloseOrder)(close)
    schedule_message(TOPIC, {"order": 5, "lines": ["1.50"]})
    deliver()
    assert got == [CloseOrder(5, lines=[Decimal("1.50")])]


def test_msgspec_comes_as_a_pair_of_functions() -> None:
    msgspec = pytest.importorskip("msgspec")
    kind = msgspec.defstruct("Close", [("order", int)])
    registered = handler(TOPIC, payload=(lambda found: msgspec.convert(found, kind), msgspec.to_builtins))(close)
    registered.schedule(kind(5))
    with pytest.raises(InvalidMessage, match="Expected `int`, got `str`"):
        registered.schedule({"order": "x"})
    deliver()
    assert got == [kind(5)]


def test_a_limit_key_gets_the_payload_as_the_handler_does() -> None:
    handler(TOPIC, payload=CloseOrder, limit=1, limit_key=lambda message: f"order-{message.payload.order}")(close)
    several: Any = [{"topic": TOPIC, "payload": one} for one in (CloseOrder(5), {"order": 6})]
    assert [message.limit_key for message in schedule_messages(several)] == ["order-5", "order-6"]


def test_a_payload_that_is_left_for_later_is_converted_anew() -> None:
    @handler(TOPIC, payload=CloseOrder)
    def put_off(message: Delivered[CloseOrder]) -> None:
        got.append(message.payload)
        if message.payload.order == 5:
            raise RetryLater(0, payload={"order": 6})
        raise RetryLater(0, payload={"order": "x"})

    message = put_off.schedule(CloseOrder(5))
    for _attempt in range(3):
        deliver()
    assert got == [CloseOrder(5), CloseOrder(6)]
    message.refresh_from_db()
    assert (message.state, message.payload) == (State.DEAD, {"order": "x"})


def test_middleware_is_around_the_conversion() -> None:
    seen: list[Any] = []

    class Look(Middleware):
        @contextmanager
        def handling(self, message: Handled) -> Iterator[None]:
            seen.append(message.payload)
            try:
                yield
            finally:
                seen.append(message.outcome)

    handler(TOPIC, payload=CloseOrder)(close)
    with installed(Look()):
        write({"order": "x"})
        deliver()
    assert seen == [{"order": "x"}, "dead"]


# --- refuse -----------------------------------------------------------------------------------------------------------

UNFIT = "the payload does not fit CloseOrder: order: Input should be a valid integer"


def schedule_many(topic: str, payload: Any) -> Any:
    return schedule_messages([{"topic": topic, "payload": {"order": 5}}, {"topic": topic, "payload": payload}])


@pytest.mark.parametrize("call", [schedule_message, schedule_many])
@pytest.mark.parametrize("given", [{"order": "x"}, CloseOrder("x")], ids=["JSON", "object"])  # type: ignore[arg-type]
def test_what_does_not_fit_is_refused_and_nothing_is_written(call: Callable[..., Any], given: Any) -> None:
    handler(TOPIC, payload=CloseOrder)(close)
    with pytest.raises(InvalidMessage, match=UNFIT):
        call(TOPIC, given)
    assert not Message.objects.exists()


@pytest.mark.parametrize("given", [None, [], 5, object(), {"ordr": 5}], ids=["None", "[]", "5", "object", "{}"])
def test_what_is_of_another_type_is_refused(given: Any) -> None:
    handler(TOPIC, payload=CloseOrder)(close)
    with pytest.raises(InvalidMessage, match="the payload does not fit CloseOrder: "):
        schedule_message(TOPIC, given)


@pytest.mark.parametrize("load", [load_pair, int], ids=["own error", "built in"])
def test_an_error_of_a_function_is_the_reason(load: Any) -> None:
    registered = handler(TOPIC, payload=(load, lambda value: value))(close)
    with pytest.raises(InvalidMessage, match=r"does not fit (load_pair: 'x' is no number|int: invalid literal)"):
        registered.schedule("x")


@pytest.mark.parametrize(("function", "options"), HANDLERS)
def test_a_message_that_does_not_fit_any_more_is_dead_at_once_and_harms_no_other(
    delayq: Delayq, function: Any, options: dict[str, Any]
) -> None:
    registered = handler(TOPIC, payload=CloseOrder, retry=["1m"] * 5, **options)(function)
    bad, good = write({"order": "x"}), registered.schedule(CloseOrder(5))
    delayq.drain()
    assert got == [CloseOrder(5)]
    assert [Message.objects.get(pk=message.pk).state for message in (bad, good)] == [State.DEAD, State.CONSUMED]
    last = log_of(bad)[-1]
    assert (last.error or "").startswith(f"Reject: {UNFIT}")


def test_a_batch_in_which_none_fits_calls_nobody(delayq: Delayq) -> None:
    handler(TOPIC, payload=CloseOrder, batch=10)(close_together)
    several = [write({"order": "x"}), write({"order": "y"})]
    delayq.drain()
    assert got == []
    assert {Message.objects.get(pk=message.pk).state for message in several} == {State.DEAD}


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (5, "pydantic knows no such type as 5"),
        (object, None),
        ((load_pair,), r"payload is a type, or a pair of functions \(load, dump\)"),
        ((load_pair, 5), "pair of functions"),
    ],
)
def test_what_is_no_type_is_refused_when_the_handler_is_declared(payload: Any, words: str | None) -> None:
    if words is None:
        handler(TOPIC, payload=payload)(close)
        return
    with pytest.raises(TypeError, match=words):
        handler(TOPIC, payload=payload)


def test_without_pydantic_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['pydantic'] = None\n"
        "import django; django.setup()\n"
        "from django_delayq import handler\n"
        "handler('a', payload=(int, str))\n"
        "handler('b', payload=int)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "ImproperlyConfigured: payload= with a type needs pydantic: pip install 'django-delayq[pydantic]'" in (
        ended.stderr
    )


# --- with other parts -------------------------------------------------------------------------------------------------


def test_async_calls_check_too() -> None:
    handler(TOPIC, payload=CloseOrder)(close_on_loop)
    with pytest.raises(InvalidMessage, match=UNFIT):
        async_to_sync(aschedule_message)(TOPIC, {"order": "x"})


def test_perform_converts_and_refuses_as_in_life(delayq: Delayq) -> None:
    handler(TOPIC, payload=CloseOrder)(close)
    handler(OTHER, payload=CloseOrder, batch=10)(close_together)
    delayq.perform(TOPIC, CloseOrder(5))
    assert delayq.perform(OTHER, [CloseOrder(6), {"order": 7}]) == [None, None]
    assert got == [CloseOrder(5), CloseOrder(6), CloseOrder(7)]
    with pytest.raises(InvalidMessage, match=UNFIT):
        delayq.perform(TOPIC, {"order": "x"})


def test_payloads_that_were_merged_are_of_the_type() -> None:
    registered = handler(TOPIC, payload=list[CloseOrder])(close)
    for order in (5, 6):
        registered.schedule([CloseOrder(order)], key="all", on_conflict="merge")
    deliver()
    assert got == [[CloseOrder(5), CloseOrder(6)]]


def test_payloads_are_merged_whose_function_takes_objects_alone() -> None:
    registered = handler(TOPIC, payload=(lambda found: Cart(**found), asdict))(close)
    for item in (5, 6):
        registered.schedule(Cart([item]), key="all", on_conflict="merge")
    deliver()
    assert got == [Cart([5, 6])]


def test_payloads_that_fit_alone_and_not_together_are_not_merged() -> None:
    def load_two(found: list[int]) -> list[int]:
        if len(found) > 2:
            raise ValueError("more than two")
        return found

    registered = handler(TOPIC, payload=(load_two, list))(close)
    registered.schedule([5, 6], key="all", on_conflict="merge")
    with pytest.raises(InvalidMessage, match="more than two"):
        registered.schedule([7], key="all", on_conflict="merge")
    deliver()
    assert got == [[5, 6]]


@pytest.mark.parametrize(("function", "options"), HANDLERS)
def test_a_database_that_is_away_when_a_payload_is_converted_makes_no_message_dead(
    function: Any, options: dict[str, Any]
) -> None:
    answers = iter([True, False, True])

    def load(found: int) -> int:
        if not next(answers):
            raise OperationalError("the server closed the connection")
        return found

    registered = handler(TOPIC, payload=(load, int), retry=[0], **options)(function)
    message = registered.schedule(5)
    for _attempt in range(2):
        deliver()
    message.refresh_from_db()
    assert (got, message.state) == ([5], State.CONSUMED)


def test_a_database_that_is_away_at_the_call_is_no_fault_of_the_payload() -> None:
    def load(found: int) -> int:
        raise OperationalError("the server closed the connection")

    registered = handler(TOPIC, payload=(load, int))(close)
    with pytest.raises(OperationalError, match="closed the connection"):
        registered.schedule(5)


def test_a_schedule_is_checked_when_it_is_made() -> None:
    handler(TOPIC, payload=CloseOrder)(close)
    with pytest.raises(InvalidMessage, match=UNFIT):
        create_schedule("daily", TOPIC, every="1d", payload={"order": "x"})
    create_schedule("daily", TOPIC, every="1d", payload=CloseOrder(5))
    run_schedule("daily")
    deliver()
    assert got == [CloseOrder(5)]
