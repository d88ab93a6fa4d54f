from __future__ import annotations

import sys
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.db.models import F
from django.utils import timezone

from django_delayq.core.states import State
from django_delayq.management import _common as common
from django_delayq.models import Message
from django_delayq.record import transitions
from tests.support.commands import claim, held, run, schedule

pytestmark = pytest.mark.django_db(transaction=True)


def cancelled() -> set[int]:
    return set(Message.objects.filter(state=State.CANCELLED).values_list("pk", flat=True))


def test_a_cancel_by_id_logs_reason_and_actor() -> None:
    [pk, other] = schedule(2)
    run("delayq_restore")

    ran = run("delayq_act", "cancel", str(pk), "--reason", "customer refunded")

    assert (ran.code, cancelled()) == (0, {pk})
    assert held().keys() == {other}
    last = Message.objects.get(pk=pk).transitions.last()
    assert last is not None
    assert last.reason == "customer refunded"
    assert last.actor.startswith("command:delayq_act ")
    assert "@" in last.actor


def test_a_dash_reads_ids_from_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = schedule(3)
    monkeypatch.setattr(sys, "stdin", StringIO(f"{ids[0]}\n{ids[1]} \n\n"))
    assert run("delayq_act", "cancel", "-", "--yes").code == 0
    assert cancelled() == set(ids[:2])


def test_mixed_verdicts_are_counted_and_end_with_exit_code_4() -> None:
    waiting, again, unknown, running, done = schedule(5, due=-1)
    claim(running)
    claim(unknown, again)
    # The delivery of one crashed, that of the other was reported.
    Message._base_manager.filter(pk__in=[unknown, again]).update(state=State.SCHEDULED, leased_until=None, worker="")
    Message._base_manager.filter(pk=again).update(reported=F("deliveries"))
    run("delayq_act", "cancel", str(done))
    words = [str(pk) for pk in (waiting, again, unknown, running, done, 10**12)]
    expected = {"cancelled": 2, "outcome unknown": 1, "requested": 1, "too late": 1, "not found": 1}

    would = run("delayq_act", "cancel", "--json", "--dry-run", *words)
    assert (would.code, would.json["answers"]) == (4, expected)
    assert cancelled() == {done}

    ran = run("delayq_act", "cancel", "--json", "--yes", *words)
    assert (ran.code, ran.json["answers"]) == (4, expected)
    assert cancelled() == {waiting, again, unknown, done}


@pytest.mark.parametrize(
    ("words", "chosen"),
    [
        (["--topic", "t.effect"], {"effect"}),
        (["--queue", "b"], {"b", "running"}),
        (["--queue", "b", "--state", "scheduled"], {"b"}),
        (["--topic", "t.ok", "--key", "k"], {"keyed"}),
        (["--due-before", "SPLIT"], {"keyed", "effect", "b", "running"}),
        (["--due-after", "SPLIT"], {"later"}),
    ],
)
def test_selectors_narrow_the_cancelled_messages(words: list[str], chosen: set[str]) -> None:
    names = {
        schedule(key="k")[0]: "keyed",
        schedule(topic="t.effect")[0]: "effect",
        schedule(queue="b")[0]: "b",
        schedule(due=300)[0]: "later",
    }
    [running] = schedule(queue="b", due=-1)
    claim(running)
    names[running] = "running"
    split = (timezone.now() + timedelta(seconds=180)).isoformat()

    ran = run("delayq_act", "cancel", "--yes", *[split if word == "SPLIT" else word for word in words])

    assert ran.code == 0
    touched = cancelled() | set(Message.objects.filter(cancel_requested=True).values_list("pk", flat=True))
    assert {names[pk] for pk in touched} == chosen


def test_several_messages_are_not_cancelled_without_a_confirmation() -> None:
    schedule(2)
    ran = run("delayq_act", "cancel", "--topic", "t.ok")
    assert (ran.code, cancelled()) == (2, set())
    assert "--yes" in ran.err


def test_a_cancel_without_ids_and_selectors_is_refused() -> None:
    schedule(2)
    assert run("delayq_act", "cancel", "--yes").code == 2
    assert run("delayq_act", "cancel", "--yes", "1", "--topic", "t.ok").code == 2
    assert cancelled() == set()


def test_an_empty_stdin_cancels_nothing(monkeypatch: Any) -> None:
    schedule(2)
    monkeypatch.setattr(sys, "stdin", StringIO(""))
    assert run("delayq_act", "cancel", "-", "--yes").code == 0
    assert cancelled() == set()


def test_a_dry_run_of_a_cancel_writes_nothing() -> None:
    schedule(3)
    ran = run("delayq_act", "cancel", "--topic", "t.ok", "--dry-run")
    assert (ran.code, ran.out) == (0, "3 would be cancelled\n")
    assert cancelled() == set()


def test_many_messages_are_cancelled_in_batches() -> None:
    ids = schedule(1100)
    ran = run("delayq_act", "cancel", "--json", "--queue", "default", "--yes")
    assert (ran.code, ran.json["answers"]) == (0, {"cancelled": 1100})
    assert cancelled() == set(ids)


def test_messages_that_appear_while_a_cancel_asks_are_left_alone_and_changed_ones_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = schedule(3)
    added: list[int] = []

    def answer(_command: Any, what: str, *, yes: bool) -> None:
        assert what == "This will cancel 3 messages."
        added.extend(schedule(2))
        transitions.give_up("default", ids[:1], reason="", actor="")

    monkeypatch.setattr(common.DelayqCommand, "confirm", answer)
    ran = run("delayq_act", "cancel", "--topic", "t.ok", "--json")
    assert (ran.code, ran.json["answers"]) == (4, {"cancelled": 2, "too late": 1})
    assert cancelled() == set(ids[1:])
    assert set(Message.objects.filter(state=State.SCHEDULED).values_list("pk", flat=True)) == set(added)


def test_selectors_without_a_match_need_no_confirmation() -> None:
    ran = run("delayq_act", "cancel", "--topic", "t.ok")
    assert (ran.code, ran.out) == (0, "No message matches.\n")


def test_options_of_django_may_stand_before_and_after_the_verb() -> None:
    ids = schedule(2)
    words = ["--yes", "--traceback", "-v", "0", "--settings", "tests.settings"]
    assert run("delayq_act", "-v", "2", "cancel", *words, str(ids[0])).code == 0
    assert cancelled() == {ids[0]}
