"""Cancel, reschedule, run now, requeue: who may, after which question, and what came of it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from django_delayq import transitions
from django_delayq.admin import steering
from django_delayq.models import Message, Transition
from django_delayq.states import State

from . import samples
from .conftest import STEER, logged_in, person

pytestmark = pytest.mark.django_db

VERBS = ("cancel", "reschedule", "run", "requeue")
YES = {"confirmed": "yes"}


def select(client: Client, verb: str, *messages: Message, across: bool = False, query: str = "?state=all") -> Any:
    """Choose an action in the list."""
    data = {
        "action": f"{verb}_selected",
        "_selected_action": [message.pk for message in messages],
        "select_across": "1" if across else "0",
        "index": "0",
    }
    return client.post(reverse(samples.LIST) + query, data)


def steer(client: Client, verb: str, *messages: Message, **data: Any) -> Any:
    return client.post(samples.steer_url(verb), {"ids": samples.ids(*messages), **data})


def confirm(client: Client, verb: str, *messages: Message, **data: Any) -> Any:
    """Say yes on the confirmation page of a selection, and go where it leads."""
    return client.post(
        samples.steer_url(verb), {"ids": samples.ids(*messages), "filters": "state=all", **YES, **data}, follow=True
    )


# --- who may ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("across", [False, True])
def test_a_viewer_can_neither_choose_an_action_nor_confirm_one(viewer: Client, verb: str, across: bool) -> None:
    messages = samples.one_of_each().values()
    before = samples.record()
    assert "_selected" not in samples.text(viewer.get(reverse(samples.LIST) + "?state=all"))
    response = select(viewer, verb, *messages, across=across)
    assert "forecast" not in (response.context or {})
    assert steer(viewer, verb, *messages).status_code == 403
    assert steer(viewer, verb, *messages, delay="5m", **YES).status_code == 403
    assert samples.record() == before


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_has_a_permission_of_its_own(db: None, verb: str) -> None:
    message = samples.dead() if verb == "requeue" else samples.scheduled()
    but_this = logged_in(person("all-but", "view_message", *(name for name in STEER if name != f"{verb}_message")))
    only_this = logged_in(person("only", "view_message", f"{verb}_message"))
    before = samples.record()
    assert steer(but_this, verb, message, delay="5m", **YES).status_code == 403
    assert f'value="{verb}_selected"' not in but_this.get(reverse(samples.LIST)).content.decode()
    assert samples.record() == before
    page = only_this.get(reverse(samples.LIST)).content.decode()
    assert [name for name in VERBS if f'value="{name}_selected"' in page] == [verb]
    assert "delete_selected" not in page
    given = {"delay": "5m"} if verb == "reschedule" else {}
    assert steer(only_this, verb, message, **given, **YES).status_code == 302
    assert samples.record() != before


def test_permission_to_act_without_permission_to_view_is_none(db: None) -> None:
    message = samples.scheduled()
    assert steer(logged_in(person("nora", *STEER)), "cancel", message, **YES).status_code == 403
    assert samples.fresh(message).state == State.SCHEDULED


def test_a_permission_lost_between_question_and_answer_is_lost(operator: Client) -> None:
    message = samples.scheduled()
    assert steer(operator, "cancel", message).status_code == 200
    permission = Permission.objects.get(codename="cancel_message")
    User.objects.get(username="otto").user_permissions.remove(permission)
    assert steer(operator, "cancel", message, **YES).status_code == 403
    assert samples.fresh(message).state == State.SCHEDULED


def test_nobody_acts_without_being_logged_in(client: Client) -> None:
    message = samples.scheduled()
    assert steer(client, "cancel", message, **YES).status_code == 302
    assert samples.fresh(message).state == State.SCHEDULED


def test_a_post_from_elsewhere_is_refused(operator: Client) -> None:
    strict = logged_in(User.objects.get(username="otto"), enforce_csrf_checks=True)
    message = samples.scheduled()
    before = samples.record()
    assert select(strict, "cancel", message).status_code == 403
    assert steer(strict, "cancel", message).status_code == 403
    assert steer(strict, "cancel", message, **YES).status_code == 403
    assert samples.record() == before


def test_the_buttons_and_the_question_carry_what_a_strict_site_asks_for(operator: Client) -> None:
    strict = logged_in(User.objects.get(username="otto"), enforce_csrf_checks=True)
    message = samples.scheduled()
    page = strict.get(samples.change_url(message))
    token = str(page.context["csrf_token"])
    question = steer(strict, "cancel", message, csrfmiddlewaretoken=token)
    assert 'name="csrfmiddlewaretoken"' in question.content.decode()
    assert steer(strict, "cancel", message, csrfmiddlewaretoken=token, **YES).status_code == 302
    assert samples.fresh(message).state == State.CANCELLED


# --- the question -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
def test_looking_never_changes_anything(operator: Client, verb: str) -> None:
    messages = samples.one_of_each().values()
    before = samples.record()
    asked = {"ids": samples.ids(*messages), "delay": "5m", **YES}
    assert operator.get(samples.steer_url(verb), asked).status_code == 302
    chosen: dict[str, Any] = {"action": f"{verb}_selected", "_selected_action": [str(m.pk) for m in messages]}
    # "action" is no filter: the list refuses it.
    assert operator.get(reverse(samples.LIST), chosen).status_code == 400
    for message in messages:
        assert operator.get(samples.change_url(message), asked).status_code == 200
    assert samples.record() == before


@pytest.mark.parametrize("verb", VERBS)
def test_choosing_an_action_changes_nothing_yet(operator: Client, verb: str) -> None:
    messages = samples.one_of_each().values()
    before = samples.record()
    assert select(operator, verb, *messages).status_code == 200
    assert steer(operator, verb, *messages).status_code == 200
    assert samples.record() == before


@pytest.mark.parametrize(
    ("verb", "expected"),
    [
        ("cancel", ["2 scheduled : will be cancelled", "1 running : will be asked to stop, no retry follows"]),
        ("reschedule", ["2 scheduled : will be moved to the new time", "1 running : unchanged"]),
        ("run", ["2 scheduled : will be due at once", "1 running : unchanged"]),
        ("requeue", ["2 scheduled : unchanged", "1 dead : will be scheduled again, due at once"]),
    ],
)
def test_the_question_says_what_will_happen_to_how_many(operator: Client, verb: str, expected: list[str]) -> None:
    messages = [*samples.one_of_each().values(), samples.scheduled()]
    page = samples.text(select(operator, verb, *messages))
    for sentence in [*expected, "1 consumed : unchanged"]:
        assert sentence in page


def test_the_question_says_so_when_there_is_nothing_to_do(operator: Client) -> None:
    response = select(operator, "cancel", samples.consumed())
    assert "There is nothing to do." in samples.text(response)
    assert 'name="confirmed"' not in response.content.decode()


def test_all_pages_means_what_the_filter_lets_through(operator: Client) -> None:
    due_soon = [samples.scheduled(delay="5m") for _number in range(60)]
    samples.scheduled(delay="5h")
    response = select(operator, "cancel", due_soon[0], across=True, query="?due=hour")
    assert response.context["forecast"][0].count == 60
    assert response.context["ids"] == samples.ids(*due_soon)
    assert "and 50 more" in samples.text(response)


def test_more_than_the_cap_is_refused_with_a_clear_word(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steering, "CAP", 3)
    messages = [samples.scheduled() for _number in range(4)]
    before = samples.record()
    response = operator.post(
        reverse(samples.LIST),
        {"action": "cancel_selected", "_selected_action": [messages[0].pk], "select_across": "1", "index": "0"},
        follow=True,
    )
    assert samples.said(response) == ["More than 3 messages are selected: nothing was done. Narrow the selection."]
    assert steer(operator, "cancel", *messages, **YES).status_code == 400
    assert samples.record() == before


@pytest.mark.parametrize("given", ["", "x", "1,,2", "-1", "1;2", "9" * 30, "٣"])
def test_what_is_not_a_list_of_ids_is_refused(operator: Client, given: str) -> None:
    assert operator.post(samples.steer_url("cancel"), {"ids": given, **YES}).status_code == 400


def test_there_are_no_other_verbs(operator: Client) -> None:
    message = samples.scheduled()
    assert steer(operator, "delete", message, **YES).status_code == 404


# --- what came of it --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "moved", "sentence"),
    [
        (
            "cancel",
            {State.SCHEDULED: State.CANCELLED},
            "Cancel, 6 messages: 1 cancelled, 1 requested (running), 4 too late.",
        ),
        ("reschedule", {}, "Reschedule, 6 messages: 1 rescheduled, 5 too late."),
        ("run", {}, "Run now, 6 messages: 1 rescheduled, 5 too late."),
        (
            "requeue",
            dict.fromkeys((State.DEAD, State.EXPIRED, State.CANCELLED), State.SCHEDULED),
            "Requeue, 6 messages: 3 requeued, 3 too late.",
        ),
    ],
)
def test_the_answer_is_true_for_each_state(
    operator: Client, verb: str, moved: dict[State, State], sentence: str
) -> None:
    made = samples.one_of_each()
    given = {"delay": "5m"} if verb == "reschedule" else {}
    response = confirm(operator, verb, *made.values(), **given)
    assert samples.said(response) == [sentence]
    after = {state: samples.fresh(message).state for state, message in made.items()}
    assert after == {state: moved.get(state, state) for state in made}


def test_a_cancel_of_what_runs_is_a_request(operator: Client) -> None:
    message = samples.running()
    confirm(operator, "cancel", message)
    assert samples.fresh(message).cancel_requested


def test_the_log_says_who_did_it_and_why(operator: Client) -> None:
    message = samples.scheduled()
    confirm(operator, "cancel", message, reason="customer refunded")
    last = Transition.objects.filter(message=message).latest("number")
    assert (last.actor, last.reason) == ("user:otto", "customer refunded")


def test_a_state_that_changed_after_the_question_is_told_as_it_is(operator: Client) -> None:
    message = samples.scheduled(delay=0)
    assert "1 scheduled" in samples.text(steer(operator, "cancel", message))
    samples.succeeded(samples.claimed(message))
    assert samples.said(confirm(operator, "cancel", message)) == ["Cancel, 1 message: 1 too late."]
    assert samples.fresh(message).state == State.CONSUMED


def test_a_delivery_that_died_without_a_word_is_not_denied(operator: Client) -> None:
    message = samples.running(lease=-1.0)
    assert transitions.reap(samples.DB, max_crashes=9, actor="test")
    said = samples.said(confirm(operator, "cancel", message))
    assert said == ["Cancel, 1 message: 1 cancelled, but an earlier delivery may have had its effect."]


def test_a_message_that_is_gone_is_told(operator: Client) -> None:
    gone, there = samples.scheduled(), samples.scheduled()
    Message.objects.filter(pk=gone.pk).delete()
    assert "1 : not found any more" in samples.text(steer(operator, "cancel", gone, there))
    assert samples.said(confirm(operator, "cancel", gone, there)) == ["Cancel, 2 messages: 1 cancelled, 1 not found."]


def test_a_requeue_does_not_take_the_key_of_a_live_message(operator: Client) -> None:
    message = samples.dead(key="order-1")
    samples.scheduled(key="order-1")
    assert samples.said(confirm(operator, "requeue", message)) == [
        "Requeue, 1 message: 1 not: a live message has its key."
    ]


def test_run_now_makes_it_due(operator: Client) -> None:
    message = samples.scheduled(delay="3d")
    confirm(operator, "run", message)
    assert samples.fresh(message).due_at <= transitions.now(samples.DB) + timedelta(milliseconds=1)


# --- reschedule -------------------------------------------------------------------------------------------------------


def test_a_message_moves_by_a_delay_from_now(operator: Client) -> None:
    message = samples.scheduled(delay="3d")
    confirm(operator, "reschedule", message, delay="15m")
    ahead = samples.fresh(message).due_at - transitions.now(samples.DB)
    assert timedelta(minutes=14) < ahead <= timedelta(minutes=15)


def test_a_new_time_is_read_in_the_current_time_zone(operator: Client, settings: Any) -> None:
    settings.TIME_ZONE = "Asia/Tokyo"
    message = samples.scheduled()
    due = timezone.localtime(timezone.now() + timedelta(days=2)).replace(microsecond=0)
    assert due.utcoffset() == timedelta(hours=9)
    assert "In the time zone Asia/Tokyo." in samples.text(steer(operator, "reschedule", message))
    confirm(operator, "reschedule", message, due=due.strftime("%Y-%m-%dT%H:%M:%S"))
    assert samples.fresh(message).due_at == due


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({}, "Give a new due time or a delay: one of the two."),
        ({"due": "2100-01-01T00:00", "delay": "5m"}, "Give a new due time or a delay: one of the two."),
        ({"delay": "soon"}, "not a duration"),
        ({"delay": "-5m"}, "not a duration"),
        ({"delay": "99999999d"}, "more than 100 years"),
        ({"due": "2001-01-01T00:00"}, "due is in the past"),
        ({"due": "9999-12-31T23:59:59"}, "more than 100 years"),
        ({"due": "tomorrow"}, "Enter a valid date/time."),
    ],
)
def test_an_impossible_time_is_told_in_the_form_and_changes_nothing(
    operator: Client, given: dict[str, str], complaint: str
) -> None:
    message = samples.scheduled()
    before = samples.record()
    response = confirm(operator, "reschedule", message, **given)
    assert complaint in samples.text(response)
    assert response.context["ids"] == samples.ids(message)
    assert response.context["filters"] == "state=all"
    assert samples.record() == before


# --- the way back -----------------------------------------------------------------------------------------------------


def test_the_way_back_leads_to_where_it_began(operator: Client) -> None:
    message = samples.scheduled()
    assert steer(operator, "run", message, **YES).url == samples.change_url(message)
    response = steer(operator, "run", message, filters="state=all&q=key%3Aa", **YES)
    assert response.url == reverse(samples.LIST) + "?state=all&q=key%3Aa"


@pytest.mark.parametrize("filters", ["//evil.example", "\r\nLocation: //evil.example", "https://evil.example/?a"])
def test_the_way_back_never_leads_elsewhere(operator: Client, filters: str) -> None:
    response = steer(operator, "run", samples.scheduled(), filters=filters, **YES)
    assert response.url.startswith(reverse(samples.LIST) + "?")
    assert "\n" not in response.url


def test_a_hostile_key_or_reason_is_text_and_never_markup(operator: Client) -> None:
    hostile = "<script>alert(1)</script>"
    message = samples.scheduled(key=hostile)
    confirm(operator, "cancel", message, reason=hostile)
    for page in (operator.get(samples.change_url(message)), operator.get(reverse(samples.LIST) + "?state=all")):
        assert "<script>alert" not in page.content.decode()
