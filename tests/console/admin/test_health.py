"""The health page: Redis, the database, and the consistency of the record and Redis."""

from __future__ import annotations

import io
import re
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.core.management import call_command
from django.db import connection
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from django_delayq.broker.redis import RedisBroker
from django_delayq.console.admin import panels
from django_delayq.console.models import Operation, OperationState
from django_delayq.models import Message
from testproject.servers import RedisServer
from tests.support.transactions import unfinished

from .asking import work_off
from .samples import admin_url, fill, running, said, scheduled, text, worker

pytestmark = pytest.mark.django_db(transaction=True)


def url(name: str = "changelist") -> str:
    return reverse(f"admin:delayq_console_health_{name}")


@pytest.fixture(autouse=True)
def _quick_sweeps(settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "GRACE": 0.1}


@pytest.fixture
def loaded(db: None) -> RedisBroker:
    """Give Redis a horizon, so that scheduled messages go into it."""
    return fill()


@pytest.mark.usefixtures("puts_are_flushed")
def test_redis_and_the_database_say_how_they_are(viewer: Client, loaded: RedisBroker) -> None:
    scheduled(delay="1m")
    page = text(viewer.get(url()))
    said = ("mode ok one master", "role ok master", "maxmemory-policy ok noeviction", "persistence ok")
    for word in ("answers, version", *(f"Redis {words}" for words in said), "Evicted keys 0"):
        assert word in page
    assert "Migrations ok all applied" in page
    assert "kept 30 d" in page
    assert re.search(r"default 1 0", page)
    assert ("Dead rows" in page) == (connection.vendor == "postgresql")


@pytest.mark.usefixtures("puts_are_flushed")
def test_the_redis_of_another_database_is_told_and_not_shown_as_ours(viewer: Client, redis_client: redis.Redis) -> None:
    fill()
    scheduled(delay="1m")
    worker()
    assert "default 1 0" in text(viewer.get(url()))
    redis_client.hset("{delayq}:meta", "identity", "somebody else")
    panels.forget()
    page = text(viewer.get(url()))
    assert "Redis identity critical This Redis prefix belongs to another database" in page
    assert "Contents ok" not in page
    assert "default 1 0" not in page
    assert "Redis identity: This Redis prefix belongs" in text(viewer.get(admin_url("dashboard_changelist")))


@pytest.mark.postgresql("SQLite keeps no rows for others")
def test_the_holder_of_an_old_snapshot_is_named(viewer: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("django_delayq.record.sql.holders.OLD", 0.0)

    def hold() -> None:
        with connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            cursor.execute("SET LOCAL application_name = 'report'")
            cursor.execute("SELECT 1")

    with unfinished(hold):
        assert re.search(r"Snapshots warning the transaction of pid \d+ \(report\) is ", text(viewer.get(url())))


@pytest.mark.postgresql("SQLite keeps no rows for others")
def test_the_state_of_the_table_is_told_in_the_language_of_the_reader(viewer: Client) -> None:
    assert "Snapshots ok" in text(viewer.get(url(), headers={"accept-language": "en"}))
    assert "Snapshots" not in text(viewer.get(url(), headers={"accept-language": "zh-hans"}))


def test_the_health_page_answers_without_redis(restorer: Client, redis_server: RedisServer) -> None:
    redis_server.stop()
    page = text(restorer.get(url()))
    assert "State critical does not answer" in page
    assert "Meanwhile workers deliver from the database" in page
    preview = restorer.get(url("restore"))
    assert "Redis:" in text(preview)
    assert 'name="typed"' not in preview.content.decode()


def test_the_health_page_compares_nothing_without_a_configured_redis(restorer: Client, settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": None}
    page = text(restorer.get(url()))
    assert "No Redis is configured, so there is nothing to compare." in page
    assert "Check now" not in page
    assert restorer.post(url("check"), {}).status_code == 403
    for answer in (restorer.get(url("restore")), restorer.post(url("restore"), {"typed": "restore"})):
        assert "There is nothing to restore: no Redis is configured" in text(answer)
        assert "<form" not in answer.content.decode().partition('id="content-main"')[2]
    assert not Operation.objects.exists()


@pytest.mark.usefixtures("puts_are_flushed")
def test_mismatches_are_shown_by_queue_with_who_corrects_them(restorer: Client, loaded: RedisBroker) -> None:
    lost = scheduled(delay="1m")
    loaded.remove("default", [lost.pk])
    restorer.post(url("check"))
    work_off()
    page = text(restorer.get(url()))
    assert "differ" in page
    assert "default 1 1 0 0 0" in page
    assert "No worker is alive to correct this: start one." in page
    worker()
    panels.forget()
    assert "Workers correct this as the messages fall due." in text(restorer.get(url()))


@pytest.mark.usefixtures("puts_are_flushed")
def test_a_check_is_an_operation_and_its_answer_is_shown(restorer: Client, loaded: RedisBroker) -> None:
    scheduled(delay="1m")
    assert "The record and Redis have not been compared yet." in text(restorer.get(url()))
    answer = restorer.post(url("check"), follow=True)
    assert said(answer) == ["The check is queued and waits for a worker: none is alive."]
    Operation.objects.all().delete()
    worker()
    answer = restorer.post(url("check"), follow=True)
    assert said(answer) == ["The check is queued: a worker compares the record with Redis."]
    assert "A check is queued and waits for a worker." in text(answer)
    assert said(restorer.post(url("check"), follow=True)) == ["A check is under way already."]
    operation = work_off()
    assert (operation.action, operation.state, operation.started_by) == ("check", OperationState.DONE, "user:rosa")
    page = text(restorer.get(url()))
    assert "The record and Redis agreed in 2 comparisons." in page
    assert re.search(r"Checked .* ago \(20.*\) by user:rosa\.", page)


def test_the_last_restore_is_shown_whoever_began_it(viewer: Client, redis_client: redis.Redis) -> None:
    assert "Last restore" not in text(viewer.get(url()))
    scheduled(delay="1m")
    call_command("delayq_restore", stdout=io.StringIO(), stderr=io.StringIO())
    page = text(viewer.get(url()))
    assert re.search(r"Last restore: #\d+ by command:delayq_restore .+, done .* ago \(20.*\)\.", page), page


def test_the_last_restore_is_the_one_that_ended_last(restorer: Client) -> None:
    now = timezone.now()
    for minutes in (1, 60):
        ended = {"created_at": now, "finished_at": now - timedelta(minutes=minutes)}
        Operation.objects.create(action="restore", state=OperationState.DONE, started_by="user:rosa", **ended)
    first = Operation.objects.earliest("pk")
    assert restorer.get(url()).context["restored_url"] == admin_url("operation_change", first.pk)


def test_stuck_messages_are_shown_at_once(viewer: Client) -> None:
    message = running()
    assert "lease" not in text(viewer.get(url()))
    Message._base_manager.filter(pk=message.pk).update(leased_until=timezone.now() - timedelta(hours=1))
    panels.forget()
    assert "1 message is running under a lease that ran out long ago" in text(viewer.get(url()))
