"""The floor of the ORM alone: ``Model.objects.create()`` for each message."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from typing import Any

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "benchmarks.settings")
TABLES = ["benchmarks_row"]


def setup() -> None:
    from django.core.management import call_command

    django.setup()
    call_command("migrate", run_syncdb=True, verbosity=0)


def ready() -> None:
    django.setup()


def send(payload: dict[str, Any], due: float | None) -> None:
    from benchmarks.app.models import Row

    Row.objects.create(topic="bench", payload=payload, due_at=_datetime(due))


def _datetime(due: float | None) -> datetime:
    return datetime.fromtimestamp(time.time() if due is None else due, UTC)
