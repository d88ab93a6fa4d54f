"""Messages in every state, which they reached by real transitions, and helpers that read pages."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django.db import DEFAULT_DB_ALIAS
from django.test import Client
from django.urls import reverse

from django_delayq import cancel_message, schedule_message, schedule_messages
from django_delayq.broker.redis import RedisBroker
from django_delayq.console.models import Operation
from django_delayq.console.operations import lifecycle
from django_delayq.console.operations.work import Scope
from django_delayq.core.actors import acting_as
from django_delayq.core.states import State
from django_delayq.models import Message, Transition, Worker
from django_delayq.project import conf
from django_delayq.record import reads, transitions
from django_delayq.record.sql.rows import Failure, Success, Ticket
from django_delayq.restore.horizon import ensure_horizon
from tests.support.rows import unguarded
from tests.support.workers import eventually

TOPIC = "t.admin"
WORKER = "host/1-worker"
DB = DEFAULT_DB_ALIAS
LIST = "admin:delayq_message_changelist"
CONSOLE = ("dashboard", "deadletters", "topics", "limits", "health", "operation", "auditevent")


def admin_url(name: str, *args: object) -> str:
    """Return the address of a page of the admin, by the name of its model and view: "message_change"."""
    app = "delayq_console" if name.partition("_")[0] in CONSOLE else "delayq"
    return reverse(f"admin:{app}_{name}", args=args)


def scheduled(payload: Any = None, **options: Any) -> Message:
    return schedule_message(TOPIC, payload, **{"delay": "1h", **options})


def many(number: int, **options: Any) -> list[Message]:
    terms: Any = {"topic": TOPIC, "delay": "1h", **options}
    return schedule_messages([terms] * number)


def running(payload: Any = None, *, lease: float = 60.0, **options: Any) -> Message:
    message = scheduled(payload, delay=0, **options)
    return claimed(message, lease=lease)


def claimed(message: Message, *, lease: float = 60.0) -> Message:
    """Claim a scheduled message that is due, as a worker does."""
    leases = {message.topic: lease}
    eventually(lambda: transitions.claim(DB, [Ticket(message.pk)], leases, WORKER), "the claim of what is due now")
    return fresh(message)


def consumed(payload: Any = None, **options: Any) -> Message:
    return succeeded(running(payload, **options))


def succeeded(message: Message, result: str | None = None) -> Message:
    assert transitions.succeed(DB, [Success(message.pk, message.deliveries, WORKER, result)])
    return fresh(message)


def failed(message: Message, **values: Any) -> Message:
    assert transitions.fail(DB, [Failure(message.pk, message.deliveries, WORKER, **values)])
    return fresh(message)


def dead(payload: Any = None, **options: Any) -> Message:
    return failed(running(payload, **options), dead=True, reason="given up", error="ValueError: no")


def cancelled(payload: Any = None, **options: Any) -> Message:
    message = scheduled(payload, **options)
    assert cancel_message(message)
    return fresh(message)


def expired(payload: Any = None, **options: Any) -> Message:
    message = scheduled(payload, delay=0, expires="1ms", **options)
    eventually(lambda: transitions.expire(DB, actor=WORKER), "the end of its time")
    return fresh(message)


MAKERS: dict[State, Callable[..., Message]] = {
    State.SCHEDULED: scheduled,
    State.RUNNING: running,
    State.CONSUMED: consumed,
    State.DEAD: dead,
    State.CANCELLED: cancelled,
    State.EXPIRED: expired,
}


def one_of_each() -> dict[State, Message]:
    return {state: make() for state, make in MAKERS.items()}


def late(*messages: Message, seconds: float = 60) -> list[Message]:
    """Have messages be overdue by so much."""
    rows = unguarded(Message).filter(pk__in=[message.pk for message in messages])
    rows.update(due_at=reads.now(DB) - timedelta(seconds=seconds))
    found = rows.in_bulk()
    return [found[message.pk] for message in messages]


def worker(name: str = "w", queues: tuple[str, ...] = ("default",), *, seen: float = 0, **values: Any) -> Worker:
    """Create a worker that was seen so many seconds ago."""
    at = reads.now(DB) - timedelta(seconds=seen)
    given: dict[str, Any] = {"host": "h", "pid": 7, "queues": list(queues), "topics": [TOPIC]}
    given |= {"started_at": at, "seen_at": at}
    return Worker.objects.create(name=name, **{**given, **values})


def fill() -> RedisBroker:
    """Give Redis a horizon, as the first worker does, so that scheduled messages go into it."""
    there = RedisBroker(conf.get(), DB, timeout=10)
    ensure_horizon(DB, there, lease=0.001, worker="test")
    return there


def operation(action: str = "cancel", *ids: int, described: str = "these", reason: str = "so") -> Operation:
    """Start an operation on messages, as a user does."""
    scope = Scope(ids=ids or (1,)).to_json()
    with acting_as("user:anna"):
        return lifecycle.start(DB, action, scope, {}, described=described, reason=reason)


def fresh(message: Message) -> Message:
    return Message.objects.get(pk=message.pk)


def record() -> list[Any]:
    """Return all messages and transitions, to compare them later."""
    return [*Message.objects.order_by("pk").values(), *Transition.objects.order_by("pk").values()]


def change_url(message: Message) -> str:
    return reverse("admin:delayq_message_change", args=[message.pk])


def action_url(action: str) -> str:
    return reverse("admin:delayq_message_action", args=[action])


def ids(*messages: Message) -> str:
    return ",".join(str(message.pk) for message in messages)


def text(response: Any) -> str:
    """Return the text of a page without tags, with single spaces."""
    assert response.status_code == 200, response.status_code
    return without_tags(response.content.decode())


def without_tags(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html))


def table_rows(html: str) -> list[str]:
    """Return the text of each row of the tables in it."""
    return [without_tags(row).strip() for row in re.findall(r"<tr.*?</tr>", html, re.DOTALL)]


def why(client: Client, message: Message) -> str:
    """Return the explanation on the page of a message."""
    return plain(" ".join(client.get(change_url(message)).context["explanation"]))


def plain(told: str) -> str:
    """Return a text of a page with spaces that may break: times have none."""
    return told.replace("\N{NO-BREAK SPACE}", " ")


def listed(client: Client, **query: Any) -> list[int]:
    """Return the messages that a page of the list shows."""
    response = client.get(reverse(LIST), query)
    assert response.status_code == 200
    return [message.pk for message in response.context["cl"].result_list]


def tabs(client: Client, **query: Any) -> dict[str, str]:
    """Return the number of each tab of the list by its label."""
    return {tab.label: tab.count for tab in client.get(reverse(LIST), query).context["cl"].tabs()}


def said(response: Any) -> list[str]:
    """Return the notes at the head of a page."""
    return [str(message) for message in response.context["messages"]]
