"""No more messages begin than their limits allow, and those that wait keep their order."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from django_delayq import (
    InvalidMessage,
    cancel_message,
    pause_queue,
    reschedule_message,
    resume_queue,
    run_message,
    schedule_message,
    schedule_messages,
)
from django_delayq.core.clock import to_tenths
from django_delayq.core.states import State
from django_delayq.models import Message
from django_delayq.models.record import Place, Rate
from django_delayq.record import admission, transitions
from django_delayq.record.sql import limit_statements
from django_delayq.record.sql.rows import Success, Ticket
from tests.support.limits import DB, LEASES, Declare, admit, admit_rows, fail, promote, reasons, state, states, succeed

pytestmark = pytest.mark.django_db

LINE = "topic l.one"


def test_no_more_messages_of_a_topic_run_than_its_limit(declare: Declare) -> None:
    declare("l.one", limit=2)
    one, two, three = (schedule_message("l.one") for _ in range(3))
    assert admit(one, two, three) == [one.pk, two.pk]
    assert states(one, two, three) == [State.RUNNING, State.RUNNING, State.LIMITED]
    row = Message.objects.get(pk=three.pk)
    assert (row.limited_by, row.deliveries) == (LINE, 0)
    assert reasons(three)[-1] == ("scheduled", "limited", "topic l.one: 2 of 2 places are taken")


def test_messages_without_a_limit_are_claimed_as_ever(declare: Declare) -> None:
    declare("l.one", limit=1)
    first, free, second = schedule_message("l.one"), schedule_message("l.free"), schedule_message("l.one")
    assert admit(first, free, second) == [first.pk, free.pk]
    assert Place.objects.count() == 1


def test_each_key_has_a_limit_of_its_own(declare: Declare) -> None:
    declare("l.one", limit=1)
    made = [schedule_message("l.one", limit_key=key) for key in ("a", "a", "b", None, None)]
    begun = admit(*made)
    assert begun == [made[0].pk, made[2].pk, made[3].pk]
    assert Message.objects.get(pk=made[1].pk).limited_by == "topic l.one key a"


@pytest.mark.parametrize("outcome", ["success", "failure", "crash"])
def test_the_end_of_a_delivery_frees_its_place(declare: Declare, outcome: str) -> None:
    declare("l.one", limit=1)
    first, second = schedule_message("l.one"), schedule_message("l.one")
    assert admit(first, second) == [first.pk]
    assert promote(LINE) == []
    if outcome == "success":
        succeed(first)
    elif outcome == "failure":
        fail(first, delay=timedelta(hours=1))
    else:
        transitions.release_worker(DB, "w", max_crashes=3, actor="test", shutdown=False)
    assert promote(LINE) == [second.pk]
    assert reasons(second)[-1] == ("limited", "scheduled", "topic l.one has room")
    assert admit(second) == [second.pk]


def test_a_promoted_message_is_due_when_its_place_became_free(declare: Declare) -> None:
    declare("l.one", limit=1)
    first, second = schedule_message("l.one"), schedule_message("l.one")
    admit(first, second)
    before = transitions.now(DB)
    succeed(first)
    promote(LINE)
    assert Message.objects.get(pk=second.pk).due_at >= before


def test_a_newcomer_does_not_pass_those_who_wait(declare: Declare) -> None:
    declare("l.one", limit=1)
    first, second, third = (schedule_message("l.one") for _ in range(3))
    assert admit(first, second) == [first.pk]
    succeed(first)
    admitted = admission.claim(DB, [Ticket(third.pk)], {"l.one": 60.0}, "w")
    assert (admitted.claimed, admitted.lines) == ([], {LINE})
    assert promote(LINE) == [second.pk]


def test_a_newcomer_takes_no_place_that_is_kept(declare: Declare) -> None:
    declare("l.one", limit=1)
    first, second, third = (schedule_message("l.one") for _ in range(3))
    admit(first, second)
    succeed(first)
    assert promote(LINE) == [second.pk]
    assert promote(LINE) == []
    assert admit(third) == []
    assert admit(second) == [second.pk]


def test_a_promoted_message_begins_although_others_were_promoted_later(declare: Declare) -> None:
    declare("l.one", limit=1)
    first, second, third = (schedule_message("l.one") for _ in range(3))
    admit(first, second, third)
    succeed(first)
    assert promote(LINE) == [second.pk]
    # The message was not taken in time, and its place is kept for the next one.
    Place.objects.filter(message_id=second.pk).update(kept_until=transitions.now(DB))
    assert promote(LINE) == [third.pk]
    assert admit(second) == [second.pk]
    assert admit(third) == []
    assert state(third) == State.LIMITED


def test_the_line_is_in_the_order_of_priority_and_due_time(declare: Declare) -> None:
    declare("l.one", limit=1)
    first, second, third, best = (schedule_message("l.one", priority=p) for p in (100, 0, 0, 9))
    admit(best, third, second, first)
    assert state(first) == State.RUNNING
    order = []
    running = first
    for _ in range(3):
        succeed(running)
        (pk,) = promote(LINE)
        order.append(pk)
        running = Message.objects.get(pk=pk)
        assert admit(running) == [pk]
    assert order == [best.pk, second.pk, third.pk]


def test_a_place_that_was_kept_by_another_clock_keeps_nobody_out(declare: Declare) -> None:
    declare("l.one", limit=1)
    first, second, third = (schedule_message("l.one") for _ in range(3))
    admit(first, second, third)
    succeed(first)
    promote(LINE)
    Place.objects.filter(message_id=second.pk).update(kept_until=transitions.now(DB) + timedelta(hours=1))
    assert promote(LINE) == [third.pk]


def test_a_queue_has_a_limit_besides_that_of_the_topic(declare: Declare, queue_limits: Callable[..., None]) -> None:
    declare("l.one", limit=2)
    queue_limits(default={"limit": 3})
    ones = [schedule_message("l.one") for _ in range(3)]
    free = [schedule_message("l.free") for _ in range(3)]
    begun = admit(*ones, *free)
    assert begun == [ones[0].pk, ones[1].pk, free[0].pk]
    rows = dict(Message.objects.filter(state=State.LIMITED).values_list("pk", "limited_by"))
    assert rows == {ones[2].pk: LINE, free[1].pk: "queue default", free[2].pk: "queue default"}
    # The topic has room again, and the queue has none.
    succeed(free[0])
    assert promote("queue default") == [free[1].pk]
    assert admit(free[1]) == [free[1].pk]
    succeed(ones[0])
    assert promote("queue default") == [free[2].pk]
    assert admit(free[2]) == [free[2].pk]
    assert promote(LINE) == []
    assert Message.objects.get(pk=ones[2].pk).limited_by == "queue default"
    assert reasons(ones[2])[-1][:2] == ("limited", "limited")
    succeed(ones[1])
    assert promote("queue default") == [ones[2].pk]


def test_a_line_before_two_limits_moves_to_the_full_one_by_as_many_as_its_room(
    declare: Declare, queue_limits: Callable[..., None]
) -> None:
    declare("l.one", limit=1)
    queue_limits(default={"limit": 1})
    first, *line = (schedule_message("l.one", limit_key="a") for _ in range(6))
    elsewhere = schedule_message("l.one", limit_key="a", queue="elsewhere")
    other = schedule_message("l.one", limit_key="b")
    assert admit(first, *line, elsewhere) == [first.pk]
    succeed(first)
    assert admit(other) == [other.pk]
    # The topic has room, and the queue has none: of the others only the one that needs no place there is asked.
    assert promote(f"{LINE} key a") == [elsewhere.pk]
    assert states(*line, elsewhere) == [State.LIMITED] * 5 + [State.SCHEDULED]
    rows = Message.objects.filter(state=State.LIMITED).order_by("pk")
    assert [row.limited_by for row in rows] == ["queue default", *[f"{LINE} key a"] * 4]


def test_a_paused_queue_keeps_no_place_from_the_others(declare: Declare) -> None:
    declare("l.one", limit=1)
    first = schedule_message("l.one")
    paused = schedule_message("l.one", queue="slow")
    third, fourth = schedule_message("l.one"), schedule_message("l.one")
    assert admit(first, paused, third) == [first.pk]
    pause_queue("slow")
    succeed(first)
    assert promote(LINE) == [third.pk]
    assert admit(third) == [third.pk]
    succeed(third)
    # Nobody waits before it who could begin.
    assert admit(fourth) == [fourth.pk]
    succeed(fourth)
    resume_queue("slow")
    assert promote(LINE) == [paused.pk]


def test_a_message_that_is_not_claimed_uses_up_no_rate(declare: Declare) -> None:
    declare("l.rate", rate="1/h")
    message = schedule_message("l.rate")
    # Redis has an earlier due time.
    early = to_tenths(message.due_at) - 10_000
    assert admission.claim(DB, [Ticket(message.pk, early)], LEASES, "w").claimed == []
    assert admit(message) == [message.pk]


def test_a_retry_that_waits_holds_no_place(declare: Declare) -> None:
    declare("l.one", limit=1)
    first, second = schedule_message("l.one"), schedule_message("l.one")
    assert admit(first) == [first.pk]
    fail(first, delay=timedelta(hours=1))
    assert admit(second) == [second.pk]


def test_only_messages_that_may_be_claimed_are_limited(declare: Declare) -> None:
    declare("l.one", limit=1)
    first, later, cancelled = (
        schedule_message("l.one"),
        schedule_message("l.one", delay="1h"),
        schedule_message("l.one"),
    )
    cancel_message(cancelled)
    assert admit(first, later, cancelled) == [first.pk]
    assert states(later, cancelled) == [State.SCHEDULED, State.CANCELLED]
    assert admit(first) == []
    assert state(first) == State.RUNNING


def test_a_limited_message_can_be_cancelled_and_expires(declare: Declare) -> None:
    declare("l.one", limit=1)
    first, second, third = schedule_message("l.one"), schedule_message("l.one"), schedule_message("l.one", expires="1h")
    admit(first, second, third)
    assert cancel_message(second)
    Message._base_manager.filter(pk=third.pk).update(expires_at=transitions.now(DB))
    assert transitions.anything_expired(DB) == (False, True)
    succeed(first)
    assert promote(LINE) == []
    transitions.expire(DB, actor="test")
    assert states(second, third) == [State.CANCELLED, State.EXPIRED]


def test_a_limited_message_that_is_to_run_now_keeps_its_place_in_the_line(declare: Declare) -> None:
    declare("l.one", limit=1)
    first, second, third = (schedule_message("l.one") for _ in range(3))
    admit(first, second, third)
    due = Message.objects.get(pk=second.pk).due_at
    assert run_message(second)
    row = Message.objects.get(pk=second.pk)
    assert (row.state, row.due_at, row.limited_by) == (State.SCHEDULED, due, None)
    assert admit(row) == []
    succeed(first)
    assert promote(LINE) == [second.pk]


def test_a_limited_message_that_is_rescheduled_leaves_the_line(declare: Declare) -> None:
    declare("l.one", limit=1)
    first, second, third = (schedule_message("l.one") for _ in range(3))
    admit(first, second, third)
    assert reschedule_message(second, delay="1h")
    assert state(second) == State.SCHEDULED
    succeed(first)
    assert promote(LINE) == [third.pk]


def test_a_limited_message_has_its_key_and_can_be_replaced(declare: Declare) -> None:
    declare("l.one", limit=1)
    first, second = schedule_message("l.one"), schedule_message("l.one", key="k", limit_key=None)
    admit(first, second)
    replaced = schedule_message("l.one", {"new": 1}, key="k", on_conflict="replace", limit_key="c")
    assert (replaced.pk, replaced.state, replaced.limit_key) == (second.pk, State.SCHEDULED, "c")


def test_a_late_success_ends_a_limited_message(declare: Declare) -> None:
    declare("l.one", limit=1)
    first, second = schedule_message("l.one"), schedule_message("l.one", priority=1)
    admit(first)
    transitions.release_worker(DB, "w", max_crashes=3, actor="test", shutdown=False)
    admit(second, first)
    assert states(first, second) == [State.LIMITED, State.RUNNING]
    assert transitions.succeed(DB, [Success(first.pk, 1, "worker:w")])
    assert states(first, second) == [State.CONSUMED, State.RUNNING]


def test_a_limit_that_was_removed_lets_everybody_go(declare: Declare) -> None:
    declare("l.one", limit=1)
    first, second, third = (schedule_message("l.one") for _ in range(3))
    admit(first, second, third)
    declare("l.one")
    with_room, removed, after = admission.lines_that_move(DB, "", 10)
    assert (with_room, removed, after) == (set(), {LINE}, "")
    assert promote(LINE) == [second.pk, third.pk]


def test_a_long_line_is_promoted_in_parts(declare: Declare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "PROMOTED_TOGETHER", 2)
    declare("l.one", limit=1)
    made = [schedule_message("l.one") for _ in range(6)]
    admit(*made)
    declare("l.one", limit=4)
    moved, again = admission.promote(DB, [LINE], "worker:w")
    assert ([row.id for row in moved], again) == ([made[1].pk, made[2].pk], {LINE})
    moved, again = admission.promote(DB, again, "worker:w")
    assert ([row.id for row in moved], again) == ([made[3].pk], set())


def test_a_line_of_an_unknown_topic_belongs_to_others(declare: Declare) -> None:
    declare("l.one", limit=1)
    first, second = schedule_message("l.one"), schedule_message("l.one")
    admit(first, second)
    succeed(first)
    from django_delayq.project import registry

    registry.unregister("l.one")
    assert admission.lines_that_move(DB, "", 10) == (set(), set(), "")
    assert promote(LINE) == []


def test_the_lines_are_read_page_by_page(declare: Declare) -> None:
    declare("l.one", limit=1)
    made = [schedule_message("l.one", limit_key=key) for key in "aabbcc"]
    admit(*made)
    assert admission.lines_that_move(DB, "", 2) == (set(), set(), "topic l.one key b")
    succeed(made[4])
    assert admission.lines_that_move(DB, "topic l.one key b", 2) == ({"topic l.one key c"}, set(), "")


def test_a_flood_of_one_key_does_not_keep_others_out(declare: Declare) -> None:
    declare("l.one", limit=1)
    flood = schedule_messages([{"topic": "l.one", "limit_key": "flood"} for _ in range(200)])
    others = schedule_messages([{"topic": "l.one", "limit_key": f"c-{n}"} for n in range(10)])
    assert admit(*flood[:150]) == [flood[0].pk]
    assert admit(*flood[150:], *others) == [other.pk for other in others]


def test_a_rate_spaces_deliveries(declare: Declare) -> None:
    declare("l.rate", rate="60/h", burst=2)
    made = [schedule_message("l.rate") for _ in range(5)]
    assert admit(*made) == [made[0].pk, made[1].pk]
    assert reasons(made[2])[-1] == ("scheduled", "limited", "topic l.rate: the rate is used up")
    assert Rate.objects.get().full_at - made[0].due_at >= timedelta(minutes=2)
    assert promote("topic l.rate") == []
    # Nearly a minute later, one slot is within the two seconds for which slots are given.
    full_at = transitions.now(DB) + timedelta(seconds=61)
    Rate.objects.update(full_at=full_at)
    assert promote("topic l.rate") == [made[2].pk]
    assert Message.objects.get(pk=made[2].pk).due_at >= full_at - timedelta(minutes=1)
    assert promote("topic l.rate") == []
    # It is claimed a moment ahead for its slot, which nobody else gets.
    assert admit(made[2], ahead=3.0) == [made[2].pk]
    other = schedule_message("l.rate")
    assert admit(other) == []


def test_a_slot_that_was_missed_is_not_made_up_for(declare: Declare) -> None:
    declare("l.rate", rate="60/m")
    made = [schedule_message("l.rate") for _ in range(3)]
    assert admit(*made) == [made[0].pk]
    assert promote("topic l.rate")[0] == made[1].pk
    long_ago = transitions.now(DB) - timedelta(seconds=30)
    Rate.objects.update(full_at=long_ago)
    Message._base_manager.filter(pk=made[1].pk).update(due_at=long_ago)
    later = long_ago + timedelta(seconds=20)
    Message._base_manager.filter(pk=made[2].pk).update(due_at=later, state=State.SCHEDULED)
    assert admit(made[1], made[2]) == [made[1].pk]


def test_a_step_of_the_clock_makes_nobody_wait_longer_than_after_a_burst(declare: Declare) -> None:
    declare("l.rate", rate="10/s")
    made = [schedule_message("l.rate") for _ in range(2)]
    admit(*made)
    Rate.objects.update(full_at=transitions.now(DB) + timedelta(hours=1))
    assert promote("topic l.rate") == []
    assert admit(schedule_message("l.rate")) == []
    line = admission._lines(limit_statements(DB), admission.limits_of("l.rate", "default", None))["topic l.rate"]
    assert line.full_at is not None
    assert line.full_at - line.now <= timedelta(seconds=2.2)


def test_what_is_not_needed_any_more_is_deleted(declare: Declare) -> None:
    declare("l.one", limit=2, rate="1000/s", burst=5)
    first, second = schedule_message("l.one"), schedule_message("l.one")
    assert admit(first, second) == [first.pk, second.pk]
    succeed(first)
    Rate.objects.update(full_at=transitions.now(DB) - timedelta(seconds=1))
    admission.tidy(DB)
    assert list(Place.objects.values_list("message_id", flat=True)) == [second.pk]
    assert not Rate.objects.exists()


def test_the_key_of_a_limit_is_found_where_the_message_is_scheduled(declare: Declare) -> None:
    declare("l.one", limit=1, limit_key=lambda message: message.payload["customer"])
    assert schedule_message("l.one", {"customer": 7}).limit_key == "7"
    assert schedule_message("l.one", {"customer": None}).limit_key is None
    assert schedule_message("l.one", {"customer": "a"}, limit_key="b").limit_key == "b"
    made = schedule_messages([{"topic": "l.one", "payload": {"customer": "tab\\n"}}])
    assert Message.objects.get(pk=made[0].pk).limit_key == "tab\\n"


def test_a_limit_key_that_raises_writes_nothing(declare: Declare) -> None:
    declare("l.one", limit=1, limit_key=lambda message: message.payload["customer"])
    with pytest.raises(KeyError):
        schedule_message("l.one", {})
    with pytest.raises(InvalidMessage, match="limit key must be"):
        schedule_message("l.one", {"customer": 1.5})
    assert not Message.objects.exists()


@pytest.mark.parametrize("key", ["", " a", "a" * 201, "a\nb", 1.5, True, object()])
def test_an_impossible_limit_key_is_refused(declare: Declare, key: object) -> None:
    declare("l.one", limit=1)
    with pytest.raises(InvalidMessage, match="limit key must be"):
        schedule_message("l.one", limit_key=key)  # type: ignore[arg-type]


def test_a_limit_key_without_a_limit_is_an_error_where_the_handler_is_known(declare: Declare) -> None:
    declare("l.free")
    with pytest.raises(InvalidMessage, match="has no limit and no rate"):
        schedule_message("l.free", limit_key="a")
    assert schedule_message("l.elsewhere", limit_key="a").limit_key == "a"


def test_the_claims_come_in_the_order_of_the_tickets(declare: Declare) -> None:
    declare("l.one", limit=5)
    made = [schedule_message(topic) for topic in ("l.free", "l.one", "l.free", "l.one")]
    assert [row.id for row in admit_rows(*reversed(made))] == [message.pk for message in reversed(made)]
