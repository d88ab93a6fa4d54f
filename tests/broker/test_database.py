"""The broker on the database: most of its methods have no effect and cost no query."""

from __future__ import annotations

import pytest
from pytest_django import DjangoAssertNumQueries

from django_delayq.sql.rows import Ticket

from .bench import QUEUE, database_broker


@pytest.mark.django_db
def test_methods_without_an_effect_cost_no_query(django_assert_num_queries: DjangoAssertNumQueries) -> None:
    broker = database_broker()
    with django_assert_num_queries(0):
        broker.promote(QUEUE)
        broker.put(QUEUE, [])
        broker.remove(QUEUE, [1])
        broker.park(QUEUE, [Ticket(1)], 1.0)
        broker.put_back(QUEUE, [Ticket(1)])
        broker.notify(QUEUE)
        broker.stop_listening()
        broker.reset_listener()
        broker.close()
