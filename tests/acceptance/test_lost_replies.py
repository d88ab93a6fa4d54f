"""The reply of a script is lost: it was carried out, and whoever called does not know. No duplicate, no loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from django_delayq import schedule_message, schedule_messages
from django_delayq.broker import scripts
from django_delayq.models import Message
from django_delayq.states import State
from testproject.servers import RedisServer
from tests.acceptance.conftest import Start
from tests.proxy import Proxy
from tests.record_of import consumed, effects_per_message, once_each, wait_until, wait_until_all
from tests.workers import eventually


@pytest.fixture
def proxy(redis_server: RedisServer, configure: Callable[..., None]) -> Iterator[Proxy]:
    with Proxy(redis_server.port) as there:
        configure(REDIS=there.url)
        yield there


@pytest.mark.parametrize("script", ["put", "take", "load", "loaded", "look", "ring"])
def test_the_reply_of_a_script_may_get_lost(start: Start, proxy: Proxy, script: str) -> None:
    command = scripts.load(script).digest.encode()
    # Before the first use the script travels in full.
    proxy.lose_reply_to(command, command, command)
    messages = schedule_messages({"topic": "t.tx", "delay": 0.03 * n} for n in range(20))
    worker = start("--processes", "2", "--threads", "1")
    more = [schedule_message("t.tx", delay=0.02 * n) for n in range(20)]
    wait_until_all(State.CONSUMED, 40)
    assert effects_per_message() == once_each([*messages, *more])
    assert {m.deliveries for m in Message.objects.all()} == {1}
    worker.close()


def test_ids_taken_by_a_take_whose_reply_was_lost_are_delivered(start: Start, proxy: Proxy) -> None:
    start("--threads", "1").wait_for("Loaded queue default")
    wait_until(schedule_message("t.ok"), State.CONSUMED)
    proxy.lose_reply_to(*[scripts.load("take").digest.encode()] * 3)
    messages = schedule_messages({"topic": "t.tx"} for _ in range(10))
    wait_until_all(State.CONSUMED, 11)
    assert proxy.lost
    assert effects_per_message() == once_each(messages)


def test_a_lost_wake_up_delays_no_message_for_long(start: Start, proxy: Proxy) -> None:
    start("--threads", "1").wait_for("Loaded queue default")
    proxy.lose_reply_to(b"BLPOP", b"BLPOP")
    messages = [schedule_message("t.tx", delay=0.1 * n) for n in range(10)]
    wait_until_all(State.CONSUMED, 10)
    assert effects_per_message() == once_each(messages)


def test_connections_cut_again_and_again_lose_nothing(start: Start, proxy: Proxy) -> None:
    start("--processes", "2")
    messages = schedule_messages({"topic": "t.tx", "delay": 0.01 * n} for n in range(200))
    for done in range(10, 200, 20):
        eventually(consumed(done), f"{done} are delivered")
        proxy.cut()
    wait_until_all(State.CONSUMED, 200)
    assert effects_per_message() == once_each(messages)
