"""A server that is not Redis, or answers nonsense: every method raises ``BrokerUnavailable``, and nothing else."""

from __future__ import annotations

import contextlib
import socketserver
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from django_delayq.broker.redis import RedisBroker
from django_delayq.core.exceptions import BrokerUnavailable
from django_delayq.project import conf
from tests.support.broker_methods import METHODS, QUEUE

ANSWERS = {
    "a web server": b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
    "nothing": b"$-1\r\n",
    "an empty list": b"*0\r\n",
    "a number": b":5\r\n",
    "ok": b"+OK\r\n",
    "an error": b"-ERR no\r\n",
    "text that is not text": b"$3\r\n\xff\xfe\x00\r\n",
    "a list of anything": b"*5\r\n$3\r\nabc\r\n:5\r\n*1\r\n+x\r\n$-1\r\n$3\r\nnan\r\n",
    "moved": b"-MOVED 5 127.0.0.1:1\r\n",
}


@contextlib.contextmanager
def server_that_says(answer: bytes) -> Iterator[int]:
    """Run a server that gives one answer to every command. Return its port."""

    class Says(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                while heard := self.request.recv(65_536):
                    self.request.sendall(answer * max(1, heard.count(b"\r\n*") + heard.startswith(b"*")))

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Says) as server:
        # A connection that is still open keeps nobody waiting.
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@contextlib.contextmanager
def broker_told(answer: bytes, *, timeout: float = 0.5) -> Iterator[RedisBroker]:
    with server_that_says(answer) as port:
        settings = conf.Settings()._replace(REDIS=f"redis://127.0.0.1:{port}/0")
        with contextlib.closing(RedisBroker(settings, "default", timeout=timeout)) as made:
            yield made


@pytest.fixture(params=list(ANSWERS.values()), ids=list(ANSWERS))
def strange(request: pytest.FixtureRequest) -> Iterator[RedisBroker]:
    with broker_told(request.param) as made:
        yield made


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_server_that_is_not_redis_is_unavailable(strange: RedisBroker, method: Callable[[RedisBroker], Any]) -> None:
    for _again in range(2):
        with contextlib.suppress(BrokerUnavailable):
            method(strange)


def test_every_method_of_a_broker_is_tried_here() -> None:
    public = {name for name in dir(RedisBroker) if not name.startswith("_") and callable(getattr(RedisBroker, name))}
    without_redis = {"keys", "close", "wake", "exclusively", "stop_listening", "reset_listener", "flush", "now_tenths"}
    assert {name.split(" ")[0] for name in METHODS} == public - without_redis - {"client"}


def test_a_node_that_sends_everybody_elsewhere_is_told_in_words() -> None:
    refused = pytest.raises(BrokerUnavailable, match=r"hash slot \d+ was moved from .* to 127")
    with broker_told(ANSWERS["moved"], timeout=5.0) as made:
        with refused:
            made.take(QUEUE, 1)
        with pytest.raises(BrokerUnavailable, match="no node says who owns hash slot"):
            made.take(QUEUE, 1)
