"""A record whose clock a test sets, and declarations of the test alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection

from django_delayq import handler
from django_delayq.core.states import LIVE, State
from django_delayq.models import Message
from django_delayq.models.messages import LogRow
from django_delayq.recurring import declarations, schedules
from django_delayq.recurring.models import Occurrence
from django_delayq.recurring.schedule_tuning import tuning
from tests.support.no_handlers import forget_handlers
from tests.support.rows import unguarded
from tests.support.tuning import tunable

# The messages of these tests are due in the far future: no real clock makes them due.
NOON = datetime(2050, 3, 1, 12, tzinfo=UTC)
DB = "default"


class Clock:
    """The record's clock."""

    def __init__(self) -> None:
        self.now = NOON

    def advance(self, **span: float) -> None:
        self.now += timedelta(**span)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The record's clock, which stands still at noon until the test moves it."""
    made = Clock()
    monkeypatch.setattr("django_delayq.core.in_tests.clock", lambda: made.now)
    return made


@pytest.fixture
def tuned() -> Iterator[Callable[..., None]]:
    """Give schedules other numbers for the time of a test: ``tuned(made_together=3)``."""
    with tunable(tuning) as give:
        yield give


@pytest.fixture
def without_redis(settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": None}


@pytest.fixture
def code(own_schedules: None) -> list[declarations.Declaration]:
    """The declarations of the code, of which there are none at first. Handlers of the test are forgotten after it."""
    forget_handlers()
    return declarations.declared


@pytest.fixture
def keyed(code: list[declarations.Declaration]) -> None:
    """A handler of ``t.keyed`` whose limit key is the customer that the payload names."""

    def by_customer(message: Any) -> str:
        return str(message.payload["customer"])

    @handler("t.keyed", limit=1, limit_key=by_customer)
    def keyed(message: Any) -> None: ...


def look() -> None:
    """Advance all schedules whose time has come, as a worker does, until nothing is left to do."""
    while names := schedules.due(DB, 100):
        schedules.advance(DB, *names)


def later(clock: Clock, **span: float) -> None:
    """Let time pass, and look then."""
    clock.advance(**span)
    look()


def deliver(clock: Clock, name: str = "s") -> list[str]:
    """Have all messages of a schedule whose time has come begin and end now. Return their times."""
    delivered = []
    rows = Occurrence.objects.filter(schedule=name, at__lte=clock.now).order_by("at")
    for occurrence in rows:
        message = Message.objects.get(pk=occurrence.message_id)
        if message.state not in LIVE:
            continue
        values = {"state": State.CONSUMED, "deliveries": 1, "reported": 1, "moves": message.moves + 2}
        unguarded(Message).filter(pk=message.pk).update(**values, finished_at=clock.now, leased_until=None)
        for number, state in enumerate((State.RUNNING, State.CONSUMED), message.moves + 1):
            log = LogRow(message=message, number=number, at=clock.now, to_state=state, due_at=message.due_at)
            log.save_base(force_insert=True)
        delivered.append(shown(occurrence.at))
    return delivered


def shown(at: datetime) -> str:
    """Return the time of day, with the day before it if it is not the first."""
    return f"{at:%H:%M}" if at.date() == NOON.date() else f"{at:%d %H:%M}"


def occurrences(name: str = "s") -> list[str]:
    """Return the times of a schedule that have a message."""
    return [shown(row.at) for row in Occurrence.objects.filter(schedule=name).order_by("at")]


def live(name: str = "s") -> list[str]:
    """Return the times of a schedule whose message is live."""
    ids = Message.objects.filter(state__in=LIVE).values("pk")
    return [shown(row.at) for row in Occurrence.objects.filter(schedule=name, message_id__in=ids).order_by("at")]


def no_table() -> None:
    """Fail in the database, as a query of the project may."""
    with connection.cursor() as cursor:
        cursor.execute('SELECT * FROM "no tenant"')
