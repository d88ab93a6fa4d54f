"""The hot moves on PostgreSQL: one statement for each move changes the rows and adds to their log.

Ids are locked in ascending order, so that two batches cannot wait for each other in a circle. Times come from
``clock_timestamp()``, the database's clock at that moment, and not from the beginning of the transaction. Spans are
multiples of a second or less: a day in an interval is a day of the session's time zone, with 23 to 25 hours. Values
travel as parameters only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from itertools import chain
from typing import Any, cast

from django.core.exceptions import EmptyResultSet
from django.db import connections
from django.db.models import QuerySet

from ...models import Message
from .expressions import QUEUES, Microseconds
from .holders import HOLDERS, Holder
from .portable import Portable
from .postgresql_base import LOOKS_LIKE_FEW, array, texts
from .postgresql_delivery import PostgreSQLDelivery
from .postgresql_looks import PostgreSQLLooks
from .postgresql_scheduling import PostgreSQLScheduling
from .rows import Facts

# The process that answers, and the connections that the user may have: nobody limits a superuser.
MOST_CONNECTIONS = """
SELECT pg_backend_pid(),
       CASE WHEN rolsuper THEN current_setting('max_connections')::int
            ELSE least(current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int
                         - coalesce(current_setting('reserved_connections', true)::int, 0),
                       nullif(rolconnlimit, -1), nullif(datconnlimit, -1)) END
  FROM pg_roles, pg_database
 WHERE rolname = session_user AND datname = current_database()
"""

FACTS = f"""
SELECT id, state, topic, queue, limit_key, due_at, priority FROM delayq_message
 WHERE id = ANY(%(ids)s::bigint[]) AND {LOOKS_LIKE_FEW}
"""  # noqa: S608

HEAD = """SELECT * FROM delayq_message m
     WHERE state = 'scheduled' AND queue = q.queue
       AND (due_at, id) > (%(due)s::timestamptz, %(id)s::bigint) AND due_at <= %(end)s::timestamptz"""

OF_TOPICS = "topic = ANY(%(topics)s::text[])"


def _heads(chosen: str) -> str:
    """Return the statement that reads the first messages of those that are chosen in each queue ``q``."""
    return f"""
SELECT q.queue, m.id, (extract(epoch FROM m.due_at) * 1000000)::bigint, m.priority
  FROM unnest(%(queues)s::text[]) q(queue)
 CROSS JOIN LATERAL (
    SELECT id, due_at, priority FROM ({chosen}) m ORDER BY due_at, id LIMIT %(limit)s
 ) m
"""  # noqa: S608


# One search in the index for each queue.
HEADS, HEADS_OF_TOPICS = map(_heads, (HEAD, f"{HEAD} AND {OF_TOPICS}"))

# READ COMMITTED takes the locks of a statement before its snapshot: a transaction that holds no such lock after a pause
# was committed will see the pause.
CLAIMS_UNDER_WAY = """
SELECT virtualtransaction FROM pg_locks
 WHERE relation = 'delayq_queue'::regclass AND mode = 'AccessShareLock' AND granted AND pid <> pg_backend_pid()
   AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""

# The first rows after a place among those that a query finds. Arrays again: the planner does not know how many rows it
# will be, and could read the whole table for them. A commit of the purge itself does not wait until it is on the disk,
# and keeps no other commit waiting: what a crash of the server brings back, the next purge deletes.
DELETE_FIRST = """
WITH chosen AS ({chosen} AND (finished_at, id) > (%s::timestamptz, %s::bigint)
                 ORDER BY finished_at, id LIMIT %s::int FOR UPDATE SKIP LOCKED),
     log AS (DELETE FROM delayq_log WHERE message_id = ANY(ARRAY(SELECT id FROM chosen))),
     gone AS (DELETE FROM delayq_message WHERE id = ANY(ARRAY(SELECT id FROM chosen)) RETURNING id),
     last AS (SELECT finished_at, id FROM chosen ORDER BY finished_at DESC, id DESC LIMIT 1)
SELECT (SELECT count(*) FROM gone), (SELECT finished_at FROM last), (SELECT id FROM last),
       CASE WHEN %s::bool THEN set_config('synchronous_commit', 'off', true) END
"""


