"""The floor of the ORM alone: ``Model.objects.create()`` for each message; a loop of transactions for each handler."""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import Any

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "benchmarks.settings")
TABLES = ["benchmarks_effect", "benchmarks_row"]


def setup() -> None:
    from django.core.management import call_command

    django.setup()
    call_command("migrate", run_syncdb=True, verbosity=0)


def ready() -> None:
    django.setup()


def send(payload: dict[str, Any], due: float | None) -> None:
    from benchmarks.app.models import Row

    Row.objects.create(topic="bench", payload=payload, due_at=_datetime(due))


def send_many(payloads: list[dict[str, Any]], due: float | None) -> None:
    from benchmarks.app.models import Row

    at = _datetime(due)
    Row.objects.bulk_create([Row(topic="bench", payload=one, due_at=at) for one in payloads], batch_size=1000)


def inside() -> AbstractContextManager[Any]:
    from django.db import transaction

    return transaction.atomic()


def insert(number: int) -> float:
    """Do a transaction with the handler's INSERT and one UPDATE for each message, and return the seconds."""
    from django.db import transaction

    from benchmarks.app.models import Effect, Row

    rows = list(Row.objects.order_by("pk")[:number])
    began = time.perf_counter()
    for row in rows:
        with transaction.atomic():
            Effect.objects.create(number=row.pk, payload=row.payload)
            Row.objects.filter(pk=row.pk, done=False).update(done=True)
    return time.perf_counter() - began


def _datetime(due: float | None) -> datetime:
    return datetime.fromtimestamp(time.time() if due is None else due, UTC)
