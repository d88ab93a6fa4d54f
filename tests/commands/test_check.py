from __future__ import annotations

import re
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest
import redis
from django.core.management import call_command
from django.db import connection, connections
from django.test import Client
from django.utils import timezone

from django_delayq import extensions, pause_queue, schedule_messages
from django_delayq.core.clock import to_tenths
from django_delayq.extensions import Finding, Level
from django_delayq.inspector.diagnostics import describe_holder
from django_delayq.inspector.numbers import CAPS
from django_delayq.models import Message, Worker
from django_delayq.project import conf
from django_delayq.record import reads, transitions
from django_delayq.record.sql.holders import Holder, oldest
from django_delayq.worker.upkeep.heartbeat import Heartbeat
from testproject.servers import PostgresServer, RedisServer
from tests.broker.bench import redis_broker
from tests.support.commands import held, run, schedule
from tests.support.limits import Declare, admit
from tests.support.rows import unguarded
from tests.support.statements import count_statements
from tests.support.transactions import make_snapshots_old, unfinished

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def worker() -> None:
    now = timezone.now()
    Worker.objects.create(name="w", host="h", pid=1, started_at=now, seen_at=now)


@pytest.fixture
def filled(worker: None, redis_client: redis.Redis) -> None:
    """Leave Redis as the worker does."""
    redis_broker().close()


def levels(*words: str) -> dict[str, str]:
    return {check["name"]: check["level"] for check in run("delayq_check", "--json", *words).json["checks"]}


@pytest.mark.usefixtures("filled")
def test_a_healthy_system_passes_all_checks() -> None:
    ran = run("delayq_check")
    assert ran.code == 0, ran.out
    assert "Redis persistence" in ran.out
    assert set(levels().values()) == {"ok"}


def unable(using: str, workers: Any) -> Iterator[Finding]:
    raise KeyError("orders")


@pytest.mark.console
@pytest.mark.usefixtures("own_additions")
def test_an_extension_that_fails_to_look_is_a_finding(admin_client: Client) -> None:
    extensions.add_to_check(unable)
    extensions.add_to_check(lambda using, workers: [Finding("Orders", Level.OK, "")])
    ran, told = run("delayq_check"), f"{__name__}.unable: KeyError"
    assert (ran.code, told in ran.out, levels()["Orders"]) == (3, True, "ok")

    from django_delayq.console.admin import panels

    panels.forget()
    assert told in admin_client.get("/admin/delayq_console/dashboard/").content.decode()
    panels.forget()


def test_an_unreachable_redis_is_exit_code_69(redis_server: RedisServer) -> None:
    redis_server.kill()
    ran = run("delayq_check", "--json")
    assert ran.code == 69
    assert levels()["Redis"] == "critical"
    assert levels()["Workers"] == "ok"
    assert run("delayq_check", "redis").code == run("delayq_restore").code == 69


@pytest.mark.parametrize(
    ("ill", "well", "finding"),
    [
        ("CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0", "Redis writes: "),
        ("CONFIG SET min-replicas-to-write 1", "CONFIG SET min-replicas-to-write 0", "Redis writes: "),
        ("REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE", "Redis role: slave"),
    ],
    ids=["full", "alone", "a replica"],
)
def test_a_redis_in_which_messages_cannot_be_kept_is_critical_and_not_told_as_one_that_does_not_answer(
    redis_client: redis.Redis, ill: str, well: str, finding: str
) -> None:
    schedule(1)
    redis_client.flushall()
    redis_client.execute_command(ill)
    try:
        checked, stats = run("delayq_check"), run("delayq_stats", "--json").json["redis"]
        restored = run("delayq_restore")
    finally:
        redis_client.execute_command(well)
    assert (checked.code, f"CRITICAL {finding}" in checked.out, stats["reachable"]) == (3, True, True), checked.out
    assert finding != "Redis writes: " or f"{finding}{stats['error']}; until" in checked.out
    assert (restored.code, restored.err.startswith("Redis cannot be used: ")) == (69, True)


