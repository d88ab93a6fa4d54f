"""The clock of the web server may be wrong: pages and actions go by the record's clock."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.test import Client
from django.urls import reverse

from django_delayq.core import in_tests
from django_delayq.core.clock import ceil_tenth
from django_delayq.record.reads import now

from . import samples
from .asking import answer, ask_for_search, confirm, work_off

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _slow_web_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the clock of this process be an hour slow."""
    true = ceil_tenth(now(samples.DB)) + timedelta(hours=1)
    monkeypatch.setattr(in_tests, "clock", lambda: true)


def test_an_action_on_what_is_overdue_finds_what_the_list_shows(chief: Client) -> None:
    (late,) = samples.late(samples.scheduled(), seconds=600)
    assert samples.listed(chief, q="is:overdue") == [late.pk]
    assert "overdue by 10 m" in samples.text(chief.get(reverse(samples.LIST)))
    answer(chief, "cancel", ask_for_search(chief, "cancel", "is:overdue"))
    assert work_off().outcomes == {"cancelled": 1}


def test_a_delay_counts_from_the_time_of_the_record(operator: Client) -> None:
    message = samples.scheduled(delay="1d")
    confirm(operator, "reschedule", message, delay="5m")
    assert samples.fresh(message).due_at == now(samples.DB) + timedelta(minutes=5)


def test_a_worker_is_as_alive_on_its_page_as_in_the_list(viewer: Client) -> None:
    samples.worker("w", seen=3)
    assert "w alive" in samples.text(viewer.get(samples.admin_url("worker_change", "w")))
