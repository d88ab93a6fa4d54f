"""The testing helpers leave the messages of pulled queues to the program that the test is about."""

from __future__ import annotations

from typing import Any

import pytest

from django_delayq import schedule_message
from django_delayq.core.states import State
from django_delayq.pull import ack, take
from django_delayq.testing import Delayq
from tests.pull.conftest import QUEUE, put
from tests.support.steps import state

pytestmark = pytest.mark.django_db


def test_a_drain_delivers_nothing_of_a_pulled_queue_and_a_test_takes_it(delayq: Delayq) -> None:
    # This topic has a handler, and that of the other has none.
    handled, other = schedule_message("t.ok", queue=QUEUE), put()
    done = schedule_message("t.ok")
    assert [ran.message.pk for ran in delayq.drain()] == [done.pk]
    found = take(QUEUE, max=5)
    assert {each.id for each in found} == {handled.pk, other.pk}
    assert all(ack([each.receipt for each in found]))


def test_what_runs_at_once_elsewhere_waits_in_a_pulled_queue(settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "TESTING": "immediate"}
    assert state(schedule_message("t.ok").pk) == State.CONSUMED
    assert state(schedule_message("t.ok", queue=QUEUE).pk) == State.SCHEDULED