def test_a_redis_that_may_evict_is_critical(redis_client: redis.Redis) -> None:
    redis_client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        ran = run("delayq_check")
    finally:
        redis_client.config_set("maxmemory-policy", "noeviction")
    assert (ran.code, "CRITICAL Redis maxmemory-policy: allkeys-lru" in ran.out) == (3, True)


def test_a_redis_that_may_evict_keys_with_an_expiry_keeps_the_ids(redis_client: redis.Redis) -> None:
    """Several clouds have no other."""
    redis_client.config_set("maxmemory-policy", "volatile-lru")
    try:
        ran = run("delayq_check")
    finally:
        redis_client.config_set("maxmemory-policy", "noeviction")
    assert "WARN     Redis maxmemory-policy: volatile-lru; Redis may drop wake-ups" in ran.out
    assert "CRITICAL" not in ran.out


def test_an_unreachable_database_is_exit_code_69(postgres_server: PostgresServer) -> None:
    connections["default"].close()
    postgres_server.kill()
    ran = run("delayq_check", "--json")
    assert ran.code == 69
    assert levels() == {
        "Database": "critical",
        "Redis": "ok",
        "Redis mode": "ok",
        "Redis role": "ok",
        "Redis maxmemory-policy": "ok",
        "Redis persistence": "ok",
    }
    for command in (["delayq_restore"], ["delayq_stats"], ["delayq_check", "redis"]):
        assert run(*command).code == 69


def test_a_redis_that_no_worker_fills_is_a_warning(redis_client: redis.Redis) -> None:
    """As when the workers have other settings than the processes that schedule."""
    schedule(1)
    redis_client.flushall()
    assert (levels()["Redis contents"], run("delayq_check").code) == ("warn", 0)
    assert run("delayq_restore").code == 0
    assert "Redis contents" not in levels()
    redis_client.hset("{delayq}:meta", "horizon", to_tenths(timezone.now()))
    assert levels()["Redis contents"] == "warn"


