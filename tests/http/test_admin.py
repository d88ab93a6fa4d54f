"""The page of tokens: what it shows, what it writes, and who may."""

from __future__ import annotations

import html
import re
import shlex
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.apps import apps
from django.contrib import admin
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import include, path, reverse
from django.utils import timezone

from django_delayq import handler
from django_delayq.http import tokens
from django_delayq.http.models import Token
from tests.console.admin import samples
from tests.console.conftest import timed
from tests.http.conftest import Wire

# A fixture of the tests of the console.
__all__ = ["timed"]

pytestmark = pytest.mark.django_db

# The admin and the door, for the tests that want both.
urlpatterns = [path("admin/", admin.site.urls), path("", include("django_delayq.http.urls"))]

LIST = "admin:delayq_http_token_changelist"
ADD = "admin:delayq_http_token_add"
FORM = {
    "namespace": "ns1",
    "rights": ["publish", "consume"],
    "description": "Go",
    "reads": "5",
    "interval": "3600",
    "lasts": "never",
}


def client_with(*permissions: str, name: str = "anna") -> Client:
    user = User.objects.create_user(name, is_staff=True)
    user.user_permissions.set(
        Permission.objects.filter(content_type__app_label="delayq_http", codename__in=permissions)
    )
    client = Client()
    client.force_login(user)
    return client


@pytest.fixture(autouse=True)
def _no_page_gives_up_on_a_busy_machine(timed: Callable[..., None]) -> None:
    timed(60_000)


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
    of_token = text(client.get(page(token)))
    offered = {"add": reverse(ADD) in shown, "delete": page(token, "delete") in of_token}
    offered["change"] = 'name="reads"' in of_token
    posted = {
        "add": client.post(reverse(ADD), FORM).status_code,
        "change": client.post(page(token), {"reads": "5"}).status_code,
        "delete": client.post(page(token, "delete"), {"post": "yes"}).status_code,
    }
    assert {word for word, status in posted.items() if status != 403} == {allowed} - {"view"}
    assert {word for word, is_offered in offered.items() if is_offered} == {allowed} - {"view"}


@pytest.mark.console
def test_the_list_is_a_page_of_the_console_with_a_button_for_what_is_allowed(chief: Client) -> None:
    token, _text = tokens.make("ns1", ["publish", "consume"], description="the Go service")
    tokens.limit(token, 100, None, 10)
    shown = text(chief.get(reverse(LIST)))
    assert 'class="dq-nav"' in shown
    told = samples.without_tags(shown)
    row = "publish to and consume from the queues of ns1 valid never expires never used Limit 100 reads in 10 s"
    for words in (f"the Go service {token.beginning}…", row):
        assert words in told
    urls = {reverse(ADD), page(token), page(token, "delete")}
    assert {url for url in urls if f'"{url}"' in shown} == urls
    viewer = text(client_with("view_token", name="eva").get(reverse(LIST)))
    assert {url for url in urls if f'"{url}"' in viewer} == {page(token)}


@pytest.mark.console
def test_the_list_begins_with_what_expires_and_marks_it(chief: Client) -> None:
    for days in (None, 30, 3, -1):
        tokens.make(f"ns{days}", lasts=None if days is None else timedelta(days=days, minutes=1))
    told = " ".join(samples.table_rows(text(chief.get(reverse(LIST)))))
    assert re.findall(r"of (ns(?:-?\d+|None))", told) == ["ns-1", "ns3", "ns30", "nsNone"]
    assert len(re.findall("expired", told)) == 1
    assert re.findall(r"expires in \d+ \w+", told) == ["expires in 3 d"]
    assert "No tokens match." in text(chief.get(reverse(LIST), {"q": "nobody"}))


def used(namespace: str, **ago: float) -> Token:
    """A token that was last used this time ago; that was never used, if no time is given."""
    token, _text = tokens.make(namespace)
    if ago:
        Token.objects.filter(pk=token.pk).update(used_at=timezone.now() - timedelta(**ago))
    return token


