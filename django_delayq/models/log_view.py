"""The view of the whole log, where tables are made without migrations: ``pytest --nomigrations``, for example."""

from __future__ import annotations

from typing import Any

from django.db import connections

from .messages import LogRow, Transition

# The statements by which the migrations make the view.
CREATE = """
CREATE VIEW delayq_transition AS
SELECT message_id, number, at, from_state, to_state, delivery, due_at, ready_at, actor, reason, error, traceback,
       exception
  FROM delayq_log
UNION ALL
SELECT id, 1, created_at, NULL, 'scheduled', 0, due_at, NULL, created_by, '', '', '', ''
  FROM delayq_message WHERE created_by IS NOT NULL
UNION ALL
SELECT id, CASE WHEN state = 'running' THEN moves ELSE moves - 1 END, claimed_at, 'scheduled', 'running', deliveries,
       due_at, ready_at, 'worker:' || coalesce(claimed_by, worker),
       '', '', '', ''
  FROM delayq_message WHERE claimed_at IS NOT NULL
UNION ALL
SELECT id, moves, finished_at, 'running', 'consumed', deliveries, due_at, NULL, consumed_by, '', '', '', ''
  FROM delayq_message WHERE consumed_by IS NOT NULL
"""


def make(*, using: str, plan: object = None, **_kwargs: Any) -> None:
    """Make the view after a ``migrate``, where the table of the log is there and the view is not."""
    if plan is None:
        # The signal comes after a flush, too.
        return
    with connections[using].cursor() as cursor:
        there = connections[using].introspection.table_names(cursor, include_views=True)
        if LogRow._meta.db_table in there and Transition._meta.db_table not in there:
            cursor.execute(CREATE)
