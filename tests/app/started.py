"""What a project does with ``@worker_started``: DELAYQ_TEST_STARTED is a folder for its notes.

A thread is started while this module is loaded, as by careless code. With DELAYQ_TEST_STARTED_FAILS the sync or the
async function fails, or the sync one at its end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from logging.handlers import QueueHandler, QueueListener
from pathlib import Path

from django_delayq import handler, worker_started
from django_delayq.project.registry import Delivered

from .models import Effect

FOLDER = Path(os.environ["DELAYQ_TEST_STARTED"])
FAILS = os.environ.get("DELAYQ_TEST_STARTED_FAILS")

early = threading.Event()
threading.Thread(target=early.wait, name="early-bird", daemon=True).start()

records: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
logger = logging.getLogger("tests.app.started")
logger.addHandler(QueueHandler(records))
logger.setLevel(logging.INFO)
client: ContextVar[str] = ContextVar("client", default="none")


@worker_started
def listen() -> Iterator[None]:
    if FAILS == "sync":
        raise RuntimeError("the project cannot start")
    listener = QueueListener(records, logging.FileHandler(FOLDER / f"log-{os.getpid()}"))
    listener.start()
    logger.info("listens")
    yield
    logger.info("has listened")
    listener.stop()
    if FAILS == "end":
        raise RuntimeError("the project cannot stop")


@worker_started
def count() -> None:
    logger.info("has counted")


@worker_started
async def connect() -> AsyncIterator[None]:
    if FAILS == "async":
        raise RuntimeError("the project cannot connect")
    await asyncio.sleep(0)
    client.set(f"of {threading.current_thread().name}")
    yield
    await asyncio.sleep(0)
    logger.info("has disconnected")


@handler("t.started")
def use(message: Delivered) -> None:
    logger.info("message %s", message.payload)
    Effect.objects.create(message_id=message.id, delivery=message.deliveries, note=str(os.getpid()))


@handler("t.started_async")
async def use_async(message: Delivered) -> None:
    await Effect.objects.acreate(message_id=message.id, delivery=message.deliveries, note=client.get())