def listed(client: Client, query: str = "") -> list[str]:
    """Return the namespaces of the tokens that the list shows at an address."""
    found = samples.table_rows(text(client.get(reverse(LIST) + query)))
    return [names[0] for row in found if (names := re.findall(r"\bns-\w+", row))]


@pytest.mark.console
def test_the_list_tells_when_tokens_were_used_and_sorts_by_it(chief: Client) -> None:
    for name, ago in (("now", {"seconds": 9}), ("lately", {"minutes": 7}), ("ago", {"days": 100})):
        used(f"ns-{name}", **ago)
    used("ns-never")
    shown = text(chief.get(reverse(LIST)))
    rows = samples.table_rows(shown)
    for name, told in (("now", "just now"), ("lately", "7 m ago"), ("ago", "100 d ago"), ("never", "never used")):
        assert [told in row for row in rows if f"ns-{name}" in row] == [True]
    (order,) = re.findall(r'<a href="([^"]+)">Last used</a>', shown)
    assert listed(chief, order) == ["ns-never", "ns-ago", "ns-lately", "ns-now"]
    by_use = text(chief.get(reverse(LIST) + order))
    assert re.findall(r'aria-sort="(\w+)"><a href="[^"]+">(.*?)</a>', by_use) == [("ascending", "Last used")]
    (order,) = re.findall(r'<a href="([^"]+)">Last used</a>', by_use)
    assert listed(chief, order) == ["ns-now", "ns-lately", "ns-ago", "ns-never"]


@pytest.mark.console
def test_the_list_is_filtered_by_state_and_counts_each(chief: Client) -> None:
    used("ns-now", seconds=9)
    used("ns-ago", days=100)
    used("ns-never")
    for days in (3, -1):
        tokens.make(f"ns-{'soon' if days > 0 else 'over'}", lasts=timedelta(days=days))
    chips = re.findall(r'<a class="dq-chip" href="(\?state=[^"]*)"[^>]*>([^<]*)</a>', text(chief.get(reverse(LIST))))
    assert {label: listed(chief, url) for url, label in chips} == {
        "valid (4)": ["ns-soon", "ns-ago", "ns-never", "ns-now"],
        "expires within a week (1)": ["ns-soon"],
        "expired (1)": ["ns-over"],
        "expired but in use (0)": [],
        "never used (3)": ["ns-over", "ns-soon", "ns-never"],
        "unused for 90 days (1)": ["ns-ago"],
    }


@pytest.mark.console
def test_a_token_that_ends_is_renewed_in_a_form_that_is_filled(chief: Client) -> None:
    token, _text = tokens.make("ns1", ["publish", "consume"], lasts=timedelta(days=3), description="Go & more")
    tokens.limit(token, 5, None, 3600)
    (url,) = re.findall(r'<a class="dq-button" href="([^"]+)">Renew…</a>', text(chief.get(reverse(LIST))))
    form = text(chief.get(html.unescape(url)))
    found = dict(re.findall(r'name="(\w+)" value="([^"]+)"', form))
    names = ("namespace", "description", "reads", "interval")
    assert [found[name] for name in names] == ["ns1", "Go &amp; more", "5", "3600"]
    assert re.findall(r'value="(\w+)" id="id_rights_\d" checked', form) == ["publish", "consume"]


@pytest.mark.console
def test_who_revokes_is_told_that_the_token_is_used(chief: Client) -> None:
    told = [text(chief.get(page(used("ns1", **ago), "delete"))) for ago in ({"hours": 3}, {"days": 100})]
    assert ["A program uses it: last used 3 h ago." in shown for shown in told] == [True, False]
    assert "100 d ago" in told[1]


@pytest.mark.console
def test_ticked_tokens_are_revoked_after_a_question(chief: Client) -> None:
    made = [used(f"ns-{name}", days=9) for name in ("a", "b", "c")]
    chosen = {"action": "delete_selected", "_selected_action": [token.pk for token in made[:2]]}
    shown = text(chief.post(reverse(LIST), {**chosen, "index": "0"}))
    assert 'class="dq-nav"' in shown
    assert "Revoke these tokens?" in shown
    assert len(re.findall("9 d ago", shown)) == 2
    assert Token.objects.count() == 3
    fields = re.findall(r'name="(\w+)" value="(\w+)"', shown)
    sent = {name: [value for field, value in fields if field == name] for name, _value in fields}
    assert sent["_selected_action"] == [str(token.pk) for token in made[:2]]
    chief.post(reverse(LIST), sent)
    assert listed(chief) == ["ns-c"]


