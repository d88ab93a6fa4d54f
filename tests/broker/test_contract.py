"""The promises of every broker: one suite, run on Redis and on the database."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.utils import timezone

from django_delayq.record import transitions
from tests.support.broker_methods import QUEUE

from .bench import Bench

# A listen may be this much longer than asked when the machine is busy. Seconds.
SLACK = 60.0


def test_a_message_is_delivered_when_it_is_due_and_never_before(bench: Bench) -> None:
    id_ = bench.schedule(due_in=3.0)
    assert bench.deliver() == []
    while not (delivered := bench.deliver(1)):
        bench.broker.listen([QUEUE], bench.broker.take(QUEUE, 0).next_due or 0.0)
    (claimed,) = delivered
    assert claimed.id == id_
    assert claimed.claimed_at >= claimed.due_at
    assert timezone.now() >= claimed.due_at
    assert bench.deliver() == []


def test_a_take_reports_the_next_due_time_while_nothing_is_due(bench: Bench) -> None:
    assert bench.broker.take(QUEUE, 10).next_due is None
    bench.schedule(due_in=300)
    bench.schedule(due_in=60)
    taken = bench.broker.take(QUEUE, 10)
    assert taken.tickets == []
    assert taken.left == 0
    assert taken.next_due is not None
    assert 10 < taken.next_due < 60.01


@pytest.mark.parametrize("limit", [1, 7, 100])
def test_the_best_priority_goes_first_and_within_one_the_longest_overdue(bench: Bench, limit: int) -> None:
    priorities = (100, 0, -5, -100)
    ids = [bench.schedule(due_in=-1 - 100 * number, priority=priorities[number % 4]) for number in range(40)]
    delivered: list[int] = []
    while batch := bench.deliver(limit):
        delivered += [row.id for row in batch]
    assert delivered == [id_ for first in (36, 37, 38, 39) for id_ in ids[first::-4]]


def test_a_backlog_that_was_put_back_keeps_its_order(bench: Bench) -> None:
    # A busy machine may need any time from one call to the next.
    ids = [bench.schedule(due_in=-1 - 100 * number) for number in range(20)]
    bench.broker.put_back(QUEUE, bench.broker.take(QUEUE, 7).tickets)
    assert [row.id for row in bench.deliver()] == ids[::-1]


def test_no_more_is_taken_than_asked_for_and_a_take_says_that_more_is_ready(bench: Bench) -> None:
    ids = bench.schedule_many(25)
    assert bench.broker.promote(QUEUE).tickets == []
    for limit in (10, 0):
        taken = bench.broker.take(QUEUE, limit)
        assert len(taken.tickets) == limit
        assert taken.left > 0
        bench.broker.put_back(QUEUE, taken.tickets)
    batches = [bench.deliver(10) for _ in range(3)]
    assert [len(batch) for batch in batches] == [10, 10, 5]
    assert sorted(row.id for batch in batches for row in batch) == ids


def test_an_id_that_was_taken_and_parked_is_taken_again(bench: Bench) -> None:
    id_ = bench.schedule()
    bench.broker.delay(QUEUE, bench.broker.take(QUEUE, 10).tickets, 0.0)
    assert [row.id for row in bench.deliver()] == [id_]


def test_a_taken_id_is_gone_from_a_broker_that_holds_ids(bench: Bench) -> None:
    id_ = bench.schedule()
    assert bench.take() == [id_]
    assert bench.take() == ([] if bench.broker.holds_ids else [id_])


def test_an_id_is_taken_early_from_a_broker_that_holds_ids(bench: Bench) -> None:
    id_ = bench.schedule(due_in=60)
    assert [ticket.id for ticket in bench.broker.take(QUEUE, 10, within=90).tickets] == (
        [id_] if bench.broker.holds_ids else []
    )


def test_queues_are_kept_apart(bench: Bench) -> None:
    bench.schedule(queue="elsewhere", put=not bench.broker.holds_ids)
    own = bench.schedule()
    assert bench.take() == [own]


def test_a_cancelled_message_that_the_broker_still_has_is_not_delivered(bench: Bench) -> None:
    id_, other = bench.schedule(), bench.schedule()
    transitions.cancel("default", [id_])
    assert [row.id for row in bench.deliver()] == [other]


@pytest.mark.parametrize("timeout", [-5.0, 0.0, 0.05, 0.3])
def test_a_listen_ends_when_its_time_is_over(bench: Bench, timeout: float) -> None:
    bench.broker.listen([QUEUE], 0)
    began = time.monotonic()
    assert bench.broker.listen([QUEUE], timeout) is False
    waited = time.monotonic() - began
    assert timeout - 0.002 <= waited < timeout + SLACK


def test_a_listen_ends_when_it_is_woken(bench: Bench) -> None:
    with ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        waiting = pool.submit(bench.broker.listen, [QUEUE], 300)
        bench.broker.wake()
        assert waiting.result(timeout=100) is False
    assert time.monotonic() - began < 100


def test_a_wake_before_the_first_listen_is_kept_and_used_once(bench: Bench) -> None:
    bench.broker.wake()
    bench.broker.wake()
    began = time.monotonic()
    bench.broker.listen([QUEUE], 300)
    assert time.monotonic() - began < 100
    began = time.monotonic()
    bench.broker.listen([QUEUE], 0.1)
    assert time.monotonic() - began >= 0.098


def test_more_than_a_thousand_are_put_removed_and_taken(bench: Bench) -> None:
    ids = bench.schedule_many(1_100)
    bench.remove(ids[:1_050])
    transitions.cancel("default", ids[:1_050])
    assert sorted(row.id for row in bench.deliver(1000)) == ids[1_050:]
