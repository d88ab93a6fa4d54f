"""Redis as a broker: odd ids, wake-ups, and connections that die."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from django.conf import settings as django_settings

from django_delayq.broker.listener import wait_readable
from django_delayq.broker.redis import RedisBroker
from django_delayq.core.exceptions import BrokerRubbish, BrokerUnavailable
from django_delayq.project import conf, registry
from django_delayq.worker.parts.broker_switch import BrokerSwitch
from testproject.servers import RedisServer
from tests.support.claims import DB
from tests.support.workers import eventually

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def broker(redis_server: RedisServer) -> Iterator[RedisBroker]:
    made = RedisBroker(conf.get(), DB, timeout=10.0)
    yield made
    made.close()


@pytest.mark.parametrize("member", [str(2**63), "9" * 5000, "x", "-3"], ids=lambda member: member[:20])
def test_an_id_that_no_database_can_hold_is_told(broker: RedisBroker, member: str) -> None:
    broker.client.zadd(broker.keys("default").ready, {member: 1, "7": 4})
    with pytest.raises(BrokerRubbish):
        broker.take("default", 10)


def test_the_wait_for_a_wake_up_begins_anew_after_redis_did_not_answer(broker: RedisBroker) -> None:
    assert not broker.listen(["default"], 0.05)
    assert broker._listener is not None
    first = broker._listener._connection._sock
    brokers = BrokerSwitch(DB, registry.handlers)
    brokers.redis = broker
    brokers.report_failure(BrokerUnavailable())
    # It was woken, to ask the database.
    assert wait_readable([broker._listener._read], 0)
    assert not broker.listen(["default"], 5)
    notifying = threading.Timer(0.1, lambda: broker.notify(["default"]))
    notifying.start()
    assert broker.listen(["default"], 60)
    notifying.join()
    assert broker._listener._connection._sock is not first


@pytest.mark.parametrize("how", ["after a notification", "told to stop listening"])
def test_a_busy_process_takes_no_wake_up_from_an_idle_one(
    broker: RedisBroker, redis_server: RedisServer, how: str
) -> None:
    """Redis answers those first who have waited longest."""
    idle = RedisBroker(conf.get(), DB, timeout=10.0)

    def waiting() -> int:
        return int(broker.client.info("clients")["blocked_clients"])

    if how == "after a notification":
        broker.notify(["default"])
        assert broker.listen(["default"], 5)
    else:
        assert not broker.listen(["default"], 0.01)
        broker.stop_listening()
        eventually(lambda: waiting() == 0, "nobody waits")
    heard: list[bool] = []
    listener = threading.Thread(target=lambda: heard.append(idle.listen(["default"], 30)))
    listener.start()
    eventually(waiting, "the idle one waits")
    assert waiting() == 1
    broker.notify(["default"])
    listener.join(60)
    assert heard == [True]
    idle.close()


def test_a_connection_that_redis_closed_while_nobody_waited_is_replaced(broker: RedisBroker) -> None:
    broker.notify(["default"])
    assert broker.listen(["default"], 5)
    assert broker._listener is not None
    first = broker._listener._connection._sock
    broker.client.client_kill_filter(skipme=True, _type="normal")
    broker.notify(["default"])
    assert broker.listen(["default"], 5)
    assert broker._listener._connection._sock is not first


def test_a_server_that_accepts_and_says_nothing_ends_the_wait_for_a_wake_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        settings, _problems = conf.parse({**django_settings.DELAYQ, "REDIS": f"redis://127.0.0.1:{port}/0"})
        broker = RedisBroker(settings, DB, timeout=0.3)
        began = time.monotonic()
        with pytest.raises(BrokerUnavailable):
            broker.listen(["default"], 1.0)
        assert time.monotonic() - began < 100
        broker.close()
