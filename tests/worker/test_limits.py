"""How a worker process keeps within limits: it admits, promotes when deliveries end, and looks after the lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from django_delayq import schedule_message
from django_delayq.core.states import State
from django_delayq.core.worker_options import Options
from django_delayq.extensions import WorkerExtensions
from django_delayq.models import Message
from django_delayq.models.record import Place
from django_delayq.project import registry
from django_delayq.record import admission
from django_delayq.record.sql import limit_statements
from django_delayq.record.sql.rows import Ticket
from django_delayq.worker.claim import line_keeper as worker_limits
from django_delayq.worker.claim.line_keeper import INTERVAL, REMOVED_INTERVAL, Gate, LineKeeper
from django_delayq.worker.processes.assembly import Parts, assemble
from django_delayq.worker.processes.once import drain
from django_delayq.worker.upkeep.janitor import Janitor
from tests.support.limits import DB, LEASES, Declare, admit, state, states, succeed

pytestmark = pytest.mark.django_db(transaction=True)


def assembled() -> Parts:
    return assemble(Options(DB, queues=("default",), threads=2), redis=False, name="w")


@pytest.fixture
def three(declare: Declare) -> list[Message]:
    """Three messages of which one may run at a time; the first one does."""
    declare("l.one", limit=1)
    made = [schedule_message("l.one") for _ in range(3)]
    assert admit(*made) == [made[0].pk]
    return made


def test_a_process_that_knows_no_limit_claims_as_ever() -> None:
    assert not any(handler.limit for handler in registry.handlers().values())
    parts = assembled()
    assert parts.gate is None
    assert parts.consumer._claim_within_limits is None
    assert not any(isinstance(one, Gate) for one in parts.extensions._all)
    parts.brokers.close()


def test_a_process_that_knows_a_limit_claims_through_a_gate(
    declare: Declare, queue_limits: Callable[..., None]
) -> None:
    queue_limits(emails={"limit": 1})
    parts = assembled()
    assert parts.gate is not None
    assert parts.consumer._claim_within_limits == parts.gate.claim
    parts.brokers.close()


@pytest.mark.parametrize("how", ["consumed", "retried", "ended"])
def test_the_end_of_a_delivery_promotes_the_next_message(three: list[Message], how: str) -> None:
    gate = Gate(DB, "w")
    extensions = WorkerExtensions(DB, "w", [gate])
    succeed(three[0])
    getattr(extensions, how)([three[0]])
    gate.promote()
    assert states(*three) == [State.CONSUMED, State.SCHEDULED, State.LIMITED]


def test_a_refused_newcomer_moves_the_line_up(three: list[Message]) -> None:
    """The end of the first delivery was told to nobody."""
    gate = Gate(DB, "w")
    succeed(three[0])
    newcomer = schedule_message("l.one")
    assert gate.claim(DB, [Ticket(newcomer.pk)], LEASES, "w") == []
    gate.promote()
    assert states(three[1], newcomer) == [State.SCHEDULED, State.LIMITED]


def test_a_promotion_that_fails_is_made_up_for(three: list[Message], monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(DB, "w")
    succeed(three[0])
    gate.consumed([three[0]])
    with monkeypatch.context() as broken:
        broken.setattr(admission, "promote", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            gate.promote()
    gate.stop()
    assert state(three[1]) == State.SCHEDULED


def test_a_place_whose_end_was_told_to_nobody_is_given_on_by_the_next_look(three: list[Message]) -> None:
    succeed(three[0])
    assert LineKeeper(DB, "w", knows_limits=True).tick() == INTERVAL
    assert states(*three) == [State.CONSUMED, State.SCHEDULED, State.LIMITED]


def test_a_run_with_once_looks_at_lines_that_others_have_left(three: list[Message]) -> None:
    succeed(three[0])
    assert drain(Options(DB, threads=1)) == 2
    assert states(*three) == [State.CONSUMED] * 3


def test_a_look_goes_through_all_lines(declare: Declare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_limits, "LINES_PER_LOOK", 2)
    monkeypatch.setattr(worker_limits, "LONGEST_LOOK", 60.0)
    declare("l.one", limit=1)
    made = [schedule_message("l.one", limit_key=f"c-{number // 2}") for number in range(10)]
    admit(*made)
    for message in made[::2]:
        succeed(message)
    assert LineKeeper(DB, "w", knows_limits=True).tick() == INTERVAL
    assert states(*made[1::2]) == [State.SCHEDULED] * 5
    # A look that takes long goes on later.
    monkeypatch.setattr(worker_limits, "LONGEST_LOOK", -1.0)
    admit(*made[1::2], *[schedule_message("l.one", limit_key=f"c-{number}") for number in range(5)])
    keeper = LineKeeper(DB, "w", knows_limits=True)
    assert [keeper.tick() for _ in range(3)] == [0.05, 0.05, INTERVAL]


def test_a_limit_that_was_removed_lets_everybody_go_now_and_then(declare: Declare, three: list[Message]) -> None:
    declare("l.one")
    keeper = LineKeeper(DB, "w", knows_limits=False)
    assert keeper.tick() == REMOVED_INTERVAL
    assert states(*three) == [State.RUNNING, State.SCHEDULED, State.SCHEDULED]
    declare("l.one", limit=1)
    admit(*three)
    declare("l.one")
    keeper.tick()
    # A worker of another version may know the limit: not at every look.
    assert states(*three) == [State.RUNNING, State.LIMITED, State.LIMITED]


def test_the_janitor_deletes_places_that_are_free(three: list[Message]) -> None:
    succeed(three[0])
    assert Place.objects.exists()
    Janitor(DB).tick()
    assert not Place.objects.exists()


def test_a_message_of_an_unknown_topic_is_not_judged(three: list[Message]) -> None:
    registry.unregister("l.one")
    gate = Gate(DB, "w")
    leases = {"l.free": 60.0}
    assert gate.claim(DB, [Ticket(three[1].pk)], leases, "w") == []
    gate.consumed([three[0]])
    gate.promote()
    assert states(*three) == [State.RUNNING, State.LIMITED, State.LIMITED]


def test_messages_without_a_limit_cost_one_statement_more_beside_a_limit(
    declare: Declare, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare("l.one", limit=1)
    free = schedule_message("l.free")
    statements = limit_statements(DB)
    rows = vars(statements).get("_rows")
    if rows is None:
        pytest.skip("counts the statements of PostgreSQL")
    seen: list[str] = []

    def count(sql: str, given: Any) -> Any:
        seen.append(sql)
        return rows(sql, given)

    monkeypatch.setitem(vars(statements), "_rows", count)
    assert admit(free) == [free.pk]
    assert len(seen) == 1
