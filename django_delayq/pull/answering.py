"""Answers to messages that were taken: their success, their failure, their return, and more time for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from datetime import timedelta
from operator import attrgetter
from typing import Any, overload

from django.db import router

from .. import signals
from ..core import actors, values
from ..core.commits import on_commit
from ..core.durations import Duration
from ..core.states import State
from ..core.twins import async_twin
from ..models import Message
from ..project import validation
from ..record import transitions
from ..record.sql import statements
from ..record.sql.rows import Failure, LeaseRenewal, Success
from .ending import report
from .receipts import Receipt, read, signer

# The receipts of an answer to many messages.
Many = list[str] | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Answered:
    """The result of an answer. True when the record accepted it; else the text says why it was refused.

    ``state`` is that of the message after it; None: there is no such message any more. After ``extend``,
    ``cancel_requested`` tells that somebody wants the work to stop.
    """

    id: int
    done: bool
    state: State | None
    reason: str = ""
    cancel_requested: bool = False

    def __bool__(self) -> bool:
        return self.done

    def __str__(self) -> str:
        return self.reason or f"message {self.id} is {self.state}"


@overload
def ack(receipt: str, result: Any = None, *, using: str | None = None) -> Answered: ...
@overload
def ack(receipt: Many, result: Any = None, *, using: str | None = None) -> list[Answered]: ...
def ack(receipt: str | Many, result: Any = None, *, using: str | None = None) -> Answered | list[Answered]:
    """Report the success of a message, or of many in one statement, each with the ``result`` to keep.

    The success of an earlier delivery counts, too, while the message is live: its effect has happened. It does no harm
    to repeat an answer.
    """
    text = validation.result(result)

    def write(using: str, receipts: Sequence[Receipt]) -> dict[int, Answered]:
        return {pk: Answered(pk, done=True, state=State.CONSUMED) for pk in succeed(using, receipts, text)}

    return _answer(receipt, using, write, {State.CONSUMED})


@overload
def retry(receipt: str, delay: Duration | None = None, *, error: str = "", using: str | None = None) -> Answered: ...
@overload
def retry(
    receipt: Many, delay: Duration | None = None, *, error: str = "", using: str | None = None
) -> list[Answered]: ...
def retry(
    receipt: str | Many, delay: Duration | None = None, *, error: str = "", using: str | None = None
) -> Answered | list[Answered]:
    """Report a failure: the message is delivered again after ``delay`` (None: what its retry policy says).

    After the last attempt it is dead. Here and below a receipt is refused when its delivery is over.
    """
    chosen = None if delay is None else validation.delay(delay)
    text = validation.reason(error, "error") or "retry"

    def failure(each: Receipt) -> Failure:
        after = chosen if each.delay is None or chosen is not None else timedelta(seconds=each.delay)
        return Failure(each.id, each.delivery, "", each.delay is None, after, error=text)

    return _answer(receipt, using, _failing(failure))


@overload
def reject(receipt: str, reason: str, *, using: str | None = None) -> Answered: ...
@overload
def reject(receipt: Many, reason: str, *, using: str | None = None) -> list[Answered]: ...
def reject(receipt: str | Many, reason: str, *, using: str | None = None) -> Answered | list[Answered]:
    """Give a message up: it is dead, whatever its retry policy says."""
    error = f"Reject: {validation.reason(reason)}"
    return _answer(receipt, using, _failing(lambda each: Failure(each.id, each.delivery, "", dead=True, error=error)))


@overload
def release(receipt: str, delay: Duration | None = None, *, using: str | None = None) -> Answered: ...
@overload
def release(receipt: Many, delay: Duration | None = None, *, using: str | None = None) -> list[Answered]: ...
def release(
    receipt: str | Many, delay: Duration | None = None, *, using: str | None = None
) -> Answered | list[Answered]:
    """Give a message back unfinished, which costs no attempt: it is due at once, or after ``delay``."""
    after = None if delay is None else validation.delay(delay)

    def failure(each: Receipt) -> Failure:
        return Failure(each.id, each.delivery, "", False, after, counts=False, reason="given back")

    return _answer(receipt, using, _failing(failure))


@overload
def extend(receipt: str, lease: Duration, *, using: str | None = None) -> Answered: ...
@overload
def extend(receipt: Many, lease: Duration, *, using: str | None = None) -> list[Answered]: ...
def extend(receipt: str | Many, lease: Duration, *, using: str | None = None) -> Answered | list[Answered]:
    """Keep a message at least until ``lease`` from now; a lease that ends later stays."""
    seconds = validation.checked("lease", values.span, lease, 1, values.YEAR)

    def write(using: str, receipts: Sequence[Receipt]) -> dict[int, Answered]:
        renewals = [LeaseRenewal(each.id, each.delivery, seconds) for each in dict.fromkeys(receipts)]
        found = statements(using).extend(renewals)
        return {pk: Answered(pk, done=True, state=State.RUNNING, cancel_requested=c) for pk, c in found.items()}

    return _answer(receipt, using, write)


Write = Callable[[str, Sequence[Receipt]], dict[int, Answered]]


def _failing(failure: Callable[[Receipt], Failure]) -> Write:
    """Return what writes a failure for each receipt."""

    def write(using: str, receipts: Sequence[Receipt]) -> dict[int, Answered]:
        actor = actors.current()
        # ``fail`` reads the row of the message, with its choice of follow-ups.
        failures = [(one := failure(each))._replace(actor=actor, leads_on=one.dead) for each in receipts]
        moves = transitions.fail(using, failures)
        report(using, moves, {each.id: each.error for each in failures if each.counts})
        return {moved.id: Answered(moved.id, done=True, state=moved.after) for moved in moves}

    return write


def _answer(
    receipt: str | Many, using: str | None, write: Write, holds: Set[State] = frozenset()
) -> Answered | list[Answered]:
    """Write the answers, and return the result of each: it ``holds`` in any case for a message in such a state."""
    using = using or router.db_for_write(Message)
    by = signer(using)
    are_many = isinstance(receipt, list | tuple)
    receipts = [read(text, by) for text in (receipt if are_many else [receipt])]
    done = write(using, receipts)
    # A success holds for any delivery; of two others the later one alone can be the current one.
    last = {} if holds else {each.id: each.delivery for each in sorted(receipts, key=attrgetter("delivery"))}
    answers = {each: done[each.id] for each in receipts if each.id in done and each.delivery >= last.get(each.id, 0)}
    if others := {each for each in receipts if each not in answers}:
        rows = Message.objects.using(using).filter(pk__in=[each.id for each in others])
        found = {pk: (State(state), number) for pk, state, number in rows.values_list("pk", "state", "deliveries")}
        for each in others:
            state, deliveries = found.get(each.id, (None, 0))
            is_done = state in holds
            answers[each] = Answered(each.id, True, state) if is_done else _refused(each, state, deliveries)
    told = [answers[each] for each in receipts]
    return told if are_many else told[0]


def _refused(receipt: Receipt, state: State | None, deliveries: int) -> Answered:
    """Say why an answer did not hold."""
    pk, over = receipt.id, f"delivery {receipt.delivery} of message {receipt.id} is over:"
    reasons = {
        None: f"there is no message {pk} any more",
        State.RUNNING: f"{over} delivery {deliveries} has it now",
        State.SCHEDULED: f"{over} it waits to be delivered again",
    }
    return Answered(pk, done=False, state=state, reason=reasons.get(state, f"message {pk} is {state} already"))


def succeed(using: str, receipts: Sequence[Receipt], result: str | None = None) -> set[int]:
    """Record successes, and report them. Return the messages whose success this call recorded."""
    actor = actors.current()
    done = transitions.succeed(using, [Success(each.id, each.delivery, actor, result) for each in receipts])
    _tell(using, {each.id: each.delivery for each in receipts if each.id in done})
    return done


def succeed_current(using: str, queue: str, message_id: int) -> bool:
    """Record the success of the delivery that a message of the queue has now, and tell of it. False: it has none."""
    delivery = transitions.succeed_current(using, queue, message_id, actors.current())
    if delivery is not None:
        _tell(using, {message_id: delivery})
    return delivery is not None


def _tell(using: str, deliveries: dict[int, int]) -> None:
    if deliveries and signals.message_succeeded.receivers:
        on_commit(using, _tell_of_success, using, deliveries)


def _tell_of_success(using: str, deliveries: dict[int, int]) -> None:
    for message in Message.objects.using(using).filter(pk__in=deliveries):
        began, ended = message.claimed_at or message.created_at, message.finished_at
        runtime = 0.0 if ended is None else (ended - began).total_seconds()
        facts = {"delivery": deliveries[message.pk], "runtime": runtime}
        signals.emit(signals.message_succeeded, Message, **signals.message_arguments(message, using), **facts)


aack = async_twin(ack)
aretry = async_twin(retry)
areject = async_twin(reject)
arelease = async_twin(release)
aextend = async_twin(extend)
