"""Tests of operations: done in steps, under a lease, stopped, resumed, failed; and of the pages that show them."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from django_delayq.api.actions import ACTIONS
from django_delayq.console.console_tuning import tuning
from django_delayq.console.models import AuditEvent, Operation
from django_delayq.console.operations import lifecycle, work
from django_delayq.console.operations.lifecycle import OperationLook, OperationRunner
from django_delayq.console.operations.work import OperationWork, Scope, Step
from django_delayq.console.search.language import parse
from django_delayq.core.actors import acting_as
from django_delayq.core.exceptions import BrokerUnavailable
from django_delayq.models import Message
from django_delayq.record import reads

from . import samples
from .asking import started, worked_off

pytestmark = pytest.mark.django_db

LIST = "admin:delayq_console_operation_changelist"
BATCH = 4


@pytest.fixture(autouse=True)
def _small_steps_and_long_leases(tuned: Callable[..., None]) -> None:
    tuned(lease=3600.0, step_messages=BATCH)


def start(action: str, search: str = "", *, ids: list[int] | None = None, **arguments: Any) -> Operation:
    found = Scope(search=parse(search, now=timezone.now()).frozen).renewed(samples.DB)
    rows = Message.objects.using(samples.DB)
    scope = found.frozen(rows, ACTIONS[action]) if ids is None else Scope(ids=tuple(ids))
    with acting_as("user:anna"):
        return lifecycle.start(samples.DB, action, scope.to_json(), arguments, described="these", reason="so")


def fresh(operation: Operation) -> Operation:
    return Operation.objects.get(pk=operation.pk)


def step(operation: Operation, worker: str = "w1") -> bool:
    return lifecycle.run_step(samples.DB, fresh(operation), worker)


def lease_runs_out(operation: Operation) -> None:
    late = reads.now(samples.DB) - timedelta(seconds=1)
    assert Operation.objects.filter(pk=operation.pk).update(leased_until=late)


def scheduled(number: int, **options: Any) -> list[int]:
    return [message.pk for message in samples.many(number, **options)]


def states() -> Counter[str]:
    return Counter(Message.objects.values_list("state", flat=True))


def outcome(operation: Operation) -> tuple[str, int, dict[str, int]]:
    now = fresh(operation)
    return now.state, now.done, now.outcomes


# --- steps ------------------------------------------------------------------------------------------------------------


def test_an_operation_is_done_in_steps() -> None:
    scheduled(10)
    operation = start("cancel", "is:live")
    seen = []
    while step(operation):
        seen.append((fresh(operation).state, states()["cancelled"]))
    assert seen == [("running", 4), ("running", 8)]
    assert outcome(operation) == ("done", 10, {"cancelled": 10})
    now = fresh(operation)
    assert (now.total, now.worker, now.leased_until) == (10, "", None)
    assert now.started_at is not None
    assert now.finished_at is not None
    assert not step(operation)


@pytest.mark.parametrize("ids", [(), (1,), (5, 6, 7), (1, 2**62), tuple(range(100, 200_000, 3))], ids=len)
def test_a_scope_of_ids_survives_its_way_through_json(ids: tuple[int, ...]) -> None:
    scope = Scope(ids=ids)
    text = json.dumps(scope.to_json())
    assert Scope.from_json(json.loads(text)) == scope
    assert len(text) < 100 + len(ids)


@pytest.mark.parametrize("given", [{"shift": 3600}, {"due": "2100-01-01T00:00:00+00:00"}], ids=str)
def test_messages_are_spread_over_all_steps(given: dict[str, Any]) -> None:
    made = samples.many(10, delay=None, due_at=reads.now(samples.DB) + timedelta(hours=1))
    start("reschedule", "is:live", spread=100, **given)
    worked_off()
    moved = [samples.fresh(message).due_at for message in made]
    first = made[0].due_at + timedelta(hours=1) if "shift" in given else datetime(2100, 1, 1, tzinfo=UTC)
    assert [(at - first).total_seconds() for at in moved] == pytest.approx([10.0 * n for n in range(10)], abs=0.002)


def test_a_spread_of_a_requeue_goes_over_those_that_would_be_due_at_once() -> None:
    made = [(samples.cancelled(delay="2d"), samples.dead()) for _number in range(5)]
    start("requeue", "state:dead,cancelled", spread=1000)
    now = reads.now(samples.DB)
    worked_off()
    assert [samples.fresh(kept).due_at for kept, _spread in made] == [kept.due_at for kept, _spread in made]
    waits = [(samples.fresh(spread).due_at - now).total_seconds() for _kept, spread in made]
    assert waits == pytest.approx([0, 200, 400, 600, 800], abs=60)


@pytest.mark.parametrize(
    ("action", "scope", "arguments"),
    [
        ("delete", Scope().to_json(), {}),
        ("cancel", {}, {}),
        ("cancel", {"search": "is:live", "upto": 1}, {}),
        ("reschedule", Scope(ids=(1,)).to_json(), {}),
        ("reschedule", Scope(ids=(1,)).to_json(), {"due": "2050-01-01T00:00:00+00:00", "shift": 5}),
    ],
)
def test_what_no_worker_could_do_is_refused(action: str, scope: dict[str, Any], arguments: dict[str, Any]) -> None:
    with pytest.raises((KeyError, ValueError)):
        lifecycle.start(samples.DB, action, scope, arguments, described="", reason="")
    assert not Operation.objects.exists()


# --- leases -----------------------------------------------------------------------------------------------------------


def test_two_workers_never_do_one_operation_at_once() -> None:
    scheduled(10)
    operation, other = start("cancel", "is:live"), start("run", "is:live")
    assert step(operation, "w1")
    before = samples.record()
    assert not step(operation, "w2")
    assert samples.record() == before
    assert [lifecycle.lease_next(samples.DB, name) for name in ("w2", "w3")] == [other, None]
    assert fresh(operation).worker == "w1"
    assert step(operation, "w1")
    # No lease is so long: the clock of its worker was ahead.
    ahead = reads.now(samples.DB) + timedelta(days=1)
    Operation.objects.filter(pk=operation.pk).update(leased_until=work.lease_from(ahead))
    assert lifecycle.lease_next(samples.DB, "w3") == operation


def test_a_step_whose_lease_was_lost_is_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduled(3)
    operation = start("cancel", "is:live")
    act = work.BulkAction.act

    def slowly(self: Any, using: str, *args: Any) -> Any:
        counts = act(self, using, *args)
        lease_runs_out(operation)
        assert lifecycle.lease_next(using, "w2") is not None
        return counts

    monkeypatch.setattr(work.BulkAction, "act", slowly)
    assert not step(operation, "w1")
    assert states() == {"scheduled": 3}
    monkeypatch.undo()
    lease_runs_out(operation)
    worked_off()
    assert outcome(operation) == ("done", 3, {"cancelled": 3})


# --- stop and resume --------------------------------------------------------------------------------------------------


def test_a_stop_takes_effect_when_its_worker_was_killed(chief: Client) -> None:
    scheduled(10)
    left, killed = start("cancel", "is:live"), start("cancel", "is:live")
    step(left, "w1")
    step(killed, "w2")
    for operation in (left, killed):
        lifecycle.stop(operation)
    lifecycle.release(samples.DB, "w1")
    assert [fresh(operation).state for operation in (left, killed)] == ["stopped", "running"]
    stop = reverse("admin:delayq_console_operation_stop", args=[killed.pk])
    assert stop not in page(chief, killed).content.decode()
    lease_runs_out(killed)
    assert stop in page(chief, killed).content.decode()
    chief.post(stop)
    assert fresh(killed).state == "stopped"


def test_a_load_of_a_worker_cannot_be_stopped_while_that_lives(chief: Client) -> None:
    scheduled(10)
    load = start("cancel", "is:live")
    step(load, "loader:host/1/7")
    stop = reverse("admin:delayq_console_operation_stop", args=[load.pk])
    assert stop not in page(chief, load).content.decode()
    chief.post(stop)
    assert (fresh(load).state, fresh(load).stop_requested) == ("running", False)
    lease_runs_out(load)
    assert stop in page(chief, load).content.decode()


def test_a_finished_operation_neither_stops_nor_resumes_and_costs_one_query() -> None:
    operation = start("cancel", "is:live")
    worked_off()
    assert not lifecycle.stop(operation)
    assert not lifecycle.resume(operation)
    assert fresh(operation).state == "done"
    runner = OperationRunner(samples.DB, "w1")
    runner.tick()
    with CaptureQueriesContext(connection) as queries:
        assert OperationLook(runner).tick() >= 5.0
        runner.tick()
    assert len(queries) == 1


# --- failures ---------------------------------------------------------------------------------------------------------


class Failing(OperationWork):
    name = "fail"
    verbs = ("cancel",)
    error: Exception = ZeroDivisionError("by nothing")

    def count(self, using: str) -> int | None:
        return None

    def step(self, using: str, operation: Operation) -> Step:
        raise self.error


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Failing]]:
    monkeypatch.setitem(work.WORKS, "fail", Failing)
    error = Failing.error
    yield Failing
    Failing.error = error


def tries(runner: OperationRunner, number: int) -> int:
    """Tick so many times, and return how many ticks raised."""
    raised = 0
    for _number in range(number):
        try:
            runner.tick()
        except Exception:  # noqa: BLE001
            raised += 1
    return raised


def test_failures_in_a_row_are_final(chief: Client, failing: type[Failing], caplog: pytest.LogCaptureFixture) -> None:
    operation, other = start("fail", ids=[]), start("cancel", ids=[])
    runner = OperationRunner(samples.DB, "w1")
    with caplog.at_level(logging.ERROR, "django_delayq"):
        assert tries(runner, tuning.step_failures) == tuning.step_failures
    now = fresh(operation)
    assert (now.state, now.error, now.worker) == ("failed", "ZeroDivisionError: by nothing", "")
    assert "by nothing" in caplog.text
    assert "The operation failed: ZeroDivisionError: by nothing" in samples.text(page(chief, operation))
    worked_off(runner)
    assert fresh(other).state == "done"
    assert lifecycle.resume(now)
    assert fresh(operation).error == ""


def test_operations_that_need_no_redis_are_done_while_it_is_away(settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": "redis://127.0.0.1:1/0"}
    check = lifecycle.start(samples.DB, "check", {}, {}, described="all queues", reason="")
    cancel = start("cancel", ids=scheduled(1))
    tries(OperationRunner(samples.DB, "w1"), 3)
    assert outcome(cancel) == ("done", 1, {"cancelled": 1})
    assert fresh(check).state == "running"


@pytest.mark.parametrize("away", [BrokerUnavailable("Redis is away"), OperationalError("the database is away")])
def test_a_step_waits_for_its_servers(failing: type[Failing], monkeypatch: pytest.MonkeyPatch, away: Exception) -> None:
    def step(self: Failing, using: str, operation: Operation) -> Step:
        raise away

    monkeypatch.setattr(failing, "step", step)
    operation = start("fail", ids=[])
    runner = OperationRunner(samples.DB, "w1")
    for _time in range(3 * tuning.step_failures):
        assert tries(runner, 1) == 1
        lease_runs_out(operation)
    assert fresh(operation).state == "running"


def test_a_step_that_succeeds_resets_the_failures(failing: type[Failing], monkeypatch: pytest.MonkeyPatch) -> None:
    operation = start("fail", ids=[])
    runner = OperationRunner(samples.DB, "w1")
    tries(runner, tuning.step_failures - 1)
    monkeypatch.setattr(failing, "step", lambda self, using, operation: Step(1, {"done": 1}, "", False))
    assert runner.tick() == 0.0
    monkeypatch.undo()
    monkeypatch.setitem(work.WORKS, "fail", failing)
    tries(runner, tuning.step_failures - 1)
    assert fresh(operation).state == "running"


# --- pages ------------------------------------------------------------------------------------------------------------


def page(client: Client, operation: Operation) -> Any:
    return client.get(reverse("admin:delayq_console_operation_change", args=[operation.pk]))


def test_the_list_shows_the_progress_of_operations(chief: Client) -> None:
    scheduled(10)
    operation = start("cancel", "is:live")
    text = samples.text(chief.get(reverse(LIST)))
    assert f"#{operation.pk} Cancel these queued 0 messages anna" in text
    assert "No worker is alive to do this" in text
    samples.worker()
    step(operation)
    response = chief.get(reverse(LIST))
    text = samples.text(response)
    assert "running 40 % 4 of 10 messages 4 cancelled" in text
    assert "No worker is alive to do this" not in text
    assert 'data-dq-region="operations"' in response.content.decode()
    while step(operation):
        pass
    assert "done 100 % 10 of 10 messages 10 cancelled" in samples.text(chief.get(reverse(LIST)))


def test_the_page_shows_an_operation_and_its_outcomes(chief: Client) -> None:
    scheduled(10)
    due = timezone.now() + timedelta(days=1)
    operation = start("reschedule", "is:live", due=due.isoformat(), spread=600)
    samples.worker()
    step(operation)
    response = page(chief, operation)
    text = samples.text(response)
    for part in ("4 of 10 messages", "4 rescheduled", "Spread over 10 m", "Reason so", "Started by anna", "running"):
        assert part in text
    assert ">Stop</button>" in response.content.decode()
    assert 'data-dq-region="operation"' in response.content.decode()
    # A live region holds no form: a refresh would replace the form while somebody uses it.
    region = response.content.decode().split('data-dq-region="operation"')[1].split("</section>")[0]
    assert "<form" not in region
    before = reads.now(samples.DB) - timedelta(seconds=4)
    Operation.objects.update(started_at=before, done=4000, total=8000)
    text = samples.text(page(chief, operation))
    assert "a second" in text
    assert "Time left, about" in text
    samples.cancelled(delay="2d")
    assert "Due at once" in samples.text(page(chief, start("requeue", "state:cancelled", now=True)))


@pytest.mark.parametrize(
    ("action", "given", "told"),
    [
        ("reschedule", {"shift": -1800}, ["Later by -30 m"]),
        ("reschedule", {"shift": 0}, ["Later by +0"]),
        ("run", {"resume": "mail", "spread": 60}, ["Spread over 1 m", "Then resumes queue mail"]),
        ("move", {"queue": "b", "priority": 0}, ["Queue b", "Priority 0"]),
    ],
)
def test_the_page_tells_what_an_operation_was_given(
    chief: Client, action: str, given: dict[str, Any], told: list[str]
) -> None:
    samples.scheduled()
    text = samples.text(page(chief, start(action, "is:live", **given)))
    assert [part for part in told if part not in text] == []
    names = {"New due time", "Later by", "Spread over", "Then resumes queue", "Priority"}
    assert {name for name in names if name in text} == {name for name in names if name in " ".join(told)}


def test_the_time_left_counts_no_time_for_which_it_stood_still(chief: Client) -> None:
    scheduled(10)
    operation = start("cancel", "is:live")
    step(operation)
    lifecycle.stop(fresh(operation))
    step(operation)
    stopped = reads.now(samples.DB) - timedelta(days=1)
    begun = stopped - timedelta(seconds=100)
    Operation.objects.update(started_at=begun, finished_at=stopped, done=4000, total=8000)
    assert lifecycle.resume(fresh(operation))
    step(operation)
    assert re.search(r"Time left, about 1 m \d+ s Duration 1 m \d+ s", samples.text(page(chief, operation)))


def test_an_operation_is_stopped_and_resumed_on_its_page(chief: Client) -> None:
    scheduled(10)
    operation = started(chief, "cancel", "is:live")
    stop, resume = (
        reverse(f"admin:delayq_console_operation_{name}", args=[operation.pk]) for name in ("stop", "resume")
    )
    runner = OperationRunner(samples.DB, "w1")
    runner.tick()
    response = chief.post(stop, follow=True)
    assert samples.said(response) == ["The operation stops after the current batch."]
    assert "A stop was requested" in samples.text(response)
    assert stop not in response.content.decode()
    worked_off(runner)
    assert outcome(operation) == ("stopped", 4, {"cancelled": 4})
    response = page(chief, operation)
    assert resume in response.content.decode()
    assert samples.said(chief.post(resume, follow=True)) == ["The operation goes on where it stopped."]
    worked_off(runner)
    assert outcome(operation) == ("done", 10, {"cancelled": 10})
    assert samples.said(chief.post(stop, follow=True)) == [
        "Nothing was done: the operation is in another state by now."
    ]
    assert list(AuditEvent.objects.order_by("pk").values_list("action", flat=True)) == ["cancel", "stop", "resume"]


def test_many_operations_have_several_pages(chief: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("django_delayq.console.admin.operation_pages.OperationAdmin.list_per_page", 2)
    made = [start("cancel", ids=[]) for _number in range(3)]
    first = chief.get(reverse(LIST))
    assert [shown.operation.pk for shown in first.context["operations"]] == [made[2].pk, made[1].pk]
    second = chief.get(reverse(LIST), {"before": first.context["older"]})
    assert [shown.operation.pk for shown in second.context["operations"]] == [made[0].pk]
    assert second.context["older"] is None
    assert chief.get(reverse(LIST), {"before": "x'"}).status_code == 200


@pytest.mark.parametrize("number", ["0", "999999", "x", "9" * 30])
def test_the_page_of_a_missing_operation_is_not_found(chief: Client, number: str) -> None:
    url = reverse(LIST)
    assert chief.get(f"{url}{number}/change/").status_code == 404
    assert chief.post(f"{url}{number}/stop/", follow=True).status_code == 404
