"""The pages of schedules: what they show, what they write, and who may."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.http import HttpResponse
from django.test import Client
from django.urls import reverse

from django_delayq.models import Message
from django_delayq.models.messages import LogRow
from django_delayq.recurring import Schedule, create_schedule, schedules
from django_delayq.recurring.definition import checked
from django_delayq.recurring.models import Occurrence
from tests.support.rows import unguarded

from .conftest import DB, NOON, Clock, deliver, later, live, look

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("without_redis", "clock")]

LIST = "admin:delayq_recurring_schedule_changelist"
ADD = "admin:delayq_recurring_schedule_add"

FORM = {
    "name": "s",
    "topic": "t.ok",
    "payload": '{"a": 1}',
    "cron": "",
    "every": "1h",
    "time_zone": "Europe/Berlin",
    "missed": "once",
    "expires": "",
    "queue": "",
    "priority": "",
}


def client_with(*permissions: str, name: str = "anna") -> Client:
    user = User.objects.create_user(name, is_staff=True)
    found = Permission.objects.filter(codename__in=permissions)
    user.user_permissions.set(found)
    assert len(found) == len(permissions)
    client = Client()
    client.force_login(user)
    return client


@pytest.fixture
def chief() -> Client:
    words = ("view", "add", "change", "delete", "pause", "run")
    return client_with(*(f"{word}_schedule" for word in words))


def page(name: str = "s", view: str = "change") -> str:
    return reverse(f"admin:delayq_recurring_schedule_{view}", args=[name])


def text(response: Any) -> str:
    assert response.status_code == 200
    return str(response.content.decode())


def act(client: Client, action: str, *names: str) -> Any:
    given = {"action": action, "_selected_action": names, "index": "0", "confirmed": "1"}
    return client.post(reverse(LIST), given, follow=True)


def last_runs(client: Client) -> list[str]:
    """Return the lines of the table of last runs, the cells of each with a bar between them."""
    lines = re.findall(r"<tr><td.*?</tr>", text(client.get(page())))
    return [" | ".join(re.sub("<[^>]+>", "", cell) for cell in re.findall("<td.*?</td>", line)) for line in lines]


def test_a_schedule_is_added_with_its_message(chief: Client) -> None:
    assert 'value="UTC"' in text(chief.get(reverse(ADD)))
    chief.post(reverse(ADD), FORM)
    schedule = Schedule.objects.get()
    assert (schedule.payload, schedule.every, schedule.declared) == ({"a": 1}, "1h", False)
    assert live() == ["13:00"]
    assert Message.objects.get().transitions.get().actor == "user:anna"


def test_the_page_of_a_schedule_shows_its_next_ten_times(chief: Client) -> None:
    create_schedule("s", "t.ok", cron="30 2 * * *", tz="Europe/Berlin")
    shown = text(chief.get(page()))
    assert shown.count(" 02:30:00 CE") == 10
    # By the clock that makes the messages.
    assert "2050-03-02 02:30:00 CET" in shown
    assert "2050-03-02 02:30:00 CET" in text(chief.get(reverse(LIST)))
    assert "t.ok" in text(chief.get(reverse(LIST)))


def test_the_page_of_a_schedule_shows_its_last_runs(chief: Client, clock: Clock) -> None:
    create_schedule("s", "t.ok", every="1h", tz="UTC")
    assert last_runs(chief) == []
    first = Message.objects.get()
    later(clock, minutes=61)
    assert last_runs(chief) == [f"2050-03-01 13:00:00 UTC | scheduled | – | – | #{first.pk}"]
    deliver(clock)
    unguarded(LogRow).filter(message=first, to_state="consumed").update(at=clock.now + timedelta(seconds=3))
    assert last_runs(chief) == [
        f"2050-03-01 13:00:00 UTC | consumed | 2050-03-01 13:01:00 UTC | 3.0 s | #{first.pk}",
    ]


def test_times_without_a_message_are_told_between_the_runs(chief: Client, clock: Clock) -> None:
    create_schedule("s", "t.ok", every="1h", tz="UTC")
    later(clock, hours=3.5)
    deliver(clock)
    later(clock, hours=1)
    shown = last_runs(chief)
    assert [line[:30] for line in shown] == [
        "2050-03-01 16:00:00 UTC | sche",
        "2 times without a message: mis",
        "2050-03-01 13:00:00 UTC | cons",
    ]


@pytest.mark.parametrize("every", ["1h", "2h"])
def test_a_moment_that_nobody_changes_is_kept_exactly(chief: Client, every: str) -> None:
    starts_at, ends_at = NOON + timedelta(hours=1, microseconds=123), NOON + timedelta(days=9, microseconds=456)
    create_schedule("s", "t.ok", {"a": 1}, every="1h", tz="Europe/Berlin", starts_at=starts_at, ends_at=ends_at)
    moments = {"starts_at_0": "2050-03-01", "starts_at_1": "13:00:00", "ends_at_0": "2050-03-10"}
    for ends, kept in [("12:00:00", ends_at), ("12:00:01", NOON + timedelta(days=9, seconds=1))]:
        chief.post(page(), {**FORM, **moments, "every": every, "ends_at_1": ends})
        schedule = Schedule.objects.get()
        assert (schedule.every, schedule.starts_at, schedule.ends_at) == (every, starts_at, kept)
        if (every, kept) == ("1h", ends_at):
            assert set(Message.objects.values_list("state", flat=True)) == {"scheduled"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"every": "", "cron": "0 25 * * *"}, "not a cron expression"),
        ({"cron": "0 3 * * *"}, "cron expression or an interval"),
        ({"name": "a b"}, "the name of a schedule"),
        ({"payload": "{"}, "valid JSON"),
        ({"every": "1s", "expires": "soon"}, "not a duration"),
    ],
    ids=repr,
)
def test_mistakes_are_shown_and_nothing_is_written(chief: Client, given: dict[str, str], words: str) -> None:
    assert words in text(chief.post(reverse(ADD), {**FORM, **given}))
    assert not Schedule.objects.exists()


# What others cannot be stored is told by the check of payloads, which has its own tests.
UNSTORABLE = {
    "a lone surrogate": '"\\ud800"',
    "a list that is nested too deep to be read": "[" * 5000 + "]" * 5000,
    "a number without a value": "NaN",
    "a number of too many digits": "9" * 5000,
}


@pytest.mark.parametrize("payload", UNSTORABLE.values(), ids=UNSTORABLE.keys())
def test_a_payload_that_cannot_be_kept_is_a_mistake_in_the_form(chief: Client, payload: str) -> None:
    create_schedule("s", "t.ok", every="1h")
    for address, name in ((reverse(ADD), "other"), (page(), "s")):
        assert "errorlist" in text(chief.post(address, {**FORM, "name": name, "payload": payload}))
        assert Schedule.objects.get().payload is None


def test_a_deleted_schedule_has_its_message_cancelled(chief: Client) -> None:
    for name in ("s", "other"):
        create_schedule(name, "t.ok", every="1h")
    chief.post(page(view="delete"), {"post": "yes"})
    chief.post(reverse(LIST), {"action": "delete_selected", "_selected_action": ["other"], "post": "yes"})
    assert not Schedule.objects.exists()
    assert set(Message.objects.values_list("state", flat=True)) == {"cancelled"}


def test_schedules_are_paused_resumed_and_run(chief: Client) -> None:
    create_schedule("s", "t.ok", every="1h")
    assert "1 schedule is paused" in text(act(chief, "pause", "s"))
    assert '<li class="warning">0 schedules are paused' in text(act(chief, "pause", "s"))
    assert live() == []
    assert "1 schedule is resumed" in text(act(chief, "resume", "s"))
    assert live() == ["13:00"]
    assert "1 message is due now" in text(act(chief, "run", "s"))
    assert Message.objects.latest("pk").headers == {"schedule": "s"}


@pytest.mark.parametrize(("action", "button"), [("run", "Run now"), ("skip", "Skip the next run")])
def test_a_run_and_a_skip_are_done_when_somebody_confirms_them(chief: Client, action: str, button: str) -> None:
    create_schedule("s", "t.ok", every="1h", tz="UTC")
    asked = chief.post(reverse(LIST), {"action": action, "_selected_action": ["s"], "index": "0"})
    assert f'value="{button}"' in text(asked)
    assert "2050-03-01 13:00:00 UTC" in text(asked)
    assert (live(), Message.objects.count()) == (["13:00"], 1)
    answer = re.findall(r'type="hidden" name="(\w+)" value="(\w+)"', text(asked))
    chief.post(reverse(LIST), {name: value for name, value in answer if name != "csrfmiddlewaretoken"})
    assert (live(), Message.objects.count()) == {"run": (["13:00"], 2), "skip": ([], 1)}[action]


@pytest.mark.parametrize(
    ("span", "until", "words"),
    [
        ("hour", "", "paused until 2050-03-01 13:00:00 UTC"),
        ("date", "2050-03-04T09:30", "paused until 2050-03-04 09:30:00 UTC"),
        ("", "", "paused"),
    ],
)
def test_a_schedule_is_paused_for_a_time(chief: Client, span: str, until: str, words: str) -> None:
    create_schedule("s", "t.ok", every="1h", tz="UTC")
    asked = text(chief.post(reverse(LIST), {"action": "pause", "_selected_action": ["s"], "index": "0"}))
    assert "until tomorrow" in asked
    assert live() == ["13:00"]
    given = {"action": "pause", "_selected_action": ["s"], "index": "0", "confirmed": "1"}
    chief.post(reverse(LIST), {**given, "span": span, "until": until, "reason": "the bank is down"})
    assert words in re.sub("<[^>]+>", "", text(chief.get(page())))


@pytest.mark.parametrize("until", ["", "2020-01-01T00:00", "soon"])
def test_a_pause_until_no_time_to_come_is_asked_for_again(chief: Client, until: str) -> None:
    create_schedule("s", "t.ok", every="1h")
    given = {"action": "pause", "_selected_action": ["s"], "index": "0", "confirmed": "1", "span": "date"}
    assert "errorlist" in text(chief.post(reverse(LIST), {**given, "until": until}))
    assert live() == ["13:00"]


@pytest.mark.console
def test_the_audit_has_the_reason_of_a_pause(chief: Client) -> None:
    from django_delayq.console.models import AuditEvent

    create_schedule("s", "t.ok", every="1h")
    given = {"action": "pause", "_selected_action": ["s"], "index": "0", "confirmed": "1", "span": "hour"}
    chief.post(reverse(LIST), {**given, "reason": "the bank is down"})
    event = AuditEvent.objects.get()
    assert (event.actor, event.action, event.reason) == ("user:anna", "pause schedule", "the bank is down")


def test_the_page_tells_that_a_pause_is_over_before_a_scheduler_has_seen_it(chief: Client, clock: Clock) -> None:
    create_schedule("s", "t.ok", every="1h", tz="UTC")
    schedules.pause_schedule("s", duration="2h")
    assert "2050-03-01 14:00:00 UTC" in text(chief.get(reverse(LIST)))
    clock.advance(hours=2, minutes=30)
    assert "paused until" not in text(chief.get(page()))
    assert "2050-03-01 15:00:00 UTC" in text(chief.get(reverse(LIST)))


def rows(client: Client) -> list[str]:
    """Return the rows of the list in the console, as somebody reads them."""
    shown = text(client.get(reverse(LIST)))
    assert 'class="dq-nav"' in shown
    found = re.findall("<tr[ >].*?</tr>", shown, re.DOTALL)[1:]
    return [re.sub(r"\s+", " ", re.sub("<[^>]+>", " ", row)).strip() for row in found]


@pytest.mark.console
def test_the_console_lists_what_is_late_and_what_is_paused_first(chief: Client, clock: Clock) -> None:
    for name in "abcd":
        create_schedule(name, "t.ok", every="1h", tz="UTC", missed="all")
    clock.advance(minutes=60)
    schedules.advance(DB, "a", "b", "d")
    deliver(clock, "d")
    clock.advance(minutes=2)
    schedules.pause_schedule("b", duration="2h")
    assert [re.sub(r"2050-03-01 (\d\d:\d\d):00 UTC", r"\1", row) for row in rows(chief)] == [
        "c t.ok missed every 1h 14:00 scheduled –",
        "b t.ok paused until 15:02 every 1h 16:00 – –",
        "a t.ok active every 1h 14:00 scheduled –",
        "d t.ok active every 1h 14:00 consumed 0 ms",
    ]


@pytest.mark.console
def test_what_waits_for_its_message_is_not_missed_and_a_pause_that_should_have_ended_is(
    chief: Client, clock: Clock
) -> None:
    for name in ("once", "paused"):
        create_schedule(name, "t.ok", every="1h", tz="UTC")
    schedules.pause_schedule("paused", duration="2h")
    later(clock, hours=1)
    clock.advance(hours=4)
    assert [row.split()[:3] for row in rows(chief)] == [["paused", "t.ok", "missed"], ["once", "t.ok", "active"]]


def names(client: Client, query: str) -> list[str]:
    """Return the schedules that the list shows at an address."""
    return re.findall(r'name="_selected_action" value="(\w+)"', text(client.get(reverse(LIST) + query)))


def links(client: Client, query: str) -> dict[str, str]:
    """Return the links of the list for other pages and filters, by their texts."""
    found = re.findall(r'<a class="dq-chip" href="([^"]*)"[^>]*>([^<]*)</a>', text(client.get(reverse(LIST) + query)))
    return {label: html.unescape(url) for url, label in found}


@pytest.mark.console
def test_the_console_pages_through_a_filtered_list(chief: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin.site.get_model_admin(Schedule), "list_per_page", 2)
    for name in "abcd":
        create_schedule(name, "t.ok", every="1h", paused=name != "b")
    query = "?q=t.ok&paused__exact=1"
    assert names(chief, query) == ["a", "c"]
    assert names(chief, links(chief, query)["2"]) == ["d"]


@pytest.mark.console
def test_the_console_links_few_of_many_pages(chief: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin.site.get_model_admin(Schedule), "list_per_page", 1)
    for number in range(12):
        create_schedule(f"s{number:02}", "t.ok", every="1h")
    assert [label for label in links(chief, "?p=6") if label.isdigit()] == ["1", "4", "5", "6", "7", "8", "12"]
    assert names(chief, links(chief, "?p=6")["12"]) == ["s11"]


@pytest.mark.console
@pytest.mark.parametrize("query", ["?p=2", "?p=0", "?all=&p=9"])
def test_the_page_of_a_short_list_that_an_address_names_need_not_exist(chief: Client, query: str) -> None:
    create_schedule("s", "t.ok", every="1h")
    assert names(chief, query) == ["s"]


@pytest.mark.console
def test_the_console_filters_the_list(chief: Client) -> None:
    for name in "ab":
        create_schedule(name, "t.ok", every="1h", paused=name == "a")
    found = re.search(
        '<span role="group" aria-label="paused">.*?</a> </span>', text(chief.get(reverse(LIST))), re.DOTALL
    )
    assert found is not None
    urls = [html.unescape(url) for url in re.findall('href="([^"]*)"', found[0])]
    assert [sorted(names(chief, url)) for url in urls] == [["a", "b"], ["a"], ["b"]]
    assert 'type="hidden" name="paused__exact" value="1"' in text(chief.get(reverse(LIST) + "?paused__exact=1"))
    assert "No schedules match." in text(chief.get(reverse(LIST) + "?ended__exact=1"))


@pytest.fixture
def site_action() -> Iterator[None]:
    """An action that the project adds to its admin."""

    def mark(modeladmin: Any, request: Any, queryset: Any) -> HttpResponse:
        return HttpResponse(f"marked {queryset.get()}")

    admin.site.add_action(mark)
    yield
    admin.site.disable_action("mark")


@pytest.mark.console
def test_the_console_has_the_actions_of_the_site(chief: Client, site_action: None) -> None:
    create_schedule("s", "t.ok", every="1h")
    found = re.findall(r'name="action" value="(\w+)">([^<]*)<', text(chief.get(reverse(LIST))))
    assert [label for _name, label in found] == [
        *("Run now…", "Skip the next run…", "Pause…", "Resume"),
        *("Delete selected schedules", "Mark"),
    ]
    assert text(act(chief, "mark", "s")) == "marked s"


def has_navigation(response: Any) -> bool:
    shown = text(response)
    return 'class="dq-nav"' in shown or 'id="nav-sidebar"' in shown


@pytest.mark.console
def test_every_page_of_a_schedule_has_navigation_in_the_console(chief: Client) -> None:
    create_schedule("s", "t.ok", every="1h")
    for view in ("change", "delete", "history"):
        assert has_navigation(chief.get(page(view=view))), view
    for action in ("pause", "delete_selected"):
        given = {"action": action, "_selected_action": "s", "index": "0"}
        assert has_navigation(chief.post(reverse(LIST), given)), action


@pytest.mark.console
def test_a_user_who_may_only_view_ticks_nothing_in_the_console(chief: Client) -> None:
    create_schedule("s", "t.ok", every="1h")
    shown = text(client_with("view_schedule", name="eva").get(reverse(LIST)))
    assert "action-select" not in shown
    assert 'name="action"' not in shown
    assert "action-select" in text(chief.get(reverse(LIST)))


def buttons(client: Client) -> list[str]:
    return re.findall(r'<button class="(?:dq-)?button" name="action" value="(\w+)">', text(client.get(page())))


def test_the_page_of_a_schedule_has_a_button_for_each_action_that_is_allowed(chief: Client) -> None:
    create_schedule("s", "t.ok", every="1h")
    assert buttons(chief) == ["run", "skip", "pause"]
    act(chief, "pause", "s")
    assert buttons(chief) == ["run", "skip", "pause", "resume"]
    assert buttons(client_with("view_schedule", "run_schedule", name="ben")) == ["run"]
    assert buttons(client_with("view_schedule", name="eva")) == []


@pytest.mark.parametrize("missed", ["once", "all", "skip"])
def test_the_next_run_is_skipped_and_the_one_after_it_is_made(chief: Client, clock: Clock, missed: str) -> None:
    create_schedule("s", "t.ok", every="1h", tz="UTC", missed=missed)
    assert "1 run is skipped" in text(act(chief, "skip", "s"))
    message = Message.objects.get()
    assert message.state == "cancelled"
    assert message.transitions.latest("number").actor == "user:anna"
    assert "2050-03-01 14:00:00 UTC" in text(chief.get(reverse(LIST)))
    assert "2050-03-01 13:00:00 UTC" not in text(chief.get(reverse(LIST)))
    assert "2050-03-01 13:00:00 UTC: skipped" in text(chief.get(page()))
    again = text(act(chief, "skip", "s"))
    assert "Schedule s: no next run waits" in again
    assert "0 runs are skipped" in again
    look()
    assert live() == []
    later(clock, minutes=61)
    assert live() == ["14:00"]
    assert last_runs(chief)[0].startswith("2050-03-01 13:00:00 UTC | cancelled | –")


def test_a_paused_schedule_has_no_run_to_skip(chief: Client) -> None:
    create_schedule("s", "t.ok", every="1h", paused=True)
    assert "Schedule s: no next run waits" in text(act(chief, "skip", "s"))


@pytest.mark.parametrize("action", ["run", "resume"])
def test_schedules_that_fail_are_named_and_the_others_are_done(
    chief: Client, keyed: None, action: str, settings: Any
) -> None:
    for name in "abc":
        create_schedule(name, "t.ok", {"password": "secret"} if name == "b" else None, every="1h", paused=True)
    unguarded(Schedule).filter(pk="a").update(topic="t.keyed", payload={})
    settings.DELAYQ = {**settings.DELAYQ, "PAYLOAD_MAX_BYTES": 10}
    shown = text(act(chief, action, "a", "b", "c"))
    assert "Schedule a: KeyError: &#x27;customer&#x27;" in shown
    assert "the payload has 21 bytes" in shown.partition("Schedule b: ")[2]
    assert {"run": "1 message is due now", "resume": "1 schedule is resumed"}[action] in shown
    assert Message.objects.get().headers["schedule"] == "c"


@pytest.mark.parametrize("name", ["s", "other"])
def test_an_error_of_the_project_is_a_mistake_in_the_form(chief: Client, keyed: None, name: str) -> None:
    create_schedule("s", "t.ok", every="1h")
    shown = text(chief.post(page() if name == "s" else reverse(ADD), {**FORM, "name": name, "topic": "t.keyed"}))
    assert "errorlist" in shown
    assert "KeyError: &#x27;customer&#x27;" in shown
    assert 'value="t.keyed"' in shown
    assert Schedule.objects.get().topic == "t.ok"
    assert live() == ["13:00"]


@pytest.mark.console
def test_every_action_is_written_to_the_audit(chief: Client) -> None:
    from django_delayq.console.models import AuditEvent

    chief.post(reverse(ADD), FORM)
    chief.post(page(), {**FORM, "every": "30m"})
    # It changes nothing.
    chief.post(page(), {**FORM, "every": "30m"})
    for action in ("pause", "resume", "skip", "run"):
        act(chief, action, "s")
    chief.post(page(view="delete"), {"post": "yes"})
    events = AuditEvent.objects.order_by("pk").values_list("actor", "action", "target")
    verbs = ("create", "change", "pause", "resume", "skip", "run", "delete")
    assert list(events) == [("user:anna", f"{verb} schedule", "s") for verb in verbs]


@pytest.mark.console
def test_nothing_is_done_and_said_to_be_done_without_its_audit(chief: Client) -> None:
    create_schedule("s", "t.ok", every="1h")
    with connection.cursor() as cursor:
        # As before a migration, say.
        cursor.execute("ALTER TABLE delayq_audit_event RENAME TO gone")
    for action, words in (("pause", "1 schedule is paused"), ("run", "1 message is due now")):
        shown = text(act(chief, action, "s"))
        assert "Schedule s: " in shown
        assert words not in shown
    shown = text(chief.post(reverse(ADD), {**FORM, "name": "other"}, follow=True))
    assert "was added successfully" not in shown
    assert "delayq_audit_event" in shown
    assert not Schedule.objects.get().paused
    assert live() == ["13:00"]


def test_a_declared_schedule_can_be_paused_but_not_changed(chief: Client) -> None:
    schedules.declare(DB, "s", checked("t.ok", every="1h"))
    assert 'name="every"' not in text(chief.get(page()))
    assert chief.post(page(), FORM).status_code == 403
    assert chief.post(page(view="delete"), {"post": "yes"}).status_code == 403
    why = "The code declares it: change or delete it by its @recurring there. Here it can be paused."
    assert why in text(chief.get(page()))
    create_schedule("other", "t.ok", every="1h")
    chosen = {"action": "delete_selected", "_selected_action": ["s", "other"], "post": "yes"}
    assert f"Schedule s: {why}" in text(chief.post(reverse(LIST), chosen))
    assert set(Schedule.objects.values_list("name", "every")) == {("s", "1h"), ("other", "1h")}
    chief.post(page("other", "delete"), {"post": "yes"})
    act(chief, "pause", "s")
    assert Schedule.objects.get().paused


@pytest.mark.parametrize("action", ["pause", "resume", "skip", "run"])
def test_an_action_needs_its_permission_when_it_is_posted(action: str) -> None:
    create_schedule("s", "t.ok", every="1h", paused=action == "resume")
    client = client_with("view_schedule", "change_schedule", "run_schedule" if action != "run" else "pause_schedule")
    act(client, action, "s")
    assert Schedule.objects.get().paused == (action == "resume")
    assert Occurrence.objects.count() == Message.objects.filter(state="scheduled").count()


@pytest.mark.parametrize("action", ["pause", "resume", "skip", "run"])
def test_who_may_only_view_does_nothing_by_a_forged_post(action: str) -> None:
    create_schedule("s", "t.ok", every="1h", paused=action == "resume")
    client = client_with("view_schedule")
    before = (live(), Message.objects.count(), Schedule.objects.get().paused)
    act(client, action, "s")
    client.get(reverse(LIST), {"action": action, "_selected_action": "s", "confirmed": "1"})
    assert (live(), Message.objects.count(), Schedule.objects.get().paused) == before


def test_viewers_change_nothing_and_see_no_payload() -> None:
    create_schedule("s", "t.ok", {"password": "secret"}, every="1h")
    client = client_with("view_schedule")
    assert "secret" not in text(client.get(page()))
    assert client.post(page(), FORM).status_code == 403
    assert client.post(reverse(ADD), FORM).status_code == 403
    assert client.post(page(view="delete"), {"post": "yes"}).status_code == 403
    assert "secret" in text(client_with("view_schedule", "reveal_message", name="ben").get(page()))


@pytest.mark.parametrize("lookup", ["payload__password__startswith", "payload__contains", "message__payload", "topic"])
def test_the_list_takes_no_lookup_but_its_filters(lookup: str) -> None:
    """A payload that is not shown could be guessed by them, one character after the other."""
    create_schedule("s", "t.ok", {"password": "secret"}, every="1h")
    client = client_with("view_schedule")
    assert client.get(reverse(LIST), {lookup: "s"}).status_code == 400
    assert client.get(reverse(LIST), {"paused__exact": "0", "declared__exact": "0"}).context["cl"].result_count == 1


@pytest.mark.parametrize("view", ["change", "delete", "history"])
def test_a_schedule_is_not_found_by_a_character_that_no_database_keeps(chief: Client, view: str) -> None:
    assert "doesn’t exist" in text(chief.get(page("a\x00b", view), follow=True))


def test_a_console_that_is_read_only_refuses_every_change(chief: Client, settings: Any) -> None:
    create_schedule("s", "t.ok", every="1h")
    settings.DELAYQ = {**settings.DELAYQ, "CONSOLE": {"READ_ONLY": True}}
    assert chief.post(page(), FORM).status_code == 403
    assert chief.post(reverse(ADD), {**FORM, "name": "other"}).status_code == 403
    act(chief, "pause", "s")
    assert not Schedule.objects.get().paused
    assert "t.ok" in text(chief.get(reverse(LIST)))


def test_a_schedule_that_cannot_be_read_is_shown_with_the_reason(chief: Client) -> None:
    create_schedule("s", "t.ok", cron="0 3 * * *")
    unguarded(Schedule).update(time_zone="Not/Here")
    assert "not a time zone" in text(chief.get(reverse(LIST)))
    assert text(chief.get(page()))
