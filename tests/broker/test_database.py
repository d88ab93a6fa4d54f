"""The broker on the database: most of its methods have no effect and cost no query."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connection, connections
from pytest_django import DjangoAssertNumQueries

from django_delayq.broker.base import DueQueue
from django_delayq.record.sql.rows import Ticket
from tests.support.broker_methods import QUEUE

from .bench import Bench, database_broker


@pytest.mark.django_db
def test_methods_without_an_effect_cost_no_query(django_assert_num_queries: DjangoAssertNumQueries) -> None:
    broker = database_broker()
    with django_assert_num_queries(0):
        broker.promote(QUEUE)
        broker.put(QUEUE, [])
        broker.park(QUEUE, [Ticket(1)], 1.0)
        broker.put_back(QUEUE, [Ticket(1)])
        broker.notify([QUEUE])
        broker.stop_listening()


@pytest.mark.django_db
def test_a_queue_is_taken_from_although_no_look_has_named_it() -> None:
    """Ids stood aside in it when Redis was lost: a process remembers these queues."""
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


def in_another_session(call: Callable[[], list[int]]) -> list[int]:
    def call_and_close() -> list[int]:
        try:
            return call()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call_and_close).result(timeout=30)


def take(limit: int) -> list[int]:
    broker = database_broker()
    with broker.exclusively():
        return [ticket.id for ticket in broker.take(QUEUE, limit).tickets]


@pytest.mark.parametrize(("scheduled", "taken"), [(20, 3), (1010, 1000)])
def test_a_process_locks_only_what_it_takes_so_that_others_find_the_next_most_overdue(
    bench: Bench, scheduled: int, taken: int
) -> None:
    ids = bench.schedule_many(scheduled)
    with bench.broker.exclusively():
        assert bench.take(taken) == ids[:taken]
        assert in_another_session(lambda: take(4)) == ids[taken : taken + 4]


@pytest.mark.django_db
def test_a_take_of_all_that_one_query_returns_says_that_more_may_be_due() -> None:
    bench = Bench(database_broker())
    ids = bench.schedule_many(1200)
    taken = bench.broker.take(QUEUE, 1500)
    assert [ticket.id for ticket in taken.tickets] == ids[:1000]
    assert taken.left > 0


def test_a_take_that_passes_over_what_others_hold_says_that_more_may_be_due(bench: Bench) -> None:
    ids = bench.schedule_many(1200)

    def take_beside() -> list[int]:
        broker = database_broker()
        with broker.exclusively():
            taken = broker.take(QUEUE, 1000)
        assert taken.left > 0
        return [ticket.id for ticket in taken.tickets]

    with bench.broker.exclusively():
        assert bench.take(300) == ids[:300]
        assert in_another_session(take_beside) == ids[300:1000]
