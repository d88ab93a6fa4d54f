"""A bad network between a worker and Redis, or between a worker and the database."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from django.db import connection, transaction

from django_delayq import schedule_message, schedule_messages
from django_delayq.broker.keys import keys
from django_delayq.core.states import LIVE, State
from django_delayq.models import Message
from django_delayq.worker.claim.tuning import Tuning
from testproject.servers import PostgresServer
from tests.conftest import close_publishers
from tests.support.commands import run
from tests.support.processes import Configure, Start
from tests.support.proxy import Proxy
from tests.support.record_of import effects_per_message, log_of, states, wait_until, wait_until_redis_times
from tests.support.workers import PATIENCE, Worker, eventually, is_quick

from .matrix import HASTY
from .oracle import RAN_OUT, judge

NUMBER = 30
# A view may wait so many seconds for Redis in all.
PATIENT = 3.0
# As the workers behind these networks are started.
ARGUMENTS = ("--threads", "4", "--queue", "default")


@pytest.fixture(autouse=True)
def _hasty(configure: Configure, transactional_db: None) -> None:
    configure(**HASTY)


@pytest.fixture
def over_redis(start: Start, to_redis: Proxy, set_pace: Callable[[dict[str, float]], None]) -> Worker:
    """A worker with the network between it and Redis, which it uses again at once after failures in a row."""
    set_pace({"broker_switch.FLAPPING": 0.0})
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


def wave(lines: Path, *, over: float = 1.5) -> list[Message]:
    """Schedule messages, half of them transactional and half with effects in a file."""
    return schedule_messages(
        {
            **({"topic": "t.tx"} if place % 2 else {"topic": "t.file", "payload": str(lines)}),
            "delay": over * place / NUMBER,
        }
        for place in range(NUMBER)
    )


def drained(number: int = NUMBER) -> bool:
    return Message.objects.count() >= number and not Message.objects.filter(state__in=LIVE).exists()


def drained_but_for_locked_rows() -> bool:
    """Tell whether all is delivered but what a silenced connection has locked, which nobody takes until it is reset."""
    with transaction.atomic():
        return not Message.objects.filter(state__in=LIVE).select_for_update(skip_locked=True).exists()


def idle_transactions() -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'")
        return int(cursor.fetchone()[0])


def test_a_redis_that_is_too_far_away_is_left_until_it_is_near_again(
    start: Start, to_redis: Proxy, configure: Configure, set_pace: Callable[[dict[str, float]], None]
) -> None:
    """A producer would give up too often: then its messages would wait for a sweep."""
    set_pace({"process.Parts.upkeep.unusable_interval": 0.5})
    configure(REDIS=to_redis.url)
    worker = start(*ARGUMENTS)
    worker.wait_for("Loaded Redis")
    to_redis.delay = 0.1
    worker.wait_for("WARNING.*Redis is too far away: .*150 ms.*Messages are delivered from the database")
    message = wait_until(schedule_message("t.tx"), State.CONSUMED)
    assert log_of(message)[1].ready_at is None
    assert re.search(r"WARN     Redis distance: a round trip takes 2\d\d ms", run("delayq_check").out)
    to_redis.clear()
    worker.wait_for("Redis is back")
    wait_until_redis_times()
    assert "Redis distance" not in run("delayq_check").out


# --- between a worker and Redis ---------------------------------------------------------------------------------------


def test_a_bad_network_to_redis_makes_nothing_early_lost_or_doubled(
    over_redis: Worker, to_redis: Proxy, tmp_path: Path
) -> None:
    lines = tmp_path / "lines"
    number = 0

    def deliver() -> None:
        nonlocal number
        number += len(wave(lines))
        eventually(lambda: drained(number), "all are finished")

    def is_back() -> bool:
        return over_redis.count("Redis is back") == over_redis.count("Redis is away") > 0

    to_redis.delay = 0.3
    deliver()
    to_redis.clear()
    for habit in ("tear_every", "drop_every"):
        enough = to_redis.hits + 3
        setattr(to_redis, habit, 5)
        while to_redis.hits < enough:
            deliver()
        to_redis.clear()
        eventually(is_back, f"Redis is used again after {habit}")
    to_redis.swallow()
    deliver()
    eventually(lambda: not is_back(), "the worker has noticed")
    to_redis.clear()
    eventually(is_back, "Redis is used again when it can be reached")
    silent = len(wave(lines))
    eventually(lambda: states()[State.CONSUMED] >= number + 5, "the first are delivered")
    # One that waits for wake-ups, and one that takes; others come and go.
    assert to_redis.forget() >= 1
    number += silent
    eventually(lambda: drained(number), "all are finished")
    assert judge("default", number, lines) == []
    # The connection that waits for wake-ups was silent too: it works again.
    eventually(is_back, "Redis is used again over new connections")

    def took() -> float:
        began = time.monotonic()
        wait_until(schedule_message("t.ok"), State.CONSUMED)
        return time.monotonic() - began

    # The sweep would find each message later than that; a busy machine may delay some of them as long.
    eventually(lambda: took() < HASTY["GRACE"], "a message is delivered by its wake-up")


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


def test_a_bad_network_to_the_database_loses_nothing(
    start: Start, configure: Configure, to_database: Proxy, prefix: str, tmp_path: Path
) -> None:
    """Claims whose reply was lost are released, or their leases run out."""
    lines = tmp_path / "lines"
    configure(LEASE=3)
    worker = start("--threads", "8", "--queue", "default", prefix=prefix)
    worker.wait_for("Loaded Redis")
    to_database.delay = 0.3
    wave(lines)
    eventually(drained, "all are finished though the network is slow")
    to_database.clear()
    for number, habit in enumerate(("tear_every", "drop_every"), 2):
        before = to_database.hits
        setattr(to_database, habit, 12)
        wave(lines)
        eventually(lambda: to_database.hits >= before + 5 or drained(number * NUMBER), habit)  # noqa: B023
        to_database.clear()
        eventually(lambda: drained(number * NUMBER), f"all are finished after {habit}")  # noqa: B023
        assert to_database.hits >= before + 3
    messages = wave(lines, over=3.0)
    eventually(lambda: states()[State.CONSUMED] >= 3 * NUMBER + 5, "the first are delivered")
    to_database.swallow()
    eventually(lambda: time.time() > messages[-1].due_at.timestamp() + 3, "all are due, and a lease has run out")
    to_database.clear()
    eventually(lambda: drained(4 * NUMBER), "all are finished")
    assert judge("default", 4 * NUMBER, lines, windows=RAN_OUT) == []
    eventually(lambda: idle_transactions() == 0, "no transaction is left open")


def test_silent_connections_to_the_database_lose_nothing(
    start: Start, over_database: Worker, to_database: Proxy, tmp_path: Path
) -> None:
    """The worker hangs until its connections are reset. Another one delivers meanwhile, and nothing runs twice."""
    wave(tmp_path / "lines", over=3.0)
    eventually(lambda: states()[State.CONSUMED] >= 5, "the first are delivered")
    assert to_database.forget() >= 3
    healthy = start(*ARGUMENTS)
    eventually(drained_but_for_locked_rows, "the other worker delivers the rest")
    to_database.reset_forgotten()
    more = schedule_messages({"topic": "t.tx"} for _ in range(20))
    assert healthy.stop() == 0
    eventually(lambda: drained(NUMBER + 20), "both are well")
    assert {m.pk for m in more} <= set(effects_per_message())
    assert judge("default", NUMBER + 20, tmp_path / "lines", windows=RAN_OUT) == []
    last = schedule_message("t.tx")
    eventually(lambda: effects_per_message()[last.pk] == 1, "the worker works again")


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
    eventually(lambda: time.monotonic() - began > Tuning().longest_behind, "the outcome waits for too long")
    schedule_messages([{"topic": "t.file", "payload": str(lines), "delay": 0.1}] * 40)
    # The worker looks for them, and leaves them there.
    eventually(lambda: redis_client.zcard(keys("delayq", "default").ready) == 40, "all are ready")
    assert len(lines.read_text().splitlines()) == 6
    to_database.reset_forgotten()
    eventually(lambda: drained(46), "all are finished")
    # A worker that did not reach the database could not extend its leases.
    assert judge("default", 46, lines, windows=RAN_OUT) == []
