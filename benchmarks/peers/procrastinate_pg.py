"""The adapter of Procrastinate on psycopg 3."""

from __future__ import annotations

import os
from datetime import UTC, datetime

import procrastinate
from adapter_process import AT_ONCE, handle, wait

app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=os.environ["DATABASE_URL"]))
TABLES = ["procrastinate_jobs", "procrastinate_events", "procrastinate_workers", "procrastinate_periodic_defers"]
OPEN = "FROM procrastinate_jobs WHERE status IN ('todo', 'doing')"


@app.task(name="mark")
async def task(payload):
    if AT_ONCE:
        await wait(payload)
    else:
        handle(payload)


def setup():
    with app.open():
        app.schema_manager.apply_schema()


def ready():
    app.open()


def _later(due):
    return task if due is None else task.configure(schedule_at=datetime.fromtimestamp(due, UTC))


def send(payload, due):
    _later(due).defer(payload=payload)


def send_many(payloads, due):
    for start in range(0, len(payloads), 1000):
        _later(due).batch_defer(*({"payload": payload} for payload in payloads[start : start + 1000]))


def worker():
    return ["-m", "procrastinate", "--app", "procrastinate_pg.app", "worker", "--concurrency", str(AT_ONCE or 10)]
