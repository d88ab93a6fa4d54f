"""Schedules make exactly one message for each of their times, whatever happens to them and to the workers."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import IntegrityError, transaction

from django_delayq import KeyConflict, cancel_message, requeue_message, reschedule_message, run_message
from django_delayq.core.exceptions import InvalidMessage, PayloadTooLarge
from django_delayq.core.states import State
from django_delayq.models import Message, Transition
from django_delayq.record import transitions
from django_delayq.recurring import (
    Missed,
    Schedule,
    create_schedule,
    delete_schedule,
    pause_schedule,
    resume_schedule,
    run_schedule,
    schedules,
)
from django_delayq.recurring.models import Occurrence
from tests.support.rows import unguarded

from .conftest import DB, NOON, Clock, deliver, later, live, look, occurrences

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("without_redis", "clock")]

TOPIC = "t.ok"


def hourly(name: str = "s", **options: Any) -> Schedule:
    return create_schedule(name, TOPIC, **{"every": "1h", **options})


def message_of(name: str = "s") -> Message:
    pk = Schedule.objects.get(pk=name).message_id
    assert pk is not None
    return Message.objects.get(pk=pk)


def occurrence_of(message: Message) -> datetime:
    return datetime.fromisoformat(message.headers["occurrence"])


# --- one after another ------------------------------------------------------------------------------------------------


def test_a_new_schedule_has_its_next_message_at_once() -> None:
    hourly(payload={"a": 1}, queue="mail", priority=5)
    message = message_of()
    assert occurrences() == ["13:00"]
    assert (message.topic, message.payload, message.queue, message.priority) == (TOPIC, {"a": 1}, "mail", 5)
    assert message.due_at == NOON + timedelta(hours=1)
    assert message.headers == {"schedule": "s", "occurrence": "2050-03-01T13:00:00Z"}
    assert message.state == State.SCHEDULED


def test_a_message_that_is_rolled_back_leaves_no_occurrence() -> None:
    with transaction.atomic():
        hourly()
        transaction.set_rollback(True)
    assert not Schedule.objects.exists()
    assert not Occurrence.objects.exists()
    assert not Message.objects.exists()


def test_a_message_that_somebody_runs_early_is_not_made_again(clock: Clock) -> None:
    hourly()
    run_early(clock)
    look()
    assert occurrences() == ["13:00"]
    later(clock, hours=1)
    assert occurrences() == ["13:00", "14:00"]


def test_a_schedule_ends_with_its_last_time(clock: Clock) -> None:
    hourly(ends_at=NOON + timedelta(hours=2))
    for _ in range(4):
        clock.advance(hours=1)
        deliver(clock)
        look()
    assert occurrences() == ["13:00", "14:00"]
    assert Schedule.objects.get().ended
    assert schedules.until_next(DB) is None


# --- missed -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", ["13:00", "14:00"])
def test_forty_missed_times_are_run_once(clock: Clock, late: str) -> None:
    hourly()
    clock.advance(hours=1)
    if late == "14:00":
        # All workers ended after the delivery and before the next message was made.
        deliver(clock)
    later(clock, hours=39, minutes=30)
    assert deliver(clock) == [late]
    look()
    assert deliver(clock) == []
    assert live() == ["03 05:00"]


@pytest.mark.parametrize("made_together", [7, 1000])
def test_all_of_forty_missed_times_are_run(clock: Clock, tuned: Callable[..., None], made_together: int) -> None:
    tuned(made_together=made_together)
    hourly(missed=Missed.ALL)
    later(clock, hours=40, minutes=30)
    assert len(deliver(clock)) == 40
    look()
    assert live() == ["03 05:00"]
    assert Message.objects.filter(due_at__lte=clock.now).count() == 40


@pytest.mark.parametrize(
    ("expires", "span"), [(None, timedelta(minutes=1)), ("250ms", timedelta(milliseconds=250))], ids=str
)
def test_missed_times_are_skipped_and_expire(clock: Clock, expires: str | None, span: timedelta) -> None:
    hourly(missed="skip", expires=expires)
    first = message_of()
    assert first.expires_at == first.due_at + span
    later(clock, hours=40, minutes=30)
    assert occurrences() == ["13:00", "03 05:00"]


@pytest.mark.parametrize("made_together", [7, 1000])
@pytest.mark.parametrize("expires", [None, "10m"])
@pytest.mark.parametrize("times", [{"every": "5s"}, {"every": None, "cron": "*/5 * * * * *"}], ids=["every", "cron"])
def test_of_missed_times_that_are_skipped_only_the_newest_may_still_start(
    clock: Clock, tuned: Callable[..., None], times: dict[str, Any], expires: str | None, made_together: int
) -> None:
    tuned(made_together=made_together)
    hourly(missed="skip", expires=expires, **times)
    later(clock, minutes=5, seconds=2)
    transitions.expire(DB, actor="janitor")
    passed = Message.objects.filter(state=State.SCHEDULED, due_at__lte=clock.now)
    # The first one was made before the workers ended.
    expected = [timedelta(seconds=5)] * (expires is not None) + [timedelta(minutes=5)]
    assert [occurrence_of(message) - NOON for message in passed.order_by("pk")] == expected
    assert len(occurrences()) == 3
    for _ in range(6):
        deliver(clock)
        later(clock, seconds=5)
    assert len(occurrences()) == 9


def test_of_missed_times_that_are_skipped_only_the_last_one_before_the_end_may_still_start(clock: Clock) -> None:
    hourly(missed="skip", expires="10m", every="1m", ends_at=NOON + timedelta(minutes=5))
    later(clock, minutes=7)
    assert occurrences() == ["12:01", "12:05"]


@pytest.mark.parametrize("missed", ["once", "all"])
def test_a_missed_time_that_can_start_no_more_is_not_made(clock: Clock, missed: str) -> None:
    hourly(missed=missed, expires="10m")
    cancel_message(message_of())
    later(clock, hours=5, minutes=30)
    assert occurrences() == ["13:00", "18:00"]


@pytest.mark.parametrize("swept", [False, True])
@pytest.mark.parametrize("missed", ["once", "all"])
def test_a_missed_time_that_can_still_start_is_made_after_others_that_expired(
    clock: Clock, missed: str, swept: bool
) -> None:
    hourly(missed=missed, expires="40m")
    clock.advance(hours=5, minutes=30)
    if swept:
        transitions.expire(DB, actor="janitor")
    look()
    assert occurrences() == ["13:00", "17:00", "18:00"][: 2 if missed == "once" else 3]
    assert deliver(clock)[-1] == "17:00"
    look()
    assert live() == ["18:00"]


@pytest.mark.parametrize("missed", ["once", "all", "skip"])
def test_a_time_that_has_just_passed_is_not_skipped(clock: Clock, missed: str) -> None:
    hourly(missed=missed, expires="10m")
    if missed == "once":
        # It would stand for all that came while it waited.
        cancel_message(message_of())
    later(clock, hours=5, minutes=4)
    # With "once" the next one comes when this one has begun.
    assert occurrences() == ["13:00", "17:00", "18:00"][: 2 if missed == "once" else 3]
    late = Message.objects.get(headers__occurrence="2050-03-01T17:00:00Z")
    assert late.expires_at is not None
    assert late.expires_at - late.due_at == timedelta(minutes=6)


def test_a_clock_that_steps_back_repeats_no_time(clock: Clock) -> None:
    hourly(missed="all")
    later(clock, hours=3, minutes=30)
    later(clock, hours=-3)
    later(clock, hours=2)
    assert occurrences() == ["13:00", "14:00", "15:00", "16:00"]


def test_a_clock_that_steps_ahead_makes_up_for_the_times_between(clock: Clock) -> None:
    hourly(missed="all")
    later(clock, days=1)
    later(clock, days=-1)
    assert len(occurrences()) == 25


# --- changes ----------------------------------------------------------------------------------------------------------


def test_a_name_is_taken_once() -> None:
    hourly()
    with pytest.raises(KeyConflict, match="there is a schedule 's' already"):
        hourly()
    hourly(payload=1, on_conflict="keep")
    assert Schedule.objects.get().payload is None


@pytest.mark.parametrize(
    ("options", "time"), [({"every": "30m"}, "12:30"), ({"payload": 2}, "13:00")], ids=["times", "payload"]
)
def test_a_changed_schedule_makes_its_waiting_message_anew(options: dict[str, Any], time: str) -> None:
    hourly()
    old = message_of()
    replaced(**options)
    old.refresh_from_db()
    assert old.state == State.CANCELLED
    assert Transition.objects.filter(message=old).latest("number").reason == "schedule s was changed"
    assert occurrences() == live() == [time]
    assert message_of().payload == options.get("payload")


def test_a_schedule_that_is_written_again_unchanged_keeps_its_message() -> None:
    hourly(payload={"at": NOON})
    old = message_of().pk
    hourly(payload={"at": NOON}, on_conflict="replace")
    assert message_of().pk == old


def test_a_payload_that_says_true_where_it_said_1_is_another_one() -> None:
    hourly(payload={"lines": [{"paid": 1}]})
    hourly(payload={"lines": [{"paid": True}]}, on_conflict="replace")
    for made in (message_of(), Schedule.objects.get()):
        assert made.payload is not None
        assert made.payload["lines"][0]["paid"] is True
    old = message_of().pk
    hourly(payload={"lines": [{"paid": True}]}, on_conflict="replace")
    assert message_of().pk == old


@pytest.mark.parametrize("change", ["replaced", "made anew"])
def test_a_change_does_not_repeat_an_occurrence_that_began_early(clock: Clock, change: str) -> None:
    hourly()
    # A worker claims a message a moment before its time.
    unguarded(Message).update(state="running", deliveries=1, leased_until=clock.now)
    replaced(payload=2) if change == "replaced" else made_anew()
    assert occurrences() == ["13:00"]
    assert not Message.objects.get(deliveries=1).cancel_requested
    later(clock, hours=1)
    assert occurrences() == ["13:00", "14:00"]


def run_early(clock: Clock) -> None:
    """Have the next occurrence, which is far away, begin and end now."""
    run_message(message_of().pk)
    unguarded(Message).update(state="consumed", deliveries=1, reported=1, finished_at=clock.now)


def replaced(**options: Any) -> None:
    hourly(on_conflict="replace", **options)


def made_anew() -> None:
    delete_schedule("s")
    hourly()


def made_anew_and_resumed() -> None:
    delete_schedule("s")
    hourly(paused=True)
    resume_schedule("s")


def replaced_and_resumed() -> None:
    pause_schedule("s")
    replaced()
    resume_schedule("s")


@pytest.mark.parametrize("change", [replaced, made_anew, made_anew_and_resumed, replaced_and_resumed])
def test_an_occurrence_that_was_run_early_silences_no_later_definition(
    clock: Clock, change: Callable[[], None]
) -> None:
    hourly(every="300d")
    run_early(clock)
    change()
    assert live() == ["13:00"]
    clock.advance(hours=1)
    deliver(clock)
    look()
    assert live() == ["14:00"]


@pytest.mark.parametrize(
    "change", [lambda: replaced(payload=2), made_anew, made_anew_and_resumed, replaced_and_resumed]
)
def test_an_occurrence_that_was_run_early_is_not_repeated_when_its_message_is_purged(
    clock: Clock, change: Callable[[], None]
) -> None:
    hourly()
    run_early(clock)
    unguarded(Message).all().delete()
    schedules.prune(DB)
    change()
    assert live() == []
    later(clock, hours=1)
    assert live() == ["14:00"]
    schedules.prune(DB)
    assert occurrences() == ["14:00"]


def test_a_change_leaves_a_message_whose_time_has_come(clock: Clock) -> None:
    hourly(missed="all")
    clock.advance(minutes=61)
    hourly(payload=2, missed="all", on_conflict="replace")
    assert live() == ["13:00", "14:00"]
    assert list(Message.objects.order_by("due_at").values_list("payload", flat=True)) == [None, 2]


@pytest.mark.parametrize("missed", ["once", "all"])
def test_a_change_of_the_topic_makes_a_message_whose_time_has_come_anew(clock: Clock, missed: str) -> None:
    hourly(missed=missed)
    later(clock, hours=2, minutes=30)
    create_schedule("s", "t.renamed", every="1h", missed=missed, on_conflict="replace")
    assert set(Message.objects.filter(topic=TOPIC).values_list("state", flat=True)) == {"cancelled"}
    look()
    assert deliver(clock) == ["13:00", "14:00"][: 1 if missed == "once" else 2]
    look()
    assert live() == ["15:00"]


@pytest.mark.parametrize("missed", list(Missed))
def test_a_schedule_that_had_ended_and_goes_on_has_missed_nothing(clock: Clock, missed: Missed) -> None:
    hourly(missed=missed, ends_at=NOON + timedelta(hours=1))
    clock.advance(hours=1)
    deliver(clock)
    look()
    clock.advance(hours=4, minutes=30)
    hourly(missed=missed, ends_at=NOON + timedelta(days=1), on_conflict="replace")
    assert occurrences() == ["13:00", "18:00"]


def test_a_deleted_schedule_has_its_waiting_messages_cancelled(clock: Clock) -> None:
    hourly(missed="all")
    later(clock, hours=3)
    assert delete_schedule("s")
    assert not delete_schedule("s")
    assert set(Message.objects.values_list("state", flat=True)) == {"cancelled"}
    assert set(Transition.objects.filter(to_state="cancelled").values_list("reason", flat=True)) == {
        "schedule s was deleted"
    }
    later(clock, hours=3)
    assert Message.objects.filter(state="scheduled").count() == 0


def test_a_paused_schedule_makes_nothing_until_it_is_resumed(clock: Clock) -> None:
    hourly(missed="all")
    assert pause_schedule("s")
    assert not pause_schedule("s")
    assert live() == []
    later(clock, hours=5, minutes=30)
    assert live() == []
    assert resume_schedule("s")
    assert not resume_schedule("s")
    assert occurrences() == live() == ["18:00"]


@pytest.mark.parametrize(
    ("missed", "seen_after", "made"),
    [
        ("once", 0, ["14:00"]),
        *((missed, 0, ["14:00", "15:00"]) for missed in ("all", "skip")),
        ("once", 150, ["14:00"]),
        ("all", 150, ["14:00", "15:00", "16:00", "17:00"]),
        ("skip", 120, ["16:00", "17:00"]),
    ],
)
def test_a_pause_ends_by_itself_and_only_times_after_it_count_as_missed(
    clock: Clock, missed: str, seen_after: int, made: list[str]
) -> None:
    hourly(missed=missed)
    assert pause_schedule("s", duration="2h")
    assert (live(), schedules.until_next(DB)) == ([], 7200)
    later(clock, minutes=119)
    assert live() == []
    # No scheduler looks for a while.
    clock.advance(minutes=1 + seen_after)
    schedule = Schedule.objects.get()
    # Processes of an older version read this alone, and leave it to the others.
    assert (schedule.paused, schedule.is_paused(clock.now)) == (True, False)
    look()
    assert live() == made
    schedule = Schedule.objects.get()
    assert (schedule.paused, schedule.resumes_at) == (False, None)


def test_a_paused_schedule_gets_another_end(clock: Clock) -> None:
    hourly()
    assert pause_schedule("s", duration="1h")
    assert pause_schedule("s", until=clock.now + timedelta(hours=3))
    assert not pause_schedule("s", until=clock.now + timedelta(hours=3))
    later(clock, hours=2)
    assert live() == []
    assert pause_schedule("s")
    later(clock, hours=4)
    assert live() == []
    assert resume_schedule("s")
    assert live() == ["19:00"]


def test_a_pause_that_is_over_is_ended_by_hand_as_by_a_scheduler(clock: Clock) -> None:
    hourly(missed="all")
    pause_schedule("s", duration="90m")
    clock.advance(hours=3, minutes=30)
    assert not resume_schedule("s")
    assert live() == ["14:00", "15:00", "16:00"]


def test_a_schedule_that_changes_in_a_pause_that_ends_misses_nothing_in_it(clock: Clock) -> None:
    hourly(missed="all")
    pause_schedule("s", duration="2h")
    later(clock, minutes=45)
    hourly(every="30m", missed="all", on_conflict="replace")
    later(clock, minutes=75)
    assert live() == ["14:00", "14:30"]


def test_the_end_of_a_pause_that_an_older_version_has_ended_ends_no_later_pause(clock: Clock) -> None:
    hourly()
    pause_schedule("s", duration="3h")
    # What the version before wrote.
    unguarded(Schedule).update(paused=False, last_at=clock.now)
    later(clock, hours=1)
    unguarded(Schedule).update(paused=True)
    later(clock, hours=6)
    assert Schedule.objects.get().paused


def test_upkeep_forgets_the_end_of_a_pause_that_an_older_version_has_ended_and_advanced(clock: Clock) -> None:
    hourly()
    pause_schedule("s", duration="3h")
    # What the version before wrote.
    unguarded(Schedule).update(paused=False, last_at=clock.now + timedelta(hours=1))
    schedules.prune(DB)
    unguarded(Schedule).update(paused=True)
    later(clock, hours=6)
    assert Schedule.objects.get().paused


@pytest.mark.parametrize("end", [{"duration": 0}, {"until": NOON}, {"until": NOON, "duration": "1h"}])
def test_a_pause_without_a_time_to_come_is_refused(clock: Clock, end: dict[str, Any]) -> None:
    hourly()
    with pytest.raises(InvalidMessage):
        pause_schedule("s", **end)
    assert live() == ["13:00"]


def test_a_schedule_may_begin_paused(clock: Clock) -> None:
    assert hourly(paused=True).next_times(1, after=NOON) == [NOON + timedelta(hours=1)]
    later(clock, hours=1)
    assert occurrences() == []
    resume_schedule("s")
    assert live() == ["14:00"]


def test_a_schedule_that_is_replaced_may_be_paused_and_stays_so() -> None:
    hourly()
    for paused in (True, False):
        assert hourly(every="2h", paused=paused, on_conflict="replace").paused
    assert live() == []
    assert Schedule.objects.get().paused


@pytest.mark.parametrize("function", [pause_schedule, resume_schedule, run_schedule])
def test_a_schedule_that_is_not_there_is_told(function: Any) -> None:
    with pytest.raises(Schedule.DoesNotExist):
        function("nowhere")


# --- the rows ---------------------------------------------------------------------------------------------------------


def test_a_time_cannot_have_two_messages_in_the_database() -> None:
    hourly()
    with pytest.raises(IntegrityError), transaction.atomic():
        Occurrence.objects.create(schedule="s", at=NOON + timedelta(hours=1), message_id=99)


def test_a_lost_position_does_not_repeat_occurrences(clock: Clock) -> None:
    hourly(missed="all")
    later(clock, hours=2)
    unguarded(Schedule).update(last_at=NOON)
    look()
    assert occurrences() == ["13:00", "14:00", "15:00"]
    assert Message.objects.count() == 3


def test_schedules_are_not_written_directly() -> None:
    schedule = hourly()
    for write in (
        schedule.save,
        schedule.delete,
        Schedule.objects.all().delete,
        lambda: Schedule.objects.update(paused=True),
        lambda: Schedule.objects.create(name="x"),
        lambda: Schedule.objects.bulk_create([]),
    ):
        with pytest.raises(TypeError, match="create_schedule"):
            write()


def test_an_occurrence_lives_as_long_as_its_message(clock: Clock) -> None:
    hourly()
    clock.advance(hours=1)
    deliver(clock)
    look()
    unguarded(Message).filter(state="consumed").delete()
    schedules.prune(DB)
    assert occurrences() == ["14:00"]
    look()
    clock.advance(hours=1)
    deliver(clock)
    unguarded(Message).all().delete()
    look()
    assert live() == ["15:00"]


def test_a_change_of_the_topic_repeats_no_time_that_was_delivered_and_purged(clock: Clock) -> None:
    hourly(missed="all")
    reschedule_message(message_of().pk, due_at=NOON + timedelta(days=60))
    later(clock, hours=1)
    clock.advance(hours=1)
    unguarded(Message).exclude(pk=Occurrence.objects.earliest("at").message_id).delete()
    schedules.prune(DB)
    create_schedule("s", "t.renamed", every="1h", missed="all", on_conflict="replace")
    look()
    said = {message.headers["occurrence"][11:16] for message in Message.objects.filter(topic="t.renamed")}
    assert said == {"13:00", "15:00"}


def test_a_requeued_message_does_not_hold_up_the_next_one_for_ever(clock: Clock) -> None:
    hourly()
    cancel_message(message_of().pk)
    requeue_message(message_of().pk)
    later(clock, hours=1)
    assert live() == ["13:00"]
    assert deliver(clock) == ["13:00"]
    look()
    assert live() == ["14:00"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "not neither"),
        ({"cron": "0 3 * * *", "every": "1h"}, "not both"),
        ({"cron": 5}, "cron must be text"),
        ({"every": "1h", "missed": "never"}, "missed is one of once, all, skip"),
        ({"every": "1h", "queue": "not a queue"}, "queue must be"),
        ({"every": "1h", "payload": object}, "not JSON"),
        ({"every": "1h", "expires": "0s"}, "expires must be more than 0"),
        ({"every": "1h", "starts_at": NOON.replace(tzinfo=None)}, "starts_at has no time zone"),
        ({"every": "1h", "on_conflict": "debounce"}, "on_conflict is one of"),
        ({"every": [1]}, "not a duration"),
        ({"every": "1h", "priority": 1000}, "priority must be"),
        ({"every": "1h", "paused": "x"}, "paused must be True or False"),
    ],
    ids=repr,
)
def test_bad_arguments_are_refused_before_anything_is_written(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidMessage, match=words):
        create_schedule("s", TOPIC, **options)
    assert not Schedule.objects.exists()


@pytest.mark.parametrize("name", ["a\x00b", "\ud800"])
@pytest.mark.parametrize("function", [hourly, pause_schedule, resume_schedule, run_schedule, delete_schedule])
def test_a_name_that_no_schedule_can_have_is_refused(function: Any, name: str) -> None:
    with pytest.raises(InvalidMessage, match="the name of a schedule"):
        function(name)


def test_a_large_payload_is_refused(settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "PAYLOAD_MAX_BYTES": 1024}
    with pytest.raises(PayloadTooLarge):
        hourly(payload="x" * 2000)
