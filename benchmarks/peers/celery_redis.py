"""The adapter of Celery with the Redis broker; no result backend, as its docs advise when results are not wanted."""

from __future__ import annotations

import os
from datetime import UTC, datetime

from adapter_process import AT_ONCE, RECURRING, block, mark
from celery import Celery

app = Celery("celery_redis", broker=os.environ["REDIS_URL"])
app.conf.task_ignore_result = True


@app.task(name="mark")
def task(payload):
    if AT_ONCE:
        block(payload)
    else:
        mark(payload)


@app.task(name="recurring")
def recurring(number):
    # A task is not told the time for which it stands.
    mark({"n": number, "due": 0.0})


app.conf.beat_schedule = {str(n): {"task": "recurring", "schedule": 1.0, "args": (n,)} for n in range(RECURRING)}
app.conf.beat_schedule_filename = os.environ["BENCH_MARKS"] + ".beat"


def recur(number):
    assert number == RECURRING


def send(payload, due):
    task.apply_async((payload,), eta=None if due is None else datetime.fromtimestamp(due, UTC))


def worker():
    pool = ["--pool", "threads", "--concurrency", str(AT_ONCE)] if AT_ONCE else ["--concurrency", "1"]
    beat = ["--beat"] if RECURRING else []
    return ["-m", "celery", "-A", "celery_redis", "worker", *beat, *pool, "--loglevel", "WARNING"]
