"""Gives a fresh PostgreSQL the write-ahead log files that a server has which has run for a while.

A server that has run for a while writes its log into files that are there already: each checkpoint keeps the old ones
for that. A fresh server makes a new file for each 16 MB, and no commit ends meanwhile.
"""

from __future__ import annotations

import psycopg

# The server's setting of what it keeps for later, and what is written to get it. Nothing here writes more between two
# checkpoints.
KEPT = {"min_wal_size": "1GB"}
FILL = "SELECT count(pg_logical_emit_message(false, '', repeat('x', 1000000))) FROM generate_series(1, 1000)"


def fill(url: str) -> None:
    """Have the server, which was started with ``KEPT``, write as much as it keeps, and keep it."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(FILL)
        connection.execute("CHECKPOINT")
