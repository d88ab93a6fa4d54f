"""A bad network between a worker and Redis, or between a worker and the database."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import redis
from django.db import connection

from django_delayq import schedule_message, schedule_messages
from django_delayq.broker.keys import keys
from django_delayq.core.states import LIVE, State
from django_delayq.models import Message
from django_delayq.worker.claim.wanted import LONGEST_BEHIND
from testproject.servers import PostgresServer
from tests.conftest import close_publishers
from tests.support.processes import Configure, Start
from tests.support.proxy import Proxy
from tests.support.record_of import effects_per_message, once_each, states, wait_until
from tests.support.workers import PATIENCE, Worker, eventually, is_quick

from .matrix import HASTY
from .oracle import LATE, SHUT, Verdict, Windows, judge

NUMBER = 30
# A view may wait so many seconds for Redis in all.
PATIENT = 3.0
# As the workers behind these networks are started.
ARGUMENTS = ("--threads", "4", "--queue", "default")


@pytest.fixture(autouse=True)
def _hasty(configure: Configure, transactional_db: None) -> None:
    configure(**HASTY)


@pytest.fixture
def over_redis(start: Start, to_redis: Proxy) -> Worker:
    """A worker with the network between it and Redis."""
    worker = start(*ARGUMENTS, delayq={"REDIS": to_redis.url})
    worker.wait_for("Loaded Redis")
    return worker


@pytest.fixture
def prefix(to_database: Proxy, postgres_server: PostgresServer) -> str:
    """The words before the command of a worker with the network between it and the database."""
    return f"env DATABASE_URL={postgres_server.url.replace(str(postgres_server.port), str(to_database.port))}"


@pytest.fixture
def over_database(start: Start, prefix: str) -> Worker:
    """A worker with the network between it and the database."""
    worker = start(*ARGUMENTS, prefix=prefix)
    worker.wait_for("Loaded Redis")
    return worker


def wave(lines: Path, *, number: int = NUMBER, over: float = 1.5) -> list[Message]:
    """Schedule messages, half of them transactional and half with effects in a file."""
    return schedule_messages(
        {
            **({"topic": "t.tx"} if place % 2 else {"topic": "t.file", "payload": str(lines)}),
            "delay": over * place / number,
        }
        for place in range(number)
    )


def drained(number: int = NUMBER) -> bool:
    return Message.objects.count() >= number and not Message.objects.filter(state__in=LIVE).exists()


def verdict(lines: Path, number: int = NUMBER, windows: Windows = SHUT) -> Verdict:
    """Judge when all are finished. A worker that did not reach the database could not extend its leases."""
    eventually(lambda: drained(number), "all are finished")
    return judge("default", number, lines, windows=windows)


# --- between a worker and Redis ---------------------------------------------------------------------------------------


def test_a_slow_redis_makes_nothing_early_or_lost(over_redis: Worker, to_redis: Proxy, tmp_path: Path) -> None:
    to_redis.delay = 0.3
    wave(tmp_path / "lines")
    assert verdict(tmp_path / "lines") == Verdict(NUMBER)


@pytest.mark.parametrize("habit", ["tear_every", "drop_every"])
def test_torn_or_lost_replies_of_redis_lose_no_message(
    over_redis: Worker, to_redis: Proxy, tmp_path: Path, habit: str
) -> None:
    setattr(to_redis, habit, 5)
    number = 0
    while to_redis.hits < 3:
        number += len(wave(tmp_path / "lines"))
        eventually(lambda: drained(number), "all are finished")  # noqa: B023
    assert judge("default", number, tmp_path / "lines") == Verdict(number)
    # The worker has not given Redis up for good.
    setattr(to_redis, habit, 0)
    over_redis.wait_for("Redis is back")


def test_silent_connections_to_redis_lose_nothing(over_redis: Worker, to_redis: Proxy, tmp_path: Path) -> None:
    wave(tmp_path / "lines")
    eventually(lambda: states()[State.CONSUMED] >= 5, "the first are delivered")
    assert to_redis.forget() >= 3
    assert verdict(tmp_path / "lines") == Verdict(NUMBER)
    # The connection that waits for wake-ups was silent too: it works again.
    over_redis.wait_for("Redis is back")

    def took() -> float:
        began = time.monotonic()
        wait_until(schedule_message("t.ok"), State.CONSUMED)
        return time.monotonic() - began

    # The sweep would find each message later than that; a busy machine may delay some of them as long.
    eventually(lambda: took() < HASTY["GRACE"], "a message is delivered by its wake-up")


def test_a_redis_out_of_reach_for_some_seconds_loses_nothing(
    over_redis: Worker, to_redis: Proxy, tmp_path: Path
) -> None:
    wave(tmp_path / "lines", over=3.0)
    eventually(lambda: states()[State.CONSUMED] >= 5, "the first are delivered")
    to_redis.swallow()
    over_redis.wait_for("Redis is away")
    eventually(drained, "the database delivers the rest")
    to_redis.clear()
    over_redis.wait_for("Redis is back")
    assert verdict(tmp_path / "lines") == Verdict(NUMBER)


# --- between a view and Redis -----------------------------------------------------------------------------------------


def test_a_view_never_waits_long_for_a_redis_that_became_slow(configure: Configure, to_redis: Proxy) -> None:
    configure(REDIS=to_redis.url)

    def calls() -> None:
        """Meet Redis before the network becomes bad."""
        to_redis.clear()
        close_publishers()
        schedule_message("t.ok")
        to_redis.delay = 0.3
        for _ in range(20):
            schedule_message("t.ok")

    # The publisher rests after a failure, so that only the first call has waited at all.
    is_quick(calls, PATIENT)
    assert Message.objects.count() % 21 == 0


# --- between a worker and the database --------------------------------------------------------------------------------


def test_a_slow_database_loses_nothing(
    start: Start, configure: Configure, to_database: Proxy, prefix: str, tmp_path: Path
) -> None:
    configure(LEASE=3)
    worker = start("--threads", "8", "--queue", "default", prefix=prefix)
    worker.wait_for("Loaded Redis")
    to_database.delay = 0.3
    wave(tmp_path / "lines", number=20)
    assert verdict(tmp_path / "lines", 20, LATE).wrong == []


@pytest.mark.parametrize("habit", ["tear_every", "drop_every"])
def test_torn_or_lost_replies_of_the_database_lose_no_message(
    over_database: Worker, to_database: Proxy, tmp_path: Path, habit: str
) -> None:
    setattr(to_database, habit, 12)
    wave(tmp_path / "lines")
    eventually(lambda: to_database.hits >= 5 or drained(), "it happens")
    # Claims whose reply was lost are released, or their leases run out.
    to_database.clear()
    assert verdict(tmp_path / "lines", windows=LATE).wrong == []
    assert to_database.hits >= 3


def test_silent_connections_to_the_database_lose_nothing(
    start: Start, over_database: Worker, to_database: Proxy, tmp_path: Path
) -> None:
    """The worker hangs until its connections are reset. Another one delivers meanwhile, and nothing runs twice."""
    wave(tmp_path / "lines", over=3.0)
    eventually(lambda: states()[State.CONSUMED] >= 5, "the first are delivered")
    assert to_database.forget() >= 3
    healthy = start(*ARGUMENTS)
    eventually(drained, "the other worker delivers the rest")
    to_database.reset_forgotten()
    more = schedule_messages({"topic": "t.tx"} for _ in range(20))
    assert healthy.stop() == 0
    eventually(lambda: drained(NUMBER + 20), "both are well")
    assert {m.pk for m in more} <= set(effects_per_message())
    assert judge("default", NUMBER + 20, tmp_path / "lines", windows=LATE).wrong == []
    last = schedule_message("t.tx")
    eventually(lambda: effects_per_message()[last.pk] == 1, "the worker works again")


def test_a_database_out_of_reach_for_some_seconds_loses_nothing(
    over_database: Worker, to_database: Proxy, tmp_path: Path
) -> None:
    messages = wave(tmp_path / "lines", over=3.0)
    eventually(lambda: states()[State.CONSUMED] >= 5, "the first are delivered")
    to_database.swallow()
    eventually(lambda: time.time() > messages[-1].due_at.timestamp() + 1, "all are due, and a lease has run out")
    to_database.clear()
    assert verdict(tmp_path / "lines", windows=LATE).wrong == []
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'")
        assert cursor.fetchone() == (0,)
    assert once_each(m for m in messages if m.topic == "t.tx") == effects_per_message()


def test_a_worker_that_cannot_write_outcomes_down_takes_no_more(
    over_database: Worker, to_database: Proxy, redis_client: redis.Redis, tmp_path: Path
) -> None:
    """Only the recorder's connection is dead. A worker that went on would lose every delivery as a crashed one."""
    lines = tmp_path / "lines"
    for _ in range(5):
        wait_until(schedule_message("t.file", str(lines)), State.CONSUMED)
    assert to_database.forget(b"SET state = 'consumed'") == 1
    # The first that the recorder has to say is the outcome, not a renewal.
    schedule_message("t.file", str(lines), lease="1h")
    assert to_database.held_back.wait(PATIENCE)
    began = time.monotonic()
    eventually(lambda: time.monotonic() - began > LONGEST_BEHIND, "the outcome waits for too long")
    schedule_messages([{"topic": "t.file", "payload": str(lines), "delay": 0.1}] * 40)
    # The worker looks for them, and leaves them there.
    eventually(lambda: redis_client.zcard(keys("delayq", "default").ready) == 40, "all are ready")
    assert len(lines.read_text().splitlines()) == 6
    to_database.reset_forgotten()
    assert verdict(lines, 46, LATE).wrong == []
