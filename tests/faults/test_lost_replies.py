"""The reply of a script is lost after the script was carried out: no message is lost or delivered twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import redis

from django_delayq import Verdict, cancel_message, pause_queue, resume_queue, schedule_message, schedule_messages
from django_delayq.broker import scripts
from django_delayq.broker.keys import keys
from django_delayq.core.states import LIVE, State
from django_delayq.models import Message
from testproject.servers import RedisServer
from tests.support import known_scripts
from tests.support.processes import Configure, Gate, Start
from tests.support.proxy import Proxy
from tests.support.record_of import begun_per_message, effects_per_message, once_each, wait_until_all
from tests.support.workers import eventually

KEYS = keys("delayq", "default")


def digest(script: str) -> bytes:
    return scripts.load(script).digest.encode()


@pytest.fixture
def proxy(
    redis_server: RedisServer, redis_client: redis.Redis, configure: Configure, redis_has_time: None
) -> Iterator[Proxy]:
    known_scripts.teach(redis_client)
    redis_client.config_resetstat()
    with Proxy(redis_server.port) as there:
        # After a call that timed out, this process would leave out calls whose replies are to be lost.
        configure(REDIS=there.url)
        yield there


def all_ran(redis_client: redis.Redis) -> bool:
    """Tell whether the server ran every script that it was asked for by its digest, and none failed."""
    calls = redis_client.info("commandstats")["cmdstat_evalsha"]
    return bool(calls["failed_calls"] == calls["rejected_calls"] == 0)


# These are called when a test has them called. A publisher calls the first one: see broker/test_publishing. When the
# reply of the second one is lost, the process counts: see http/test_rates.
SELDOM = {"request_load", "count_call", "put_back", "clear"}


@pytest.mark.parametrize(
    "lost", [{"put_back"}, {"clear"}, set(known_scripts.SCRIPTS) - SELDOM], ids=["put_back", "clear", "others"]
)
def test_the_reply_of_a_script_may_get_lost(
    start: Start,
    proxy: Proxy,
    redis_client: redis.Redis,
    gate: Gate,
    set_pace: Callable[[dict[str, float]], None],
    lost: set[str],
) -> None:
    # After failures in a row a worker would wait before it uses Redis again.
    set_pace({"broker_switch.FLAPPING": 0.0})
    proxy.lose_reply_to(*map(digest, [*lost] * 3))
    blockers = schedule_messages({"topic": "t.gate", "payload": gate.payload} for _ in range(2))
    messages = schedule_messages({"topic": "t.tx", "delay": 0.03 * n} for n in range(20))
    start("--processes", "2", "--threads", "1")
    eventually(lambda: gate.how_many_began() == 2, "both threads are busy")
    messages += [schedule_message("t.tx", delay=0.02 * n) for n in range(20)]
    # The sweep finds these.
    redis_client.delete(KEYS.delayed, KEYS.ready)
    if "put_back" in lost:
        # A claim refuses the ids of a paused queue, which are put back then.
        pause_queue("default")
        gate.open()
    elif "clear" in lost:
        redis_client.hset(KEYS.meta, "horizon", "somebody's")

    def all_lost() -> bool:
        left = set(map(digest, lost)) - set(proxy.lost)
        if digest("remove") in left:
            # This process rests after a failure.
            assert cancel_message(schedule_message("t.tx", delay=60)).verdict == Verdict.CANCELLED
        return not left

    eventually(all_lost, f"replies of {lost} are lost")
    gate.open()
    resume_queue("default")
    eventually(lambda: not Message.objects.filter(state__in=LIVE).exists(), "all are delivered")
    assert all_ran(redis_client)
    assert effects_per_message() == once_each([*blockers, *messages])
    assert {begun for begun in begun_per_message().values() if begun} == {1}


def test_a_lost_wake_up_delays_no_message_for_long(start: Start, proxy: Proxy) -> None:
    start("--threads", "1").wait_for("Loaded Redis")
    proxy.lose_reply_to(b"BLPOP", b"BLPOP")
    messages = [schedule_message("t.tx", delay=0.1 * n) for n in range(10)]
    wait_until_all(State.CONSUMED, 10)
    assert proxy.lost
    assert effects_per_message() == once_each(messages)
