"""The process of an adapter: it reads JSON calls from stdin and writes JSON answers to stdout. Standard library only.

``python adapter_process.py <module>`` runs in the system's own environment. The module is the adapter: it has functions
of these names, of which only ``send`` (or ``asend``) is required.

``setup()`` is called once, on an empty database · ``ready()`` whenever all was emptied · ``send(payload, due)``
schedules one message, due at an epoch time or (None) now · ``send_many(payloads, due)`` · ``send_keyed(payloads, due)``
gives each a key of its own · ``worker()`` returns the arguments for Python that start one worker process · ``TABLES``
are emptied between workloads · ``OPEN`` is the end of a query, from FROM on, for the messages whose outcome is not
committed yet. Every handler calls ``mark``, which needs psycopg only where the handler inserts a row.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import random
import struct
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any, NamedTuple

PAYLOAD_BYTES = 200
MARK = struct.Struct("<qddq")
# The table of rows that a peer's handler inserts, in a transaction of its own.
EFFECTS = "CREATE TABLE IF NOT EXISTS bench_effect (number bigint, payload jsonb)"
INSERT = "INSERT INTO bench_effect VALUES (%s, %s)"
VERBS = ("send_many", "send_keyed", "worker")
# For lateness: the shortest delay of a message, and the pause of the sender.
MIN_DELAY_SECONDS = 1.0
TICK_SECONDS = 0.001

# Set for a system that commits no outcome: each message that was handled is noted, to count them.
COUNT_ALL = bool(os.environ.get("BENCH_COUNT_ALL"))
# The handlers that run at once where each waits for 100 ms, as for an answer; 0 where they do nothing.
AT_ONCE = int(os.environ.get("BENCH_AT_ONCE", "0"))
WAIT_SECONDS = 0.1

_marks: dict[int, tuple[int, int]] = {}
_connections: dict[tuple[int, int], Any] = {}


class Mark(NamedTuple):
    """A note that a message was handled: its number, when, its due time (0: at once), and the session of the worker."""

    number: int
    at: float
    due: float
    worker: int


def payload(number: int, due: float = 0.0, **more: int) -> dict[str, Any]:
    """Return a payload of 200 bytes of JSON. With ``insert`` its handler inserts a row, with ``last`` it is noted."""
    made: dict[str, Any] = {"n": number, "due": due, **more, "pad": ""}
    made["pad"] = "x" * (PAYLOAD_BYTES - len(json.dumps(made)))
    return made


def payloads(number: int, *, insert: bool) -> list[dict[str, Any]]:
    more = {"insert": 1} if insert else {}
    return [payload(n, **more, **({"last": 1} if n == number else {})) for n in range(1, number + 1)]


def mark(payload: dict[str, Any]) -> None:
    """Handle a message: insert a row if it asks for one, and note what has to be noted.

    That is the first message of a process, the last one, each that may be late, and all where nothing else counts them.
    So a handler does nothing where a system commits its outcomes.
    """
    if "insert" in payload:
        _insert(payload)
    pid = os.getpid()
    if pid in _marks and not (COUNT_ALL or payload["due"] or "last" in payload):
        return
    if pid not in _marks:
        file = os.open(os.environ["BENCH_MARKS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        # The session tells workers apart: each is started in one of its own.
        _marks[pid] = file, os.getsid(0)
    file, worker = _marks[pid]
    os.write(file, MARK.pack(payload["n"], time.time(), payload["due"], worker))


async def wait(payload: dict[str, Any]) -> None:
    """Wait for 100 ms. Note that the message was handled: before the wait if it has a due time, after it if not."""
    if payload["due"]:
        mark(payload)
    await asyncio.sleep(WAIT_SECONDS)
    if not payload["due"]:
        mark(payload)


def block(payload: dict[str, Any]) -> None:
    """Wait as ``wait`` does, in a thread or a greenlet."""
    if payload["due"]:
        mark(payload)
    time.sleep(WAIT_SECONDS)
    if not payload["due"]:
        mark(payload)


def _insert(payload: dict[str, Any]) -> None:
    """Insert a row by psycopg, which is quicker than an ORM, on a connection for each thread."""
    import psycopg

    here = os.getpid(), threading.get_ident()
    if here not in _connections:
        _connections[here] = psycopg.connect(os.environ["DATABASE_URL"], autocommit=True)
    _connections[here].execute(INSERT, (payload["n"], json.dumps(payload)), prepare=True)


class AdapterCalls:
    """The driver's calls on one adapter."""

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter
        # One event loop for all calls: clients keep connections that belong to it.
        self.runner = asyncio.Runner()

    def describe(self) -> dict[str, Any]:
        """Return what the adapter can do, and how its worker is started."""
        worker = getattr(self.adapter, "worker", None)
        return {
            "verbs": [verb for verb in VERBS if hasattr(self.adapter, verb)],
            "worker": worker() if worker else None,
            "tables": getattr(self.adapter, "TABLES", []),
            "open": getattr(self.adapter, "OPEN", ""),
        }

    def setup(self) -> None:
        if hasattr(self.adapter, "setup"):
            self.adapter.setup()

    def ready(self) -> None:
        """Prepare the system for messages after everything was emptied."""
        if hasattr(self.adapter, "ready"):
            self.adapter.ready()

    def schedule(self, number: int, delay: float, *, warm: int = 0, insert: bool = False) -> float:
        """Schedule one message at a time, and return the seconds. ``warm`` more come before, and do not count."""
        due = time.time() + delay if delay else None
        before, made = [payload(-n) for n in range(warm)], payloads(number, insert=insert)
        if hasattr(self.adapter, "asend"):
            return self.runner.run(self._schedule_async(before, made, due))
        send = self.adapter.send
        for one in before:
            send(one, due)
        began = time.perf_counter()
        for one in made:
            send(one, due)
        return time.perf_counter() - began

    async def _schedule_async(self, before: list[Any], made: list[Any], due: float | None) -> float:
        send = self.adapter.asend
        for one in before:
            await send(one, due)
        began = time.perf_counter()
        for one in made:
            await send(one, due)
        return time.perf_counter() - began

    def schedule_bulk(self, number: int, delay: float, *, keyed: bool = False, insert: bool = False) -> float:
        """Schedule in bulk, and return the seconds."""
        due = time.time() + delay if delay else None
        made = payloads(number, insert=insert)
        send = self.adapter.send_keyed if keyed else self.adapter.send_many
        began = time.perf_counter()
        send(made, due)
        return time.perf_counter() - began

    def late(self, rate: float, seconds: float, longest: float) -> dict[str, float]:
        """Schedule ``rate`` messages a second, with delays from 1 to ``longest`` seconds.

        After ``longest`` seconds as many messages fall due as are sent. That goes on for ``seconds``, from ``begin`` to
        ``end`` in the answer: ``counted`` of the ``sent`` messages are due in that time.
        """
        stream = _Stream(rate, seconds, longest)
        for due_by_now in stream.pace():
            if due_by_now > stream.sent:
                self.adapter.send(*stream.next())
            else:
                time.sleep(TICK_SECONDS)
        return stream.summary()


