"""Those who keep PostgreSQL from cleaning its tables: open transactions, replication slots, prepared transactions."""

from __future__ import annotations

from typing import NamedTuple

# A session that has written, and holds no snapshot at the moment, keeps as much as one that holds one since then.
# Sessions and prepared transactions of other databases keep nothing here; slots and standbys do.
HOLDERS = """
SELECT 'transaction', pid::text, coalesce(application_name, ''),
       extract(epoch FROM clock_timestamp() - xact_start)::float8,
       greatest(age(backend_xmin), age(backend_xid))
  FROM pg_stat_activity
 WHERE (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL) AND pid <> pg_backend_pid()
   AND (datname = current_database() OR backend_type = 'walsender') AND backend_type <> 'autovacuum worker'
UNION ALL
SELECT 'slot', slot_name::text, coalesce('pid ' || active_pid, ''), NULL, age(xmin)
  FROM pg_replication_slots WHERE xmin IS NOT NULL
UNION ALL
SELECT 'prepared', gid, owner::text, extract(epoch FROM clock_timestamp() - prepared)::float8, age(transaction)
  FROM pg_prepared_xacts WHERE database = current_database()
 ORDER BY 5 DESC
"""


class Holder(NamedTuple):
    """A holder of a snapshot: its kind, its name (or the id of its process), and its owner.

    ``seconds`` is its age; None: it is not known. ``transactions`` have begun since.
    """

    kind: str
    name: str
    owner: str
    seconds: float | None
    transactions: int


class Age(NamedTuple):
    """The age from which on a snapshot counts as old; younger ones are normal."""

    seconds: float = 300.0
    # Transactions since the snapshot: a replication slot has no age in time.
    transactions: int = 1_000_000


OLD = Age()


def oldest(holders: list[Holder], old: Age = OLD) -> list[Holder]:
    """Return the oldest of each kind, if it is old."""
    first: dict[str, Holder] = {}
    for holder in holders:
        # The dead rows that it keeps may slow searches down.
        if (holder.seconds or 0.0) >= old.seconds or holder.transactions >= old.transactions:
            first.setdefault(holder.kind, holder)
    return [*first.values()]