@pytest.mark.usefixtures("filled")
def test_a_redis_that_workers_may_not_ask_is_critical(redis_client: redis.Redis, settings: Any) -> None:
    redis_client.acl_setuser("shy", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-config", "-info"])
    port = redis_client.connection_pool.connection_kwargs["port"]
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": f"redis://shy:x@127.0.0.1:{port}/0"}
    try:
        ran = run("delayq_check")
        assert (ran.code, levels()["Redis"]) == (69, "critical"), ran.out + ran.err
        redis_client.acl_setuser("shy", enabled=True, commands=["+info"])
        assert set(levels().values()) == {"ok"}
    finally:
        redis_client.acl_deluser("shy")


def test_the_redis_of_another_database_is_exit_code_78_and_left_alone(redis_client: redis.Redis) -> None:
    overdue = Message.objects.get(pk=schedule(due=-20)[0])
    redis_client.hset("{delayq}:meta", "identity", "somebody else")
    redis_client.zadd("{delayq}:default:ready", {"7": 5})
    for words in ([], ["redis"], ["redis", "--fix"]):
        assert run("delayq_check", *words).code == 78
    for words in ([], ["--dry-run"], ["--overdue", "dead", "--yes"]):
        assert run("delayq_restore", *words).code == 78
    assert held().keys() == {7}
    assert Message.objects.get().moves == overdue.moves


@pytest.mark.parametrize("command", ["delayq_check", "delayq_stats"])
def test_local_times_are_exit_code_78(settings: Any, command: str) -> None:
    schedule(1)
    settings.USE_TZ = False
    ran = run(command)
    assert (ran.code, "set USE_TZ = True" in ran.err) == (78, True)


def test_pending_migrations_are_exit_code_78(settings: Any) -> None:
    settings.MIGRATION_MODULES = {"delayq": None}
    ran = run("delayq_check")
    assert (ran.code, "pending: delayq has none; run migrate" in ran.out) == (78, True)
    settings.MIGRATION_MODULES = {}
    call_command("migrate", "delayq", "zero", verbosity=0)
    try:
        ran = run("delayq_check")
        assert ran.code == 78
        assert "0001_initial" in ran.out
        assert run("delayq_stats").code == 78
        assert run("delayq_restore").code == 78
    finally:
        call_command("migrate", verbosity=0)


@pytest.mark.console
def test_pending_migrations_of_the_console_are_found_too(caplog: pytest.LogCaptureFixture) -> None:
    call_command("migrate", "delayq_console", "zero", verbosity=0)
    try:
        ran = run("delayq_check")
        assert ran.code == 78
        assert re.search(r"pending: delayq_console\.0001_initial, .*; run migrate", ran.out)
        assert run("run_delayq", "--once").code == 0
        assert "Migrations are not applied yet (delayq_console.0001_initial, " in caplog.text
    finally:
        call_command("migrate", verbosity=0)


def test_a_missing_worker_is_critical_unless_none_is_required() -> None:
    assert run("delayq_check", "--min-workers", "2").code == 3
    Worker.objects.update(seen_at=timezone.now() - timedelta(seconds=60))
    assert run("delayq_check").code == 3
    assert run("delayq_check", "--min-workers", "0").code == 0
    # A dead one is not alive because its clock was ahead.
    Worker.objects.update(seen_at=timezone.now() + timedelta(days=1))
    assert run("delayq_check").code == 3
    assert "Workers      0 alive" in run("delayq_stats").out


def test_all_live_workers_are_counted_however_many_there_are() -> None:
    schedule(1, queue="mail")
    unguarded(Message).update(created_at=timezone.now() - timedelta(seconds=61))
    Worker.objects.update(queues=["mail"], topics=["t.ok"])
    now = timezone.now()
    Worker.objects.bulk_create(
        Worker(name=f"w{number}", host="h", pid=number, started_at=now, seen_at=now) for number in range(CAPS.workers)
    )
    ran = run("delayq_check", "--min-workers", str(CAPS.workers + 1))
    assert (ran.code, f"Workers: {CAPS.workers + 1} alive\n" in ran.out) == (0, True)
    # One of them serves the queue, and was seen before the others.
    assert "no worker serves" not in ran.out


def test_the_oldest_overdue_message_of_each_queue_is_named() -> None:
    old, mail = schedule(2, due=-90)[0], schedule(2, due=-40, queue="mail")[0]
    schedule(1, due=-1, queue="news")
    checks = {check["name"]: check["detail"] for check in run("delayq_check", "--json").json["checks"]}
    found = re.findall(r"message (\d+) of topic t.ok in queue (\w+) for", checks["Overdue"])
    assert found == [(str(old), "default"), (str(mail), "mail")]
    assert levels()["Overdue"] == "critical"
    assert (run("delayq_check").code, run("delayq_check", "--max-overdue-age", "5m").code) == (3, 0)
    pause_queue("default")
    ran = run("delayq_check")
    assert "Paused queues: default for " in ran.out
    assert f"message {old} " not in ran.out
    assert levels()["Overdue"] == "ok"


def test_a_topic_that_nobody_handles_is_a_warning() -> None:
    schedule(1, topic="t.gone")
    schedule(1, topic="t.elsewhere", queue="mail")
    schedule(1)
    # Another project on this database has a handler for it.
    Worker.objects.update(topics=["t.elsewhere"])
    ran, listed = run("delayq_check"), run("delayq_check", "handlers")
    assert (ran.code, "Topics: no handler for t.gone\n" in ran.out) == (0, True)
    assert levels()["Topics"] == "warn"
    assert (listed.code, listed.err) == (0, "Messages of topic t.gone wait, and no handler is known for it.\n")
    assert run("delayq_check", "handlers", "--json").json["unhandled"] == ["t.gone"]
    Worker.objects.update(seen_at=timezone.now() - timedelta(seconds=60))
    assert "Topics: no handler for t.elsewhere, t.gone\n" in run("delayq_check").out
    for number in range(6):
        schedule(1, topic=f"t.gone.{number}")
    # A finding names a few, and counts the rest.
    assert "no handler for t.elsewhere, t.gone, t.gone.0, t.gone.1, t.gone.2 and 3 more\n" in run("delayq_check").out


def test_workers_that_may_want_more_connections_than_there_are_are_a_warning() -> None:
    if connection.vendor != "postgresql":
        assert "Connections" not in levels()
        return
    most = int(PostgresServer.SETTINGS["max_connections"])
    # Beside its threads a process has three.
    Worker.objects.update(threads=most - 3, topics=["t.ok"])
    assert levels()["Connections"] == "ok"
    Worker.objects.create(name="v", host="h", pid=2, started_at=timezone.now(), seen_at=timezone.now())
    ran = run("delayq_check")
    assert (ran.code, levels()["Connections"]) == (0, "warn")
    assert f"may want {most + 3} connections, and the database gives them {most}; start fewer" in ran.out
    # Nobody knows whether a dead one comes back.
    Worker.objects.filter(name="v").update(seen_at=timezone.now() - timedelta(seconds=60))
    assert levels()["Connections"] == "ok"
    # Async handlers have as many threads again for their sync calls.
    Worker.objects.update(threads=most // 2, topics=["t.ok", "t.async"])
    assert levels()["Connections"] == "warn"


@pytest.mark.parametrize(("ahead", "words"), [(40, "40.0 s ahead of"), (-40, "40.0 s behind"), (3, None)])
def test_a_clock_of_the_host_that_is_off_is_a_warning_of_the_check_and_of_a_worker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ahead: int, words: str | None
) -> None:
    reads.now("default")
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + ahead)
    heartbeat = Heartbeat("default", "w", tuple, 1, ())
    for _time in range(2):
        heartbeat.tick()
    assert levels().get("Clock") == (words and "warn")
    told = [record.getMessage() for record in caplog.records if "clock" in record.getMessage()]
    if words is None:
        assert told == []
    else:
        (line,) = told
        assert f"this host's clock is {words} the database's" in line
        assert f"this host's clock is {words} the database's" in run("delayq_check", "--min-workers", "0").out


