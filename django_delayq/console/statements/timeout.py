"""How long the database may think about what people look at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from django.db import OperationalError, connections, transaction

_CANCELLED = "57014"
_LIMIT = "SELECT set_config('statement_timeout', %s, true), set_config('jit', %s, true)"


class TooSlow(Exception):
    """The database was told to stop: the answer would have taken too long."""


@contextmanager
def statement_timeout(using: str, milliseconds: int) -> Iterator[None]:
    """No statement inside may take longer (on PostgreSQL). Raises ``TooSlow``."""
    connection = connections[using]
    if connection.vendor != "postgresql":
        yield
        return
    outer = connection.in_atomic_block
    try:
        with transaction.atomic(using=using), connection.cursor() as cursor:
            before = None
            if outer:
                cursor.execute("SELECT current_setting('statement_timeout'), current_setting('jit')")
                before = cursor.fetchone()
            # Compiling takes longer than any statement here that is good for something.
            cursor.execute(_LIMIT, [str(milliseconds), "off"])
            yield
            if before is not None:
                # The longer transaction that this is a part of goes on as it was.
                cursor.execute(_LIMIT, before)
    except OperationalError as error:
        if getattr(error.__cause__, "sqlstate", None) == _CANCELLED:
            raise TooSlow from error
        raise
