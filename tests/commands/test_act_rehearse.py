"""``delayq_act rehearse``: a handler runs on a real message, and all that it has done is taken back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import connection, transaction

from django_delayq import Reject, RetryLater, cancel_message, handler, pause_queue, schedule_message
from django_delayq.contrib.tasks.compat import TaskResultStatus, task_finished
from django_delayq.core.states import State
from django_delayq.middleware import Middleware
from django_delayq.models import Message, Transition
from django_delayq.project.registry import Delivered
from django_delayq.signals import message_dead, message_failed, message_scheduled, operator_action
from tests.app import tasks
from tests.app.models import Effect
from tests.support.claims import needs_row_locks
from tests.support.commands import held, run
from tests.support.middlewares import installed
from tests.support.receivers import heard
from tests.support.steps import TOPIC, bring, claimed, due, later, message, snapshot
from tests.support.transactions import unfinished

pytestmark = pytest.mark.django_db(transaction=True)


def affect(delivered: Delivered) -> None:
    Effect.objects.create(message_id=delivered.id, delivery=delivered.deliveries, note=delivered.payload["note"])


def receive(function: Callable[[Any], Any], **terms: Any) -> None:
    handler(TOPIC, **{"transactional": True, "retry": ["1m"], **terms})(function)


def rehearse(pk: int, *words: str) -> Any:
    return run("delayq_act", "rehearse", str(pk), *words)


def everything() -> Any:
    rows = [list(model._base_manager.order_by("pk").values()) for model in (Message, Effect)]
    return rows, list(Transition.objects.order_by("message_id", "number").values())


@pytest.mark.parametrize("where", sorted({*State} - {State.RUNNING}))
def test_the_outcome_and_the_statements_are_told_and_nothing_is_written(where: State) -> None:
    receive(affect)
    pk = bring(where, payload={"note": "größe"})
    before = everything()
    ran = rehearse(pk)
    assert (ran.code, ran.err) == (0, "")
    first, *statements, last = ran.out.splitlines()
    assert (first, last) == ("consumed", "All was rolled back.")
    [inserted] = [statement for statement in statements if "INSERT INTO" in statement]
    assert inserted.startswith("1. ")
    assert "größe" in inserted
    assert everything() == before


@pytest.mark.parametrize(
    ("error", "outcome", "said"),
    [
        (ValueError("no such order"), "retried", "retried in 1 m: ValueError: no such order"),
        (RetryLater("5m", "bank"), "retried", "retried in 5 m: RetryLater: bank"),
        (Reject("gone"), "dead", "dead: Reject: gone"),
        (SystemExit(3), "retried", "retried in 1 m: SystemExit: 3"),
    ],
)
def test_what_the_handler_raises_is_told_with_what_would_follow(error: BaseException, outcome: str, said: str) -> None:
    def fail(delivered: Delivered) -> None:
        affect(delivered)
        raise error

    receive(fail)
    pk = due({"note": "x"}).pk
    before = everything()
    with heard(message_failed) as failed, heard(message_dead) as dead, heard(operator_action) as acted:
        ran = rehearse(pk)
        shown = rehearse(pk, "--json")
    assert (ran.code, ran.err) == (1, f"The handler of topic {TOPIC} did not succeed.")
    assert ran.out.splitlines()[0] == said
    assert ("in fail" in ran.out) == (not isinstance(error, RetryLater | Reject))
    assert (shown.json["id"], shown.json["outcome"]) == (pk, outcome)
    assert "INSERT INTO" in " ".join(shown.json["statements"])
    assert everything() == before
    assert (failed, dead, acted) == ([], [], [])


def test_what_others_wrote_gives_a_terminal_no_orders() -> None:
    def fail(delivered: Delivered) -> None:
        affect(delivered)
        raise ValueError(delivered.payload["note"])

    receive(fail)
    out = rehearse(bring(State.SCHEDULED, payload={"note": "a\u009b2J\x1b]0;b\x07"})).out
    assert all(sign.isprintable() or sign == "\n" for sign in out)
    assert out.count(r"a\x9b2J\x1b]0;b\x07") >= 3


def test_a_dead_message_is_rehearsed_as_if_it_were_requeued() -> None:
    seen = []

    def look(delivered: Delivered) -> None:
        seen.append((delivered.attempt, delivered.attempts_left, delivered.deliveries))
        raise ValueError

    receive(look)
    pk = bring(State.DEAD)
    assert rehearse(pk).out.startswith("retried in 1 m: ValueError")
    assert seen == [(1, 1, 2)]


@pytest.mark.usefixtures("puts_are_flushed")
def test_nothing_follows_the_rollback() -> None:
    calls = []

    def chain(delivered: Delivered) -> None:
        transaction.on_commit(lambda: calls.append("on commit"))
        schedule_message(TOPIC, {"n": 2}, key=delivered.key, delay=60)
        schedule_message(TOPIC, delay=60)
        cancel_message(other.pk)
        assert Message.objects.count() == 4

    receive(chain)
    pk, other = due(key="k").pk, later()
    run("delayq_restore")
    before, there = everything(), held()
    with heard(message_scheduled) as scheduled:
        found = rehearse(pk, "--json").json
    assert found["outcome"] == "consumed"
    assert found["statements"].count(f"-- schedules a message of topic {TOPIC} in queue default") == 2
    assert found["statements"][-1].startswith("SELECT COUNT(*)")
    assert (everything(), calls, scheduled) == (before, [], [])
    assert held() == there
    assert there.keys() == {pk, other.pk}


def test_what_the_commit_would_find_is_found() -> None:
    def swallow(delivered: Delivered) -> None:
        try:
            with connection.cursor() as cursor:
                cursor.execute("SELECT * FROM there_is_none")
        except Exception:  # noqa: BLE001
            pass

    receive(swallow)
    ran = rehearse(due().pk)
    # PostgreSQL goes on with no statement after an error, and SQLite does.
    assert (ran.code == 1) == (connection.vendor == "postgresql")
    assert "there_is_none" in ran.out


def test_a_handler_cannot_end_the_transaction() -> None:
    def commit(delivered: Delivered) -> None:
        affect(delivered)
        with connection.cursor() as cursor:
            cursor.execute("COMMIT")

    receive(commit)
    pk = due({"note": "x"}).pk
    before = everything()
    ran = rehearse(pk)
    assert "The transaction of a transactional handler is ended by the worker" in ran.out
    assert ". COMMIT\n" in ran.out
    assert everything() == before


def test_pauses_due_times_and_expiry_do_not_matter() -> None:
    receive(affect)
    pause_queue("default")
    assert rehearse(later({"note": "x"}, expires="1h").pk).code == 0
    assert rehearse(bring(State.EXPIRED, payload={"note": "x"})).code == 0


def test_a_handler_may_extend_its_time_and_runs_inside_of_the_middleware() -> None:
    seen: list[Any] = []

    class Note(Middleware):
        @contextmanager
        def handling(self, message: Any) -> Iterator[None]:
            try:
                yield
            finally:
                seen.append(message.outcome)

    def extend(delivered: Delivered) -> None:
        delivered.extend("5m")
        assert not delivered.cancel_requested

    receive(extend)
    with installed(Note()):
        assert rehearse(due().pk).code == 0
    assert seen == ["consumed"]


@pytest.mark.parametrize(("note", "outcome"), [("fine", "consumed"), ("later", "retried"), ("fail", "retried")])
def test_a_task_is_rehearsed_and_does_not_end(note: str, outcome: str) -> None:
    with heard(task_finished) as finished:
        result = tasks.affect.enqueue(note)
        before = everything()
        assert rehearse(int(result.id), "--json").json["outcome"] == outcome
    assert (everything(), finished) == (before, [])
    result.refresh()
    assert result.status == TaskResultStatus.READY


def test_what_cannot_be_rehearsed_is_refused_in_words() -> None:
    async def wait(delivered: Delivered) -> None: ...

    def batch(delivered: list[Delivered]) -> None: ...

    before = due().pk
    assert rehearse(before).err == f"No handler here receives the topic {TOPIC}."
    handler("t.plain")(affect)
    handler("t.batch", batch=5, transactional=True)(batch)
    handler("t.wait", transactional=True)(wait)
    for topic, why in (
        ("t.plain", "is not transactional: what it does would stay."),
        ("t.batch", "takes batches: its outcome depends on all messages of one."),
        ("t.wait", "is async: what it has started could go on after the rollback."),
    ):
        pk = schedule_message(topic, {"note": "x"}, delay=60).pk
        at = snapshot(pk)
        ran = rehearse(pk)
        assert (ran.code, ran.out, ran.err) == (1, "", f"The handler of topic {topic} {why}")
        assert snapshot(pk) == at
    receive(affect)
    pk = claimed().id
    assert rehearse(pk).err == f"Message {pk} is running: wait for the end of its delivery."
    assert rehearse(10**9).err == f"Message {10**9} does not exist."
    assert not Effect.objects.exists()


def test_a_message_that_another_transaction_has_is_left_to_it() -> None:
    needs_row_locks()
    receive(affect)
    pk = due().pk
    with unfinished(lambda: Message.objects.select_for_update().get(pk=pk)):
        assert rehearse(pk).err == f"Message {pk} is locked by another transaction: it is about to run or to change."
    assert message(pk).moves == 1
