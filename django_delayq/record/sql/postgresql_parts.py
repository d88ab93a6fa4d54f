"""Conditions and values that the statements of several modules share on PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

# Due times are whole tenths of a millisecond, rounded up: a message is never early.
CEIL_TENTH = "date_bin('100 microseconds', {} + interval '99 microseconds', timestamptz '2000-01-01 00:00:00Z')"

# True for every id. The server assumes ten rows for an array parameter. A kept plan for ten rows looks more expensive
# than a new plan for the one or two rows that are usual, so the server would plan each time, which takes longer than
# the statement itself. With a range it assumes hardly any rows, and keeps the plan.
LOOKS_LIKE_FEW = "id BETWEEN 1 AND 9223372036854775807"

# The state of a row that is found by its id. With a plain comparison the planner could instead read all scheduled (or
# running) rows along a partial index, and would do so when the last ANALYZE found hardly any: in a table with a long
# history and a burst since then, that is a million rows for each claim.
IS_SCHEDULED = "m.state || '' = 'scheduled'"
IS_RUNNING = "m.state || '' = 'running'"

# The time when a statement begins to search. The clock itself would be read anew for each row, and the server searches
# no index for such a value: it would read all rows.
NOW = "(SELECT clock_timestamp())"

NOT_EXPIRED = "(m.expires_at IS NULL OR m.expires_at > clock_timestamp())"

# Every claim reads this: a transaction that has begun a claim holds a lock on the table of queues until it commits.
PAUSED = "SELECT name FROM delayq_queue WHERE resumes_at IS NULL OR resumes_at > clock_timestamp()"

# What may be claimed: what a claim asks of a message besides its state and its due time.
MAY_CLAIM = f"""{NOT_EXPIRED}
       AND m.topic = ANY(%(topics)s::text[])
       AND (%(queue)s::text IS NULL OR m.queue = %(queue)s)
       AND m.queue NOT IN ({PAUSED})"""


def array(numbers: Iterable[float | None]) -> str:
    """Write an array as PostgreSQL does. Faster than psycopg, which looks for the type of each element."""
    return "{" + ",".join(["NULL" if number is None else str(number) for number in numbers]) + "}"


def texts(values: Iterable[str]) -> str:
    """Write an array of texts, with any characters in them."""
    return "{" + ",".join([_quoted(text) for text in values]) + "}"


def nullable_texts(values: Iterable[object]) -> str:
    """Write an array of what the server reads from text: numbers, times, words and None for NULL."""
    return "{" + ",".join(["NULL" if value is None else _quoted(str(value)) for value in values]) + "}"


@lru_cache(maxsize=1024)
def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
