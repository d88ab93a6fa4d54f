from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
from django.db import connection
from django.utils import timezone

from django_delayq import cancel_message, pause_queue
from django_delayq.core.clock import to_tenths
from django_delayq.core.states import State
from django_delayq.inspector import stats
from django_delayq.inspector.coming import due_by_topic, due_soon
from django_delayq.inspector.numbers import CAPS, Capped, Caps
from django_delayq.models import Message, Worker
from django_delayq.models.messages import LogRow
from django_delayq.record import reads, transitions
from django_delayq.record.sql.rows import Success
from testproject.servers import RedisServer
from tests.support.commands import claim, run, schedule
from tests.support.record_of import write_out_log
from tests.support.rows import unguarded
from tests.support.statements import assert_asks_the_same_of_many_queues

pytestmark = pytest.mark.django_db(transaction=True)


def test_messages_are_counted_by_state_and_queue() -> None:
    schedule(3)
    schedule(2, due=-100, queue="slow")
    claim(*schedule(1, due=-1))
    transitions.give_up("default", schedule(2), reason="")
    cancel_message(schedule(1)[0])
    run("delayq_restore")

    ran = run("delayq_stats", "--json")
    found = ran.json

    assert (ran.out.count("\n"), found["schema"]) == (1, 1)
    assert {name: number["count"] for name, number in found["states"].items() if number["count"]} == {
        "scheduled": 5,
        "running": 1,
        "dead": 2,
        "cancelled": 1,
    }
    assert all(number["exact"] for number in found["states"].values())
    assert found["overdue"]["count"] == 2
    assert found["oldest_overdue"] < found["at"] < found["next_due"]
    assert (found["queues"]["default"]["delayed"], found["queues"]["slow"]["ready"]) == (3, 2)
    assert found["queues"]["default"]["horizon"] > found["at"]
    assert found["redis"]["reachable"] is True
    assert found["redis"]["maxmemory_policy"] == "noeviction"


def test_what_is_due_is_counted_by_topic_and_what_falls_due_soon_by_queue() -> None:
    schedule(2, due=-1)
    schedule(3, due=-100, topic="t.effect")
    schedule(1, due=-100, topic="t.effect", queue="slow")
    for due, queue in ((30, "default"), (200, "default"), (3000, "default"), (200, "slow"), (4000, "slow")):
        schedule(1, due=due, queue=queue, topic="t.effect")
    pause_queue("slow")

    found = run("delayq_stats", "--json").json

    assert {
        topic: {name: number["count"] for name, number in due.items()} for topic, due in found["topics"].items()
    } == {
        "t.effect": {"due": 4, "ready": 0, "overdue": 3},
        "t.ok": {"due": 2, "ready": 2, "overdue": 0},
    }
    coming = {name: queue["coming"] for name, queue in found["queues"].items() if queue["scheduled"]["count"]}
    assert {name: [one["count"] for one in spans.values()] for name, spans in coming.items()} == {
        "default": [1, 2, 3],
        "slow": [0, 1, 1],
    }
    assert coming["slow"]["5m"] == {"count": 1, "exact": True, "seconds": None}


RUNS = (("t.ok", 2), ("t.ok", 4), ("t.effect", 10))


def test_the_work_that_falls_due_is_that_of_the_mean_run_time_of_each_topic() -> None:
    ran = {schedule(1, due=-1, topic=topic)[0]: seconds for topic, seconds in RUNS}
    claim(*ran)
    transitions.succeed("default", [Success(pk, 1, "test") for pk in ran])
    write_out_log()
    for pk, seconds in ran.items():
        ended = unguarded(LogRow).get(message_id=pk, to_state="consumed").at
        began = unguarded(LogRow).filter(message_id=pk, to_state="running")
        began.update(at=ended - timedelta(seconds=seconds))
    for topic, number in (("t.ok", 10), ("t.effect", 3), ("t.new", 2)):
        schedule(number, due=30, topic=topic)
    coming = run("delayq_stats", "--json").json["queues"]["default"]["coming"]
    # A topic of which none has run counts with the mean of all.
    assert coming["1m"]["seconds"] == pytest.approx(10 * 3 + 3 * 10 + 2 * 16 / 3, abs=0.01)


