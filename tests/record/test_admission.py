"""No more messages begin than their limits allow, and those that wait keep their order."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from django_delayq import InvalidMessage, cancel_message, pause_queue, resume_queue, schedule_message, schedule_messages
from django_delayq.core.clock import to_tenths
from django_delayq.core.states import State
from django_delayq.core.verdicts import Verdict
from django_delayq.models import Message
from django_delayq.models.messages import Lease, Place, Rate
from django_delayq.record import admission, crashes, purge, reads, transitions
from django_delayq.record.sql import statements
from django_delayq.record.sql.rows import LeaseRenewal, Success, Ticket
from tests.support.limits import (
    DB,
    LEASES,
    Declare,
    admit,
    admit_rows,
    claim_limited,
    fail,
    reasons,
    refused,
    state,
    states,
    succeed,
)
from tests.support.steps import lose, until_due

pytestmark = pytest.mark.django_db

LINE = "topic l.one"


def test_no_more_messages_of_a_topic_run_than_its_limit_and_nothing_is_written_about_the_others(
    declare: Declare,
) -> None:
    declare("l.one", limit=2)
    one, two, three = (schedule_message("l.one") for _ in range(3))
    before = Message.objects.filter(pk=three.pk).values().get()
    admitted = claim_limited(DB, [Ticket(each.pk) for each in (one, two, three)], LEASES, "w")
    assert [row.id for row in admitted.claimed] == [one.pk, two.pk]
    assert (admitted.refused, admitted.opens) == ({three.pk: LINE}, {})
    assert Message.objects.filter(pk=three.pk).values().get() == before
    assert len(reasons(three)) == 1


def test_each_key_has_a_limit_of_its_own(declare: Declare) -> None:
    declare("l.one", limit=1)
    made = [schedule_message("l.one", limit_key=key) for key in ("a", "a", "b", None, None)]
    begun = admit(*made)
    assert begun == [made[0].pk, made[2].pk, made[3].pk]
    assert refused(made[1], made[4]) == {made[1].pk: "topic l.one key a", made[4].pk: LINE}


def test_messages_begin_in_the_order_of_priority_and_due_time(declare: Declare) -> None:
    declare("l.one", limit=1)
    first, second, third, best = made = [schedule_message("l.one", priority=p) for p in (100, 0, 0, 9)]
    order = []
    for _ in made:
        (pk,) = admit(*Message.objects.filter(state=State.SCHEDULED).order_by("-pk"))
        order.append(pk)
        succeed(Message.objects.get(pk=pk))
    assert order == [first.pk, best.pk, second.pk, third.pk]


def test_a_queue_has_a_limit_besides_that_of_the_topic(declare: Declare, queue_limits: Callable[..., None]) -> None:
    declare("l.one", limit=2)
    queue_limits(default={"limit": 3})
    ones = [schedule_message("l.one") for _ in range(3)]
    free = [schedule_message("l.free") for _ in range(3)]
    begun = admit(*ones, *free)
    assert begun == [ones[0].pk, ones[1].pk, free[0].pk]
    assert refused(*ones, *free) == {ones[2].pk: LINE, free[1].pk: "queue default", free[2].pk: "queue default"}
    # The topic has room again, and the queue has none.
    succeed(free[0])
    assert admit(free[1]) == [free[1].pk]
    succeed(ones[0])
    assert admit(free[2]) == [free[2].pk]
    assert refused(ones[2]) == {ones[2].pk: "queue default"}
    succeed(ones[1])
    assert admit(ones[2]) == [ones[2].pk]


def test_a_message_that_one_limit_refuses_takes_no_place_of_the_other(
    declare: Declare, queue_limits: Callable[..., None]
) -> None:
    declare("l.one", limit=1)
    queue_limits(full={"limit": 1})
    running = schedule_message("l.free", queue="full")
    assert admit(running) == [running.pk]
    first, second = schedule_message("l.one", queue="full"), schedule_message("l.one")
    assert admit(first, second) == [second.pk]


def test_a_paused_queue_keeps_no_place_from_the_others(declare: Declare) -> None:
    declare("l.one", limit=1)
    paused, other = schedule_message("l.one", queue="slow"), schedule_message("l.one")
    pause_queue("slow")
    admitted = claim_limited(DB, [Ticket(paused.pk), Ticket(other.pk)], LEASES, "w")
    assert [row.id for row in admitted.claimed] == [other.pk]
    # It could not begin anyway.
    assert admitted.refused == {}
    succeed(other)
    resume_queue("slow")
    assert admit(paused) == [paused.pk]


def test_a_message_that_is_not_claimed_uses_up_no_rate(declare: Declare) -> None:
    declare("l.rate", rate="1/h")
    message = schedule_message("l.rate")
    # Redis has an earlier due time.
    early = to_tenths(message.due_at) - 10_000
    assert claim_limited(DB, [Ticket(message.pk, early)], LEASES, "w").claimed == []
    assert admit(message) == [message.pk]


def test_only_messages_that_may_be_claimed_are_limited(declare: Declare) -> None:
    declare("l.one", limit=1)
    first, later, cancelled = (schedule_message("l.one", delay=delay) for delay in (0, "1h", 0))
    cancel_message(cancelled)
    assert admit(first, later, cancelled) == [first.pk]
    assert states(later, cancelled) == [State.SCHEDULED, State.CANCELLED]
    assert admit(first) == []
    assert state(first) == State.RUNNING


def test_a_late_success_ends_a_message_that_waits_again(declare: Declare) -> None:
    declare("l.one", limit=1)
    first, second = schedule_message("l.one"), schedule_message("l.one", priority=1)
    admit(first)
    crashes.release_worker(DB, "w", actor="test", shutdown=False)
    admit(second, first)
    assert states(first, second) == [State.SCHEDULED, State.RUNNING]
    assert transitions.succeed(DB, [Success(first.pk, 1, "worker:w")])
    assert states(first, second) == [State.CONSUMED, State.RUNNING]


def superseded(declare: Declare, *, lease: float = 0.0) -> tuple[Message, Message]:
    """Return a message that its first delivery has ended while the second one ran, and one that waits for its place.

    The second delivery was renewed by ``lease`` seconds (0: not at all).
    """
    declare("l.one", limit=1)
    first, second = schedule_message("l.one"), schedule_message("l.one")
    assert admit(first, second) == [first.pk]
    lose(first.pk)
    assert admit(first) == [first.pk]
    if lease:
        statements(DB).extend([LeaseRenewal(first.pk, 2, lease)])
    succeed(first, 1)
    assert states(first, second) == [State.CONSUMED, State.SCHEDULED]
    return first, second


def lease_of(message: Message, delivery: int) -> datetime | None:
    """Return the end of the lease of a delivery whose message is over."""
    return Lease.objects.filter(message_id=message.pk, delivery=-delivery).values_list("until", flat=True).first()


def test_a_delivery_keeps_its_place_when_an_earlier_one_has_ended_its_message(declare: Declare) -> None:
    first, second = superseded(declare)
    assert refused(second) == {second.pk: LINE}
    assert admission.full(DB) == admission.full_lately(DB) == {LINE}
    admission.tidy(DB)
    crashes.drop_leases(DB)
    assert purge.purge_ids(DB, [first.pk]) == {first.pk: Verdict.PURGED}
    assert refused(second) == {second.pk: LINE}
    assert admission.full(DB) == admission.full_lately(DB) == {LINE}
    admission.free_permits(DB, first.pk, 2)
    assert admission.full(DB) == set()
    assert admit(second) == [second.pk]


def test_such_a_place_is_free_when_the_lease_is_over(declare: Declare) -> None:
    first, second = superseded(declare, lease=3600.0)
    until = lease_of(first, 2)
    assert until is not None
    assert until > reads.now(DB) + timedelta(minutes=30)
    admission.keep_permits(DB, [LeaseRenewal(first.pk, 2, 7200.0), LeaseRenewal(second.pk, 1, 7200.0)])
    kept = lease_of(first, 2)
    assert kept is not None
    assert kept > until
    assert lease_of(second, 1) is None
    Lease.objects.update(until=reads.now(DB) - timedelta(seconds=10))
    # No later renewal takes it again.
    admission.keep_permits(DB, [LeaseRenewal(first.pk, 2, 7200.0)])
    assert admission.full(DB) == set()
    assert admit(second) == [second.pk]
    crashes.drop_leases(DB)
    assert not Lease.objects.exists()


def test_a_rate_spaces_deliveries(declare: Declare) -> None:
    declare("l.rate", rate="60/h", burst=2)
    made = [schedule_message("l.rate") for _ in range(5)]
    admitted = claim_limited(DB, [Ticket(message.pk) for message in made], LEASES, "w")
    assert [row.id for row in admitted.claimed] == [made[0].pk, made[1].pk]
    assert admitted.refused == dict.fromkeys((message.pk for message in made[2:]), "topic l.rate")
    assert 0 < admitted.opens["topic l.rate"] <= 60
    assert Rate.objects.get().full_at - made[0].due_at >= timedelta(minutes=2)
    assert admit(made[2]) == []
    # A minute later the next slot has come.
    Rate.objects.update(full_at=reads.now(DB) + timedelta(seconds=60))
    assert admit(*made[2:]) == [made[2].pk]
    assert admit(*made[3:]) == []


def test_a_step_of_the_clock_makes_nobody_wait_longer_than_after_a_burst(declare: Declare) -> None:
    declare("l.rate", rate="10/h")
    made = [schedule_message("l.rate") for _ in range(3)]
    admit(made[0])
    Rate.objects.update(full_at=reads.now(DB) + timedelta(hours=10))
    assert admit(made[1]) == [made[1].pk]
    admitted = claim_limited(DB, [Ticket(made[2].pk)], LEASES, "w")
    assert admitted.claimed == []
    assert admitted.opens["topic l.rate"] <= 360


def test_a_limit_that_is_full_and_used_up_opens_with_a_delivery_that_ends(declare: Declare) -> None:
    declare("l.one", limit=1, rate="1/h")
    made = [schedule_message("l.one") for _ in range(2)]
    admitted = claim_limited(DB, [Ticket(message.pk) for message in made], LEASES, "w")
    assert (admitted.refused, admitted.opens) == ({made[1].pk: LINE}, {})
    succeed(made[0])
    assert 3590 < claim_limited(DB, [Ticket(made[1].pk)], LEASES, "w").opens[LINE] <= 3600


def test_places_that_deliveries_have_left_are_deleted_by_later_claims(declare: Declare) -> None:
    declare("l.one", limit=3)
    for _round in range(5):
        made = [schedule_message("l.one") for _ in range(3)]
        assert len(admit(*made)) == 3
        for message in made:
            succeed(message)
    assert Place.objects.count() <= 3


def test_a_message_that_is_delivered_again_takes_its_place_anew(declare: Declare) -> None:
    declare("l.one", limit=1)
    first, second = schedule_message("l.one"), schedule_message("l.one")
    for delivery in (1, 2, 3):
        assert admit(first, second) == [first.pk]
        assert admit(second) == []
        fail(first, delivery)
    assert list(Place.objects.values_list("message_id", "delivery")) == [(first.pk, 3)]


def test_the_limits_that_are_full_are_told(declare: Declare, queue_limits: Callable[..., None]) -> None:
    declare("l.one", limit=2)
    declare("l.rate", rate="1/h")
    queue_limits(mail={"limit": 1}, other={"limit": 1})
    assert admission.full(DB) == set()
    made = [schedule_message("l.one", limit_key=key) for key in ("a", "a", "b")]
    made += [schedule_message("l.rate"), schedule_message("l.free", queue="mail")]
    admit(*made)
    assert admission.full(DB) == {"topic l.one key a", "topic l.rate", "queue mail"}
    for message in (made[0], made[3], made[4]):
        succeed(message)
    assert admission.full(DB) == {"topic l.rate"}
    # A moment ago they were full.
    assert admission.full_lately(DB) == {"topic l.one key a", "topic l.rate", "queue mail"}
    admission.tidy(DB)
    Rate.objects.update(full_at=reads.now(DB) - timedelta(seconds=6))
    assert admission.full_lately(DB) == set()


def test_a_query_for_due_messages_leaves_out_those_of_full_limits(
    declare: Declare, queue_limits: Callable[..., None]
) -> None:
    topics = ["l.one", "l.free"]
    declare("l.one", limit=1)
    schedule_messages([{"topic": "l.one", "limit_key": "a"}] * 1500)
    other, keyless = schedule_message("l.one", limit_key="b"), schedule_message("l.one")
    free = schedule_message("l.free")
    assert len(statements(DB).due("default", topics, 2000)) == 1000
    for closed, left in (
        ({"topic l.one key a"}, [other, keyless, free]),
        ({"topic l.one key a", "topic l.one"}, [other, free]),
        ({"topic l.one key a", "topic l.one key b", "topic l.one"}, [free]),
    ):
        assert [ticket.id for ticket in statements(DB).due("default", topics, 10, closed)] == [m.pk for m in left]
        wait = until_due("default", topics, closed)
        assert wait is not None
        assert wait <= 0
    for closed in ({"queue default"}, {"topic l.one key a", "topic l.one key b", "topic l.one", "topic l.free"}):
        assert statements(DB).due("default", topics, 10, closed) == []
        assert until_due("default", topics, closed) is None


def test_what_is_not_needed_any_more_is_deleted(declare: Declare) -> None:
    declare("l.one", limit=2, rate="1000/s", burst=5)
    first, second = schedule_message("l.one"), schedule_message("l.one")
    assert admit(first, second) == [first.pk, second.pk]
    succeed(first)
    # Used up lately: messages still count as limited by it.
    for seconds, is_needed in ((1, True), (10, False)):
        Rate.objects.update(full_at=reads.now(DB) - timedelta(seconds=seconds))
        admission.tidy(DB)
        assert Rate.objects.exists() == is_needed
    assert list(Place.objects.values_list("message_id", flat=True)) == [second.pk]


def test_the_key_of_a_limit_is_found_where_the_message_is_scheduled(declare: Declare) -> None:
    declare("l.one", limit=1, limit_key=lambda message: message.payload["customer"])
    assert schedule_message("l.one", {"customer": 7}).limit_key == "7"
    assert schedule_message("l.one", {"customer": None}).limit_key is None
    assert schedule_message("l.one", {"customer": "a"}, limit_key="b").limit_key == "b"
    made = schedule_messages([{"topic": "l.one", "payload": {"customer": customer}} for customer in ("tab\\n", 1, 2)])
    assert [Message.objects.get(pk=each.pk).limit_key for each in made] == ["tab\\n", "1", "2"]


def test_an_impossible_limit_key_is_refused_and_one_that_raises_writes_nothing(declare: Declare) -> None:
    declare("l.one", limit=1, limit_key=lambda message: message.payload["customer"])
    with pytest.raises(KeyError):
        schedule_message("l.one", {})
    keys: Any = ["", " a", "a" * 201, "a\nb", 1.5, True, object()]
    for key in keys:
        with pytest.raises(InvalidMessage, match="limit key must be"):
            schedule_message("l.one", {"customer": 1}, limit_key=key)
    with pytest.raises(InvalidMessage, match="limit key must be"):
        schedule_message("l.one", {"customer": 1.5})
    assert not Message.objects.exists()


class NoTenant(InvalidMessage):
    def __init__(self, tenant: str, code: int) -> None:
        super().__init__(f"there is no tenant {tenant}: {code}")


def test_a_refusal_of_the_project_stays_what_it_is(declare: Declare) -> None:
    def refuse(message: object) -> str:
        raise NoTenant("anna", 7)

    declare("l.one", limit=1, limit_key=refuse)
    with pytest.raises(NoTenant, match="there is no tenant anna: 7") as raised:
        schedule_messages([{"topic": "l.one"}])
    assert raised.value.__notes__ == ["limit_key of @handler('l.one')", "message 0"]


def test_a_limit_key_without_a_limit_is_an_error_where_the_handler_is_known(declare: Declare) -> None:
    declare("l.free")
    with pytest.raises(InvalidMessage, match="has no limit and no rate"):
        schedule_message("l.free", limit_key="a")
    assert schedule_message("l.elsewhere", limit_key="a").limit_key == "a"


def test_the_claims_come_in_the_order_of_the_tickets_with_what_limits_count(declare: Declare) -> None:
    declare("l.one", limit=5)
    made = [schedule_message(topic) for topic in ("l.free", "l.one", "l.free")]
    made.insert(0, schedule_message("l.one", queue="mail", limit_key="a"))
    rows = admit_rows(*reversed(made))
    assert [row.id for row in rows] == [message.pk for message in reversed(made)]
    assert (rows[-1].topic, rows[-1].queue, rows[-1].limit_key) == ("l.one", "mail", "a")
