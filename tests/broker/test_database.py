"""The broker on the database: most of its methods have no effect and cost no query."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connection, connections
from pytest_django import DjangoAssertNumQueries

from django_delayq.broker.base import DueQueue, Taken
from django_delayq.record.sql.rows import Ticket
from tests.support.broker_methods import QUEUE
from tests.support.workers import PATIENCE

from .bench import Bench, database_broker


@pytest.mark.django_db
def test_methods_without_an_effect_cost_no_query(django_assert_num_queries: DjangoAssertNumQueries) -> None:
    broker = database_broker()
    with django_assert_num_queries(0):
        broker.promote(QUEUE)
        broker.put(QUEUE, [])
        broker.delay(QUEUE, [Ticket(1)], 1.0)
        broker.put_back(QUEUE, [Ticket(1)])
        broker.notify([QUEUE])
        broker.stop_listening()


@pytest.mark.django_db
def test_a_queue_is_taken_from_although_no_look_has_named_it() -> None:
    """Ids were blocked in it when Redis was lost: a process remembers these queues."""
    bench = Bench(database_broker())
    pk = bench.schedule()
    assert bench.broker.due_queues(["other"]).queues == []
    found = bench.broker.take_many([DueQueue(QUEUE, 0, 0)], 10)
    assert [ticket.id for ticket in found[QUEUE].tickets] == [pk]


@pytest.fixture
def bench(transactional_db: None) -> Bench:
    if not connection.features.has_select_for_update_skip_locked:
        pytest.skip("needs row locks")
    return Bench(database_broker())


def take_beside(limit: int) -> Taken:
    """Take as another process does, which holds what it takes."""

    def take() -> Taken:
        broker = database_broker()
        try:
            with broker.exclusively():
                return broker.take(QUEUE, limit)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(take).result(timeout=PATIENCE)


@pytest.mark.parametrize(("scheduled", "taken"), [(20, 3), (1200, 300), (1010, 1000)])
def test_a_process_locks_only_what_it_takes_so_that_others_find_the_next_most_overdue(
    bench: Bench, scheduled: int, taken: int
) -> None:
    ids = bench.schedule_many(scheduled)
    with bench.broker.exclusively():
        assert bench.take(taken) == ids[:taken]
        beside = take_beside(1000)
    expected = ids[taken : max(1000, taken + 10)]
    assert [ticket.id for ticket in beside.tickets] == expected
    # What others hold was passed over, and more may be due behind it.
    assert beside.left > 0


@pytest.mark.django_db
def test_a_take_of_all_that_one_query_returns_says_that_more_may_be_due() -> None:
    bench = Bench(database_broker())
    ids = bench.schedule_many(1200)
    taken = bench.broker.take(QUEUE, 1500)
    assert [ticket.id for ticket in taken.tickets] == ids[:1000]
    assert taken.left > 0
