"""The line to one system under test: a JSON call in on stdin, a JSON answer out on stdout. Standard library only.

``python line.py <module>`` runs in the system's own environment. The module is the adapter: functions of these names,
all but ``send`` (or ``asend``) optional.

``setup()`` once, on an empty database · ``send(payload, due)`` schedule one message, due at an epoch time or (None) now
· ``send_many(payloads, due)`` · ``inside()`` a transaction of the caller's · ``worker()`` the arguments for Python that
start one worker process · ``TABLES`` to be emptied between workloads. Every message that is handled calls ``mark``,
for which psycopg is needed only where a handler is to insert a row.
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
PER_TRANSACTION = 100
MARK = struct.Struct("<qddq")
# What a peer's handler inserts, in a transaction of its own.
EFFECTS = "CREATE TABLE IF NOT EXISTS bench_effect (number bigint, payload jsonb)"
INSERT = "INSERT INTO bench_effect VALUES (%s, %s)"
VERBS = ("send_many", "inside", "worker")
# Lateness: how far ahead a message is due at least, and how often the sender wakes up. Seconds.
SHORTEST = 1.0
TICK = 0.001

_marks: dict[int, tuple[int, int]] = {}
_connections: dict[tuple[int, int], Any] = {}


class Mark(NamedTuple):
    """That a message was handled: its number, when, when it was due (0: at once), and by which started worker."""

    number: int
    at: float
    due: float
    worker: int


def payload(number: int, due: float = 0.0, *, insert: bool = False) -> dict[str, Any]:
    """A message of 200 bytes of JSON. ``insert``: its handler inserts a row."""
    made: dict[str, Any] = {"n": number, "due": due, **({"insert": 1} if insert else {}), "pad": ""}
    made["pad"] = "x" * (PAYLOAD_BYTES - len(json.dumps(made)))
    return made


def mark(payload: dict[str, Any]) -> None:
    """Note that a message was handled, and when; and do what it says."""
    if "insert" in payload:
        _insert(payload)
    pid = os.getpid()
    if pid not in _marks:
        file = os.open(os.environ["BENCH_MARKS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        # Each worker is started in a session of its own.
        _marks[pid] = file, os.getsid(0)
    file, worker = _marks[pid]
    os.write(file, MARK.pack(payload["n"], time.time(), payload["due"], worker))


def _insert(payload: dict[str, Any]) -> None:
    """By a plain driver, which is quicker than an ORM, and a connection of each thread's own."""
    import psycopg

    here = os.getpid(), threading.get_ident()
    if here not in _connections:
        _connections[here] = psycopg.connect(os.environ["DATABASE_URL"], autocommit=True)
    _connections[here].execute(INSERT, (payload["n"], json.dumps(payload)), prepare=True)


class Line:
    """The calls that the harness makes, on one adapter."""

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter
        # One loop for all calls: clients keep connections that belong to it.
        self.runner = asyncio.Runner()

    def describe(self) -> dict[str, Any]:
        """What the adapter can do, and how its worker is started."""
        worker = getattr(self.adapter, "worker", None)
        return {
            "verbs": [verb for verb in VERBS if hasattr(self.adapter, verb)],
            "worker": worker() if worker else None,
            "tables": getattr(self.adapter, "TABLES", []),
        }

    def setup(self) -> None:
        if hasattr(self.adapter, "setup"):
            self.adapter.setup()

    def ready(self) -> None:
        """After everything was emptied: what has to be there before the first message."""
        if hasattr(self.adapter, "ready"):
            self.adapter.ready()

    def schedule(self, number: int, delay: float, warm: int = 0, *, insert: bool = False) -> float:
        """One at a time; seconds. The first ``warm`` are not counted."""
        due = time.time() + delay if delay else None
        payloads = [payload(n, insert=insert) for n in range(1 - warm, number + 1)]
        if hasattr(self.adapter, "asend"):
            return self.runner.run(self._schedule_async(payloads, due, warm))
        send = self.adapter.send
        for one in payloads[:warm]:
            send(one, due)
        began = time.perf_counter()
        for one in payloads[warm:]:
            send(one, due)
        return time.perf_counter() - began

    async def _schedule_async(self, payloads: list[dict[str, Any]], due: float | None, warm: int) -> float:
        send = self.adapter.asend
        for one in payloads[:warm]:
            await send(one, due)
        began = time.perf_counter()
        for one in payloads[warm:]:
            await send(one, due)
        return time.perf_counter() - began

    def schedule_inside(self, number: int, delay: float) -> float:
        """A hundred in each transaction of the caller's; seconds."""
        due = time.time() + delay
        payloads = [payload(n) for n in range(1, number + 1)]
        began = time.perf_counter()
        for start in range(0, number, PER_TRANSACTION):
            with self.adapter.inside():
                for one in payloads[start : start + PER_TRANSACTION]:
                    self.adapter.send(one, due)
        return time.perf_counter() - began

    def schedule_bulk(self, number: int, delay: float, *, insert: bool = False) -> float:
        """In bulk; seconds."""
        due = time.time() + delay if delay else None
        payloads = [payload(n, insert=insert) for n in range(1, number + 1)]
        began = time.perf_counter()
        self.adapter.send_many(payloads, due)
        return time.perf_counter() - began

    def late(self, rate: float, seconds: float, longest: float) -> dict[str, float]:
        """So many messages a second, due after 1 to ``longest`` seconds.

        After ``longest`` seconds as many fall due as are sent, for so many ``seconds``: between ``begin`` and ``end``,
        and ``counted`` of all that were ``sent``, at ``rate``.
        """
        stream = _Stream(rate, seconds, longest)
        if hasattr(self.adapter, "asend"):
            self.runner.run(self._late_async(stream))
        else:
            for due_by_now in stream.pace():
                for _ in range(due_by_now - stream.sent):
                    self.adapter.send(*stream.next())
                time.sleep(TICK)
        return stream.told()

    async def _late_async(self, stream: _Stream) -> None:
        for due_by_now in stream.pace():
            for _ in range(due_by_now - stream.sent):
                await self.adapter.asend(*stream.next())
            await asyncio.sleep(TICK)

    def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """A function that only this adapter has."""
        return getattr(self.adapter, name)(**arguments)


class _Stream:
    """Messages at an even rate, and what is known of them."""

    def __init__(self, rate: float, seconds: float, longest: float) -> None:
        self.rate = rate
        self.longest = longest
        self.began = time.time()
        self.begin = self.began + longest
        self.end = self.begin + seconds
        self.sent = self.counted = 0

    def pace(self) -> Iterator[int]:
        """How many messages should have been sent by now, until the time is up."""
        while (now := time.time()) < self.end:
            yield int(self.rate * (now - self.began))

    def next(self) -> tuple[dict[str, Any], float]:
        """The payload and the due time of another."""
        self.sent += 1
        due = time.time() + random.uniform(SHORTEST, self.longest)
        self.counted += self.begin <= due < self.end
        return payload(self.sent, due), due

    def told(self) -> dict[str, float]:
        rate = self.sent / (time.time() - self.began)
        return {"sent": self.sent, "rate": rate, "begin": self.begin, "end": self.end, "counted": self.counted}


def serve(module: str) -> None:
    """Answer calls until stdin ends. Whatever the system prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    line = Line(importlib.import_module(module))
    for text in sys.stdin:
        call = json.loads(text)
        try:
            answer = {"answer": getattr(line, call.pop("do"))(**call)}
        except Exception:  # noqa: BLE001  the harness reports it
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve(sys.argv[1])