@pytest.mark.console
def test_who_may_see_the_audit_sees_who_made_a_token(chief: Client) -> None:
    chief.post(reverse(ADD), FORM)
    addresses = (reverse(LIST), page(Token.objects.get()))
    audit = reverse("admin:delayq_console_auditevent_changelist")
    assert "anna" not in " ".join(samples.table_rows(text(chief.get(reverse(LIST)))))
    assert [audit in text(chief.get(address)) for address in addresses] == [False, False]
    User.objects.create_superuser("boss")
    boss = Client()
    boss.force_login(User.objects.get(username="boss"))
    assert "anna" in " ".join(samples.table_rows(text(boss.get(reverse(LIST)))))
    # Its navigation has the audit, too.
    for address in addresses:
        links = re.findall(f'href="({audit}[?]q=[^"]+)"', text(boss.get(address)))
        assert links
        assert all(f"{Token.objects.get()}" in text(boss.get(html.unescape(url))) for url in links)


class MessagesElsewhere:
    """Keeps messages and the console in a database of their own, and tokens with the rest of the project."""

    def db_for_read(self, model: Any, **hints: Any) -> str:
        return "other" if model._meta.app_label in ("delayq", "delayq_console") else "default"

    db_for_write = db_for_read


@pytest.mark.console
@pytest.mark.django_db(databases=["default", "other"])
def test_the_audit_of_a_token_is_where_messages_are(chief: Client, settings: Any) -> None:
    settings.DATABASE_ROUTERS = [MessagesElsewhere()]
    chief.post(reverse(ADD), FORM)
    token = Token.objects.using("default").get()
    chief.post(page(token), {"reads": "7"})
    chief.post(page(token, "delete"), {"post": "yes"})
    told = [action for _actor, action, _target in events()]
    assert told == ["token add", "token limit", "token delete"]


@pytest.mark.parametrize(("rights", "queue"), [("publish", "by-handler"), ("consume", "QUEUE")])
def test_the_command_names_a_queue_that_the_token_may_use(
    chief: Client, settings: Any, rights: str, queue: str
) -> None:
    settings.ROOT_URLCONF = __name__

    @handler("ns1.by-handler")
    def receive(message: Any) -> None: ...

    # The wire takes no name with a dot in it, and consumers take from pulled queues alone.
    settings.DELAYQ = {**settings.DELAYQ, "PULL_QUEUES": {"ns1.or.ders": {}, "other.pulled": {}}}
    made = text(chief.post(reverse(ADD), {**FORM, "rights": [rights]}))
    assert f"http://testserver/api/ns1/{queue}&quot;" in made


def test_a_list_without_tokens_says_what_to_do(chief: Client) -> None:
    shown = text(chief.get(reverse(LIST)))
    assert reverse(ADD) in shown


@pytest.mark.console
def test_a_list_without_tokens_says_what_they_are_for(chief: Client) -> None:
    shown = samples.without_tags(text(chief.get(reverse(LIST))))
    assert "No program gets in by HTTP yet Make the first token…" in shown
    assert "curl -X PUT" in shown


def verdict(client: Client) -> tuple[str, list[str]]:
    """Return the sentence at the top of the list, and the namespaces to which its button leads."""
    shown = text(client.get(reverse(LIST)))
    ((told, url),) = re.findall(
        r'<li class="dq-thing [\w-]+">\s*<div><b>(.*?)</b>.*?(?:href="([^"]*)".*?)?</li>', shown, re.DOTALL
    )
    return told, listed(client, url) if url else []


