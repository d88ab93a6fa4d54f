"""The restore page: its preview, its confirmation and its operation."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.db import connection, connections
from django.test import Client
from django.urls import reverse

from django_delayq.console.admin import health_page
from django_delayq.console.models import AuditEvent, Operation, OperationState
from django_delayq.core.states import State
from django_delayq.models import Message, Transition
from django_delayq.record import transitions
from django_delayq.restore.engine import Restore
from tests.support.commands import due_tenths, held
from tests.support.transactions import unfinished, waits_for_a_lock
from tests.support.workers import PATIENCE, eventually

from . import samples
from .asking import work_off
from .samples import DB, many, said, scheduled, table_rows, text, worker

pytestmark = pytest.mark.django_db(transaction=True)

URL = "admin:delayq_console_health_restore"
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
    page = restorer.get(reverse(URL))
    # Scheduled, due later, in Redis, missing, overdue, oldest overdue, running.
    assert rows(page) == ["default 2 1 0 1 0 – 0", "mail 2 0 0 2 2 1 h 0", "all 4 1 0 3 2 1 h 0"]
    assert "2 overdue messages start at once." in text(page)
    assert "No worker is alive" in text(page)

    only_mail = {"queues": ["mail"], "overdue": "spread", "spread": "10m"}
    page = restorer.get(reverse(URL), only_mail)
    assert rows(page) == ["mail 2 0 0 2 2 1 h 0", "all 2 0 0 2 2 1 h 0"]
    assert "2 overdue messages get new due times, evenly over 10 m." in text(page)
    for policy, what in (("dead", "are given up"), ("cancel", "are cancelled")):
        assert f"2 overdue messages {what}" in text(restorer.get(reverse(URL), {"overdue": policy}))
    [gone] = late(queue="mail")
    Message._base_manager.filter(pk=gone.pk).update(expires_at=gone.due_at)
    for more, number in (({}, 3), ({"no_expired": "on"}, 2)):
        assert f"{number} overdue messages get new" in text(restorer.get(reverse(URL), {**only_mail, **more}))


def test_a_restore_is_done_by_a_worker(restorer: Client, redis_client: redis.Redis) -> None:
    soon, (overdue,) = scheduled(delay="1m"), late()
    redis_client.flushall()
    answer = restorer.post(reverse(URL), {**YES, "reason": "it was flushed"}, follow=True)
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
    before = transitions.now(DB)
    messages, others = late(4, queue="mail"), late(2)
    page = restorer.get(reverse(URL), {"queues": ["mail"], "overdue": "spread", "spread": "100s"}).content.decode()
    hidden = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"[^>]*>', page)
    given = {name: value for name, value in hidden if name != "csrfmiddlewaretoken"}
    assert given == {"queues": "mail", "overdue": "spread", "spread": "100s", "no_expired": "False"}
    restorer.post(reverse(URL), {**given, "typed": "restore"})
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
    restorer.post(reverse(URL), {"overdue": policy, "typed": "restore"})
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
    answer = restorer.post(reverse(URL), given)
    assert answer.status_code == 200
    assert 'class="errorlist' in answer.content.decode()
    assert not Operation.objects.exists()


def test_the_name_of_the_environment_confirms_a_restore(restorer: Client, settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "CONSOLE": {"ENVIRONMENT": "production"}}
    assert "Type production to confirm" in text(restorer.get(reverse(URL)))
    restorer.post(reverse(URL), YES)
    assert not Operation.objects.exists()
    restorer.post(reverse(URL), {**YES, "typed": "production"})
    assert Operation.objects.exists()


def test_a_second_restore_is_refused_and_led_to_the_first(restorer: Client) -> None:
    restorer.post(reverse(URL), YES)
    first = Operation.objects.get()
    answer = restorer.post(reverse(URL), YES, follow=True)
    text_ = f"Restore #{first.pk} is under way already, started by user:rosa: nothing was done."
    assert said(answer)[-1] == text_
    assert answer.redirect_chain[-1][0].endswith(f"/{first.pk}/change/")
    assert Operation.objects.count() == 1
    page = restorer.get(reverse(URL))
    assert f"Restore #{first.pk} is under way" in text(page)
    assert 'name="typed"' not in page.content.decode()
    work_off()
    restorer.post(reverse(URL), YES)
    assert Operation.objects.count() == 2


@pytest.mark.postgresql("lets two transactions write at once")
@pytest.mark.parametrize("page", ["health_restore", "health_check"])
def test_of_two_that_are_started_at_once_the_second_is_refused(restorer: Client, page: str) -> None:
    def start() -> None:
        restorer.post(samples.admin_url(page), YES)

    def second() -> None:
        start()
        connections.close_all()

    with ThreadPoolExecutor(1) as pool, unfinished(start) as go:
        running = pool.submit(second)
        eventually(lambda: running.done() or waits_for_a_lock(), "the second start")
        go.set()
        running.result(PATIENCE)
    assert Operation.objects.count() == 1


@pytest.mark.postgresql("ends a statement by itself")
def test_a_preview_that_takes_too_long_says_so(restorer: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(self: Restore) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_sleep(30)")

    monkeypatch.setattr(health_page, "PREVIEW_TIMEOUT_MS", 20)
    monkeypatch.setattr(Restore, "preview", sleep)
    page = restorer.get(reverse(URL))
    assert "could not be counted" in text(page)
    assert 'name="typed"' in page.content.decode()


def test_the_restore_page_mentions_a_live_worker(restorer: Client) -> None:
    worker()
    assert "A worker is alive: it restores Redis by itself" in text(restorer.get(reverse(URL)))
