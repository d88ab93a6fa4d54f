"""The adapter of Celery with its pool of greenlets."""

from __future__ import annotations

from adapter_process import AT_ONCE
from celery_redis import app, send, task

__all__ = ["app", "send", "task"]


def worker():
    options = ["--pool", "gevent", "--concurrency", str(AT_ONCE), "--loglevel", "WARNING"]
    return ["-m", "celery", "-A", "celery_gevent", "worker", *options]
