"""The adapter of TaskTiger, with the executor that does not fork: it is the faster one for small tasks."""

from __future__ import annotations

import logging
import os
from datetime import UTC, datetime

import redis
from adapter_process import mark
from tasktiger import TaskTiger

connection = redis.Redis.from_url(os.environ["REDIS_URL"], decode_responses=True)
tiger = TaskTiger(connection=connection, setup_structlog=True)
tiger.log.setLevel(logging.WARNING)


def task(payload):
    mark(payload)


def send(payload, due):
    when = None if due is None else datetime.fromtimestamp(due, UTC).replace(tzinfo=None)
    tiger.delay(task, args=(payload,), when=when)


def worker():
    run = "from tasktiger.executor import SyncExecutor; tasktiger_redis.tiger.run_worker(executor_class=SyncExecutor)"
    return ["-c", f"import tasktiger_redis; {run}"]
