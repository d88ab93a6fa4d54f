"""Workers on a Redis whose clock is wrong, is set while they run, or on a host whose clock is wrong."""

from __future__ import annotations

from functools import partial

import pytest

from django_delayq import schedule_message
from django_delayq.core.states import State
from django_delayq.models import Message, Transition
from django_delayq.worker.claim.tuning import Tuning
from testproject.servers import RedisServer
from tests.support.processes import Configure, Start
from tests.support.record_of import is_early, log_of, wait_until
from tests.support.redis_servers import of
from tests.support.skewed import SkewedRedis, find_libfaketime
from tests.support.workers import eventually

pytestmark = pytest.mark.usefixtures("transactional_db")


def claims() -> list[Transition]:
    return list(Transition.objects.filter(from_state=State.SCHEDULED, to_state=State.RUNNING))


def any_is_early() -> bool:
    """Tell whether any claim was early. A claim allows for what a process may be wrong about."""
    return any(is_early(claim, clocks_differ=Tuning().clock_tolerance) for claim in claims())


def deliver_some() -> None:
    """Have messages delivered that are due now and in a moment. They would expire within a minute."""
    for message in [schedule_message("t.tx", delay=delay, expires="1m") for delay in (0, 1)]:
        wait_until(message, State.CONSUMED)


def test_a_redis_with_a_wrong_clock_makes_no_message_early_or_late(configure: Configure, start: Start) -> None:
    with SkewedRedis() as server:
        configure(REDIS=server.url)
        server.set_ahead(3600)
        worker = start()
        worker.wait_for("Loaded Redis from the record")
        failing = schedule_message("t.fail", retry=["5m"] * 9)
        later = schedule_message("t.tx", delay="5m")
        eventually(lambda: Message.objects.get(pk=failing.pk).attempts == 1, "the first attempt")
        deliver_some()
        # The clock is set while the worker runs.
        for changed in (-120, -3600, 120, 0):
            server.set_ahead(changed)
            deliver_some()
        assert [state(message) for message in (failing, later)] == [(State.SCHEDULED, 1), (State.SCHEDULED, 0)]
        assert not any_is_early()
        assert any(claim.ready_at is not None for claim in claims())


def test_a_redis_that_fails_over_to_another_clock_delivers_on_time(configure: Configure, start: Start) -> None:
    with SkewedRedis() as server:
        configure(REDIS=server.url)
        start().wait_for("Loaded Redis from the record")
        deliver_some()
        later = schedule_message("t.tx", delay="5m")
        for ahead in (3600, -3600):
            server.kill()
            server.set_ahead_at_start(ahead)
            server.start()
            with of(server) as client:
                # Redis came back empty.
                eventually(partial(client.hget, "{delayq}:meta", "loaded"), "Redis is loaded")
            deliver_some()
        assert state(later) == (State.SCHEDULED, 0)
        assert not any_is_early()


@pytest.mark.postgresql("needs a database with a clock of its own: on SQLite the worker's clock is the record's")
@pytest.mark.usefixtures("puts_are_flushed")
@pytest.mark.parametrize("ahead", [3600, -3600])
def test_a_host_with_a_wrong_clock_delivers_on_time_and_finds_what_redis_lost(
    configure: Configure, start: Start, redis_server: RedisServer, ahead: int
) -> None:
    library = find_libfaketime()
    if library is None:
        pytest.skip("needs libfaketime: pip install libfaketime")
    prefix = f"env LD_PRELOAD={library} FAKETIME={ahead:+d}s FAKETIME_DONT_FAKE_MONOTONIC=1"
    worker = start(prefix=prefix)
    worker.wait_for("Loaded Redis from the record")
    deliver_some()
    later = schedule_message("t.tx", delay="5m")
    lost = schedule_message("t.tx", delay=2)
    with of(redis_server) as client:
        client.zrem("{delayq}:default:delayed", lost.pk)
    wait_until(lost, State.CONSUMED)
    assert state(later) == (State.SCHEDULED, 0)
    assert not any_is_early()
    assert len(log_of(lost)) == 3


def state(message: Message) -> tuple[State, int]:
    row = Message.objects.get(pk=message.pk)
    return State(row.state), row.attempts
