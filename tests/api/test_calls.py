"""The public functions when other threads call them at the same time, or Redis does not answer."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest
from django.db import connection, connections

from django_delayq import cancel_message, schedule_message, schedule_messages
from django_delayq.core.exceptions import KeyConflict
from django_delayq.core.states import State
from django_delayq.models import Message
from tests.conftest import close_publishers
from tests.support.claims import DB, needs_row_locks
from tests.support.steps import at_once, claimed, later, lose, message, state, succeed
from tests.support.workers import is_quick

pytestmark = pytest.mark.django_db(transaction=True)


def test_callers_with_the_same_keys_in_opposite_order_do_not_deadlock() -> None:
    needs_row_locks()
    names = [f"k{number}" for number in range(30)]
    barrier = threading.Barrier(2)

    def schedule(number: int) -> None:
        for turn in range(10):
            barrier.wait(60)
            keys = names if number else names[::-1]
            schedule_messages([{"topic": f"t.{turn}", "key": key, "on_conflict": "keep"} for key in keys])

    assert at_once(2, schedule) == [None, None]
    assert Message.objects.count() == 300


def test_callers_on_sqlite_with_its_default_transaction_mode_wait_for_each_other() -> None:
    if connection.vendor != "sqlite":
        pytest.skip("needs SQLite")
    options = connections.settings[DB]["OPTIONS"]
    mode = options.pop("transaction_mode")
    connections.close_all()

    def work(number: int) -> None:
        for turn in range(15):
            key = f"{number}-{turn}"
            schedule_message("t.ok", key=key, delay=60)
            assert cancel_message(topic="t.ok", key=key)

    try:
        assert at_once(3, work) == [None] * 3
    finally:
        connections.close_all()
        options["transaction_mode"] = mode


def test_sentinels_that_say_nothing_do_not_delay_a_call(
    redis_server: object, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        settings.CACHES = {
            **settings.CACHES,
            "sentinels": {
                "BACKEND": "django_redis.cache.RedisCache",
                "LOCATION": "redis://mymaster/0",
                "OPTIONS": {
                    "CLIENT_CLASS": "django_redis.client.SentinelClient",
                    "CONNECTION_POOL_CLASS": "redis.sentinel.SentinelConnectionPool",
                    "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
                    "SENTINELS": [mute.getsockname()],
                },
            },
        }
        settings.DELAYQ = {**settings.DELAYQ, "REDIS": "sentinels"}

        def first_call() -> None:
            close_publishers()
            schedule_message("t.ok", delay=5)

        # A client without timeouts of our own waits for 5 s.
        is_quick(first_call, 4.5)
    assert "MasterNotFoundError" in caplog.text


def test_a_message_that_may_still_succeed_can_be_neither_replaced_nor_debounced() -> None:
    row = claimed(payload={"v": 1}, key="k")
    lose(row.id)
    for policy in ("replace", "debounce"):
        with pytest.raises(KeyConflict):
            later({"v": 2}, key="k", on_conflict=policy)
    assert succeed(row.id)
    assert (state(row.id), message(row.id).payload) == (State.CONSUMED, {"v": 1})


def test_a_reason_may_be_any_text() -> None:
    row = schedule_message("t.ok", delay=60)
    assert cancel_message(row, reason="\x00\ud800" + "x" * 100_000)
    reason = row.transitions.get(to_state=State.CANCELLED).reason
    assert reason.startswith("\ufffd?")
    assert len(reason) < 5_000
