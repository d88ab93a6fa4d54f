"""The way through the confirmation page: choose, be asked, answer."""

from __future__ import annotations

from typing import Any

from django.test import Client
from django.urls import reverse

from django_delayq.console.models import Operation
from django_delayq.console.operations.runner import OperationRunner
from django_delayq.models import Message

from . import samples

VERBS = ("cancel", "reschedule", "run", "requeue", "purge")
SOME = {"reason": "because"}


def select(client: Client, verb: str, *messages: Message, across: bool = False, query: str = "?state=all") -> Any:
    """Choose an action in the list."""
    data = {
        "action": f"{verb}_selected",
        "_selected_action": [message.pk for message in messages],
        "select_across": "1" if across else "0",
        "index": "0",
    }
    return client.post(reverse(samples.LIST) + query, data)


def steer(client: Client, verb: str, *messages: Message, **data: Any) -> Any:
    """Press a button for these messages."""
    return client.post(samples.steer_url(verb), {"ids": samples.ids(*messages), **data})


def steer_search(client: Client, verb: str, search: str, **data: Any) -> Any:
    """Press a button for all that a search finds."""
    return client.post(samples.steer_url(verb), {"search": search, **data})


def answer(client: Client, verb: str, asked: Any, *, follow: bool = True, **data: Any) -> Any:
    """Say yes to a question, with what it asks for."""
    assert asked.status_code == 200, asked.status_code
    form = asked.context["form"]
    given: dict[str, Any] = {"token": asked.context["token"], "reason": "because", "typed": form.expected}
    if asked.context["filters"] is not None:
        given["filters"] = asked.context["filters"]
    return client.post(samples.steer_url(verb), {**given, **data}, follow=follow)


def confirm(client: Client, verb: str, *messages: Message, **data: Any) -> Any:
    """From the list to what came of it."""
    return answer(client, verb, select(client, verb, *messages), **data)


def started(client: Client, verb: str, search: str, **data: Any) -> Operation:
    """Have all that a search finds done: the operation that it became."""
    response = answer(client, verb, steer_search(client, verb, search), **data)
    assert response.status_code == 200
    operation = Operation.objects.order_by("-pk").first()
    assert operation is not None
    return operation


def worked_off(operator: OperationRunner | None = None) -> None:
    """What a worker does with the operations that are open."""
    operator = operator or OperationRunner(samples.DB, "tests/1/abc")
    while operator.tick() == 0.0:
        pass
