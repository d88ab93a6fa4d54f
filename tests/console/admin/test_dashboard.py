"""The dashboard and the worker page: their contents, their queries, and their behaviour without an answer."""

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
from django.utils import translation

from django_delayq import pause_queue, schedule_message
from django_delayq.broker import publisher
from django_delayq.broker.base import ServerInfo
from django_delayq.broker.broker_tuning import USUAL
from django_delayq.broker.redis import RedisBroker
from django_delayq.console.admin import page_data, panels
from django_delayq.console.models import Rollup
from django_delayq.console.statements import TooSlow
from django_delayq.console.statistics import throughput, upcoming
from django_delayq.core import bounds, clock, in_tests
from django_delayq.core.findings import Level
from django_delayq.core.states import State
from django_delayq.inspector import stats, worker_list
from django_delayq.inspector.numbers import Capped, Caps, total
from django_delayq.models import Message
from django_delayq.record import reads
from testproject.servers import RedisServer
from tests.support.names import NAME, Names
from tests.support.rows import unguarded

from . import samples
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


def tiles(page: Any) -> dict[str, tuple[str, str]]:
    """Return the number and the note of each tile by its label."""
    return {tile.label: (tile.number, tile.note) for tile in page.context["tiles"]}


def problems(page: Any) -> list[tuple[str, str]]:
    """Return the level and the text of each banner."""
    levels = {Level.CRITICAL: "error", Level.WARN: "warning", Level.INFO: "info"}
    return [(levels[finding.level], finding.headline or finding.text) for finding, _link in page.context["banners"]]


def query(url: str) -> str:
    [found] = parse_qs(urlsplit(url).query)["q"]
    return found


# --- tiles and queues -------------------------------------------------------------------------------------------------


def test_the_tiles_count_and_lead_to_what_they_count(viewer: Client) -> None:
    samples.running()
    samples.scheduled()
    late(2)
    rolled(ago(minutes=5), consumed=30, dead=10)
    rolled(ago(hours=20), consumed=1000)
    rolled(ago(hours=30), consumed=1)

    page = viewer.get(URL)

    found = tiles(page)
    assert {label: number for label, (number, _note) in found.items()} == {
        "Scheduled": "3",
        "Ready": "0",
        "Overdue": "2",
        "Running": "1",
        "Dead in 24 h": "10",
        "Consumed in 24 h": "1,030",
    }
    assert re.match(r"oldest: [345]\d\.\d s", found["Overdue"][1])
    assert re.match(r"next in (59|60) m|next in 1 h", found["Scheduled"][1])
    links = {tile.label: query(tile.url) for tile in page.context["tiles"]}
    assert links["Scheduled"] == "state:scheduled"
    assert links["Overdue"] == "is:overdue"
    assert links["Dead in 24 h"] == "state:dead finished:<24h"
    assert all(viewer.get(tile.url).status_code == 200 for tile in page.context["tiles"])
    assert [tile.label for tile in page.context["tiles"] if tile.alert] == ["Overdue"]
    assert page.content.decode().count("dq-tile dq-alert") == 1


def test_a_message_that_is_due_but_not_overdue_is_ready(viewer: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "OVERDUE_AFTER", timedelta(seconds=3600))
    late(3, seconds=1800)
    page = viewer.get(URL)
    found, coming = tiles(page), page.context["coming"].value
    assert (found["Ready"][0], found["Overdue"][0]) == ("3", "0")
    assert (coming.overdue.number, coming.bars[0].number) == (Capped(0), Capped(3))
    assert "dq-alert" not in page.content.decode()


def test_the_tiles_count_up_to_a_cap() -> None:
    late(4)
    found = stats.take_snapshot(samples.DB, Caps(counted=3))
    assert found.queues["default"].overdue == Capped(3, more=True)
    assert str(found.overdue) == "3+"


