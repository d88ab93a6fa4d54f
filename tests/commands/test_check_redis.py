from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import redis
from django.utils import timezone

from django_delayq.core.clock import SECOND
from django_delayq.core.states import State
from django_delayq.models import Message
from django_delayq.models.messages import Lease
from tests.support.commands import Ran, broker, claim, due_tenths, held, run, schedule
from tests.support.rows import unguarded

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("puts_are_flushed")]

DELAYED, READY = "{delayq}:default:delayed", "{delayq}:default:ready"


@pytest.fixture(autouse=True)
def _the_grace_is_short(settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "GRACE": "100ms"}


def found(ran: Ran) -> dict[str, int]:
    """Return the mismatches of the default queue by their kind."""
    default = ran.json["queues"]["default"]
    return {mismatch: default[mismatch] for mismatch in ("missing", "extra", "different") if default[mismatch]}


def test_a_restored_redis_has_no_mismatch() -> None:
    schedule(5)
    schedule(3, due=-20)
    schedule(2, due=86_400)
    claim(*schedule(1, due=-1))
    run("delayq_restore")
    ran = run("delayq_check", "redis", "--json")
    assert (ran.code, found(ran)) == (0, {})
    assert ran.json["stuck"]["count"] == 0


@pytest.mark.parametrize("due", [60, -20])
def test_ids_that_redis_lost_are_missing(due: float, redis_client: redis.Redis) -> None:
    ids = schedule(5, due=due)
    # Without --fix it changes nothing.
    assert (run("delayq_check", "redis").code, redis_client.keys("*")) == (3, [])
    run("delayq_restore")
    redis_client.zrem(DELAYED, *ids[:2])
    redis_client.zrem(READY, *ids[:2])

    ran = run("delayq_check", "redis", "--json")
    assert (ran.code, found(ran)) == (3, {"missing": 2})
    assert ran.json["queues"]["default"]["examples"]["missing"] == ids[:2]

    assert run("delayq_check", "redis", "--fix").code == 0
    assert held().keys() == set(ids)


@pytest.mark.parametrize("arguments", [[], ["--fix"]], ids=["compare", "fix"])
def test_a_queue_that_nothing_knows_is_told_and_leaves_no_key(arguments: list[str], redis_client: redis.Redis) -> None:
    schedule(1)
    ran = run("delayq_check", "redis", "--queue", "gone", *arguments)
    assert ran.code == 2
    assert "There is no queue gone" in ran.err
    assert not redis_client.keys("*gone*")


@pytest.mark.parametrize("place", ["delayed", "ready", "blocked"])
def test_a_check_finds_and_empties_the_queues_that_only_redis_knows(place: str) -> None:
    [pk] = schedule(1, queue="gone", due=60 if place == "delayed" else -20)
    schedule(1)
    run("delayq_restore")
    if place == "blocked":
        broker().block("gone", {"a limit": broker().take("gone", 1).tickets})
    unguarded(Message).filter(pk=pk).delete()
    for words in ([], ["--queue", "default", "--queue", "gone"]):
        ran = run("delayq_check", "redis", "--json", *words)
        assert (ran.code, ran.json["queues"]["gone"]["extra"], found(ran)) == (3, 1, {})
    assert run("delayq_check", "redis", "--fix").code == 0
    assert "gone" not in run("delayq_check", "redis", "--json").json["queues"]
    assert run("delayq_check", "redis", "--queue", "gone").code == 2


def test_ids_without_a_scheduled_row_are_extra(redis_client: redis.Redis) -> None:
    finished, elsewhere, gone, kept = schedule(4)
    run("delayq_restore")
    unguarded(Message).filter(pk=finished).update(state=State.CANCELLED, finished_at=timezone.now())
    unguarded(Message).filter(pk=elsewhere).update(queue="elsewhere")
    unguarded(Message).filter(pk=gone).delete()
    redis_client.zadd(READY, {"999999999": 5})

    ran = run("delayq_check", "redis", "--json", "--queue", "default")
    assert (ran.code, found(ran)) == (3, {"extra": 4})

    assert run("delayq_check", "redis", "--fix", "--queue", "default").code == 0
    assert held() == due_tenths(kept)


@pytest.mark.parametrize(("due", "shift"), [(120, -30), (120, 30), (-20, 110)])
def test_another_due_time_is_different(due: float, shift: int) -> None:
    pk, other = schedule(1, due=due) + schedule(1, due=120)
    run("delayq_restore")
    message = Message.objects.get(pk=pk)
    unguarded(Message).filter(pk=pk).update(due_at=message.due_at + timedelta(seconds=shift))

    ran = run("delayq_check", "redis", "--json")
    assert (ran.code, found(ran)) == (3, {"different": 1})

    assert run("delayq_check", "redis", "--fix").code == 0
    assert held() == due_tenths(pk, other)


def test_an_id_that_a_worker_delayed_is_no_mismatch(redis_client: redis.Redis) -> None:
    [pk] = schedule(due=-20)
    run("delayq_restore")
    redis_client.zrem(READY, pk)
    redis_client.zadd(DELAYED, {str(pk): int((timezone.now().timestamp() + 20) * SECOND)})
    assert found(run("delayq_check", "redis", "--json")) == {}


def test_an_id_that_was_on_its_way_is_no_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule(3)
    paused: list[float] = []

    def arrive(seconds: float) -> None:
        paused.append(seconds)
        run("delayq_restore")

    monkeypatch.setattr("django_delayq.inspector.consistency.time.sleep", arrive)
    assert found(run("delayq_check", "redis", "--json")) == {}
    assert paused == [0.1]


def test_a_running_message_whose_lease_ran_out_long_ago_is_stuck() -> None:
    (pk,) = schedule(1, due=-1)
    claim(pk)
    running = unguarded(Message).filter(state=State.RUNNING)
    running.update(leased_until=timezone.now() - timedelta(seconds=20))
    assert run("delayq_check", "redis").code == 0
    running.update(leased_until=timezone.now() - timedelta(seconds=40))
    ran = run("delayq_check", "redis", "--json", "--fix")
    assert (ran.code, ran.json["stuck"]["count"]) == (3, 1)
    assert running.count() == 1
    # A lease runs out at the end of its renewal.
    until = timezone.now() - timedelta(minutes=1)
    running.update(leased_until=until - timedelta(hours=5))
    Lease.objects.create(message_id=pk, delivery=1, until=until)
    assert f"ran out at {until:%Y-%m-%dT%H:%M:%S}" in run("delayq_check", "redis").out
