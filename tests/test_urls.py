"""The pages for probes answer without a login, quickly, and tell no secrets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from django.db import connections
from django.test import Client
from django.urls import include, path

from django_delayq import urls
from testproject.servers import PostgresServer, RedisServer
from tests.support.transactions import lock_table, unfinished

urlpatterns = [path("delayq/", include("django_delayq.urls"))]

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.urls(__name__),
    pytest.mark.usefixtures("redis_client"),
]


def ask(page: str) -> tuple[int, dict[str, str]]:
    answer = Client().get(f"/delayq/{page}/")
    assert "no-store" in answer["Cache-Control"]
    return answer.status_code, json.loads(answer.content)


@pytest.fixture(autouse=True)
def _guarded(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have a project in which every page needs a login and runs in a transaction, and probes that wait for long."""
    monkeypatch.setattr(urls, "TIMEOUT_MS", 60_000)
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, "django.contrib.auth.middleware.LoginRequiredMiddleware"]
    settings.DATABASES["default"]["ATOMIC_REQUESTS"] = True
    yield
    settings.DATABASES["default"]["ATOMIC_REQUESTS"] = False


def test_no_page_asks_another_database(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    connections["other"].close()
    monkeypatch.setitem(connections["other"].settings_dict, "ATOMIC_REQUESTS", True)
    monkeypatch.setitem(connections["other"].settings_dict, "NAME", "/there/is/no/such/database")
    assert (ask("live")[0], ask("ready")[0]) == (200, 200)


def test_a_process_is_alive_and_ready_also_without_redis(redis_server: RedisServer, settings: Any) -> None:
    assert ask("live") == (200, {"status": "ok"})
    assert ask("ready") == (200, {"status": "ok", "database": "ok", "redis": "ok"})
    redis_server.kill()
    assert ask("ready") == (200, {"status": "degraded", "database": "ok", "redis": "unavailable"})
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": None}
    assert ask("ready") == (200, {"status": "ok", "database": "ok", "redis": "none"})


def test_a_redis_that_workers_do_not_use_is_named_with_the_reason(redis_client: redis.Redis) -> None:
    redis_client.hset("{delayq}:meta", "identity", "another")
    code, answer = ask("ready")
    assert (code, answer["status"], answer["redis"]) == (200, "degraded", "unusable")
    assert answer["why"] == 'This Redis prefix belongs to another database; choose another DELAYQ["PREFIX"].'


@pytest.mark.parametrize(
    ("ill", "well"),
    [("CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0"), ("REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE")],
    ids=["full", "a replica"],
)
def test_a_redis_that_takes_no_writes_is_unavailable(redis_client: redis.Redis, ill: str, well: str) -> None:
    redis_client.execute_command(ill)
    try:
        assert ask("ready") == (200, {"status": "degraded", "database": "ok", "redis": "unavailable"})
    finally:
        redis_client.execute_command(well)


def test_a_process_without_its_database_is_alive_and_not_ready(postgres_server: PostgresServer) -> None:
    connections.close_all()
    postgres_server.kill()
    assert ask("ready") == (503, {"status": "unavailable", "database": "unavailable", "redis": "ok"})
    assert ask("live") == (200, {"status": "ok"})


@pytest.mark.postgresql("needs a statement timeout")
def test_a_database_that_answers_too_late_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(urls, "TIMEOUT_MS", 100)
    with unfinished(lambda: lock_table("delayq_identity")):
        assert ask("ready")[0] == 503


def test_a_probe_writes_nothing(redis_client: redis.Redis) -> None:
    ask("ready")
    assert redis_client.keys() == []
    assert Client().post("/delayq/ready/").status_code == 405
