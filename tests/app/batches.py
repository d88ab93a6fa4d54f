"""Batch handlers. Each call leaves an effect for each message, whose note names the call and the size of its batch."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path

from asgiref.sync import sync_to_async

from django_delayq import handler
from django_delayq.project.registry import Delivered

from .models import Effect

SOON = ["0.05s"] * 3
_calls = itertools.count()


def leave(messages: list[Delivered]) -> None:
    """Write an effect for each message of a call."""
    note = f"{os.getpid()}/{next(_calls)} of {len(messages)}"
    Effect.objects.bulk_create(
        Effect(message_id=message.id, delivery=message.deliveries, note=note) for message in messages
    )


@handler("b.effect", batch=10, retry=SOON)
def affect(messages: list[Delivered]) -> None:
    leave(messages)


@handler("b.tx", batch=20, transactional=True, retry=SOON)
def affect_in_transaction(messages: list[Delivered]) -> None:
    leave(messages)
    bad = [message for message in messages if (message.payload or {}).get("bad")]
    if bad:
        raise RuntimeError("a bad message")


@handler("b.answers", batch=10, retry=SOON, transactional=True)
def answer(messages: list[Delivered]) -> None:
    for message in messages:
        match message.payload["answer"] if message.attempt == 1 else None:
            case "later":
                message.retry_later("0.05s")
            case "reject":
                message.reject("not wanted")
            case "fail":
                message.fail(ValueError("not yet"))
    leave([message for message in messages if message.payload["answer"] == "ok" or message.attempt > 1])


@handler("b.linger", batch=3, linger="10s")
def affect_together(messages: list[Delivered]) -> None:
    leave(messages)


@handler("b.briefly", batch=1000, linger="0.05s")
def affect_soon(messages: list[Delivered]) -> None:
    leave(messages)


@handler("b.rate", batch=3, linger="0.5s", rate="100/s")
def affect_at_a_rate(messages: list[Delivered]) -> None:
    leave(messages)


@handler("b.async", batch=10, timeout="5s")
async def affect_async(messages: list[Delivered]) -> None:
    await sync_to_async(leave)(messages)


@handler("b.limited", batch=10, limit=3)
def affect_limited(messages: list[Delivered]) -> None:
    leave(messages)
    time.sleep(0.05)


@handler("b.slow", batch=10, timeout="0.2s", retry=SOON)
def affect_slowly(messages: list[Delivered]) -> None:
    leave(messages)
    while any(message.attempt == 1 for message in messages):
        time.sleep(0.01)


@handler("b.gate", batch=10)
@handler("b.pair_gate", batch=2, linger="2s")
def wait_for_a_file(messages: list[Delivered]) -> None:
    folder = Path(messages[0].payload["folder"])
    for message in messages:
        (folder / f"begun-{message.id}").touch()
    while not (folder / "go").exists():
        time.sleep(0.01)
    leave([message for message in messages if not message.cancel_requested])


@handler("b.kill", batch=10, transactional=True, retry=SOON)
def kill_the_process(messages: list[Delivered]) -> None:
    if any(message.payload.get("kills") for message in messages):
        os.kill(os.getpid(), signal.SIGKILL)
    leave(messages)
