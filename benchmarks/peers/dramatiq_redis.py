"""The adapter of Dramatiq with the Redis broker and its default number of threads."""

from __future__ import annotations

import os
import time

import dramatiq
from adapter_process import handle
from dramatiq.brokers.redis import RedisBroker

dramatiq.set_broker(RedisBroker(url=os.environ["REDIS_URL"]))


@dramatiq.actor
def task(payload):
    handle(payload)


def send(payload, due):
    if due is None:
        task.send(payload)
    else:
        task.send_with_options(args=(payload,), delay=max(0, round((due - time.time()) * 1000)))


def worker():
    return ["-m", "dramatiq", "dramatiq_redis", "--processes", "1", "--threads", "8"]
