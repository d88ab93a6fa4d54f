"""*Now* and the worker page: their contents, their queries, and their behaviour without an answer."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import redis
from django.contrib.staticfiles import finders
from django.db import OperationalError, connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone, translation

from django_delayq import pause_queue, schedule_message
from django_delayq.broker import publisher
from django_delayq.broker.base import ServerInfo
from django_delayq.broker.broker_tuning import USUAL
from django_delayq.broker.redis import RedisBroker
from django_delayq.console.admin import charts, page_data, panels
from django_delayq.console.models import Rollup
from django_delayq.console.statements import TooSlow
from django_delayq.console.statistics import throughput, upcoming
from django_delayq.core import bounds, clock, in_tests
from django_delayq.core.actors import acting_as
from django_delayq.core.findings import Level
from django_delayq.core.states import State
from django_delayq.inspector import stats, worker_list
from django_delayq.inspector.numbers import Capped, Caps, total
from django_delayq.inspector.stats import LimitState, Lines
from django_delayq.models import Message
from django_delayq.record import reads
from testproject.servers import RedisServer
from tests.support.names import NAME, Names
from tests.support.rows import unguarded

from . import samples
from .conftest import logged_in, person
from .samples import fill, worker

pytestmark = pytest.mark.django_db

URL = "/admin/delayq_console/dashboard/"
WORKERS = "/admin/delayq/worker/"
HOSTILE = '<script>"&'


def ago(**span: float) -> datetime:
    return reads.now(samples.DB) - timedelta(**span)


def late(number: int = 1, *, seconds: float = 30, **options: Any) -> list[Message]:
    """Create messages that should have started so many seconds ago."""
    return samples.late(*samples.many(number, **options), seconds=seconds)


def schedule(number: int) -> None:
    """Create messages that fall due at the same moment."""
    due = ago(minutes=-30)
    for _ in range(number):
        schedule_message(samples.TOPIC, due_at=due)


def rolled(at: datetime, *, topic: str = "t", queue: str = "default", seconds: int = 60, **counts: int) -> None:
    Rollup.objects.create(at=at.replace(second=0, microsecond=0), seconds=seconds, queue=queue, topic=topic, **counts)


def tiles(page: Any) -> dict[str, Any]:
    """Return the tiles by their labels."""
    return {tile.label: tile for tile in page.context["tiles"]}


def rows(page: Any) -> list[tuple[Level, str]]:
    """Return the level and the text of each row of what needs somebody."""
    return [(row.level, samples.plain(row.text)) for row in page.context["rows"]]


def query(url: str) -> str:
    [found] = parse_qs(urlsplit(url).query)["q"]
    return found


# --- tiles and queues -------------------------------------------------------------------------------------------------


WAITING = "Waiting past its time"


def test_the_tiles_count_and_lead_to_what_they_count(viewer: Client) -> None:
    samples.running()
    samples.scheduled()
    late(2)
    rolled(ago(minutes=3), consumed=30, dead=10, late_5=30, late_500=10)
    rolled(ago(hours=20), consumed=1000)
    rolled(ago(hours=30), consumed=1000, dead=2)

    found = tiles(viewer.get(URL))

    assert {label: tile.number for label, tile in found.items()} == {
        "Delivered in 24 h": "1,030",
        "Starts late by (p95)": "≤ 500 ms",
        WAITING: "2",
        "Failed for good in 24 h": "10",
    }
    delivered, late_by, waiting, failed = found.values()
    assert (delivered.unit, delivered.change, delivered.note) == ("6 a minute now", "▲ 3%", "on the day before")
    assert late_by.note == "half of them ≤ 5 ms"
    assert waiting.note == "gone in about 1 min"
    assert (failed.unit, failed.change) == ("1.0%", "▲ 5 ×")
    assert query(waiting.url) == "is:overdue"
    assert query(failed.url) == "state:dead finished:<24h"
    assert all(viewer.get(tile.url).status_code == 200 for tile in (delivered, waiting, failed))


def test_what_is_due_a_moment_ago_is_not_late_but_about_to_begin(
    viewer: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "OVERDUE_AFTER", timedelta(seconds=3600))
    late(3, seconds=1800)
    page = viewer.get(URL)
    waiting = tiles(page)[WAITING]
    assert (waiting.number, waiting.note) == ("0", "every message is on time")
    assert upcoming.count_upcoming(samples.DB, "hour", ago(seconds=0))[0].number == Capped(3)


def test_the_tiles_count_up_to_a_cap() -> None:
    late(4)
    found = stats.take_snapshot(samples.DB, Caps(counted=3))
    assert found.queues["default"].overdue == Capped(3, more=True)
    assert str(found.overdue) == "3+"


def test_what_waits_in_a_paused_queue_is_told_apart(viewer: Client) -> None:
    fill()
    worker(queues=("letters",))
    late(queue="letters", seconds=300)
    page = viewer.get(URL)
    assert (tiles(page)[WAITING].number, tiles(page)[WAITING].unit) == ("1", "")
    assert "1 overdue" in page.context["river"]
    panels.forget()
    pause_queue("letters")
    page = viewer.get(URL)
    waiting = tiles(page)[WAITING]
    assert (waiting.number, waiting.unit, waiting.note) == ("0", "+ 1 paused", "every message is on time")
    assert "1 paused" in page.context["river"]
    [(level, text)] = rows(page)
    assert level == Level.WARN
    assert text.startswith("letters is paused: 1 message waits, the oldest for 5 m")


def test_the_queues_that_need_somebody_come_first(viewer: Client, operator: Client) -> None:
    samples.scheduled(queue="a-calm-one")
    late(1, queue="busy")
    late(2, queue="busier", seconds=600)
    worker(queues=("busy",))
    pause_queue("busier")
    rolled(ago(minutes=3), queue="busy", consumed=7, retried=1, late_50=7)

    page = viewer.get(URL)

    shown = page.context["queues"]
    assert [row.name for row in shown][:2] == ["busier", "busy"]
    assert [(row.paused, row.unserved) for row in shown[:2]] == [(True, True), (False, False)]
    assert (shown[1].rate, shown[1].p95, shown[1].failed, shown[1].failing) == ("1", "≤ 50 ms", "12.5%", True)
    assert "dq-spark" in shown[1].spark
    assert "a-calm-one" in {row.name for row in shown}
    assert [row.resume for row in shown if row.resume] == []
    pauser = logged_in(person("paul", "view_message", "pause_queue"))
    resume = samples.admin_url("queue_resume", "busier")
    assert [row.resume for row in pauser.get(URL).context["queues"] if row.resume] == [resume]


def test_an_empty_install_says_how_to_begin(viewer: Client) -> None:
    page = samples.text(viewer.get(URL))
    for words in ("All is well: 0 delivered in 24 h", "No messages yet", "schedule_message(", "manage.py run_delayq"):
        assert words in page
    workers = samples.text(viewer.get(WORKERS))
    assert "No worker is running, and none was lost in the last day." in workers
    assert "python manage.py run_delayq" in workers
    panels.forget()
    samples.cancelled()
    assert "No messages yet" not in samples.text(viewer.get(URL))


# --- what comes next --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "bars"), [("hour", 61), ("day", 49), ("week", 57)])
def test_each_message_is_in_the_bar_of_its_due_time(window: str, bars: int) -> None:
    now = ago(seconds=0)
    size = throughput.WINDOWS[window].seconds
    for place in (1, 5, 5, bars - 2):
        samples.scheduled(delay=size * place)
    late(2)
    found = upcoming.count_upcoming(samples.DB, window, now)
    assert len(found) == bars
    assert found[-1].end - timedelta(seconds=size) <= now + timedelta(seconds=size * (bars - 1)) < found[-1].end
    for bar in found:
        rows = Message.objects.filter(due_at__gte=bar.start, due_at__lt=bar.end, due_at__gt=now)
        assert bar.number == Capped(rows.count())
    assert total(bar.number for bar in found) == Capped(4)


def test_all_queues_are_in_it() -> None:
    for place in range(6):
        schedule_message("t", delay="30m", queue=("one", "two")[place % 2])
    found = upcoming.count_upcoming(samples.DB, "hour", ago(seconds=0))
    assert total(bar.number for bar in found) == Capped(6)


@pytest.mark.parametrize("state", [State.CONSUMED, State.CANCELLED])
def test_a_full_bar_counts_only_what_still_waits(tuned: Callable[..., None], state: State) -> None:
    """Of the half hour that has begun most is over: consumed before now, or cancelled before it was due."""
    tuned(bar_rows=10)
    now = datetime(2050, 3, 4, 12, 20, tzinfo=UTC)
    times = {State.CONSUMED: now - timedelta(minutes=15), State.CANCELLED: now + timedelta(minutes=5)}
    over = samples.many(500, delay="1h")
    ends = {"state": state, "finished_at": now, "due_at": times[state]}
    unguarded(Message).filter(pk__in=[message.pk for message in over]).update(**ends)
    waiting = samples.many(30, delay="1h")
    unguarded(Message).filter(pk__in=[message.pk for message in waiting]).update(due_at=now + timedelta(minutes=5))
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("ANALYZE delayq_message")
    found = upcoming.count_upcoming(samples.DB, "day", now)
    assert found[0].number == Capped(30)
    assert found[0].start == stats.overdue_cutoff(now)


@pytest.mark.postgresql("estimates what was not counted")
def test_the_estimate_of_the_first_bar_begins_now(tuned: Callable[..., None]) -> None:
    tuned(bar_rows=10, recounted=10)
    now = datetime(2050, 3, 4, 12, 20, tzinfo=UTC)
    over, waiting = samples.many(500, delay="1h"), samples.many(30, delay="1h")
    ends = {"state": State.CONSUMED, "finished_at": now, "due_at": now - timedelta(minutes=15)}
    unguarded(Message).filter(pk__in=[message.pk for message in over]).update(**ends)
    unguarded(Message).filter(pk__in=[message.pk for message in waiting]).update(due_at=now + timedelta(minutes=5))
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE delayq_message")
    found = upcoming.count_upcoming(samples.DB, "day", now)
    assert found[0].number.about
    assert 10 < found[0].number.count < 100


def test_a_full_bar_is_a_guess_or_a_limit(tuned: Callable[..., None]) -> None:
    tuned(bar_rows=5, recounted=5)
    schedule(12)
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("ANALYZE delayq_message")
    found = upcoming.count_upcoming(samples.DB, "day", ago(seconds=0))
    peak = max(found, key=lambda bar: bar.number.count)
    if connection.vendor == "postgresql":
        assert peak.number.about or peak.number.more
        assert 5 <= peak.number.count <= 40
    else:
        assert peak.number == Capped(5, more=True)


def test_past_and_future_stand_in_one_chart_beside_the_line_of_now(viewer: Client) -> None:
    late(250)
    schedule(3)
    rolled(ago(minutes=5), consumed=40, retried=2, dead=1, expired=9)
    river = viewer.get(URL).context["river"]
    names = re.findall(r"</svg> ([^<]*)</li>", river)
    assert names == ["delivered", "retried", "dead", "falls due", "most that the workers did: 43 a minute"]
    assert re.search(r": 40 delivered, 2 retried, 1 dead</title>", river)
    assert re.search(r": 3 messages</title>", river)
    assert "43 runs ended in this time, and 3 messages fall due." in river
    assert '<p class="dq-flag">250 overdue</p>' in river
    # Behind are 61 steps, the last of which is not over, and ahead as many.
    assert river.count("<g><title>") + river.count("<a href=") == 122
    assert 'class="dq-now" x1="50%"' in river


@pytest.mark.parametrize("zone", ["Asia/Kolkata", "Europe/Berlin"])
def test_bars_lead_to_their_messages(viewer: Client, settings: Any, monkeypatch: pytest.MonkeyPatch, zone: str) -> None:
    """It is the second time that clocks in Berlin show ten past two in this night, and the first bar has just begun."""
    settings.TIME_ZONE = zone
    monkeypatch.setattr(in_tests, "clock", lambda: datetime(2026, 10, 25, 1, 10, 1, tzinfo=UTC))
    [ready], coming = late(seconds=2), samples.scheduled(delay="30m")
    page = viewer.get(URL)
    bars = re.findall(r'<a href="([^"]*)" aria-label="[^"]*: 1 message"', page.content.decode())
    for url, message in zip(map(unescape, bars), (ready, coming), strict=True):
        assert [row.pk for row in viewer.get(url).context["cl"].result_list] == [message.pk]


def test_a_problem_is_told_in_the_language_of_its_reader() -> None:
    def slow() -> None:
        raise TooSlow

    with translation.override("zh-hans"):
        assert "无法加载" in panels.load("slow", samples.DB, slow).problem
    assert "Could not load" in panels.load("slow", samples.DB, slow).problem


def test_a_window_that_is_none_is_the_hour(viewer: Client) -> None:
    page = viewer.get(URL, {"window": "century", "past": "<b>"})
    assert [choice.label for choice in page.context["windows"] if choice.chosen] == ["hour"]
    week = viewer.get(URL, {"window": "week", "past": "day"})
    assert week.context["river_title"] == "A week behind, a week ahead"
    assert {urlsplit(choice.url).query for choice in week.context["windows"]} == {
        f"window={window}&past=day" for window in ("hour", "day", "week")
    }


# --- what was ---------------------------------------------------------------------------------------------------------


def test_rollups_are_summed_into_the_steps_of_each_window() -> None:
    now = datetime(2026, 3, 4, 12, 34, 56, tzinfo=UTC)
    rolled(now, consumed=1, late_10=9, late_1000=1)
    rolled(now - timedelta(minutes=1), consumed=2, topic="other")
    rolled(now - timedelta(minutes=60), consumed=4)
    rolled(now - timedelta(minutes=61), consumed=8)
    rolled((now - timedelta(days=4)).replace(minute=0), seconds=3600, consumed=16)
    rolled(now - timedelta(days=8), seconds=3600, consumed=32)
    windows = ("hour", "day", "week")
    found = throughput.read_throughput(samples.DB, now, windows, windows)
    assert {name: one.sum.outcomes["consumed"] for name, one in found.items()} == {"hour": 7, "day": 15, "week": 31}
    hour = found["hour"]
    assert [tally.outcomes["consumed"] for tally in (hour.steps[-1], hour.steps[-2], hour.steps[0])] == [1, 2, 4]
    assert (hour.last(1).outcomes["consumed"], hour.last(60).outcomes["consumed"]) == (2, 6)
    assert (hour.sum.lateness(50), hour.sum.lateness(90), hour.sum.lateness(95)) == (0.01, 0.01, 1.0)
    assert {name: one.before["consumed"] for name, one in found.items()} == {"hour": 8, "day": 0, "week": 32}
    # Rollups of hours tell nothing about a minute.
    assert {name: one.most for name, one in found.items()} == {"hour": 4, "day": 8, "week": 8}


@pytest.mark.parametrize(("window", "length"), [("hour", 60), ("day", 24 * 60), ("week", 7 * 24 * 60)])
def test_a_window_counts_all_of_its_time(window: str, length: int) -> None:
    now = datetime(2026, 3, 4, 12, 20, tzinfo=UTC)
    rolled(now - timedelta(minutes=length - 2), dead=1)
    assert throughput.read_throughput(samples.DB, now, [window])[window].sum.outcomes["dead"] == 1


def test_a_bar_ends_by_clocks_that_were_changed(viewer: Client, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.TIME_ZONE = "Europe/Berlin"
    monkeypatch.setattr(in_tests, "clock", lambda: datetime(2026, 10, 25, 10, tzinfo=UTC))
    chart = viewer.get(URL, {"window": "week"}).context["river"]
    assert re.search("22:00–01:00.*01:00–03:00.*03:00–06:00", chart, re.DOTALL)


def test_the_chart_has_its_numbers_behind_it(viewer: Client) -> None:
    rolled(ago(minutes=5), consumed=1234, retried=56)
    river = viewer.get(URL).context["river"]
    assert re.search(
        r'<th scope="row">[\d:–]*</th><td class="dq-number">1,234</td><td class="dq-number">56</td>', river
    )
    assert river.count("not over yet") >= 1


# --- what needs somebody ----------------------------------------------------------------------------------------------


HEALTH = "/admin/delayq_console/health/"


def test_all_is_well_when_nothing_needs_anybody(viewer: Client) -> None:
    fill()
    worker()
    rolled(ago(minutes=3), consumed=1234, retried=20)
    page = viewer.get(URL)
    assert (rows(page), page.context["title"]) == ([], "All is well: 1,234 delivered in 24 h")
    panels.forget()
    late(queue="mail", seconds=300)
    assert viewer.get(URL).context["title"] == "One thing needs you"
    panels.forget()
    late(seconds=300)
    assert viewer.get(URL).context["title"] == "2 things need you"


def test_an_emptied_redis_without_a_worker_is_told(viewer: Client, redis_client: redis.Redis) -> None:
    fill()
    samples.scheduled()
    samples.scheduled(queue="mail")
    redis_client.flushall()
    page = viewer.get(URL)
    lacks = (
        "Redis may lack scheduled messages of default, mail: it was emptied, or no worker with the role loader fills it"
    )
    alone = "No worker is alive, so no message will be delivered: 2 are scheduled."
    assert rows(page) == [(Level.CRITICAL, f"{lacks}."), (Level.WARN, alone)]
    assert "A worker fills Redis when it starts, and none is alive." in page.context["rows"][0].note
    assert [row.url for row in page.context["rows"]] == [HEALTH, WORKERS]
    assert "Contents critical not filled with default, mail" in samples.text(viewer.get(HEALTH))
    worker(queues=("default", "mail"))
    panels.forget()
    page = viewer.get(URL)
    assert rows(page) == [(Level.WARN, f"{lacks}.")]
    assert "live workers with the role loader fill Redis again." in page.context["rows"][0].note
    fill()
    panels.forget()
    assert rows(viewer.get(URL)) == []
    assert "Contents ok filled from the record" in samples.text(viewer.get(HEALTH))
    redis_client.hset("{delayq}:meta", "horizon", clock.to_tenths(ago(minutes=1)))
    panels.forget()
    assert "Contents warning not filled with default, mail" in samples.text(viewer.get(HEALTH))


def test_queues_without_a_worker_share_one_row(viewer: Client) -> None:
    fill()
    for name in ("a", "b", "c", "d", "e"):
        late(2, queue=name, seconds=250)
    [(level, text)] = rows(viewer.get(URL))
    assert level == Level.CRITICAL
    assert re.fullmatch(
        r"No worker is alive, so no message is delivered: 10 are overdue, the oldest by 4 m [1-5]\d s\.", text
    )
    worker(queues=("default",))
    worker("lost", queues=("a",), seen=600)
    panels.forget()
    page = viewer.get(URL)
    several = "No live worker serves the queues a, b, c and 2 more, and 10 of their messages are overdue."
    assert rows(page) == [(Level.CRITICAL, several)]
    assert [row.url for row in page.context["rows"]] == [WORKERS]
    worker("w/2", queues=("b", "c", "d", "e"))
    panels.forget()
    one = "No live worker serves queue a, and 2 of its messages are overdue."
    # What is overdue elsewhere has another cause.
    assert next(text for _level, text in rows(viewer.get(URL))) == one
    worker("w/3", queues=("a",))
    panels.forget()
    assert [text.partition(",")[0] for _level, text in rows(viewer.get(URL))] == ["10 messages are overdue"]


def test_each_level_of_a_row_has_its_look(viewer: Client) -> None:
    fill()
    late(seconds=250)
    page = viewer.get(URL).content.decode()
    looks = set(re.findall(r'class="dq-thing (dq-\w+)"|class="dq-text (dq-\w+)"', page))
    assert {("dq-critical", ""), ("", "dq-ok")} <= looks
    sheet = Path(str(finders.find("delayq_console/admin.css"))).read_text()
    for kind in ("dq-critical", "dq-warn", "dq-ok", "dq-info", "dq-state-critical", "dq-state-warn", "dq-state-ok"):
        assert f".{kind}" in sheet


def test_what_waits_for_long_stands_below_what_is_worse(viewer: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    fill()
    worker()
    late(seconds=250)
    page = viewer.get(URL)
    [(level, text)] = rows(page)
    assert level == Level.WARN
    assert re.match("1 message is overdue, for 4 m [1-5]", text)
    assert page.context["rows"][0].spark == ""
    assert query(page.context["rows"][0].url) == "is:overdue"
    panels.forget()
    monkeypatch.setattr(page_data, "pending_migrations", lambda using: ["0002_more"])
    first, second = rows(viewer.get(URL))
    assert first == (Level.CRITICAL, "Migrations: pending: 0002_more; run migrate")
    assert second[0] == level


@pytest.mark.parametrize("zone", ["UTC", "Asia/Kathmandu"])
def test_each_minute_counts_in_its_step_of_local_time(db: None, zone: str) -> None:
    with timezone.override(zone):
        now = reads.now(samples.DB)
        minutes = [ago(minutes=10 + 7 * place).replace(second=0, microsecond=0) for place in range(30)]
        for place, at in enumerate(minutes):
            rolled(at, consumed=1 + place)
        for past in throughput.read_throughput(samples.DB, now, ("hour", "day", "week"), ("day",)).values():
            wanted = [0] * len(past.steps)
            for place, at in enumerate(minutes):
                if at >= past.start:
                    wanted[(at - past.start) // past.step] += 1 + place
            assert [step["consumed"] for step in past.steps] == wanted
            assert past.most == (30 if past.window == "day" else 0)


def test_what_is_overdue_has_a_line_of_what_began_late_in_the_last_hour(viewer: Client) -> None:
    fill()
    worker(queues=("a", "b"))
    late(seconds=250, queue="a")
    rolled(ago(minutes=20), queue="a", consumed=4, late_10000=3, late_5=1)
    rolled(ago(minutes=20), queue="b", consumed=2, late_more=2)
    [row] = viewer.get(URL).context["rows"]
    assert row.spark == charts.spark([5 if place == 40 else 0 for place in range(60)], "warn")


@pytest.mark.parametrize("of", ["topic", "queue"])
def test_a_limit_that_is_full_for_long_has_a_line_of_what_ended_under_it(
    viewer: Client, of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill()
    worker()
    name = {"topic": "t.full", "queue": "full"}[of]
    line = LimitState(f"{of} {name}", None, waiting=Capped(7), oldest=ago(hours=2))
    monkeypatch.setattr(stats, "lines_in", lambda using, seen, most: Lines(Capped(1), (line,), (line,)))
    rolled(ago(minutes=20), queue="full", topic="t.full", consumed=4)
    rolled(ago(minutes=20), queue="other", topic="t.other", consumed=9)
    [row] = viewer.get(URL).context["rows"]
    assert f"{of} {name}" in row.text
    assert row.spark == charts.spark([4 if place == 40 else 0 for place in range(60)], "warn")


def test_a_pause_with_a_backlog_says_by_whom_and_why_and_has_a_button(viewer: Client) -> None:
    fill()
    worker(queues=("mail", "calm"))
    late(2, seconds=250, queue="mail")
    samples.scheduled(queue="calm")
    with acting_as("user:anna"):
        pause_queue("mail", reason=HOSTILE)
        pause_queue("calm")
    rolled(ago(minutes=20), queue="mail", consumed=7)
    page = viewer.get(URL)
    [row] = page.context["rows"]
    assert re.fullmatch(r"mail is paused: 2 messages wait, the oldest for 4\sm\s[1-5]\d\ss", row.text)
    assert re.fullmatch(rf"by anna · [\d.]+\sm?s ago · “{HOSTILE}”", row.note)
    assert "dq-spark dq-warn" in row.spark
    assert HOSTILE not in page.content.decode()
    assert (row.label, row.url) == ("See queues", "/admin/delayq/queue/")
    pauser = logged_in(person("paul", "view_message", "pause_queue"))
    [row] = pauser.get(URL).context["rows"]
    assert (row.label, row.url) == ("Resume…", samples.admin_url("queue_resume", "mail"))
    assert "2 paused" in samples.text(pauser.get("/admin/delayq/message/"))


@pytest.mark.parametrize(
    ("runs", "failures", "before", "told"),
    [(900, 100, 1, True), (960, 40, 1, False), (900, 100, 40, False), (1, 4, 0, False)],
    ids=["far more than before", "less than 5 %", "as before", "too few to tell"],
)
def test_a_topic_that_fails_far_more_than_the_day_before_is_told(
    viewer: Client, runs: int, failures: int, before: int, told: bool
) -> None:
    fill()
    worker()
    rolled(ago(hours=9), topic="pay", consumed=1000 - before, retried=before)
    rolled(ago(minutes=50), topic="pay", consumed=runs // 2)
    rolled(
        ago(minutes=20), topic="pay", consumed=runs - runs // 2, retried=failures // 2, dead=failures - failures // 2
    )
    rolled(ago(minutes=20), topic="fine", consumed=5000)
    page = viewer.get(URL)
    if not told:
        assert rows(page) == []
        return
    [row] = page.context["rows"]
    assert (row.level, row.text) == (Level.CRITICAL, "pay fails: 10% of 1,000 in the last hour")
    assert re.fullmatch(r"0\.1% in the day before · since \d\d:\d\d", row.note)
    assert "dq-spark dq-critical" in row.spark
    assert (row.label, row.url) == ("See failures", "/admin/delayq_console/deadletters/")


def test_a_redis_that_may_drop_messages_needs_somebody(viewer: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    info = ServerInfo("7.2", "master", 1, 95, 100, "allkeys-lru", 0, "aof")
    monkeypatch.setattr(RedisBroker, "server_info", lambda self: info)
    assert [*dict.fromkeys(text for _level, text in rows(viewer.get(URL)))] == [
        "Redis maxmemory-policy: allkeys-lru; Redis may drop waiting messages: set it to noeviction",
        "Redis uses 95 % of its memory limit.",
    ]


# --- what does not answer ---------------------------------------------------------------------------------------------


def test_the_pages_answer_without_redis_and_say_so(viewer: Client, redis_server: RedisServer) -> None:
    samples.scheduled()
    worker()
    redis_server.kill()
    page = viewer.get(URL)
    assert rows(page)[0] == (
        Level.CRITICAL,
        "Redis does not answer: messages are delivered from the database, less precisely.",
    )
    assert str(page.context["queues"][0].scheduled) == "1"
    assert "does not answer:" in samples.text(page)
    assert viewer.get(WORKERS).status_code == 200


@pytest.mark.parametrize("page", [URL, "/admin/delayq_console/health/", "a message"])
def test_no_page_stands_while_the_name_of_redis_is_not_found(
    viewer: Client, names: Names, settings: Any, page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = samples.scheduled()
    monkeypatch.setattr(publisher, "usual", USUAL)
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": f"redis://{NAME}:6379/0"}
    shown = viewer.get(samples.admin_url("message_change", message.pk) if page == "a message" else page, follow=True)
    assert shown.status_code == 200
    assert "not connected" in samples.text(shown) or "does not answer" in samples.text(shown)
    assert names.asked
    assert not names.gave_up


def test_a_project_without_redis_has_no_complaint(viewer: Client, settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": None}
    page = viewer.get(URL)
    assert rows(page) == []
    assert "none (delivery by query)" in samples.text(page)


def slow(*args: Any, **kwargs: Any) -> Any:
    with connection.cursor() as cursor:
        cursor.execute("SELECT set_config('statement_timeout', '20', true)")
        cursor.execute("SELECT pg_sleep(20)")


def broken(*args: Any, **kwargs: Any) -> Any:
    raise OperationalError("gone")


@pytest.mark.parametrize(
    ("panel", "regions"),
    [
        ("inspector.stats.take_snapshot", {"rows", "queues"}),
        ("inspector.worker_list.list_workers", {"rows", "state"}),
        ("console.statistics.upcoming.count_upcoming", {"river"}),
        ("console.statistics.throughput.read_throughput", {"rows", "river"}),
        ("console.statistics.throughput.read_failing", {"rows"}),
    ],
)
@pytest.mark.parametrize(
    "fault", [pytest.param(slow, marks=pytest.mark.postgresql("ends a statement by itself")), broken]
)
def test_a_panel_that_gets_no_answer_says_so_and_spoils_no_other(
    viewer: Client, monkeypatch: pytest.MonkeyPatch, panel: str, regions: set[str], fault: Callable[..., Any]
) -> None:
    late()
    rolled(ago(minutes=5), consumed=3)
    monkeypatch.setattr(f"django_delayq.{panel}", fault)
    page = viewer.get(URL)
    assert page.status_code == 200
    parts = re.split(r'data-dq-region="', page.content.decode())[1:]
    complaining = {part.split('"')[0] for part in parts if "Could not load" in part}
    assert complaining == regions
    assert ("took longer than" in page.content.decode()) == (fault is slow)
    assert viewer.get(URL).status_code == 200


def test_a_worker_that_is_gone_leads_to_the_others(viewer: Client) -> None:
    response = viewer.get(samples.admin_url("worker_change", "gone"), follow=True)
    assert response.redirect_chain == [(WORKERS, 302)]
    assert samples.said(response) == ["There is no worker gone. It ended, or has been lost for more than a day."]


def test_workers_that_cannot_be_read_are_not_none(viewer: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    worker()
    monkeypatch.setattr(worker_list, "list_workers", broken)
    text = samples.text(viewer.get(WORKERS))
    assert "The number of workers is not known." in text
    assert "No worker has shown itself" not in text
    assert " 0 " not in text
    fill()
    panels.forget()
    assert viewer.get(URL).context["title"] == "Not everything could be read"


# --- workers ----------------------------------------------------------------------------------------------------------


def test_workers_are_alive_late_or_lost_in_words(viewer: Client) -> None:
    worker("w/alive", seen=1, queues=("default", "mail"))
    worker("w/late", seen=60)
    worker("w/lost", seen=600)
    page = viewer.get(WORKERS)
    assert [(row.worker.name, row.label) for row in page.context["rows"]] == [
        ("w/lost", "lost"), ("w/late", "late"), ("w/alive", "alive"),
    ]  # fmt: skip
    text = samples.text(page)
    assert "1 alive 1 late 1 lost" in text
    assert "default, mail" in text
    assert "h:7" in text
    assert "1 late, 1 lost" in samples.text(viewer.get(URL))


def test_a_worker_shows_what_it_runs_some_of_it(viewer: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    worker("host/1-worker")
    messages = [samples.running() for _ in range(7)]
    page = viewer.get(WORKERS)
    [row] = page.context["rows"]
    assert [text for text, _url in row.running] == [f"{m.topic} #{m.pk}" for m in messages[:5]]
    assert row.running[0][1] == samples.change_url(messages[0])
    assert "and 2 more" in samples.text(page)
    panels.forget()
    monkeypatch.setattr(worker_list, "running", partial(worker_list.running, caps=Caps(running=3)))
    assert "Only 3 of the running messages" in samples.text(viewer.get(WORKERS))


def test_threads_are_squares_and_the_busy_ones_are_full(viewer: Client) -> None:
    worker("host/1-worker", threads=4)
    samples.running()
    page = viewer.get(URL)
    assert "1 of 4 threads busy" in samples.text(page)
    assert page.content.decode().count('<i class="dq-busy">') == 1


# --- cost, access, safety ---------------------------------------------------------------------------------------------


def test_the_dashboard_runs_few_queries_and_none_twice_at_once(viewer: Client, tuned: Callable[..., None]) -> None:
    def asks() -> int:
        with CaptureQueriesContext(connection) as captured:
            assert viewer.get(URL).status_code == 200
        ours = [query["sql"] for query in captured.captured_queries if "delayq_" in query["sql"]]
        return len([sql for sql in ours if not re.match("SAVEPOINT|RELEASE", sql)])

    late(3)
    tuned(panel_kept=600, rollup_interval=1200)
    assert 0 < asks() <= 15
    assert asks() == 0


def test_numbers_add_up_to_the_least_exact() -> None:
    assert total([]) == Capped(0)
    assert total([Capped(1), Capped(2, about=True)]) == Capped(3, about=True)
    assert total([Capped(1, more=True), Capped(2, about=True)]) == Capped(3, more=True)
    assert str(Capped(8123, about=True)) == "about 8,120"
    assert str(Capped(3, more=True)) == "3+"
