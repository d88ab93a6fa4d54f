"""Runs commands as an operator does, and reads what they leave in Redis."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import timedelta
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from django.core.management import CommandError, call_command
from django.db.models import F
from django.utils import timezone

from django_delayq import schedule_messages
from django_delayq.core.clock import to_tenths
from django_delayq.models import Message
from django_delayq.project import conf
from django_delayq.record import transitions
from django_delayq.record.purge import purge
from django_delayq.record.sql.rows import Ticket
from django_delayq.restore.engine import Restore
from tests.support.rows import unguarded

if TYPE_CHECKING:
    from django_delayq.broker.redis import RedisBroker

# Words with which each command can be called that needs some.
_ARGUMENTS = {
    "delayq_act": [
        ["cancel", "--topic", "t.ok", "--yes"],
        ["purge", "--finished-before", "1d"],
        ["reschedule", "1", "--due-at", "1h"],
        ["requeue", "1"],
        ["run", "1"],
    ],
    "delayq_check": [[], ["redis"], ["record"], ["handlers"]],
    "delayq_limit": [["override", "--topic", "t.ok", "--limit", "1"], ["reset", "--topic", "t.ok"], ["list"]],
    "delayq_queue": [["pause", "default"], ["resume", "default"]],
    "delayq_recurring": [["list"]],
    "delayq_schedule": [["t.ok"]],
    "delayq_show": [["1"]],
    "run_delayq": [["--max-runtime", "1"]],
}


def calls_of(*packages: ModuleType) -> list[list[str]]:
    """Return a call of each command, and of each of its verbs."""
    names = [path.stem for package in packages for path in sorted(Path(package.__path__[0]).glob("[a-z]*.py"))]
    return [[name, *words] for name in names for words in _ARGUMENTS.get(name, [[]])]


@dataclass(frozen=True, slots=True)
class Ran:
    """The output and the exit code of a command."""

    out: str
    err: str
    code: int

    @property
    def json(self) -> Any:
        """The one object that stdout holds."""
        return json.loads(self.out)


def set_batch_size(patch: pytest.MonkeyPatch, number: int, *functions: Any) -> None:
    """Have these functions work in batches of this size where their caller does not choose one."""
    for function in functions:
        patch.setitem(function.__kwdefaults__, "batch_size", number)


def run(*words: str, batch_size: int | None = None) -> Ran:
    """Call a command, and return its output with the exit code that a shell would see.

    With ``batch_size`` a restore or a purge works in batches of so many messages.
    """
    out, err = StringIO(), StringIO()
    code = 0
    try:
        with pytest.MonkeyPatch.context() as patch:
            if batch_size is not None:
                set_batch_size(patch, batch_size, Restore.__init__, purge)
            call_command(*words, stdout=out, stderr=err, no_color=True)
    except CommandError as error:
        err.write(str(error))
        code = error.returncode
    except SystemExit as error:
        code = int(error.code or 0)
    return Ran(out.getvalue(), err.getvalue(), code)


def schedule(number: int = 1, *, due: float = 60.0, **more: Any) -> list[int]:
    """Schedule messages: the first is due in ``due`` seconds, each of the others a millisecond after the one before."""
    now = timezone.now()
    given: list[Any] = [
        {"topic": "t.ok", "due_at": now + timedelta(seconds=max(due, -50), milliseconds=place), **more}
        for place in range(number)
    ]
    ids = [message.pk for message in schedule_messages(given)]
    if due < -50:
        unguarded(Message).filter(pk__in=ids).update(due_at=F("due_at") + timedelta(seconds=due + 50))
    return ids


def claim(*ids: int, lease: float = 60.0) -> None:
    """Claim due messages for a worker."""
    topics = Message.objects.filter(pk__in=ids).values_list("topic", flat=True)
    claimed = transitions.claim("default", [Ticket(pk) for pk in ids], dict.fromkeys(topics, lease), "a worker")
    assert {row.id for row in claimed} == set(ids)


def held(queue: str = "default") -> dict[int, int]:
    """Return the ids in Redis, each with its due tenth if it is delayed, or 0 if it is ready."""
    redis_broker = broker()
    ids = sorted({pk for batch in redis_broker.ids(queue) for pk in batch})
    return {
        pk: place.delayed_tenths if place.delayed_tenths is not None else 0
        for pk, place in zip(ids, redis_broker.locations(queue, ids), strict=True)
    }


def due_tenths(*ids: int) -> dict[int, int]:
    """Return the due tenths of messages in the record."""
    return {m.pk: to_tenths(m.due_at) for m in Message.objects.filter(pk__in=ids)}


def broker() -> RedisBroker:
    from django_delayq.broker.redis import RedisBroker

    return RedisBroker(conf.get(), "default", timeout=2)
