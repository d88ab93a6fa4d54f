"""The judgement on messages whose worker process died: which are accused, which run alone, which become dead."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_delayq import cancel_message, handler, requeue_message, schedule_message
from django_delayq.core.states import State
from django_delayq.core.verdicts import Verdict
from django_delayq.models import Message
from django_delayq.record import crashes, reads
from django_delayq.record.crashes import (
    RULES,
    Death,
    judge,
    mark_alone,
)
from tests.support.processes import Gate, Start
from tests.support.record_of import wait_until
from tests.support.rows import unguarded
from tests.support.steps import TOPIC, ago, claim, due, fail, log, message
from tests.support.workers import eventually

pytestmark = pytest.mark.django_db(transaction=True)

BY_ITSELF = Death(by_kill=False)


def die(worker: str = "w", death: Death = BY_ITSELF) -> dict[int, State]:
    """Release the messages of a worker process that died; return where they went."""
    moved = crashes.release_worker("default", worker, actor="s", shutdown=False, death=death)
    return {row.id: row.after for row in moved}


def run(ids: Collection[int], worker: str = "w") -> None:
    unguarded(Message).filter(pk__in=ids).update(due_at=ago())
    for pk in ids:
        assert claim(pk, worker=worker)


def vanish(pk: int, *, alone: bool = False) -> State:
    """Have a message run in a worker of which nothing is left."""
    run([pk])
    if alone:
        mark_alone("default", pk, message(pk).deliveries, "w")
    unguarded(Message).filter(pk=pk).update(leased_until=ago())
    (moved,) = crashes.reap("default", actor="reaper")
    return moved.after


# --- the rule ---------------------------------------------------------------------------------------------------------


def test_a_message_stays_away_for_longer_with_each_crash_alone() -> None:
    delays = [judge(number, was_alone=True, by_kill=True).delay for number in (1, 2, 3, 4)]
    assert delays == [0.0, 1.0, 2.0, 4.0]


@given(
    threads=st.integers(1, 8),
    by_kill=st.booleans(),
    poisonous=st.lists(st.booleans(), min_size=1, max_size=20),
    data=st.data(),
)
def test_poison_is_dead_after_a_bounded_number_of_deaths_and_nothing_else_is(
    threads: int, by_kill: bool, poisonous: list[bool], data: st.DataObject
) -> None:
    """Processes die with each poison that they run. Suspects run alone, and innocents among others take for ever."""
    crashes = dict.fromkeys(range(len(poisonous)), 0)
    deaths = 0
    while poison := [pk for pk in crashes if poisonous[pk]]:
        suspects = [pk for pk, count in crashes.items() if count >= RULES.suspect]
        if suspects and (set(poison) <= set(suspects) or data.draw(st.booleans())):
            running = {data.draw(st.sampled_from(suspects))}
        else:
            others = data.draw(st.lists(st.sampled_from(sorted(crashes.keys() - suspects)), max_size=threads - 1))
            running = {next(pk for pk in poison if pk not in suspects), *others}
        if not running & set(poison):
            # An innocent that ran alone is consumed.
            crashes = {pk: count for pk, count in crashes.items() if pk not in running}
            continue
        deaths += 1
        for pk in running:
            judgement = judge(crashes[pk] + 1, was_alone=len(running) == 1, by_kill=by_kill)
            crashes[pk] += judgement.counts
            if judgement.is_dead:
                assert poisonous[pk]
                del crashes[pk]
    assert deaths <= sum(poisonous) * (RULES.dead + RULES.suspect)


# --- the record -------------------------------------------------------------------------------------------------------


def test_a_message_that_had_not_begun_is_not_accused() -> None:
    begun, waiting = due().pk, due().pk
    run([begun, waiting])
    assert die(death=Death([begun])) == {begun: State.SCHEDULED, waiting: State.SCHEDULED}
    assert (message(begun).crashes, message(waiting).crashes) == (1, 0)
    last = log(waiting)[-1]
    assert last.reason == "worker process died; it was not running"


def test_messages_that_always_ran_beside_others_never_become_dead() -> None:
    ids = [due().pk for _ in range(3)]
    for _death in range(8):
        run(ids)
        assert set(die().values()) == {State.SCHEDULED}
    assert {message(pk).crashes for pk in ids} == {RULES.suspect}


def test_a_message_that_crashed_its_process_alone_is_dead_with_a_reason() -> None:
    pk, other = due().pk, due().pk
    for _death in range(2):
        run([pk, other])
        die()
    run([pk])
    assert die() == {pk: State.DEAD}
    last = log(pk)[-1]
    assert last.reason == "worker process died; it ran alone; 3 deliveries crashed"
    run([other])
    assert die(death=Death(by_kill=True)) == {other: State.SCHEDULED}


def test_a_message_that_crashed_alone_lets_others_go_first() -> None:
    pk = due().pk
    for crash in range(1, 5):
        run([pk])
        before = reads.now("default")
        die(death=Death(by_kill=True))
        assert message(pk).crashes == crash
        assert (message(pk).due_at > before) == (crash >= RULES.suspect)
    run([pk])
    assert die(death=Death(by_kill=True)) == {pk: State.DEAD}


def test_reported_failures_do_not_count_as_crashes() -> None:
    pk = due().pk
    for delivery in (1, 2, 3):
        run([pk])
        assert fail(pk, delivery, delay=None)
    run([pk])
    assert die() == {pk: State.SCHEDULED}


def test_a_requeue_excuses_the_crashes_and_counts_the_attempts_anew() -> None:
    pk = due().pk
    for _death in range(RULES.dead):
        run([pk])
        die()
    assert requeue_message(pk)
    now = message(pk)
    assert (now.attempts, now.crashes, now.deliveries) == (0, 0, RULES.dead)
    run([pk])
    assert die() == {pk: State.SCHEDULED}


def test_the_death_of_all_processes_accuses_nobody() -> None:
    ids = [due().pk for _ in range(3)]
    run(ids)
    die(death=Death(of_all=True))
    assert [(message(pk).excused, message(pk).crashes) for pk in ids] == [(1, 0)] * 3


def test_the_deaths_of_whole_workers_make_a_suspect_late_and_never_kill_a_message_that_ran_beside_others() -> None:
    pk = due().pk
    for number in range(1, 5 * RULES.deaths_of_workers):
        assert vanish(pk) == State.SCHEDULED
        assert message(pk).crashes == min(number // RULES.deaths_of_workers, RULES.suspect)


def test_a_message_that_kills_its_whole_worker_again_and_again_is_dead_in_the_end() -> None:
    pk = due().pk
    ends = [vanish(pk, alone=message(pk).crashes >= RULES.suspect) for _ in range(5 * RULES.deaths_of_workers)]
    assert [number for number, end in enumerate(ends, 1) if end == State.DEAD] == [5 * RULES.deaths_of_workers]


def test_a_message_is_marked_as_alone_only_by_its_present_delivery() -> None:
    pk = due().pk
    run([pk])
    for delivery, worker in ((2, "w"), (1, "another")):
        mark_alone("default", pk, delivery, worker)
        assert message(pk).worker == "w"
    mark_alone("default", pk, 1, "w")
    assert message(pk).worker == "w" + crashes.ALONE
    assert die() == {pk: State.SCHEDULED}
    assert message(pk).worker == ""


def reap() -> None:
    """Have the leases of all that runs be over, and reap it."""
    unguarded(Message).filter(state=State.RUNNING).update(leased_until=ago())
    assert crashes.reap("default", actor="reaper")


@pytest.mark.parametrize("end", [die, reap], ids=["seen", "unseen"])
def test_a_message_that_was_asked_to_stop_is_cancelled_by_the_crash_that_would_make_it_dead(
    end: Callable[[], object],
) -> None:
    pk = due().pk
    unguarded(Message).filter(pk=pk).update(deliveries=9, reported=0)
    run([pk])
    mark_alone("default", pk, 10, "w")
    assert cancel_message(pk).verdict == Verdict.REQUESTED
    end()
    row = message(pk)
    assert row.state == State.CANCELLED
    last = log(pk)[-1]
    assert last.reason.startswith("cancel requested; ")


# --- handlers that allow no other delivery ----------------------------------------------------------------------------


@pytest.fixture
def at_most_once() -> None:
    handler(TOPIC, redeliver=False)(lambda message: None)


@pytest.mark.usefixtures("at_most_once")
@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (die, "worker process died"),
        (lambda: die(death=Death(by_kill=True)), "worker process died"),
        (lambda: die(death=Death([])), "worker process died"),
        (lambda: die(death=Death(of_all=True)), "worker process died"),
        (reap, "lease ran out"),
    ],
    ids=["seen", "killed", "not known to run", "with all others", "unseen"],
)
def test_a_message_that_is_delivered_at_most_once_is_dead_with_its_first_crash(
    end: Callable[[], object], reason: str
) -> None:
    pk = due(key="a").pk
    run([pk])
    end()
    assert message(pk).state == State.DEAD
    assert log(pk)[-1].reason == f"{reason}; its handler has redeliver=False"
    # Its key is free, and somebody may requeue it: each crash ends a life.
    schedule_message(TOPIC, key="a", delay="1h", on_conflict="keep")
    assert requeue_message(pk).verdict == Verdict.KEY_TAKEN
    assert cancel_message(topic=TOPIC, key="a")
    assert requeue_message(pk)
    run([pk])
    end()
    assert (message(pk).state, message(pk).deliveries) == (State.DEAD, 2)


@pytest.mark.usefixtures("at_most_once")
def test_a_message_that_is_delivered_at_most_once_comes_again_when_nothing_crashed() -> None:
    pk = due().pk
    run([pk])
    (moved,) = crashes.release_worker("default", "w", actor="s", shutdown=True)
    assert moved.after == State.SCHEDULED
    run([pk])
    (moved,) = crashes.release_orphaned("default", [pk], "w", since=None, actor="w")
    assert moved.after == State.SCHEDULED
    run([pk])
    assert fail(pk, 3)
    run([pk])
    assert cancel_message(pk).verdict == Verdict.REQUESTED
    assert die() == {pk: State.CANCELLED}


@pytest.mark.usefixtures("timed_by")
def test_a_killed_process_repeats_no_delivery_of_a_handler_that_allows_none(start: Start, gate: Gate) -> None:
    once, again = (schedule_message(topic, gate.payload) for topic in ("t.at_most_once", "t.gate"))
    worker = start("--threads", "2")
    (victim,) = worker.wait_for_children(1)
    eventually(lambda: gate.begun(once.pk) and gate.begun(again.pk), "both begin")
    os.kill(victim, signal.SIGKILL)
    wait_until(once, State.DEAD)
    gate.open()
    wait_until(again, State.CONSUMED)
    assert (message(once.pk).deliveries, message(again.pk).deliveries) == (1, 2)
    assert "redeliver=False" in log(once.pk)[-1].reason


@pytest.mark.parametrize("value", [None, 0, "no"])
def test_whether_to_deliver_again_is_yes_or_no(value: object) -> None:
    with pytest.raises(ValueError, match="redeliver"):
        handler("t.never", redeliver=value)  # type: ignore[arg-type]
