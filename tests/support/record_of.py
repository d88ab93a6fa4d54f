"""Questions that tests ask the record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from functools import partial

from django_delayq import schedule_message
from django_delayq.core.states import State
from django_delayq.models import Message, Transition
from django_delayq.models.messages import LogRow
from django_delayq.record import reads
from django_delayq.worker.run.run_tuning import RunTuning
from tests.app.models import Effect
from tests.support.rows import unguarded
from tests.support.workers import PATIENCE, eventually


def states() -> Counter[str]:
    """Count the messages by state."""
    return Counter(Message.objects.values_list("state", flat=True))


def wait_until_all(state: State, number: int, *, timeout: float = PATIENCE) -> None:
    """Wait until there are so many messages and all are in this state."""
    eventually(lambda: states() == {state: number}, f"all {number} {state}, not {states()}", timeout=timeout)


def wait_until(message: Message, state: State, *, timeout: float = PATIENCE) -> Message:
    """Wait until the message is in this state, and return it as it is then."""

    def look() -> bool:
        message.refresh_from_db()
        return message.state == state

    eventually(look, f"{message} is {state}", timeout=timeout)
    return message


def wait_until_redis_times() -> None:
    """Wait until a message is delivered through Redis, and not by a query."""

    def is_timed() -> bool:
        return log_of(wait_until(schedule_message("t.tx"), State.CONSUMED))[1].ready_at is not None

    eventually(is_timed, "delivery goes through Redis again")


def consumed(number: int) -> Callable[[], bool]:
    """Return a function that tells whether so many messages are consumed."""
    return lambda: states()[State.CONSUMED] >= number


def log_of(message: Message) -> list[Transition]:
    return list(message.transitions.all())


def path_of(message: Message) -> list[str]:
    """Return the states that the message went through."""
    return [row.to_state for row in log_of(message)]


def write_out_log() -> None:
    """Give each row of the log a place of its own, where a test can change it: see ``LogRow``."""
    own = set(LogRow.objects.values_list("message_id", "number"))
    rows = [row for row in Transition.objects.all() if (row.message_id, row.number) not in own]
    unguarded(LogRow).bulk_create(map(LogRow.of, rows))
    columns = ("created_by", "claimed_at", "ready_at", "claimed_by", "consumed_by")
    unguarded(Message).update(**dict.fromkeys(columns))


def is_early(claim: Transition, *, clocks_differ: float = 0.0) -> bool:
    """Tell whether a claim is early. ``clocks_differ``: by so many seconds, after the correction of Redis' clock.

    A claim through Redis may come a moment before the due time. The time when the id is ready says when it begins.
    """
    if claim.ready_at is None:
        return claim.at < claim.due_at
    ahead = timedelta(seconds=RunTuning().claim_ahead + clocks_differ)
    return claim.ready_at < claim.due_at or claim.at < claim.due_at - ahead


def begun_per_message() -> Counter[int]:
    """Count the deliveries of each message without those that were released before they began.

    A slow machine, or SQLite's one writer, may keep a claimed message waiting for a thread, or past the slot of its
    rate: then it is claimed again.
    """
    begun = Counter(dict(Message.objects.values_list("pk", "deliveries")))
    waited = Transition.objects.filter(reason__startswith="waited too long for ")
    begun.subtract(waited.values_list("message_id", flat=True))
    return begun


def effects_per_message() -> Counter[int]:
    return Counter(Effect.objects.values_list("message_id", flat=True))


def once_each(messages: Iterable[Message]) -> Counter[int]:
    """Return what ``effects_per_message`` or ``begun_per_message`` returns when it happened once to each message."""
    return Counter(message.pk for message in messages)


def is_past(moment: datetime) -> bool:
    return reads.now("default") > moment


def wait_past_the_lease(message: Message) -> datetime:
    """Wait until the message's lease, as it is now, runs out, and return its end."""
    message.refresh_from_db()
    until = message.lease_ends_at
    assert until is not None
    eventually(partial(is_past, until), "the lease as it was runs out")
    return until
