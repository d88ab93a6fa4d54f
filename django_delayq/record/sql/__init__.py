"""Everything that depends on the database's vendor. Other modules ask ``statements`` and never for the vendor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Protocol

from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.db.models import QuerySet

from .holders import Holder
from .rows import (
    BEGINNING,
    Claimed,
    Expired,
    Facts,
    Failure,
    Inserted,
    LeaseRenewal,
    Moved,
    NewMessage,
    Reference,
    Seen,
    Spot,
    Success,
    Ticket,
)

if TYPE_CHECKING:
    from ...models import Message
    from .limited import LimitStatements


class Statements(Protocol):
    """The statements of the queue on one database alias. Each move is atomic, and writes its log rows with it."""

    def now(self) -> datetime:
        """Return the time by the database's clock."""

    def insert(self, new: NewMessage, actor: str) -> Inserted | None:
        """Write one message; return None when another message has its key, or waits again after it gave the key up."""

    def keep_waiting(self, message_id: int) -> bool:
        """Keep a waiting message from being claimed before the caller's transaction ends. Tell whether it waits."""

    def insert_many(self, new: Sequence[NewMessage], actor: str) -> Iterator[tuple[NewMessage, Inserted]]:
        """Write messages without keys, in the caller's transaction; all are written when the iterator is exhausted."""

    def facts(self, ids: Sequence[int]) -> dict[int, Facts]:
        """Return what decides where these ids belong, by id. Locks nothing."""

    def queues(self, known: Collection[str] = ()) -> list[str]:
        """Return the queues that hold scheduled messages, by name. With ``known``: other ones, in no order."""

    def heads(
        self,
        queues: Sequence[str],
        *,
        after: tuple[datetime, int],
        end: datetime | None,
        limit: int,
        topics: Sequence[str] | None = None,
    ) -> Iterable[tuple[str, int, int, int]]:
        """Return the first scheduled messages of each queue, up to ``limit``, in their order of (due, id).

        Only messages after the place ``after`` in that order and due by ``end`` count; with ``topics`` only those of
        these topics. Yields queue, id, due time (microseconds since 1970) and priority.
        """

    def look(self, begins: Mapping[str, Spot], topics: Iterable[str], closed: Collection[str]) -> list[Seen]:
        """Look at queues, behind a spot in each, for the first message that may begin once it is due.

        That is one of these topics, under none of the limits ``closed``, which is not expired. In a queue that is
        paused, or under one of these limits, there is none.
        """

    def anything_expired(self, leased_from: datetime, waiting_from: datetime) -> Expired:
        """Tell whether a lease has run out, and whether a waiting message has expired, from these times on."""

    def due(
        self, queue: str, topics: Iterable[str], limit: int, closed: Collection[str], after: Spot = BEGINNING
    ) -> list[Ticket]:
        """Return due messages of a queue behind a spot, of the thousand most overdue, the highest priority first.

        Those that stand under one of the limits ``closed`` are left out, and so is what stands behind ``ROWS_PASSED``
        others.
        """

    def claims_under_way(self) -> set[str]:
        """Return the transactions that may be claiming at this moment."""

    def claim(
        self, tickets: Sequence[Ticket], leases: dict[str, float], worker: str, queue: str | None, ahead: float
    ) -> list[Claimed]:
        """Move ``scheduled → running`` the messages that may start, of the topics in ``leases`` (topic → seconds).

        No message is claimed more than ``ahead`` seconds before its due time, whatever the ticket says.
        """

    def succeed(self, successes: Sequence[Success], *, wait: bool) -> set[int]:
        """Move messages to *consumed* while they are live; return the ids that moved."""

    def begin(self) -> None:
        """Have the transaction that Django has just opened in this thread begin now, not with its first statement."""

    def fail(self, failures: Sequence[Failure], *, wait: bool) -> list[Moved]:
        """Move ``running → scheduled | dead | cancelled`` for the current delivery."""

    def extend(self, renewals: Sequence[LeaseRenewal], *, wait: bool = True) -> dict[int, bool]:
        """Extend leases. Return id → whether a cancel was requested; a delivery whose id is missing has lost its lease.

        With no renewals this waits for the same locks on tables as a renewal would. ``wait=False`` passes over rows
        that another transaction has locked.
        """

    def delete(self, ids: Sequence[int]) -> None:
        """Delete messages, which the caller's transaction has locked, with their log."""

    def deletion(self, rows: QuerySet[Message]) -> Callable[[int], int]:
        """Return a function that deletes the next of these finished messages with their log, the oldest first.

        It takes how many to delete at most, and returns how many it deleted: fewer when there are no more. Each call is
        a transaction, and passes over messages that another transaction has locked.
        """

    def references(self) -> list[Reference]:
        """Return the foreign keys because of which the database refuses to delete a message that a row refers to."""

    def places(self, rows: QuerySet[Message]) -> Iterable[tuple[int, int, int]]:
        """Return the id, the due time (microseconds since 1970) and the priority of rows: all that Redis gets."""

    def has_been_up_for(self, seconds: float) -> bool:
        """Tell whether the database has been up for this many seconds."""

    def most_connections(self) -> int | None:
        """Return how many connections the user of this one may have at once; None where nothing limits them."""

    def snapshot_holders(self) -> list[Holder] | None:
        """Return who holds snapshots, those first that keep the most rows; None where snapshots keep no rows."""

    def estimated_rows(self, relation: str) -> int | None:
        """Return how many rows the planner believes a table or index has; None where there is no estimate."""


