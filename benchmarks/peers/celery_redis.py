"""The adapter of Celery with the Redis broker; no result backend, as its docs advise when results are not wanted."""

from __future__ import annotations

import os
from datetime import UTC, datetime

from adapter_process import AT_ONCE, block, handle
from celery import Celery

app = Celery("celery_redis", broker=os.environ["REDIS_URL"])
app.conf.task_ignore_result = True


@app.task(name="mark")
def task(payload):
    if AT_ONCE:
        block(payload)
    else:
        handle(payload)


def send(payload, due):
    task.apply_async((payload,), eta=None if due is None else datetime.fromtimestamp(due, UTC))


def worker():
    pool = ["--pool", "threads", "--concurrency", str(AT_ONCE)] if AT_ONCE else ["--concurrency", "1"]
    return ["-m", "celery", "-A", "celery_redis", "worker", *pool, "--loglevel", "WARNING"]
