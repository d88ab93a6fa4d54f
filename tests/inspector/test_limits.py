"""Lines before limits are counted and told in statistics, checks and the list of handlers."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from django_delayq import reschedule_message, schedule_message, schedule_messages
from django_delayq.core.findings import Finding, Level
from django_delayq.core.states import State
from django_delayq.inspector import diagnostics, stats
from django_delayq.inspector.diagnostics import Thresholds
from django_delayq.inspector.numbers import CAPS, Capped, Caps
from django_delayq.inspector.stats import take_snapshot
from django_delayq.models import Message, Worker
from django_delayq.record import admission, reads
from django_delayq.record.sql import statements
from django_delayq.record.sql.rows import LeaseRenewal
from django_delayq.testing import Delayq
from tests.support.commands import run
from tests.support.limits import DB, Declare, admit, fail, succeed
from tests.support.rows import unguarded

pytestmark = pytest.mark.django_db

LINE = "topic l.one"
TOPICS = ("l.one", "l.free")


def fill(topic: str, number: int, ago: timedelta = timedelta(0), **options: Any) -> list[Message]:
    """Schedule messages of a topic with a limit, due some time ago, and have a worker claim what may begin."""
    terms: Any = {"topic": topic, "payload": {}, **options}
    made = schedule_messages([terms] * number)
    unguarded(Message).filter(pk__in=[each.pk for each in made]).update(due_at=reads.now(DB) - ago)
    admit(*made)
    return made


@pytest.fixture
def delayq() -> Iterator[Delayq]:
    """Give the record a clock that can be moved ahead."""
    with Delayq() as helper:
        yield helper


def findings(caps: Caps = CAPS, *, name: str = "Limited", **terms: Any) -> list[Finding]:
    """Return what a check finds under this name."""
    found = diagnostics.check(DB, None, Thresholds(min_workers=0, **terms), caps)
    return [finding for finding in found if finding.name == name]


def test_the_others_of_a_queue_with_limited_messages_are_ready_and_overdue(declare: Declare) -> None:
    declare("l.one", limit=1)
    fill("l.one", 4, timedelta(hours=2))
    fill("l.one", 1)
    free = schedule_message("l.free")
    unguarded(Message).filter(pk=free.pk).update(due_at=reads.now(DB) - timedelta(hours=1))
    schedule_message("l.free")
    schedule_message("l.one", delay="1h")
    queue = take_snapshot(DB).queues["default"]
    assert (queue.scheduled, queue.limited, queue.ready, queue.overdue) == tuple(map(Capped, (7, 4, 1, 1)))
    assert queue.oldest_overdue == Message.objects.get(pk=free.pk).due_at
    assert [message.pk for message in stats.oldest_overdue(DB, reads.now(DB))] == [free.pk]


@pytest.mark.parametrize("outcome", [State.CONSUMED, State.SCHEDULED, State.RUNNING])
def test_what_no_worker_takes_is_overdue_soon_after_others_end(
    declare: Declare, delayq: Delayq, outcome: State
) -> None:
    """As when all workers have died, so that nothing is tidied up either."""
    declare("l.one", limit=1)
    first, *waiting = fill("l.one", 3, timedelta(hours=2))
    if outcome == State.CONSUMED:
        succeed(first)
    elif outcome == State.SCHEDULED:
        fail(first, delay=timedelta(hours=1))
    else:
        # Nobody reaps it: it runs for as long as its lease, as far as one can tell.
        assert statements(DB).extend([LeaseRenewal(first.pk, 1, 120.0)], wait=False)
        delayq.travel(60)
    assert take_snapshot(DB).limited == Capped(2)
    assert findings(name="Overdue") == [Finding("Overdue", Level.OK, "none")]
    delayq.travel(70)
    seen = take_snapshot(DB)
    assert (seen.limited, seen.overdue) == (Capped(0), Capped(2))
    [found] = findings(name="Overdue")
    assert found.level == Level.CRITICAL
    assert found.detail.startswith(f"message {waiting[0].pk} ")


@pytest.mark.parametrize("burst", [1, 2])
def test_a_message_whose_slot_has_just_come_is_not_overdue(declare: Declare, delayq: Delayq, burst: int) -> None:
    declare("l.one", rate="1/s", burst=burst)
    fill("l.one", 4, timedelta(hours=2))
    for seconds in (0, 1.1, 2):
        delayq.travel(seconds)
        admission.tidy(DB)
        assert take_snapshot(DB).overdue == Capped(0)
    delayq.travel(10)
    assert take_snapshot(DB).overdue == Capped(4 - burst)


def test_a_message_that_is_rescheduled_long_after_its_delivery_keeps_no_place(declare: Declare, delayq: Delayq) -> None:
    declare("l.one", limit=1)
    first, *_waiting = fill("l.one", 2, timedelta(hours=2))
    fail(first, delay=timedelta(hours=1))
    delayq.travel(6)
    assert reschedule_message(first, delay="2h")
    assert take_snapshot(DB).limited == Capped(0)


def test_an_overdue_message_behind_many_limited_is_found(declare: Declare) -> None:
    declare("l.one", limit=1)
    fill("l.one", 8, timedelta(hours=2))
    fill("l.one", 5)
    free = schedule_message("l.free")
    unguarded(Message).filter(pk=free.pk).update(due_at=reads.now(DB) - timedelta(hours=1))
    queue = take_snapshot(DB, Caps(rows=3)).queues["default"]
    assert queue.limited == Capped(3, more=True)
    assert queue.oldest_overdue == Message.objects.get(pk=free.pk).due_at
    # At least: as far as one has looked, the others wait for the limit.
    assert (queue.overdue, queue.ready) == (Capped(1, more=True), Capped(0, more=True))


def test_limited_behind_many_overdue_ones_are_not_overdue(declare: Declare) -> None:
    declare("l.one", limit=1)
    fill("l.one", 9, timedelta(hours=2))
    schedule_messages([{"topic": "l.free"}] * 3)
    unguarded(Message).filter(topic="l.free").update(due_at=reads.now(DB) - timedelta(hours=3))
    assert take_snapshot(DB, Caps(rows=3)).overdue == Capped(3, more=True)


def test_lines_beyond_the_cap_are_at_least_so_long(declare: Declare) -> None:
    declare("l.one", limit=1)
    fill("l.one", 7, limit_key="a")
    (line,) = stats.longest_lines(DB, 5, Caps(rows=4)).longest
    assert line.waiting == Capped(4, more=True)


def test_a_message_under_two_full_limits_waits_for_the_first(declare: Declare, queue_limits: Any) -> None:
    queue_limits(default={"limit": 1})
    declare("l.one", limit=1)
    fill("l.one", 2)
    fill("l.free", 2)
    found = {line.name: line.waiting.count for line in stats.longest_lines(DB, 5).longest}
    assert found == {"topic l.one": 1, "queue default": 2}


def test_stats_tell_the_lines(declare: Declare) -> None:
    assert "Limited " not in run("delayq_stats").out
    declare("l.one", limit=1)
    fill("l.one", 3)
    found = stats.collect(DB, None)
    assert found.snapshot.limited == Capped(2)
    text = run("delayq_stats").out
    assert "Limited      2 before 1 limits, the oldest for" in text
    assert "topic l.one: 2 waiting, 1 running, limit 1 at once" in text
    assert "2 scheduled, 0 overdue, 2 limited" in text
    told = run("delayq_stats", "--json").json
    assert told["queues"]["default"]["limited"] == {"count": 2, "exact": True}
    (line,) = told["limits"]
    assert (line["name"], line["running"]) == (LINE, 1)
    assert line["limit"] == {"count": 1, "interval": None, "burst": None}


def test_a_check_tells_of_messages_that_wait_long(declare: Declare) -> None:
    assert findings() == []
    declare("l.one", limit=1)
    fill("l.one", 1)
    fill("l.one", 1)
    assert [found.level for found in findings()] == [Level.OK]
    fill("l.one", 1, timedelta(hours=2))
    [found] = findings()
    assert found.level == Level.WARN
    assert found.text.startswith("2 wait for topic l.one (1 of 1 run), the oldest for 2 h; raise the limit")
    patient = Finding("Limited", Level.OK, "messages wait for 1 limits, the oldest for 2 h")
    assert findings(max_limited_age=3 * 3600.0) == [patient]
    assert "found a critical problem" in run("delayq_check", "--max-limited-age", "90m").err
    assert all(each.level != Level.CRITICAL for each in diagnostics.check(DB, None, Thresholds(min_workers=0)))


def test_what_waits_longest_is_told_behind_longer_lines(declare: Declare) -> None:
    few = Caps(lines=1)
    declare("l.one", limit=1)
    fill("l.one", 3, limit_key="busy")
    fill("l.one", 1, limit_key="stuck")
    fill("l.one", 1, timedelta(days=2), limit_key="stuck")
    [found] = findings(few)
    assert found.detail == f"1 wait for {LINE} key stuck (1 of 1 run), the oldest for 2 d"
    [oldest] = stats.collect(DB, None, few).lines.oldest
    assert oldest.name == f"{LINE} key stuck"
    assert "Limited      3 before 2 limits, the oldest for 2 d" in run("delayq_stats").out


def test_a_check_tells_of_lines_that_no_worker_leads(declare: Declare) -> None:
    declare("l.one", limit=1)
    fill("l.one", 2)
    now = reads.now(DB)
    Worker.objects.create(name="w", host="h", pid=1, queues=["default"], topics=["other"], started_at=now, seen_at=now)
    [found] = findings()
    assert (found.level, found.advice[:38]) == (Level.WARN, "no live worker handles the topic, so n")
    Worker.objects.update(topics=["l.one"])
    assert [found.level for found in findings()] == [Level.OK]