@pytest.mark.console
def test_the_list_begins_with_how_many_work_and_leads_to_what_wants_attention(chief: Client) -> None:
    used("ns-now", seconds=9)
    assert verdict(chief) == ("1 token works. ", [])
    used("ns-ago", days=100)
    assert verdict(chief) == ("2 tokens work. 1 unused for 90 days", ["ns-ago"])
    tokens.make("ns-soon", lasts=timedelta(days=3))
    attention = "1 expires within a week, 1 unused for 90 days, 1 never used"
    assert verdict(chief) == (f"3 tokens work. {attention}", ["ns-soon"])
    Token.objects.filter(pk=used("ns-over", hours=1).pk).update(expires_at=timezone.now() - timedelta(hours=2))
    assert verdict(chief) == (f"3 tokens work. 1 expired but in use, {attention}", ["ns-over"])


def test_a_new_token_expires_unless_somebody_chooses_never(chief: Client) -> None:
    offered = re.findall(r'<option value="(\w+)"( selected)?>([^<]+)</option>', text(chief.get(reverse(ADD))))
    assert [(value, bool(chosen)) for value, chosen, _label in offered] == [
        *(("7", False), ("30", False), ("90", True), ("365", False), ("never", False))
    ]
    day = timezone.localdate() + timedelta(days=90)
    assert [label for _value, chosen, label in offered if chosen] == [f"in 90 days, on {day}"]
    assert "errorlist" in text(chief.post(reverse(ADD), {**FORM, "lasts": ""}))
    for lasts in ("90", "never"):
        chief.post(reverse(ADD), {**FORM, "lasts": lasts})
    until, never = Token.objects.order_by("pk").values_list("expires_at", flat=True)
    assert never is None
    assert until is not None
    assert timedelta(days=89) < until - timezone.now() <= timedelta(days=90)


@pytest.mark.parametrize("rights", ["publish", "consume", "manage"])
@pytest.mark.parametrize("namespace", ["ns1", "nobody"])
def test_a_new_token_comes_with_a_command_that_uses_it(
    wire: Wire, chief: Client, settings: Any, namespace: str, rights: str
) -> None:
    settings.ROOT_URLCONF = __name__
    made = text(chief.post(reverse(ADD), {**FORM, "namespace": namespace, "rights": [rights]}))
    (command,) = re.findall(r"<pre>(curl .*?)</pre>", made)
    words = shlex.split(html.unescape(command))
    if namespace == "nobody" and rights != "manage":
        assert words[3] == "http://testserver/api/nobody/QUEUE"
        assert "in the place of QUEUE" in made
        return
    token, method = words[2].removeprefix("X-Token: "), "PUT" if "PUT" in words else "GET"
    status, _content = wire(method, words[3].removeprefix("http://testserver"), words[-1].encode(), X_Token=token)
    # Nothing is there to be taken.
    assert status == {"publish": 201, "consume": 404, "manage": 200}[rights]
    settings.ROOT_URLCONF = "testproject.urls"
    assert "http://127.0.0.1:7777/" in text(chief.post(reverse(ADD), {**FORM, "rights": [rights]}))


@pytest.mark.console
def test_every_page_of_a_token_is_one_of_the_console(chief: Client) -> None:
    token, _text = tokens.make("ns1")
    for shown in (chief.get(reverse(ADD)), chief.get(page(token)), chief.get(page(token, "delete"))):
        assert 'class="dq-nav"' in text(shown)
    made = text(chief.post(reverse(ADD), FORM))
    assert 'class="dq-nav"' in made
    assert "data-dq-copy" in made


def test_a_token_that_has_expired_already_is_not_made(chief: Client) -> None:
    assert "errorlist" in text(chief.post(reverse(ADD), {**FORM, "expires_at": "2026-01-01T10:00"}))
    assert not Token.objects.exists()
    for never in ("9999-12-31T23:59", "2150-01-01T10:00"):
        assert "100 years" in text(chief.post(reverse(ADD), {**FORM, "expires_at": never}))
    assert not Token.objects.exists()
    chief.post(reverse(ADD), {**FORM, "expires_at": "2100-01-01T10:00"})
    assert Token.objects.get().expires_at is not None


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
