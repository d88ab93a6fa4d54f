"""The queues that the tests of this folder pull."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from django_delayq import schedule_message
from django_delayq.models import Message
from django_delayq.testing.plugin import delayq
from tests.support.steps import ago

__all__ = ["delayq"]

QUEUE = "exports"
# No handler receives it.
TOPIC = "exports.row"

Declare = Callable[..., None]


@pytest.fixture
def declare(settings: Any) -> Declare:
    """Declare the pulled queues of the settings."""

    def change(declared: Any = None) -> None:
        settings.DELAYQ = {**settings.DELAYQ, "PULL_QUEUES": [QUEUE, "go.*"] if declared is None else declared}

    return change


@pytest.fixture(autouse=True)
def _declared(declare: Declare) -> None:
    declare()


def put(payload: Any = None, **options: Any) -> Message:
    """Schedule a message of the pulled queue that is due."""
    return schedule_message(TOPIC, payload, **{"queue": QUEUE, "due_at": ago(), **options})
