"""delayq_act cancel, and what all verbs of delayq_act have in common."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.db import OperationalError
from django.utils import timezone

from django_delayq import cancel_message, run_message
from django_delayq.core import verbs
from django_delayq.core.states import State
from django_delayq.management import _common as common
from django_delayq.models import Message, Transition
from django_delayq.record import transitions
from tests.support.chains import ENDS, hand_over
from tests.support.commands import claim, run, schedule
from tests.support.record_of import log_of
from tests.support.rows import unguarded
from tests.support.steps import claim as claim_one
from tests.support.steps import claimed, moves

pytestmark = pytest.mark.django_db(transaction=True)


def cancelled() -> set[int]:
    return set(Message.objects.filter(state=State.CANCELLED).values_list("pk", flat=True))


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


EMPTY = [(selector, "") for selector in ("--queue", "--topic", "--state", "--due-before", "--database")]
NO_KEYS = [("--key", key) for key in ("", " ", " k", "\udcff", "k\n", "x" * 201)]


@pytest.mark.parametrize(("selector", "value"), [*EMPTY, *NO_KEYS], ids=ascii)
def test_a_selector_that_no_message_can_match_is_refused(selector: str, value: str) -> None:
    schedule(2)
    assert run("delayq_act", "cancel", "--topic", "t.ok", selector, value, "--yes").code != 0
    assert cancelled() == set()


@pytest.mark.parametrize("words", [["-"], ["--topic", "t.gone"]], ids=["empty stdin", "no match"])
def test_a_choice_of_no_messages_needs_no_confirmation(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    schedule(2)
    monkeypatch.setattr(sys, "stdin", StringIO(""))
    ran = run("delayq_act", "cancel", *words)
    assert (ran.code, ran.out, cancelled()) == (0, "No message matches.\n", set())


def test_messages_that_appear_while_a_cancel_asks_are_left_alone_and_changed_ones_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = schedule(3)
    added: list[int] = []

    def answer(_command: Any, what: str, *, yes: bool) -> None:
        assert what == "This will cancel 3 messages."
        added.extend(schedule(2))
        transitions.give_up("default", ids[:1], reason="")

    monkeypatch.setattr(common.DelayqCommand, "confirm", answer)
    ran = run("delayq_act", "cancel", "--topic", "t.ok", "--json")
    assert (ran.code, ran.json["answers"]) == (4, {"cancelled": 2, "too late": 1})
    assert cancelled() == set(ids[1:])
    assert set(Message.objects.filter(state=State.SCHEDULED).values_list("pk", flat=True)) == set(added)


@pytest.mark.parametrize(
    ("verb", "answers"),
    [
        (["cancel"], {"cancelled": 2}),
        (["reschedule", "--shift", "1h"], {"rescheduled": 2}),
        (["run"], {"rescheduled": 2}),
    ],
    ids=["cancel", "reschedule", "run"],
)
@pytest.mark.parametrize("end", ENDS)
def test_a_key_that_is_handed_over_while_the_command_asks_means_the_next_message(
    end: str, verb: list[str], answers: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    older = claimed(key="k").id
    first = hand_over(older).pk
    ENDS["waits for a retry"](older)
    assert run_message(first)
    chain = [older, first]

    def answer(_command: Any, _what: str, *, yes: bool) -> None:
        for _step in range(3):
            assert run_message(chain[-1])
            assert claim_one(chain[-1])
            chain.append(hand_over(chain[-1]).pk)
            ENDS[end](chain[-2])
        before.update({pk: moves(pk) for pk in chain})

    before: dict[int, list[str]] = {}
    monkeypatch.setattr(common.DelayqCommand, "confirm", answer)
    ran = run("delayq_act", *verb, "--key", "k", "--json")
    # The older one, which had gone on before the command chose it, is one of those that were counted.
    assert (ran.code, ran.json["answers"]) == (0, answers)
    after = {pk: moves(pk) for pk in chain}
    assert [pk for pk in chain if after[pk] != before[pk]] == [older, chain[-1]]


def test_options_of_django_may_stand_before_and_after_the_verb() -> None:
    ids = schedule(2)
    words = ["--yes", "--traceback", "-v", "0", "--settings", "tests.settings"]
    assert run("delayq_act", "-v", "2", "cancel", *words, str(ids[0])).code == 0
    assert cancelled() == {ids[0]}


# --- all verbs --------------------------------------------------------------------------------------------------------

VERBS = [["cancel"], ["reschedule", "--due-at", "1h"], ["run"], ["move", "--priority", "7"], ["requeue"], ["purge"]]
EVERY_VERB = pytest.mark.parametrize("verb", VERBS, ids=" ".join)
EVERY_MOVE = pytest.mark.parametrize("verb", VERBS[:-1], ids=" ".join)


def messages_for(verb: list[str], number: int = 1) -> list[int]:
    """Schedule messages that the verb changes: finished ones to requeue or to purge."""
    ids = schedule(number)
    if verb[0] in ("requeue", "purge"):
        transitions.give_up("default", ids, reason="")
    return ids


def changed(*ids: int) -> set[int]:
    """Return those of the messages that a command has moved or deleted."""
    left = Message.objects.values_list("pk", flat=True)
    moves = Transition.objects.filter(actor__startswith="command:delayq_act ")
    return set(ids) - set(left) | set(moves.values_list("message_id", flat=True))


FORESEEN = {
    "cancel": {"cancelled": 1, "outcome unknown": 1, "requested": 1, "too late": 2, "not found": 1},
    "reschedule": {"rescheduled": 2, "too late": 3, "not found": 1},
    "run": {"rescheduled": 2, "too late": 3, "not found": 1},
    "move": {"moved": 2, "too late": 3, "not found": 1},
    "requeue": {"requeued": 1, "key taken": 1, "too late": 3, "not found": 1},
    "purge": {"purged": 2, "too late": 3, "not found": 1},
}


@pytest.mark.parametrize(("verb", "verdicts"), FORESEEN.items(), ids=list(FORESEEN))
def test_each_verdict_of_a_verb_has_a_line_and_a_word_in_its_help(verb: str, verdicts: dict[str, int]) -> None:
    assert verdicts.keys() <= verbs.VERBS[verb].lines.keys()
    assert [verdict for verdict in verbs.VERBS[verb].lines if verdict not in verbs.VERBS[verb].help] == []


@EVERY_VERB
def test_mixed_verdicts_are_foreseen_and_end_with_exit_code_4(verb: list[str]) -> None:
    waiting, crashed, running, done = schedule(4, due=-1)
    claim(crashed, running)
    unguarded(Message).filter(pk=crashed).update(state=State.SCHEDULED, leased_until=None, worker="")
    [taken] = schedule(key="k")
    cancel_message(Message.objects.filter(pk__in=[done, taken]))
    schedule(key="k")
    ids = [waiting, crashed, running, done, taken, 10**12]
    words = ["delayq_act", *verb, *map(str, ids), "--json"]
    would = run(*words, "--dry-run")
    assert (would.code, would.json["answers"], would.json["dry_run"]) == (4, FORESEEN[verb[0]], True)
    assert changed(*ids[:-1]) == set()
    ran = run(*words, "--yes")
    assert (ran.code, ran.json["answers"]) == (4, FORESEEN[verb[0]])
    assert ran.json.get("due_to_come") == (0 if verb[0] == "requeue" else None)
    left = 6 - len(changed(*ids[:-1]))
    assert f"{left} of 6 messages cannot be changed: " in ran.err


@EVERY_MOVE
def test_reason_and_actor_are_in_the_log(verb: list[str]) -> None:
    [pk, other] = messages_for(verb, 2)
    assert run("delayq_act", *verb, str(pk), "--reason", "the bank asked").code == 0
    assert changed(pk, other) == {pk}
    last = log_of(Message.objects.get(pk=pk))[-1]
    assert last.reason.removeprefix("priority 0 → 7: ") == "the bank asked"
    assert "@" in last.actor


def test_ids_are_read_from_stdin_and_changed_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    *ids, other = schedule(1_101)
    monkeypatch.setattr(sys, "stdin", StringIO("\n".join(map(str, ids)) + " \n\n"))
    ran = run("delayq_act", "reschedule", "--due-at", "1h", "-", "--yes", "--json")
    assert (ran.code, ran.json["answers"]) == (0, {"rescheduled": 1_100})
    assert changed(*ids, other) == set(ids)


@EVERY_VERB
def test_several_messages_are_not_changed_without_a_confirmation(verb: list[str]) -> None:
    ids = messages_for(verb, 2)
    ran = run("delayq_act", *verb, *map(str, ids))
    assert (ran.code, changed(*ids)) == (2, set())
    assert f"This will {verb[0]} 2 messages" in ran.err
    assert "--yes" in ran.err


@EVERY_VERB
def test_a_call_without_one_selection_is_refused(verb: list[str]) -> None:
    [pk] = messages_for(verb)
    refused = run("delayq_act", *verb, "--yes")
    assert refused.code == 2
    assert ("To start a worker: run_delayq." in refused.err) == (verb[0] == "run")
    assert run("delayq_act", *verb, "--yes", str(pk), "--topic", "t.ok").code == 2
    state = "running" if verb[0] == "purge" else "consumed"
    assert run("delayq_act", *verb, "--yes", "--state", state).code != 0
    assert changed(pk) == set()


@pytest.mark.console
@EVERY_MOVE
def test_the_action_is_in_the_audit(verb: list[str]) -> None:
    messages_for(verb, 3)
    run("delayq_act", *verb, "--topic", "t.ok", "--queue", "default", "--reason", "the bank asked", "--yes")
    assert audited() == (verb[0], "topic t.ok, queue default", "the bank asked", [3])


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def fail() -> None:
    raise OperationalError("deadlock detected")


@pytest.mark.console
@pytest.mark.parametrize(
    ("happens", "code", "words"), [(interrupt, 130, "Interrupted"), (fail, 69, "deadlock detected")]
)
def test_what_was_done_before_the_end_of_a_command_is_told_and_audited(
    happens: Callable[[], None], code: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = schedule(1_100)
    asked = common.Interruptible.asked

    def after_a_batch(interruption: common.Interruptible) -> bool:
        happens()
        return asked(interruption)

    monkeypatch.setattr(common.Interruptible, "asked", after_a_batch)
    ran = run("delayq_act", "cancel", *map(str, ids), "--yes", "--json")
    assert (ran.code, ran.json["answers"], words in ran.err) == (code, {"cancelled": 1_000}, True)
    assert len(cancelled()) == 1_000
    assert audited()[::3] == ("cancel", [1_000])


def audited() -> tuple[str, str, str, list[int]]:
    """Return the last action of the audit: its name, its target, the reason and the numbers."""
    from django_delayq.console.models import AuditEvent

    last = AuditEvent.objects.latest("pk")
    return last.action, last.target, last.reason, [*last.outcomes.values()]
