"""The page of tokens: what it shows, what it writes, and who may."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.apps import apps
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse

from django_delayq.http import tokens
from django_delayq.http.models import Token
from tests.http.conftest import Wire

pytestmark = pytest.mark.django_db

LIST = "admin:delayq_http_token_changelist"
ADD = "admin:delayq_http_token_add"
FORM = {"namespace": "ns1", "rights": ["publish", "consume"], "description": "Go", "reads": "5", "interval": "3600"}


def client_with(*permissions: str, name: str = "anna") -> Client:
    user = User.objects.create_user(name, is_staff=True)
    user.user_permissions.set(
        Permission.objects.filter(content_type__app_label="delayq_http", codename__in=permissions)
    )
    client = Client()
    client.force_login(user)
    return client


@pytest.fixture
def chief() -> Client:
    return client_with(*(f"{word}_token" for word in ("view", "add", "change", "delete")))


def page(token: Token, view: str = "change") -> str:
    return reverse(f"admin:delayq_http_token_{view}", args=[token.pk])


def text(response: Any) -> str:
    assert response.status_code == 200
    return str(response.content.decode())


def events() -> list[tuple[str, str, str]]:
    """The audit of tokens by users: who, what, and to which."""
    found = apps.get_model("delayq_console", "AuditEvent").objects.filter(actor__startswith="user:").order_by("pk")
    return list(found.values_list("actor", "action", "target"))


@pytest.mark.console
def test_a_token_is_made_and_shown_once(chief: Client) -> None:
    made = chief.post(reverse(ADD), FORM)
    (shown,) = re.findall(r"<code>([^<]+)</code>", text(made))
    assert "no-store" in made["Cache-Control"]
    token = Token.objects.get()
    assert (token.digest, token.beginning) == (tokens.digest_of(shown), shown[:8])
    assert (token.rights, token.expires_at, token.limits) == ("publish,consume", None, "5 reads in 3600 s")
    for url in (reverse(LIST), page(token), page(token, "history"), page(token, "delete")):
        told = text(chief.get(url))
        assert shown not in told
        assert token.digest not in told
    assert shown not in str(chief.session.items()) + str(chief.cookies)
    assert events() == [("user:anna", "token add", f"{shown[:8]}… of ns1")]


def test_a_token_that_is_made_here_lets_in(wire: Wire, chief: Client, settings: Any) -> None:
    settings.ROOT_URLCONF = "testproject.urls"
    (shown,) = re.findall(r"<code>([^<]+)</code>", text(chief.post(reverse(ADD), {**FORM, "writes": "1"})))
    settings.ROOT_URLCONF = "tests.http.urls"
    assert [wire("PUT", "/api/ns1/q1", b"x", X_Token=shown)[0] for _time in range(2)] == [201, 429]


WRONG: list[dict[str, Any]] = [
    *({"namespace": "a b"}, {"rights": []}, {"rights": ["all"]}),
    *({"reads": "0"}, {"interval": "-1"}, {"reads": "9" * 12}),
]


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_is_refused_in_the_form(chief: Client, wrong: dict[str, Any]) -> None:
    assert "errorlist" in text(chief.post(reverse(ADD), {**FORM, **wrong}))
    assert not Token.objects.exists()


@pytest.mark.console
def test_a_limit_is_changed_and_nothing_else(chief: Client) -> None:
    token, _text = tokens.make("ns1")
    chief.post(page(token), {**FORM, "writes": "7", "interval": "", "namespace": "other"})
    token.refresh_from_db()
    assert (token.namespace, token.rights, token.limits) == (
        "ns1",
        "publish,consume,manage",
        "5 reads, 7 writes in 1 s",
    )
    chief.post(page(token), {"reads": "", "writes": "", "interval": ""})
    token.refresh_from_db()
    assert token.limits == ""
    assert events() == [("user:anna", "token limit", str(token))] * 2


@pytest.mark.console
def test_tokens_are_deleted_one_by_one_and_several(chief: Client) -> None:
    made = [tokens.make(f"ns{number}")[0] for number in range(3)]
    chief.post(page(made[0], "delete"), {"post": "yes"})
    chosen = {"action": "delete_selected", "_selected_action": [token.pk for token in made[1:]], "post": "yes"}
    chief.post(reverse(LIST), chosen)
    assert not Token.objects.exists()
    assert sorted(events()) == sorted(("user:anna", "token delete", str(token)) for token in made)


@pytest.mark.parametrize("allowed", ["view", "add", "change", "delete"])
def test_each_action_needs_its_permission_when_it_is_posted(allowed: str) -> None:
    token, _text = tokens.make("ns1")
    client = client_with("view_token", f"{allowed}_token")
    shown = text(client.get(reverse(LIST)))
    offered = {"add": "addlink" in shown, "delete": "delete_selected" in shown}
    offered["change"] = 'name="reads"' in text(client.get(page(token)))
    posted = {
        "add": client.post(reverse(ADD), FORM).status_code,
        "change": client.post(page(token), {"reads": "5"}).status_code,
        "delete": client.post(page(token, "delete"), {"post": "yes"}).status_code,
    }
    assert {word for word, status in posted.items() if status != 403} == {allowed} - {"view"}
    assert {word for word, is_offered in offered.items() if is_offered} == {allowed} - {"view"}


def test_without_a_permission_there_is_no_page() -> None:
    client = client_with()
    assert client.get(reverse(LIST)).status_code == 403
    assert Client().post(reverse(ADD), FORM).status_code == 302
    assert not Token.objects.exists()


def test_a_console_that_only_reads_changes_no_token(chief: Client, settings: Any) -> None:
    token, _text = tokens.make("ns1")
    settings.DELAYQ = {**settings.DELAYQ, "CONSOLE": {"READ_ONLY": True}}
    assert chief.post(reverse(ADD), FORM).status_code == 403
    assert chief.post(page(token), {"reads": "5"}).status_code == 403
    assert chief.post(page(token, "delete"), {"post": "yes"}).status_code == 403
    assert str(token.beginning) in text(chief.get(reverse(LIST)))
