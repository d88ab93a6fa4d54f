"""Real workers, which are killed while they make occurrences, and a Redis that loses everything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
import redis
from django.utils import timezone

from django_delayq import cancel_message, handler, schedule_message
from django_delayq.models import Message, Transition
from django_delayq.recurring import Schedule, create_schedule, recurring
from django_delayq.recurring.models import Occurrence
from tests.faults.program import Program
from tests.support.commands import run
from tests.support.rows import unguarded
from tests.support.workers import Worker, eventually

pytestmark = pytest.mark.django_db(transaction=True)

SECONDS = timedelta(seconds=1)


@pytest.fixture(autouse=True)
def _short_times(settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "GRACE": 0.5}


def consumed(name: str) -> int:
    return Message.objects.filter(headers__schedule=name, state="consumed").count()


def test_no_time_is_lost_or_doubled_when_a_maker_is_killed_and_redis_is_flushed(redis_client: redis.Redis) -> None:
    create_schedule("every", "t.ok", every="1s", missed="all")
    create_schedule("once", "t.ok", every="1s", missed="once")
    # Workers of other queues have a duty of their own: both of them make occurrences.
    options = ("--processes", "1", "--threads", "2")
    with (
        Program(
            "django", "run_delayq", *options, "--queue", "default", "--queue", "other", failpoints="after_insert:kill:3"
        ) as killed,
        Worker(*options, "--queue", "default"),
    ):
        killed.wait_for_failpoint()
        redis_client.flushall()
        made = consumed("every")
        eventually(lambda: consumed("every") >= made + 2, "the schedule goes on")
        eventually(lambda: consumed("once") > 0, "the other one goes on")
    rows = list(Occurrence.objects.filter(schedule="every").order_by("at"))
    assert {after.at - before.at for before, after in pairwise(rows)} == {SECONDS}
    assert len(rows) == Message.objects.filter(headers__schedule="every").count()
    for name in ("every", "once"):
        said = Counter(message.headers["occurrence"] for message in Message.objects.filter(headers__schedule=name))
        assert set(said.values()) == {1}
    # With "once", an occurrence is made when the one before has begun.
    both = Message.objects.filter(headers__schedule="once", state="scheduled", deliveries=0)
    assert both.count() <= 1


def test_cron_alone_makes_the_messages_of_schedules_and_deletes_old_ones(code: list[Any]) -> None:
    @recurring(every="1s")
    @handler("t.poll")
    def poll(message: Any) -> None: ...

    old = schedule_message("t.ok", delay="1h")
    assert cancel_message(old)
    unguarded(Message).filter(pk=old.pk).update(finished_at=timezone.now() - timedelta(days=300))

    def has_run() -> bool:
        assert run("run_delayq", "--once", "--threads", "1").code == 0
        return consumed("t.poll") > 0

    eventually(has_run)
    assert not Message.objects.filter(pk=old.pk).exists()


def test_cron_alone_makes_all_that_was_missed(tuned: Callable[..., None]) -> None:
    tuned(advanced_together=3)
    tuned(made_together=3)
    for number in range(5):
        create_schedule(f"s{number}", "t.ok", every="1m", missed="all")
    unguarded(Schedule).update(last_at=timezone.now() - timedelta(minutes=5, seconds=1))
    assert run("run_delayq", "--once", "--threads", "1").code == 0
    for number in range(5):
        assert consumed(f"s{number}") in (5, 6)


def test_a_worker_declares_and_runs_the_schedules_of_its_code(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELAYQ_TEST_RECURRING", "1")
    with Worker("--processes", "1", "--threads", "2") as worker:
        eventually(lambda: consumed("t.recurring") > 0, "the declared schedule runs")
        assert worker.stop() == 0
    schedule = Schedule.objects.get(pk="t.recurring")
    assert (schedule.declared, schedule.every) == (True, "1s")
    first = Transition.objects.filter(message__headers__schedule="t.recurring", to_state="scheduled").first()
    assert first is not None
    assert first.actor.startswith("worker:")
