"""Schedules that the code declares: mistakes, changes, removals, and two versions of the code at once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import FunctionType
from typing import Any

import pytest
from django.core.checks import run_checks
from django.db import IntegrityError, connection
from django.db.models import Model
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from django_delayq import handler
from django_delayq.core.exceptions import InvalidMessage
from django_delayq.inspector.worker_list import list_workers
from django_delayq.middleware import Draft, Middleware
from django_delayq.models import Message, Worker
from django_delayq.recurring import (
    Schedule,
    create_schedule,
    pause_schedule,
    recurring,
    run_schedule,
    schedules,
    services,
)
from django_delayq.recurring.declarations import Declaration, collect
from django_delayq.recurring.diagnosis import find
from django_delayq.recurring.models import Declarations, Occurrence
from django_delayq.recurring.schedule_tuning import tuning
from django_delayq.recurring.services import Declarer, Scheduler
from tests.support.no_handlers import forget_handlers
from tests.support.rows import unguarded
from tests.support.workers import ROOT

from .conftest import DB, NOON, Clock, deliver, live, no_table, occurrences

pytestmark = pytest.mark.usefixtures("without_redis")
Code = list[Declaration]


def declare(*arguments: Any, topic: str = "t.digest", **options: Any) -> None:
    """Declare a schedule on a handler."""

    @recurring(*arguments, **{"tz": "UTC", **options})
    @handler(topic)
    def handle(message: Any) -> None: ...


class Version:
    """A worker process with one version of the code."""

    def __init__(self, code: Code, *arguments: Any, **options: Any) -> None:
        self._code = code
        self.arguments = arguments
        self.options = options
        self.service = Declarer(DB, "w")

    def tick(self) -> None:
        self._code.clear()
        if self.arguments or self.options:
            forget_handlers()
            declare(*self.arguments, **self.options)
        self.service.tick()


class MessagesIn:
    """A database router that has the messages in one database."""

    def __init__(self, home: str) -> None:
        self.home = home

    def db_for_write(self, model: type[Model], **hints: Any) -> str | None:
        return self.home if model is Message else None


def again(message: Any) -> None: ...


# --- what is declared -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "declares", "code"),
    [(["check"], "", 0), (["check"], "1", 1), (["run_delayq", "--once"], "1", 78)],
    ids=["nothing declared", "check", "worker"],
)
def test_a_declaration_without_the_app_that_runs_it_is_refused(command: list[str], declares: str, code: int) -> None:
    environment = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.recurring.uninstalled_settings",
        "DELAYQ_TEST_RECURRING": declares,
    }
    command = [sys.executable, "-m", "django", *command]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code
    words = (
        "(delayq_recurring.E002) @recurring has no effect, and tests.app.handlers.succeed_each_second will never run",
        "HINT: Add 'django_delayq.recurring' to INSTALLED_APPS",
    )
    assert [text in done.stderr for text in words] == [bool(declares)] * 2


def test_a_schedule_belongs_to_the_topic_of_its_handler_in_either_order(code: Code) -> None:
    declare("0 3 * * *", tz="Europe/Berlin", payload={"a": 1}, missed="skip")

    @handler("t.other")
    @recurring(every="10m")
    def other(message: Any) -> None: ...

    found, mistakes = collect()
    assert mistakes == []
    assert {name: made.topic for name, made in found.items()} == {"t.digest": "t.digest", "t.other": "t.other"}
    digest = found["t.digest"]
    assert (digest.cron, digest.time_zone, digest.payload, digest.missed) == (
        "0 3 * * *",
        "Europe/Berlin",
        {"a": 1},
        "skip",
    )
    assert callable(other)


def test_the_project_has_a_default_time_zone(code: Code, settings: Any) -> None:
    settings.TIME_ZONE = "Asia/Tokyo"
    declare("0 3 * * *", tz=None)
    assert collect()[0]["t.digest"].time_zone == "Asia/Tokyo"


def test_a_module_that_is_imported_again_declares_nothing_new(code: Code) -> None:
    def imported() -> None:
        recurring(every="10m")(handler("t.again")(FunctionType(again.__code__, {"__name__": __name__}, "again")))

    imported()
    imported()
    found, mistakes = collect()
    assert (list(found), mistakes) == (["t.again"], [])


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda: declare("0 25 * * *"), "declare.<locals>.handle is wrong: not a cron expression: '0 25 * * *'"),
        (lambda: declare(every="10m", payload={1}), "is not JSON"),
        (lambda: declare(every="10m", name="a b"), "the name of a schedule"),
        (lambda: recurring(every="1h")(lambda message: None), "is no handler"),
        (lambda: [recurring(every="1h", topic="t.ok")(twice) for twice in (print, len)], "has a schedule 't.ok' too"),
    ],
    ids=["cron", "payload", "name", "no handler", "one name twice"],
)
def test_a_wrong_declaration_is_found_by_the_system_check(code: Code, write: Callable[[], Any], words: str) -> None:
    write()
    [found] = run_checks(tags=["delayq"])
    assert found.id == "delayq_recurring.E001"
    assert found.hint
    assert words in found.msg


def test_one_wrong_setting_is_told_once_by_the_system_check(code: Code) -> None:
    declare(every="1h")
    declare(every="2h", topic="t.other")
    with override_settings(DELAYQ={"LEASE": -1}):
        assert [found.id for found in run_checks(tags=["delayq"])] == ["delayq.E003"]


def test_one_missing_package_is_told_once_by_the_system_check(code: Code, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cronsim", None)
    declare("0 3 * * *")
    declare("0 4 * * *", topic="t.other")
    [found] = run_checks(tags=["delayq"])
    assert "cronsim" in found.msg
    assert "install what is missing" in str(found.hint)


def test_a_decorator_without_its_times_is_refused() -> None:
    with pytest.raises(InvalidMessage, match="needs its times"):
        recurring(print)  # type: ignore[arg-type]


# --- what workers make of it ------------------------------------------------------------------------------------------

database = pytest.mark.django_db


@database
def test_a_wrong_declaration_stops_no_other(code: Code, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    declare("wrong")
    declare(every="1h", topic="t.good")
    service = Declarer(DB, "w")
    service.tick()
    service.tick()
    assert live("t.good") == ["13:00"]
    assert caplog.text.count("is wrong, and makes no messages") == 1


@pytest.mark.django_db(databases=["default", "other"])
def test_a_declared_schedule_is_in_the_database_of_the_messages_alone(code: Code, clock: Clock, settings: Any) -> None:
    declare(every="1h")
    for home in ("default", "other"):
        settings.DATABASE_ROUTERS = [MessagesIn(home)]
        # Those of the former router are forgotten.
        for _time in range(4):
            clock.advance(minutes=1)
            for using in ("default", "other"):
                Declarer(using, "w").tick()
        for using in ("default", "other"):
            waiting = Message.objects.using(using).filter(state="scheduled")
            assert [message.headers["schedule"] for message in waiting] == ["t.digest"] * (using == home)
            Worker.objects.using(using).create(name=home, host="h", pid=1, started_at=clock.now, seen_at=clock.now)
            assert list(find(using, list_workers(using, clock.now))) == []


@database
def test_an_old_worker_beside_a_new_one_does_not_turn_a_change_back(code: Code, clock: Clock) -> None:
    old, new = Version(code, every="1h"), Version(code, every="10m")
    old.tick()
    clock.advance(seconds=20)
    new.tick()
    for _ in range(4):
        clock.advance(seconds=20)
        old.tick()
        new.tick()
    # The supervisor of the old version starts a process anew.
    Version(code, every="1h").tick()
    assert Schedule.objects.get().every == "10m"
    assert Message.objects.filter(state="cancelled").count() == 1


def urgent(**options: Any) -> None:
    """Declare a schedule whose handler says how its messages are to be scheduled."""

    @recurring(every="1h", tz="UTC", payload={"shop": 5})
    @handler("t.urgent", **{"queue": "fast", "priority": 7, "limit": 1, "limit_key": of_a_shop, **options})
    def handle(message: Any) -> None: ...


def of_a_shop(message: Any) -> str:
    return f"shop {message.payload['shop']}"


def scheduled_as(message: Message) -> tuple[str, int, str | None]:
    return message.queue, message.priority, message.limit_key


@database
@pytest.mark.parametrize("knows_an_older_one", [False, True])
def test_a_worker_that_does_not_know_the_handler_makes_what_the_declaration_says(
    code: Code, clock: Clock, knows_an_older_one: bool
) -> None:
    urgent()
    Declarer(DB, "new").tick()
    forget_handlers()
    if knows_an_older_one:
        handler("t.urgent", queue="slow", priority=1)(again)
    for _turn in range(2):
        clock.advance(hours=1)
        deliver(clock, "t.urgent")
        Scheduler(DB, "old").tick()
    made = [*Message.objects.order_by("pk"), run_schedule("t.urgent")]
    assert [scheduled_as(message)[:2] for message in made] == 4 * [("fast", 7)]
    # A limit key is a function of the handler, which is called where the message is made.
    keys = [message.limit_key for message in made]
    assert keys == ["shop 5", *[None if knows_an_older_one else "shop 5"] * 3]


@database
def test_a_handler_that_moves_to_another_queue_takes_its_schedule_along(
    code: Code, clock: Clock, settings: Any
) -> None:
    urgent()
    Declarer(DB, "old").tick()
    clock.advance(minutes=1)
    code.clear()
    forget_handlers()
    urgent(queue=None, priority=0)
    Declarer(DB, "new").tick()
    (waiting,) = Message.objects.filter(state="scheduled")
    assert (waiting.queue, waiting.priority) == (settings.DELAYQ.get("DEFAULT_QUEUE", "default"), 0)


@database
def test_a_schedule_made_at_run_time_follows_the_handler_where_that_is_known(code: Code, clock: Clock) -> None:
    handler("t.urgent", queue="fast", priority=7, limit=1, limit_key=of_a_shop)(again)
    create_schedule("s", "t.urgent", {"shop": 5}, every="1h")
    forget_handlers()
    assert scheduled_as(run_schedule("s")) == ("fast", 7, "shop 5")
    # Who does not know the handler does not forget what it said.
    create_schedule("s", "t.urgent", {"shop": 5}, every="2h", on_conflict="replace")
    assert scheduled_as(run_schedule("s")) == ("fast", 7, "shop 5")
    create_schedule("s", "t.urgent", {"shop": 6}, every="2h", on_conflict="replace")
    assert scheduled_as(run_schedule("s")) == ("fast", 7, None)
    handler("t.urgent", queue="slow", priority=1)(again)
    assert scheduled_as(run_schedule("s")) == ("slow", 1, None)
    create_schedule("s", "t.urgent", {"shop": 5}, every="1h", queue="own", priority=0, on_conflict="replace")
    forget_handlers()
    assert scheduled_as(run_schedule("s"))[:2] == ("own", 0)


@database
def test_a_version_whose_workers_are_gone_defines_nothing(code: Code, clock: Clock) -> None:
    old, new = Version(code, every="1h"), Version(code, every="10m")
    old.tick()
    clock.advance(seconds=20)
    new.tick()
    for _ in range(6):
        clock.advance(seconds=20)
        old.tick()
    assert Schedule.objects.get().every == "1h"


@database
def test_a_version_that_comes_back_defines_its_schedules_at_once(code: Code, clock: Clock) -> None:
    Version(code, every="1h").tick()
    clock.advance(minutes=10)
    new = Version(code, every="10m")
    new.tick()
    clock.advance(seconds=20)
    Version(code, every="1h").tick()
    new.tick()
    assert Schedule.objects.get().every == "1h"


@database
def test_the_newer_version_defines_a_schedule_also_after_an_outage(code: Code, clock: Clock) -> None:
    old, new = Version(code, every="1h"), Version(code, every="10m")
    old.tick()
    clock.advance(seconds=20)
    new.tick()
    # For two minutes nobody could announce anything, or the clock was set ahead by that.
    clock.advance(minutes=2)
    for _ in range(3):
        new.tick()
        clock.advance(seconds=1)
        old.tick()
    assert Schedule.objects.get().every == "10m"


@database
@pytest.mark.parametrize("minutes", [2, -30])
def test_schedules_of_live_workers_stay_after_an_outage_and_a_step_of_the_clock(
    code: Code, clock: Clock, minutes: int
) -> None:
    one, same = Version(code, every="1h"), Version(code, every="1h")
    other = Version(code, every="1h", topic="t.other")
    for worker in (one, same, other):
        worker.tick()
    pause_schedule("t.other")
    clock.advance(minutes=minutes)
    for worker in (one, same, other):
        worker.tick()
    assert Schedule.objects.get(pk="t.other").paused


@database
def test_what_was_declared_by_a_clock_that_was_ahead_counts_no_more(code: Code, clock: Clock) -> None:
    clock.advance(days=1)
    Version(code, every="1h").tick()
    clock.advance(days=-1)
    Version(code, every="10m").tick()
    assert Schedule.objects.get().every == "10m"


@database
def test_a_removed_schedule_has_its_waiting_message_cancelled(
    code: Code, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = Version(code, every="1h"), Version(code, every="10m", topic="t.new")
    old.tick()
    new.tick()
    assert live("t.digest") == ["13:00"], "an old worker still declares it"
    for _ in range(5):
        clock.advance(seconds=20)
        new.tick()
    message = Message.objects.get(topic="t.digest")
    assert message.state == "cancelled"
    assert message.transitions.latest("number").reason == "schedule t.digest is declared by no worker any more"
    assert [schedule.pk for schedule in Schedule.objects.all()] == ["t.new"]
    assert "Schedule t.digest was deleted" in caplog.text


@database
@pytest.mark.parametrize("topic", ["t.digest", "t.new"])
@pytest.mark.parametrize("comes_back", [False, True])
def test_a_worker_that_stood_still_undoes_nothing_of_a_version_that_has_just_started(
    code: Code, clock: Clock, topic: str, comes_back: bool
) -> None:
    def version() -> Version:
        return Version(code, "5 12 * * *", topic=topic)

    old, new = Version(code, "0 3 * * *"), version()
    if comes_back:
        version().tick()
        clock.advance(seconds=1)
    for _ in range(2):
        old.tick()
        clock.advance(minutes=1)

    def then_new(execute: Any, sql: str, *given: Any) -> Any:
        answer = execute(sql, *given)
        if sql.startswith("SELECT") and Declarations._meta.db_table in sql and not ticked:
            ticked.append(sql)
            new.tick()
        return answer

    ticked: list[str] = []
    with connection.execute_wrapper(then_new):
        old.tick()
    assert ticked
    clock.advance(minutes=3)
    new.tick()
    assert "12:05" in occurrences(topic)


@database
def test_code_that_declares_nothing_any_more_removes_the_last_schedule(code: Code, clock: Clock) -> None:
    Version(code, every="1h").tick()
    for _time in range(4):
        clock.advance(minutes=1)
        # Each is a process of its own, as with cron alone.
        Version(code).tick()
    assert not Schedule.objects.exists()


@database
def test_a_worker_that_has_just_started_removes_nothing(code: Code, clock: Clock) -> None:
    Version(code, every="1h").tick()
    clock.advance(hours=3)
    other = Version(code, every="10m", topic="t.other")
    other.service = Declarer(DB, "w")
    other.tick()
    assert Schedule.objects.count() == 2


@database
def test_a_schedule_made_at_run_time_is_neither_changed_nor_removed_by_the_code(
    code: Code, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    create_schedule("t.digest", "t.digest", every="1d")
    Version(code, every="1h").tick()
    assert Schedule.objects.get().every == "1d"
    assert "it was made at run time" in caplog.text
    clock.advance(hours=1)
    Version(code).tick()
    assert Schedule.objects.get().every == "1d"


@database
def test_a_paused_schedule_stays_paused_through_a_deploy(code: Code, clock: Clock) -> None:
    Version(code, every="1h").tick()
    pause_schedule("t.digest")
    clock.advance(minutes=1)
    Version(code, every="10m").tick()
    schedule = Schedule.objects.get()
    assert (schedule.paused, schedule.every) == (True, "10m")
    assert live("t.digest") == []


@database
def test_rows_of_forgotten_versions_are_deleted(code: Code, clock: Clock) -> None:
    Version(code, every="1h").tick()
    clock.advance(days=8)
    Version(code, every="10m").tick()
    assert Declarations.objects.count() == 1


# --- the scheduler ----------------------------------------------------------------------------------------------------


@database
def test_the_scheduler_comes_back_when_the_next_occurrence_is_due(clock: Clock) -> None:
    scheduler = Scheduler(DB, "w")
    assert scheduler.tick() == tuning.look_interval
    create_schedule("s", "t.ok", every="1h")
    assert scheduler.tick() == tuning.look_interval
    clock.advance(minutes=59, seconds=58)
    assert scheduler.tick() == pytest.approx(2 + tuning.after_due)
    clock.advance(seconds=2)
    assert scheduler.tick() == tuning.after_due
    clock.advance(seconds=0.3)
    assert scheduler.tick() == pytest.approx(0.3)
    clock.advance(seconds=10)
    assert scheduler.tick() == tuning.waiting_interval
    assert occurrences() == ["13:00"]
    deliver(clock)
    assert scheduler.tick() == tuning.look_interval
    assert occurrences() == ["13:00", "14:00"]
    made = Message.objects.get(headers__occurrence="2050-03-01T14:00:00Z").transitions.get()
    assert made.actor == "worker:w"


@database
def test_a_schedule_that_waits_for_its_delivery_does_not_keep_others_waiting(clock: Clock) -> None:
    create_schedule("waits", "t.ok", every="1h")
    create_schedule("s", "t.ok", every="1h", starts_at=NOON + timedelta(hours=1, seconds=10.4))
    clock.advance(hours=1, seconds=10)
    assert Scheduler(DB, "w").tick() == pytest.approx(0.4 + tuning.after_due)


@database
def test_a_time_that_comes_during_a_look_is_found_soon(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    create_schedule("first", "t.ok", every="1h", missed="all")
    create_schedule("s", "t.ok", every="1h", starts_at=NOON + timedelta(hours=1, milliseconds=400), missed="all")
    advance = schedules.advance

    def slowly(using: str, name: str) -> None:
        advance(using, name)
        clock.advance(seconds=0.5)

    monkeypatch.setattr(schedules, "advance", slowly)
    clock.advance(hours=1)
    assert Scheduler(DB, "w").tick() <= tuning.after_due


def no_tenant() -> None:
    raise LookupError("no tenant")


def tenant_taken() -> None:
    raise IntegrityError("no tenant")


failing = pytest.mark.parametrize("fail", [no_tenant, tenant_taken, no_table])


class Picky(Middleware):
    """Middleware that has no tenant for one topic."""

    fail = staticmethod(no_tenant)

    @contextmanager
    def scheduling(self, drafts: Sequence[Draft]) -> Iterator[None]:
        if any(draft.topic == "t.fail" for draft in drafts):
            self.fail()
        yield


@database
@failing
def test_middleware_that_fails_for_one_schedule_does_not_stop_the_others(
    clock: Clock, settings: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, fail: Any
) -> None:
    monkeypatch.setattr(Picky, "fail", staticmethod(fail))
    create_schedule("a", "t.fail", every="1h", missed="all")
    create_schedule("s", "t.ok", every="1h", missed="all")
    before = settings.DELAYQ
    settings.DELAYQ = {**before, "MIDDLEWARE": [f"{__name__}.Picky"]}
    clock.advance(hours=1, minutes=30)
    scheduler = Scheduler(DB, "w")
    for _ in range(2):
        scheduler.tick()
    assert occurrences("a") == ["13:00"]
    assert occurrences("s") == ["13:00", "14:00"]
    assert len(re.findall("Schedule a makes no messages until it is corrected: .*no tenant", caplog.text)) == 1
    assert f"in {fail.__name__}" in caplog.text
    settings.DELAYQ = before
    scheduler.tick()
    assert occurrences("a") == ["13:00", "14:00"]


@pytest.mark.parametrize("wrong", [0, 1])
@database
def test_many_schedules_need_as_many_statements_as_few(clock: Clock, wrong: int) -> None:
    scheduler = Scheduler(DB, "w")
    scheduler.tick()
    for number in range(wrong):
        create_schedule(f"wrong{number}", "t.ok", every="1h")
        unguarded(Schedule).filter(pk=f"wrong{number}").update(cron="0 * * * *", every="", time_zone="Not/Here")
    counts = []
    for first, end in ((0, 2), (2, 20)):
        for number in range(first, end):
            create_schedule(f"s{number}", "t.ok", every="1h", missed="once" if number % 2 else "all")
        # The first of these looks finds out which schedule is wrong.
        for _look in range(2):
            clock.advance(hours=1)
            for name in Schedule.objects.values_list("pk", flat=True):
                deliver(clock, name)
            made = Occurrence.objects.count()
            with CaptureQueriesContext(connection) as statements:
                scheduler.tick()
            assert Occurrence.objects.count() == made + end
        counts.append(len(statements))
    # SQLite gets one for each message.
    assert counts[1] - counts[0] == (18 if connection.vendor == "sqlite" else 0)


@database
def test_many_wrong_schedules_do_not_hide_the_others(
    clock: Clock, tuned: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    tuned(advanced_together=2)
    for name in ("a", "b", "c"):
        create_schedule(name, "t.ok", every="10m", missed="all")
        # A host without this time zone.
        unguarded(Schedule).filter(pk=name).update(cron="0 * * * *", every="", time_zone="Not/Here")
    create_schedule("s", "t.ok", every="1h", missed="all")
    clock.advance(hours=2, minutes=30)
    scheduler = Scheduler(DB, "w")
    for _ in range(3):
        scheduler.tick()
    assert occurrences("a") == ["12:10"]
    assert occurrences("s") == ["13:00", "14:00", "15:00"]
    assert caplog.text.count("Schedule a makes no messages until it is corrected") == 1


@database
@failing
def test_a_declaration_whose_limit_key_fails_stops_no_other(
    code: Code, caplog: pytest.LogCaptureFixture, fail: Any
) -> None:
    def limit_key(message: Any) -> str:
        fail()
        return "tenant"

    @recurring("0 3 * * *", tz="UTC")
    @handler("t.tenants", limit=1, limit_key=limit_key)
    def sum_up(message: Any) -> None: ...

    declare("0 3 * * *")
    for _ in range(2):
        Declarer(DB, "w").tick()
    assert live("t.digest")
    assert caplog.text.count("Schedule t.tenants cannot be written as the code declares it") == 2
    assert f"in {fail.__name__}" in caplog.text


@database
def test_more_schedules_than_one_tick_advances_are_all_advanced(clock: Clock, tuned: Callable[..., None]) -> None:
    tuned(advanced_together=2)
    for number in range(5):
        create_schedule(f"s{number}", "t.ok", every="1h", missed="all")
    clock.advance(hours=1)
    scheduler = Scheduler(DB, "w")
    while not scheduler.tick():
        pass
    assert Occurrence.objects.count() == 10


def test_only_workers_with_the_role_have_the_services() -> None:
    made = services.RecurringExtension(DB, "w")
    assert list(made.services(frozenset({"consumer"}))) == []
    assert [service.name for service in made.services(frozenset({"scheduler"}))] == ["declarer", "scheduler"]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("hour", ' (write cron, such as "0 3 * * *")'),
        ("day_of_week", ' (write cron, such as "0 3 * * *")'),
        ("minutes", ' (write every, such as "10m")'),
        ("coalesce", " (write missed)"),
        ("timezone", " (write tz)"),
        ("evry", " (write every)"),
        # Those of messages.
        ("retry", ""),
        ("due_at", ""),
        ("reason", ""),
    ],
)
def test_an_argument_that_does_not_exist_names_the_one_that_is_meant(name: str, hint: str) -> None:
    given: Any = {name: 3}
    with pytest.raises(TypeError, match=rf"^@recurring has no such argument: {re.escape(name + hint)}$"):
        recurring(**given)
    with pytest.raises(TypeError, match=rf"^create_schedule\(\) has no such argument: {re.escape(name + hint)}$"):
        create_schedule("s", "t.ok", **given)
