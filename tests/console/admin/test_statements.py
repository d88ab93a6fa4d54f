"""How much the pages ask of the database on a day on which all happens at once that they can tell."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.contrib import admin
from django.test import Client
from django.urls import reverse

from django_delayq.console.admin import panels
from tests.support import bad_day
from tests.support.statements import count_statements

from . import samples

pytestmark = pytest.mark.django_db(transaction=True)

MOST = 25


def addresses() -> list[str]:
    """Return the addresses of the pages, some in their variants."""
    message = bad_day.happen()
    registered = [model._meta for model in admin.site._registry if model._meta.app_label.startswith("delayq")]
    lists = [reverse(f"admin:{meta.app_label}_{meta.model_name}_changelist") for meta in registered]
    now, failures, topics = (samples.admin_url(f"{name}_changelist") for name in ("dashboard", "deadletters", "topics"))
    return [
        *lists,
        *(f"{now}?window={window}" for window in ("day", "week")),
        *(f"{topics}?order={order}&window=month" for order in ("slower", "failing")),
        *(f"{reverse(samples.LIST)}?{query}" for query in ("state=all", "state=dead")),
        f"{failures}?window=month",
        samples.change_url(message),
        samples.admin_url("topics_detail", "pay.close"),
        samples.admin_url("topics_detail", "push.send"),
        samples.admin_url("queue_detail", "webhooks"),
        samples.admin_url("queue_detail", "emails"),
        reverse("admin:delayq_recurring_schedule_change", args=["report-0"]),
    ]


@pytest.mark.postgresql("SQLite has a statement for each table of limits")
@pytest.mark.usefixtures("puts_are_flushed", "overrides_forgotten")
def test_no_page_asks_more_than_25_statements_on_a_bad_day(boss: Client, queue_limits: Callable[..., None]) -> None:
    queue_limits(**bad_day.LIMITS)
    pages = addresses()
    numbers = {page: _asked(boss, page) for page in pages}
    assert {page: number for page, number in numbers.items() if number > MOST} == {}
    assert len(boss.get(pages[0]).context["rows"]) > 4


def _asked(who: Client, page: str) -> int:
    def show() -> None:
        assert who.get(page).status_code == 200, page

    panels.forget()
    return count_statements(show, frames=False)
