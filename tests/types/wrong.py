"""Wrong uses of the API. Each line names the error that mypy finds in it, and the one that pyright finds.

Both fail when they find another error, or none: an ignored error that is not there is an error, too.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TypedDict

from django.db.models import QuerySet

from django_delayq import (
    Delivered,
    RetryLater,
    RetryPolicy,
    acancel_message,
    apause_queue,
    areschedule_message,
    aschedule_message,
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
from django_delayq.models import Message
from tests.types.right import Close, close_typed

WHEN = datetime(2050, 1, 1, tzinfo=UTC)


class Order(TypedDict):
    order: int


@handler("orders.close")
def close(message: Delivered[Order]) -> None: ...


# --- handlers ---------------------------------------------------------------------------------------------------------


@handler("wrong.parameter")  # type: ignore[arg-type]  # pyright: ignore
def takes_a_number(message: int) -> None: ...


@handler("wrong.model")  # type: ignore[arg-type]  # pyright: ignore
def takes_the_row(message: Message) -> None: ...


@handler("wrong.two")  # type: ignore[arg-type]  # pyright: ignore
def takes_two(message: Delivered, more: int) -> None: ...


@handler("wrong.none")  # type: ignore[arg-type]  # pyright: ignore
def takes_nothing() -> None: ...


@handler("wrong.payload")
def reads_another_payload(message: Delivered[Order]) -> None:
    message.payload["ordr"]  # type: ignore[typeddict-item]  # pyright: ignore[reportGeneralTypeIssues]


handler("wrong.option", retires=["1m"])  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
handler("wrong.topic", queue=5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
handler("wrong.retry", retry="5m")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
handler("wrong.retry", retry=5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
handler("wrong.retry", retry=True)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
handler("wrong.retry", retry=[object()])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]
handler("wrong.retry", retry=lambda attempt: 5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
handler("wrong.timeout", timeout=[5])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
handler("wrong.limit", limit="5")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
handler("wrong.limit", rate=100)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
handler("wrong.limit", limit=5, limit_key="customer")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
handler("wrong.follows", on_dead=close)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
handler("wrong.follows", on_expired=False)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
handler("wrong.payload", payload=5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
handler("wrong.payload", payload=(int,))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
handler(close)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
options(retires=["1m"])  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
options(key=5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
options(key=lambda order: 5)  # type: ignore[arg-type, return-value]  # pyright: ignore[reportArgumentType, reportUnknownLambdaType]
options(key="5", on_conflict="overwrite")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
options(batch="5")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
options(redeliver="no")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
options(limit="5")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
RetryPolicy.exponential(on=["ConnectionError"])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
RetryPolicy.exponential(never=ValueError())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
RetryPolicy.fixed("10m")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
RetryLater(None)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

# --- schedule ---------------------------------------------------------------------------------------------------------

schedule_message("orders.close", {}, delya="15m")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
schedule_message("orders.close", {}, "15m")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
schedule_message("orders.close", delay=WHEN)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
schedule_message("orders.close", due_at="2050-01-01")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
schedule_message("orders.close", key=5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
schedule_message("orders.close", key="5", on_conflict="overwrite")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
schedule_message("orders.close", key="5", on_conflict="merged")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
schedule_message("orders.close", retry="5m")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
schedule_message("orders.close", retry=lambda attempt, error: 5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportUnknownLambdaType]
schedule_message("orders.close", on_dead=True)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
schedule_messages([{"payload": {}}])  # type: ignore[typeddict-item]  # pyright: ignore[reportArgumentType]
schedule_messages([{"topic": "orders.close", "delya": "15m"}])  # type: ignore[typeddict-unknown-key]  # pyright: ignore[reportArgumentType]
schedule_messages([{"topic": "orders.close", "using": "other"}])  # type: ignore[typeddict-unknown-key]  # pyright: ignore[reportArgumentType]
schedule_messages({"topic": "orders.close"})  # type: ignore[dict-item]  # pyright: ignore[reportArgumentType]
close.schedule({"order": 5}, delya="15m")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
close.schedule({"order": 5}, topic="orders.tell")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
close.schedule({"ordr": 5})  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
close_typed.schedule({"order": 5})  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
close_typed.schedule(Close("5"))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
close.schedule("5")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
close.reschedule(5)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]

# --- act --------------------------------------------------------------------------------------------------------------

cancel_message()  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
cancel_message(5.0)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
cancel_message(topic="orders.close")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
cancel_message(5, topic="orders.close", key="5")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
run_message(key="5")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
reschedule_message(5)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
reschedule_message(5, "15m")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
reschedule_message(5, delay="15m", due_at=WHEN)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
move_message(5, to="b")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
move_message(5, queue=5)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
repeat_message(topic="orders.close", key="5")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
requeue_message(5, spread="10m")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]


def of_many(rows: QuerySet[Message], values: QuerySet[Message, int]) -> None:
    reschedule_message(rows)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    requeue_message(values)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
    cancel_message(rows, key="5")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]


async def from_async_code() -> None:
    await aschedule_message("orders.close", {}, delya="15m")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    await aschedule_message("orders.close", retry="5m")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await close.aschedule({"ordr": 5})  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await acancel_message()  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    await areschedule_message(5)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    await areschedule_message(5, dealy="15m")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    await apause_queue("mail", until="tomorrow")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