@pytest.mark.postgresql("SQLite keeps no rows for others")
def test_an_old_snapshot_is_a_warning_that_names_its_process_and_application(monkeypatch: pytest.MonkeyPatch) -> None:
    pids = []

    def hold() -> None:
        with connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            cursor.execute("SET LOCAL application_name = 'monthly report'")
            cursor.execute("SELECT pg_backend_pid()")
            pids.extend(cursor.fetchone())

    with unfinished(hold):
        assert levels()["Snapshots"] == "ok"
        make_snapshots_old(monkeypatch)
        ran = run("delayq_check")
        assert (ran.code, levels()["Snapshots"]) == (0, "warn")
        assert f"the transaction of pid {pids[0]} (monthly report) is " in ran.out
    assert levels()["Snapshots"] == "ok"


SLOT, PREPARED = Holder("slot", "standby", "pid 7", None, 2_000_000), Holder("prepared", "gid", "shop", 7200.0, 3)


@pytest.mark.parametrize(
    ("holder", "text"),
    [
        (SLOT, "the replication slot standby (pid 7) is 2,000,000 transactions old"),
        (PREPARED, "the prepared transaction gid (shop) is 2 h old"),
    ],
)
def test_an_old_slot_and_an_old_prepared_transaction_are_named(holder: Holder, text: str) -> None:
    young = holder._replace(seconds=1.0, transactions=1)
    assert oldest([holder, holder, young]) == [holder]
    assert oldest([young]) == []
    assert describe_holder(holder) == text


def test_the_limit_of_the_own_role_counts(postgres_server: PostgresServer) -> None:
    role = "delayq_with_a_limit"
    with psycopg.connect(postgres_server.url, autocommit=True) as other:
        other.execute(f"CREATE ROLE {role} LOGIN CONNECTION LIMIT 10 IN ROLE {PostgresServer.user}")
    Worker.objects.update(threads=8, topics=["t.ok"])
    assert levels()["Connections"] == "ok"
    own, connection.settings_dict["USER"] = connection.settings_dict["USER"], role
    connection.close()
    try:
        assert "may want 11 connections, and the database gives them 10;" in run("delayq_check").out
    finally:
        connection.settings_dict["USER"] = own
        connection.close()
        with psycopg.connect(postgres_server.url, autocommit=True) as other:
            other.execute(f"DROP ROLE {role}")


