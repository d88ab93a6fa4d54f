"""Moves in Django's ORM, for every database: rows are locked, decided on, written and logged in one transaction."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar

from django.db import connections, transaction
from django.db.models import Case, F, Model, Q, QuerySet, Value, When
from django.db.models.functions import Cast
from django.utils import timezone

from ...core import in_tests
from ...core.exceptions import InvalidTransition
from ...core.known_record import known_identity, learn_identity
from ...core.outcomes import error_kind, storable
from ...core.own_header import OWN_HEADER
from ...core.states import LIVE, State, is_legal
from ...core.verdicts import Verdict
from ...models import Message
from ...project import registry
from .follow_ups import End, Insert, write_follow_ups
from .log_in_row import CLEARED, Logged, add_to_log, write_out
from .rows import Moved
from .sessions import own_transaction

AModel = TypeVar("AModel", bound=Model)


@dataclass(slots=True)
class Decision:
    """A decision on one row: the state that it goes to, the values that change, and the text for the log.

    ``to`` None leaves the row as it is. ``verdict`` is the answer of an action for the message; moves by workers have
    none. ``left`` is the queue that the message leaves.
    """

    to: State | None = None
    values: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    verdict: Verdict | None = None
    error: str = ""
    traceback: str = ""
    exception: str = ""
    actor: str | None = None
    delivery: int | None = None
    ready_at: datetime | None = None
    # The message that follows the end, when it is written.
    follow_up: Moved | None = None
    left: str = ""


LEFT_ALONE = Decision()

Decide = Callable[[Message, datetime], Decision]
Look = Callable[[Sequence[Message]], None] | None


# The identity of the database. While this process does not know it, each statement that writes a message brings it
# along.
IDENTITY = "SELECT value FROM delayq_identity WHERE id = 1"


def clock(using: str) -> datetime:
    """Return the time by the database's clock; on a database without a clock of its own, by the host's."""
    if in_tests.clock is not None:
        return in_tests.clock()
    connection = connections[using]
    knows = bool(known_identity(using))
    if connection.vendor != "postgresql":
        if not knows:
            _learn_identity(using)
        return timezone.now()
    with connection.cursor() as cursor:
        cursor.execute("SELECT clock_timestamp()" if knows else f"SELECT clock_timestamp(), ({IDENTITY})")
        row = cursor.fetchone()
    if not knows:
        learn_identity(using, row[1])
    now: datetime = row[0]
    return now.astimezone(UTC)


def _learn_identity(using: str) -> None:
    """Read the identity of a database that cannot return it with another statement.

    The driver's own cursor is used: projects count the queries of their views in tests.
    """
    connection = connections[using]
    connection.ensure_connection()
    with connection.wrap_database_errors:
        row = connection.connection.cursor().execute(IDENTITY).fetchone()
    learn_identity(using, None if row is None else uuid.UUID(row[0]))


@contextmanager
def writing(using: str) -> Iterator[None]:
    """Open a transaction that will write, as ``own_transaction`` does.

    On SQLite the transaction takes the write lock when it begins: SQLite refuses a write in a transaction that has read
    while another one wrote. Inside a transaction of the caller this is only a savepoint: there
    OPTIONS["transaction_mode"] must take the lock.
    """
    connection = connections[using]
    if connection.vendor != "sqlite" or connection.in_atomic_block:
        with own_transaction(using):
            yield
        return
    connection.ensure_connection()
    mode: str | None = vars(connection)["transaction_mode"]
    vars(connection)["transaction_mode"] = "IMMEDIATE"
    with ExitStack() as stack:
        try:
            stack.enter_context(transaction.atomic(using=using))
        finally:
            vars(connection)["transaction_mode"] = mode
        yield


def locked(using: str, rows: QuerySet[AModel], *, wait: bool, to_delete: bool = False) -> QuerySet[AModel]:
    """Return ``rows`` so that reading them locks them, where the database can lock rows.

    ``wait=False`` passes over rows that another transaction has locked.
    """
    features = connections[using].features
    if not features.has_select_for_update:
        return rows
    return rows.select_for_update(
        skip_locked=not wait and features.has_select_for_update_skip_locked,
        no_key=not to_delete and features.has_select_for_no_key_update,
    )


def move(
    using: str,
    where: Q,
    decide: Decide,
    *,
    actor: str,
    limit: int | None = None,
    wait: bool = True,
    order_by: Sequence[str] = ("id",),
    with_content: bool = False,
    look: Look = None,
    insert: Insert | None = None,
) -> list[tuple[Message, Decision]]:
    """Lock the rows that match, decide on each of them once, write and log the moves: all in one transaction.

    ``look`` gets all rows once they are locked, then ``decide`` gets each row and the time. Returns each row, as it is
    after the move, with its decision. ``wait=False`` passes over rows that another transaction has locked. Payloads and
    headers, which may be large, are read only ``with_content``.
    ``insert`` writes the messages that follow ends (``follow_ups``); None: nothing ends dead or expired here.
    """
    with writing(using):
        found = locked(using, Message.objects.using(using).filter(where).order_by(*order_by), wait=wait)
        if not with_content:
            found = found.defer("payload", "headers")
        if insert is not None:
            found = found.annotate(**{OWN_HEADER: F(f"headers__{OWN_HEADER}")})
        rows = list(found if limit is None else found[:limit])
        if look is not None:
            look(rows)
        now = clock(using)
        decided = [(message, decide(message, now)) for message in rows]
        plans = [_plan(message, made, made.to, now) for message, made in decided if made.to is not None]
        write_out(using, (plan.message for plan in plans))
        _write(using, plans)
        add_to_log(using, [_logged(plan, actor, now) for plan in plans])
        if insert is not None:
            _lead_on(using, plans, actor, insert)
    return decided


class _Plan(NamedTuple):
    """A decision that moves a row, with all values that the row gets."""

    message: Message
    decision: Decision
    before: State
    after: State
    values: dict[str, Any]


def _plan(message: Message, decision: Decision, after: State, now: datetime) -> _Plan:
    before = State(message.state)
    if not is_legal(before, after):
        raise InvalidTransition(f"{before} → {after}")
    return _Plan(message, decision, before, after, _values(message, decision, after, now))


def _write(using: str, plans: list[_Plan]) -> None:
    """Update the objects, and the rows with one statement.

    The rows are locked. SQLite has locked the whole database, or refuses the write where the rows that were read may
    have changed (``writing``).
    """
    by_column: defaultdict[str, dict[int, Any]] = defaultdict(dict)
    for plan in plans:
        for name, value in plan.values.items():
            setattr(plan.message, name, value)
            by_column[name][plan.message.pk] = value
    columns = {name: _column(using, name, given, len(plans)) for name, given in by_column.items()}
    rows = Message._base_manager.using(using).filter(pk__in=[plan.message.pk for plan in plans])
    rows.update(**{**columns, "moves": F("moves") + 1})


def _column(using: str, name: str, given: dict[int, Any], number: int) -> Any:
    """Return what an update of this number of rows sets a column to: what is given for all alike, or by their ids."""
    value = next(iter(given.values()))
    # In Python 1 equals True; in JSON they differ.
    if len(given) == number and len(set(map(repr, given.values()))) == 1:
        return value
    field: Any = Message._meta.get_field(name)
    whens = [When(pk=pk, then=Value(value, output_field=field)) for pk, value in given.items()]
    by_id = Case(*whens, default=F(name), output_field=field)
    return Cast(by_id, field) if connections[using].features.requires_casted_case_in_updates else by_id


def _said(made: Decision) -> dict[str, str]:
    return {"reason": storable(made.reason), "error": made.error, "exception": made.exception}


def _lead_on(using: str, plans: list[_Plan], actor: str, insert: Insert) -> None:
    """Write the messages that follow the ends of others."""
    ends = [
        End(plan.message, topic, _said(plan.decision), plan.decision.actor or actor)
        for plan in plans
        if (topic := registry.follows(plan.after, plan.message.topic, getattr(plan.message, OWN_HEADER)))
    ]
    if ends:
        written = write_follow_ups(using, ends, insert)
        for plan in plans:
            plan.decision.follow_up = written.get(plan.message.pk)


def _logged(plan: _Plan, actor: str, now: datetime) -> Logged:
    """Return the row of the log for a move."""
    message, decision = plan.message, plan.decision
    return Logged(
        message.pk,
        message.moves,
        now,
        plan.before,
        plan.after,
        message.deliveries if decision.delivery is None else decision.delivery,
        message.due_at,
        decision.ready_at,
        decision.actor or actor,
        storable(decision.reason),
        decision.error,
        decision.traceback,
        decision.exception,
    )


def _values(message: Message, decision: Decision, after: State, now: datetime) -> dict[str, Any]:
    """Return the columns that a move to the state ``after`` writes."""
    values = {**CLEARED, "state": after, "moves": message.moves + 1}
    values["finished_at"] = None if after in LIVE else now
    if after != State.RUNNING:
        values["leased_until"] = None
        values["worker"] = ""
    # A message whose last delivery crashed has no error: the reason in the log takes its place.
    kind = error_kind(decision.error or (decision.reason if after == State.DEAD else ""))
    if kind:
        values["error"] = kind
    return {**values, **decision.values}


def moved(message: Message, decision: Decision) -> Moved:
    """Return a row after its move, without its content."""
    return Moved(
        message.pk,
        message.topic,
        message.queue,
        message.priority,
        State(message.state),
        message.due_at,
        message.deliveries,
        decision.reason,
        decision.follow_up,
        decision.left,
    )
