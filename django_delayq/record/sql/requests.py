"""Requests to PostgreSQL without parameters, as one round trip each, by the driver's binding of libpq.

A connection of psycopg begins a transaction by a round trip of its own before the first statement, and a cursor costs
more than such a request itself. It allows both: ``Connection.pgconn`` is documented, and what it does next depends on
the state of the transaction alone, which libpq knows.
"""

from __future__ import annotations

import psycopg
from psycopg.pq import DiagnosticField, ExecStatus


def begin(raw: psycopg.Connection) -> bytes | None:
    """Return what begins a transaction as the driver would; None where the project has chosen more than its level."""
    if raw.read_only is not None or raw.deferrable is not None:
        return None
    level = raw.isolation_level
    return b"BEGIN" if level is None else f"BEGIN ISOLATION LEVEL {level.name.replace('_', ' ')}".encode()


def send(raw: psycopg.Connection, sql: bytes) -> None:
    """Send statements, of which none runs after one that fails. Raises the driver's error of that one."""
    result = raw.pgconn.exec_(sql)
    if result.status in (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK):
        return
    state = (result.error_field(DiagnosticField.SQLSTATE) or b"").decode()
    text = result.error_message.decode(raw.info.encoding, "replace").strip()
    # As the driver tells errors: without the word ERROR in the server's language.
    text = text.partition(":  ")[2] or text
    try:
        raise psycopg.errors.lookup(state)(text)
    except KeyError:
        # The connection is gone, or a trigger raises a code of its own.
        kind = psycopg.DatabaseError if state else psycopg.OperationalError
        raise kind(text) from None


def refuses_writes(raw: psycopg.Connection) -> bool:
    """Return whether the server took no writes when it answered last, as after a failover.

    PostgreSQL 14 and later tell this with their answers, so it costs nothing; a pooler does not pass it on.
    """
    said = (raw.pgconn.parameter_status(name) for name in (b"in_hot_standby", b"default_transaction_read_only"))
    return b"on" in said
