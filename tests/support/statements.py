"""Counts the statements that the database gets."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable

from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_delayq import schedule_messages
from django_delayq.models import Message
from tests.support.rows import unguarded

# What frames other statements, limits their time, and asks for a setting of the connection.
_FRAMES = "BEGIN|COMMIT|SAVEPOINT|RELEASE|ROLLBACK|SHOW|SELECT set_config|SELECT current_setting"


def count_statements(run: Callable[[], object], *, frames: bool = True) -> int:
    """Return how many statements a call sends, also those that PostgreSQL gets without a cursor of Django.

    ``frames=False`` leaves out those that begin and end transactions or limit the time of others.
    """
    connection.ensure_connection()
    if connection.vendor != "postgresql":
        with CaptureQueriesContext(connection) as captured:
            run()
        return len(captured if frames else asked(captured))
    with tempfile.TemporaryFile() as trace:
        connection.connection.pgconn.trace(trace.fileno())
        try:
            run()
        finally:
            connection.connection.pgconn.untrace()
        trace.seek(0)
        sent = [line for line in trace if b"\tF\t" in line and line.split(b"\t")[3] in {b"Query", b"Execute"}]
        return sum(frames or not re.search(rf'"\s*({_FRAMES})'.encode(), line) for line in sent)


def asked(captured: CaptureQueriesContext) -> list[str]:
    """Return the statements of a page, without those that limit the time of others."""
    found = [each["sql"] for each in captured]
    return [sql for sql in found if not re.match(_FRAMES, sql)]


def assert_asks_the_same_of_many_queues(act: Callable[[], object]) -> None:
    """Assert that ``act`` sends as many statements, of the same length, whether messages wait in two queues or many."""
    few, many = (_of_queues(act, queues) for queues in (2, 240))
    assert len(few) == len(many)
    # Nor has a statement a part for each queue.
    assert sum(map(len, many)) < 1.1 * sum(map(len, few))


def _of_queues(act: Callable[[], object], queues: int) -> list[str]:
    """Return the statements of ``act`` while as many messages as ever wait in so many queues."""
    unguarded(Message).delete()
    schedule_messages({"topic": "t", "queue": f"q{number % queues}", "delay": "1h"} for number in range(240))
    with CaptureQueriesContext(connection) as captured:
        act()
    # A process reads the overrides of limits once a second, whatever it is asked.
    return [entry["sql"] for entry in captured if "delayq_limit_override" not in entry["sql"]]
