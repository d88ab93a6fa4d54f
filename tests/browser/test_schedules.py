"""An operator makes a schedule in a browser, sees its times and runs it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from django_delayq.core.states import State
from django_delayq.models import Message
from tests.support.processes import Start
from tests.support.record_of import wait_until

from .chromium import expect, inaccessible
from .conftest import Open

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("configure")]

LIST = "/admin/delayq_recurring/schedule/"


def act(page: Any, action: str) -> None:
    """Choose an action of the list for the only schedule."""
    page.locator(".action-select").check()
    page.get_by_role("button", name=action).click()


def states() -> list[str]:
    return list(Message.objects.order_by("pk").values_list("state", flat=True))


def test_a_schedule_is_made_and_run(open_page: Open, start: Start) -> None:
    page = open_page(LIST)
    page.get_by_role("link", name="Add schedule…").click()
    page.get_by_label("Name:").fill("nightly")
    page.get_by_label("Topic:").fill("t.ok")
    page.get_by_label("Cron expression:").fill("30 25 * * *")
    page.get_by_label("Time zone:").fill("Europe/Berlin")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.locator(".errorlist")).to_contain_text("not a cron expression")
    assert inaccessible(page) == []
    page.get_by_label("Cron expression:").fill("30 2 * * *")
    page.get_by_role("button", name="Save and continue editing").click()

    expect(page.locator(".field-state")).to_contain_text("active")
    times = re.findall(
        r"\d{4}-\d\d-\d\d 02:30:00 CES?T|\d{4}-\d\d-\d\d 03:00:00 CEST", page.inner_text(".field-next_times")
    )
    assert len(set(times)) == 10
    assert inaccessible(page) == []
    assert states() == ["scheduled"]
    page.get_by_role("link", name=re.compile(r"^#\d+$")).click()
    expect(page.locator("body")).to_contain_text("nightly")

    page.goto(LIST)
    act(page, "Pause…")
    expect(page.get_by_role("group", name="Pause")).to_be_visible()
    assert inaccessible(page) == []
    page.goto(LIST)
    row = page.locator(".dq-rows tbody tr")
    expect(row).to_contain_text("30 2 * * * (Europe/Berlin)")
    expect(row).to_contain_text(times[0])
    assert inaccessible(page) == []
    start("--threads", "2")
    act(page, "Run now…")
    expect(page.locator("#content")).to_contain_text(times[0])
    assert inaccessible(page) == []
    page.get_by_role("button", name="Run now").click()
    expect(page.locator(".messagelist")).to_contain_text("1 message is due now")
    wait_until(Message.objects.latest("pk"), State.CONSUMED)
    assert states() == ["scheduled", "consumed"]
