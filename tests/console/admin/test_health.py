"""The health page: Redis, the database, their consistency, and the page that restores Redis."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.core.management import call_command
from django.db import connection, connections
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from django_delayq.broker.redis import RedisBroker
from django_delayq.console.admin import panels
from django_delayq.console.models import AuditEvent, Operation, OperationState
from django_delayq.core.states import State
from django_delayq.models import Message, Transition
from django_delayq.record import reads
from django_delayq.recurring import create_schedule
from django_delayq.restore.engine import Restore
from testproject.servers import RedisServer
from tests.support.commands import due_tenths, held
from tests.support.rows import unguarded
from tests.support.statements import count_statements
from tests.support.transactions import make_snapshots_old, unfinished, waits_for_a_lock
from tests.support.workers import PATIENCE, eventually

from . import samples
from .asking import work_off
from .samples import DB, admin_url, fill, many, running, said, scheduled, table_rows, text, worker

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


@pytest.mark.usefixtures("puts_are_flushed")
def test_the_page_asks_little_however_much_there_is_to_tell(boss: Client, loaded: RedisBroker) -> None:
    samples.late(*many(3, queue="mail"), scheduled())
    worker()
    create_schedule("s", samples.TOPIC, every="1h", tz="UTC")
    for _time in range(2):
        boss.post(url("check"))
        work_off()
    boss.post(url("check"))
    page = text(boss.get(url()))
    assert "A check is queued and waits for a worker." in page
    assert "Checked" in page
    panels.forget()
    assert count_statements(lambda: boss.get(url()), frames=False) <= 25


@pytest.mark.postgresql("SQLite keeps no rows for others")
def test_the_holder_of_an_old_snapshot_is_named(viewer: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    make_snapshots_old(monkeypatch)

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
    assert re.search(r"Checked .* ago \(20.*\) by rosa\.", page)


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
    unguarded(Message).filter(pk=message.pk).update(leased_until=timezone.now() - timedelta(hours=1))
    panels.forget()
    assert "1 message is running under a lease that ran out long ago" in text(viewer.get(url()))


# --- the restore ------------------------------------------------------------------------------------------------------

YES = {"overdue": "run", "typed": "restore"}


def late(number: int = 1, **options: Any) -> list[Message]:
    """Create messages that are overdue for an hour."""
    return samples.late(*many(number, **options), seconds=3600)


def rows(response: Any) -> list[str]:
    """Return the cells of the preview by queue."""
    return table_rows(response.content.decode().partition('id="dq-preview-heading"')[2])[1:]


def test_the_preview_says_what_is_there_and_what_will_happen(restorer: Client, redis_client: redis.Redis) -> None:
    scheduled(delay="1m")
    scheduled(delay="2d")
    late(2, queue="mail")
    redis_client.flushall()
    page = restorer.get(url("restore"))
    # Scheduled, due later, in Redis, missing, overdue, oldest overdue, running.
    assert rows(page) == ["default 2 1 0 1 0 – 0", "mail 2 0 0 2 2 1 h 0", "all 4 1 0 3 2 1 h 0"]
    assert "2 overdue messages start at once." in text(page)
    assert "No worker is alive" in text(page)

    only_mail = {"queues": ["mail"], "overdue": "spread", "spread": "10m"}
    page = restorer.get(url("restore"), only_mail)
    assert rows(page) == ["mail 2 0 0 2 2 1 h 0", "all 2 0 0 2 2 1 h 0"]
    assert "2 overdue messages get new due times, evenly over 10 m." in text(page)
    for policy, what in (("dead", "are given up"), ("cancel", "are cancelled")):
        assert f"2 overdue messages {what}" in text(restorer.get(url("restore"), {"overdue": policy}))
    [gone] = late(queue="mail")
    unguarded(Message).filter(pk=gone.pk).update(expires_at=gone.due_at)
    for more, number in (({}, 3), ({"no_expired": "on"}, 2)):
        assert f"{number} overdue messages get new" in text(restorer.get(url("restore"), {**only_mail, **more}))


def test_a_restore_is_done_by_a_worker(restorer: Client, redis_client: redis.Redis) -> None:
    soon, (overdue,) = scheduled(delay="1m"), late()
    redis_client.flushall()
    answer = restorer.post(url("restore"), {**YES, "reason": "it was flushed"}, follow=True)
    operation = Operation.objects.get()
    assert said(answer) == [f"Restore #{operation.pk} is queued and waits for a worker: none is alive."]
    assert answer.redirect_chain[-1][0] == reverse("admin:delayq_console_operation_change", args=[operation.pk])
    assert (operation.action, operation.described, operation.started_by) == ("restore", "all queues", "user:rosa")
    assert not held()
    done = work_off()
    assert (done.state, done.total, done.done, done.outcomes) == (OperationState.DONE, 2, 2, {"put": 2})
    assert held() == {**due_tenths(soon.pk), overdue.pk: 0}
    event = AuditEvent.objects.values_list("actor", "action", "target", "reason", "operation").get()
    assert event == ("user:rosa", "restore", "all queues", "it was flushed", operation.pk)


def test_overdue_messages_are_spread_as_confirmed(restorer: Client) -> None:
    before = reads.now(DB)
    messages, others = late(4, queue="mail"), late(2)
    page = restorer.get(url("restore"), {"queues": ["mail"], "overdue": "spread", "spread": "100s"}).content.decode()
    hidden = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"[^>]*>', page)
    given = {name: value for name, value in hidden if name != "csrfmiddlewaretoken"}
    assert given == {"queues": "mail", "overdue": "spread", "spread": "100s", "no_expired": "False"}
    restorer.post(url("restore"), {**given, "typed": "restore"})
    assert work_off().outcomes["spread"] == 4
    dues = sorted(m.due_at for m in Message.objects.filter(pk__in=[m.pk for m in messages]))
    assert dues[0] >= before
    assert timedelta(seconds=60) < dues[-1] - dues[0] < timedelta(seconds=100)
    assert all(message.due_at < before for message in Message.objects.filter(pk__in=[m.pk for m in others]))


@pytest.mark.parametrize(
    ("policy", "state", "outcome"), [("cancel", State.CANCELLED, "cancelled"), ("dead", State.DEAD, "given up")]
)
def test_overdue_messages_are_ended_as_confirmed(restorer: Client, policy: str, state: State, outcome: str) -> None:
    (message,) = late()
    restorer.post(url("restore"), {"overdue": policy, "typed": "restore"})
    assert f"are {outcome}" in Operation.objects.get().described
    assert work_off().outcomes == {outcome: 1}
    last = Transition.objects.filter(message=message).latest("number")
    assert (last.to_state, last.reason) == (state, f"{outcome} by a restore: overdue")


@pytest.mark.parametrize(
    "given",
    [
        {"overdue": "run"},
        {"overdue": "run", "typed": "yes"},
        {"overdue": "spread", "typed": "restore"},
        {"overdue": "run", "spread": "5m", "typed": "restore"},
        {"overdue": "spread", "spread": "soon", "typed": "restore"},
        {"overdue": "no such", "typed": "restore"},
        {"overdue": "run", "queues": ["no such"], "typed": "restore"},
    ],
)
def test_an_unconfirmed_or_impossible_restore_is_asked_again(restorer: Client, given: dict[str, Any]) -> None:
    answer = restorer.post(url("restore"), given)
    assert answer.status_code == 200
    assert 'class="errorlist' in answer.content.decode()
    assert not Operation.objects.exists()


def test_the_name_of_the_environment_confirms_a_restore(restorer: Client, settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "CONSOLE": {"ENVIRONMENT": "production"}}
    assert "Type production to confirm" in text(restorer.get(url("restore")))
    restorer.post(url("restore"), YES)
    assert not Operation.objects.exists()
    restorer.post(url("restore"), {**YES, "typed": "production"})
    assert Operation.objects.exists()


def test_a_second_restore_is_refused_and_led_to_the_first(restorer: Client) -> None:
    restorer.post(url("restore"), YES)
    first = Operation.objects.get()
    answer = restorer.post(url("restore"), YES, follow=True)
    text_ = f"Restore #{first.pk} is under way already, started by rosa: nothing was done."
    assert said(answer)[-1] == text_
    assert answer.redirect_chain[-1][0].endswith(f"/{first.pk}/change/")
    assert Operation.objects.count() == 1
    page = restorer.get(url("restore"))
    assert f"Restore #{first.pk} is under way" in text(page)
    assert 'name="typed"' not in page.content.decode()
    work_off()
    restorer.post(url("restore"), YES)
    assert Operation.objects.count() == 2


@pytest.mark.postgresql("lets two transactions write at once")
@pytest.mark.parametrize("page", ["health_restore", "health_check"])
def test_of_two_that_are_started_at_once_the_second_is_refused(restorer: Client, page: str) -> None:
    def start() -> None:
        restorer.post(admin_url(page), YES)

    def second() -> None:
        start()
        connections.close_all()

    with ThreadPoolExecutor(1) as pool, unfinished(start) as go:
        other = pool.submit(second)
        eventually(lambda: other.done() or waits_for_a_lock(), "the second start")
        go.set()
        other.result(PATIENCE)
    assert Operation.objects.count() == 1


@pytest.mark.postgresql("ends a statement by itself")
def test_a_preview_that_takes_too_long_says_so(
    restorer: Client, monkeypatch: pytest.MonkeyPatch, timed: Callable[..., None]
) -> None:
    def sleep(self: Restore) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_sleep(30)")

    timed(20, "count")
    monkeypatch.setattr(Restore, "preview", sleep)
    page = restorer.get(url("restore"))
    assert "could not be counted" in text(page)
    assert 'name="typed"' in page.content.decode()


def test_the_restore_page_mentions_a_live_worker(restorer: Client) -> None:
    worker()
    assert "A worker is alive: it restores Redis by itself" in text(restorer.get(url("restore")))
