"""Handlers that succeed, fail or misbehave. Topics named in DELAYQ_TEST_UNKNOWN are left out.

With DELAYQ_TEST_RECURRING one of them declares a schedule, with DELAYQ_TEST_LIMITS some have limits, and with
DELAYQ_TEST_STARTED and DELAYQ_TEST_BATCHES there are those of ``started.py`` and ``batches.py``,
or, with its value ``pairs``, of ``pairs.py``.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connection, transaction
from django.db.models import F

from django_delayq import Reject, RetryLater, handler, schedule_message
from django_delayq.project.registry import Delivered, HandlerFunction
from django_delayq.recurring import recurring

from .models import Effect

if "DELAYQ_TEST_STARTED" in os.environ:
    from . import started  # noqa: F401

if os.environ.get("DELAYQ_TEST_BATCHES") == "pairs":
    from . import pairs  # noqa: F401
elif "DELAYQ_TEST_BATCHES" in os.environ:
    from . import batches  # noqa: F401

SOON = ["0.05s", "0.05s"]
# The retry policy of handlers that meet a database that is away.
AGAIN_AND_AGAIN = ["0.05s"] * 50


def receives(topic: str, **terms: Any) -> Callable[[HandlerFunction], HandlerFunction]:
    if topic in os.environ.get("DELAYQ_TEST_UNKNOWN", "").split(","):
        return lambda function: function
    return handler(topic, **terms)


def leave(message: Delivered, note: str = "") -> None:
    """Write an effect to the database."""
    Effect.objects.create(message_id=message.id, delivery=message.deliveries, note=note)


def pass_gate(message: Delivered) -> None:
    """Write the file "begun-<id>-<delivery>" to the payload's folder, and wait for a file that lets the handler pass.

    That is the "go" of this message, of this delivery or of all.
    """
    folder = Path(message.payload["folder"])
    own = f"{message.id}-{message.deliveries}"
    (folder / f"begun-{own}").touch()
    while not any((folder / name).exists() for name in (f"go-{own}", f"go-{message.deliveries}", "go")):
        time.sleep(0.01)
    if (folder / f"fail-{message.deliveries}").exists():
        raise RuntimeError("was told to fail")


@receives("t.ok")
def succeed(message: Delivered) -> None:
    pass


@receives("t.measured")
def count_for_prometheus(message: Delivered) -> None:
    own_counter().inc()


_counter_lock = threading.Lock()


def own_counter() -> Any:
    """Return a counter of the project's own. Handlers of several threads make it once."""
    from prometheus_client import REGISTRY, Counter

    with _counter_lock:
        there = REGISTRY._names_to_collectors.get("own_messages")
        return there or Counter("own_messages", "Messages that this handler has seen.")


if os.environ.get("DELAYQ_TEST_RECURRING"):

    @recurring(every="1s")
    @receives("t.recurring")
    def succeed_each_second(message: Delivered) -> None:
        pass


if os.environ.get("DELAYQ_TEST_LIMITS"):

    @receives("t.limited", limit=3, retry=SOON, lease="2s")
    def take_a_place(message: Delivered) -> None:
        time.sleep(message.payload["seconds"])
        if message.payload.get("fails") == message.attempt:
            raise RuntimeError("not yet")

    @receives("t.rated", rate="100/s", burst=5)
    def take_a_slot(message: Delivered) -> None:
        pass


@receives("t.queued", queue="special")
def succeed_elsewhere(message: Delivered) -> None:
    pass


def affect(message: Delivered) -> None:
    leave(message)


receives("t.effect", retry=SOON)(affect)
receives("t.tx", transactional=True, retry=AGAIN_AND_AGAIN)(affect)
# Arrives with a deploy.
receives("t.new", retry=SOON)(affect)


def digest_of(payload: Any) -> str:
    return hashlib.sha256(repr(payload).encode()).hexdigest()


@receives("t.echo", retry=False)
def note_the_payload(message: Delivered) -> None:
    leave(message, digest_of(message.payload))


def fail(message: Delivered) -> None:
    leave(message, "failing")
    raise RuntimeError("it never works")


receives("t.fail", retry=SOON)(fail)
receives("t.fail_tx", retry=SOON, transactional=True)(fail)


