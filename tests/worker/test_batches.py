"""Batch handlers in a worker process: which messages begin together, and what becomes of each."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.db import IntegrityError, OperationalError, transaction
from django.utils import timezone

from django_delayq import Delivered, Reject, RetryLater, cancel_message, handler, schedule_message, schedule_messages
from django_delayq.core.outcomes import Ack, GiveUp, Recorded, Release, Retry
from django_delayq.core.states import FINAL, State
from django_delayq.middleware import Handled, Middleware
from django_delayq.models import Message, Transition
from django_delayq.signals import message_failed
from django_delayq.worker.run.batches import execute_batch
from django_delayq.worker.run.delivery import Delivery
from django_delayq.worker.shared.connections import after_task
from tests.app.models import Effect
from tests.support.claims import claimed, state
from tests.support.middlewares import installed
from tests.support.processes import Gate, Start
from tests.support.receivers import receiving
from tests.support.record_of import effects_per_message, log_of, once_each, path_of, wait_until, wait_until_all
from tests.support.steps import lose
from tests.support.workers import eventually


@pytest.fixture(autouse=True)
def takes_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELAYQ_TEST_BATCHES", "1")


pytestmark = pytest.mark.django_db(transaction=True)
in_processes = pytest.mark.usefixtures("timed_by")


def several(topic: str, number: int, payload: object = None) -> list[Message]:
    return schedule_messages({"topic": topic, "payload": payload} for _ in range(number))


def sizes() -> Counter[int]:
    """Count the calls by the number of their messages."""
    notes = Counter(Effect.objects.values_list("note", flat=True))
    assert all(int(note.rpartition(" ")[2]) >= number for note, number in notes.items())
    return Counter(notes.values())


@in_processes
@pytest.mark.parametrize("topic", ["b.effect", "b.tx", "b.async"])
def test_messages_that_wait_begin_together_and_each_is_consumed(start: Start, topic: str) -> None:
    messages = several(topic, 100)
    other = several("t.effect", 10)
    start("--threads", "2")
    wait_until_all(State.CONSUMED, 110)
    assert effects_per_message() == once_each([*messages, *other])
    Effect.objects.exclude(message_id__in=[message.pk for message in messages]).delete()
    found = sizes()
    assert 1 < max(found) <= (20 if topic == "b.tx" else 10)
    assert all(path_of(message) == ["scheduled", "running", "consumed"] for message in messages)


@in_processes
def test_one_message_waits_for_no_company(start: Start) -> None:
    start()
    message = wait_until(schedule_message("b.effect"), State.CONSUMED)
    assert effects_per_message() == once_each([message])


@in_processes
def test_a_lingering_batch_begins_when_it_is_full(start: Start) -> None:
    start("--threads", "2")
    messages = several("b.linger", 2)
    started = timezone.now()
    # Nothing but the third message, or ten seconds, ends the wait of the first two.
    messages += several("b.linger", 1)
    wait_until_all(State.CONSUMED, 3)
    took = timezone.now() - started
    assert sizes() == Counter({3: 1}) or took > timedelta(seconds=10)


@in_processes
def test_the_only_thread_waits_for_a_company_that_comes(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELAYQ_TEST_BATCHES", "pairs")
    messages = several("b.pair", 20)
    start("--threads", "1")
    wait_until_all(State.CONSUMED, 20)
    assert effects_per_message() == once_each(messages)
    assert sizes() == Counter({2: 10})


@in_processes
def test_a_lingering_batch_begins_when_its_time_is_over_and_forgets_none(start: Start) -> None:
    start("--threads", "3")
    for _ in range(20):
        several("b.briefly", 7)
    wait_until_all(State.CONSUMED, 140)
    assert max(effects_per_message().values()) == 1


@in_processes
def test_a_shutdown_does_not_wait_for_company(start: Start) -> None:
    worker = start()
    message = schedule_message("b.linger")
    eventually(lambda: Message.objects.filter(pk=message.pk, state=State.RUNNING).exists(), "it is claimed")
    assert worker.stop() == 0
    message.refresh_from_db()
    assert message.state in (State.SCHEDULED, State.CONSUMED)


@in_processes
def test_what_is_left_of_a_lingering_batch_is_released_when_no_thread_becomes_free(start: Start, gate: Gate) -> None:
    start("--threads", "2")
    messages = several("b.pair_gate", 1, gate.payload)
    wait_until(messages[0], State.RUNNING)
    # One thread waits for company, and the other one finds these.
    messages += several("b.pair_gate", 9, gate.payload)

    def each_runs_or_was_released() -> bool:
        released = Transition.objects.filter(reason="waited too long for a thread").values_list("message_id", flat=True)
        seen = {*released, *(int(path.name.removeprefix("begun-")) for path in gate.folder.glob("begun-*"))}
        return seen >= {message.pk for message in messages}

    eventually(each_runs_or_was_released, "none is kept")


@in_processes
def test_a_message_under_a_rate_may_wait_for_company(start: Start) -> None:
    start()
    message = wait_until(schedule_message("b.rate"), State.CONSUMED)
    assert effects_per_message() == once_each([message])


@in_processes
@pytest.mark.parametrize("before", [0, 1])
def test_a_batch_waits_for_no_company_until_a_message_expires(start: Start, before: int) -> None:
    start()

    def begins_in_time() -> bool:
        """A busy machine may let one expire."""
        several("b.linger", before)
        message = schedule_message("b.linger", expires="2s")
        eventually(lambda: _state_of(message) in FINAL, "it has ended")
        return _state_of(message) == State.CONSUMED

    eventually(begins_in_time, "a message begins before it expires")


def _state_of(message: Message) -> str:
    message.refresh_from_db()
    return message.state


@in_processes
def test_each_message_gets_the_answer_of_the_handler(start: Start) -> None:
    answers = ["ok", "later", "reject", "fail"] * 5
    messages = [schedule_message("b.answers", {"answer": answer}) for answer in answers]
    start("--threads", "2")
    eventually(
        lambda: not Message.objects.filter(state__in=[State.SCHEDULED, State.RUNNING]).exists(), "all have ended"
    )
    for answer, message in zip(answers, messages, strict=True):
        message.refresh_from_db()
        log = log_of(message)
        if answer == "reject":
            assert (message.state, log[-1].error) == (State.DEAD, "Reject: not wanted")
            continue
        assert message.state == State.CONSUMED
        errors = [row.error for row in log if row.error]
        wanted = {
            "ok": [],
            "later": ["RetryLater: the handler asked for a later delivery"],
            "fail": ["ValueError: not yet"],
        }
        assert errors == wanted[answer]
    rejected = {message.pk for answer, message in zip(answers, messages, strict=True) if answer == "reject"}
    assert effects_per_message() == once_each([message for message in messages if message.pk not in rejected])


@in_processes
def test_a_bad_message_costs_its_neighbours_one_attempt_at_most(start: Start) -> None:
    good = several("b.tx", 60)
    bad = several("b.tx", 2, {"bad": True})
    good += several("b.tx", 60)
    start("--threads", "2")
    eventually(
        lambda: not Message.objects.filter(state__in=[State.SCHEDULED, State.RUNNING]).exists(), "all have ended"
    )
    for message in good:
        message.refresh_from_db()
        assert (message.state, message.attempts <= 1) == (State.CONSUMED, True)
    for message in bad:
        message.refresh_from_db()
        assert (message.state, message.attempts) == (State.DEAD, 4)
    # What a call that failed has written is undone.
    assert effects_per_message() == once_each(good)


@in_processes
def test_a_message_that_failed_comes_alone(start: Start) -> None:
    messages = several("b.slow", 6)
    start("--threads", "2")
    wait_until_all(State.CONSUMED, 6)
    second = Effect.objects.filter(delivery__gt=1)
    assert {note.rpartition(" ")[2] for note in second.values_list("note", flat=True)} == {"1"}
    for message in messages:
        (failed,) = [row for row in log_of(message) if row.error]
        assert failed.error == "HandlerTimeout: ran longer than its timeout of 0.2 s"


@in_processes
def test_a_limit_counts_each_message(start: Start) -> None:
    messages = several("b.limited", 12)
    start("--threads", "4")
    wait_until_all(State.CONSUMED, 12)
    assert effects_per_message() == once_each(messages)
    assert max(sizes()) <= 3


@in_processes
def test_a_cancel_concerns_one_message_of_a_batch(start: Start, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    messages = several("b.gate", 4, gate.payload)
    start("--threads", "1")
    first = messages[0]
    eventually(gate.how_many_began, "the batch begins")
    running = Message.objects.filter(state=State.RUNNING, pk__in=[int(p.name[6:]) for p in tmp_path.glob("begun-*")])
    cancelled = running.get(pk=first.pk) if running.filter(pk=first.pk).exists() else running[0]
    cancel_message(cancelled.pk)
    gate.open()
    wait_until_all(State.CONSUMED, 4)


def _is_over(messages: list[Message]) -> Callable[[], bool]:
    ids = [message.pk for message in messages]
    return lambda: not Message.objects.filter(pk__in=ids).exclude(state=State.CONSUMED).exists()


@in_processes
def test_a_message_that_kills_its_process_is_found_among_its_neighbours(start: Start) -> None:
    bad = several("b.kill", 1, {"kills": True})
    good = several("b.kill", 12, {})
    start("--threads", "2")
    eventually(_is_over(good), "the good ones are consumed")
    assert effects_per_message() == once_each(good)
    bad[0].refresh_from_db()
    assert bad[0].state in (State.SCHEDULED, State.RUNNING, State.DEAD)


# --- without a process: one call of a handler -------------------------------------------------------------------------


@pytest.fixture
def taken(transactional_db: None) -> Callable[..., list[Delivery]]:
    """Register a batch handler, and claim three messages for it."""

    def take(function: Callable[[list[Delivered]], None], **options: Any) -> list[Delivery]:
        handler("b.here", batch=5, retry=False, **options)(function)
        return claimed(*["b.here"] * 3)

    return take


def serialization_failure() -> OperationalError:
    """Return what Django raises when another transaction got in the way."""
    error = OperationalError("could not serialize access")
    error.__cause__ = psycopg.errors.SerializationFailure()
    return error


def leave(messages: list[Delivered]) -> None:
    Effect.objects.bulk_create(Effect(message_id=message.id, delivery=message.deliveries) for message in messages)


def test_a_transaction_with_a_message_that_was_taken_over_is_undone(taken: Callable[..., list[Delivery]]) -> None:
    def work(messages: list[Delivered]) -> None:
        leave(messages)

    batch = taken(work, transactional=True)
    # Its lease was lost, and then it was cancelled.
    lose(batch[1].id)
    cancel_message(batch[1].id)
    outcomes = execute_batch(batch, "worker:w/0")
    assert not Effect.objects.exists()
    assert [type(outcome) for outcome in outcomes] == [Release] * 3
    # The two others may begin again at once, and it costs them no attempt.
    again = execute_batch([batch[0], batch[2]], "worker:w/0")
    assert [type(outcome) for outcome in again] == [Recorded] * 2
    assert effects_per_message() == Counter([batch[0].id, batch[2].id])


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ValueError("bad"), GiveUp),
        (RetryLater("5m"), Retry),
        (Reject("no"), GiveUp),
        (serialization_failure(), Release),
    ],
)
def test_a_savepoint_for_each_message_undoes_what_one_wrote_and_keeps_the_others(
    taken: Callable[..., list[Delivery]], error: Exception, outcome: type
) -> None:
    def work(messages: list[Delivered]) -> None:
        for message in messages:
            try:
                with transaction.atomic():
                    leave([message])
                    if message is messages[1]:
                        Effect.objects.create(pk=Effect.objects.get(message_id=message.id).pk)
            except IntegrityError:
                message.fail(error)

    batch = taken(work, transactional=True)
    found = [type(one) for one in execute_batch(batch, "worker:w/0")]
    assert found == [Recorded, outcome, Recorded]
    assert effects_per_message() == Counter([batch[0].id, batch[2].id])
    assert [state(one) for one in batch] == [State.CONSUMED, State.RUNNING, State.CONSUMED]


def test_what_a_transactional_handler_does_on_commit_cannot_undo_its_successes(
    taken: Callable[..., list[Delivery]],
) -> None:
    def work(messages: list[Delivered]) -> None:
        messages[0].reject("not this one")
        leave(messages[1:])
        transaction.on_commit(fail)

    def fail() -> None:
        raise RuntimeError("after the commit")

    batch = taken(work, transactional=True)
    outcomes = execute_batch(batch, "worker:w/0")
    assert [type(outcome) for outcome in outcomes] == [GiveUp, Recorded, Recorded]
    assert isinstance(outcomes[0], GiveUp)
    assert outcomes[0].error == "Reject: not this one"
    assert [state(delivery) for delivery in batch[1:]] == [State.CONSUMED] * 2


def test_a_block_that_a_batch_leaves_open_fails_its_messages(taken: Callable[..., list[Delivery]]) -> None:
    def leave_open(messages: list[Delivered]) -> None:
        leave(messages)
        transaction.atomic().__enter__()

    outcomes = execute_batch(taken(leave_open, transactional=True), "worker:w/0")
    assert [type(outcome) for outcome in outcomes] == [GiveUp] * 3
    after_task()
    assert not Effect.objects.exists()


def test_middleware_surrounds_each_message_of_a_batch_and_sees_its_outcome(
    taken: Callable[..., list[Delivery]],
) -> None:
    seen: list[tuple[int, str | None]] = []

    class Seeing(Middleware):
        @contextmanager
        def handling(self, message: Handled) -> Iterator[None]:
            yield
            seen.append((message.id, message.outcome))

    def work(messages: list[Delivered]) -> None:
        messages[1].fail(ValueError("bad"))

    with installed(Seeing()):
        batch = taken(work)
        execute_batch(batch, "worker:w/0")
    assert dict(seen) == dict(zip([d.id for d in batch], ["consumed", "dead", "consumed"], strict=True))


@pytest.mark.parametrize("refused", range(3))
@pytest.mark.parametrize("transactional", [False, True])
def test_a_message_that_middleware_refuses_costs_the_others_nothing(
    taken: Callable[..., list[Delivery]], refused: int, transactional: bool
) -> None:
    outer: list[tuple[int, str | None]] = []

    class Seeing(Middleware):
        @contextmanager
        def handling(self, message: Handled) -> Iterator[None]:
            try:
                yield
            finally:
                outer.append((message.id, message.outcome))

    class Refusing(Middleware):
        @contextmanager
        def handling(self, message: Handled) -> Iterator[None]:
            if message.id == batch[refused].id:
                raise Reject("its tenant is suspended")
            yield

    with installed(Seeing(), Refusing()):
        batch = taken(leave, transactional=transactional)
        outcomes = execute_batch(batch, "worker:w/0")
    assert [type(outcome) for outcome in outcomes] == [GiveUp if each == refused else Release for each in range(3)]
    assert not Effect.objects.exists()
    entered = batch[: refused + 1]
    assert dict(outer) == {one.id: "dead" if one is batch[refused] else "released" for one in entered}


@pytest.mark.parametrize("replaces", [False, True])
def test_a_middleware_may_answer_what_another_one_raised_on_entry(
    taken: Callable[..., list[Delivery]], replaces: bool
) -> None:
    class Answering(Middleware):
        @contextmanager
        def handling(self, message: Handled) -> Iterator[None]:
            try:
                yield
            except ValueError:
                if replaces:
                    raise RetryLater("1m") from None

    class Failing(Middleware):
        @contextmanager
        def handling(self, message: Handled) -> Iterator[None]:
            if message.id == batch[1].id:
                raise ValueError("bad")
            yield

    with installed(Answering(), Failing()):
        batch = taken(leave)
        outcomes = execute_batch(batch, "worker:w/0")
    assert [type(outcome) for outcome in outcomes] == [Release, Retry if replaces else GiveUp, Release]


def test_a_timeout_in_middleware_is_that_of_the_whole_batch(taken: Callable[..., list[Delivery]]) -> None:
    class Waiting(Middleware):
        @contextmanager
        def handling(self, message: Handled) -> Iterator[None]:
            while message.id == batch[1].id:
                batch[0].interrupt()
                time.sleep(0.01)
            yield

    with installed(Waiting()):
        batch = taken(leave, timeout="1m")
        outcomes = execute_batch(batch, "worker:w/0")
    assert [outcome.exception for outcome in outcomes if isinstance(outcome, GiveUp)] == [
        "django_delayq.core.exceptions.HandlerTimeout"
    ] * 3
    assert not Effect.objects.exists()


def test_an_extended_message_extends_the_call(taken: Callable[..., list[Delivery]]) -> None:
    deadlines: list[Any] = []

    def work(messages: list[Delivered]) -> None:
        before = [message.deadline for message in messages]
        messages[2].extend("1h")
        deadlines.extend(zip(before, [message.deadline for message in messages], strict=True))

    execute_batch(taken(work, timeout="10s"), "worker:w/0")
    assert all(after - before > timedelta(minutes=50) for before, after in deadlines)


@pytest.mark.parametrize("transactional", [False, True])
def test_a_handler_may_take_its_messages_out_of_the_list(
    taken: Callable[..., list[Delivery]], transactional: bool
) -> None:
    def work(messages: list[Delivered]) -> None:
        while messages:
            leave([messages.pop()])

    batch = taken(work, transactional=transactional)
    outcomes = execute_batch(batch, "worker:w/0")
    assert [type(outcome) for outcome in outcomes] == [Recorded if transactional else Ack] * 3
    assert effects_per_message() == Counter(delivery.id for delivery in batch)


def test_a_batch_whose_handler_has_ended_is_not_stuck(taken: Callable[..., list[Delivery]]) -> None:
    stuck: list[bool] = []

    def work(messages: list[Delivered]) -> None:
        raise ValueError("bad")

    def see(**_: Any) -> None:
        # Receivers may take longer than the timeout of the handler.
        time.sleep(max(0.0, (deadline - timezone.now()).total_seconds()))
        stuck.extend(delivery.is_overtime() for delivery in batch)

    batch = taken(work, timeout="0.05s")
    deadline = timezone.now() + timedelta(seconds=0.1)
    with receiving(see, message_failed):
        execute_batch(batch, "worker:w/0")
    assert stuck == [False] * 9


def test_only_a_batch_handler_answers_single_messages(transactional_db: None) -> None:
    (delivery,) = claimed("t.ok")
    calls: list[Callable[[], None]] = [
        delivery.reject,
        lambda: delivery.retry_later("1m"),
        lambda: delivery.fail(ValueError()),
    ]
    for call in calls:
        with pytest.raises(AttributeError, match=r"only a batch handler .*raise"):
            call()


def test_a_failure_of_one_message_is_an_exception(taken: Callable[..., list[Delivery]]) -> None:
    def work(messages: list[Delivered]) -> None:
        messages[0].fail("bad")  # type: ignore[arg-type]

    outcomes = execute_batch(taken(work), "worker:w/0")
    assert [outcome.exception for outcome in outcomes if isinstance(outcome, GiveUp)] == ["builtins.TypeError"] * 3
