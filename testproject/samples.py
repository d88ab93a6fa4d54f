"""Leaves messages of each kind in the demo, so that there is something to see and to do in the admin."""

from __future__ import annotations

import time

from django_delayq import (
    MessageDict,
    cancel_message,
    pause_queue,
    resume_queue,
    schedule_message,
    schedule_messages,
)
from django_delayq.core.states import State
from django_delayq.models import Message

QUEUE = "demo-mails"
# No order has this number: the handler fails.
NO_ORDER = 10**9
# The time for which the samples are given to come to rest. Seconds.
SETTLED_WITHIN = 20.0


def leave() -> str:
    """Leave the messages, wait until each is what it is to be, and return what to click."""
    pause_queue(QUEUE, reason="left by the demo: nothing in it is delivered")
    readers = [f"reader{n}@example.com" for n in range(40)]
    news: list[MessageDict] = [{"topic": "news.send", "payload": {"email": reader}} for reader in readers]
    later = schedule_messages({**each, "delay": 600 + 900 * n} for n, each in enumerate(news))
    overdue = schedule_messages({**each, "queue": QUEUE} for each in news[:5])
    expired = schedule_messages({**each, "queue": QUEUE, "expires": "1s"} for each in news[5:8])
    broken: MessageDict = {"topic": "payments.callback", "payload": {"order": NO_ORDER}}
    dead = schedule_messages({**broken, "max_attempts": 1} for _ in range(4))
    dead += schedule_messages({"topic": "orders.remind", "payload": {}, "max_attempts": 1} for _ in range(2))
    failed = schedule_message("payments.callback", {"order": NO_ORDER}, retry=["1h", "6h"])
    cancelled = later[-3:]
    for message in cancelled:
        cancel_message(message, reason="the reader has unsubscribed")
    _wait_for(dead, State.DEAD)
    _wait_for(expired, State.EXPIRED)
    rows = (
        (
            f"{len(later) - len(cancelled)} messages due in the future",
            "Messages, Scheduled: reschedule one, run one now",
        ),
        (f"{len(overdue)} overdue in a paused queue", f"Queues: resume {QUEUE}, and see them go"),
        (f"{len(dead)} dead, for two reasons", "Dead letters: requeue a group (it dies again)"),
        ("1 failed, and waits for its retry", f"Messages: #{failed.pk} has the log and the traceback"),
        (f"{len(expired)} expired, {len(cancelled)} cancelled", "Messages, Expired and Cancelled: requeue one"),
    )
    return "\n".join(
        ["\nLeft for you, beside what the shop did:", *(f"  {what:<34}{where}" for what, where in rows), ""]
    )


def clear() -> None:
    """Take away what is still waiting, for a database that outlives the demo."""
    waiting = Message.objects.filter(state=State.SCHEDULED, topic__in=("news.send", "payments.callback"))
    cancel_message(waiting, reason="the demo has ended")
    resume_queue(QUEUE)


def _wait_for(messages: list[Message], state: State) -> None:
    ids = [message.pk for message in messages]
    until = time.monotonic() + SETTLED_WITHIN
    while time.monotonic() < until and Message.objects.filter(pk__in=ids, state=state).count() < len(ids):
        time.sleep(0.05)
