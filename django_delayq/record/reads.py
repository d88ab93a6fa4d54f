"""Asks the record for its time and its identity, and which deliveries are live. Changes nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from datetime import datetime

from django.db import Error as DatabaseError

from ..core.known_record import learn_identity, record_clock
from ..core.states import LIVE, State
from ..models import Message
from ..models.messages import Identity
from .sql import statements


def now(using: str) -> datetime:
    """Return the time by the record's clock, and remember by how much this host's clock differs from it."""
    asked = time.monotonic()
    shown = statements(using).now()
    record_clock(using).learn(asked, shown)
    return shown


def known_now(using: str) -> float:
    """Return the time by the record's clock, in seconds since 1970. Asks when the record has not answered lately."""
    known = record_clock(using)
    if not known.is_sure:
        # While the database is away, the upkeep of Redis goes on as before.
        with contextlib.suppress(DatabaseError):
            now(using)
    return known.seconds()


def identity(using: str) -> str:
    """Return the identity of the database, and remember it. It is made when somebody first asks for it."""
    row, _created = Identity.objects.using(using).get_or_create(id=1)
    learn_identity(using, row.value)
    return str(row.value)


def live_deliveries(using: str, ids: Iterable[int]) -> dict[int, tuple[State, int]]:
    """Return the state and the number of the last delivery of each message that is live."""
    rows = Message.objects.using(using).filter(pk__in=list(ids), state__in=LIVE)
    return {pk: (State(state), delivery) for pk, state, delivery in rows.values_list("pk", "state", "deliveries")}
