"""The times of schedules: clocks that are changed, leap days, intervals, and expressions that are none."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from zoneinfo import ZoneInfo

import pytest
from django.core.exceptions import ImproperlyConfigured
from hypothesis import given
from hypothesis import strategies as st

from django_delayq.core.exceptions import InvalidMessage
from django_delayq.recurring import Schedule
from django_delayq.recurring.times import Times

BERLIN = "Europe/Berlin"
LORD_HOWE = "Australia/Lord_Howe"


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def following(times: Times, after: str, count: int) -> list[str]:
    return [f"{at:%Y-%m-%d %H:%M}" for at in islice(times.following(utc(after)), count)]


# With five fields and with six, of which the first are the seconds.
HALF_PAST_TWO = pytest.mark.parametrize("cron", ["30 2 * * *", "0 30 2 * * *"])


@HALF_PAST_TWO
def test_a_time_of_day_that_is_skipped_comes_at_the_change(cron: str) -> None:
    # On 2027-03-28 the clocks go from 02:00 CET to 03:00 CEST, at 01:00 UTC.
    times = Times(cron, time_zone=BERLIN)
    assert following(times, "2027-03-26 12:00", 3) == ["2027-03-27 01:30", "2027-03-28 01:00", "2027-03-29 00:30"]


@HALF_PAST_TWO
def test_a_time_of_day_that_comes_twice_counts_once(cron: str) -> None:
    # On 2027-10-31 the clocks go from 03:00 CEST back to 02:00 CET, at 01:00 UTC.
    times = Times(cron, time_zone=BERLIN)
    assert following(times, "2027-10-30 12:00", 2) == ["2027-10-31 00:30", "2027-11-01 01:30"]


@pytest.mark.parametrize("moment", ["2027-10-31 00:45", "2027-10-31 01:10", "2027-10-31 01:45"])
@HALF_PAST_TWO
def test_no_time_comes_before_the_moment_in_the_hour_that_comes_twice(cron: str, moment: str) -> None:
    assert following(Times(cron, time_zone=BERLIN), moment, 1) == ["2027-11-01 01:30"]


def test_each_second_of_the_hour_that_comes_twice_counts_once() -> None:
    times = Times("* 0-59 2 * * *", time_zone=BERLIN)
    assert following(times, "2027-10-31 00:59:58", 2) == ["2027-10-31 00:59", "2027-11-01 01:00"]
    assert following(times, "2027-10-31 01:00:01", 1) == ["2027-11-01 01:00"]


def test_each_second_that_is_skipped_counts_once() -> None:
    times = Times("*/20 30 2 * * *", time_zone=BERLIN)
    assert following(times, "2027-03-27 12:00", 2) == ["2027-03-28 01:00", "2027-03-29 00:30"]


def test_two_times_of_day_that_are_skipped_count_once() -> None:
    times = Times("0,30 2 * * *", time_zone=BERLIN)
    assert following(times, "2027-03-27 12:00", 2) == ["2027-03-28 01:00", "2027-03-29 00:00"]


@pytest.mark.parametrize("day", ["2027-03-28", "2027-10-31"])
def test_every_half_hour_goes_on_through_a_change(day: str) -> None:
    found = list(islice(Times("*/30 * * * *", time_zone=BERLIN).following(utc(f"{day} 00:00")), 8))
    assert {after - before for before, after in pairwise(found)} == {timedelta(minutes=30)}


@pytest.mark.parametrize("day", ["2027-04-03 12:00", "2027-10-02 12:00"])
@pytest.mark.parametrize(
    ("cron", "is_meant"),
    [
        ("30 * * * *", lambda at: at.minute == 30),
        ("45 * * * *", lambda at: at.minute == 45),
        ("0 */2 * * *", lambda at: at.hour % 2 == at.minute == 0),
        ("*/10 2 * * *", lambda at: at.hour == 2 and at.minute % 10 == 0),
    ],
)
def test_no_time_is_lost_or_doubled_when_clocks_change_by_half_an_hour(
    day: str, cron: str, is_meant: Callable[[datetime], bool]
) -> None:
    # The clocks go from 02:00 back to 01:30 in April, and from 02:00 to 02:30 in October, both at 15:00 or 15:30 UTC.
    minutes = [utc(day) + timedelta(minutes=number) for number in range(1, 600)]
    meant = [at for at in minutes if is_meant(at.astimezone(ZoneInfo(LORD_HOWE)))]
    assert [*islice(Times(cron, time_zone=LORD_HOWE).following(utc(day)), len(meant))] == meant


def test_an_interval_goes_on_through_a_change() -> None:
    times = Times(every="90m", time_zone=BERLIN)
    assert following(times, "2027-03-28 00:10", 3) == ["2027-03-28 01:30", "2027-03-28 03:00", "2027-03-28 04:30"]


def test_a_leap_day_comes_every_four_years() -> None:
    times = Times("0 0 29 2 *")
    assert following(times, "2095-01-01 00:00", 3) == ["2096-02-29 00:00", "2104-02-29 00:00", "2108-02-29 00:00"]


def test_an_interval_is_counted_from_the_start() -> None:
    times = Times(every="7m", starts_at=utc("2027-01-01 12:03"))
    assert following(times, "2026-01-01 00:00", 2) == ["2027-01-01 12:03", "2027-01-01 12:10"]
    assert following(times, "2027-01-01 12:09", 2) == ["2027-01-01 12:10", "2027-01-01 12:17"]


def test_start_and_end_belong_to_the_times() -> None:
    times = Times("0 * * * *", starts_at=utc("2027-01-01 12:00"), ends_at=utc("2027-01-01 14:00"))
    assert following(times, "2026-01-01 00:00", 9) == ["2027-01-01 12:00", "2027-01-01 13:00", "2027-01-01 14:00"]


MOMENTS = st.timedeltas(timedelta(0), timedelta(days=1000)).map(lambda span: datetime(2026, 1, 1, tzinfo=UTC) + span)
ZONES = st.sampled_from([BERLIN, "America/New_York", LORD_HOWE, "Asia/Beirut", "Africa/Casablanca", "UTC"])
RULES = st.sampled_from(
    [
        "45 * * * *",
        "0 */2 * * *",
        "30 2 * * *",
        "0 0 * * *",
        "*/15 * * * *",
        "0,30 1-3 * * *",
        "*/20 * * * * *",
        "15 1 * * SUN",
    ]
)


@given(moment=MOMENTS, zone=ZONES, cron=RULES)
def test_times_go_forward_and_leave_none_out(moment: datetime, zone: str, cron: str) -> None:
    times = Times(cron, time_zone=zone)
    first, second = islice(times.following(moment), 2)
    assert moment < first < second
    # Asked from anywhere before it, the first time is the same.
    between = moment + (first - moment) / 2
    assert times.after(between) == first
    assert times.after(first - timedelta(microseconds=1)) == first


each_rule = pytest.mark.parametrize(
    "rule", [{"cron": "*/30 * * * *"}, {"cron": "30 2 * * *"}, {"every": "10m"}], ids=str
)


@each_rule
def test_next_times_are_the_same_after_a_moment_in_any_time_zone(rule: dict[str, str]) -> None:
    schedule = Schedule(time_zone=BERLIN, **rule)
    moment = utc("2026-07-01 12:00")
    assert schedule.next_times(3, after=moment.astimezone(ZoneInfo(BERLIN))) == schedule.next_times(3, after=moment)


@each_rule
def test_next_times_after_a_moment_without_a_time_zone_are_refused(rule: dict[str, str]) -> None:
    with pytest.raises(InvalidMessage, match="after has no time zone"):
        Schedule(**rule).next_times(3, after=utc("2026-07-01 12:00").replace(tzinfo=None))


@pytest.mark.parametrize(
    ("times", "words"),
    [
        (Times("* * *"), "not a cron expression"),
        (Times("61 * * * *"), "not a cron expression"),
        (Times("0 0 31 2 *"), "not a cron expression"),
        (Times("0 0 1 1 " + "9" * 5000), "not a cron expression"),
        # The last working day of a month is no Sunday.
        (Times("0 9 LW * */7"), "no day has the time"),
        (Times("*/30 9 LW * */7"), "no day has the time"),
        (Times("0 3 * * *", time_zone="Europe/Nowhere"), "not a time zone"),
        (Times("0 3 * * *", time_zone="../../etc/passwd"), "not a time zone"),
        (Times("0 3 * * *", time_zone="Europe"), "not a time zone"),
        (Times(every="0s"), "every must be between"),
        (Times(every="soon"), "not a duration"),
        (Times(every="900000d"), "every must be between"),
        (Times(every="1h", starts_at=utc("2027-01-02 00:00"), ends_at=utc("2027-01-01 00:00")), "ends before"),
    ],
    ids=repr,
)
def test_a_wrong_definition_is_refused_in_words(times: Times, words: str) -> None:
    with pytest.raises(InvalidMessage, match=words):
        times.check()


def test_cron_without_its_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cronsim", None)
    with pytest.raises(ImproperlyConfigured, match=r"django-delayq\[recurring\]"):
        Times("0 3 * * *").check()
    Times(every="1h").check()
