"""The pages on an admin site that the project made itself."""

from __future__ import annotations

import re

import pytest
from django.test import Client

from django_delayq.core.states import State

from . import samples
from .conftest import logged_in, person

pytestmark = [pytest.mark.django_db, pytest.mark.urls("tests.console.admin.urls")]

LIST = "/backstage/delayq/message/"


def test_every_link_and_form_stays_on_its_site(boss: Client) -> None:
    message = samples.scheduled()
    pages = [
        boss.get(LIST),
        boss.get(f"{LIST}{message.pk}/change/"),
        boss.post(LIST, {"action": "cancel_selected", "_selected_action": [message.pk], "index": "0"}),
        boss.post(f"{LIST}action/reschedule/", {"ids": str(message.pk)}),
        boss.get("/backstage/delayq/worker/"),
    ]
    for page in pages:
        assert page.status_code == 200
        links = re.findall(r'(?:href|action|src)="(/[^"]*)', page.content.decode())
        # The empty address is that of "view site".
        assert {link.split("/")[1] for link in links} <= {"", "backstage", "static"}
        assert len(links) > 5


def test_the_way_back_leads_to_the_same_site(boss: Client) -> None:
    message = samples.scheduled()
    asked = boss.post(f"{LIST}action/cancel/", {"ids": str(message.pk)})
    response = boss.post(f"{LIST}action/cancel/", {"token": asked.context["token"]})
    assert response.headers["Location"] == f"{LIST}{message.pk}/change/"
    assert samples.fresh(message).state == State.CANCELLED
    response = boss.get(f"{LIST}action/cancel/")
    assert response.headers["Location"] == LIST


def test_the_front_page_shows_viewers_both_lists(db: None) -> None:
    page = samples.text(logged_in(person("vera", "view_message")).get("/admin/"))
    assert "Messages" in page
    assert "Workers" in page
    assert "Transition" not in page