@receives("t.second_time", retry=SOON)
def succeed_at_the_second_attempt(message: Delivered) -> None:
    if message.attempt == 1:
        raise RuntimeError("not yet")
    leave(message)


@receives("t.later")
def ask_for_later(message: Delivered) -> None:
    if message.deliveries < 3:
        raise RetryLater(0.05, counts=False)
    leave(message)


@receives("t.reject", retry=SOON)
def reject(message: Delivered) -> None:
    raise Reject("not wanted")


_kept: list[bytes] = []


@receives("t.leak")
def keep_memory(message: Delivered) -> None:
    _kept.append(os.urandom(message.payload["megabytes"] * 1024**2))


@receives("t.sleep")
def sleep(message: Delivered) -> None:
    time.sleep(message.payload["seconds"])
    leave(message)


def wait_for_the_gate(message: Delivered) -> None:
    pass_gate(message)
    leave(message)


receives("t.gate", retry=SOON)(wait_for_the_gate)
receives("t.at_most_once", redeliver=False)(wait_for_the_gate)
receives("t.once_tx", transactional=True, retry=False)(wait_for_the_gate)
receives("t.short_lease", retry=SOON, lease="1s")(wait_for_the_gate)


@receives("t.short_lease_tx", retry=SOON, lease="1s", transactional=True)
def wait_within_a_transaction(message: Delivered) -> None:
    leave(message)
    pass_gate(message)


def extend_behind_the_gate(message: Delivered) -> None:
    pass_gate(message)
    message.extend("1m")
    leave(message)


receives("t.extend_tx", retry=False, transactional=True)(extend_behind_the_gate)


@receives("t.extend_atomic", retry=False)
def extend_within_a_transaction_of_its_own(message: Delivered) -> None:
    with transaction.atomic():
        leave(message, "before")
        extend_behind_the_gate(message)


@receives("t.extend_async_tx", retry=False, transactional=True)
async def extend_behind_the_gate_async(message: Delivered) -> None:
    await sync_to_async(pass_gate)(message)
    await message.aextend("1m")
    await sync_to_async(leave)(message)


@receives("t.cancellable")
def watch_for_a_cancel(message: Delivered) -> None:
    Path(message.payload["folder"], f"begun-{message.id}-{message.deliveries}").touch()
    while not message.cancel_requested:
        time.sleep(0.01)
    leave(message, "saw the cancel")
    raise RuntimeError("cancelled")


def stop_when_asked(message: Delivered) -> None:
    """Leave an effect, and work until a cancel is requested. No ``except Exception`` keeps it from ending then."""
    leave(message)
    Path(message.payload["folder"], f"begun-{message.id}-{message.deliveries}").touch()
    while True:
        try:
            message.raise_if_cancelled()
        except Exception:  # noqa: BLE001
            return
        time.sleep(0.01)


receives("t.stop", retry=False)(stop_when_asked)
receives("t.stop_tx", retry=False, transactional=True)(stop_when_asked)


@receives("t.stop_async", retry=False)
async def stop_when_asked_async(message: Delivered) -> None:
    await sync_to_async(stop_when_asked)(message)


@receives("t.slow", timeout="0.3s", retry=False)
def outlast_the_timeout(message: Delivered) -> None:
    while True:
        time.sleep(0.01)


@receives("t.slow_async", timeout="0.3s", retry=False)
async def outlast_the_timeout_async(message: Delivered) -> None:
    await asyncio.sleep(60)


@receives("t.slow_returned", timeout="0.3s", retry=False)
def return_what_outlasts_the_timeout(message: Delivered) -> Any:
    return outlast_the_timeout_async(message)


@receives("t.hang", timeout="0.3s", retry=SOON)
def never_let_go(message: Delivered) -> None:
    """Block for ever in the first delivery, and end at once in later ones."""
    while message.deliveries == 1:
        try:
            time.sleep(0.01)
        except BaseException:  # noqa: BLE001
            pass
    leave(message)


@receives("t.seize", timeout="0.3s", retry=SOON)
def seize_the_interpreter(message: Delivered) -> None:
    """Keep the interpreter in the first delivery, so that no other thread of the process runs any more."""
    if message.deliveries == 1:
        ctypes.PyDLL(None).sleep(3600)
    leave(message)


