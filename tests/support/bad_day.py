"""A day on which all happens at once that the console can tell: its pages have the most to ask."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django_delayq import override_limit
from django_delayq.console import audit
from django_delayq.console.models import OperationState
from django_delayq.core import actors
from django_delayq.models import Message
from django_delayq.record import reads
from django_delayq.recurring import create_schedule, pause_schedule
from django_delayq.recurring.models import Declarations, Schedule
from tests.browser import busy_day
from tests.console.admin import samples
from tests.support.rows import unguarded

DB = samples.DB
LIMITS = busy_day.LIMITS


def happen() -> Message:
    """Add to a busy day a limit that is older than an hour and one that is paused, a queue without a worker, dead
    messages, operations and schedules that stand still; return a dead message.
    """
    busy_day.happen()
    # A claim takes nothing before its process knows of an override.
    dead = [samples.dead(queue="payments", key=f"order-{number}") for number in range(3)]
    samples.late(*_waiting("webhooks", "hook.call"), seconds=4000)
    samples.late(*samples.many(3, queue="unserved"), seconds=900)
    samples.late(*samples.many(5, topic="pay.close", queue="payments"), seconds=900)
    with actors.acting_as("user:anna"):
        override_limit(topic="push.send", limit=0, reason="too many pushes")
        override_limit(queue="webhooks", limit=3, duration="1h")
    samples.late(*samples.many(20, topic="push.send", queue="push"), seconds=600)
    samples.worker("web-0/1", ("default",), seen=900)
    for action, state in (("cancel", "running"), ("check", "done"), ("check", "queued"), ("restore", "done")):
        _operation(action, OperationState(state))
    audit.record(DB, "pause", "emails", reason="mail provider down, INC-412")
    _schedules()
    return dead[0]


def _waiting(queue: str, topic: str) -> list[Message]:
    return list(Message.objects.filter(queue=queue, topic=topic, state="scheduled", due_at__lt=reads.now(DB)))


def _operation(action: str, state: OperationState) -> None:
    now = reads.now(DB)
    made = samples.operation(action)
    ended: dict[str, Any] = {"finished_at": now} if state == OperationState.DONE else {}
    type(made).objects.filter(pk=made.pk).update(state=state, started_at=now, position="{}", **ended)


def _schedules() -> None:
    """Make schedules whose messages no worker makes although it has the role, and one that is paused."""
    now = reads.now(DB)
    for number in range(3):
        create_schedule(f"report-{number}", samples.TOPIC, every="1h", tz="UTC", missed="all")
    unguarded(Schedule).update(last_at=now - timedelta(hours=3))
    pause_schedule("report-2")
    Declarations.objects.create(fingerprint="a", names=[], since=now, seen_at=now)