def test_a_queue_that_no_worker_serves_is_a_warning() -> None:
    schedule(1)
    schedule(1, queue="mail")
    Worker.objects.update(queues=["default"], topics=["t.ok"])
    # A worker may be about to find the queue.
    assert "Queues" not in levels()
    unguarded(Message).update(created_at=timezone.now() - timedelta(seconds=61))
    ran = run("delayq_check")
    assert (ran.code, "Queues: no worker serves mail\n" in ran.out) == (0, True)
    # A process that runs no handlers has no topics.
    Worker.objects.update(topics=[])
    assert "Queues: no worker serves default, mail\n" in run("delayq_check").out
    Worker.objects.all().delete()
    assert "Queues" not in levels()


def test_too_many_dead_messages_are_critical() -> None:
    transitions.give_up("default", schedule(3), reason="")
    assert run("delayq_check").code == 0
    assert run("delayq_check", "--max-dead", "3").code == 0
    ran = run("delayq_check", "--max-dead", "2")
    assert ran.code == 3
    assert "Dead: more than 2" in " ".join(ran.out.split())


@pytest.mark.usefixtures("filled")
def test_a_monitor_reads_the_worst_level_and_what_is_critical() -> None:
    assert run("delayq_check", "--json").json["level"] == "ok"
    pause_queue("default")
    ran = run("delayq_check", "--json")
    assert (ran.code, ran.json["level"]) == (0, "warn")
    ran = run("delayq_check", "--json", "--min-workers", "9")
    assert (ran.code, ran.json["level"]) == (3, "critical")
    assert {"name": "Workers", "level": "critical", "detail": "1 alive of 9"} in ran.json["checks"]
    assert "CRITICAL Workers: 1 alive of 9\n" in run("delayq_check", "--min-workers", "9").out


def test_settings_without_redis_pass_the_checks(settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": None}
    assert conf.get().REDIS is None
    assert run("delayq_check").code == 0
    assert run("delayq_restore").code == 78


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["redis", "--max-dead", "0"], "--max-dead belongs to health."),
        (["handlers", "--fix"], "--fix belongs to redis."),
        (["--queue", "mail"], "--queue belongs to redis."),
    ],
)
def test_an_option_of_another_check_is_refused(words: list[str], refusal: str) -> None:
    ran = run("delayq_check", *words)
    assert (ran.code, ran.err) == (2, refusal)


def test_a_misspelt_topic_or_queue_is_found_with_the_one_that_is_like_it() -> None:
    Worker.objects.update(topics=["orders.close"], queues=["default", "mails"])
    schedule(1, topic="order.close", queue="mail")
    unguarded(Message).update(created_at=timezone.now() - timedelta(seconds=90))
    out = run("delayq_check").out
    assert "Topics: no handler for order.close (did you mean orders.close?)\n" in out
    assert "Queues: no worker serves mail (did you mean mails?)\n" in out
    assert "of topic order.close wait, and no handler is known for it. Did you mean orders.close?" in (
        run("delayq_check", "handlers").err
    )


def fill(*queues: str) -> None:
    """Put three overdue messages into each queue."""
    rows: list[Any] = [{"topic": topic, "queue": queue} for queue in queues for topic in ("l.one", "l.one", "t.ok")]
    made = [message.pk for message in schedule_messages(rows)]
    unguarded(Message).filter(pk__in=made).update(due_at=timezone.now() - timedelta(seconds=8000))


@pytest.mark.parametrize("limit", [None, 1], ids=["unlimited", "limited"])
def test_many_queues_cost_no_statement_each(limit: int | None, declare: Declare) -> None:
    def check() -> None:
        found = levels()
        assert found["Overdue"] == "critical"
        assert ("Limited" in found) is (limit is not None)
        # Here the messages of full limits are taken out of the numbers of each queue.
        limited = run("delayq_stats", "--json").json["queues"]["q"]["limited"]
        assert limited["count"] == (0 if limit is None else 2)

    declare("l.one", limit=limit)
    running = Message.objects.get(pk=schedule(due=-9000, topic="l.one")[0])
    assert admit(running) == [running.pk]
    fill("q")
    few = count_statements(check)
    fill(*(f"q{number:03}" for number in range(220)))
    # On a busy machine some time passes, and what is known for a while is asked for again.
    assert count_statements(check) < few + 20
