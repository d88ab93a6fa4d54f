"""A message that kept crashing its worker runs alone."""

from __future__ import annotations

import pytest

from django_delayq import schedule_message
from django_delayq.core.states import State
from django_delayq.core.worker_options import Options
from django_delayq.models import Message, Transition
from django_delayq.record import transitions
from django_delayq.worker.claim.quarantine import FIRST_WAIT
from tests.support.assembled import Assemble, drain
from tests.support.claims import DB, claimed
from tests.support.workers import eventually

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_message_that_is_to_run_alone_waits_longer_each_time(assembled: Assemble) -> None:
    """Otherwise a process that is always busy with handlers of a minute would never run it."""
    parts = assembled(threads=2, redis=False)
    consumer, recorder = parts.consumer, parts.recorder
    (busy,) = claimed("t.ok")
    consumer.pool.threads.held.add([busy])
    message = schedule_message("t.ok")
    Message._base_manager.filter(pk=message.pk).update(deliveries=2)
    waits = []
    for _time in range(3):
        consumer.turn()
        assert consumer.pool.quarantined is not None
        waits.append(consumer.quarantine.seconds_left)
        assert consumer.turn() <= waits[-1]
        consumer.quarantine._wait_ends = 0.0
        consumer.turn()
        assert recorder.flush(5)
        assert Message.objects.get(pk=message.pk).due_at > transitions.now(DB)
        Message._base_manager.filter(pk=message.pk).update(due_at=message.due_at)
    assert [round(seconds / FIRST_WAIT) for seconds in waits] == [1, 2, 4]
    consumer.pool.threads.held.remove(busy)
    consumer.pool.start()
    consumer.turn()
    consumer.turn()
    eventually(lambda: Message.objects.get(pk=message.pk).state == State.CONSUMED, "it runs alone")
    consumer.pool.stop()


def test_an_async_handler_runs_alone_when_neither_a_thread_nor_the_loop_is_busy(assembled: Assemble) -> None:
    parts = assembled(threads=2, tasks=5, redis=False)
    consumer, (threads, loop) = parts.consumer, parts.pool.lanes
    for lane, topic in ((threads, "t.ok"), (loop, "t.async")):
        lane.held.add(claimed(topic))
    message = schedule_message("t.async")
    Message._base_manager.filter(pk=message.pk).update(deliveries=2)
    parts.pool.start()
    consumer.turn()
    for lane in (threads, loop):
        consumer.turn()
        quarantined = parts.pool.quarantined
        assert quarantined is not None
        assert quarantined.id == message.pk
        (busy,) = lane.held.all()
        lane.held.remove(busy)
    consumer.turn()
    assert parts.recorder.flush(60)
    assert Message.objects.get(pk=message.pk).state == State.CONSUMED
    assert Transition.objects.get(message=message, to_state=State.CONSUMED).actor == "worker:w/async"
    parts.pool.stop()


def test_a_message_that_is_to_run_alone_runs_with_once_although_no_more_may_be_delivered() -> None:
    message = schedule_message("t.ok")
    Message._base_manager.filter(pk=message.pk).update(deliveries=2)
    assert drain(Options(DB, threads=2, max_messages=1)) == 1
    assert Message.objects.get(pk=message.pk).state == State.CONSUMED


def test_a_process_that_was_replaced_takes_nothing(assembled: Assemble) -> None:
    parts = assembled(threads=2, redis=False)
    schedule_message("t.ok")
    parts.pool.page.replace()
    parts.consumer.turn()
    assert parts.pool.held() == []