def test_what_waits_in_a_paused_queue_is_no_alarm(viewer: Client) -> None:
    late(queue="letters", seconds=300)
    for act, note in ((None, "oldest: "), (pause_queue, "in paused queues")):
        if act is not None:
            act("letters")
        page = viewer.get(URL)
        [tile] = [tile for tile in page.context["tiles"] if tile.label == "Overdue"]
        assert (tile.number, tile.note.startswith(note), tile.alert) == ("1", True, act is None)
        assert ("The oldest overdue message has waited" in page.content.decode()) == (act is None)
        panels.forget()


def test_the_queues_with_most_overdue_come_first(viewer: Client) -> None:
    samples.scheduled(queue="a-calm-one")
    late(1, queue="busy")
    late(2, queue="busier", seconds=600)
    worker(queues=("busy",))
    pause_queue("busier")
    rolled(ago(minutes=5), queue="busy", consumed=7, late_50=7)

    page = viewer.get(URL)

    rows = page.context["queues"]
    assert [row.name for row in rows][:2] == ["busier", "busy"]
    assert (rows[0].paused, rows[1].paused) == (True, False)
    assert (rows[1].rate, rows[1].p95, rows[1].workers) == ("7", "≤ 50 ms", "1")
    assert rows[0].oldest.startswith("10 m")
    assert "a-calm-one" in {row.name for row in rows}


def test_an_empty_install_says_how_to_begin(viewer: Client) -> None:
    page = samples.text(viewer.get(URL))
    for words in ("No messages yet", "schedule_message(", "manage.py run_delayq", "Nothing falls due in this time."):
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
    assert len(found.bars) == bars
    assert (
        found.bars[-1].end - timedelta(seconds=size) <= now + timedelta(seconds=size * (bars - 1)) < found.bars[-1].end
    )
    assert found.overdue.number == Capped(2)
    for bar in found.bars:
        assert bar.start is not None
        rows = Message.objects.filter(due_at__gte=bar.start, due_at__lt=bar.end, due_at__gt=now)
        assert bar.number == Capped(rows.count())
    assert total(bar.number for bar in found.bars) == Capped(4)


def test_all_queues_are_in_it_and_the_rare_topics_are_one() -> None:
    for place in range(6):
        for _ in range(place + 1):
            schedule_message(f"t.{place}", delay="30m", queue=("one", "two")[place % 2])
    found = upcoming.count_upcoming(samples.DB, "hour", ago(seconds=0))
    assert total(bar.number for bar in found.bars) == Capped(21)
    assert found.topics(5) == ["t.5", "t.4", "t.3", "t.2", "t.1"]
    assert not found.sampled


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
    assert found.bars[0].number == Capped(30)
    assert found.peak is found.bars[0]
    assert found.bars[0].start == found.overdue.end


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
    assert found.bars[0].number.about
    assert 10 < found.bars[0].number.count < 100


def test_a_full_bar_is_a_guess_or_a_limit(tuned: Callable[..., None]) -> None:
    tuned(bar_rows=5, recounted=5)
    schedule(12)
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("ANALYZE delayq_message")
    found = upcoming.count_upcoming(samples.DB, "day", ago(seconds=0))
    peak = found.peak
    assert peak is not None
    if connection.vendor == "postgresql":
        assert peak.number.about or peak.number.more
        assert 5 <= peak.number.count <= 40
    else:
        assert peak.number == Capped(5, more=True)
    assert sum(peak.topics.values()) == peak.number.count


def test_the_bar_of_the_overdue_has_them_all_and_the_peak_is_told_in_words(viewer: Client) -> None:
    late(250)
    schedule(3)
    page = viewer.get(URL)
    bar = page.context["coming"].value.overdue
    assert (bar.number, dict(bar.topics)) == (Capped(250), {samples.TOPIC: 250})
    assert "Overdue: 250 messages" in page.content.decode()
    assert re.fullmatch(r"Peak .*\d\d:\d\d–\d\d:\d\d: 3 messages, less than one a second\.", page.context["peak"])


