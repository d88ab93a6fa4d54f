"""Changed payloads and the verbs of operators hold while a worker is killed and Redis is flushed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import redis
from django.db import connection

from django_delayq import schedule_messages
from django_delayq.core.states import State
from django_delayq.models import Message, Transition
from django_delayq.record import transitions
from testproject.servers import RedisServer
from tests.support.commands import run
from tests.support.processes import Start
from tests.support.record_of import consumed, effects_per_message, is_early, log_of
from tests.support.workers import eventually

# Fewer on SQLite, which has one writer.
EACH = 80 if connection.vendor == "postgresql" else 20
OTHERS = 100


@pytest.mark.usefixtures("quick_take_over")
def test_two_workers_keep_payloads_and_due_times_though_one_is_killed_and_redis_flushed(
    start: Start, redis_server: RedisServer
) -> None:
    walkers = [
        message
        for topic in ("t.walk", "t.walk_async", "t.walk_tx")
        for message in schedule_messages([{"topic": topic, "payload": {"left": []}, "lease": "1s"}] * EACH)
    ]
    to_run = schedule_messages([{"topic": "t.tx", "delay": "1h", "queue": "run", "lease": "1s"}] * OTHERS)
    to_wait = schedule_messages([{"topic": "t.tx", "delay": "10m", "queue": "wait"}] * OTHERS)
    first, _second = start("--processes", "2"), start("--processes", "2")
    eventually(lambda: Transition.objects.filter(reason="payload changed").count() > len(walkers), "they walk")

    ran: dict[str, Any] = {"run": run("delayq_act", "run", "--queue", "run", "--spread", "1s", "--yes", "--json").json}
    first.kill()
    with redis.Redis(port=redis_server.port) as client:
        client.flushall()
    later = ["delayq_act", "reschedule", "--queue", "wait", "--shift", "1h", "--yes", "--json"]
    ran["reschedule"] = run(*later).json
    assert {name: answer["answers"] for name, answer in ran.items()} == {
        "run": {"rescheduled": OTHERS},
        "reschedule": {"rescheduled": OTHERS},
    }

    eventually(consumed(len(walkers) + OTHERS), "all that is due is consumed")
    for message in walkers:
        message.refresh_from_db()
        changed = [row.delivery for row in log_of(message) if row.reason == "payload changed"]
        assert (message.payload, message.attempts) == ({"left": changed}, 0)
        assert len(changed) == 4
    effects = effects_per_message()
    # Transactional handlers; the effect of another one may repeat in the process that was killed.
    assert all(effects[message.pk] == 1 for message in [*walkers[2 * EACH :], *to_run])
    for message in to_run:
        rows = log_of(message)
        assert [row.to_state for row in rows[:2]] == [State.SCHEDULED, State.SCHEDULED]
        assert rows[1].actor.startswith("command:delayq_act ")
        assert not any(is_early(row) for row in rows if row.to_state == State.RUNNING)
    waiting = Message.objects.filter(pk__in=[message.pk for message in to_wait])
    assert set(waiting.values_list("state", "deliveries")) == {(State.SCHEDULED, 0)}
    assert all(message.due_at > transitions.now("default") + timedelta(hours=1) for message in waiting)
