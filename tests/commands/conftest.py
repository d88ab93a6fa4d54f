"""Commands as an operator calls them, and what they leave in Redis."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone

from django_delayq import conf, publisher, schedule_messages, transitions
from django_delayq.broker.redis import RedisBroker
from django_delayq.clock import to_tenths
from django_delayq.models import Message
from django_delayq.sql.rows import Ticket


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command said, and its exit code."""

    out: str
    err: str
    code: int

    @property
    def json(self) -> Any:
        """All of stdout, as one object."""
        return json.loads(self.out)


def run(*words: str) -> Ran:
    """Call a command; it ends with the code that the shell would see."""
    out, err = StringIO(), StringIO()
    code = 0
    try:
        call_command(*words, stdout=out, stderr=err, no_color=True)
    except CommandError as error:
        err.write(str(error))
        code = error.returncode
    except SystemExit as error:
        code = int(error.code or 0)
    return Ran(out.getvalue(), err.getvalue(), code)


def schedule(number: int = 1, *, due: float = 60.0, **more: Any) -> list[int]:
    """Messages that fall due in so many seconds; the first one then, each of the others a millisecond later."""
    now = timezone.now()
    given = [
        {"topic": "t.ok", "due": now + timedelta(seconds=max(due, -50), milliseconds=place), **more}
        for place in range(number)
    ]
    ids = [message.pk for message in schedule_messages(given)]
    if due < -50:
        for message in Message.objects.filter(pk__in=ids):
            late = message.due_at + timedelta(seconds=due + 50)
            Message.objects.filter(pk=message.pk).update(due_at=late)
    return ids


def claim(*ids: int, lease: float = 60.0) -> None:
    """Have a worker take messages that are due."""
    claimed = transitions.claim("default", [Ticket(pk) for pk in ids], {"t.ok": lease}, "a worker")
    assert {row.id for row in claimed} == set(ids)


def held(queue: str = "default") -> dict[int, int]:
    """Id → due tenth in delayed, 0 in ready."""
    redis_broker = broker()
    ids = sorted({pk for batch in redis_broker.ids(queue) for pk in batch})
    return {
        pk: place.delayed_tenths if place.delayed_tenths is not None else 0
        for pk, place in zip(ids, redis_broker.places(queue, ids), strict=True)
    }


def due_tenths(*ids: int) -> dict[int, int]:
    """Id → due tenth in the record."""
    return {m.pk: to_tenths(m.due_at) for m in Message.objects.filter(pk__in=ids)}


def broker() -> RedisBroker:
    return RedisBroker(conf.get(), "default", timeout=2)


@pytest.fixture(autouse=True)
def _publisher_is_awake() -> Iterator[None]:
    """A publisher rests after a failure, which a test that stops Redis causes."""
    publisher.get.cache_clear()
    yield
    publisher.get.cache_clear()
