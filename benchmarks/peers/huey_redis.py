"""The adapter of Huey on Redis, with its default of one thread: more threads are slower with such small tasks."""

from __future__ import annotations

import os
from datetime import UTC, datetime

from adapter_process import handle
from huey import RedisHuey

huey = RedisHuey("bench", url=os.environ["REDIS_URL"], utc=True)


@huey.task()
def task(payload):
    handle(payload)


def send(payload, due):
    if due is None:
        task(payload)
    else:
        task.schedule((payload,), eta=datetime.fromtimestamp(due, UTC))


def worker():
    return ["-m", "huey.bin.huey_consumer", "huey_redis.huey", "-w", "1", "-q"]