@pytest.mark.parametrize("zone", ["Asia/Kolkata", "Europe/Berlin"])
def test_bars_lead_to_their_messages(viewer: Client, settings: Any, monkeypatch: pytest.MonkeyPatch, zone: str) -> None:
    """It is the second time that clocks in Berlin show ten past two in this night, and the first bar has just begun."""
    settings.TIME_ZONE = zone
    monkeypatch.setattr(in_tests, "clock", lambda: datetime(2026, 10, 25, 1, 10, 1, tzinfo=UTC))
    [overdue], [ready], coming = late(), late(seconds=2), samples.scheduled(delay="30m")
    page = viewer.get(URL)
    bars = re.findall(r'<a href="([^"]*)" aria-label="[^"]*: 1 message"', page.content.decode())
    [tile] = [tile.url for tile in page.context["tiles"] if tile.label == "Ready"]
    for url, message in zip((tile, *map(unescape, bars)), (ready, overdue, ready, coming), strict=True):
        assert [row.pk for row in viewer.get(url).context["cl"].result_list] == [message.pk]


def test_a_problem_is_told_in_the_language_of_its_reader() -> None:
    def slow() -> None:
        raise TooSlow

    with translation.override("zh-hans"):
        assert "无法加载" in panels.load("slow", samples.DB, slow).problem
    assert "Could not load" in panels.load("slow", samples.DB, slow).problem