@receives("t.kill")
def kill(message: Delivered) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@receives("t.kill_after_effect", transactional=True)
def kill_after_effect(message: Delivered) -> None:
    leave(message)
    if message.deliveries == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@receives("t.exit", retry=False)
def leave_the_building(message: Delivered) -> None:
    raise SystemExit(3)


@receives("t.dirty")
def leave_a_transaction_open(message: Delivered) -> None:
    match message.payload:
        case "autocommit":
            connection.set_autocommit(False)
        case "atomic":
            transaction.atomic().__enter__()
        case "begin":
            with connection.cursor() as cursor:
                cursor.execute("BEGIN")
    leave(message, "never committed")


@receives("t.async", retry=SOON)
async def affect_async(message: Delivered) -> None:
    await asyncio.sleep(0)
    await sync_to_async(leave)(message)


@receives("t.block_async")
async def block_the_loop(message: Delivered) -> None:
    time.sleep(0.04)


@receives("t.gate_async", retry=SOON)
async def affect_async_behind_the_gate(message: Delivered) -> None:
    folder = Path(message.payload["folder"])
    (folder / f"begun-{message.id}-{message.deliveries}").touch()
    while not (folder / "go").exists():
        await asyncio.sleep(0.1)
    await sync_to_async(leave)(message)


@receives("t.file")
def write_to_a_file(message: Delivered) -> None:
    append_line(message, message.payload)


@receives("t.file_async")
async def write_to_a_file_async(message: Delivered) -> None:
    await asyncio.sleep(0)
    append_line(message, message.payload)


@receives("t.gate_file")
def write_to_a_file_behind_the_gate(message: Delivered) -> None:
    pass_gate(message)
    append_line(message, message.payload["file"])


def append_line(message: Delivered, path: str) -> None:
    """Append a line to a file: an effect outside the database that survives if the process is killed at once."""
    line = f"{message.id} {message.deliveries}\n".encode()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(file, line)
        os.fsync(file)
    finally:
        os.close(file)


def raise_counter(pk: int) -> None:
    """Add one to a row that other handlers change too."""
    Effect.objects.filter(pk=pk).update(delivery=F("delivery") + 1)


@receives("t.collide", retry=False, lease="5s", transactional=True)
def change_a_shared_row(message: Delivered) -> None:
    """See the database as it is, wait, and change a row that others have changed meanwhile."""
    assert Effect.objects.filter(pk=message.payload["rows"][0]).exists()
    pass_gate(message)
    raise_counter(message.payload["rows"][0])


@receives("t.deadlock", retry=False, transactional=True)
def change_two_rows_in_an_order(message: Delivered) -> None:
    if message.deliveries <= message.payload.get("uncounted", 0):
        raise RetryLater(0, counts=False)
    first, second = message.payload["rows"]
    raise_counter(first)
    pass_gate(message)
    raise_counter(second)


def chain(message: Delivered) -> None:
    """Leave an effect, and schedule the next message under the key of this one until the payload's turns are over.

    The first message fails once after its call if the payload says so, and may be rejected before its second one.
    """
    if "folder" in message.payload:
        pass_gate(message)
    turn, turns, unique = (message.payload[name] for name in ("turn", "turns", "unique"))
    leave(message, f"turn {turn}")
    if turn == 1 and message.attempt == 2 and message.payload.get("rejected"):
        raise Reject("not again")
    if turn < turns:
        following = {**message.payload, "turn": turn + 1}
        schedule_message(message.topic, following, key=message.key, unique=unique, delay="20ms")
    if turn == 1 and message.attempt == 1 and message.payload.get("fails"):
        raise RuntimeError("the next one is scheduled")


receives("t.chain", retry=AGAIN_AND_AGAIN)(chain)
receives("t.chain_tx", transactional=True, retry=AGAIN_AND_AGAIN)(chain)


@receives("t.achain", retry=AGAIN_AND_AGAIN)
async def asynchronous_chain(message: Delivered) -> None:
    """Do the same as ``chain`` from async code."""
    await sync_to_async(chain)(message)
