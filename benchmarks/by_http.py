"""Measures the HTTP door: ``python -m benchmarks.by_http [--messages 5000] [--connections 16]``.

How many messages a second one ``delayq_http`` publishes and gives away, single and in batches, to connections that stay
open, and how much of a core each message takes of the server and of the client. On servers of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from .driver import cpu_seconds
from .own_servers import own_servers
from .recovery import say

BULK = 64
BATCH = 100
# A job of a hundred bytes.
JOB = json.dumps({"order": 7, "note": "x" * 78}).encode()
PATH = "/api/bench/pull"

# Yields requests, and is sent the bodies of the answers.
Talk = Generator[bytes, bytes, None]


class Server(NamedTuple):
    """A ``delayq_http``: its process, its port, and a token."""

    pid: int
    port: int
    token: str

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: bench\r\nX-Token: {self.token}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def used(self) -> float:
        """Return the seconds of CPU that it has used."""
        return cpu_seconds(self.pid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--messages", type=int, default=5_000)
    parser.add_argument("--connections", type=int, default=16)
    arguments = parser.parse_args()
    number, connections = arguments.messages, arguments.connections
    os.environ["BENCH_HTTP"] = "1"
    with own_servers(), serving() as server:
        for name, messages, ask in (
            ("publish single", number, publish),
            ("consume and ack, one by one", number, consume),
            (f"publish in bulks of {BULK}", 4 * number, publish_in_bulks),
            (f"consume in batches of {BATCH}", 4 * number, consume_in_batches),
        ):
            say(name, measured(server, messages, connections, ask))


@contextmanager
def serving() -> Iterator[Server]:
    from django_delayq.http import tokens

    _row, token = tokens.make("bench")
    command = [sys.executable, "-m", "django", "delayq_http", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r":(\d+)$", process.stdout.readline().strip())
        assert found is not None
        yield Server(process.pid, int(found[1]), token)
        process.terminate()


class Left:
    """The messages that are left to do, of which each connection takes some."""

    def __init__(self, number: int) -> None:
        self.number = number

    def take(self, most: int) -> int:
        taken = min(most, self.number)
        self.number -= taken
        return taken


def publish(server: Server, left: Left) -> Talk:
    request = server.request("PUT", PATH, JOB)
    while left.take(1):
        yield request


def consume(server: Server, left: Left) -> Talk:
    request = server.request("GET", PATH)
    while left.take(1):
        job = json.loads((yield request))["job_id"]
        yield server.request("DELETE", f"{PATH}/job/{job}")


def publish_in_bulks(server: Server, left: Left) -> Talk:
    while number := left.take(BULK):
        yield server.request("PUT", f"{PATH}/bulk", b"[" + b",".join([JOB] * number) + b"]")


def consume_in_batches(server: Server, left: Left) -> Talk:
    while number := left.take(BATCH):
        answer = yield server.request("GET", f"{PATH}?count={number}&ttr=3600")
        assert number == 1 or len(json.loads(answer)) == number


def measured(server: Server, messages: int, connections: int, ask: Callable[[Server, Left], Talk]) -> str:
    """Have connections ask at once; return how many messages a second that was, and what each took of the CPU."""
    began, used, ours = time.perf_counter(), server.used(), time.process_time()
    left = Left(messages)
    with selectors.DefaultSelector() as selector:
        for _ in range(connections):
            opened = socket.create_connection(("127.0.0.1", server.port))
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            selector.register(opened, selectors.EVENT_READ, ask(server, left))
            _go_on(selector, opened, None)
        while selector.get_map():
            for key, _events in selector.select():
                _go_on(selector, key.fileobj, _answer(key.fileobj))
    took = (time.perf_counter() - began) / messages
    theirs, mine = (server.used() - used) / messages, (time.process_time() - ours) / messages
    return f"{1 / took:,.0f} messages/s; CPU a message: server {theirs * 1e6:,.0f} µs, client {mine * 1e6:,.0f} µs"


def _go_on(selector: selectors.BaseSelector, opened: Any, answer: bytes | None) -> None:
    talk: Talk = selector.get_key(opened).data
    try:
        opened.sendall(next(talk) if answer is None else talk.send(answer))
    except StopIteration:
        selector.unregister(opened)
        opened.close()


def _answer(opened: Any) -> bytes:
    """Return the body of the answer that has begun to come."""
    read = opened.recv(1_048_576)
    while (end := read.find(b"\r\n\r\n")) < 0:
        read += opened.recv(65_536)
    assert read.startswith(b"HTTP/1.1 20"), read
    length = re.search(rb"content-length: (\d+)", read[:end])
    missing = end + 4 + int(length[1] if length else 0) - len(read)
    while missing > 0:
        part = opened.recv(missing)
        missing -= len(part)
        read += part
    return bytes(read[end + 4 :])


if __name__ == "__main__":
    main()