# The vendors that can keep messages. The others lack unique keys among some rows only, so that two live messages could
# have one key. The migration has the same list.
VENDORS = ("postgresql", "sqlite")


def unsupported(using: str) -> str | None:
    """Return why a database cannot keep messages; None when it can. Needs no connection."""
    connection = connections[using]
    if connection.vendor in VENDORS:
        return None
    return (
        f"django-delayq keeps messages in PostgreSQL or SQLite, and the database {using!r} is"
        f" {connection.display_name}: give the app delayq a database of its own with a database router."
    )


def commits_nothing(using: str) -> str | None:
    """Return why workers and commands would commit nothing to a database; None when they would. Needs no connection.

    Calls in the project's own processes are committed by the project.
    """
    if connections[using].settings_dict["AUTOCOMMIT"]:
        return None
    return (
        f"DATABASES[{using!r}]['AUTOCOMMIT'] is False, and nothing that workers and commands of django-delayq write"
        " would be committed: set it to True in the settings that these run with."
    )


@cache
def statements(using: str) -> Statements:
    """Return the statements for the database behind an alias.

    Raises ``ImproperlyConfigured`` for a vendor that cannot keep messages. A new vendor needs nothing more than a place
    in ``VENDORS`` and ``Portable``.
    """
    reason = unsupported(using)
    if reason is not None:
        raise ImproperlyConfigured(reason)
    # Imported here: psycopg is needed only where the database is PostgreSQL.
    if connections[using].vendor == "postgresql":
        from .postgresql import PostgreSQL

        return PostgreSQL(using)
    from .portable import Portable

    return Portable(using)


@cache
def limit_statements(using: str) -> LimitStatements:
    """Return the statements of limits for the database behind an alias."""
    if connections[using].vendor == "postgresql":
        from .postgresql_limited import PostgreSQLLimits

        return PostgreSQLLimits(using)
    from .limited import PortableLimits

    return PortableLimits(using)


def vendor_name(using: str) -> str:
    """Return Django's name for the vendor of a database, for people to read."""
    return connections[using].vendor


def keeps_ambiguous_times(using: str) -> bool:
    """Tell whether a database keeps local times without their offset from UTC, in a zone whose clocks are changed."""
    connection = connections[using]
    if connection.features.supports_timezones or connection.timezone is None:
        return False
    return any(datetime(2026, month, 1, tzinfo=connection.timezone).utcoffset() for month in (1, 7))


def has_one_writer(using: str) -> bool:
    """Tell whether only one transaction can write at a time, so that more worker processes gain nothing."""
    return connections[using].vendor == "sqlite"
