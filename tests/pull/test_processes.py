"""Programs that pull as processes of their own: killed, frozen and late; with Redis emptied, away, or not there."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings

from django_delayq import override_limit, schedule_message
from django_delayq.core.states import State
from django_delayq.pull import ack, take
from tests.pull.conftest import QUEUE, TOPIC, put
from tests.support.commands import run
from tests.support.in_redis import texts
from tests.support.processes import Configure, Start
from tests.support.steps import ago, log, state
from tests.support.workers import Worker, eventually

pytestmark = pytest.mark.django_db(transaction=True)

StartPuller = Callable[..., "Puller"]


class Puller(Worker):
    """A program that pulls with the present settings. ``go`` is the file that a late one waits for."""

    def __init__(self, how: str, go: Path, lease: str = "1m", queue: str = QUEUE) -> None:
        self.go = go
        command = [sys.executable, "-m", "tests.pull.puller", queue, lease, how, str(go)]
        self._start(command, {"DELAYQ_TEST_SETTINGS": json.dumps(settings.DELAYQ)})


@pytest.fixture
def start_puller(transactional_db: None, configure: Configure, tmp_path: Path) -> Iterator[StartPuller]:
    pullers: list[Puller] = []

    def begin(how: str, **options: str) -> Puller:
        pullers.append(Puller(how, tmp_path / str(len(pullers)), **options))
        return pullers[-1]

    yield begin
    for puller in pullers:
        puller.close()
        print(f"--- puller ---\n{puller.log}")


def test_what_a_killed_puller_had_comes_back_after_its_lease(timed_by: str, start_puller: StartPuller) -> None:
    id_ = put().pk
    puller = start_puller("late", lease="1s")
    puller.wait_for(f"took {id_}")
    puller.kill()
    (again,) = take(QUEUE, wait="60s")
    assert (again.id, again.attempt) == (id_, 2)
    assert [move.reason for move in log(id_)][2] == "lease ran out"


def test_a_frozen_puller_is_late_and_its_success_counts(timed_by: str, start_puller: StartPuller) -> None:
    id_ = put().pk
    puller = start_puller("late", lease="1s")
    puller.wait_for(f"took {id_}")
    puller.send_all(signal.SIGSTOP)
    (again,) = take(QUEUE, wait="60s")
    puller.send_all(signal.SIGCONT)
    puller.go.touch()
    puller.wait_for(f"acknowledged {id_}")
    assert state(id_) == State.CONSUMED
    # The second delivery learns that it was done already, and does no harm.
    assert ack(again.receipt)


def test_a_worker_ends_the_leases_of_pullers_too(start: Start, start_puller: StartPuller) -> None:
    id_ = put().pk
    puller = start_puller("late", lease="1s")
    puller.wait_for(f"took {id_}")
    puller.kill()
    worker = start()
    worker.wait_for("released id=")
    assert state(id_) == State.SCHEDULED


def test_no_worker_claims_from_a_pulled_queue(timed_by: str, start: Start) -> None:
    start()
    # This topic has a handler there.
    pulled = schedule_message("t.ok", queue=QUEUE)
    later = schedule_message("t.ok", queue="go.later", delay=0.2)
    done = schedule_message("t.ok")
    eventually(lambda: state(done.pk) == State.CONSUMED)
    assert (state(pulled.pk), state(later.pk)) == (State.SCHEDULED, State.SCHEDULED)
    assert take([QUEUE, "go.later"])[0].id == pulled.pk


def test_redis_holds_no_ids_of_pulled_queues(start: Start, redis_client: Any) -> None:
    start()
    eventually(lambda: redis_client.hget("{delayq}:meta", "loaded"))
    ids = [put(due_at=None, delay=delay).pk for delay in (0, 5, 60)]
    done = schedule_message("t.ok")
    eventually(lambda: state(done.pk) == State.CONSUMED)
    # An empty Redis is loaded again.
    redis_client.flushall()
    eventually(lambda: redis_client.hget("{delayq}:meta", "loaded"))
    names = [key.decode() for key in redis_client.scan_iter()]
    assert [name for name in names if QUEUE in name and not name.endswith(":wake")] == []
    assert str(ids[-1]).encode() not in texts(redis_client).split(b"\n")


def test_ids_from_before_the_declaration_are_dropped(start: Start, redis_client: Any, configure: Configure) -> None:
    declared = settings.DELAYQ["PULL_QUEUES"]
    configure(PULL_QUEUES=None)
    worker = start()
    eventually(lambda: redis_client.hget("{delayq}:meta", "loaded"))
    worker.send_all(signal.SIGSTOP)
    waiting = schedule_message("t.ok", queue=QUEUE)
    eventually(lambda: str(waiting.pk).encode() in texts(redis_client).split(b"\n"))
    worker.kill()
    configure(PULL_QUEUES=declared)
    start()
    eventually(lambda: str(waiting.pk).encode() not in texts(redis_client).split(b"\n"))
    assert [found.id for found in take(QUEUE, wait="30s")] == [waiting.pk]


def test_pullers_go_on_while_redis_is_emptied_and_away(
    start_puller: StartPuller, redis_server: Any, redis_client: Any
) -> None:
    puller = start_puller("work")
    first = put().pk
    puller.wait_for(f"acknowledged {first}")
    redis_client.flushall()
    emptied = put().pk
    puller.wait_for(f"acknowledged {emptied}")
    redis_server.kill()
    second = put().pk
    puller.wait_for(f"acknowledged {second}")
    redis_server.start()
    third = put().pk
    puller.wait_for(f"acknowledged {third}")
    assert {state(pk) for pk in (first, emptied, second, third)} == {State.CONSUMED}


def test_several_pullers_share_many_messages(timed_by: str, start_puller: StartPuller) -> None:
    ids = {put(number).pk for number in range(60)}
    pullers = [start_puller("work") for _ in range(2)]
    eventually(lambda: all(state(pk) == State.CONSUMED for pk in ids))
    assert sum(puller.count("^took ") for puller in pullers) == len(ids)


def test_a_worker_refuses_a_pulled_queue(start: Start) -> None:
    worker = start("--queue", QUEUE)
    assert worker.wait() != 0
    assert f"--queue: programs pull {QUEUE}" in worker.log


@pytest.mark.usefixtures("redis_client")
def test_the_check_names_what_waits_and_calls_it_neither_overdue_nor_unserved() -> None:
    put(due_at=ago(50))
    ran = run("delayq_check", "--min-workers", "0")
    assert f"messages wait in {QUEUE}, the oldest for" in ran.out
    assert TOPIC not in ran.out
    found = run("delayq_stats", "--json").json
    queue, topic = found["queues"][QUEUE], found["topics"][TOPIC]
    assert (queue["scheduled"]["count"], queue["overdue"]["count"]) == (1, 0)
    assert (topic["ready"]["count"], topic["overdue"]["count"]) == (1, 0)


@pytest.mark.usefixtures("redis_client")
def test_no_limit_holds_where_programs_take() -> None:
    put(due_at=ago(50))
    override_limit(topic=TOPIC, limit=0)
    queue = run("delayq_stats", "--json").json["queues"][QUEUE]
    assert (queue["overdue"]["count"], queue["limited"]["count"]) == (0, 0)
