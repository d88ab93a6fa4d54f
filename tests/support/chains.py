"""A message whose handler hands its key over to the next message just when somebody acts by that key."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from django.db import connection, connections, transaction

from django_delayq.core.actors import handling
from django_delayq.models import Message
from tests.support.steps import TOPIC, claim, fail, later, lose, succeed
from tests.support.together import Together
from tests.support.transactions import waits_for_a_lock
from tests.support.workers import PATIENCE, eventually

# What becomes of a delivery that has handed its key over.
ENDS: dict[str, Callable[[int], object]] = {
    "runs on": lambda _id: None,
    "succeeds": succeed,
    "waits for a retry": fail,
    "is dead": lambda id_: fail(id_, dead=True),
    "has crashed": lose,
}


def hand_over(id_: int, **options: Any) -> Message:
    """Schedule the next message under the key of a running one, as its handler."""
    with handling("default", TOPIC, "k", id_):
        return later(key="k", **options)


def while_it_waits(together: Together, id_: int, act: Callable[[], Any], then: Callable[[], object]) -> Any:
    """Return what ``act`` answers, or the error that it raises, when another transaction is ahead of it.

    That holds the row of a message until ``act`` has looked and waits for the row, then does ``then`` and commits.
    """
    locked = threading.Event()

    def ahead() -> None:
        with transaction.atomic():
            Message.objects.select_for_update().get(pk=id_)
            locked.set()
            eventually(waits_for_a_lock, "the call waits for the row")
            then()

    def call() -> Any:
        assert locked.wait(PATIENCE)
        return act()

    answer, error = together(call, ahead)
    assert error is None
    return answer


@contextmanager
def going_on(id_: int, steps: int) -> Iterator[list[int]]:
    """Have a chain go on so many times: each time when this thread has looked for a row, and is about to lock it.

    Yields the ids of its messages, of which the last one waits. The first one waits, too.
    """
    chain = [id_]

    def step() -> None:
        try:
            assert claim(chain[-1])
            chain.append(hand_over(chain[-1], due_at=None, delay=0).pk)
            assert fail(chain[-2])
        finally:
            connections.close_all()

    def execute(send: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        # SQLite locks all rows when a transaction begins that will write.
        if ("FOR NO KEY UPDATE" in sql or sql == "BEGIN IMMEDIATE") and len(chain) <= steps:
            threads.submit(step).result(PATIENCE)
        return send(sql, params, many, context)

    with ThreadPoolExecutor(1) as threads, connection.execute_wrapper(execute):
        yield chain
