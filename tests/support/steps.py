"""Helpers that bring a message into a state and read its rows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

from django.db import connections
from django.utils import timezone

from django_delayq import schedule_message
from django_delayq.core.states import State
from django_delayq.models import Message, Transition
from django_delayq.record import crashes, transitions
from django_delayq.record.sql import statements
from django_delayq.record.sql.rows import BEGINNING, Claimed, Failure, Success, Ticket
from tests.support.rows import unguarded

T = TypeVar("T")

TOPIC = "record.test"
LEASES = {TOPIC: 60.0}


def ago(seconds: float = 1.0) -> Any:
    """Return a moment in the past: a message with this due time is due by any clock."""
    return timezone.now() - timedelta(seconds=seconds)


def due(payload: Any = None, **options: Any) -> Message:
    """Schedule a message that is due already."""
    return schedule_message(TOPIC, payload, **{"due_at": ago(), **options})


def later(payload: Any = None, **options: Any) -> Message:
    """Schedule a message that is not due for a while."""
    return schedule_message(TOPIC, payload, **{"delay": "10m", **options})


def until_due(queue: str, topics: Sequence[str], closed: Collection[str] = ()) -> float | None:
    """Return the seconds until the next message of a queue falls due that may begin, as a look finds it."""
    return statements("default").find_candidates({queue: BEGINNING}, topics, closed)[queue].wait


def claim(*ids: int, using: str = "default", worker: str = "a", leases: dict[str, float] = LEASES) -> list[Claimed]:
    return transitions.claim(using, [Ticket(id_) for id_ in ids], leases, worker)


def claimed(*, using: str = "default", worker: str = "a", **options: Any) -> Claimed:
    """Schedule a message and claim it."""
    (row,) = claim(due(using=using, **options).pk, using=using, worker=worker)
    return row


def succeed(id_: int, delivery: int = 1, *, using: str = "default") -> bool:
    return id_ in transitions.succeed(using, [Success(id_, delivery, "worker:a")])


def fail(id_: int, delivery: int = 1, *, using: str = "default", **terms: Any) -> bool:
    """Report a failure; by default with a retry at once."""
    failure = Failure(id_, delivery, "worker:a", **{"delay": timedelta(0), "error": "it broke", **terms})
    return [moved.id for moved in transitions.fail(using, [failure])] == [id_]


def lose(id_: int, *, using: str = "default") -> None:
    """Let the lease of a running message run out, and reap it."""
    unguarded(Message).using(using).filter(pk=id_).update(leased_until=ago(5))
    assert id_ in [moved.id for moved in crashes.reap(using, actor="reaper")]


def bring(state: State, **options: Any) -> int:
    """Make a message in a state, with a due time in the past; return its id."""
    if state == State.SCHEDULED:
        return due(**options).pk
    if state == State.EXPIRED:
        id_ = due(due_at=ago(30), expires=1, **options).pk
        assert id_ in [moved.id for moved in transitions.expire("default", actor="janitor")]
        return id_
    if state == State.CANCELLED:
        id_ = due(**options).pk
        assert transitions.cancel("default", [id_])[0]
        return id_
    row = claimed(**options)
    if state == State.CONSUMED:
        assert succeed(row.id)
    elif state == State.DEAD:
        assert fail(row.id, dead=True)
    return row.id


def message(id_: int, using: str = "default") -> Message:
    return Message.objects.using(using).get(pk=id_)


def state(id_: int, using: str = "default") -> State:
    return State(message(id_, using).state)


def log(id_: int, using: str = "default") -> list[Transition]:
    return list(Transition.objects.using(using).filter(message_id=id_).order_by("number"))


def moves(id_: int, using: str = "default") -> list[str]:
    """Return the log in short form: "scheduled", "scheduled>running", …"""
    return [f"{row.from_state}>{row.to_state}" if row.from_state else row.to_state for row in log(id_, using)]


def snapshot(id_: int) -> tuple[list[Any], list[Any]]:
    """Return all rows of a message."""
    log: Any = Transition.objects.filter(message_id=id_).order_by("number").values()
    return list(Message.objects.filter(pk=id_).values()), list(log)


def somebody_waits() -> bool:
    """Return whether a thread of this process looks for those who wait for messages of pulled queues."""
    return any(thread.name == "delayq-pull" for thread in threading.enumerate())


def at_once(count: int, work: Callable[[int], T]) -> list[T | BaseException]:
    """Run ``work`` in ``count`` threads that start together; return its answers, or the exceptions it raised."""
    start = threading.Barrier(count)

    def run(number: int) -> T | BaseException:
        try:
            start.wait()
            return work(number)
        except Exception as error:  # noqa: BLE001  handed to the test
            return error
        finally:
            connections.close_all()

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))