def test_numbers_of_what_falls_due_end_at_a_limit() -> None:
    schedule(5, due=30)
    found = due_soon("default", timezone.now(), ["default"], CAPS._replace(rows=4, topics=2))
    assert found["default"]["1m"].number == Capped(4, more=True)
    schedule(5, due=-30)
    topics = due_by_topic("default", timezone.now(), timezone.now(), [], CAPS._replace(rows=4, topics=2))
    assert topics["t.ok"].due == Capped(4, more=True)


def test_messages_of_a_paused_queue_are_held_and_not_overdue() -> None:
    schedule(2, due=-100)
    schedule(3, due=-300, queue="letters")
    schedule(1, due=100, queue="letters")
    before = run("delayq_stats", "--json").json
    assert (before["overdue"]["count"], before["paused"], before["held"]["count"]) == (5, [], 0)
    assert "Paused" not in run("delayq_stats").out
    pause_queue("letters", reason="the provider\nis down")
    pause_queue("reports", until=datetime(2090, 1, 31, tzinfo=UTC))

    found, out = run("delayq_stats", "--json").json, run("delayq_stats").out

    assert (found["overdue"]["count"], found["held"]["count"], found["paused"]) == (2, 3, ["letters", "reports"])
    assert found["oldest_overdue"] == found["queues"]["default"]["oldest_overdue"] > before["oldest_overdue"]
    letters, reports = found["queues"]["letters"], found["queues"]["reports"]
    assert {name: letters[name] for name in ("scheduled", "overdue", "held", "oldest_overdue")} == {
        "scheduled": {"count": 4, "exact": True},
        "overdue": {"count": 0, "exact": True},
        "held": {"count": 3, "exact": True},
        "oldest_overdue": None,
    }
    assert (letters["paused"]["until"], letters["paused"]["reason"]) == (None, "the provider\nis down")
    assert letters["paused"]["by"].startswith("process:")
    assert letters["paused"]["since"] < reports["paused"]["since"] < found["at"]
    assert reports["paused"]["until"] == "2090-01-31T00:00:00.000Z"
    assert found["queues"]["default"]["paused"] is None
    assert "\nOverdue      2, the oldest for 1 m" in out
    assert "\nPaused       2 queues, in which 3 due messages wait\n" in out
    assert re.search(r"\n  letters: 3 due, paused until it is resumed, by process:\S+: the provider is down\n", out)
    assert re.search(r"\n  reports: 0 due, paused until 2090-01-31T00:00:00.000Z, by process:\S+\n", out)
    assert "\n  letters: paused, 4 scheduled, 0 overdue, " in out


def test_finished_messages_are_not_counted_past_a_cap() -> None:
    transitions.give_up("default", schedule(5), reason="")
    dead = stats.collect("default", None, Caps(rows=3)).states[State.DEAD]
    assert dead.as_json() == {"count": 3, "exact": False}
    assert str(dead) == "3+"


def test_lateness_is_from_the_due_time_to_the_first_claim() -> None:
    ids = schedule(20, due=-10)
    claim(*ids)
    transitions.succeed("default", [Success(pk, 1, "") for pk in ids])
    write_out_log()
    for place, pk in enumerate(ids):
        first = unguarded(LogRow).filter(message_id=pk, to_state=State.RUNNING)
        due = Message.objects.get(pk=pk).due_at
        first.update(at=due + timedelta(seconds=place + 1))
        # A later delivery of the same message does not count.
        LogRow(
            message_id=pk, number=9, at=due + timedelta(hours=1), from_state="scheduled", to_state="running", due_at=due
        ).save_base(force_insert=True)

    found = run("delayq_stats", "--json").json["lateness"]

    assert found == {"of": 20, "p50": 10.0, "p95": 19.0}


def test_stats_work_while_redis_is_away(redis_server: RedisServer) -> None:
    schedule(3)
    redis_server.kill()
    ran = run("delayq_stats", "--json")
    assert ran.code == 0
    assert ran.json["redis"]["reachable"] is False
    assert ran.json["states"]["scheduled"]["count"] == 3
    assert ran.json["queues"]["default"]["delayed"] is None
    out = run("delayq_stats").out
    assert "does not answer" in out
    assert "nothing was delivered yet" in out


def test_stats_do_not_show_the_ids_of_another_database(redis_client: redis.Redis) -> None:
    run("delayq_restore")
    redis_client.hset("{delayq}:meta", "identity", "somebody else")
    schedule(1)
    told = run("delayq_stats").out
    assert re.search(r"Redis +\S.*: This Redis prefix belongs to another database", told)
    assert "default: 1 scheduled, 0 overdue\n" in told
    found = run("delayq_stats", "--json").json
    assert (found["redis"]["reachable"], found["queues"]["default"]["delayed"]) == (True, None)


