"""``delayq_schedule`` makes a message as the call does, and ``delayq_show`` shows it with its log."""

from __future__ import annotations

from datetime import timedelta
from io import StringIO
from typing import Any

import pytest

from django_delayq.core.states import State
from django_delayq.models import Message
from tests.support.commands import run
from tests.support.steps import bring, claim, due, fail

pytestmark = pytest.mark.django_db(transaction=True)


def test_the_id_is_all_that_is_printed() -> None:
    ran = run("delayq_schedule", "t.ok", '{"order": 5}', "--delay", "15m", "--key", "order-5")
    message = Message.objects.get()
    assert (ran.code, ran.out, ran.err) == (0, f"{message.pk}\n", "")
    assert (message.payload, message.key) == ({"order": 5}, "order-5")
    assert timedelta(minutes=14) < message.due_at - message.created_at <= timedelta(minutes=15, seconds=1)
    assert message.transitions.get().actor.startswith("command:delayq_schedule ")


def test_all_options_are_those_of_the_call() -> None:
    words = "--due-at 2090-01-01T00:00:00Z --queue mail --priority -5 --key k --unique scheduled --expires 1h"
    words += " --on-dead t.reject --on-expired t.tx"
    assert run("delayq_schedule", "t.ok", *words.split(), "--max-attempts", "3").code == 0
    message = Message.objects.get()
    assert (message.payload, message.queue, message.priority, message.max_attempts) == (None, "mail", -5, 3)
    assert (message.unique, message.due_at.year) == ("scheduled", 2090)
    assert message.expires_at == message.due_at + timedelta(hours=1)
    assert message.headers == {"delayq": {"on_dead": "t.reject", "on_expired": "t.tx"}}


def test_the_payload_may_come_from_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", StringIO('[1, "ä"]'))
    assert run("delayq_schedule", "t.ok", "-").code == 0
    assert Message.objects.get().payload == [1, "ä"]


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["t.ok", "{"], 2, "The payload is not JSON"),
        (["t.ok", "NaN"], 2, "not JSON"),
        (["t.ok", "--priority", "101"], 2, "priority must be a whole number from -100 to 100"),
        (["t.ok", "--on-conflict", "keep"], 2, "needs a key"),
        (["t ok"], 1, "must be 1 to 100 of the characters"),
        (["t.okk"], 2, "Nothing knows the topic t.okk. Did you mean t.ok?"),
    ],
)
def test_what_is_wrong_is_told_and_nothing_is_written(words: list[str], code: int, text: str) -> None:
    ran = run("delayq_schedule", *words)
    assert ran.code == code
    assert text in ran.err
    assert not Message.objects.exists()


def test_a_taken_key_is_an_error_and_may_be_kept() -> None:
    first = run("delayq_schedule", "t.ok", "--key", "k").out
    ran = run("delayq_schedule", "t.ok", "--key", "k")
    assert (ran.code, ran.out) == (1, "")
    assert "is live and has this key" in ran.err
    kept = run("delayq_schedule", "t.ok", "--key", "k", "--on-conflict", "keep", "--json").json
    assert (kept["id"], kept["existed"]) == (int(first), True)


@pytest.mark.parametrize("state", State)
def test_a_message_in_each_state_is_shown_with_its_log(state: State) -> None:
    pk = bring(state, payload={"text": "größe"}, headers={"a": 1})
    ran = run("delayq_show", str(pk))
    assert ran.code == 0
    assert f"state: {state}\n" in ran.out
    assert 'payload: {"text": "größe"}\n' in ran.out
    shown: Any = run("delayq_show", str(pk), "--json").json
    message = Message.objects.get(pk=pk)
    assert (shown["message"]["id"], shown["message"]["state"]) == (pk, state)
    assert [move["to_state"] for move in shown["log"]] == [
        move.to_state for move in message.transitions.order_by("number")
    ]
    assert all(move["actor"] in ran.out for move in shown["log"])


def test_a_failure_is_shown_with_its_traceback() -> None:
    pk = due().pk
    claim(pk)
    fail(pk, error="it broke", traceback="Traceback:\n  line 1")
    out = run("delayq_show", str(pk)).out
    assert "   it broke\n   Traceback:\n     line 1\n" in out


def test_what_others_wrote_gives_a_terminal_no_orders() -> None:
    pk = due(payload={"name": "a\u009b2J\u202eb"}).pk
    claim(pk)
    fail(pk, error="\x1b]0;title\x07 it broke", traceback="Traceback:\n\x1b[2J")
    out = run("delayq_show", str(pk)).out
    assert all(sign.isprintable() or sign == "\n" for sign in out)
    assert r"a\x9b2J\u202eb" in out
    assert r"\x1b]0;title\x07 it broke" in out


def test_an_id_that_is_not_there_is_an_error() -> None:
    ran = run("delayq_show", "99")
    assert (ran.code, ran.out) == (1, "")
    assert "There is no message 99." in ran.err
