"""The adapter of taskiq on a stream of Redis. A delay would need a scheduler, which is a process of its own."""

from __future__ import annotations

import os

from adapter_process import AT_ONCE, wait
from taskiq_redis import RedisStreamBroker

broker = RedisStreamBroker(os.environ["REDIS_URL"])
_started = []


@broker.task(task_name="wait")
async def task(payload):
    await wait(payload)


async def asend(payload, due):
    if not _started:
        _started.append(await broker.startup())
    await task.kiq(payload)


def worker():
    options = ["--workers", "1", "--max-async-tasks", str(AT_ONCE), "--log-level", "WARNING"]
    return ["-m", "taskiq", "worker", "taskiq_stream:broker", *options]
