"""Without Redis, looks pass the rows that nobody can vacuum once, and not each time; and they miss nothing for it.

A row that this transaction has deleted is as dead as one that another one's snapshot keeps: no vacuum removes it, and
the index still has it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from django.db import connection
from django.utils import timezone

from django_delayq import schedule_message, schedule_messages
from django_delayq.broker.database import DatabaseBroker
from django_delayq.models import Message
from django_delayq.record import crashes, reads
from django_delayq.record.low_water import LowWater
from django_delayq.worker.shared.broker_switch import BrokerSwitch
from django_delayq.worker.upkeep.loader import Loader
from django_delayq.worker.upkeep.sweeper import Sweeper
from django_delayq.worker.upkeep.upkeep_tuning import UpkeepTuning
from tests.support.rows import unguarded
from tests.support.steps import claim
from tests.support.workers import eventually

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.postgresql("only PostgreSQL keeps dead rows, and tells what a statement has read"),
]

DB = "default"
TOPIC = "record.test"
DEAD = 3000
# A take reads what is due, up to a thousand messages, to find the most urgent ones.
FEW = DEAD // 2


@pytest.fixture
def broker() -> DatabaseBroker:
    return DatabaseBroker(DB, lambda: [TOPIC])


def die(queue: str = "default") -> None:
    """Write messages that fell due a minute ago, claim them, and delete them."""
    ids = [message.pk for message in schedule_messages([{"topic": TOPIC, "queue": queue}] * DEAD)]
    with connection.cursor() as cursor:
        cursor.execute("UPDATE delayq_message SET due_at = due_at - interval '1 minute' WHERE id = ANY(%s)", [ids])
        cursor.execute(
            "UPDATE delayq_message SET state = 'running', deliveries = 1,"
            " leased_until = clock_timestamp() - interval '30 seconds' WHERE id = ANY(%s)",
            [ids],
        )
        cursor.execute("DELETE FROM delayq_message WHERE id = ANY(%s)", [ids])


def overdue() -> Message:
    """Schedule a message that has been due for an hour."""
    message = schedule_message(TOPIC)
    unguarded(Message).filter(pk=message.pk).update(due_at=timezone.now() - timedelta(hours=1))
    return message


def entries_read(call: Callable[[], object]) -> int:
    """Return how many entries of indexes a call reads."""

    def read() -> int:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT sum(pg_stat_get_xact_tuples_returned(indexrelid)) FROM pg_index"
                " WHERE indrelid = 'delayq_message'::regclass"
            )
            return int(cursor.fetchone()[0])

    before = read()
    call()
    return read() - before


def take(broker: DatabaseBroker, queue: str = "default") -> list[int]:
    return [ticket.id for ticket in broker.take(queue, 10).tickets]


def pass_dead_rows(look: Callable[[], object]) -> None:
    """Look until a look passes no dead rows. A look from the very beginning comes now and then."""
    eventually(lambda: entries_read(look) < FEW, "a look passes no dead rows")


def test_a_take_passes_dead_rows_rarely(broker: DatabaseBroker) -> None:
    die()
    pass_dead_rows(lambda: take(broker))
    message = schedule_message(TOPIC)
    eventually(lambda: entries_read(lambda: take(broker)) < FEW, "nor with a message that is due")
    assert take(broker) == [message.pk]


def test_a_drain_does_not_pass_what_it_has_taken_itself(broker: DatabaseBroker) -> None:
    schedule_messages([{"topic": TOPIC}] * (DEAD + 100))
    for _ in range(DEAD // 100):
        claim(*(ticket.id for ticket in broker.take("default", 100).tickets))
    # A take reads the index twice, and the rows of the last one are dead; then it locks what it takes.
    eventually(lambda: entries_read(lambda: take(broker)) < FEW, "a take passes no dead rows")


def test_a_look_at_all_queues_passes_dead_rows_rarely_and_finds_new_ones(broker: DatabaseBroker) -> None:
    for queue in ("b", "d"):
        schedule_message(TOPIC, queue=queue, delay="1h")
        die(queue)
    pass_dead_rows(lambda: broker.due_queues(None))
    for queue in ("a", "c", "c2", "e"):
        schedule_message(TOPIC, queue=queue)
    found = broker.due_queues(None)
    assert [queue.name for queue in found.queues] == ["a", "c", "c2", "e"]


@pytest.mark.parametrize("backlog", [0, 100])
def test_a_message_that_comes_before_the_mark_is_found(broker: DatabaseBroker, backlog: int) -> None:
    """A message was released, or rescheduled into the past."""
    die()
    schedule_messages([{"topic": TOPIC}] * backlog)
    pass_dead_rows(lambda: take(broker))
    early = overdue()
    eventually(lambda: early.pk in take(broker), "a look from the very beginning finds it")


@pytest.mark.parametrize("others", [0, 1])
def test_a_message_whose_transaction_ends_a_moment_late_is_found_at_once_whatever_is_due_later(
    broker: DatabaseBroker, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    schedule_messages([{"topic": TOPIC, "delay": "1h"}] * others)
    assert take(broker) == []
    monkeypatch.setattr(LowWater, "begin_full_scan", lambda _self: False)
    assert take(broker) == []
    late = schedule_message(TOPIC, due_at=timezone.now() - timedelta(seconds=1))
    assert take(broker) == [late.pk]


def test_the_first_message_of_a_queue_is_seen_by_each_look_while_it_cannot_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    message, topics = overdue(), list[str]()
    broker = DatabaseBroker(DB, lambda: topics)
    assert take(broker) == []
    monkeypatch.setattr(LowWater, "begin_full_scan", lambda _self: False)
    assert take(broker) == []
    topics.append(TOPIC)
    assert take(broker) == [message.pk]


def test_the_reaper_passes_dead_rows_rarely_and_finds_each_lease_that_is_over() -> None:
    die()
    marks = LowWater(), LowWater()
    pass_dead_rows(lambda: crashes.anything_expired(DB, *marks))
    (row,) = claim(schedule_message(TOPIC).pk)
    unguarded(Message).filter(pk=row.id).update(leased_until=timezone.now() - timedelta(hours=1))
    eventually(lambda: crashes.anything_expired(DB, *marks)[0], "a look from the very beginning finds it")


@pytest.mark.usefixtures("redis_client")
def test_the_sweeper_passes_dead_rows_rarely_and_finds_what_comes_before_its_mark() -> None:
    die()
    brokers = BrokerSwitch(DB, dict)
    tuning = UpkeepTuning(claiming=0.0, late_commit=timedelta(seconds=5))
    sweeper = Sweeper(DB, brokers, lambda: ("default",), lambda: [TOPIC], tuning)
    Loader(DB, brokers, "host/1").tick()

    def sweep() -> int:
        return sweeper.sweep(reads.now(DB))["default"]

    full = entries_read(sweep)
    assert full > DEAD
    eventually(lambda: entries_read(sweep) <= full - DEAD, "a round passes no dead rows")
    message = overdue()
    sweeper.broker.remove("default", [message.pk])
    eventually(lambda: sweep() == 1, "a round from the very beginning finds it")
    brokers.close()
