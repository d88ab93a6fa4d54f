"""Helpers that go through the confirmation page: choose messages, get the question, answer it."""

from __future__ import annotations

from typing import Any

from django.test import Client
from django.urls import reverse

from django_delayq.console.models import Operation
from django_delayq.console.operations.lifecycle import OperationLook, OperationRunner
from django_delayq.models import Message

from . import samples

ACTIONS = ("cancel", "reschedule", "run", "move", "requeue", "purge")
# What makes a message that an action changes, and what the action asks for.
NEEDED = {name: samples.dead if name in ("requeue", "purge") else samples.scheduled for name in ACTIONS}
GIVEN: dict[str, dict[str, Any]] = {"reschedule": {"delay": "5m"}, "move": {"priority": "7"}}
UNSENT = "Nothing was done: your session had ended before the form was sent. Please do it again."


def select(client: Client, action: str, *messages: Message, across: bool = False, query: str = "?state=all") -> Any:
    """Choose an action in the list."""
    data = {
        "action": f"{action}_selected",
        "_selected_action": [message.pk for message in messages],
        "select_across": "1" if across else "0",
        "index": "0",
    }
    return client.post(reverse(samples.LIST) + query, data)


def ask(client: Client, action: str, *messages: Message, **data: Any) -> Any:
    """Press a button for these messages."""
    return client.post(samples.action_url(action), {"ids": samples.ids(*messages), **data})


def ask_for_search(client: Client, action: str, search: str, **data: Any) -> Any:
    """Press a button for all that a search finds."""
    return client.post(samples.action_url(action), {"search": search, **data})


def answer(client: Client, action: str, asked: Any, *, follow: bool = True, **data: Any) -> Any:
    """Confirm a question, with the reason and the text that it asks for."""
    assert asked.status_code == 200, asked.status_code
    form = asked.context["form"]
    given: dict[str, Any] = {"token": asked.context["token"], "reason": "because", "typed": form.expected}
    given |= {name: asked.context[name] for name in ("origin", "found")}
    return client.post(samples.action_url(action) + asked.context["kept"], {**given, **data}, follow=follow)


def confirm(client: Client, action: str, *messages: Message, **data: Any) -> Any:
    """Choose an action in the list and confirm it."""
    return answer(client, action, select(client, action, *messages), **data)


def started(client: Client, action: str, search: str, **data: Any) -> Operation:
    """Confirm an action on all that a search finds, and return the operation that it became."""
    response = answer(client, action, ask_for_search(client, action, search), **data)
    assert response.status_code == 200
    operation = Operation.objects.order_by("-pk").first()
    assert operation is not None
    return operation


def worked_off(operator: OperationRunner | None = None) -> None:
    """Do the open operations, as a worker does."""
    operator = operator or OperationRunner(samples.DB, "tests/1/abc")
    OperationLook(operator).tick()
    while operator.tick() == 0.0:
        pass


def work_off() -> Operation:
    """Do the open operations, and return the last one."""
    worked_off()
    return Operation.objects.latest("pk")