class PostgreSQL(PostgreSQLScheduling, PostgreSQLLooks, PostgreSQLDelivery, Portable):
    """The statements on one database alias."""

    # The server itself sets to NULL, or deletes, what has another action. A partition has the key of its table once
    # more.
    REFERENCES = """
    SELECT k.conrelid::regclass::text, quote_ident(a.attname)
      FROM pg_constraint k JOIN pg_attribute a ON a.attrelid = k.conrelid AND a.attnum = k.conkey[1]
     WHERE k.contype = 'f' AND k.confrelid = 'delayq_message'::regclass AND k.confdeltype IN ('a', 'r')
       AND k.conparentid = 0
     ORDER BY 1, 2
    """
    # One search in the index for each queue.
    FIRST_OF_EACH = f"""({QUEUES}) q CROSS JOIN LATERAL (
        SELECT * FROM delayq_message m WHERE m.state = 'scheduled' AND m.queue = q.queue AND {{chosen}}
         ORDER BY m.due_at, m.id LIMIT {{limit}}
    ) m"""  # noqa: S608

    def now(self) -> datetime:
        return cast(datetime, self._rows("SELECT clock_timestamp()")[0][0])

    def facts(self, ids: Sequence[int]) -> dict[int, Facts]:
        return {row[0]: Facts._make(row) for row in self._rows(FACTS, {"ids": array(ids)})} if ids else {}

    def heads(
        self,
        queues: Sequence[str],
        *,
        after: tuple[datetime, int],
        end: datetime | None,
        limit: int,
        topics: Sequence[str] | None = None,
    ) -> list[tuple[str, int, int, int]]:
        parameters = {
            "queues": texts(queues),
            "due": after[0],
            "id": after[1],
            "end": "infinity" if end is None else end.isoformat(),
            "limit": limit,
        }
        sql = HEADS
        if topics is not None:
            sql = HEADS_OF_TOPICS
            parameters["topics"] = texts(topics)
        return cast(list[tuple[str, int, int, int]], self._rows(sql, parameters))

    def claims_under_way(self) -> set[str]:
        return {row[0] for row in self._rows(CLAIMS_UNDER_WAY)}

    def deletion(self, rows: QuerySet[Message]) -> Callable[[int], int]:
        # Compiled once: it takes Django milliseconds, in which no handler of this process runs.
        try:
            chosen, parameters = rows.values_list("finished_at", "id").query.sql_with_params()
        except EmptyResultSet:
            return lambda _size: 0
        statement = DELETE_FIRST.format(chosen=chosen)
        after: Sequence[Any] = ("-infinity", 0)

        def delete(size: int) -> int:
            nonlocal after
            connection = connections[self.using]
            is_own = connection.get_autocommit() and not connection.in_atomic_block
            # Planned each time: which index is best depends on the states.
            [(deleted, *last, _set)] = self._rows(statement, [*parameters, *after, size, is_own], keep=False)
            after = last if deleted else after
            return int(deleted)

        return delete

    def places(self, rows: QuerySet[Message]) -> Iterable[tuple[int, int, int]]:
        # As the driver reads them: this saves making a datetime for each row, and a number from that.
        compiler = rows.values_list("id", Microseconds("due_at"), "priority").query.get_compiler(self.using)
        found: Iterable[tuple[int, int, int]] = chain.from_iterable(compiler.execute_sql())
        return found

    def has_been_up_for(self, seconds: float) -> bool:
        sql = "SELECT pg_postmaster_start_time() < clock_timestamp() - %s * interval '1 second'"
        return bool(self._rows(sql, [float(seconds)])[0][0])

    def takes_writes(self) -> bool:
        return self._rows("SHOW transaction_read_only") == [("off",)]

    def most_connections(self) -> int | None:
        pid, most = self._rows(MOST_CONNECTIONS)[0]
        # A pooler tells its clients another process id, and has many of them share a connection.
        return most if pid == connections[self.using].connection.info.backend_pid else None

    def snapshot_holders(self) -> list[Holder] | None:
        return [Holder(*row) for row in self._rows(HOLDERS)]

    def estimated_rows(self, relation: str) -> int | None:
        rows: int = self._rows("SELECT reltuples::bigint FROM pg_class WHERE oid = %s::regclass", [relation])[0][0]
        # -1: never analysed.
        return rows if rows >= 0 else None
