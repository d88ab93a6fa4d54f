"""Random sequences of events for one schedule: no time comes twice, and with "all" none is left out.

DELAYQ_MODEL_EXAMPLES says how many sequences to try.
"""

from __future__ import annotations

import os
from datetime import datetime
from unittest.mock import patch

import pytest
from django.db import DatabaseError
from django.test import override_settings
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from django_delayq import cancel_message
from django_delayq.core import in_tests
from django_delayq.core.states import LIVE, State
from django_delayq.models import Message, Transition
from django_delayq.models.messages import LogRow
from django_delayq.recurring import (
    Missed,
    Schedule,
    create_schedule,
    delete_schedule,
    pause_schedule,
    resume_schedule,
    schedules,
)
from django_delayq.recurring.models import Occurrence
from tests.support.rows import unguarded

from .conftest import DB, NOON, Clock, deliver, look

EXAMPLES = int(os.environ.get("DELAYQ_MODEL_EXAMPLES", "10"))


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        LogRow.objects.all()._raw_delete(DB)
        for model in (Message, Schedule, Occurrence):
            unguarded(model).all()._raw_delete(DB)
        self.clock = Clock()
        self.patch = patch.object(in_tests, "clock", lambda: self.clock.now)
        self.patch.start()
        # All times after this one are to come, with "all".
        self.since = NOON
        # Times that a person cancelled.
        self.cancelled: set[str] = set()

    def teardown(self) -> None:
        self.patch.stop()

    def write(self, minutes: int, missed: str) -> None:
        create_schedule("s", "t.ok", every=f"{minutes}m", missed=missed, on_conflict="replace")
        self.began()

    def began(self) -> None:
        """Note that the times count from now, or from an occurrence that began before its time."""
        begun = Message.objects.filter(headers__schedule="s").exclude(schedules.WAITS)
        ids = begun.values("pk")
        late = Occurrence.objects.filter(message_id__in=ids).order_by("at").values_list("at", flat=True).last()
        self.since = max(self.clock.now, late or self.clock.now)

    @initialize(minutes=st.sampled_from([10, 15]), missed=st.sampled_from(Missed.values))
    def begin(self, minutes: int, missed: str) -> None:
        self.write(minutes, missed)

    @rule(minutes=st.sampled_from([10, 15]), missed=st.sampled_from(Missed.values))
    def change(self, minutes: int, missed: str) -> None:
        before = Schedule.objects.filter(pk="s", paused=False).values_list("every", "missed").first()
        if before != (f"{minutes}m", missed):
            self.write(minutes, missed)

    @rule()
    def delete(self) -> None:
        delete_schedule("s")
        self.write(10, "all")

    @rule()
    def pause(self) -> None:
        pause_schedule("s")

    @rule()
    def resume(self) -> None:
        if resume_schedule("s"):
            self.began()

    @rule(minutes=st.integers(1, 90))
    def go_on(self, minutes: int) -> None:
        self.clock.advance(minutes=minutes)

    @rule(minutes=st.integers(1, 90))
    def step_back(self, minutes: int) -> None:
        self.clock.advance(minutes=-minutes)

    @rule()
    def work(self) -> None:
        """Have a worker look after the schedule."""
        look()
        schedule = Schedule.objects.get(pk="s")
        if schedule.paused or schedule.missed != Missed.ALL:
            return
        there = set(Occurrence.objects.filter(schedule="s").values_list("at", flat=True))
        for at in schedule.definition.times.following(self.since):
            if at > self.clock.now:
                break
            assert at in there, f"nothing at {at}, since {self.since}"

    @rule()
    def crash(self) -> None:
        """Have a worker lose its connection before it commits."""
        lost = patch("django_delayq.recurring.schedules._write", side_effect=DatabaseError)
        with lost, pytest.raises(DatabaseError):
            schedules.advance(DB, "s")
            raise DatabaseError

    @rule()
    def run(self) -> None:
        deliver(self.clock)

    @rule()
    def claim_early(self) -> None:
        """Claim the waiting message a moment before its time."""
        rows = Message.objects.filter(schedules.WAITS, headers__schedule="s").order_by("-pk")[:1]
        for message in rows:
            unguarded(Message).filter(pk=message.pk).update(
                state=State.RUNNING, deliveries=1, leased_until=self.clock.now
            )

    @rule()
    def cancel(self) -> None:
        for message in Message.objects.filter(schedules.WAITS, headers__schedule="s").order_by("-pk")[:1]:
            assert cancel_message(message.pk)
            self.cancelled.add(message.headers["occurrence"])

    @invariant()
    def no_time_comes_twice(self) -> None:
        withdrawn = Transition.objects.filter(to_state="cancelled", reason__startswith="schedule ").values("message_id")
        counted: dict[str, int] = {}
        for message in Message.objects.filter(headers__schedule="s").exclude(pk__in=withdrawn):
            at = message.headers["occurrence"]
            assert at not in counted, f"{at} has the messages {counted[at]} and {message.pk}"
            counted[at] = message.pk
        rows = {_iso(row.at): row.message_id for row in Occurrence.objects.filter(schedule="s")}
        assert rows == counted
        waiting = Message.objects.filter(schedules.WAITS, headers__schedule="s")
        schedule = Schedule.objects.filter(pk="s").first()
        if schedule is not None and schedule.paused:
            assert not waiting.exists()

    @invariant()
    def an_occurrence_that_was_cancelled_stays_so(self) -> None:
        live = Message.objects.filter(headers__schedule="s", state__in=LIVE)
        assert not self.cancelled & {message.headers["occurrence"] for message in live}


def _iso(at: datetime) -> str:
    return at.isoformat().replace("+00:00", "Z")


@pytest.mark.django_db(transaction=True)
@override_settings(DELAYQ={"REDIS": None})
def test_no_time_comes_twice_and_none_is_left_out() -> None:
    run_state_machine_as_test(Machine, settings=settings(max_examples=EXAMPLES, stateful_step_count=20))
