"""Claimed messages, for the tests of what a worker does with them."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any

import pytest
from django.db import connection

from django_delayq import cancel_message, schedule_message
from django_delayq.models import Message, Transition
from django_delayq.project import registry
from django_delayq.record import transitions
from django_delayq.record.sql.rows import Ticket
from django_delayq.worker.run.delivery import Delivery
from tests.support.transactions import unfinished

DB = "default"


def needs_row_locks() -> None:
    """Skip the test on a database without row locks."""
    if not connection.features.has_select_for_update:
        pytest.skip("needs row locks")


def claimed(*topics: str, worker: str = "w", **options: Any) -> list[Delivery]:
    """Schedule a message of each topic, and claim them."""
    ids = [schedule_message(topic, **options).pk for topic in topics]
    handlers = registry.handlers()
    leases = {topic: handlers[topic].lease for topic in topics}
    rows = {row.id: row for row in transitions.claim(DB, [Ticket(pk) for pk in ids], leases, worker)}
    return [Delivery(rows[pk], handlers[rows[pk].topic], DB) for pk in ids]


def locked_by_a_cancel(message_id: int) -> AbstractContextManager[threading.Event]:
    """Cancel a message in a transaction that stays open for the block."""
    return unfinished(lambda: cancel_message(message_id))


def state(of: Delivery | Message) -> str:
    """Return the state of a message, or of that of a delivery."""
    return Message.objects.get(pk=of.id).state


def last_move(of: Delivery | Message) -> Transition:
    """Return the last row in the log of a message, or of that of a delivery."""
    return Transition.objects.filter(message=of.id).latest("number")
