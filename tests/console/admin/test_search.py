"""Tests of the search: the meaning of each term, and the problem of a term that cannot be read."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from django_delayq import override_limit, pause_queue, resume_queue, schedule_message
from django_delayq.console.admin import action_table, payload, search_box
from django_delayq.console.search import language
from django_delayq.console.search.language import Search
from django_delayq.console.search.texts import term_text
from django_delayq.core import bounds
from django_delayq.models import Message
from tests.browser.middleware import POLICY
from tests.support.rows import unguarded

from . import samples

NOW = datetime(2026, 6, 15, 12, 0, tzinfo=UTC)


def parse(text: str) -> Search:
    return language.parse(text, now=NOW)


def found(text: str, now: datetime | None = None) -> set[int]:
    asked = language.parse(text, now=now or timezone.now())
    assert asked.problems == ()
    return set(Message.objects.using(samples.DB).filter(asked.condition()).values_list("pk", flat=True))


def test_a_number_finds_the_message_with_this_id_and_those_with_this_key(db: None) -> None:
    one = samples.scheduled()
    number = str(one.pk)
    named, other = samples.consumed(key=number), schedule_message("t.other", key=number)
    samples.scheduled(key=f"{number}0")
    resolved = parse_now(number).resolved(samples.DB, payload.redacted)
    assert (resolved.described, resolved.problems) == ("the number is the id, or is in the key or the payload", ())
    every = {one.pk, named.pk, other.pk}
    assert (
        found(resolved.frozen)
        == set(Message.objects.filter(resolved.condition()).values_list("pk", flat=True))
        == every
    )
    for exact in (f"#{number}", f"id:{number}"):
        assert found(parse_now(exact).resolved(samples.DB, payload.redacted).frozen) == {one.pk}
    assert "is the id" in parse_now(f"{number}0").resolved(samples.DB, payload.redacted).described
    assert parse_now("987654321").resolved(samples.DB, payload.redacted).described == "id 987654321"


def holding(number: str) -> tuple[set[int], tuple[str, ...]]:
    search = parse_now(number).resolved(samples.DB, payload.redacted)
    return set(Message.objects.filter(search.condition()).values_list("pk", flat=True)), search.notes


def test_a_number_finds_keys_that_have_it_as_a_part_and_payloads_that_have_it_as_a_value(db: None) -> None:
    key = samples.consumed(key="order-987654")
    deep = samples.dead({"order": {"ids": [1, 987654]}})
    text = samples.scheduled({"customer": "987654"})
    for other in ("order-9876541", "1987654", "order-98765.4"):
        samples.scheduled(key=other)
    for value in ("9876541", 9876541, "no 987654", 987654.5, True):
        samples.scheduled({"987654": value})
    # A masked value is not to be guessed.
    samples.scheduled({"password": "987654", "token": {"value": 987654}})
    assert holding("987654") == ({key.pk, deep.pk, text.pk}, ())


def test_a_number_is_searched_in_keys_like_the_newest_ones_and_in_the_newest_messages(
    db: None, tuned: Callable[..., None]
) -> None:
    old = samples.scheduled({"customer": 987654}, key="order-987654")
    samples.scheduled({"customer": 987655})
    samples.scheduled(key="order-1")
    tuned(nearest_rows=2)
    note = "For 987654, only the payloads of the newest 2 messages were searched. payload.NAME: searches all."
    assert holding("987654") == ({old.pk}, (note,))
    assert len(holding("987655")[0]) == 1
    tuned(nearest_rows=1)
    assert holding("987655")[0] == set()


def test_an_address_is_searched_in_keys_and_payloads(db: None) -> None:
    samples.scheduled({"to": "anna@example.net.invalid", "password": "anna@example.net"})
    assert holding("anna@example.net") == (set(), ())
    found = {samples.consumed({"cc": ["anna@example.net"]}).pk, samples.scheduled(key="mail anna@example.net").pk}
    assert holding("anna@example.net") == (found, ())
    described = parse_now("anna@example.net").resolved(samples.DB, payload.redacted).described
    # It is written to the audit.
    assert described == "the address is in the key or the payload"
    abroad = samples.consumed({"to": "jürgen@münchen.example"}).pk
    assert holding("jürgen@münchen.example") == ({abroad}, ())
    assert parse_now("@").resolved(samples.DB, payload.redacted).described == "topic is “@”"


def parse_now(text: str) -> Search:
    return language.parse(text, now=timezone.now())


@pytest.mark.parametrize("text", ["late:soon", "late:<5m", "late:-5m", "late:5m..6m", "late:999999999d"])
def test_a_lateness_is_a_length_of_time(text: str) -> None:
    assert parse(text).problems == (f"{text}: not a length of time. Write late:5m.",)


# --- parsing ----------------------------------------------------------------------------------------------------------


DESCRIBED = [
    (" \t\n", "all messages"),
    ("12345", "id 12345"),
    ("id:5", "id 5"),
    ("id:7,5,7", "id 5, 7"),
    ("key:a", "key is “a”"),
    ('key:"a b"', "key is “a b”"),
    ('key:"a \\"b\\""', 'key is “a "b"”'),
    ("key:order:1", "key is “order:1”"),
    ("key:order-*", "key begins with “order-”"),
    ('key:"order-*"', "key is “order-*”"),
    ("topic:mail.*", "topic begins with “mail.”"),
    ("TOPIC:mail.send", "topic is “mail.send”"),
    ("queue:mails", "queue is “mails”"),
    ("state:dead", "dead"),
    ("state:expired,dead", "dead or expired"),
    ("is:overdue", "overdue"),
    ("is:paused", "paused"),
    ("is:retrying", "retrying"),
    ("late:5m", "waiting, more than 5 m after its due time"),
    ("late:>1h30m", "waiting, more than 1 h 30 m after its due time"),
    ("attempts:>3", "failed attempts > 3"),
    ("attempts:3", "failed attempts = 3"),
    ("error:Timeout", "error contains “Timeout”"),
    ("worker:host/1", "running on a worker whose name begins with “host/1”"),
    ("payload.order.id:42", "payload order.id is a given value"),
    ('payload."a.b".c:"4 2"', "payload a.b.c is a given value"),
    ("mail.send", "key or topic is “mail.send”"),
    ("mail.*", "topic begins with “mail.”"),
    ("order:1", "key is “order:1”"),
    ("#148051", "id 148051"),
    ("id:#5,#6", "id 5, 6"),
    ("orders.remind #148051", "key or topic is “orders.remind”, id 148051"),
    ('"#5"', "key or topic is “#5”"),
    ('"12345"', "key or topic is “12345”"),
    ("topic:a state:dead", "topic is “a”, dead"),
    ("due:2026-01-02", "due from 2026-01-02 00:00:00 until before 2026-01-03 00:00:00"),
    ("due:2026-01-02..2026-01-03", "due from 2026-01-02 00:00:00 until before 2026-01-04 00:00:00"),
    ("due:2026-01-02T10:00..2026-01-02T10:05", "due from 2026-01-02 10:00:00 until before 2026-01-02 10:05:00"),
    ("due:2026-01-02..", "due from 2026-01-02 00:00:00 on"),
    ("due:..2026-01-02", "due before 2026-01-03 00:00:00"),
    ("due:<2026-01-02", "due before 2026-01-02 00:00:00"),
    ("due:<=2026-01-02", "due before 2026-01-03 00:00:00"),
    ("due:>2026-01-02", "due from 2026-01-03 00:00:00 on"),
    ("due:>=2026-01-02", "due from 2026-01-02 00:00:00 on"),
    ("due:<1h", "due before 2026-06-15 13:00:00"),
    ("due:<-1h", "due before 2026-06-15 11:00:00"),
    ("due:0s..90m", "due from 2026-06-15 12:00:00 until before 2026-06-15 13:30:00"),
    ("due:today", "due from 2026-06-15 00:00:00 until before 2026-06-16 00:00:00"),
    ("due:tomorrow", "due from 2026-06-16 00:00:00 until before 2026-06-17 00:00:00"),
    ("created:<24h", "created from 2026-06-14 12:00:00 on"),
    ("finished:1h", "finished from 2026-06-15 11:00:00 on"),
    ("finished:=1h", "finished from 2026-06-15 11:00:00 on"),
    ("due:1h", "due before 2026-06-15 13:00:00"),
    ("due:2026-01-02T10:00", "due from 2026-01-02 10:00:00 until before 2026-01-02 10:01:00"),
    ("due:2026-01-02T10:00:07", "due from 2026-01-02 10:00:07 until before 2026-01-02 10:00:08"),
    ("created:yesterday", "created from 2026-06-14 00:00:00 until before 2026-06-15 00:00:00"),
    ("finished:>7d", "finished before 2026-06-08 12:00:00"),
    ("finished:2h..1h", "finished from 2026-06-15 10:00:00 until before 2026-06-15 11:00:00"),
    ("finished:1h..2h", "finished from 2026-06-15 10:00:00 until before 2026-06-15 11:00:00"),
]


@pytest.mark.parametrize(("text", "described"), DESCRIBED)
def test_a_search_is_described_in_words(text: str, described: str) -> None:
    asked = parse(text)
    assert asked.problems == ()
    assert asked.described == described


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("due:tomorow", "due:tomorow: not a time. Write due:<1h, due:today or due:2026-01-02..2026-01-03."),
        ("due:2026-02-30", "not a time"),
        ("due:2026-01-03..2026-01-02", "not a time"),
        ("due:..", "not a time"),
        ("due:<99999999999d", "not a time"),
        ("due:<0001-01-01", "not a time"),
        ("due:9999-12-31", "not a time"),
        ("due:<1x", "not a time"),
        ("finished:1..2h", "not a time. Write finished:<1h"),
        ("id:x", "id:x: not an id."),
        ("id:٣", "not an id."),
        ("id:", "id:: the value after the colon is missing."),
        ("9" * 19, "not an id"),
        ("9" * 1500, "not an id"),
        ("id:" + "0" * 10 + "1" + "0" * 20, "not an id"),
        ("id:" + ",".join(["1"] * 1000 + ["2"] * 1), "more than 1000 ids"),
        ("key:", "the value after the colon is missing"),
        ('""', "the text between the quotation marks is missing"),
        ('key:"a', "A quotation mark is not closed."),
        ("state:gone", "state:gone: not a state. Write one of scheduled, running, consumed"),
        ("state:dead,canceled", "expired. Did you mean state:dead,cancelled?"),
        ("is:late", "is:late: unknown. Write is:live, is:finished, is:overdue"),
        ("is:overdu", "Did you mean is:overdue?"),
        ("attempts:many", "not a number"),
        ("attempts:>", "not a number"),
        ("attempts:99999999999", "not a number"),
        ("payload.:1", "not a path"),
        ("payload.a..b:1", "not a path"),
        ("payload.a:", "the value after the colon is missing"),
        *(("payload" + ".x" * depth + ":1", "more than 32 names in the path") for depth in (33, 1500, 3000)),
        ("key:\x00", "characters that no message can have"),
        ("key:\ud800", "characters that no message can have"),
        ("a" * 10_001, "too long"),
        ("a " * 31, "More than 30 terms"),
    ],
)
def test_a_term_that_cannot_be_read_is_explained_and_finds_nothing(db: None, text: str, problem: str) -> None:
    samples.scheduled()
    asked = parse(text)
    assert problem in " ".join(asked.problems)
    assert not Message.objects.using(samples.DB).filter(asked.condition()).exists()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("stat:dead", 'stat: is unknown. Did you mean state:? A key with a colon is written key:"stat:dead".'),
        ("customer:7", "customer: is unknown. Write one of id:, key:, topic:,"),
        ("https://example.net", "https: is unknown."),
    ],
)
def test_a_name_that_no_term_has_is_a_problem_unless_a_key_begins_with_it(db: None, text: str, problem: str) -> None:
    samples.scheduled(key="other")
    asked = parse(text).resolved(samples.DB, payload.redacted)
    assert problem in asked.problems[0]
    assert not Message.objects.using(samples.DB).filter(asked.condition()).exists()
    message = samples.scheduled(key=text)
    asked = parse(text).resolved(samples.DB, payload.redacted)
    assert asked.problems == ()
    assert Message.objects.using(samples.DB).filter(asked.condition()).get() == message


def test_the_deepest_path_is_searched(db: None) -> None:
    content: Any = 1
    for _level in range(32):
        content = {"x": content}
    message = samples.scheduled(content)
    assert found("payload" + ".x" * 32 + ":1") == {message.pk}


def test_every_problem_is_listed_and_the_readable_terms_do_not_count(db: None) -> None:
    samples.scheduled()
    asked = parse("due:x topic:t.admin id:y")
    assert len(asked.problems) == 2
    assert not Message.objects.using(samples.DB).filter(asked.condition()).exists()


@pytest.mark.parametrize(
    "text",
    [
        *(text for text, _described in DESCRIBED if text not in ("is:overdue", "is:paused")),
        *("mail:*", "is:finished", 'key:"a b"*', 'key:"\\"\\\\"'),
        *('error:"no such"', "payload.a:null", "id:3,4 queue:q"),
    ],
)
def test_a_frozen_search_means_the_same_at_any_time_and_place(text: str) -> None:
    asked = parse(text)
    with timezone.override("Asia/Tokyo"):
        again = language.parse(asked.frozen, now=NOW + timedelta(days=99))
    assert again.problems == ()
    assert again.states == asked.states
    assert again.condition() == asked.condition()
    assert again.frozen == asked.frozen


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("is:overdue", "2026-06-15T11:59:55"),
        ("is:limited", "2026-06-15T12:00:00"),
        ("is:paused", "2026-06-15T12:00:00"),
        ("limit:a", "2026-06-15T12:00:00"),
        ("limit:a*", "2026-06-15T12:00:00"),
    ],
)
def test_a_frozen_search_for_what_waits_finds_none_that_became_due_later(text: str, end: str) -> None:
    asked = parse(text)
    assert asked.frozen == f"{text} due:..{end}+00:00"
    again = language.parse(asked.frozen, now=NOW + timedelta(days=99))
    assert (again.problems, again.states) == ((), asked.states)


@pytest.mark.parametrize(
    ("text", "frozen"),
    [
        ("=2026-01-02T03:04:05.123Z", "2026-01-02T03:04:05.123000+00:00..2026-01-02T03:04:05.124000+00:00"),
        ("<=2026-01-02T03:04:05.123Z", "..2026-01-02T03:04:05.124000+00:00"),
        (">2026-01-02T03:04:05.123Z", "2026-01-02T03:04:05.124000+00:00.."),
        ("..2026-01-02T03:04:05.123Z", "..2026-01-02T03:04:05.124000+00:00"),
        ("2026-01-02T03:04:05.1231Z", "2026-01-02T03:04:05.123100+00:00..2026-01-02T03:04:05.123101+00:00"),
    ],
)
def test_a_time_to_the_millisecond_matches_every_moment_shown_as_it(text: str, frozen: str) -> None:
    """Pages show times cut to the millisecond; the record keeps them to the microsecond."""
    assert parse(f"due:{text}").frozen == f"due:{frozen}"


def test_a_day_on_which_the_clocks_change_is_a_whole_day() -> None:
    with timezone.override("Europe/Berlin"):
        asked = parse("due:2026-03-29")
    assert asked.frozen == "due:2026-03-28T23:00:00+00:00..2026-03-29T22:00:00+00:00"


@pytest.mark.parametrize("value", ["a", "a b", 'a"b', "a\\", "a*", "12", "a:b", "a,b", "…"])
def test_the_text_of_a_term_finds_exactly_its_value(db: None, value: str) -> None:
    message = samples.scheduled(key=value)
    samples.scheduled(key=value + "x")
    assert found(term_text("key", value)) == {message.pk}


# --- matching ---------------------------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_a_prefix_matches_literally_and_has_no_wildcards_of_the_database() -> None:
    first, second = schedule_message("mail.send"), schedule_message("mail.sent")
    schedule_message("e-mail.send")
    assert found("topic:mail.sen*") == {first.pk, second.pk}
    assert found(f"topic:mail.sen* id:{first.pk}") == {first.pk}
    assert found("mail.*") == {first.pk, second.pk}
    assert found("topic:mail_*") == set()
    assert found("topic:%*") == set()


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("payload", "text"),
    [
        ({"order": {"id": 42}}, "payload.order.id:42"),
        ({"order": {"id": "42"}}, "payload.order.id:42"),
        ({"order": {"id": "42"}}, 'payload.order.id:"42"'),
        ({"order": {"id": -1.5}}, "payload.order.id:-1.5"),
        ({"order": {"id": 2**63 - 1}}, f"payload.order.id:{2**63 - 1}"),
        ({"order": {"id": True}}, "payload.order.id:true"),
        ({"order": {"id": False}}, "payload.order.id:false"),
        ({"order": {"id": None}}, "payload.order.id:null"),
        ({"order": {"id": "null"}}, "payload.order.id:null"),
        ({"order": {"id": ""}}, 'payload.order.id:""'),
        ({"order": {"id": "a 'b' %s"}}, "payload.order.id:\"a 'b' %s\""),
        ({"order": {"id": "2026-01-02"}}, "payload.order.id:2026-01-02"),
    ],
)
def test_payloads_are_searched_by_path(payload: Any, text: str) -> None:
    message = samples.scheduled({**payload, "more": [1, 2]})
    samples.scheduled({"order": {"id": 43}})
    samples.scheduled({"order": {"other": 42}})
    samples.scheduled({"order": 42})
    samples.scheduled(["order", "id", 42])
    samples.scheduled(None)
    assert found(text) == {message.pk}


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("headers", "text"),
    [
        ({"tenant": "acme"}, "header.tenant:acme"),
        ({"tenant": "acme"}, "HEADER.tenant:acme state:scheduled"),
        ({"tenant": 5}, "header.tenant:5"),
        ({"trace": {"id": "x' OR 1=1 --"}}, 'header.trace.id:"x\' OR 1=1 --"'),
        ({"a.b": "%s"}, 'header."a.b":"%s"'),
    ],
)
def test_headers_are_searched_by_path(headers: Any, text: str) -> None:
    message = samples.scheduled(headers={**headers, "more": 1})
    samples.scheduled({"tenant": "acme", "trace": {"id": "x"}}, headers={"tenant": "other"})
    samples.scheduled()
    assert found(text) == {message.pk}


@pytest.mark.django_db
def test_a_path_of_headers_that_cannot_be_is_a_problem_and_a_key_may_begin_with_the_word() -> None:
    search = parse("header.:x header.tenant:")
    assert [problem.partition(": ")[2] for problem in search.problems] == [
        "not a path. Write payload.order.id:42 or header.tenant:acme.",
        "the value after the colon is missing.",
    ]
    message = samples.scheduled(key="header:5")
    assert found("header:5") == {message.pk}


@pytest.mark.django_db
@pytest.mark.parametrize("text", ['payload.id:"42"', "payload.id:true", "payload.id:1", "payload.id:null"])
def test_a_payload_value_of_another_type_is_not_found(text: str) -> None:
    samples.scheduled({"id": 42})
    samples.scheduled({"other": 1})
    if text != "payload.id:1":
        samples.scheduled({"id": 1})
    if text != "payload.id:true":
        samples.scheduled({"id": True})
    assert found(text) == set()


@pytest.mark.django_db
def test_overdue_retrying_running_and_finished_messages_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "OVERDUE_AFTER", timedelta(seconds=60))
    overdue = samples.scheduled(delay=0)
    unguarded(Message).filter(pk=overdue.pk).update(due_at=timezone.now() - timedelta(seconds=61))
    waiting = samples.scheduled(delay=0)
    later = samples.scheduled(delay="3h")
    retrying = samples.failed(samples.running(), reason="retry", delay=timedelta(hours=1))
    running = samples.running()
    consumed = samples.consumed()
    assert found("is:overdue") == {overdue.pk}
    assert found("due:<1m state:scheduled") == {overdue.pk, waiting.pk}
    assert found("late:30s") == {overdue.pk}
    assert found("late:1d") == set()
    assert found(parse_now("late:30s").frozen) == {overdue.pk}
    assert found("is:retrying") == {retrying.pk}
    assert found("attempts:1") == {retrying.pk}
    assert found("attempts:>1") == set()
    assert found("is:live") == {overdue.pk, waiting.pk, later.pk, retrying.pk, running.pk}
    assert found("is:finished") == {consumed.pk}
    assert found("worker:host") == {running.pk}
    assert found("worker:other") == set()
    assert found("finished:<1h") == {consumed.pk}
    assert found("finished:>1h") == set()
    assert found("created:<1h state:consumed") == {consumed.pk}
    assert found("due:>2h") == {later.pk}


@pytest.mark.django_db
def test_what_waits_in_a_paused_queue_is_paused_and_not_overdue() -> None:
    held, limited, late = (samples.scheduled(queue=queue) for queue in ("mails", "mails", "letters"))
    unguarded(Message).update(due_at=timezone.now() - timedelta(minutes=5))
    unguarded(Message).filter(pk=limited.pk).update(topic="t.limited")
    later = samples.scheduled(queue="mails", delay="1h")
    pause_queue("mails")
    override_limit(topic="t.limited", limit=0)
    assert found("is:overdue") == {late.pk}
    assert found("is:paused") == {held.pk}
    assert found("is:limited") == {limited.pk}
    assert found("queue:mails") == {held.pk, limited.pk, later.pk}
    resume_queue("mails")
    assert found("is:overdue") == {held.pk, late.pk}
    assert found("is:paused") == set()


@pytest.mark.django_db
def test_what_waits_for_programs_is_neither_overdue_nor_limited(settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "PULL_QUEUES": ["exports", "go.*"]}
    for queue in ("exports", "go.a"):
        samples.scheduled(queue=queue)
    # Names of queues are told apart by case.
    overdue = {samples.scheduled().pk, samples.scheduled(queue="GO.a").pk}
    unguarded(Message).update(due_at=timezone.now() - timedelta(minutes=5))
    assert found("is:overdue") == overdue
    override_limit(topic=samples.TOPIC, limit=0)
    assert found("is:overdue") == set()
    assert found("is:limited") == overdue
    assert found("limit:topic*") == overdue


# --- the documentation -----------------------------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[3]
TEXT = "".join((ROOT / f"docs/reference/{page}.rst").read_text("utf-8") for page in ("console", "permissions"))


@pytest.mark.parametrize("example", [example for example, _meaning in search_box.HELP])
def test_every_kind_of_term_is_described(example: str) -> None:
    assert f"``{example}``" in TEXT
    assert not parse(example).problems


def test_every_example_of_a_search_can_be_read() -> None:
    table = TEXT.partition("term                             finds")[2].partition("The page says below the box")[0]
    terms = [term for term in re.findall(r"``([^`]+)``", table) if term not in ("*", "created:", '"42"')]
    assert len(terms) > 20
    assert [term for term in terms if parse(term).problems] == []


def test_every_action_is_described() -> None:
    for action in action_table.CONSOLE_ACTIONS.values():
        assert re.search(rf"^{action.label}  ", TEXT, re.MULTILINE)


def test_the_policy_is_that_of_the_tests() -> None:
    assert POLICY.rstrip(";") in " ".join(TEXT.split())