def test_stats_say_since_when_nobody_loads_redis(redis_client: redis.Redis) -> None:
    """As when no worker has the role loader."""
    schedule(1)
    run("delayq_restore")
    redis_client.hset("{delayq}:meta", "horizon", to_tenths(timezone.now() - timedelta(hours=2)))
    assert re.search(r"default: .*, loaded until 2 h( 0 m)? ago\n", run("delayq_stats").out)


def test_stats_show_no_password(settings: Any, redis_server: RedisServer) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": f"redis://anna:hunter2@127.0.0.1:{redis_server.port}/0"}
    for words in ([], ["--json"]):
        ran = run("delayq_stats", *words)
        assert "hunter2" not in ran.out + ran.err
        assert f"127.0.0.1:{redis_server.port}" in ran.out


# --- what falls due, what was delivered, who works --------------------------------------------------------------------


def rolled(minutes_ago: int, **counts: int) -> None:
    from django_delayq.console.models import Rollup

    at = reads.now("default").replace(second=0, microsecond=0) - timedelta(minutes=minutes_ago)
    Rollup.objects.create(at=at, queue="default", topic="t.ok", **counts)


@pytest.mark.console
def test_throughput_counts_full_minutes_only() -> None:
    # The current minute does not count. This row is a minute ahead, so that it still does not count a moment later.
    rolled(-1, consumed=1000)
    for minutes, number in ((5, 20), (40, 300), (600, 4000)):
        rolled(minutes, consumed=number, dead=1, late_100=9, late_more=1)
    found = run("delayq_stats", "--json").json["throughput"]
    assert found["15m"] == {
        "consumed": 20,
        "retried": 0,
        "dead": 1,
        "expired": 0,
        "lateness": {"of": 10, "p50": 0.1, "p95": None},
    }
    assert found["60m"]["consumed"] == 320
    assert found["24h"]["consumed"] == 5320
    text = run("delayq_stats").out
    assert "24 h: 5,320" in text
    assert text.count("Lateness") == 1


@pytest.mark.console
def test_the_coming_hour_shows_when_messages_fall_due() -> None:
    # Both due times are in the middle of a minute.
    second = timezone.now().second
    schedule(3, due=1830 - second)
    schedule(1, due=150 - second)
    ran = run("delayq_stats", "--json").json["upcoming"]
    assert len(ran) == 61
    assert sorted(bar["count"] for bar in ran if bar["count"]) == [1, 3]
    assert all(bar["exact"] for bar in ran)
    lines = [line for line in run("delayq_stats").out.splitlines() if "█" in line]
    assert [line.split()[-1] for line in lines] == ["1", "3"]
    assert lines[1].count("█") > 2 * lines[0].count("█") > 0


def test_workers_are_listed_with_their_state() -> None:
    now = reads.now("default")
    for name, seen in (("w/1", 1), ("w/2", 60), ("w/3", 3600)):
        seen_at = now - timedelta(seconds=seen)
        Worker.objects.create(name=name, host="h", pid=1, queues=["mail"], started_at=seen_at, seen_at=seen_at)
    found = run("delayq_stats", "--json").json
    assert found["workers"] == 1
    assert {one["name"]: one["state"] for one in found["worker_list"]} == {"w/1": "alive", "w/2": "late", "w/3": "lost"}
    text = run("delayq_stats").out
    assert "alive  w/1  mail" in text
    assert "lost   w/3  mail" in text


def test_many_queues_cost_no_statement_each() -> None:
    assert_asks_the_same_of_many_queues(lambda: run("delayq_stats"))


@pytest.mark.skipif(connection.vendor != "postgresql", reason="only PostgreSQL compiles statements")
def test_no_statement_of_the_statistics_is_compiled() -> None:
    schedule(1)
    asked: list[str] = []

    def note(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        if "SELECT" in sql:
            asked.append(_setting("jit"))
        return execute(sql, params, many, context)

    before = _setting("jit")
    with connection.execute_wrapper(note):
        run("delayq_stats")
    assert set(asked) == {"off"}
    assert _setting("jit") == before == "on"


def _setting(name: str) -> str:
    with connection.cursor() as cursor:
        found: str = cursor.connection.execute("SELECT current_setting(%s)", [name]).fetchone()[0]
    return found
