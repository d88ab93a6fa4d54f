"""Permissions: every action and every address, for viewers, operators, chiefs and anonymous visitors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import redis
from django.contrib import admin
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse

from django_delayq import pause_queue
from django_delayq.api import limiting
from django_delayq.console import audit
from django_delayq.console.models import Acknowledgement, AuditEvent, Operation, OperationState
from django_delayq.console.operations import lifecycle
from django_delayq.console.operations.work import Scope
from django_delayq.core.actors import acting_as
from django_delayq.core.states import State
from django_delayq.core.verbs import VERBS
from django_delayq.models import LimitOverride, Message, Queue

from . import samples
from .asking import ACTIONS, GIVEN, NEEDED, UNSENT, answer, ask, ask_for_search, confirm, select, started
from .conftest import ACTION_PERMISSIONS, logged_in, person

pytestmark = pytest.mark.django_db


def everything() -> list[Any]:
    """Return all rows that an action could have changed or written."""
    return [
        *samples.record(),
        *Operation.objects.order_by("pk").values(),
        *AuditEvent.objects.order_by("pk").values(),
        *Queue.objects.order_by("pk").values(),
        *LimitOverride.objects.order_by("pk").values(),
        *Acknowledgement.objects.order_by("pk").values(),
    ]


def stopped() -> Operation:
    operation = samples.operation()
    assert lifecycle.stop(operation)
    return operation


def operation_url(name: str, operation: Operation) -> str:
    return reverse(f"admin:delayq_console_operation_{name}", args=[operation.pk])


# --- actions ----------------------------------------------------------------------------------------------------------


def refuses(client: Client, action: str, token: str, *messages: Message) -> None:
    """Assert that the pages offer this user no such action, and take none, whatever is sent."""
    before = everything()
    page = client.get(reverse(samples.LIST) + "?state=all").content.decode()
    assert f'value="{action}_selected"' not in page
    for across in (False, True):
        assert "token" not in (select(client, action, *messages, across=across).context or {})
    assert ask(client, action, *messages).status_code == 403
    assert ask_for_search(client, action, "is:live").status_code == 403
    given = {"token": token, "reason": "so", "typed": "1", **GIVEN.get(action, {})}
    assert client.post(samples.action_url(action), given).status_code == 403
    # Nobody is logged in there.
    for data in ({"ids": samples.ids(*messages)}, given):
        assert Client().post(samples.action_url(action), data).status_code == 302
    for message in messages:
        assert samples.action_url(action) not in client.get(samples.change_url(message)).content.decode()
    assert everything() == before


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("is_read_only", [False, True], ids=["a viewer", "anybody in a read-only admin"])
def test_nobody_without_permissions_can_choose_an_action_or_confirm_one(
    viewer: Client, chief: Client, settings: Any, action: str, is_read_only: bool
) -> None:
    messages = list(samples.one_of_each().values())
    token = ask(chief, action, *messages).context["token"]
    if is_read_only:
        settings.DELAYQ = {**settings.DELAYQ, "CONSOLE": {"READ_ONLY": True}}
    client = chief if is_read_only else viewer
    refuses(client, action, token, *messages)
    assert "_selected" not in client.get(reverse(samples.LIST) + "?state=all").content.decode()


@pytest.mark.parametrize("action", ACTIONS)
def test_each_action_needs_its_permission(chief: Client, action: str) -> None:
    message = NEEDED[action]()
    of_action = {VERBS[name].codename for name in ACTIONS}
    needed = VERBS[action].codename
    but_this = logged_in(person("all-but", "view_message", "bulk_message", *(of_action - {needed})))
    only_this = logged_in(person("only", "view_message", needed))
    refuses(but_this, action, ask(chief, action, message).context["token"], message)
    before = everything()
    page = only_this.get(reverse(samples.LIST) + "?state=all").content.decode()
    # A move needs the permission to reschedule.
    offered = [name for name in ACTIONS if VERBS[name].codename == needed]
    assert [name for name in ACTIONS if f'value="{name}_selected"' in page] == offered
    assert "delete_selected" not in page
    asked = ask(only_this, action, message)
    assert answer(only_this, action, asked, follow=False, **GIVEN.get(action, {})).status_code == 302
    assert everything() != before


def test_an_action_that_the_project_adds_to_its_site_is_offered_and_done(viewer: Client) -> None:
    seen: list[int] = []

    def look(model_admin: Any, request: Any, queryset: Any) -> None:
        seen.extend(queryset.values_list("pk", flat=True))

    message = samples.scheduled()
    admin.site.add_action(look, "look")
    try:
        assert 'value="look"' in viewer.get(reverse(samples.LIST)).content.decode()
        viewer.post(reverse(samples.LIST), {"action": "look", "_selected_action": [message.pk], "index": "0"})
    finally:
        admin.site.disable_action("look")
    assert seen == [message.pk]


@pytest.mark.parametrize("action", ACTIONS)
def test_an_action_on_a_whole_search_needs_the_bulk_permission(operator: Client, chief: Client, action: str) -> None:
    message = NEEDED[action]()
    before = everything()
    assert select(operator, action, message, across=True).status_code in (302, 403)
    assert ask_for_search(operator, action, "").status_code == 403
    token = ask_for_search(chief, action, "").context["token"]
    chief_user, bulk = User.objects.get(username="cora"), Permission.objects.get(codename="bulk_message")
    chief_user.user_permissions.remove(bulk)
    given = {"token": token, "reason": "so", "typed": "1", **GIVEN.get(action, {})}
    assert chief.post(samples.action_url(action), given).status_code == 403
    assert everything() == before


def test_many_messages_need_bulk_permission(
    operator: Client, chief: Client, monkeypatch: pytest.MonkeyPatch, tuned: Callable[..., None]
) -> None:
    tuned(at_once=1)
    monkeypatch.setattr("django_delayq.console.admin.message_list.MessageAdmin.list_per_page", 1)
    messages = [samples.scheduled(), samples.scheduled()]
    pages = [client.get(reverse(samples.LIST)).content.decode() for client in (chief, operator)]
    assert ['class="question' in page for page in pages] == [True, False]
    assert ask(operator, "cancel", *messages).status_code == 403
    assert select(operator, "cancel", *messages).status_code == 403
    confirm(operator, "cancel", messages[0])
    assert [samples.fresh(message).state for message in messages] == [State.CANCELLED, State.SCHEDULED]


def test_an_action_without_the_view_permission_is_refused(db: None) -> None:
    message = samples.scheduled()
    assert ask(logged_in(person("nora", *ACTION_PERMISSIONS)), "cancel", message).status_code == 403


def test_a_post_from_elsewhere_is_refused_and_one_from_our_pages_is_not(chief: Client) -> None:
    strict = logged_in(User.objects.get(username="cora"), enforce_csrf_checks=True)
    message = samples.scheduled()
    token = ask(chief, "cancel", message).context["token"]
    before = everything()
    assert select(strict, "cancel", message).status_code == 403
    assert ask(strict, "cancel", message).status_code == 403
    assert ask_for_search(strict, "cancel", "").status_code == 403
    assert strict.post(samples.action_url("cancel"), {"token": token}).status_code == 403
    assert everything() == before
    csrf = str(strict.get(samples.change_url(message)).context["csrf_token"])
    asked = ask(strict, "cancel", message, csrfmiddlewaretoken=csrf)
    assert 'name="csrfmiddlewaretoken"' in asked.content.decode()
    assert answer(strict, "cancel", asked, csrfmiddlewaretoken=csrf).status_code == 200
    assert samples.fresh(message).state == State.CANCELLED


@pytest.mark.parametrize("action", ACTIONS)
def test_asking_and_looking_never_change_anything(chief: Client, action: str) -> None:
    messages = list(samples.one_of_each().values())
    before = everything()
    for across in (False, True):
        select(chief, action, *messages, across=across)
    token = ask(chief, action, *messages).context["token"]
    search_token = ask_for_search(chief, action, "").context["token"]
    for given in ({"ids": samples.ids(*messages)}, {"token": token}, {"search": ""}, {"token": search_token}):
        asked = {**given, "reason": "so", "typed": "6", "delay": "5m"}
        assert chief.get(samples.action_url(action), asked).status_code == 302
    chosen: dict[str, Any] = {"action": f"{action}_selected", "_selected_action": [str(m.pk) for m in messages]}
    chief.get(reverse(samples.LIST), chosen)
    for message in messages:
        assert chief.get(samples.change_url(message), {"token": token}).status_code == 200
    assert everything() == before


# --- forms ------------------------------------------------------------------------------------------------------------


class Form(NamedTuple):
    """A form: the page that offers it, where it is sent, and with what."""

    page: str
    url: str
    given: dict[str, str] = {}


def of_message(name: str, message: Message, **given: str) -> Form:
    return Form(samples.change_url(message), samples.admin_url(f"message_{name}", message.pk), given)


def of_queue(name: str) -> Form:
    samples.scheduled(queue="mail")
    if name == "resume":
        pause_queue("mail")
    return Form(samples.admin_url("queue_changelist"), samples.admin_url(f"queue_{name}", "mail"))


def of_health(name: str, **given: str) -> Form:
    samples.late(samples.scheduled())
    return Form(samples.admin_url("health_changelist"), samples.admin_url(f"health_{name}"), given)


def of_error(**given: str) -> Form:
    error = samples.dead().error
    page, url = (samples.admin_url(f"deadletters_{name}") for name in ("changelist", "acknowledge"))
    return Form(page, url, {"error": error, "note": "known", **given})


def of_limit(form: str, **given: str) -> Form:
    if form == "reset":
        limiting.override(samples.DB, LIMIT, limit=1)
    return Form(samples.admin_url("limits_changelist"), samples.admin_url(f"limits_{form}"), given)


def ended() -> Operation:
    operation = samples.operation()
    Operation.objects.update(state=OperationState.DONE)
    return operation


def of_operation(name: str, operation: Operation) -> Form:
    return Form(operation_url("change", operation), operation_url(name, operation))


CSV = {"format": "csv"}
LIMIT = "topic t.ok"
# What each form does to the record or Redis needs this permission, beside those to look.
CHANGING: dict[str, tuple[str, Callable[[], Form]]] = {
    "pause": ("pause_queue", lambda: of_queue("pause")),
    "resume": ("pause_queue", lambda: of_queue("resume")),
    "check": ("restore_message", lambda: of_health("check")),
    "restore": ("restore_message", lambda: of_health("restore", overdue="dead", typed="restore")),
    "put back": ("restore_message", lambda: of_message("restore", *samples.late(samples.scheduled()))),
    "repeat": ("requeue_message", lambda: of_message("repeat", samples.dead(), nonce="one")),
    "stop": ("cancel_message", lambda: of_operation("stop", samples.operation())),
    "go on": ("cancel_message", lambda: of_operation("resume", stopped())),
    "undo": ("requeue_message", lambda: of_operation("undo", ended())),
    "acknowledge": ("requeue_message", of_error),
    "override": ("override_limit", lambda: of_limit("override", topic="t.ok", limit="2")),
    "reset": ("override_limit", lambda: of_limit("reset", name=LIMIT)),
}
FORMS = {
    **CHANGING,
    "reveal": ("reveal_message", lambda: of_message("reveal", samples.scheduled({"api_key": "leak"}))),
    "export": ("export_message", lambda: Form(reverse(samples.LIST), samples.admin_url("message_export"), CSV)),
}
LOOKING = {"view_message", "view_operation"}
EVERY = {
    *(*LOOKING, "view_auditevent", "bulk_message", "purge_message", *ACTION_PERMISSIONS),
    *(permission for permission, _make in FORMS.values()),
}

asks_redis = pytest.mark.usefixtures("redis_client")


def able(permission: str) -> User:
    return person("able", *LOOKING, "bulk_message", permission)


@asks_redis
@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_offered_to_and_taken_from_those_who_have_its_permission(form: str) -> None:
    permission, make = FORMS[form]
    page, url, given = make()
    taken, others, blind = (
        logged_in(user)
        for user in (able(permission), person("others", *EVERY - {permission}), person("blind", *EVERY - LOOKING))
    )
    before = everything()
    assert url in taken.get(page).content.decode()
    assert url not in others.get(page).content.decode()
    for client in (others, blind):
        assert client.get(url, given).status_code in (302, 403)
        assert client.post(url, given).status_code == 403
    assert Client().post(url, given).status_code == 302
    assert everything() == before
    taken.post(url, given).getvalue()
    assert everything() != before


@pytest.mark.parametrize("form", FORMS)
def test_a_form_needs_its_token_and_is_not_sent_by_a_get(redis_client: redis.Redis, form: str) -> None:
    permission, make = FORMS[form]
    _page, url, given = make()
    user = able(permission)
    before = everything(), redis_client.keys("*")
    assert logged_in(user, enforce_csrf_checks=True).post(url, given).status_code == 403
    assert logged_in(user).get(url, given).status_code in (200, 302)
    assert (everything(), redis_client.keys("*")) == before


@asks_redis
@pytest.mark.parametrize("form", CHANGING)
def test_a_read_only_admin_offers_and_takes_no_form_that_changes_anything(settings: Any, form: str) -> None:
    permission, make = CHANGING[form]
    page, url, given = make()
    user = logged_in(able(permission))
    before = everything()
    settings.DELAYQ = {**settings.DELAYQ, "CONSOLE": {"READ_ONLY": True}}
    assert url not in user.get(page).content.decode()
    assert user.post(url, given).status_code == 403
    assert everything() == before


@asks_redis
@pytest.mark.parametrize("form", [*FORMS, "selection"])
def test_a_form_that_is_sent_after_the_end_of_the_session_is_told_to_be_lost(boss: Client, form: str) -> None:
    if form == "selection":
        chosen = {"action": "cancel_selected", "_selected_action": str(samples.scheduled().pk), "index": "0"}
        url, given = reverse(samples.LIST) + "?state=all", chosen
    else:
        _page, url, given = FORMS[form][1]()
    before = everything()
    login = Client().post(url, given, follow=True)
    assert samples.said(boss.get(login.context["next"], follow=True)) == [UNSENT]
    assert everything() == before


# --- pages ------------------------------------------------------------------------------------------------------------

OF_MESSAGES = ("dashboard", "message", "deadletters", "queue", "limits", "worker", "health")
PAGES = {"auditevent": "view_auditevent", "operation": "view_operation", **dict.fromkeys(OF_MESSAGES, "view_message")}


@pytest.mark.parametrize("page", PAGES)
def test_each_page_has_its_permission(db: None, page: str) -> None:
    url, permission = samples.admin_url(f"{page}_changelist"), PAGES[page]
    assert logged_in(person("with", permission)).get(url).status_code == 200
    assert logged_in(person("without", *EVERY - {permission})).get(url).status_code == 403
    assert Client().get(url).status_code == 302


def test_the_page_of_an_operation_has_the_permission_of_their_list(viewer: Client) -> None:
    url = operation_url("change", samples.operation())
    assert viewer.get(url).status_code == 403
    assert logged_in(person("with", "view_operation")).get(url).status_code == 200


@pytest.mark.parametrize("page", PAGES)
def test_nobody_adds_changes_or_deletes_anything_by_hand(boss: Client, page: str) -> None:
    url = samples.admin_url(f"{page}_changelist")
    event = audit.record(samples.DB, "cancel", "something")
    rows: dict[str, Any] = {"message": samples.scheduled(), "operation": samples.operation(), "auditevent": event}
    pk = rows[page].pk if page in rows else samples.worker().pk
    before = everything()
    given = {"state": "done", "action": "purge", "delete": "yes", "post": "yes", "_save": "1"}
    boss.post(url, given)
    boss.post(f"{url}{pk}/change/", given)
    assert 'name="_save"' not in boss.get(f"{url}{pk}/change/").content.decode()
    for name in ("add/", f"{pk}/delete/"):
        assert boss.get(url + name).status_code in (302, 403, 404)
        assert boss.post(url + name, given).status_code in (302, 403, 404)
    assert everything() == before


def test_the_user_who_started_an_operation_may_stop_it_without_the_permission(chief: Client) -> None:
    samples.scheduled()
    operation = started(chief, "cancel", "is:live")
    user = User.objects.get(username="cora")
    user.user_permissions.set(Permission.objects.filter(codename="view_operation"))
    assert chief.post(operation_url("stop", operation)).status_code == 302
    assert Operation.objects.get().state == "stopped"
    # Resuming it needs the permission to do it.
    assert chief.post(operation_url("resume", operation)).status_code == 403


def test_an_operation_that_resumes_a_queue_takes_the_permission_to_resume_it(db: None) -> None:
    pause_queue("mail")
    given, scope = {"spread": 600.0, "resume": "mail"}, Scope(ids=(samples.scheduled(queue="mail").pk,))
    with acting_as("user:somebody"):
        operation = lifecycle.start(samples.DB, "run", scope.to_json(), given, described="the due messages", reason="")
    needed = {"run_message", "bulk_message", "pause_queue"}
    for lacking in sorted(needed):
        lame = logged_in(person(f"no {lacking}", *EVERY - {lacking}))
        assert lame.post(operation_url("stop", operation)).status_code == 403
    assert lifecycle.stop(operation)
    before = everything()
    for lacking in sorted(needed):
        lame = logged_in(User.objects.get(username=f"no {lacking}"))
        assert operation_url("resume", operation) not in lame.get(operation_url("change", operation)).content.decode()
        assert lame.post(operation_url("resume", operation)).status_code == 403
    assert everything() == before
    assert logged_in(person("able", *LOOKING, *needed)).post(operation_url("resume", operation)).status_code == 302
    assert Operation.objects.get().state == "queued"


def test_groups_are_offered_to_who_may_act(viewer: Client, operator: Client, chief: Client, settings: Any) -> None:
    samples.dead()
    url = reverse("admin:delayq_console_deadletters_changelist")

    def offered(client: Client) -> list[str]:
        page = client.get(url).content.decode()
        return [action for action in ACTIONS if samples.action_url(action) in page]

    assert (offered(viewer), offered(operator), offered(chief)) == ([], [], ["requeue", "purge"])
    settings.DELAYQ = {**settings.DELAYQ, "CONSOLE": {"READ_ONLY": True}}
    assert offered(chief) == []


@pytest.mark.parametrize("page", ["dashboard", "deadletters", "health", "queue"])
def test_no_page_has_a_form_that_shows_what_is_masked(viewer: Client, page: str) -> None:
    pk = samples.scheduled({"password": "geheim"}).pk
    Queue.objects.create(name=str(pk))
    response = viewer.get(samples.admin_url(f"{page}_change", pk))
    assert response.status_code == 404
    assert "geheim" not in response.content.decode()
