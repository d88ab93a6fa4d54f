"""A day of a shop: traffic that rises and falls, a provider that is down, a paused queue and a limit, for *Now*."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from django_delayq import pause_queue, schedule_messages
from django_delayq.console.models import Rollup
from django_delayq.core import actors
from django_delayq.models import Message, Queue
from django_delayq.record import reads, transitions
from django_delayq.record.sql.rows import Ticket
from tests.console.admin import samples
from tests.support.limits import claim_limited
from tests.support.rows import unguarded

DB = samples.DB
# Queues, the topic of each, and the messages of a minute at noon.
TRAFFIC = {
    "default": ("order.remind", 34),
    "emails": ("mail.send", 41),
    "payments": ("pay.close", 27),
    "push": ("push.send", 22),
    "reports": ("report.build", 6),
    "search": ("search.index", 29),
    "webhooks": ("hook.call", 31),
}
# Its limit is full: the settings of whoever makes this day declare it.
LIMITS = {"webhooks": {"limit": 4}}
WORKERS = ("web-1/15447", "web-2/15448")


def happen() -> None:
    """Create the day: rollups of two days, what waits now, and who works."""
    samples.fill()
    now = reads.now(DB)
    Rollup.objects.bulk_create(_rollups(now))
    for name in WORKERS:
        samples.worker(name, (*TRAFFIC,), seen=1, threads=8, topics=[topic for topic, _rate in TRAFFIC.values()])
    _run(WORKERS[0], 8, "default")
    _run(WORKERS[1], 3, "search")
    _hold_back()
    _coming()
    samples.late(*samples.many(1032, topic="mail.send", queue="emails"), seconds=3840)
    unguarded(Message).filter(queue="emails").update(payload={"to": "anna@example.net", "template": "welcome"})
    with actors.acting_as("user:anna"):
        pause_queue("emails", reason="mail provider down, INC-412")
    Queue.objects.filter(name="emails").update(paused_at=now - timedelta(minutes=64))


def _run(worker: str, number: int, queue: str) -> None:
    topic = TRAFFIC[queue][0]
    made = samples.many(number, topic=topic, queue=queue, delay=0)
    assert len(transitions.claim(DB, [Ticket(message.pk) for message in made], {topic: 60.0}, worker)) == number


def _hold_back() -> None:
    """Have messages wait for the limit of their queue."""
    topic = TRAFFIC["webhooks"][0]
    made = samples.many(100, topic=topic, queue="webhooks", delay=0)
    claim_limited(DB, [Ticket(message.pk) for message in made], {topic: 60.0}, WORKERS[1])
    samples.late(*(message for message in made if samples.fresh(message).state == "scheduled"), seconds=1560)


def _coming() -> None:
    """Schedule what falls due in the next hour, and less of it later."""
    terms: list[Any] = []
    for minute in range(1, 62):
        for queue, (topic, rate) in TRAFFIC.items():
            number = round(rate * _curve(minute / 15 + len(topic)) * math.exp(-minute / 60) / 2)
            for place in range(number):
                due = timedelta(minutes=minute, seconds=60 * place / number)
                order = 4000 + minute * 100 + place
                options = {"delay": due, "key": f"{topic}-{order}", "payload": {"order": order}}
                terms.append({"topic": topic, "queue": queue, **options})
    schedule_messages(terms)


def _rollups(now: datetime) -> Iterator[Rollup]:
    """Yield the counts of minutes of the last two hours, and of half hours before."""
    minute = now.replace(second=0, microsecond=0)
    begin = minute.replace(minute=0) - timedelta(hours=1)
    for back in range(int((minute - begin).total_seconds() // 60) + 1):
        yield from _of(minute - timedelta(minutes=back), 60, 1, back)
    for step in range(1, 96):
        yield from _of(begin - step * timedelta(minutes=30), 3600, 30, 120 + 30 * step)


def _of(at: datetime, seconds: int, minutes: int, back: int) -> Iterator[Rollup]:
    for place, (queue, (topic, rate)) in enumerate(TRAFFIC.items()):
        day = 0.62 + 0.38 * math.sin(math.tau * (at.hour + at.minute / 60 - 8) / 24)
        number = round(rate * minutes * day * _curve(back / 7 + place))
        failed = round(number * (0.005 + 0.005 * _curve(back / 3 + place)))
        dead = failed // 3 or int((back + 3 * place) % 23 == 0)
        if queue == "emails" and back < 64:
            number = failed = dead = 0
        if queue == "payments" and back < 23:
            failed = round(number * (0.62 - 0.02 * max(0, back - 16)))
            dead = failed // 4
        late = {"late_5": number * 6 // 10, "late_20": number * 3 // 10, "late_200": number // 14}
        if queue == "webhooks":
            late = {"late_500": number * 6 // 10, "late_1000": number // 12}
        ran = {"run_20": number * 6 // 10, "run_100": number // 3, "run_us": number * 31_000}
        done = {"consumed": max(0, number - failed), "retried": max(0, failed - dead), "dead": dead}
        yield Rollup(at=at, seconds=seconds, queue=queue, topic=topic, **done, **late, **ran)


def _curve(x: float) -> float:
    """Return a number about 1 that wanders: the same for the same place."""
    return 1 + 0.11 * math.sin(x) + 0.07 * math.sin(2.7 * x + 1) + 0.05 * math.sin(7.1 * x + 2)