def test_a_window_that_is_none_is_the_hour(viewer: Client) -> None:
    page = viewer.get(URL, {"window": "century", "past": "<b>"})
    assert page.context["coming"].value.window == "hour"
    chosen = [choice.label for key in ("ahead", "back") for choice in page.context[key] if choice.chosen]
    assert chosen == ["Next hour", "Last hour"]
    week = viewer.get(URL, {"window": "week", "past": "day"})
    assert week.context["coming"].value.window == "week"
    assert {urlsplit(choice.url).query for choice in week.context["ahead"]} == {
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
    found = throughput.read_throughput(samples.DB, now, ("hour", "day", "week"))
    assert {name: one.sum.outcomes["consumed"] for name, one in found.items()} == {"hour": 7, "day": 15, "week": 31}
    hour = found["hour"]
    assert [tally.outcomes["consumed"] for tally in (hour.steps[-1], hour.steps[-2], hour.steps[0])] == [1, 2, 4]
    assert (hour.last(1).outcomes["consumed"], hour.last(60).outcomes["consumed"]) == (2, 6)
    assert (hour.sum.lateness(50), hour.sum.lateness(90), hour.sum.lateness(95)) == (0.01, 0.01, 1.0)


@pytest.mark.parametrize(("window", "length"), [("hour", 60), ("day", 24 * 60), ("week", 7 * 24 * 60)])
def test_a_window_counts_all_of_its_time(window: str, length: int) -> None:
    now = datetime(2026, 3, 4, 12, 20, tzinfo=UTC)
    rolled(now - timedelta(minutes=length - 2), dead=1)
    assert throughput.read_throughput(samples.DB, now, [window])[window].sum.outcomes["dead"] == 1


def test_a_bar_ends_by_clocks_that_were_changed(viewer: Client, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.TIME_ZONE = "Europe/Berlin"
    monkeypatch.setattr(in_tests, "clock", lambda: datetime(2026, 10, 25, 10, tzinfo=UTC))
    chart = viewer.get(URL, {"past": "week"}).context["throughput"]
    assert re.search("22:00–01:00.*01:00–03:00.*03:00–06:00", chart, re.DOTALL)


def test_charts_of_the_past_have_their_numbers_behind_them(viewer: Client) -> None:
    rolled(ago(minutes=5), consumed=1234, retried=56, late_20=100, late_more=10)
    page = viewer.get(URL)
    text = samples.text(page)
    assert "1,234" in page.context["throughput"]
    assert "≤ 20 ms" in page.context["lateness"]
    assert "&gt; 10 m" in page.context["lateness"]
    assert "Half of the messages started ≤ 20 ms after the due time" in text
    assert page.context["throughput"].count("not over yet") >= 1


# --- banners ----------------------------------------------------------------------------------------------------------


ALARMED = (URL, "/admin/delayq_console/health/", "/admin/delayq/queue/", WORKERS)


def test_an_emptied_redis_without_a_worker_alarms_on_every_page(viewer: Client, redis_client: redis.Redis) -> None:
    fill()
    samples.scheduled()
    samples.scheduled(queue="mail")
    redis_client.flushall()
    for page in ALARMED:
        panels.forget()
        [(level, text), (other, alone)] = problems(viewer.get(page))
        assert (level, other) == ("error", "warning")
        assert text.startswith("Redis may lack scheduled messages of default, mail: it was emptied")
        assert text.endswith("A worker fills Redis when it starts, and none is alive.")
        assert alone == "No worker is alive, so no message will be delivered: 2 are scheduled."
    assert "Contents critical not filled with default, mail" in samples.text(viewer.get(ALARMED[1]))
    worker(queues=("default", "mail"))
    panels.forget()
    [(level, text)] = problems(viewer.get(URL))
    assert level == "warning"
    assert text.endswith("live workers with the role loader fill Redis again.")
    fill()
    panels.forget()
    assert problems(viewer.get(URL)) == []
    assert "Contents ok filled from the record" in samples.text(viewer.get(ALARMED[1]))
    redis_client.hset("{delayq}:meta", "horizon", clock.to_tenths(ago(minutes=1)))
    panels.forget()
    assert "Contents warning not filled with default, mail" in samples.text(viewer.get(ALARMED[1]))


def test_queues_without_a_worker_share_one_banner(viewer: Client) -> None:
    fill()
    for name in ("a", "b", "c", "d", "e"):
        late(2, queue=name)
    [(level, text)] = problems(viewer.get(URL))
    assert level == "error"
    assert re.fullmatch(
        r"No worker is alive, so no message is delivered: 10 are overdue, the oldest by [3-5]\d\.\d s\.", text
    )
    worker(queues=("default",))
    worker("lost", queues=("a",), seen=600)
    panels.forget()
    page = viewer.get(URL)
    several = "No live worker serves the queues a, b, c and 2 more, and 10 of their messages are overdue."
    assert problems(page) == [("error", several)]
    assert [link.url for _finding, link in page.context["banners"]] == [WORKERS]
    worker("w/2", queues=("b", "c", "d", "e"))
    panels.forget()
    one = "No live worker serves queue a, and 2 of its messages are overdue."
    assert problems(viewer.get(URL)) == [("error", one)]
    worker("w/3", queues=("a",))
    panels.forget()
    assert problems(viewer.get(URL)) == []


def test_each_level_of_a_finding_has_its_look(viewer: Client) -> None:
    fill()
    late(seconds=250)
    page = viewer.get(URL).content.decode()
    looks = set(re.findall(r'class="(dq-banner dq-\w+|dq-badge dq-state-(?:critical|warn|ok|info))"', page))
    assert {"dq-banner dq-critical", "dq-badge dq-state-ok"} <= looks
    styled = set(
        re.findall(
            r"^\.delayq (\S+?)[ ,]", Path(str(finders.find("delayq_console/admin.css"))).read_text(), re.MULTILINE
        )
    )
    assert {".dq-banner.dq-critical", ".dq-banner.dq-warn"} <= styled
    assert {".dq-state-critical", ".dq-state-warn", ".dq-state-ok"} <= styled


def test_what_waits_for_long_is_a_banner_below_what_is_worse(viewer: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    fill()
    worker()
    late(seconds=250)
    page = viewer.get(URL)
    [(level, text)] = problems(page)
    assert level == "warning"
    assert re.match("The oldest overdue message has waited for 4 m [1-5]", text)
    assert query(page.context["banners"][0][1].url) == "is:overdue"
    panels.forget()
    monkeypatch.setattr(page_data, "pending_migrations", lambda using: ["0002_more"])
    first, second = problems(viewer.get(URL))
    assert first == ("error", "Migrations: pending: 0002_more; run migrate")
    assert second[0] == level


def test_a_paused_queue_says_by_whom_and_why_and_is_no_alarm(viewer: Client) -> None:
    fill()
    worker()
    late(seconds=250, queue="mail")
    pause_queue("mail", reason=HOSTILE)
    page = viewer.get(URL)
    [(level, text)] = problems(page)
    assert level == "info"
    assert text.startswith("Queue mail has been paused since ")
    assert text.endswith(f": “{HOSTILE}”")
    assert HOSTILE not in page.content.decode()


def test_a_redis_that_may_drop_messages_gets_a_banner(viewer: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    info = ServerInfo("7.2", "master", 1, 95, 100, "allkeys-lru", 0, "aof")
    monkeypatch.setattr(RedisBroker, "server_info", lambda self: info)
    texts = dict.fromkeys(text for _level, text in problems(viewer.get(URL)))
    assert [*texts] == [
        "Redis maxmemory-policy: allkeys-lru; Redis may drop waiting messages: set it to noeviction",
        "Redis uses 95 % of its memory limit.",
    ]


# --- what does not answer ---------------------------------------------------------------------------------------------


def test_the_pages_answer_without_redis_and_say_so(viewer: Client, redis_server: RedisServer) -> None:
    samples.scheduled()
    worker()
    redis_server.kill()
    page = viewer.get(URL)
    assert problems(page)[0] == (
        "error",
        "Redis does not answer: messages are delivered from the database, less precisely.",
    )
    assert tiles(page)["Scheduled"][0] == "1"
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
    assert problems(page) == []
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
        ("inspector.stats.take_snapshot", {"tiles", "queues"}),
        ("inspector.worker_list.list_workers", {"state"}),
        ("console.statistics.upcoming.count_upcoming", {"upcoming"}),
        ("console.statistics.throughput.read_throughput", {"past"}),
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
    dashboard = viewer.get(URL)
    assert {row.workers for row in dashboard.context["queues"]} == {"?"}


# --- workers ----------------------------------------------------------------------------------------------------------


def test_workers_are_alive_late_or_lost_in_words(viewer: Client) -> None:
    worker("w/alive", seen=1, queues=("default", "mail"))
    worker("w/late", seen=60)
    worker("w/lost", seen=600)
    page = viewer.get(WORKERS)
    assert [(row.name, row.label) for row in page.context["rows"]] == [
        ("w/lost", "lost"), ("w/late", "late"), ("w/alive", "alive"),
    ]  # fmt: skip
    text = samples.text(page)
    assert "1 alive 1 late 1 lost" in text
    assert "default, mail" in text
    assert "h:7" in text
    assert "1 alive, 1 late, 1 lost; latest heartbeat" in samples.text(viewer.get(URL))


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


# --- cost, access, safety ---------------------------------------------------------------------------------------------


def test_the_dashboard_runs_few_queries_and_none_twice_at_once(viewer: Client, tuned: Callable[..., None]) -> None:
    def asks() -> int:
        with CaptureQueriesContext(connection) as captured:
            assert viewer.get(URL).status_code == 200
        ours = [query["sql"] for query in captured.captured_queries if "delayq_" in query["sql"]]
        return len([sql for sql in ours if not re.match("SAVEPOINT|RELEASE", sql)])

    late(3)
    tuned(panel_kept=600, rollup_interval=1200)
    assert 0 < asks() <= 12
    assert asks() == 0


def test_numbers_add_up_to_the_least_exact() -> None:
    assert total([]) == Capped(0)
    assert total([Capped(1), Capped(2, about=True)]) == Capped(3, about=True)
    assert total([Capped(1, more=True), Capped(2, about=True)]) == Capped(3, more=True)
    assert str(Capped(8123, about=True)) == "about 8,120"
    assert str(Capped(3, more=True)) == "3+"


def test_topics_of_a_high_bar_are_told_to_be_estimated(viewer: Client, tuned: Callable[..., None]) -> None:
    schedule(4)
    assert "are estimated" not in samples.text(viewer.get(URL))
    panels.forget()
    tuned(bar_rows=30)
    page = viewer.get(URL)
    assert "are estimated" in samples.text(page)
    bar = page.context["coming"].value.peak
    assert (bar.number, dict(bar.topics)) == (Capped(4), {samples.TOPIC: 4})
