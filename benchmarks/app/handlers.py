"""Handlers that cost nothing, take their time, or fail."""

from __future__ import annotations

import time

from benchmarks.peers.line import mark
from django_delayq import Delivered, handler


@handler("bench.noop")
def noop(message: Delivered) -> None:
    """Nothing."""


@handler("bench.mark")
def marked(message: Delivered) -> None:
    """Nothing but a note that it ran."""
    mark(message.payload)


@handler("bench.insert", transactional=True)
def insert(message: Delivered) -> None:
    """Insert a row, in the transaction that records the success."""
    from .models import Effect

    Effect.objects.create(number=message.id, payload=message.payload)
    mark(message.payload)


@handler("bench.sleep", lease=5)
def sleep(message: Delivered) -> None:
    """Takes as many seconds as the payload says."""
    time.sleep(float(message.payload))


@handler("bench.twice", retry=["200ms", "400ms"])
def twice(message: Delivered) -> None:
    """Fails twice."""
    if message.attempt <= 2:
        raise ConnectionError("the far end did not answer")