class _Stream:
    """Messages at an even rate, and their numbers."""

    def __init__(self, rate: float, seconds: float, longest: float) -> None:
        self.rate = rate
        self.longest = longest
        self.began = time.time()
        self.begin = self.began + longest
        self.end = self.begin + seconds
        self.sent = self.counted = 0

    def pace(self) -> Iterator[int]:
        """Yield how many messages should have been sent by now, until the time is up."""
        while (now := time.time()) < self.end:
            yield int(self.rate * (now - self.began))

    def next(self) -> tuple[dict[str, Any], float]:
        """Return the payload and the due time of the next message."""
        self.sent += 1
        due = time.time() + random.uniform(MIN_DELAY_SECONDS, self.longest)
        self.counted += self.begin <= due < self.end
        return payload(self.sent, due), due

    def summary(self) -> dict[str, float]:
        rate = self.sent / (time.time() - self.began)
        return {"sent": self.sent, "rate": rate, "begin": self.begin, "end": self.end, "counted": self.counted}


def serve(module: str) -> None:
    """Answer calls until stdin ends. What the system prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    calls = AdapterCalls(importlib.import_module(module))
    for text in sys.stdin:
        call = json.loads(text)
        try:
            answer = {"answer": getattr(calls, call.pop("do"))(**call)}
        except Exception:  # noqa: BLE001  the driver reports it
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve(sys.argv[1])
