"""A server that is not Redis, or answers nonsense: every method raises ``BrokerUnavailable``, and nothing else."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from django_delayq.broker.base import Entry, Put
from django_delayq.broker.redis import RedisBroker
from django_delayq.core.clock import SECOND
from django_delayq.core.exceptions import BrokerRubbish, BrokerUnavailable
from django_delayq.project import conf
from testproject.servers import RedisServer
from tests.support.broker_methods import ENTRY, METHODS, QUEUE

from .bench import load

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


@pytest.fixture
def broker(server: RedisServer) -> Iterator[RedisBroker]:
    made = broker_on(server.port, timeout=5.0)
    made.client.flushall()
    yield made
    made.close()


MEMBERS: list[dict[Any, float]] = [
    {"x": 1, "9" * 5000: 2, b"\xff\xfe": 3, "-3": 4, "": 5},
    {"1": float("inf"), "2": float("-inf"), "3": 1e300, "4": -5.5, "5": 2.0**60},
]


@pytest.mark.parametrize("key", ["delayed", "ready"])
@pytest.mark.parametrize("members", MEMBERS, ids=["members", "scores"])
def test_strange_members_and_scores_give_answers_or_are_told_and_are_gone_after_a_clear(
    broker: RedisBroker, key: str, members: dict[Any, float]
) -> None:
    load(broker)
    mine, later = (Entry.at(pk, datetime.now(UTC) + timedelta(seconds=s), 0) for pk, s in ((70, -1), (7, 60)))
    broker.client.zadd(getattr(broker.keys(QUEUE), key), members)
    for _turn in range(5):
        for call in (
            lambda: broker.put(QUEUE, [mine, later]),
            lambda: broker.missing({QUEUE: [mine]}),
            lambda: list(broker.ids(QUEUE)),
            lambda: broker.places(QUEUE, [1, 2, 3, 4, 5, 70]),
            lambda: broker.put_back(QUEUE, broker.take(QUEUE, 2).tickets),
        ):
            with contextlib.suppress(BrokerRubbish):
                call()
    assert broker.clear([QUEUE], broker.now_tenths())
    load(broker)
    assert broker.put(QUEUE, [mine, later]) == Put(put=2)
    assert [sorted(batch) for batch in broker.ids(QUEUE)] == [[7], [70]]
    assert [ticket.id for ticket in broker.take(QUEUE, 10).tickets] == [70]


@pytest.mark.parametrize("field", ["horizon", "loaded", "tick", "loader_until", "run_id", "replid", "loader"])
@pytest.mark.parametrize("rubbish", ["abc", "nan", "inf", "1e300", "-1", "9" * 30, b"\xff\xfe"], ids=repr)
def test_rubbish_in_the_meta_is_told_and_is_gone_after_a_clear(
    broker: RedisBroker, field: str, rubbish: str | bytes
) -> None:
    load(broker)
    broker.client.hset(broker.keys(QUEUE).meta, field, rubbish)
    for call in (broker.read_meta, broker.tick, lambda: broker.put(QUEUE, [ENTRY]), lambda: load(broker)):
        with contextlib.suppress(BrokerRubbish):
            call()
    assert broker.clear([QUEUE], broker.now_tenths())
    horizon = load(broker)
    meta = broker.tick()
    assert meta.loaded_tenths == meta.horizon_tenths == horizon
    assert horizon < meta.now_tenths + 601 * SECOND


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
