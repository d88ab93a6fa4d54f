"""Actions on messages in the admin: their questions, their answers and their effects."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from html import unescape
from threading import Barrier
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
from django.contrib.auth.models import User
from django.core import signing
from django.db import connection, connections
from django.db.models import BooleanField, Q
from django.db.models.expressions import RawSQL
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from django_delayq import cancel_message, requeue_message, reschedule_message, run_message, schedule_messages
from django_delayq.api import actions as table
from django_delayq.console.admin import MessageAdmin, action_table, explanation
from django_delayq.console.id_lists import unpacked
from django_delayq.console.models import AuditEvent, Operation
from django_delayq.console.operations import work
from django_delayq.core.states import State
from django_delayq.core.verbs import VERBS
from django_delayq.models import Message, Transition
from django_delayq.models.messages import LogRow
from django_delayq.record import crashes, reads
from tests.support import referring
from tests.support.claims import needs_row_locks
from tests.support.rows import unguarded
from tests.support.transactions import unfinished
from tests.support.workers import PATIENCE

from . import samples
from .asking import ACTIONS, GIVEN, NEEDED, UNSENT, answer, ask, ask_for_search, confirm, select, started, worked_off

pytestmark = pytest.mark.django_db

# --- the question -----------------------------------------------------------------------------------------------------


@pytest.mark.postgresql("asks PostgreSQL for its plans")
def test_what_a_bulk_action_changes_is_found_along_an_index(chief: Client, tuned: Callable[..., None]) -> None:
    tuned(counted=10)
    samples.one_of_each()
    schedule_messages({"topic": "t.ok", "queue": "slow" if number % 10 == 0 else "other"} for number in range(3000))
    with connection.cursor() as cursor:
        # Or the server does that by itself at some moment, perhaps before these rows are there.
        cursor.execute("ANALYZE delayq_message")
    with CaptureQueriesContext(connection) as captured:
        answer(chief, "cancel", ask_for_search(chief, "cancel", "queue:slow"))
    reads = [query["sql"] for query in captured if "\"queue\" = 'slow'" in query["sql"]]
    counts = [sql for sql in reads if "COUNT" in sql and "MIN" in sql]
    freezes = [sql for sql in reads if "claimed_at" in sql and "created_at" in sql and sql.startswith("SELECT")]
    assert counts
    assert freezes
    with connection.cursor() as cursor:
        # What is in question is whether an index can be used. So few rows are not worth one.
        cursor.execute("SET enable_seqscan = off; SET enable_indexscan = off")
        try:
            for sql in counts + freezes:
                cursor.execute(f"EXPLAIN {sql}")
                assert "delayq_todo" in "\n".join(line for (line,) in cursor.fetchall())
        finally:
            cursor.execute("RESET ALL")


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("cancel", ["2 scheduled : will be cancelled", "1 running : will be asked to stop and not be retried"]),
        ("reschedule", ["2 scheduled : will be moved to the new time", "1 running : unchanged"]),
        ("run", ["2 scheduled : will be due at once", "1 running : unchanged"]),
        ("requeue", ["2 scheduled : unchanged", "1 dead : will be scheduled again"]),
        ("purge", ["2 scheduled : unchanged", "1 dead : will be deleted, with its log"]),
    ],
)
@pytest.mark.parametrize("across", [False, True])
def test_a_question_tells_what_becomes_of_how_many(
    chief: Client, action: str, expected: list[str], across: bool
) -> None:
    messages = [*samples.one_of_each().values(), samples.scheduled()]
    page = samples.text(select(chief, action, *messages, across=across))
    for sentence in [*expected, "1 consumed : " + ("will be deleted" if action == "purge" else "unchanged")]:
        assert sentence in page
    assert ("Messages: all messages" if across else "Messages: 7 selected messages") in page
    assert "Topics:" not in page


def test_the_question_names_the_topics_and_the_first_messages(chief: Client) -> None:
    schedule_messages([{"topic": f"t.{number % 3}", "delay": "1h"} for number in range(15)])
    page = samples.text(ask_for_search(chief, "cancel", "is:live"))
    assert "Topics: t.0 (5), t.1 (5), t.2 (5)" in page
    first = Message.objects.order_by("pk")[0]
    assert f"t.0 #{first.pk}" in page
    assert "and 5 more" in page
    assert "Messages: live" in page


def test_the_question_says_so_when_there_is_nothing_to_do(operator: Client) -> None:
    response = select(operator, "cancel", samples.consumed())
    assert "There is nothing to do." in samples.text(response)
    assert 'name="token"' not in response.content.decode()


def test_the_question_counts_exactly_whatever_the_list_shows(chief: Client, tuned: Callable[..., None]) -> None:
    tuned(counted=3, at_once=2)
    samples.many(5)
    asked = ask_for_search(chief, "cancel", "is:live")
    page = samples.text(asked)
    assert "5 scheduled : will be cancelled" in page
    assert "Counted exactly at" in page
    assert asked.context["form"].expected == "5"


@pytest.mark.postgresql("ends a statement by itself")
def test_what_cannot_be_counted_in_time_is_not_changed(
    chief: Client, monkeypatch: pytest.MonkeyPatch, timed: Callable[..., None]
) -> None:
    samples.scheduled()
    timed(20, "long", "page")
    slow = RawSQL("(SELECT true FROM pg_sleep(30))", (), output_field=BooleanField())
    condition = work.Scope.condition
    monkeypatch.setattr(work.Scope, "condition", lambda scope: condition(scope) & Q(slow))
    asked = ask_for_search(chief, "cancel", "is:live")
    page = samples.text(asked)
    assert "There are at least 0: not all could be counted within" in page
    assert 'name="token"' not in asked.content.decode()
    monkeypatch.undo()
    # A browser never sends this answer: the page had no form.
    answer(chief, "cancel", asked)
    assert not Operation.objects.exists()


@pytest.mark.postgresql("ends a statement by itself")
def test_a_question_that_had_no_time_to_count_all_tells_how_many_it_counted_and_counts_longer_if_asked(
    chief: Client, monkeypatch: pytest.MonkeyPatch, timed: Callable[..., None]
) -> None:
    samples.dead()
    samples.consumed()
    slow = "CASE WHEN delayq_message.state = 'consumed' THEN (SELECT true FROM pg_sleep(30)) ELSE true END"
    condition = work.Scope.condition
    with monkeypatch.context() as patched:
        is_slow = RawSQL(slow, (), output_field=BooleanField())
        patched.setattr(work.Scope, "condition", lambda scope: condition(scope) & Q(is_slow))
        timed(6000, "answer")
        asked = ask_for_search(chief, "purge", "is:finished")
    page = samples.text(asked)
    assert "1 dead : will be deleted" in page
    assert "? consumed : will be deleted" in page
    assert "There are at least 1: not all could be counted within 3 s" in page
    form = re.search(
        r'<input type="hidden" name="search" value="([^"]+)">.*?name="longer"', asked.content.decode(), re.S
    )
    assert form is not None
    asked = chief.post(samples.action_url("purge"), {"search": unescape(form[1]), "longer": "1"})
    assert asked.context["preview"].number == 2
    # A mistake in the answer does not make the count short again.
    asked = answer(chief, "purge", asked, typed="3", longer="1")
    assert "This is not 2." in samples.text(asked)
    assert 'name="longer"' in asked.content.decode()
    answer(chief, "purge", asked)
    worked_off()
    assert not Message.objects.exists()


def test_more_messages_than_an_operation_takes_are_refused(chief: Client, tuned: Callable[..., None]) -> None:
    samples.many(3)
    tuned(most_messages=2)
    asked = ask_for_search(chief, "cancel", "is:live")
    assert "An operation takes 2 messages at most." in samples.text(asked)
    assert 'name="token"' not in asked.content.decode()
    answer(chief, "cancel", asked)
    assert not Operation.objects.exists()


def test_selected_messages_that_have_left_the_tab_are_told(chief: Client) -> None:
    made = samples.many(3)
    cancel_message(made[0])
    asked = select(chief, "cancel", *made, query="?state=scheduled")
    assert asked.context["preview"].described == "3 selected messages"
    assert "1 cancelled : unchanged" in samples.text(asked)


def test_a_selection_on_a_page_that_is_gone_is_asked_about(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MessageAdmin, "list_per_page", 5)
    messages = samples.many(6)
    cancel_message(messages[0])
    confirmed = answer(operator, "cancel", select(operator, "cancel", messages[-1], query="?state=scheduled&p=2"))
    assert samples.said(confirmed) == ["Cancel, 1 message: 1 cancelled."]
    assert samples.fresh(messages[-1]).state == State.CANCELLED
    assert [message.pk for message in confirmed.context["cl"].result_list] == [one.pk for one in messages[1:-1]]


def test_all_pages_means_what_the_search_finds(chief: Client) -> None:
    due_soon = [samples.scheduled(delay="5m") for _number in range(6)]
    late = samples.scheduled(delay="5h")
    asked = select(chief, "cancel", due_soon[0], across=True, query="?state=live&q=due%3A%3C1h")
    assert asked.context["preview"].number == 6
    answer(chief, "cancel", asked)
    worked_off()
    assert {samples.fresh(message).state for message in due_soon} == {State.CANCELLED}
    assert samples.fresh(late).state == State.SCHEDULED


@pytest.mark.parametrize(("search", "problem"), [("due:sometime", "not a time"), ("payload.password:geheim", "masked")])
def test_a_search_that_is_refused_is_told(chief: Client, search: str, problem: str) -> None:
    message = samples.scheduled({"password": "geheim"})
    response = chief.post(samples.action_url("cancel"), {"search": search}, follow=True)
    assert problem in samples.said(response)[0]
    assert not Operation.objects.exists()
    assert samples.fresh(message).state == State.SCHEDULED


@pytest.mark.parametrize("given", ["", "x", "1,,2", "-1", "1;2", "9" * 30, "٣"])
def test_a_malformed_list_of_ids_is_refused_and_an_unknown_action_not_found(operator: Client, given: str) -> None:
    for action, status in (("cancel", 400), ("delete", 404)):
        assert operator.post(samples.action_url(action), {"ids": given}).status_code == status


def test_the_pages_have_every_action_of_the_table_with_an_effect_in_each_of_its_states() -> None:
    assert list(action_table.CONSOLE_ACTIONS) == list(table.ACTIONS) == list(ACTIONS)
    for name, shown in action_table.CONSOLE_ACTIONS.items():
        changing = {state for state in State if shown.effect_on(state) is not action_table.UNCHANGED}
        assert changing == table.ACTIONS[name].states


def test_the_audit_has_a_word_for_every_verb_that_it_may_name() -> None:
    # Nobody does "bulk" alone: it is a permission beside that of an action. A rehearsal changes nothing.
    assert VERBS.keys() - action_table.LABELS.keys() == {"bulk", "rehearse"}


# --- the guards -------------------------------------------------------------------------------------------------------


def test_more_than_one_message_needs_a_reason(operator: Client) -> None:
    messages = samples.many(2)
    response = confirm(operator, "cancel", *messages, reason="")
    assert "This field is required." in samples.text(response)
    assert {samples.fresh(message).state for message in messages} == {State.SCHEDULED}
    confirm(operator, "cancel", messages[0], reason="")
    assert samples.fresh(messages[0]).state == State.CANCELLED


def test_a_purge_always_needs_the_number(chief: Client) -> None:
    message = samples.consumed()
    assert "This is not 1." in samples.text(confirm(chief, "purge", message, typed="2"))
    assert Message.objects.filter(pk=message.pk).exists()
    response = answer(chief, "purge", ask(chief, "purge", message))
    assert response.redirect_chain[-1][0] == reverse(samples.LIST)
    assert samples.said(response) == ["Purge, 1 message: 1 purged."]
    assert not Message.objects.filter(pk=message.pk).exists()
    assert not Transition.objects.filter(message_id=message.pk).exists()


def test_many_messages_need_their_number_and_a_worker(chief: Client, tuned: Callable[..., None]) -> None:
    tuned(at_once=2)
    messages = samples.many(3)
    for typed in ("", "2", "cancel"):
        assert "Please correct the error below." in samples.text(confirm(chief, "cancel", *messages, typed=typed))
    assert not Operation.objects.exists()
    response = confirm(chief, "cancel", *messages, reason="too many", typed=" 3 ")
    operation = Operation.objects.get()
    assert samples.said(response) == [f"Operation #{operation.pk} is queued: a worker does it in batches."]
    assert response.redirect_chain[0][0] == reverse("admin:delayq_console_operation_change", args=[operation.pk])
    values = (operation.action, operation.state, operation.started_by, operation.reason, operation.described)
    assert values == ("cancel", "queued", "user:cora", "too many", "3 selected messages")
    assert samples.fresh(messages[0]).state == State.SCHEDULED
    worked_off()
    assert {samples.fresh(message).state for message in messages} == {State.CANCELLED}
    last = Transition.objects.filter(message=messages[0]).latest("number")
    assert (last.actor, last.reason) == ("user:cora", "too many")


def test_a_search_and_its_reason_outlast_the_end_of_the_session(chief: Client, boss: Client) -> None:
    message = samples.scheduled(key="order-1")
    query = "?state=all&q=key%3Aorder-1"
    asked = select(chief, "cancel", message, query=query)
    chief.logout()
    for response in (answer(chief, "cancel", asked), ask_for_search(chief, "cancel", "key:order-1")):
        where = response.context["next"] if response.context else parse_qs(urlsplit(response.url).query)["next"][0]
        page = boss.get(where, follow=True)
        found = page.context["cl"]
        assert found.asked.box.text == "key:order-1"
        assert [row.pk for row in found.result_list] == [message.pk]


def test_messages_that_a_clock_ahead_has_written_count_as_they_were(chief: Client) -> None:
    messages = samples.many(3)
    ids, ahead = [message.pk for message in messages], reads.now(samples.DB) + timedelta(hours=1)
    unguarded(Message).filter(pk__in=ids).update(created_at=ahead)
    unguarded(LogRow).filter(message_id__in=ids).update(at=ahead)
    operation = started(chief, "cancel", "state:scheduled")
    assert operation.outcomes == {}
    worked_off()
    assert {samples.fresh(message).state for message in messages} == {State.CANCELLED}


def test_an_answer_after_the_end_of_the_session_is_told_to_be_lost(operator: Client) -> None:
    message = samples.scheduled()
    asked = ask(operator, "cancel", message)
    operator.logout()
    login = answer(operator, "cancel", asked)
    user = User.objects.get(username="otto")
    user.set_password("secret")
    user.save()
    following = login.context["next"]
    said = operator.post(
        login.redirect_chain[0][0], {"username": "otto", "password": "secret", "next": following}, follow=True
    )
    # The question is there again, with the reason that was given.
    assert samples.said(said) == [UNSENT]
    assert said.context["form"]["reason"].value() == "because"
    assert samples.fresh(message).state == State.SCHEDULED
    assert samples.said(operator.get(reverse(samples.LIST))) == []
    answer(operator, "cancel", said)
    assert samples.fresh(message).state == State.CANCELLED


def test_a_question_that_somebody_else_left_is_not_asked_after_the_login(operator: Client, boss: Client) -> None:
    message = samples.scheduled()
    asked = ask(operator, "cancel", message)
    operator.logout()
    page = boss.get(answer(operator, "cancel", asked).context["next"], follow=True)
    assert samples.said(page) == [UNSENT, "The reason that you gave: “because”"]
    assert page.redirect_chain[-1][0] == reverse(samples.LIST)


def test_a_button_pressed_after_the_end_of_the_session_asks_after_the_login(operator: Client, boss: Client) -> None:
    message = samples.scheduled()
    where = f"{samples.action_url('cancel')}?_changelist_filters=state%3Dall"
    operator.logout()
    login = operator.post(where, {"ids": message.pk}, follow=True)
    page = boss.get(login.context["next"], follow=True)
    assert samples.said(page) == [UNSENT]
    assert page.context["back"] == f"{samples.change_url(message)}?_changelist_filters=state%3Dall"
    answer(boss, "cancel", page)
    assert samples.fresh(message).state == State.CANCELLED


def test_a_question_holds_good_for_a_while_only(operator: Client, tuned: Callable[..., None]) -> None:
    message = samples.scheduled()
    asked = ask(operator, "cancel", message)
    tuned(question_valid=timedelta(seconds=-1))
    again = answer(operator, "cancel", asked)
    assert "This page was shown some time ago." in samples.text(again)
    assert samples.fresh(message).state == State.SCHEDULED
    tuned(question_valid=timedelta(minutes=10))
    answer(operator, "cancel", again)
    assert samples.fresh(message).state == State.CANCELLED


def test_an_answer_that_is_sent_twice_is_taken_once(chief: Client) -> None:
    """A double click, or a form that the browser sends again, counts once."""
    message = samples.scheduled(delay="2h")
    asked = select(chief, "reschedule", message)
    assert "1 rescheduled" in samples.text(answer(chief, "reschedule", asked, delay="", shift="1h"))
    moved = samples.fresh(message).due_at
    assert "confirmed already" in samples.text(answer(chief, "reschedule", asked, delay="", shift="1h"))
    assert samples.fresh(message).due_at == moved
    assert AuditEvent.objects.count() == 1

    asked = ask_for_search(chief, "cancel", f"id:{message.pk}")
    answer(chief, "cancel", asked)
    assert "confirmed already" in samples.text(answer(chief, "cancel", asked))
    assert Operation.objects.count() == 1


def test_an_answer_is_good_for_its_action_and_its_user_alone_and_not_forged(operator: Client, chief: Client) -> None:
    mine, other = samples.scheduled(), samples.scheduled()
    token = ask(operator, "cancel", mine).context["token"]
    forged = signing.dumps(
        {"action": "cancel", "user": "1", "scope": {"ids": [other.pk]}, "number": 1}, salt="somewhere else"
    )
    for bad in ("", "x", token[:-1], token[1:], forged):
        assert operator.post(samples.action_url("cancel"), {"token": bad}).status_code == 400
    assert operator.post(samples.action_url("run"), {"token": token}).status_code == 400
    assert chief.post(samples.action_url("cancel"), {"token": token}).status_code == 400
    assert [samples.fresh(message).moves for message in (mine, other)] == [1, 1]


def test_a_changed_number_of_messages_is_asked_about_again(chief: Client) -> None:
    samples.scheduled()
    asked = ask_for_search(chief, "cancel", "is:live")
    unguarded(Message).all().delete()
    again = answer(chief, "cancel", asked)
    assert "The number of messages has changed meanwhile." in samples.text(again)
    assert not Operation.objects.exists()


@pytest.mark.django_db(transaction=True)
@pytest.mark.postgresql("needs a second connection that writes")
def test_messages_whose_transaction_commits_after_the_answer_are_left_alone(chief: Client) -> None:
    early = samples.many(2)
    late: list[Message] = []
    with unfinished(lambda: late.append(samples.scheduled())):
        newest = samples.scheduled()
        asked = ask_for_search(chief, "cancel", "is:live")
        assert asked.context["form"].number == 3
        answer(chief, "cancel", asked)
    assert early[-1].pk < late[0].pk < newest.pk
    worked_off()
    assert {samples.fresh(message).state for message in (*early, newest)} == {State.CANCELLED}
    assert samples.fresh(late[0]).state == State.SCHEDULED
    assert Operation.objects.get().outcomes == {"cancelled": 3}


def test_messages_that_changed_or_appeared_after_the_question_are_left_alone_and_told(chief: Client) -> None:
    dead = [samples.dead() for _number in range(12)]
    asked = ask_for_search(chief, "purge", "state:dead")
    assert asked.context["form"].expected == "12"
    # One was requeued and died again, one appears.
    requeue_message(dead[0].pk)
    samples.failed(samples.claimed(dead[0]), dead=True, reason="given up", error="ValueError: again")
    late = samples.dead()
    response = answer(chief, "purge", asked)
    assert samples.said(response)[1:] == ["1 changed after the question and was left alone"]
    assert (Operation.objects.get().total, Operation.objects.get().outcomes) == (None, {"changed": 1})
    worked_off()
    assert set(Message.objects.values_list("pk", flat=True)) == {dead[0].pk, late.pk}
    operation = Operation.objects.get()
    assert (operation.total, operation.done, operation.outcomes) == (11, 11, {"changed": 1, "purged": 11})


@pytest.mark.parametrize("at_once", [True, False])
def test_what_changed_of_a_selection_is_left_alone(chief: Client, tuned: Callable[..., None], at_once: bool) -> None:
    tuned(at_once=5 if at_once else 2)
    chosen = samples.many(5)
    asked = select(chief, "cancel", *chosen)
    assert "What changes after that is left alone." in samples.text(asked)
    moved, started, done = chosen[:2], chosen[2], chosen[3]
    for message in moved:
        assert reschedule_message(message.pk, delay="2h")
    for message in (started, done):
        assert run_message(message.pk)
        samples.claimed(message)
    samples.succeeded(samples.fresh(done))
    left = {message.pk: samples.fresh(message).due_at for message in moved}
    response = answer(chief, "cancel", asked)
    worked_off()
    for message in moved:
        assert (samples.fresh(message).state, samples.fresh(message).due_at) == (State.SCHEDULED, left[message.pk])
    assert not samples.fresh(started).cancel_requested
    assert samples.fresh(chosen[4]).state == State.CANCELLED
    assert "3 changed after the question and were left alone" in " ".join(samples.said(response))
    outcomes = AuditEvent.objects.get().outcomes if at_once else Operation.objects.get().outcomes
    assert outcomes == {"cancelled": 1, "too late": 1, "changed": 3}


@pytest.mark.django_db(transaction=True)
@pytest.mark.postgresql("lets others read what a transaction is about to change")
def test_a_change_that_was_under_way_at_the_question_is_seen(operator: Client) -> None:
    message = samples.scheduled()
    with unfinished(lambda: reschedule_message(message, delay="3h")):
        asked = ask(operator, "cancel", message)
    assert samples.said(answer(operator, "cancel", asked)) == [
        "Cancel, 1 message: 1 changed after the question and was left alone."
    ]
    assert samples.fresh(message).state == State.SCHEDULED


def test_hidden_messages_are_not_changed_however_many_are_named(
    chief: Client, monkeypatch: pytest.MonkeyPatch, tuned: Callable[..., None]
) -> None:
    tuned(at_once=1)
    seen, hidden = samples.many(2), samples.scheduled(queue="hidden")
    monkeypatch.setattr(MessageAdmin, "get_queryset", lambda self, request: Message.objects.exclude(queue="hidden"))
    answer(chief, "cancel", ask(chief, "cancel", *seen, hidden))
    worked_off()
    assert {samples.fresh(message).state for message in seen} == {State.CANCELLED}
    assert samples.fresh(hidden).state == State.SCHEDULED
    assert Operation.objects.get().outcomes == {"cancelled": 2, "not found": 1}


@pytest.mark.parametrize("action", ACTIONS)
def test_an_answer_goes_on_from_what_the_question_has_found(chief: Client, action: str) -> None:
    """No index answers this search: it would read the whole table again."""
    made = [NEEDED[action]({"shop": 1}) for _number in range(3)]
    NEEDED[action]({"shop": 2})
    asked = ask_for_search(chief, action, "payload.shop:1 attempts:>=0")
    with CaptureQueriesContext(connection) as captured:
        answer(chief, action, asked, follow=False, **GIVEN.get(action, {}))
    assert [query["sql"] for query in captured if '"attempts" >=' in query["sql"]] == []
    worked_off()
    operation = Operation.objects.get()
    assert (operation.done, operation.described.startswith("payload shop is a given value")) == (3, True)
    assert unpacked(operation.scope["ids"]) == tuple(message.pk for message in made)


def test_an_answer_searches_again_for_what_was_not_passed_on(chief: Client, tuned: Callable[..., None]) -> None:
    messages = samples.many(3)
    other = ask_for_search(chief, "cancel", f"id:{messages[0].pk}").context["found"]
    asked = ask_for_search(chief, "cancel", "is:live")
    # What another question has found does not count.
    answer(chief, "cancel", asked, found=other)
    assert Operation.objects.get().total is None
    worked_off()
    assert Message.objects.filter(state=State.CANCELLED).count() == 3
    samples.many(3)
    tuned(counted=2)
    asked = ask_for_search(chief, "cancel", "is:live")
    assert asked.context["found"] == ""
    answer(chief, "cancel", asked)
    worked_off()
    assert Message.objects.filter(state=State.CANCELLED).count() == 6


def test_a_forged_list_of_what_was_found_is_refused(chief: Client) -> None:
    samples.many(3)
    asked = ask_for_search(chief, "cancel", "is:live")
    for forged in ("nonsense", asked.context["token"], asked.context["found"][:-1]):
        assert answer(chief, "cancel", asked, found=forged).status_code == 400
    assert not Operation.objects.exists()


def test_an_answer_reads_the_log_by_its_key(chief: Client) -> None:
    """The view of the log, joined by message, reads both tables in full for each message."""
    for _number in range(3):
        samples.cancelled()
    asked = ask_for_search(chief, "requeue", "state:cancelled")
    with CaptureQueriesContext(connection) as captured:
        assert answer(chief, "requeue", asked, follow=False).status_code == 302
    log = [query["sql"] for query in captured if re.search("SELECT.*delayq_(log|transition)", query["sql"])]
    assert log
    assert not [sql for sql in log if "delayq_transition" in sql]
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            # The planner reads a table of a few rows from end to end.
            cursor.execute("SET LOCAL enable_seqscan = off")
            cursor.execute(f"EXPLAIN {log[0]}")
            plan = "\n".join(row[0] for row in cursor.fetchall())
        assert re.search(r"SubPlan(.|\n)*Index Cond: \(message_id = ", plan), plan


def test_more_messages_than_confirmed_are_asked_about_again(chief: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    samples.many(3)
    asked = ask_for_search(chief, "cancel", "is:live")
    frozen = work.Scope.frozen

    def one_more(scope: work.Scope, *given: Any) -> work.Scope:
        # A transaction that was under way at the question has committed.
        return work.Scope(ids=(*frozen(scope, *given).ids, 10**12))

    monkeypatch.setattr(work.Scope, "frozen", one_more)
    assert "The number of messages has changed meanwhile." in samples.text(answer(chief, "cancel", asked))
    assert not Operation.objects.exists()


def test_a_question_asked_again_counts_from_its_own_moment(chief: Client) -> None:
    messages = samples.many(2)
    asked = ask_for_search(chief, "cancel", "is:live")
    reschedule_message(messages[0].pk, delay="2h")
    again = answer(chief, "cancel", asked, reason="")
    assert "This field is required." in samples.text(again)
    answer(chief, "cancel", again)
    worked_off()
    assert {samples.fresh(message).state for message in messages} == {State.CANCELLED}


# --- when requeued messages are due -----------------------------------------------------------------------------------


@pytest.mark.parametrize("across", [False, True])
def test_a_requeue_says_when_how_many_messages_are_due(chief: Client, across: bool) -> None:
    made = [samples.cancelled(delay="1d"), samples.cancelled(delay="2d"), samples.dead()]
    first, last = (explanation.moment(message.due_at, "seconds") for message in made[:2])
    asked = ask_for_search(chief, "requeue", "state:dead,cancelled") if across else select(chief, "requeue", *made)
    page = samples.text(asked)
    assert f"2 at their own due times ({first} to {last}), 1 at once" in page
    assert "all 3 at once" in page
    answer(chief, "requeue", asked)
    worked_off()
    assert [samples.fresh(message).due_at for message in made[:2]] == [message.due_at for message in made[:2]]
    assert samples.fresh(made[2]).due_at <= reads.now(samples.DB) + timedelta(milliseconds=1)


@pytest.mark.parametrize("across", [False, True])
def test_a_requeue_at_once_gives_up_due_times_that_are_still_to_come(chief: Client, across: bool) -> None:
    made = [samples.cancelled(delay="1d") for _number in range(3)]
    asked = ask_for_search(chief, "requeue", "state:cancelled") if across else select(chief, "requeue", *made)
    before = reads.now(samples.DB)
    answer(chief, "requeue", asked, when="now", spread="30m")
    worked_off()
    waits = [(samples.fresh(message).due_at - before).total_seconds() for message in made]
    assert waits == pytest.approx([0, 600, 1200], abs=30)


# --- what came of it --------------------------------------------------------------------------------------------------


ENDED = (State.DEAD, State.EXPIRED, State.CANCELLED)


@pytest.mark.parametrize(
    ("action", "moved", "outcomes"),
    [
        ("cancel", {State.SCHEDULED: State.CANCELLED}, "1 cancelled, 1 running (asked to stop), 4 too late"),
        ("reschedule", {}, "1 rescheduled, 5 too late"),
        ("run", {}, "1 rescheduled, 5 too late"),
        ("move", {}, "1 moved, 5 too late"),
        ("requeue", dict.fromkeys(ENDED, State.SCHEDULED), "3 requeued, 3 too late"),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_the_outcome_is_told_for_each_state(
    chief: Client, tuned: Callable[..., None], action: str, moved: dict[State, State], outcomes: str, at_once: bool
) -> None:
    tuned(at_once=6 if at_once else 5)
    made = samples.one_of_each()
    response = confirm(chief, action, *made.values(), **GIVEN.get(action, {}))
    if at_once:
        assert samples.said(response) == [f"{action_table.CONSOLE_ACTIONS[action].label}, 6 messages: {outcomes}."]
    else:
        worked_off()
        assert outcomes in samples.text(chief.get(response.redirect_chain[-1][0]))
    after = {state: samples.fresh(message).state for state, message in made.items()}
    assert after == {state: moved.get(state, state) for state in made}


def test_a_crashed_delivery_makes_the_outcome_of_a_cancel_unknown(operator: Client) -> None:
    message = samples.running(lease=-1.0)
    assert crashes.reap(samples.DB, actor="test")
    said = samples.said(confirm(operator, "cancel", message))
    assert said == ["Cancel, 1 message: 1 cancelled, but an earlier delivery may have had its effect."]


def test_a_message_that_is_gone_is_told(operator: Client) -> None:
    gone, there = samples.scheduled(), samples.scheduled()
    unguarded(Message).filter(pk=gone.pk).delete()
    asked = ask(operator, "cancel", gone, there)
    assert "1 : not found any more" in samples.text(asked)
    assert samples.said(answer(operator, "cancel", asked)) == ["Cancel, 2 messages: 1 cancelled, 1 not found."]


def test_a_requeue_does_not_take_the_key_of_a_live_message(operator: Client) -> None:
    message = samples.dead(key="order-1")
    samples.scheduled(key="order-1")
    assert samples.said(confirm(operator, "requeue", message)) == [
        "Requeue, 1 message: 1 not requeued: another message holds its key."
    ]


@pytest.mark.django_db(transaction=True)
@pytest.mark.postgresql("needs locks of rows")
def test_a_message_that_somebody_holds_for_long_is_told(operator: Client, timed: Callable[..., None]) -> None:
    timed(50, "long")
    message = samples.scheduled()
    asked = ask(operator, "cancel", message)
    with unfinished(lambda: list(Message.objects.select_for_update().filter(pk=message.pk))):
        said = samples.said(answer(operator, "cancel", asked))
    assert said == ["The database could not finish this in time: nothing was done. Try again in a moment."]
    assert samples.fresh(message).state == State.SCHEDULED
    assert not AuditEvent.objects.exists()


# --- reschedule -------------------------------------------------------------------------------------------------------


def test_a_new_time_is_read_in_the_current_time_zone(operator: Client, settings: Any) -> None:
    settings.TIME_ZONE = "Asia/Tokyo"
    message = samples.scheduled()
    due = timezone.localtime(timezone.now() + timedelta(days=2)).replace(microsecond=0)
    assert due.utcoffset() == timedelta(hours=9)
    assert "In the time zone Asia/Tokyo." in samples.text(ask(operator, "reschedule", message))
    confirm(operator, "reschedule", message, due=due.strftime("%Y-%m-%dT%H:%M:%S"))
    assert samples.fresh(message).due_at == due


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({}, "exactly one of the three"),
        ({"due": "2100-01-01T00:00", "delay": "5m"}, "exactly one of the three"),
        ({"delay": "soon"}, "not a duration"),
        ({"delay": "-5m"}, "not a duration"),
        ({"shift": "--30m"}, "not a duration"),
        ({"shift": "+-30m"}, "not a duration"),
        ({"delay": "99999999d"}, "longer than 100 years"),
        ({"due": "2001-01-01T00:00"}, "in the past"),
        ({"due": "9999-12-31T23:59:59"}, "more than 100 years"),
        ({"due": "tomorrow"}, "Enter a valid date/time."),
    ],
)
def test_an_impossible_time_is_told_and_changes_nothing(
    operator: Client, given: dict[str, str], complaint: str
) -> None:
    message = samples.scheduled()
    before = samples.record()
    response = confirm(operator, "reschedule", message, **given)
    assert complaint in samples.text(response)
    assert response.context["preview"].rows[0][0] == message.pk
    assert response.context["back"] == reverse(samples.LIST) + "?state=all"
    assert samples.record() == before


@pytest.mark.parametrize(
    ("action", "make", "given"),
    [("reschedule", samples.scheduled, {"delay": "1h"}), ("run", samples.scheduled, {}), ("requeue", samples.dead, {})],
)
def test_messages_are_spread_over_a_time(operator: Client, action: str, make: Any, given: dict[str, str]) -> None:
    messages = [make() for _number in range(3)]
    before = reads.now(samples.DB) + timedelta(hours=1 if given else 0)
    confirm(operator, action, *messages, spread="30m", **given)
    due = [samples.fresh(message).due_at for message in messages]
    assert [at - due[0] for at in due] == [timedelta(minutes=10 * number) for number in range(3)]
    assert before <= due[0] <= reads.now(samples.DB) + timedelta(hours=1 if given else 0, milliseconds=1)


def test_a_question_asks_for_nothing_that_makes_no_difference(operator: Client) -> None:
    assert "spread" not in ask(operator, "run", samples.scheduled()).context["form"].fields
    assert "when" not in ask(operator, "requeue", samples.dead()).context["form"].fields


@pytest.mark.parametrize(
    ("given", "moves"), [("2h", timedelta(hours=2)), ("-30m", -timedelta(minutes=30)), ("0", timedelta())]
)
def test_messages_are_shifted_but_not_into_the_past(operator: Client, given: str, moves: timedelta) -> None:
    messages = [samples.scheduled(delay="3h"), samples.scheduled(delay="3d"), samples.scheduled(delay="1m")]
    confirm(operator, "reschedule", *messages, shift=given)
    dues = [samples.fresh(message).due_at for message in messages]
    assert [due - message.due_at for due, message in zip(dues, messages[:2], strict=False)] == [moves, moves]
    assert dues[2] >= messages[2].created_at


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("others", ["cancel", "run"])
def test_of_two_operators_who_confirm_at_once_one_acts(operator: Client, chief: Client, others: str) -> None:
    needs_row_locks()
    message = samples.scheduled()
    asked = [(operator, "cancel", ask(operator, "cancel", message)), (chief, others, ask(chief, others, message))]
    ready = Barrier(2, timeout=PATIENCE)

    def confirm_together(client: Client, action: str, question: Any) -> None:
        try:
            ready.wait()
            answer(client, action, question, follow=False)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(confirm_together, *zip(*asked, strict=True)))
    assert samples.fresh(message).moves == 2
    first, second = AuditEvent.objects.order_by("pk").values_list("outcomes", flat=True)
    assert first in ({"cancelled": 1}, {"rescheduled": 1})
    # Who comes later is told so, and changes nothing.
    assert second in ({"changed": 1}, {"too late": 1})


# --- the way back -----------------------------------------------------------------------------------------------------


def test_the_way_back_leads_to_where_it_began(operator: Client) -> None:
    message = samples.scheduled(key="a")
    asked = ask(operator, "run", message)
    assert asked.context["back"] == samples.change_url(message)
    assert answer(operator, "run", asked, follow=False).url == samples.change_url(message)
    asked = select(operator, "run", message, query="?state=all&q=key%3Aa")
    assert asked.context["back"] == reverse(samples.LIST) + "?state=all&q=key%3Aa"
    assert answer(operator, "run", asked, follow=False).url == reverse(samples.LIST) + "?state=all&q=key%3Aa"


def test_the_way_from_a_message_leads_back_to_the_list_as_it_was(chief: Client) -> None:
    message = samples.dead(key="a")
    query = "state=dead&q=key%3Aa&p=1"
    page = chief.get(f"{reverse(samples.LIST)}?{query}").content.decode()
    (link,) = re.findall(rf'href="({samples.change_url(message)}[^"]*)"', page)
    shown = chief.get(link)
    assert shown.context["back"] == f"{reverse(samples.LIST)}?{query}"
    assert (
        f'<a href="{reverse(samples.LIST)}?state=dead&amp;q=key%3Aa&amp;p=1">Back to the search</a>'
        in shown.content.decode()
    )
    # Through a question, its answer and a new message.
    asked = chief.post(samples.action_url("requeue") + shown.context["kept"], {"ids": message.pk})
    assert asked.context["back"] == link
    assert answer(chief, "requeue", asked, follow=False).url == link
    repeat = samples.admin_url("message_repeat", samples.dead().pk) + shown.context["kept"]
    new: Any = chief.post(repeat, {"nonce": "n"})
    assert new.url.endswith(shown.context["kept"])
    # What is purged has no page any more.
    asked = chief.post(samples.action_url("purge") + shown.context["kept"], {"ids": samples.dead().pk})
    assert answer(chief, "purge", asked, follow=False).url == f"{reverse(samples.LIST)}?{query}"
    assert "Back to the search" not in chief.get(samples.change_url(message)).content.decode()


@pytest.mark.parametrize("filters", ["//evil.example", "\r\nLocation: //evil.example", "https://evil.example/?a"])
def test_the_way_back_never_leads_elsewhere(operator: Client, filters: str) -> None:
    asked = ask(operator, "run", samples.scheduled())
    where = f"{samples.action_url('run')}?{urlencode({'_changelist_filters': filters})}"
    given = {"token": asked.context["token"], "origin": "list", "reason": "so"}
    response: Any = operator.post(where, given)
    assert response.url.startswith(reverse(samples.LIST) + "?")
    assert "\n" not in response.url


@pytest.mark.django_db(transaction=True)
def test_a_purge_passes_over_a_message_that_a_row_refers_to_and_says_so(chief: Client) -> None:
    kept, gone = samples.dead(), samples.dead()
    with referring.table(referring.ON_DELETE["SET_NULL"]) as refer:
        refer(kept.pk)
        said = samples.text(confirm(chief, "purge", kept, gone))
        assert "Purge, 2 messages: 1 purged, 1 not purged: another table refers to it." in said
        assert Message.objects.get() == kept


# --- a move -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("across", [False, True])
def test_messages_are_moved_to_a_queue_that_something_knows(chief: Client, across: bool) -> None:
    made, there = [samples.scheduled() for _number in range(3)], samples.scheduled(queue="slow", key="there")
    asked = ask_for_search(chief, "move", "queue:default") if across else select(chief, "move", *made)
    assert {"", "default", "slow"} <= {name for name, _shown in asked.context["form"].fields["queue"].choices}
    response = answer(chief, "move", asked, queue="slow", priority="-5")
    worked_off()
    rows = [samples.fresh(message) for message in made]
    assert {(row.queue, row.priority) for row in rows} == {("slow", -5)}
    assert samples.fresh(there).priority == 0
    if across:
        shown = samples.text(chief.get(response.redirect_chain[-1][0]))
        assert "3 moved" in shown
        assert "Queue slow Priority -5" in shown
    else:
        assert samples.said(response) == ["Move, 3 messages: 3 moved."]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "Give a queue, a priority, or both."),
        ({"queue": "solw"}, "solw is not one of the available choices"),
        ({"priority": "101"}, "less than or equal to 100"),
    ],
)
def test_a_move_to_nowhere_is_asked_about_again(operator: Client, given: dict[str, Any], said: str) -> None:
    message = samples.scheduled(queue="slow")
    assert said in samples.text(answer(operator, "move", ask(operator, "move", message), **given))
    assert samples.fresh(message).moves == 1
