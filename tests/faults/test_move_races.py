"""Two moves of one message at the same moment have one winner, and all answers are true."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.db import connection, transaction
from django.utils import timezone

from django_delayq import (
    Answer,
    KeyConflict,
    OnConflict,
    Verdict,
    cancel_message,
    requeue_message,
    reschedule_message,
    run_message,
    schedule_message,
    schedule_messages,
)
from django_delayq.core.states import State
from django_delayq.models import Message, Transition
from django_delayq.record import crashes, transitions
from django_delayq.record.sql import statements
from django_delayq.record.sql.rows import Claimed, Failure, LeaseRenewal, Success, Ticket
from tests.support.record_of import log_of, path_of
from tests.support.rows import unguarded
from tests.support.together import Together
from tests.support.transactions import unfinished, waits_for_a_lock
from tests.support.workers import eventually

from .oracle import no_path

ROUNDS = 20
DB = "default"


def rounds() -> range:
    # SQLite has one writer: fewer moves can interleave, so fewer rounds show it, and each round is slower.
    return range(ROUNDS if connection.vendor == "postgresql" else ROUNDS // 3)


def due_messages(number: int, **options: Any) -> list[Message]:
    """Schedule messages that are surely due: "now" is rounded up, and would lose every race against a claim."""
    terms: Any = {"topic": "t.ok", "due_at": timezone.now() - timedelta(seconds=1), **options}
    return schedule_messages([terms] * number)


def due_message(**options: Any) -> Message:
    return due_messages(1, **options)[0]


def claim(*messages: Message, worker: str = "w1", lease: float = 60.0) -> list[Claimed]:
    return transitions.claim(DB, [Ticket(m.pk) for m in messages], {"t.ok": lease}, worker)


def against_a_claim(together: Together, number: int, message: Message, move: Callable[[], Any]) -> list[Any]:
    """Move a message while it is claimed, in every second round before; return the answer, and what was claimed."""
    moved = threading.Event()

    def answer() -> Any:
        try:
            return move()
        finally:
            moved.set()

    def claim_it() -> list[Claimed]:
        assert number % 2 or moved.wait(60)
        return claim(message, worker="other")

    return together(answer, claim_it)


def overdue() -> tuple[Message, Claimed]:
    """Return a message whose lease has run out, and its claim."""
    message = due_message()
    [claimed] = claim(message)
    unguarded(Message).filter(pk=message.pk).update(leased_until=timezone.now() - timedelta(seconds=1))
    return message, claimed


def fresh(message: Message) -> Message:
    return Message.objects.get(pk=message.pk)


def assert_the_log_tells_the_whole_story(message: Message) -> None:
    assert no_path(fresh(message), log_of(message)) == []


def cancel_and_claim(message: Message) -> tuple[Answer, list[Claimed]]:
    return cancel_message(message), claim(message, worker="after")


def test_no_delivery_starts_after_a_cancel_was_answered(together: Together) -> None:
    for number in rounds():
        message = due_message()

        def cancel_and_claim(message: Message = message) -> Any:
            return cancel_message(message), claim(message, worker="after")

        (answer, after), claimed = against_a_claim(together, number, message, cancel_and_claim)
        if answer.verdict == Verdict.CANCELLED:
            assert claimed == after == []
            assert path_of(message) == ["scheduled", "cancelled"]
        else:
            assert answer.verdict == Verdict.REQUESTED
            assert [row.id for row in claimed] == [message.pk]
            assert fresh(message).cancel_requested
        assert_the_log_tells_the_whole_story(message)


def test_a_reschedule_against_a_claim_has_one_winner(together: Together) -> None:
    for number in rounds():
        message = due_message()
        later = timezone.now() + timedelta(hours=1)
        put_off = partial(reschedule_message, message, due_at=later)
        answer, claimed = against_a_claim(together, number, message, put_off)
        assert bool(answer) != bool(claimed)
        now = fresh(message)
        if answer:
            assert (now.state, now.deliveries) == (State.SCHEDULED, 0)
            assert now.due_at >= later
        else:
            assert (answer.verdict, answer.state) == (Verdict.TOO_LATE, State.RUNNING)
            assert now.due_at < later
        assert_the_log_tells_the_whole_story(message)


def test_two_reschedules_are_both_logged_and_the_last_one_stands(together: Together) -> None:
    for _ in rounds():
        message = schedule_message("t.ok", delay=60)
        answers = together(lambda m=message: reschedule_message(m, delay=600), lambda m=message: run_message(m))
        assert all(answers)
        assert_the_log_tells_the_whole_story(message)
        last = Transition.objects.filter(message=message).order_by("-number")[0]
        assert fresh(message).due_at == last.due_at


def test_two_consumers_that_claim_the_same_ids_share_them(together: Together) -> None:
    for _ in range(5):
        messages = due_messages(40)
        shares = together(*[lambda w=w, m=messages: claim(*m, worker=f"w{w}") for w in range(4)])
        claimed = [row.id for share in shares for row in share]
        assert len(claimed) == len(set(claimed))
        rest = claim(*messages, worker="last")
        assert sorted([*claimed, *(row.id for row in rest)]) == sorted(m.pk for m in messages)
        assert set(Message.objects.values_list("deliveries", flat=True)) == {1}
        for worker, share in enumerate(shares):
            rows = Message.objects.filter(pk__in=[row.id for row in share])
            assert {m.worker for m in rows} <= {f"w{worker}"}
        for message in messages:
            assert_the_log_tells_the_whole_story(message)
        unguarded(Message).delete()


def test_consumers_that_find_messages_by_query_share_them(together: Together) -> None:
    messages = due_messages(100)

    def take() -> list[int]:
        mine: list[int] = []
        for _ in range(200):
            with transitions.exclusively(DB):
                tickets = statements(DB).due("default", ["t.ok"], 3)
                mine += [row.id for row in transitions.claim(DB, tickets, {"t.ok": 60.0}, "w")]
            if not tickets:
                break
        return mine

    shares = together(*[take] * 4)
    everything = [pk for share in shares for pk in share]
    assert sorted(everything) == sorted(m.pk for m in messages)


@pytest.mark.parametrize("policy", list(OnConflict))
def test_eight_callers_with_one_key_make_one_message(together: Together, policy: OnConflict) -> None:
    for number in rounds()[:10]:
        calls = [
            lambda n=n, key=f"k{number}": schedule_message(
                "t.ok", {"caller": n}, delay=60 + n, key=key, on_conflict=policy
            )
            for n in range(8)
        ]
        answers = together(*calls)
        live = Message.objects.get(topic="t.ok", key=f"k{number}")
        made = [answer for answer in answers if isinstance(answer, Message) and not answer.existed]
        others = [answer for answer in answers if not isinstance(answer, Message) or answer.existed]
        assert [m.pk for m in made] == [live.pk]
        if policy == OnConflict.ERROR:
            assert {type(other) for other in others} == {KeyConflict}
        else:
            assert {getattr(other, "pk", other) for other in others} == {live.pk}
        if policy in (OnConflict.DEBOUNCE, OnConflict.MERGE_DEBOUNCE):
            assert (live.due_at - live.created_at).total_seconds() > 66.9
        assert_the_log_tells_the_whole_story(live)


def test_a_keyed_schedule_against_the_end_of_the_holder_leaves_one_live_message_at_most(together: Together) -> None:
    for number in rounds():
        key = f"k{number}"
        holder = due_message(key=key)
        [claimed] = claim(holder)
        ended, second = together(
            lambda c=claimed: transitions.succeed(DB, [Success(c.id, c.deliveries, "a")]),
            lambda k=key: schedule_message("t.ok", key=k, on_conflict="keep"),
        )
        assert ended == {holder.pk}
        assert isinstance(second, Message)
        assert second.existed == (second.pk == holder.pk)
        live = Message.objects.filter(key=key, state=State.SCHEDULED).count()
        assert live == (0 if second.existed else 1)


def test_requeues_of_two_messages_with_one_key_revive_one_once(together: Together) -> None:
    for number in rounds():
        pair: list[Message] = []
        while len(pair) < 2:
            pair.append(due_message(key=f"k{number}"))
            assert cancel_message(pair[-1])
        answers = together(*[lambda m=message: requeue_message(m) for message in (*pair, pair[0])])
        verdicts = sorted(str(getattr(answer, "verdict", answer)) for answer in answers)
        assert verdicts in (["key taken", "requeued", "too late"], ["key taken", "key taken", "requeued"])
        assert Message.objects.filter(key=f"k{number}", state=State.SCHEDULED).count() == 1
        for message in pair:
            assert_the_log_tells_the_whole_story(message)


def test_a_reaper_against_a_late_success_that_is_reported_twice_never_undoes_it(together: Together) -> None:
    for _ in rounds():
        message, claimed = overdue()
        report = lambda c=claimed: transitions.succeed(DB, [Success(c.id, c.deliveries, "late")])  # noqa: E731
        reaped, *consumed = together(lambda: crashes.reap(DB, actor="reaper"), report, report)
        assert not isinstance(reaped, Exception), reaped
        assert sorted(map(len, consumed)) == [0, 1]
        assert fresh(message).state == State.CONSUMED
        assert_the_log_tells_the_whole_story(message)


def test_a_reaper_against_a_late_failure_ends_the_delivery_once(together: Together) -> None:
    for _ in rounds():
        message, claimed = overdue()
        failure = Failure(claimed.id, claimed.deliveries, "late", delay=timedelta(seconds=60), error="it failed")
        reaped, failed = together(lambda: crashes.reap(DB, actor="reaper"), lambda f=failure: transitions.fail(DB, [f]))
        assert len(reaped) + len(failed) == 1
        assert path_of(message) == ["scheduled", "running", "scheduled"]
        assert fresh(message).attempts == len(failed)


def test_a_reaper_against_an_extension_takes_no_lease_that_was_just_extended(together: Together) -> None:
    for _ in rounds():
        message, claimed = overdue()
        reaped, extended = together(
            lambda: crashes.reap(DB, actor="reaper"),
            lambda c=claimed: statements(DB).extend([LeaseRenewal(c.id, c.deliveries, 60.0)]),
        )
        assert bool(reaped) != bool(extended), (reaped, extended)
        assert fresh(message).state == (State.SCHEDULED if reaped else State.RUNNING)


def test_batches_in_opposite_order_do_not_wait_for_each_other(together: Together) -> None:
    """A deadlock would raise an error in one of the batches."""
    for _ in range(10):
        messages = due_messages(50)
        ids = [m.pk for m in messages]
        answers = together(
            lambda i=ids: transitions.cancel(DB, i),
            lambda i=ids: transitions.cancel(DB, i[::-1]),
            lambda m=messages: claim(*m[::-1]),
            lambda i=ids: transitions.reschedule(DB, i[::-1]),
        )
        assert [answer for answer in answers if isinstance(answer, Exception)] == []


def test_all_moves_at_once_leave_a_log_without_gaps(together: Together) -> None:
    for _ in rounds():
        message = due_message()

        def deliver(m: Message) -> Any:
            return [
                transitions.succeed(DB, [Success(row.id, row.deliveries, "a")])
                if row.deliveries % 2
                else transitions.fail(DB, [Failure(row.id, row.deliveries, "a")])
                for row in claim(m)
            ]

        answers = together(
            lambda m=message: deliver(m),
            lambda m=message: deliver(m),
            lambda m=message: cancel_message(m),
            lambda m=message: requeue_message(m),
            lambda m=message: reschedule_message(m, delay=0),
            lambda: crashes.reap(DB, actor="reaper"),
        )
        assert [answer for answer in answers if isinstance(answer, Exception)] == []
        assert_the_log_tells_the_whole_story(message)


# --- one holds the row while the other comes --------------------------------------------------------------------------


@pytest.mark.postgresql("needs row locks")
@pytest.mark.parametrize(
    ("committed", "verdict"), [(True, Verdict.REQUESTED), (False, Verdict.CANCELLED)], ids=["commit", "rollback"]
)
def test_a_cancel_that_meets_an_uncommitted_claim_waits_for_its_end(
    together: Together, committed: bool, verdict: Verdict
) -> None:
    message = due_message()
    ready = threading.Event()

    def hold() -> None:
        with transaction.atomic():
            assert claim(message)
            ready.set()
            eventually(waits_for_a_lock, "the other waits for the row")
            transaction.set_rollback(not committed)

    def steer() -> Any:
        assert ready.wait(60)
        return cancel_message(message)

    held, answer = together(hold, steer)
    assert held is None
    assert answer.verdict == verdict
    assert_the_log_tells_the_whole_story(message)


@pytest.mark.postgresql("needs row locks")
def test_a_claim_does_not_wait_for_an_uncommitted_cancel(together: Together) -> None:
    message = due_message()
    with transaction.atomic():
        assert cancel_message(message)
        assert together(lambda: claim(message)) == [[]]
        transaction.set_rollback(True)
    assert [row.id for row in claim(message)] == [message.pk]


@pytest.mark.postgresql("needs row locks")
def test_a_failure_that_waited_for_a_cancel_request_ends_in_cancelled(together: Together) -> None:
    message = due_message()
    [claimed] = claim(message)

    def fail() -> Any:
        return transitions.fail(DB, [Failure(claimed.id, claimed.deliveries, "a", delay=timedelta(0))])

    def let_go() -> None:
        eventually(waits_for_a_lock, "the failure waits for the row")
        go.set()

    with unfinished(lambda: cancel_message(message)) as go:
        failed, _go = together(fail, let_go)
    assert [moved.after for moved in failed] == [State.CANCELLED]
    assert fresh(message).state == State.CANCELLED
