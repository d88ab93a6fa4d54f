"""The pages before a database that is locked, or that takes no writes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.apps import apps
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.urls import reverse

from django_delayq import pause_queue
from django_delayq.console.admin import panels
from django_delayq.console.statements import answering_within
from django_delayq.models import Message
from django_delayq.recurring import Schedule, create_schedule
from tests.support.transactions import lock_table, unfinished

from . import samples
from .asking import ACTIONS, GIVEN, NEEDED, answer, ask, select
from .conftest import logged_in

pytestmark = pytest.mark.django_db(transaction=True)

NO_WRITES = "The database takes no writes"
TOO_SLOW = "The database did not answer in time"
PAGES = [
    *(samples.admin_url(f"{name}_changelist") for name in ("message", "queue", "worker", *samples.CONSOLE)),
    samples.admin_url("queue_pause", "default"),
    samples.admin_url("queue_detail", "default"),
    samples.admin_url("queue_resume", "default"),
    samples.admin_url("health_restore"),
    samples.admin_url("topics_detail", samples.TOPIC),
    f"{samples.admin_url('limits_override')}?name=queue+default",
    *(reverse(f"admin:delayq_recurring_schedule_{view}") for view in ("changelist", "add")),
]


@pytest.fixture
def boss() -> Client:
    return logged_in(User.objects.create_superuser("boss"))


def tables() -> list[str]:
    found = [apps.get_app_config(name).get_models() for name in ("delayq", "delayq_console", "delayq_recurring")]
    known = {model._meta.db_table for models in found for model in models if model._meta.managed}
    return sorted(known & set(connection.introspection.table_names()))


@pytest.mark.postgresql("locks tables")
@pytest.mark.parametrize("address", [*PAGES, "message", "operation", "schedule", "ask"])
def test_a_page_waits_for_no_lock(boss: Client, timed: Callable[..., None], address: str) -> None:
    message, operation = samples.scheduled(), samples.operation()
    schedule = create_schedule("s", samples.TOPIC, every="1h")
    pause_queue("default")
    urls = {
        "message": samples.change_url(message),
        "operation": samples.admin_url("operation_change", operation.pk),
        "schedule": reverse("admin:delayq_recurring_schedule_change", args=[schedule.pk]),
    }
    boss.get(samples.admin_url("limits_changelist"))
    panels.forget()
    timed(50)
    names = ", ".join(tables())
    with unfinished(lambda: lock_table(names)):
        page = ask(boss, "cancel", message) if address == "ask" else boss.get(urls.get(address, address))
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM pg_locks WHERE mode = 'AccessExclusiveLock' AND granted")
            assert cursor.fetchone()[0], "the page was there when the lock was gone"
    text = samples.without_tags(page.content.decode())
    assert page.status_code in (200, 503)
    if page.status_code == 503:
        assert TOO_SLOW in text


@pytest.mark.postgresql("locks tables")
def test_numbers_in_the_navigation_that_cannot_be_read_stay_and_say_how_old_they_are(
    boss: Client, timed: Callable[..., None]
) -> None:
    samples.worker()
    url, number = samples.admin_url("auditevent_changelist"), r'<em class="dq-count"([^>]*)>1</em>'
    boss.get(url)
    assert re.findall(number, boss.get(url).content.decode()) == [""]
    panels.forget()
    timed(50)
    with unfinished(lambda: lock_table("delayq_worker")):
        [old] = re.findall(number, boss.get(url).content.decode())
    assert old.startswith(' title="as it was at ')


def test_a_panel_for_which_a_page_had_no_time_is_read_by_the_next_page(db: None) -> None:
    with answering_within(0):
        assert "Could not load" in panels.load("number", samples.DB, int).problem
    assert panels.load("number", samples.DB, int).value == 0


@contextmanager
def no_writes() -> Iterator[None]:
    """Have the database refuse what writes."""
    setting = {
        "postgresql": "SET default_transaction_read_only = {}",
        "sqlite": "PRAGMA query_only = {}",
    }[connection.vendor]
    with connection.cursor() as cursor:
        cursor.execute(setting.format("on"))
    try:
        yield
    finally:
        with connection.cursor() as cursor:
            cursor.execute(setting.format("off"))


@pytest.mark.postgresql("tells that it takes no writes")
@pytest.mark.parametrize("address", [*PAGES, "message", "operation"])
def test_every_page_says_that_the_database_takes_no_writes(boss: Client, address: str) -> None:
    urls = {
        "message": samples.change_url(samples.scheduled()),
        "operation": samples.admin_url("operation_change", samples.operation().pk),
    }
    url = urls.get(address, address)
    assert NO_WRITES not in samples.text(boss.get(url))
    panels.forget()
    with no_writes():
        assert NO_WRITES in samples.text(boss.get(url))


def answered(response: Any) -> None:
    assert response.status_code == 503
    assert f"{NO_WRITES}: nothing was done." in samples.without_tags(response.content.decode())


def test_an_action_on_a_schedule_without_writes_is_answered(boss: Client) -> None:
    create_schedule("s", samples.TOPIC, every="1h")
    with no_writes():
        given = {"action": "pause", "_selected_action": ["s"], "index": "0", "confirmed": "1"}
        answered(boss.post(reverse("admin:delayq_recurring_schedule_changelist"), given))
    assert not Schedule.objects.get().paused


@pytest.mark.parametrize("action", ACTIONS)
def test_an_action_without_writes_is_answered(boss: Client, action: str) -> None:
    message = NEEDED[action]()
    asked = select(boss, action, message)
    before = samples.record()
    with no_writes():
        answered(answer(boss, action, asked, **GIVEN.get(action, {})))
    assert samples.record() == before


@pytest.mark.parametrize(
    "view",
    [
        "queue_pause",
        "queue_resume",
        "health_check",
        "operation_stop",
        "message_reveal",
        "message_export",
        "message_restore",
    ],
)
def test_every_other_post_without_writes_is_answered(boss: Client, view: str, redis_client: Any) -> None:
    message, operation = samples.scheduled(), samples.operation()
    samples.fill()
    pause_queue("default")
    rows: dict[str, Any] = {"queue": "default", "operation": operation.pk, "message": message.pk}
    given = [rows[name] for name in rows if view.startswith(name) and view != "message_export"]
    with no_writes():
        answered(boss.post(samples.admin_url(view, *given), {"format": "csv", "reason": "so"}))
    assert Message.objects.get().state == "scheduled"


def test_a_repeat_without_writes_is_answered(boss: Client) -> None:
    message = samples.dead()
    with no_writes():
        answered(boss.post(samples.admin_url("message_repeat", message.pk), {"nonce": "one"}))
    assert Message.objects.get() == message


def test_a_restore_without_writes_is_answered(boss: Client) -> None:
    asked = boss.get(reverse("admin:delayq_console_health_restore"))
    given = {"overdue": "run", "typed": asked.context["confirm"].expected, "reason": "so"}
    with no_writes():
        answered(boss.post(reverse("admin:delayq_console_health_restore"), given))
