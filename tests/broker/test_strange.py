"""A server that is not Redis, or answers nonsense: every method raises ``BrokerUnavailable``, and nothing else."""

from __future__ import annotations

import contextlib
import socket
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


class StrangeServer:
    """A server that gives one answer to every command."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _address = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                while heard := connection.recv(65_536):
                    connection.sendall(self.answer * max(1, heard.count(b"\r\n*") + heard.startswith(b"*")))
            except OSError:
                pass

    def close(self) -> None:
        self._listening.close()


def broker_on(port: int, *, timeout: float = 0.5) -> RedisBroker:
    return RedisBroker(conf.parse({"REDIS": f"redis://127.0.0.1:{port}/0"})[0], "default", timeout=timeout)


@pytest.fixture(params=list(ANSWERS.values()), ids=list(ANSWERS))
def strange(request: pytest.FixtureRequest) -> Iterator[RedisBroker]:
    server = StrangeServer(request.param)
    made = broker_on(server.port)
    yield made
    made.close()
    server.close()


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_server_that_is_not_redis_is_unavailable(strange: RedisBroker, method: Callable[[RedisBroker], Any]) -> None:
    for _again in range(2):
        with contextlib.suppress(BrokerUnavailable):
            method(strange)


def test_every_method_of_a_broker_is_tried_here() -> None:
    public = {name for name in dir(RedisBroker) if not name.startswith("_") and callable(getattr(RedisBroker, name))}
    without_redis = {"keys", "close", "wake", "exclusively", "stop_listening", "reset_listener", "flush", "now_tenths"}
    assert {name.split(" ")[0] for name in METHODS} == public - without_redis - {"client", "claims_ahead"}


def test_a_cluster_error_is_told_in_words() -> None:
    strange = StrangeServer(ANSWERS["moved"])
    made = broker_on(strange.port, timeout=5.0)
    with pytest.raises(BrokerUnavailable, match="Redis Cluster is not supported"):
        made.take(QUEUE, 1)
    made.close()
    strange.close()
