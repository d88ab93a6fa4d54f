"""Ends deliveries that did not report: their worker died, lost its leases, or never got the answer to its claim.

The evidence decides whether such an end counts as a crash of the message (``judge``).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from typing import Any

from django.db.models import Exists, OuterRef, Q

from ..core.clock import ceil_tenth
from ..core.pull_queues import PULLER
from ..core.states import State
from ..models import Message
from ..models.messages import Lease, lease_is_over
from ..project import pulled as pulled_queues
from ..project import registry
from .low_water import LowWater
from .reads import now
from .sql import statements
from .sql.log_in_row import claimed_after
from .sql.moves import LEFT_ALONE, Decision, locked
from .sql.rows import Moved
from .sql.sessions import own_transaction
from .transitions import MOVES_PER_TRANSACTION, move_unlocked

# ``Message.worker`` ends with this while a delivery runs alone in its process.
ALONE = "/alone"
# The error of a message that crashed then ends with this.
RAN_ALONE = "; it ran alone"

# The id of a message, and the number of one of its deliveries.
Held = tuple[int, int]


@dataclass(frozen=True, slots=True)
class CrashRules:
    """The rules by which ``judge`` counts crashes, and what it concludes from them."""

    # A message with this many crashes is isolated: it runs alone in its process.
    suspect: int = 2
    # A message with this many crashes is dead, if it was isolated in the last of them and its process died of itself.
    dead: int = 3
    # The death of a whole worker is not held against the messages that it ran, but one of them may have killed it: of
    # the deliveries of a message that do not report, every fifth counts as a crash of the message.
    deaths_of_workers: int = 5
    # The delay before a message that crashed while isolated is delivered again, which doubles with each further crash.
    # Other suspects run first, and if something outside kills processes, it kills that of another message. Seconds.
    first_delay: float = 1.0


RULES = CrashRules()


@dataclass(frozen=True, slots=True)
class Death:
    """The traces of a worker process that died: evidence for and against the messages that it held."""

    # The messages whose handlers ran; None: not known, so that all messages count as running.
    running: Collection[int] | None = None
    # True when somebody else may have killed the process: the operating system does not say who sent a SIGKILL.
    by_kill: bool = True
    # True when all processes of the worker died together.
    of_all: bool = False


# A death without any traces.
UNSEEN = Death()


@dataclass(frozen=True, slots=True)
class Judgement:
    """The judgement on a message whose delivery crashed: whether that counts as a crash, and what follows."""

    counts: bool
    is_dead: bool = False
    # The message is delivered again after this time. Seconds.
    delay: float = 0.0


def judge(crashes: int, *, was_alone: bool, by_kill: bool, rules: CrashRules = RULES) -> Judgement:
    """Judge a message whose handler ran when its process died. ``crashes`` counts this death too.

    A message that ran beside others becomes a suspect at most: any of them may have killed the process, so further
    deaths do not count. A message that was isolated becomes dead after ``rules.dead`` crashes if its process died of
    itself. If the process was killed, somebody else may have done that, so ``rules.suspect`` more crashes are needed.
    """
    if not was_alone:
        return Judgement(counts=crashes <= rules.suspect)
    most = rules.dead + (rules.suspect if by_kill else 0)
    if crashes >= most:
        return Judgement(counts=True, is_dead=True)
    delay = rules.first_delay * 2.0 ** (crashes - rules.suspect) if crashes >= rules.suspect else 0.0
    return Judgement(counts=True, delay=delay)


def mark_alone(using: str, message_id: int, delivery: int, worker: str) -> None:
    """Note in the row that a delivery runs alone in its process, for the case that nobody sees the process die."""
    rows = Message._base_manager.using(using).filter(pk=message_id, state=State.RUNNING, deliveries=delivery)
    # The log in the row needs the name without the mark.
    rows.filter(worker=worker).update(worker=worker + ALONE, claimed_by=worker)


def may_reap(using: str, grace: float = 5.0) -> bool:
    """Tell whether workers have had time (``grace``: seconds) to renew their leases since PostgreSQL was restarted."""
    return statements(using).has_been_up_for(grace)


def anything_expired(using: str, leases: LowWater | None = None, waiting: LowWater | None = None) -> tuple[bool, bool]:
    """Tell whether a lease has run out, and whether a waiting message has expired, with one cheap query.

    A caller that looks repeatedly passes the low-water marks of both.
    """
    marks = (leases or LowWater(), waiting or LowWater())
    begins = [mark.begin() for mark in marks]
    asked = time.monotonic()
    found = statements(using).anything_expired(begins[0][0], begins[1][0])
    took = time.monotonic() - asked
    for mark, begin, first in zip(marks, begins, (found.first_leased, found.first_waiting), strict=True):
        mark.note(begin, None if first is None else (first, 0), found.now, took)
    return found.leased, found.waiting


def expired_leases(using: str, *, limit: int = MOVES_PER_TRANSACTION) -> set[Held]:
    """Return deliveries whose lease ran out, those first whose lease ended first.

    Rows that another transaction has locked are passed over: a holder that lives could not write to them either.
    """
    with own_transaction(using):
        rows = Message.objects.using(using).filter(lease_is_over(now(using))).order_by("leased_until")
        return set(locked(using, rows, wait=False).values_list("pk", "deliveries")[:limit])


def reap(
    using: str,
    *,
    limit: int = MOVES_PER_TRANSACTION,
    actor: str,
    among: Collection[Held] | None = None,
    pulled: bool = False,
) -> list[Moved]:
    """End the deliveries whose lease ran out. The message is *scheduled* again. ``among`` (None: all) says which.

    ``pulled``: only those of programs, which renew their leases by hand or not at all.

    The supervisor reports the death of a single process, so here the whole worker died or froze. That is no fault of
    its messages, but every fifth time counts as a crash (``CrashRules``).
    """
    at = now(using)
    where = lease_is_over(at)
    if among is not None:
        where &= Q(pk__in=[pk for pk, _delivery in among])
    if pulled:
        where &= Q(worker__startswith=PULLER)

    @cache
    def renewed() -> set[Held]:
        # Read when the rows are locked, so that no further renewal can be made: one that was made between the look at
        # the leases and the lock on its row counts.
        rows = Lease.objects.using(using).filter(until__gte=at)
        return set(rows.values_list("message_id", "delivery"))

    def decide(message: Message, at: datetime) -> Decision:
        held = (message.pk, message.deliveries)
        if held in renewed() or (among is not None and held not in among):
            return LEFT_ALONE
        if message.worker.startswith(PULLER):
            return _of_a_puller(message)
        return _of_a_worker(message, at, "lease ran out")

    return move_unlocked(using, where, decide, actor=actor, limit=limit)


def drop_leases(using: str) -> None:
    """Delete the leases of deliveries that have ended, and those that keep no permits any more."""
    running = Message.objects.filter(pk=OuterRef("message_id"), deliveries=OuterRef("delivery"), state=State.RUNNING)
    kept = Q(delivery__lt=0, until__gte=now(using))
    Lease.objects.using(using).filter(~Exists(running), ~kept).delete()


def release_worker(using: str, worker: str, *, actor: str, shutdown: bool, death: Death = UNSEEN) -> list[Moved]:
    """Release the messages of a worker process that is certainly dead. ``shutdown``: in order, so nothing crashed."""
    where = Q(state=State.RUNNING, worker__startswith=worker)
    held = set(Message.objects.using(using).filter(where).values_list("pk", flat=True))
    running = held if death.running is None else held.intersection(death.running)

    def decide(message: Message, at: datetime) -> Decision:
        if shutdown:
            return _ended(message, at, "worker was shut down", Judgement(counts=False))
        if once := _once(message, "worker process died"):
            return once
        if death.of_all:
            return _of_a_worker(message, at, "all processes of the worker died")
        if message.pk not in running:
            return _ended(message, at, "worker process died; it was not running", Judgement(counts=False))
        was_alone = len(running) == 1
        judgement = judge(message.crashes + 1, was_alone=was_alone, by_kill=death.by_kill)
        return _ended(message, at, "worker process died" + RAN_ALONE * was_alone, judgement)

    return move_unlocked(using, where, decide, actor=actor)


def _of_a_worker(message: Message, at: datetime, reason: str) -> Decision:
    """Decide on a message of a worker of which all processes died or stood still."""
    if once := _once(message, reason):
        return once
    was_alone = message.worker.endswith(ALONE)
    judgement = Judgement(counts=False)
    if (message.deliveries - message.reported) % RULES.deaths_of_workers == 0:
        judgement = judge(message.crashes + 1, was_alone=was_alone, by_kill=True)
    return _ended(message, at, reason + RAN_ALONE * was_alone, judgement)


def _of_a_puller(message: Message) -> Decision:
    """Decide on a message that a program did not answer, which counts as an attempt."""
    attempt, reason = message.attempts + message.crashes + 1, "lease ran out"
    policy = pulled_queues.policy(message.queue, message.retry, message.max_attempts)
    if policy.delay(attempt) is None and not message.cancel_requested:
        return Decision(State.DEAD, reason=f"{reason}; that was attempt {attempt}, the last one")
    return _freed(message, reason, {})


def _once(message: Message, reason: str) -> Decision | None:
    """Decide on a message whose handler allows no delivery after one that crashed; None: it allows that.

    Nobody knows for certain that the handler had not begun: many quick ones may have ended since, with their outcomes
    lost.
    """
    handler = registry.find(message.topic)
    if handler is None or handler.redeliver or message.cancel_requested:
        return None
    return Decision(State.DEAD, reason=f"{reason}; its handler has redeliver=False")


def release_orphaned(using: str, ids: Iterable[int], worker: str, *, since: datetime | None, actor: str) -> list[Moved]:
    """Release those of ``ids`` that ``worker`` claimed after ``since`` (None: ever) without getting the answer.

    Nobody ran them, so the delivery counts as reported.
    """
    where = Q(pk__in=list(ids), state=State.RUNNING, worker=worker)
    if since is not None:
        where &= claimed_after(since)

    def decide(message: Message, at: datetime) -> Decision:
        return _freed(message, "the answer to its claim was lost", {"reported": message.reported + 1})

    return move_unlocked(using, where, decide, actor=actor)


def _ended(message: Message, at: datetime, reason: str, judgement: Judgement) -> Decision:
    """Decide on a message whose delivery ended without reporting."""
    if judgement.is_dead and not message.cancel_requested:
        return Decision(State.DEAD, reason=f"{reason}; {message.crashes + 1} deliveries crashed")
    values: dict[str, Any] = {} if judgement.counts else {"excused": message.excused + 1}
    if judgement.delay:
        values["due_at"] = max(message.due_at, ceil_tenth(at + timedelta(seconds=judgement.delay)))
    return _freed(message, reason, values)


def _freed(message: Message, reason: str, values: dict[str, Any]) -> Decision:
    """Schedule a message again, or cancel it if that was requested."""
    if message.cancel_requested:
        values.pop("due_at", None)
        return Decision(State.CANCELLED, values, f"cancel requested; {reason}")
    return Decision(State.SCHEDULED, values, reason)
