"""The export of a search: complete, in order, redacted, safe to open in a spreadsheet, and recorded in the audit."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse

from django_delayq.console.models import AuditEvent
from django_delayq.models import Message
from tests.support.rows import unguarded

from . import samples
from .conftest import logged_in, person

pytestmark = pytest.mark.django_db

URL = "admin:delayq_message_export"


@pytest.fixture
def exporter(db: None) -> Client:
    return logged_in(person("ella", "view_message", "export_message"))


def post(client: Client, form: str = "jsonl", **query: Any) -> Any:
    return client.post(reverse(URL), {"format": form, **query})


def body(response: Any) -> str:
    assert response.status_code == 200
    return b"".join(response.streaming_content).decode()


def lines(response: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in body(response).splitlines()]


def cells(response: Any) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(body(response), newline="")))


def test_messages_come_in_the_order_of_the_list(exporter: Client, tuned: Callable[..., None]) -> None:
    tuned(export_batch=2)
    made = [samples.scheduled({"n": n}, delay=f"{9 - n}h", key=f"k-{n}") for n in range(5)]
    samples.scheduled(queue="other")
    samples.dead()
    found = lines(post(exporter, q="key:k-*"))
    assert [row["id"] for row in found] == [message.pk for message in reversed(made)]
    assert found[0]["payload"] == {"n": 4}
    assert found[0]["due_at"] == made[4].due_at.isoformat()
    assert found[0]["state"] == "scheduled"
    assert [row["id"] for row in lines(post(exporter, q="key:k-*", state="dead"))] == []
    begun = post(exporter, q="key:k-*")
    # It is purged meanwhile.
    unguarded(Message).filter(pk=made[0].pk).delete()
    assert [row["id"] for row in lines(begun)] == [message.pk for message in reversed(made[1:])]


def test_a_tab_is_exported_as_it_is_shown(exporter: Client) -> None:
    made = samples.one_of_each()
    for state, message in made.items():
        assert [row["id"] for row in lines(post(exporter, state=state))] == [message.pk]
    assert len(lines(post(exporter, state="all"))) == len(made)


def test_csv_holds_the_same(exporter: Client) -> None:
    message = samples.scheduled({"a": [1, 2**63 - 1]}, key="a,b", headers={"h": 1})
    rows = cells(post(exporter, "csv"))
    assert len(rows) == 1
    assert rows[0]["id"] == str(message.pk)
    assert rows[0]["key"] == "a,b"
    assert rows[0]["finished_at"] == ""
    assert json.loads(rows[0]["payload"]) == {"a": [1, 2**63 - 1]}
    assert json.loads(rows[0]["headers"]) == {"h": 1}


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "\n"])
def test_no_cell_is_a_formula_to_a_spreadsheet(exporter: Client, start: str) -> None:
    formula = f"{start}1+cmd|'/c calc'!A0"
    unguarded(Message).filter(pk=samples.dead(priority=-1).pk).update(error=formula)
    [row] = cells(post(exporter, "csv", state="dead"))
    assert (row["error"], row["priority"], row["topic"]) == (f"'{formula}", "-1", samples.TOPIC)


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_secret_values_are_masked_without_the_permission_to_reveal(exporter: Client, form: str) -> None:
    samples.scheduled({"api_key": "leak-1", "user": [{"password": "leak-2"}]}, headers={"Authorization": "leak-3"})
    samples.succeeded(samples.running(), '{"token": "leak-4"}')
    assert "leak" not in body(post(exporter, form, state="all"))
    trusted = logged_in(person("rita", "view_message", "export_message", "reveal_message"))
    shown = body(post(trusted, form, state="all"))
    assert all(f"leak-{number}" in shown for number in (1, 2, 3, 4))
    assert "unmasked" not in AuditEvent.objects.earliest("id").target
    assert "unmasked" in AuditEvent.objects.latest("id").target


def test_an_export_is_written_to_the_audit_and_never_kept(exporter: Client) -> None:
    samples.scheduled({"secret": "leak"}, key="a")
    response = post(exporter, "csv", q="key:a")
    body(response)
    event = AuditEvent.objects.values_list("actor", "user_key", "action", "target", "outcomes").get()
    key = str(User.objects.get(username="ella").pk)
    assert event == ("user:ella", key, "export", "key is “a”, as csv", {"exported": 1})
    assert "no-store" in response["Cache-Control"]
    assert response["Content-Disposition"].startswith('attachment; filename="messages-')
    assert response["Content-Type"] == "text/csv; charset=utf-8"


@pytest.mark.parametrize(("form", "lines_beside"), [("csv", 2), ("jsonl", 1)])
def test_the_last_line_of_a_capped_export_says_that_there_are_more(
    exporter: Client, tuned: Callable[..., None], form: str, lines_beside: int
) -> None:
    tuned(exported=3)
    samples.many(4)
    found = body(post(exporter, form)).splitlines()
    assert len(found) == 3 + lines_beside
    assert "Only the first 3 messages: there are more." in found[-1]
    assert AuditEvent.objects.get().outcomes == {"exported": 3}
    tuned(exported=4)
    assert "Only the first" not in body(post(exporter, form))


def test_the_list_has_an_export_form_for_users_with_the_permission(exporter: Client) -> None:
    html = exporter.get(reverse(samples.LIST), {"q": 'key:"a b"', "state": "dead"}).content.decode()
    assert f'action="{reverse(URL)}"' in html
    assert 'name="q" value="key:&quot;a b&quot;"' in html
    assert '<input type="hidden" name="state" value="dead">' in html


def test_a_format_that_there_is_not_exports_nothing(exporter: Client) -> None:
    assert post(exporter, "xls").status_code == 400
    assert not AuditEvent.objects.exists()


@pytest.mark.parametrize("q", ["due:x", "payload.password:a"])
def test_a_search_that_is_refused_exports_nothing(exporter: Client, q: str) -> None:
    samples.scheduled({"password": "a"})
    response = exporter.post(reverse(URL), {"format": "csv", "q": q}, follow=True)
    assert response.redirect_chain[0][0].startswith(reverse(samples.LIST) + "?state=")
    assert len(samples.said(response)) == 1
    assert not AuditEvent.objects.exists()


@pytest.mark.usefixtures("slow_searches")
def test_a_search_without_an_index_exports_nothing(exporter: Client) -> None:
    response = exporter.post(reverse(URL), {"format": "csv"}, follow=True)
    assert samples.said(response) == ["The search took too long: nothing was exported. Narrow it."]
