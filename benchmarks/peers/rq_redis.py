"""The adapter of RQ, with the worker that does not fork: it is the faster one for small jobs."""

from __future__ import annotations

import os
from datetime import UTC, datetime

import redis
from adapter_process import handle
from rq import Queue

queue = Queue(connection=redis.Redis.from_url(os.environ["REDIS_URL"]))


def task(payload):
    handle(payload)


def send(payload, due, **options):
    if due is None:
        queue.enqueue(task, payload, **options)
    else:
        queue.enqueue_at(datetime.fromtimestamp(due, UTC), task, payload, **options)


def send_many(payloads, due):
    for start in range(0, len(payloads), 1000):
        with queue.connection.pipeline() as pipeline:
            for payload in payloads[start : start + 1000]:
                send(payload, due, pipeline=pipeline)
            pipeline.execute()


def worker():
    options = ["--with-scheduler", "--quiet", "--url", os.environ["REDIS_URL"]]
    return ["-m", "rq.cli", "worker", "-w", "rq.worker.SimpleWorker", *options]
