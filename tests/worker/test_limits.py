"""How a worker process keeps within limits, step by step."""

from __future__ import annotations

import pytest

from django_delayq import schedule_message, schedule_messages
from django_delayq.core.states import State
from django_delayq.core.worker_options import Options
from django_delayq.models import Message
from django_delayq.models.record import Place
from django_delayq.project import registry
from django_delayq.record.sql.rows import ROWS_PASSED, Ticket
from django_delayq.worker.upkeep.janitor import Janitor
from tests.support.assembled import Assemble, drain
from tests.support.limits import DB, Declare, admit, claim_limited, states, succeed

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def three(declare: Declare) -> list[Message]:
    """Three messages of which one may run at a time; the first one does."""
    declare("l.one", limit=1)
    made = [schedule_message("l.one") for _ in range(3)]
    assert admit(*made) == [made[0].pk]
    return made


def test_a_run_with_once_goes_on_with_a_long_line(declare: Declare) -> None:
    """The look that went past the line may have begun while the limit was full, and ended when nothing ran."""
    declare("l.one", limit=1)
    schedule_messages([{"topic": "l.one"}] * (ROWS_PASSED + 1000))
    assert drain(Options(DB, threads=2, max_messages=50)) == 50


def test_a_run_with_once_ends_when_nothing_could_begin(three: list[Message]) -> None:
    assert drain(Options(DB, threads=1)) == 0
    assert states(*three) == [State.RUNNING, State.SCHEDULED, State.SCHEDULED]


def test_without_redis_a_limit_is_tried_as_soon_as_the_record_has_room(declare: Declare, assembled: Assemble) -> None:
    """The worker never hears that the first delivery has ended: its lease was lost, for example."""
    declare("l.one", limit=1)
    worker = assembled(4, name="worker", redis=False)
    first, second, third = (schedule_message("l.one") for _ in range(3))
    worker.consumer.turn()
    assert [delivery.id for delivery in worker.pool.held()] == [first.pk]
    worker.pool.threads.held.remove(worker.pool.held()[0])
    succeed(first)
    worker.consumer.turn()
    assert [delivery.id for delivery in worker.pool.held()] == [second.pk]
    assert states(third) == [State.SCHEDULED]


def test_the_janitor_deletes_places_that_are_free(three: list[Message]) -> None:
    succeed(three[0])
    assert Place.objects.exists()
    Janitor(DB).tick()
    assert not Place.objects.exists()


def test_a_message_of_an_unknown_topic_is_not_judged(three: list[Message]) -> None:
    registry.unregister("l.one")
    admitted = claim_limited(DB, [Ticket(three[1].pk)], {"l.free": 60.0}, "w")
    assert (admitted.claimed, admitted.refused) == ([], {})
