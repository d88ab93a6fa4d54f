"""The adapter of django-delayq itself."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import Any

import django

from benchmarks.peers.adapter_process import AT_ONCE, DOES, THREADS

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "benchmarks.settings")

TABLES = ["delayq_message", "delayq_log", "delayq_place", "delayq_worker", "bench_effect", "benchmarks_row"]
OPEN = "FROM delayq_message WHERE state IN ('scheduled', 'running')"


def setup() -> None:
    from .own_servers import set_up_django

    set_up_django()


def ready() -> None:
    """Give the emptied Redis a horizon, as a worker that has run does. Does nothing without Redis."""
    django.setup()
    if not os.environ["REDIS_URL"]:
        return
    from django.core.management import call_command
    from django.db import connection

    from django_delayq import cancel_message, schedule_message

    message = schedule_message("bench.mark", delay=3600)
    call_command("delayq_restore", json=True)
    cancel_message(message)
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE delayq_message, delayq_log")


def send(payload: dict[str, Any], due: float | None) -> None:
    from django_delayq import schedule_message

    schedule_message(_topic(payload), payload, due_at=_datetime(due))


def send_many(payloads: list[dict[str, Any]], due: float | None) -> None:
    from django_delayq import schedule_messages

    at = _datetime(due)
    schedule_messages({"topic": _topic(payload), "payload": payload, "due_at": at} for payload in payloads)


def send_keyed(payloads: list[dict[str, Any]], due: float | None) -> None:
    from django_delayq import schedule_messages

    at = _datetime(due)
    schedule_messages(
        {"topic": "bench.mark", "payload": payload, "due_at": at, "key": f"order-{payload['n']}"}
        for payload in payloads
    )


def worker() -> list[str]:
    waiting = ["--threads" if THREADS else "--async-concurrency", str(AT_ONCE)] if AT_ONCE else []
    verbosity = os.environ.get("BENCH_VERBOSITY", "1")
    return ["-m", "django", "run_delayq", "--processes", "1", "--verbosity", verbosity, *waiting]


def _topic(payload: dict[str, Any]) -> str:
    if payload["n"] <= 0:
        return "bench.mark"
    return "bench.wait" if AT_ONCE else f"bench.{DOES or 'mark'}"


def _datetime(due: float | None) -> datetime | None:
    return None if due is None else datetime.fromtimestamp(due, UTC)
