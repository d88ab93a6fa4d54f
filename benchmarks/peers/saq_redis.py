"""The adapter of SAQ on Redis, with its default of ten tasks at once where they do not wait."""

from __future__ import annotations

import os

from adapter_process import AT_ONCE, mark, wait
from saq import Queue

queue = Queue.from_url(os.environ["REDIS_URL"])


async def task(ctx, *, payload):
    if AT_ONCE:
        await wait(payload)
    else:
        mark(payload)


settings = {"queue": queue, "functions": [task], "concurrency": AT_ONCE or 10}


async def asend(payload, due):
    await queue.enqueue("task", payload=payload, scheduled=0 if due is None else due)


def worker():
    return ["-m", "saq", "saq_redis.settings", "--quiet"]
