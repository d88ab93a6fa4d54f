"""Handlers whose traces survive any death: rows in their own transaction, and lines written through to disk.

A line has kind, message, delivery, pid and time. ``start`` … ``end`` is an effect, ``fail`` a reported failure,
``lost`` a failure because the database did not answer, ``die`` the process killed by the message itself, ``asks`` …
``told`` a call of ``extend()``.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from datetime import UTC, datetime
from typing import Any

from asgiref.sync import sync_to_async
from django.db import Error as DatabaseError
from django.db import connection, transaction

from django_delayq import Delivered, LeaseLost, Reject, RetryLater, handler, schedule_message
from django_delayq.recurring import recurring
from tests.torture.app.lines import note
from tests.torture.sizes import BURST, LIMIT, RATE

# More attempts than any fault can use up: only poison may end as dead.
RETRY = [0.2, 0.4, *[1.0] * 28]

EFFECT = "INSERT INTO torture.effect (id, delivery, pid) VALUES (%s, %s, %s)"


@handler("torture.row", transactional=True, retry=RETRY)
def row(message: Delivered) -> None:
    """Write a row in the transaction that records the success."""
    _note("start", message)
    time.sleep(message.payload["work"])
    with connection.cursor() as cursor:
        cursor.execute(EFFECT, [message.id, message.deliveries, os.getpid()])
    _misbehave(message)


@handler("torture.line", retry=RETRY, queue="lines")
def line(message: Delivered) -> None:
    """Write a line to a file, out of reach of any transaction."""
    _note("start", message)
    time.sleep(message.payload["work"])
    _misbehave(message)
    _note("end", message)


# Beside one other message with the same key at most, beside none, and evenly spaced.
handler("torture.limited", retry=RETRY, limit=LIMIT)(line)
handler("torture.single", retry=RETRY, limit=1)(line)
handler("torture.rated", retry=RETRY, rate=f"{RATE}/s", burst=BURST)(line)


@handler("torture.async", retry=RETRY)
async def coroutine(message: Delivered) -> None:
    """Ask the database, and write a line to a file, as a task on the event loop."""
    _note("start", message)
    try:
        await sync_to_async(_ask_database)()
    except DatabaseError:
        _note("lost", message)
        raise
    await asyncio.sleep(message.payload["work"])
    _misbehave(message)
    _note("end", message)


@handler("torture.block", retry=RETRY)
async def block(message: Delivered) -> None:
    """Block the event loop with sync code, and so all other async handlers of the process."""
    _note("start", message)
    time.sleep(message.payload["work"])
    _note("end", message)


@handler("torture.chain", retry=RETRY, priority=10)
def chain(message: Delivered) -> None:
    """Write a line to a file, and schedule the next message under the key of this one until the run is over."""
    _note("start", message)
    if time.time() < float(os.environ["TORTURE_UNTIL"]):
        _schedule_the_next(message)
    _misbehave(message)
    _note("end", message)


@handler("torture.relay", retry=RETRY)
def relay(message: Delivered) -> None:
    """Schedule the next message under the key of this one, and fail a few times after that.

    So the message waits for a retry while the next one holds the key. The chain has so many steps as the payload says.
    """
    _note("start", message)
    time.sleep(message.payload["work"])
    if message.payload["turn"] < message.payload["steps"]:
        _schedule_the_next(message, stays=message.payload["stays"])
    _misbehave(message)
    _note("end", message)


@handler("torture.own", retry=RETRY)
def own(message: Delivered) -> None:
    """Lock the row of the message itself for longer than its lease, by a transaction that schedules the next one."""
    _note("start", message)
    if message.payload["turn"] < message.payload["steps"]:
        _schedule_the_next(message, stays=message.payload["stays"])
    _note("end", message)


@handler("torture.lasting", retry=RETRY)
async def lasting(message: Delivered) -> None:
    """Run for some leases, so that callers find time to lock the row. It takes no thread."""
    _note("start", message)
    await asyncio.sleep(message.payload["work"])
    _note("end", message)


@handler("torture.extending", transactional=True, retry=RETRY)
def extending(message: Delivered) -> None:
    """Ask for more time in the transaction that records the success."""
    _note("start", message)
    time.sleep(message.payload["work"])
    _note("asks", message)
    try:
        message.extend(10)
    except LeaseLost:
        # Its failure is refused, since another delivery has begun.
        _note("fail", message)
        raise
    finally:
        _note("told", message)
    with connection.cursor() as cursor:
        cursor.execute(EFFECT, [message.id, message.deliveries, os.getpid()])


@handler("torture.hang", retry=RETRY, timeout=1.0, queue="lines")
def hang(message: Delivered) -> None:
    """Block the first delivery outside of Python, so that not even its timeout ends it."""
    _note("start", message)
    if message.deliveries == 1:
        _note("fail", message)
        time.sleep(3600)
    _note("end", message)


@handler("torture.refuse", retry=RETRY)
def refuse(message: Delivered) -> None:
    """Refuse the first delivery, so that the message is dead until it is requeued or purged."""
    _note("start", message)
    if message.deliveries == 1:
        _note("fail", message)
        raise Reject("as ordered")
    _note("end", message)


if until := float(os.environ["TORTURE_UNTIL"]):
    # Each worker that is started has a newer version of the code, which changes both schedules.
    declaration: dict[str, Any] = {
        "every": "1s",
        "payload": {"work": 0.0, "fails": 0, "dies": 0, "late": False, "version": os.environ["TORTURE_VERSION"]},
        "ends_at": datetime.fromtimestamp(int(until), UTC),
    }
    recurring(name="torture.all", topic="torture.row", missed="all", **declaration)(row)
    recurring(name="torture.once", topic="torture.line", missed="once", **declaration)(line)


def _schedule_the_next(message: Delivered, *, stays: float = 0.0) -> None:
    """Schedule the next message of a chain, and stay in that transaction for so many seconds."""
    payload = {**message.payload, "turn": message.payload["turn"] + 1}
    try:
        _schedule(message, payload, stays)
    except DatabaseError as error:
        # At a high isolation level the database may refuse a call with a key, which somebody else looks for.
        _note("fail" if "could not serialize" in str(error) else "lost", message)
        raise


def _schedule(message: Delivered, payload: Any, stays: float) -> None:
    due = datetime.now(UTC)
    with transaction.atomic():
        following = schedule_message(message.topic, payload, key=message.key, delay=0.3 + stays)
        if not following.existed:
            with connection.cursor() as cursor:
                cursor.execute(
                    "INSERT INTO torture.sched (id, due, kind) VALUES (%s, %s, 'plain')", [following.pk, due]
                )
        time.sleep(stays)


def _ask_database() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")


def _misbehave(message: Delivered) -> None:
    """Fail the first attempts, kill the process at the first delivery or at every one, as the payload says.

    A payload with a list ``left`` is changed by each failure: the number of the delivery is added to the list.
    """
    if message.attempt <= message.payload["fails"]:
        _note("fail", message)
        if "left" in message.payload:
            left = [*message.payload["left"], message.deliveries]
            raise RetryLater(RETRY[message.attempt - 1], payload={**message.payload, "left": left})
        raise ConnectionError("as ordered")
    if message.deliveries <= message.payload["dies"]:
        if message.topic != "torture.row" and message.payload["late"]:
            _note("end", message)
        _note("die", message)
        os.kill(os.getpid(), signal.SIGKILL)


def _note(what: str, message: Delivered) -> None:
    note(what, message.id, message.deliveries)
