"""The adapter of SAQ on Redis, with its default of ten tasks at once."""

from __future__ import annotations

import os

from adapter_process import mark
from saq import Queue

queue = Queue.from_url(os.environ["REDIS_URL"])


async def task(ctx, *, payload):
    mark(payload)


settings = {"queue": queue, "functions": [task], "concurrency": 10}


async def asend(payload, due):
    await queue.enqueue("task", payload=payload, scheduled=0 if due is None else due)


def worker():
    return ["-m", "saq", "saq_redis.settings", "--quiet"]
