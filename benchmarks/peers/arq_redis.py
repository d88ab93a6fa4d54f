"""The adapter of arq on Redis. It keeps no results."""

from __future__ import annotations

import os
from datetime import UTC, datetime

from adapter_process import AT_ONCE, wait
from arq import create_pool
from arq.connections import RedisSettings

# Made with the first message.
_pools = []


async def task(ctx, payload):
    await wait(payload)


class WorkerSettings:
    functions = (task,)
    redis_settings = RedisSettings.from_dsn(os.environ["REDIS_URL"])
    max_jobs = AT_ONCE
    keep_result = 0


async def asend(payload, due):
    if not _pools:
        _pools.append(await create_pool(WorkerSettings.redis_settings))
    await _pools[0].enqueue_job("task", payload, _defer_until=None if due is None else datetime.fromtimestamp(due, UTC))


def worker():
    return ["-m", "arq", "arq_redis.WorkerSettings"]
