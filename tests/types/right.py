"""Right uses of the API, with the types that mypy and pyright find for them. They are checked, and never run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypedDict, assert_type

from django.db.models import QuerySet

from django_delayq import (
    Answer,
    Delivered,
    HandlerFunction,
    MessageDict,
    OnConflict,
    RegisteredHandler,
    RetryLater,
    RetryPolicy,
    Verdict,
    acancel_message,
    apause_queue,
    areschedule_message,
    aschedule_message,
    aschedule_messages,
    cancel_message,
    handler,
    move_message,
    repeat_message,
    requeue_message,
    reschedule_message,
    run_message,
    schedule_message,
    schedule_messages,
)
from django_delayq.contrib.tasks import options
from django_delayq.models import Message, Queue

DELAYS = ["1m", "10m"]
WHEN = datetime(2050, 1, 1, tzinfo=UTC)


class Order(TypedDict):
    order: int


@handler("orders.close", retry=["1m", timedelta(hours=1)], timeout="30s", lease=None)
def close(message: Delivered[Order]) -> None:
    assert_type(message.payload, Order)
    assert_type(message.due_at, datetime)
    assert_type(message.expires_at, datetime | None)
    assert_type(message.attempts_left, int | None)
    message.raise_if_cancelled()
    if message.attempt == 1:
        raise RetryLater("5m", payload=None)
    raise RetryLater("5m")


@handler("orders.tell", retry=RetryPolicy.exponential(on=(ConnectionError,), never=ValueError), timeout=False)
async def tell(message: Delivered) -> int:
    assert_type(message.payload, Any)
    await message.aextend("5m")
    message.raise_if_cancelled()
    return 1


@handler("orders.limited", limit=5, rate="100/m", burst=10, limit_key=lambda message: message.payload["customer"])
def wait_for_a_place(message: Delivered) -> None: ...


@handler("orders.any", retry=lambda attempt, error: None if isinstance(error, ValueError) else 60 * attempt)
def accept_anything(message: Any) -> None: ...


@handler("orders.charge", on_dead="orders.gave_up", on_expired="orders.gave_up")
def charge(message: Delivered[Order]) -> None: ...


@handler("orders.count", batch=100, linger="200ms", transactional=True)
def count_together(messages: list[Delivered[Order]]) -> None:
    for message in messages:
        assert_type(message.payload, Order)
        message.retry_later("5m", counts=False)
        message.reject("gone")
        message.fail(ValueError("bad"))


@handler("orders.tell_all", batch=50)
async def tell_together(messages: list[Delivered[Order]]) -> int:
    return len(messages)


@dataclass
class Close:
    order: int


def load(found: Any) -> Close:
    return Close(**found)


@handler("orders.typed", payload=Close)
def close_typed(message: Delivered[Close]) -> None:
    assert_type(message.payload, Close)
    assert_type(message.payload.order, int)


@handler("orders.typed_list", payload=list[Close], batch=10)
def close_lists(messages: list[Delivered[list[Close]]]) -> None: ...


@handler("orders.typed_dict", payload=Order)
async def close_dict(message: Delivered[Order]) -> None: ...


@handler("orders.typed_union", payload=Close | None)
def close_any(message: Delivered[Close | None]) -> None: ...


@handler("orders.typed_pair", payload=(load, asdict))
def close_pair(message: Delivered[Close]) -> None: ...


@options(batch=10, linger="1s", redeliver=False)
def index(pages: list[int]) -> None: ...


@options(key="order-{order}", unique="1h", on_conflict="keep", expires="1h", retry=DELAYS, limit=5, limit_key=str)
def total(order: int, shipping: int = 0) -> int:
    return order + shipping


assert_type(total(5, shipping=9), int)

registered = handler("orders.again", retry=DELAYS)(accept_anything)
wrapped: Callable[[HandlerFunction], RegisteredHandler] = handler("orders.wrapped")
several: HandlerFunction = close


async def call(delivered: Delivered[Order]) -> None:
    close(delivered)
    assert_type(await tell(delivered), int)
    count_together([delivered])
    assert_type(await tell_together([delivered]), int)


def schedule() -> None:
    assert_type(schedule_message("orders.close", {"order": 5}, delay="15m", key="5", on_conflict="keep"), Message)
    schedule_message("orders.close", due_at=WHEN, on_conflict=OnConflict.DEBOUNCE, key="5", retry=DELAYS)
    schedule_message("orders.close", {"lines": [5]}, key="5", on_conflict="merge_debounce")
    schedule_message("orders.close", [5], key="5", on_conflict=OnConflict.MERGE)
    schedule_message("orders.limited", {"customer": 7}, limit_key="7")
    charge.schedule({"order": 5}, on_dead="orders.urgent", on_expired=False)
    schedule_message("orders.close", retry=False, headers={"tenant": 1}, expires=timedelta(days=1), using="other")
    rows: list[MessageDict] = [{"topic": "orders.close", "payload": {"order": 5}, "delay": 60}]
    assert_type(schedule_messages(rows, using="other"), list[Message])
    assert_type(close.schedule({"order": 5}, delay="15m", key="5"), Message)
    assert_type(close.topic, str)
    tell.schedule(payload=[1, 2, 3], priority=5)
    assert_type(close_typed.schedule(Close(5), delay="15m"), Message)
    close_lists.schedule([Close(5)])
    close_dict.schedule({"order": 5})
    close_any.schedule(None)
    assert_type(count_together.schedule({"order": 5}, delay="15m"), Message)
    accept_anything.schedule({"order": 5})
    registered.schedule({"order": 5}, using="other")


def act(message: Message, rows: QuerySet[Message]) -> None:
    assert_type(cancel_message(5), Answer)
    assert_type(cancel_message(topic="orders.close", key="5", reason="paid"), Answer)
    assert_type(cancel_message(rows), Counter[Verdict])
    assert_type(run_message(message), Answer)
    assert_type(reschedule_message(message, delay="15m"), Answer)
    assert_type(reschedule_message(topic="orders.close", key="5", due_at=WHEN), Answer)
    assert_type(reschedule_message(rows, delay=60, due_at=None), Counter[Verdict])
    assert_type(requeue_message(message, delay=0), Answer)
    assert_type(move_message(5, queue="b", priority=5), Answer)
    assert_type(move_message(topic="orders.close", key="5", queue="b"), Answer)
    assert_type(move_message(rows, queue="b", reason="busy"), Counter[Verdict])
    assert_type(requeue_message(rows, spread="10m"), Counter[Verdict])
    assert_type(repeat_message(message, delay="10m").repeats, int | None)


async def act_from_async_code(message: Message, rows: QuerySet[Message]) -> None:
    assert_type(await aschedule_message("orders.close", {"order": 5}, delay="15m"), Message)
    assert_type(await aschedule_messages([{"topic": "orders.close"}]), list[Message])
    assert_type(await tell.aschedule(delay=5), Message)
    assert_type(await acancel_message(message), Answer)
    assert_type(await acancel_message(rows), Counter[Verdict])
    assert_type(await areschedule_message(topic="orders.close", key="5", delay="15m"), Answer)
    assert_type(await apause_queue("mail", duration="30m"), Queue)
