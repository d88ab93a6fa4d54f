"""Without Redis, a look for due messages passes over those of full limits a part of the queue at a time."""

from __future__ import annotations

import pytest
from django.db import connection

from django_delayq import schedule_message, schedule_messages
from django_delayq.broker.base import Taken
from django_delayq.broker.broker_tuning import USUAL, BrokerTuning
from django_delayq.broker.database import DatabaseBroker
from django_delayq.core.states import State
from django_delayq.models import Message
from django_delayq.record.sql.rows import ROWS_PASSED
from tests.support.limits import DB, Declare, admit, succeed

pytestmark = pytest.mark.django_db

QUEUE = "default"
# So many limited messages fill two parts of the queue, and begin a third.
LIMITED = 2 * ROWS_PASSED + 500


@pytest.fixture
def broker(declare: Declare) -> DatabaseBroker:
    """A broker of a queue in which messages of a full limit come first."""
    declare("l.one", limit=1)
    declare("l.free")
    first = schedule_message("l.one")
    schedule_messages([{"topic": "l.one"}] * LIMITED)
    assert admit(first) == [first.pk]
    # After the first looks none begins at the very beginning: on a slow machine that could be in the middle of a walk.
    return DatabaseBroker(DB, lambda: ["l.one", "l.free"], BrokerTuning(parts_of_time=1_000_000))


def takes(broker: DatabaseBroker, limit: int = 10) -> list[Taken]:
    """Take until nothing is behind what was looked at, nine times at most."""
    found = [broker.take(QUEUE, limit)]
    while len(found) < 9 and (found[-1].behind or len(found[-1].tickets) == limit):
        found.append(broker.take(QUEUE, limit))
    return found


def test_a_message_behind_those_of_a_full_limit_is_found_however_many_these_are(broker: DatabaseBroker) -> None:
    for _again in range(2):
        free = schedule_message("l.free")
        found = takes(broker)
        assert [ticket.id for taken in found for ticket in taken.tickets] == [free.pk]
        assert len(found) == 3
        assert admit(free) == [free.pk]
        assert broker.take(QUEUE, 10).next_due == USUAL.look_again


def test_when_all_was_passed_over_the_next_look_comes_in_a_moment(broker: DatabaseBroker) -> None:
    *others, last = takes(broker)
    assert [taken.left for taken in others] == [1, 1]
    assert (last.tickets, last.left, last.next_due) == ([], 0, USUAL.look_again)


def test_no_part_is_left_while_it_has_more_than_there_is_room_for(broker: DatabaseBroker) -> None:
    free = [schedule_message("l.free").pk for _ in range(5)]
    broker.take(QUEUE, 2)
    broker.take(QUEUE, 2)
    assert [ticket.id for ticket in broker.take(QUEUE, 2).tickets] == free[:2]
    # They were not claimed, and so stay the next ones.
    assert [ticket.id for ticket in broker.take(QUEUE, 10).tickets] == free


def test_a_place_that_becomes_free_meanwhile_goes_to_the_first_in_the_order(broker: DatabaseBroker) -> None:
    free = schedule_message("l.free")
    oldest = Message.objects.filter(topic="l.one", state=State.SCHEDULED).earliest("due_at", "pk")
    assert broker.take(QUEUE, 1).behind
    succeed(Message.objects.get(topic="l.one", state=State.RUNNING))
    found: list[int] = []
    for _ in range(9):
        found += [ticket.id for ticket in broker.take(QUEUE, 1).tickets]
    # Those behind the others are found first, since the walk has come so far, and the first one in the next walk.
    assert found[:2] == [free.pk, oldest.pk]
    assert set(found[2:]) == {oldest.pk}


def test_a_limit_that_opens_during_each_walk_keeps_nobody_from_what_is_behind(broker: DatabaseBroker) -> None:
    for _ in range(2):
        free = schedule_message("l.free")
        running = Message.objects.get(topic="l.one", state=State.RUNNING)
        assert broker.take(QUEUE, 1).behind
        succeed(running)
        began: list[str] = []
        while len(began) < 2:
            tickets = [ticket.id for ticket in broker.take(QUEUE, 1).tickets]
            began += [message.topic for message in Message.objects.filter(pk__in=tickets) if admit(message)]
        assert began == ["l.free", "l.one"]
        succeed(free)


def test_messages_of_later_are_not_passed_over(declare: Declare) -> None:
    declare("l.one", limit=1)
    # Before the claim: the server ends a transaction that has locked limits and then does nothing for seconds.
    schedule_messages([{"topic": "l.one", "delay": "1h"}] * LIMITED)
    first = schedule_message("l.one")
    assert admit(first) == [first.pk]
    broker = DatabaseBroker(DB, lambda: ["l.one"])
    assert not broker.take(QUEUE, 10).behind


def test_of_many_queues_one_that_begins_with_a_full_limit_counts_as_due(broker: DatabaseBroker) -> None:
    schedule_message("l.free", queue="later", delay="1h")
    assert [queue.name for queue in broker.due_queues(None).queues] == [QUEUE]
    schedule_message("l.free", queue="now")
    assert [queue.name for queue in broker.due_queues(["now", "later", QUEUE]).queues] == ["now", QUEUE]


@pytest.mark.postgresql("asks PostgreSQL for the rows that it has read")
def test_a_look_reads_few_rows_whatever_waits(broker: DatabaseBroker) -> None:
    before = rows_read()
    broker.take(QUEUE, 10)
    broker.due_queues([QUEUE])
    # Once for where the part ends, and once for what is due in it; and once for the first message of each queue.
    assert rows_read() - before <= 3 * ROWS_PASSED + 10


def rows_read() -> int:
    """Return how many messages the statements of this transaction have read."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT coalesce(idx_tup_fetch, 0) + seq_tup_read FROM pg_stat_xact_user_tables"
            " WHERE relname = 'delayq_message'"
        )
        return int(cursor.fetchone()[0])
