"""Runs the statement for which callers wait most, the insert of one message, without a cursor, and begins transactions.

A cursor of psycopg takes time to convert the query and its values, to look up the plan that the server keeps, and to
make rows of any answer: some 7 % of the time of ``schedule_message()`` (``python -m benchmarks.parts`` has both). Here
the values travel as text, and the caller says what the columns hold. psycopg still waits for the answer, so that
Ctrl-C, timeouts and gevent work as with a cursor.

The first time on a connection a cursor runs the statement. psycopg then knows it by a name, until a rollback, for
example, makes psycopg drop all that the server keeps. Only psycopg's own table of names tells that. Where another
release has no such table, cursors run everything.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, NamedTuple
from uuid import UUID

from psycopg import IsolationLevel
from psycopg.errors import Error, error_from_result
from psycopg.generators import execute
from psycopg.pq import ExecStatus, Format

from .sessions import ACTIVE, IDLE, IN_TRANSACTION, UNKNOWN, Session

_PARAMETER = re.compile(r"%\((\w+)\)s")
# How long it may take to tell the server that a statement is to stop (seconds), as in psycopg.
CANCEL_WITHIN = 5.0
_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
_unpack = struct.Struct("!q").unpack

# Reads the value of a column.
Column = Callable[[Any], Any]


class Noted(NamedTuple):
    """A statement that psycopg has a name for: where the name is while the server keeps the statement, and the names
    of its parameters in their order."""

    names: Mapping[Any, bytes]
    key: Any
    parameters: list[str]


def integer(value: bytes) -> int:
    """Read a bigint."""
    return int(_unpack(value)[0])


def time(value: bytes) -> datetime:
    """Read a timestamptz, which the server sends in microseconds since 2000. Returns it in UTC."""
    return _EPOCH + timedelta(0, 0, _unpack(value)[0])


def uuid(value: bytes | None) -> UUID | None:
    """Read a uuid or NULL."""
    return None if value is None else UUID(bytes=bytes(value))


def run(
    raw: Any, session: Session, sql: str, parameters: Mapping[str, Any], columns: Sequence[Column]
) -> list[tuple[Any, ...]] | None:
    """Run a statement that the server keeps, and return its rows; None when only a cursor can run it now.

    Parameters are texts, floats, smallints or aware datetimes: the server takes the values for what they were when
    ``note`` saw the statement, and psycopg takes greater integers for other types. Raises the errors that a cursor
    raises.
    """
    noted: Noted | None = session.noted.get(sql)
    if noted is None:
        return None
    pgconn = raw.pgconn
    values = [str(parameters[name]).encode() for name in noted.parameters]
    with raw.lock:
        name, status = noted.names.get(noted.key), pgconn.transaction_status
        if (
            name is None
            # A cursor begins the transaction when there is to be one.
            or (status != IN_TRANSACTION and (status != IDLE or not raw.autocommit))
            or pgconn.pipeline_status
            or pgconn.parameter_status(b"client_encoding") != b"UTF8"
        ):
            return None
        result = _answer(raw, lambda: pgconn.send_query_prepared(name, values, result_format=Format.BINARY))
    if result.status != ExecStatus.TUPLES_OK:
        raise error_from_result(result)
    get = result.get_value
    return [tuple([read(get(row, place)) for place, read in enumerate(columns)]) for row in range(result.ntuples)]


def begin(raw: Any) -> None:
    """Begin the transaction that psycopg would begin with the next statement, in the same words.

    Does nothing where a transaction is open, or where psycopg would begin none. Raises the errors that a cursor raises.
    """
    pgconn = raw.pgconn
    with raw.lock:
        if raw.autocommit or pgconn.transaction_status not in (IDLE, UNKNOWN):
            return
        words = _begin(raw.isolation_level, raw.read_only, raw.deferrable)
        result = _answer(raw, lambda: pgconn.send_query(words))
    if result.status != ExecStatus.COMMAND_OK:
        raise error_from_result(result)


@lru_cache
def _begin(isolation: int | None, read_only: bool | None, deferrable: bool | None) -> bytes:
    """Return the statement that begins a transaction; None: the session decides."""
    words = ["BEGIN"]
    if isolation is not None:
        words.append(f"ISOLATION LEVEL {IsolationLevel(isolation).name.replace('_', ' ')}")
    if read_only is not None:
        words.append("READ ONLY" if read_only else "READ WRITE")
    if deferrable is not None:
        words.append("DEFERRABLE" if deferrable else "NOT DEFERRABLE")
    return " ".join(words).encode()


def _answer(raw: Any, send: Callable[[], None]) -> Any:
    """Send a statement, and return the server's answer."""
    try:
        send()
        return raw.wait(execute(raw.pgconn))[-1]
    except BaseException:
        # psycopg stops the statement itself when Ctrl-C comes while it waits. Here Ctrl-C came just before, or
        # something else interrupted the wait, for example a timeout of gevent.
        if raw.pgconn.transaction_status == ACTIVE:
            _abandon(raw)
        raise


def _abandon(raw: Any) -> None:
    """Have the server stop the statement that it runs, and read its answer: the next statement needs the connection."""
    try:
        raw.cancel_safe(timeout=CANCEL_WITHIN)
        raw.wait(execute(raw.pgconn))
    except Error:
        raw.close()


def note(raw: Any, session: Session, sql: str) -> None:
    """Remember how psycopg names a statement that a cursor has just run: that name is the last one."""
    noted: Noted | None = session.noted.get(sql)
    if noted is not None and noted.key in noted.names:
        # It began a transaction, for example.
        return
    names: Mapping[Any, bytes] = getattr(getattr(raw, "_prepared", None), "_names", {})
    parameters = list(dict.fromkeys(_PARAMETER.findall(sql)))
    query = _PARAMETER.sub(lambda match: f"${parameters.index(match[1]) + 1}", sql).encode()
    key = next(reversed(list(names)), None)
    if key is not None and key[0] == query:
        session.noted[sql] = Noted(names, key, parameters)
