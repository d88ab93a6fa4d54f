"""The part of the log that stands in the rows of messages: what it says, and who writes and reads it.

On PostgreSQL the usual life of a message (it is scheduled, claimed and consumed) adds no row to the log. The row of the
message says all that the log needs:

* ``created_by``, with ``created_at``: the first row of the log, and its actor.
* ``claimed_at``, ``ready_at``: the claim of the current delivery, or of the last one if that has succeeded, and the due
  time that Redis had. Its worker is ``claimed_by``, or ``worker`` while ``claimed_by`` is NULL.
* ``consumed_by``, with ``finished_at``: the success, and its actor.

A column is NULL when the log itself has the row. Any other move first adds to the log what only these columns say,
and sets them to NULL (``CLEARED``), because it may change the values that they are read from. ``Transition``, a
view that the migration makes, shows both parts as one log.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from django.db import connections
from django.db.models import Exists, OuterRef, Q

from ...core.states import State
from ...models import Message
from ...models.messages import LogRow

# --- in the ORM -------------------------------------------------------------------------------------------------------

# The values of a row whose log has all.
CLEARED: dict[str, Any] = dict.fromkeys(("created_by", "claimed_at", "ready_at", "claimed_by"))


class Logged(NamedTuple):
    """A row to be added to the log, with the columns of ``LOG_COLUMNS``. Cheaper than an object of the model."""

    message_id: int
    number: int
    at: datetime
    from_state: State | None
    to_state: State
    delivery: int
    due_at: datetime
    ready_at: datetime | None
    actor: str
    reason: str = ""
    error: str = ""
    traceback: str = ""
    exception: str = ""


def first_row(message: Message, actor: str) -> Logged:
    """Return the row of the log for the creation of a message that has not moved since."""
    return Logged(message.pk, 1, message.created_at, None, State.SCHEDULED, 0, message.due_at, None, actor)


def add_to_log(using: str, rows: Sequence[Logged]) -> None:
    """Add rows to the log."""
    if not rows:
        return
    if connections[using].vendor != "postgresql":
        LogRow._base_manager.using(using).bulk_create([LogRow(**row._asdict()) for row in rows])
        return
    # Imported here: it needs psycopg.
    from .postgresql_base import nullable_texts

    with connections[using].cursor() as cursor:
        cursor.execute(ADD, [nullable_texts(column) for column in zip(*rows, strict=True)])


def write_out(using: str, messages: Iterable[Message]) -> None:
    """Add to the log what only the rows of these messages have: they are about to lose it."""
    ids = [one.pk for one in messages if one.created_by is not None or one.claimed_at is not None]
    if ids:
        with connections[using].cursor() as cursor:
            cursor.execute(WRITE_OUT.format(", ".join(["%s"] * len(ids))), ids)


def claimed_after(moment: datetime) -> Q:
    """Return the condition that the current delivery of a message was claimed after this moment.

    A join with the view of the whole log would read every message for each of these.
    """
    claims = LogRow.objects.filter(message_id=OuterRef("pk"), delivery=OuterRef("deliveries"))
    claims = claims.filter(from_state=State.SCHEDULED, to_state=State.RUNNING, at__gt=moment)
    return Q(claimed_at__gt=moment) | Q(Exists(claims), claimed_at__isnull=True)


# --- on PostgreSQL ----------------------------------------------------------------------------------------------------

LOG_COLUMNS = """message_id, number, at, from_state, to_state, delivery, due_at, ready_at, actor,
         reason, error, traceback, exception"""

# Adds rows to the log, given as an array for each column. A thousand rows take Python 5 ms; bulk_create() takes 41 ms.
ADD = f"""
INSERT INTO delayq_log ({LOG_COLUMNS})
SELECT * FROM unnest(%s::bigint[], %s::int[], %s::timestamptz[], %s::text[], %s::text[], %s::int[], %s::timestamptz[],
                     %s::timestamptz[], %s::text[], %s::text[], %s::text[], %s::text[], %s::text[])
"""  # noqa: S608

# What an update sets in the row of a message ``m`` that it claims with the row ``x``.
CLAIM_IN_ROW = "claimed_at = clock_timestamp(), ready_at = x.ready_at"

# The worker of the claim that only the row of the message has.
CLAIMED_BY = "CASE WHEN m.claimed_at IS NOT NULL THEN coalesce(m.claimed_by, m.worker) END"

# What an update sets that clears ``worker``, and with the success of the current delivery.
KEEP_CLAIM = f"claimed_by = {CLAIMED_BY}"
SUCCESS_IN_ROW = f"{KEEP_CLAIM}, consumed_by = x.actor"

# What a move to other states sets, which reads these columns of the row ``m`` and adds ``EARLIER_ROWS`` to the log.
CLEAR = ", ".join(f"{name} = NULL" for name in CLEARED)
COLUMNS = f"m.created_at, m.created_by, m.claimed_at, m.ready_at, {CLAIMED_BY} AS claimed_by, m.due_at, m.moves"
EARLIER_ROWS = """SELECT id, 1, created_at, NULL, 'scheduled', 0, due_at, CAST(NULL AS timestamptz), created_by,
           '', '', '', ''
      FROM x WHERE created_by IS NOT NULL
    UNION ALL
    SELECT id, moves, claimed_at, 'scheduled', 'running', delivery, due_at, ready_at, 'worker:' || claimed_by,
           '', '', '', ''
      FROM x WHERE claimed_at IS NOT NULL"""

# Adds to the log what only the rows of these ids have, before a move in the ORM. SQLite understands it too: rows that
# were copied from PostgreSQL may have some.
WRITE_OUT = f"""
WITH x AS (SELECT m.id, m.deliveries AS delivery, {COLUMNS} FROM delayq_message m WHERE m.id IN ({{}}))
INSERT INTO delayq_log ({LOG_COLUMNS}) {EARLIER_ROWS}
"""  # noqa: S608
