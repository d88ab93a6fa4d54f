"""Handlers that do nothing, sleep, or fail."""

from __future__ import annotations

import os
import time
from datetime import datetime

from django.db import transaction

from benchmarks.peers.adapter_process import AT_ONCE, DOES, THREADS, block, mark, wait
from django_delayq import Delivered, RetryLater, handler
from django_delayq.models import Message


@handler("bench.noop")
def noop(message: Delivered) -> None:
    """Do nothing."""


@handler("bench.mark")
def marked(message: Delivered) -> None:
    """Do nothing but note when the first message, or each late one, was handled."""
    mark(message.payload)


if os.environ.get("BENCH_LIMITS"):

    @handler("bench.five", limit=5)
    def five(message: Delivered) -> None:
        """Take 20 ms; five of them may run at once."""
        time.sleep(0.02)

    handler("bench.rated", rate="1/s")(noop)
    handler("bench.roomy", limit=100)(noop)
    handler("bench.keyed", limit=1)(noop)


@handler("bench.recurring")
def recurring(message: Delivered) -> None:
    """Note the time for which the message of a schedule stands."""
    mark({"n": message.payload, "due": datetime.fromisoformat(message.headers["occurrence"]).timestamp()})


if DOES or os.environ.get("BENCH_FAN_IN"):
    from .models import Effect, Row

if DOES:

    @handler("bench.insert", transactional=True)
    def insert(message: Delivered) -> None:
        """Insert a row, in the transaction that records the success."""
        Effect.objects.create(number=message.payload["n"], payload=message.payload)
        mark(message.payload)

    @handler("bench.update", transactional=True)
    def update(message: Delivered) -> None:
        """Update the message's own row, in the transaction that records the success."""
        Effect.objects.filter(pk=message.payload["n"]).update(payload=message.payload)
        mark(message.payload)

    @handler("bench.autocommit")
    def autocommit(message: Delivered) -> None:
        """Insert a row, before the success is recorded."""
        Effect.objects.create(number=message.payload["n"], payload=message.payload)
        mark(message.payload)

    @handler("bench.batch", batch=500, transactional=True)
    def batch(messages: list[Delivered]) -> None:
        """Insert a row for each message by one statement, in the transaction that records their successes."""
        Effect.objects.bulk_create([Effect(number=one.payload["n"], payload=one.payload) for one in messages])
        for one in messages:
            mark(one.payload)

    @handler("bench.savepoints", batch=50, transactional=True)
    def savepoints(messages: list[Delivered]) -> None:
        """Insert a row for each message, each after a savepoint, in the transaction that records their successes."""
        for one in messages:
            try:
                with transaction.atomic():
                    Effect.objects.create(number=one.payload["n"], payload=one.payload)
            except Exception as error:  # noqa: BLE001
                one.fail(error)
            mark(one.payload)


if AT_ONCE and THREADS:

    @handler("bench.wait")
    def wait_in_thread(message: Delivered) -> None:
        """Wait in a thread."""
        block(message.payload)

elif AT_ONCE:
    # A process without an async handler has no event loop.
    @handler("bench.wait")
    async def wait_on_loop(message: Delivered) -> None:
        """Wait on the event loop."""
        await wait(message.payload)


if os.environ.get("BENCH_BLOCKS"):

    @handler("bench.block")
    async def block(message: Delivered) -> None:
        """Compute for 29 ms, while nothing else can run on the event loop."""
        until = time.perf_counter() + 0.029
        while time.perf_counter() < until:
            pass


@handler("bench.sleep", lease=5)
def sleep(message: Delivered) -> None:
    """Sleep as many seconds as the payload says."""
    time.sleep(float(message.payload))


@handler("bench.twice", retry=["200ms", "400ms"])
def twice(message: Delivered) -> None:
    """Fail twice, then succeed."""
    if message.attempt <= 2:
        raise ConnectionError("the far end did not answer")


if os.environ.get("BENCH_FAN_IN"):

    @handler("bench.counts", transactional=True)
    def counts(message: Delivered) -> None:
        """Insert a row, and count that in a row of all."""
        Effect.objects.create(number=message.id, payload=0)
        row = Row.objects.select_for_update().get(pk=message.payload)
        row.payload += 1
        row.save()

    @handler("bench.plain", transactional=True)
    def plain(message: Delivered) -> None:
        """Insert a row."""
        Effect.objects.create(number=message.id, payload=0)

    @handler("bench.looks")
    def looks(message: Delivered) -> None:
        """Note when nothing is left in a queue."""
        left = Message.objects.filter(queue=message.payload["queue"], state__in=["scheduled", "running"])
        if left.exists():
            raise RetryLater("1s", counts=False)
        Row.objects.filter(pk=message.payload["row"]).update(done=True)
