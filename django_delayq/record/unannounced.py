"""Messages that the function ``delayq_schedule`` of the database has scheduled, until Redis is told of them.

That function writes the rows, and ``migrations/0003_from_sql.py`` makes it. The sweeper reads and deletes them.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from datetime import timedelta

from ..core.known_record import record_clock
from ..models.messages import Unannounced
from .sql import statements
from .sql.moves import clock
from .sql.rows import ToAnnounce

# A row is of no use after this time: without Redis nobody reads it, and one that was away is loaded from the record.
USELESS_AFTER = timedelta(hours=1)


def look(using: str, limit: int) -> ToAnnounce:
    """Return the time by the record's clock, which this process knows afterwards, and up to ``limit`` messages."""
    asked = time.monotonic()
    found = statements(using).unannounced(limit)
    record_clock(using).learn(asked, found.now)
    return found


def forget(using: str, ids: Collection[int]) -> None:
    """Delete the rows of messages of which Redis was told."""
    Unannounced.objects.using(using).filter(pk__in=ids).delete()


def drop_useless(using: str) -> None:
    """Delete the rows that nobody has read in time."""
    Unannounced.objects.using(using).filter(at__lt=clock(using) - USELESS_AFTER).delete()
