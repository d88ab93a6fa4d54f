"""The switch between Redis and the database."""

from __future__ import annotations

import time

import pytest

from django_delayq.core.exceptions import BrokerUnavailable
from django_delayq.worker.parts import broker_switch
from django_delayq.worker.processes.assembly import Parts

pytestmark = pytest.mark.django_db(transaction=True)


def test_an_answer_to_what_was_asked_before_redis_failed_does_not_bring_it_back(
    parts: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    """Some commands succeed in a Redis that is full; and one thread may have asked before another one failed."""
    brokers = parts.brokers
    brokers.has_loader = True
    asked = time.monotonic()
    brokers.report_failure(BrokerUnavailable("used memory"))
    brokers.report_answer(asked)
    brokers.report_failure(BrokerUnavailable("used memory"))
    assert brokers.current() is brokers.database
    brokers.report_answer(time.monotonic())
    assert brokers.current() is brokers.redis
    lines = [record.getMessage() for record in caplog.records if "Redis is" in record.getMessage()]
    assert [text.split(";")[0] for text in lines] == ["Redis is away", "Redis is back"]


def test_a_redis_that_flaps_is_used_again_after_longer_and_longer_waits(
    parts: Parts, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader reports an answer each second, and each take fails."""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    brokers = parts.brokers
    brokers.has_loader = True
    for _second in range(600):
        now += 1.0
        brokers.report_answer(now)
        if brokers.current() is brokers.redis:
            brokers.report_failure(BrokerUnavailable("WRONGTYPE"))
    lines = [record.getMessage().split(";")[0] for record in caplog.records]
    assert 10 <= lines.count("Redis is away") <= 20
    now += 3600.0
    brokers.report_answer(now)
    assert brokers.current() is brokers.redis
    now += broker_switch.FLAPPING
    brokers.report_failure(BrokerUnavailable("away for once"))
    now += 1.0
    brokers.report_answer(now)
    assert brokers.current() is brokers.redis
