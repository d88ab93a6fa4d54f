"""Data for an installation in which every page has something to show."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Any

from django.utils import timezone

from django_delayq import pause_queue, schedule_message, schedule_messages
from django_delayq.console import audit
from django_delayq.console.models import Operation, Rollup
from django_delayq.console.operations import lifecycle
from django_delayq.console.operations.work import Scope
from django_delayq.core import actors
from django_delayq.core.states import State
from django_delayq.models import Message
from django_delayq.record import reads
from tests.console.admin import samples

DB = samples.DB
WORKER = "web-1.example.net/4711/a1b2c3"
ACTOR = "user:anna"
LONG = "reports.quarterly.summary-of-all-orders-and-returns-by-country-and-warehouse"
TRACEBACK = """Traceback (most recent call last):
  File "/srv/shop/mail/handlers.py", line 42, in send
    server.send(message.payload["to"], template.render(order=order, customer=order.customer, lines=order.lines))
  File "/usr/lib/python3.12/smtplib.py", line 341, in connect
    self.sock = self._get_socket(host, port, self.timeout)
smtplib.SMTPServerDisconnected: Connection unexpectedly closed by mail-relay-3.internal.example.net
"""


def installation() -> dict[State, Message]:
    """Create messages, queues, workers, operations, audit events and rollups; return a message of each state."""
    made = samples.one_of_each()
    made[State.CONSUMED] = _retried()
    made[State.DEAD] = _dead("mail.send", "SMTPServerDisconnected: closed", number=3, queue="mail")[0]
    _dead("orders.remind", "KeyError: 'customer'", number=2)
    _dead(LONG, "", number=1)
    made[State.SCHEDULED] = _scheduled()
    _workers()
    _history()
    with actors.acting_as(ACTOR):
        pause_queue("mail", duration="2h", reason="The relay is being moved; see the runbook, section 4.")
        _operations()
        _audit(made[State.CANCELLED])
    return made


def _scheduled() -> Message:
    now = timezone.now()
    schedule_messages(
        {
            "topic": ("orders.remind", "mail.send", LONG)[number % 3],
            "queue": ("default", "mail", "reports")[number % 3],
            "due_at": now + timedelta(minutes=2 * number),
            "payload": {"order": {"id": 1000 + number}, "token": "secret", "note": "wait " * (number % 9)},
            "key": f"order-{number}",
        }
        for number in range(1, 31)
    )
    samples.late(*samples.many(4, topic="orders.remind"), seconds=180)
    payload = {
        "customer": {"name": "Ägidius Ωmega", "password": "geheim", "address": ["Straße 1", "12345 Überall"]},
        "amount": 2**62,
        "html": "<script>alert(1)</script>",
        "long": "x" * 300,
    }
    return schedule_message("orders.remind", payload, delay="50m", key="order-" + "9" * 60, expires="1d", priority=-5)


def _retried() -> Message:
    """Create a message that failed once and was consumed then."""
    message = samples.claimed(schedule_message("mail.send", {"to": "anna@example.net"}, key="welcome-7"))
    samples.failed(message, delay=timedelta(), error="SMTPServerDisconnected: closed", traceback=TRACEBACK)
    return samples.succeeded(samples.claimed(message))


def _dead(topic: str, error: str, *, number: int, **options: Any) -> list[Message]:
    given: list[Any] = [{"topic": topic, "payload": {"order": place}, **options} for place in range(number)]
    values = {"dead": True, "reason": "gave up after 5 attempts", "error": error, "traceback": TRACEBACK}
    return [samples.failed(samples.claimed(message), **values) for message in schedule_messages(given)]


def _workers() -> None:
    values: dict[str, Any] = {"host": "web-1.example.net", "threads": 8, "started_at": _ago(hours=30)}
    samples.worker(WORKER, ("default", "mail"), seen=2, pid=4711, **values)
    samples.worker("web-2/12/ffff", ("reports",), seen=1200, pid=12, **{**values, "host": "web-2.example.net"})
    samples.worker(samples.WORKER, seen=3, pid=1, **values)


def _history() -> None:
    """Create the rollups of a day of deliveries."""
    hour = _ago().replace(minute=0, second=0, microsecond=0)
    minute = _ago().replace(second=0, microsecond=0)
    at = [(3600, hour - timedelta(hours=back)) for back in range(1, 24)]
    at += [(60, minute - timedelta(minutes=back)) for back in range(60)]
    Rollup.objects.bulk_create(
        Rollup(
            seconds=seconds,
            at=moment,
            queue=queue,
            topic=topic,
            consumed=seconds // 10 + place % 7 * 3,
            retried=place % 3,
            dead=int(place % 11 == 0),
            late_5=seconds // 10,
            late_50=place % 5,
            late_1000=place % 2,
            # The newest hour is slower than the day before it.
            **{"run_200" if seconds == 60 else "run_50": 20, "run_5": 30},
            run_us=3_500_000 if seconds == 60 else 1_000_000,
        )
        for place, (seconds, moment) in enumerate(at)
        for queue, topic in (("default", "orders.remind"), ("mail", "mail.send"), ("reports", LONG))
    )


def _operations() -> None:
    _operation("cancel", "done", done=1260, total=1262, outcomes={"cancelled": 1260, "too late": 2})
    _operation("requeue", "failed", done=400, total=9000, outcomes={"requeued": 400}, error="DataError: out of range")
    _operation("purge", "stopped", done=5000, total=120_000, outcomes={"purged": 5000})
    _operation("reschedule", "running", done=3000, total=8000, outcomes={"rescheduled": 3000}, arguments={"shift": 900})
    found = {"compared": 41, "missing": 2, "extra": 0, "different": 1, "stuck": 0}
    agrees = {**found, "missing": 0, "different": 0}
    position = json.dumps({"default": found, "mail": agrees, "reports": agrees})
    _operation("check", "done", done=123, position=position, described="all queues")


def _operation(action: str, state: str, **values: Any) -> Operation:
    described = values.pop("described", "topic mail.send, state scheduled, due before 2026-01-02 12:00")
    arguments = values.pop("arguments", {})
    scope = {} if action == "check" else Scope(ids=(1,)).to_json()
    with actors.acting_as(ACTOR):
        operation = lifecycle.start(DB, action, scope, arguments, described=described, reason="the relay was moved")
    times = {
        "created_at": _ago(seconds=95),
        "started_at": _ago(seconds=90),
        "finished_at": None if state == "running" else _ago(seconds=30),
    }
    worker = {"worker": WORKER, "leased_until": _ago(seconds=-3600)} if state == "running" else {}
    Operation.objects.filter(pk=operation.pk).update(state=state, **times, **worker, **values)
    return operation


def _audit(message: Message) -> None:
    operation = Operation.objects.order_by("pk")[0]
    audit.record(DB, "cancel", f"message #{message.pk}", message_id=message.pk, outcomes={"cancelled": 1})
    audit.record(DB, "cancel", operation.described, reason="the relay was moved", operation=operation)
    audit.record(DB, "pause", "mail", reason="The relay is being moved; see the runbook, section 4.")


def _ago(**span: float) -> datetime:
    return reads.now(DB) - timedelta(**span)
