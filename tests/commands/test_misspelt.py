"""Names that a command reads: one that nothing knows is told, and the one that is like it is asked about."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
from django.utils import timezone

from django_delayq import pause_queue, resume_queue, schedule_message
from django_delayq.api import pausing
from django_delayq.models import Message, Worker
from tests.support.commands import run, schedule
from tests.support.statements import count_statements

pytestmark = pytest.mark.django_db(transaction=True)

UNKNOWN = "no setting, handler or live worker names it, and no message waits in it"
MISSPELT = f"Nothing knows the queue lettres: {UNKNOWN}. Did you mean letters?"
NO_TERMINAL = " Nothing was done: there is no terminal to ask on. Add --yes to go ahead without a question."


def known_by_setting(settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "QUEUES": ["default", "letters"]}


def known_by_limit(settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "LIMITS": {"letters": {"limit": 1}}}


def known_by_message(settings: Any) -> None:
    schedule(1, queue="letters")


def known_by_worker(settings: Any) -> None:
    now = timezone.now()
    Worker.objects.create(
        name="w", host="h", pid=1, queues=["letters"], topics=["orders.close"], started_at=now, seen_at=now
    )


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("make_known", [known_by_setting, known_by_limit, known_by_message, known_by_worker])
def test_a_pause_of_a_misspelt_queue_is_asked_about(settings: Any, make_known: Any) -> None:
    make_known(settings)
    ran = run("delayq_queue", "pause", "default", "lettres")
    assert (ran.code, ran.out, ran.err) == (2, "", MISSPELT + NO_TERMINAL)
    assert pausing.paused("default") == {}
    ran = run("delayq_queue", "pause", "lettres", "--yes")
    assert (ran.code, ran.out) == (0, "lettres: paused until it is resumed\n")
    assert MISSPELT in ran.err
    assert run("delayq_queue", "pause", "letters").err == ""


def test_a_pause_ahead_of_the_first_message_is_made_and_told() -> None:
    ran = run("delayq_queue", "pause", "reports")
    assert (ran.code, ran.out) == (0, "reports: paused until it is resumed\n")
    assert ran.err == f"Nothing knows the queue reports: {UNKNOWN}.\n"
    # Somebody has paused it by now, so it is known.
    assert run("delayq_queue", "pause", "reports").err == ""


def test_queues_that_differ_by_their_numbers_are_none_misspelt() -> None:
    """As those of tenants."""
    schedule(1, queue="tenant-16")
    assert run("delayq_queue", "pause", "tenant-17").code == 0


def test_a_resume_asks_about_the_paused_queue_that_is_like_it() -> None:
    pause_queue("letters")
    schedule(1, queue="smss")
    ran = run("delayq_queue", "resume", "lettres")
    assert (ran.code, ran.err) == (2, MISSPELT + NO_TERMINAL)
    # A queue that is not paused is not what somebody wants to resume.
    assert run("delayq_queue", "resume", "sms").out == "sms: was not paused\n"
    assert run("delayq_queue", "resume", "letters").out == "letters: resumed\n"


def test_a_pause_by_a_call_is_made_and_asked_about_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    schedule(1, queue="letters")
    pause_queue("letters")
    resume_queue("letters")
    pause_queue("reports")
    assert warnings(caplog) == []
    assert pause_queue("lettres").name == "lettres"
    asked = "no setting and no handler names it, and no message waits in it. Did you mean letters?"
    assert warnings(caplog) == [f"The queue lettres is paused: {asked}"]


def test_a_resume_by_a_call_asks_in_the_log_about_the_paused_queue(caplog: pytest.LogCaptureFixture) -> None:
    pause_queue("letters")
    assert not resume_queue("lettres")
    assert warnings(caplog) == ["The queue lettres was not paused. Did you mean letters, which is paused?"]


def test_a_pause_of_a_queue_that_the_code_names_costs_no_further_statement() -> None:
    for name in ("default", "reports"):
        pause_queue(name)
    known, unknown = (count_statements(partial(pause_queue, name)) for name in ("default", "reports"))
    assert known == unknown - 1


@pytest.mark.parametrize("verb", ["cancel", "run", "requeue", "purge", "reschedule"])
def test_an_action_on_a_misspelt_topic_is_asked_about(verb: str, settings: Any) -> None:
    known_by_worker(settings)
    more = {"reschedule": ["--shift", "1h"], "purge": ["--finished-before", "1d"]}.get(verb, [])
    words = ["delayq_act", verb, "--topic", "orders.cloze", *more]
    asked = "No message matches the topic orders.cloze, and nothing knows it. Did you mean orders.close?"
    ran = run(*words)
    assert (ran.code, ran.out, ran.err) == (2, "", asked + NO_TERMINAL)
    for option in ("--yes", "--dry-run"):
        ran = run(*words, option)
        assert (ran.code, asked in ran.err) == (0, True)


def test_one_misspelt_name_among_right_ones_is_asked_about_before_anything_is_done() -> None:
    schedule(2, queue="letters")
    ran = run("delayq_act", "cancel", "--queue", "letters", "--queue", "smms", "--queue", "lettres")
    assert ran.code == 2
    assert "No message matches the queue lettres, and nothing knows it. Did you mean letters?" in ran.err
    assert "No message matches the queue smms, and nothing knows it.\n" in ran.err
    assert Message.objects.filter(state="scheduled").count() == 2


def test_an_action_on_a_topic_without_a_handler_asks_nothing_where_messages_have_it() -> None:
    message = schedule_message("t.okk", delay="1h")
    ran = run("delayq_act", "cancel", "--topic", "t.okk", "--yes")
    assert (ran.code, ran.out, ran.err) == (0, "1 cancelled\n", "")
    message.refresh_from_db()
    assert message.state == "cancelled"


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (["--queue", "lettres"], "No message matches the queue lettres, and nothing knows it. Did you mean letters?"),
        (["--topic", "t.okk"], "No message matches the topic t.okk, and nothing knows it. Did you mean t.ok?"),
    ],
)
def test_a_restore_of_a_misspelt_name_is_asked_about(words: list[str], asked: str) -> None:
    schedule(1, queue="letters")
    ran = run("delayq_restore", *words)
    assert (ran.code, ran.out, ran.err) == (2, "", asked + NO_TERMINAL)
    assert run("delayq_restore", *words, "--yes").code == 0
    assert run("delayq_restore", *words, "--dry-run").code == 0


def test_a_move_to_a_misspelt_queue_is_asked_about() -> None:
    [pk] = schedule(1, queue="letters")
    words = ["delayq_act", "move", str(pk), "--to", "lettres"]
    ran = run(*words)
    assert (ran.code, ran.out, ran.err) == (2, "", MISSPELT + NO_TERMINAL)
    told = run(*words, "--dry-run")
    assert (told.code, told.out, told.err) == (0, "1 would be moved\nto the queue lettres\n", MISSPELT + "\n")
    assert run(*words, "--yes").out == "1 moved\n"
    assert Message.objects.get().queue == "lettres"
    # A queue that nothing knows yet, and that is like no other, is told.
    assert run("delayq_act", "move", str(pk), "--to", "reports").err == f"Nothing knows the queue reports: {UNKNOWN}.\n"


def test_a_comparison_of_a_misspelt_queue_is_refused_with_a_question() -> None:
    schedule(1, queue="letters")
    ran = run("delayq_check", "redis", "--queue", "lettres")
    assert (ran.code, ran.err.endswith("and no setting or handler names it. Did you mean letters?")) == (2, True)


def test_a_misspelt_alias_is_asked_about() -> None:
    for words in (["delayq_stats"], ["run_delayq", "--once"]):
        ran = run(*words, "--database", "defualt")
        assert (ran.code, ran.err) == (2, "There is no database 'defualt' in DATABASES. Did you mean default?")


def test_a_misspelt_role_is_asked_about() -> None:
    assert "there is no role loadr (did you mean loader?); the roles are" in run("run_delayq", "--roles", "loadr").err


def test_a_worker_asks_in_its_log_about_a_queue_that_nothing_knows(caplog: pytest.LogCaptureFixture) -> None:
    schedule(1, queue="letters")
    assert run("run_delayq", "--once", "--queue", "lettres", "--queue", "default", "--queue", "reports").code == 0
    told = [(record.levelname, record.getMessage()) for record in caplog.records if "nothing" in record.getMessage()]
    assert told == [
        ("WARNING", "This worker serves the queue lettres, which nothing else names. Did you mean letters?"),
        ("INFO", "This worker serves the queue reports, which nothing else names yet"),
    ]
