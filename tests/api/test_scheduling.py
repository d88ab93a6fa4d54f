"""The rows that schedule_message and schedule_messages write, and the calls that they refuse."""

from __future__ import annotations

import contextlib
import gc
import re
import socket
from datetime import UTC, datetime, timedelta
from enum import Enum, IntEnum
from typing import Any, get_type_hints

import pytest
from asgiref.sync import async_to_sync

from django_delayq import (
    Delivered,
    InvalidMessage,
    KeyConflict,
    MessageDict,
    MessageOptions,
    RegisteredHandler,
    RetryPolicy,
    aschedule_message,
    cancel_message,
    handler,
    reschedule_message,
    schedule_message,
    schedule_messages,
)
from django_delayq.api import scheduling
from django_delayq.core.states import State
from django_delayq.models import Message, Transition
from django_delayq.project import registry
from django_delayq.record import reads
from tests.conftest import close_publishers
from tests.support.steps import TOPIC, later, log, message
from tests.support.workers import is_quick

pytestmark = pytest.mark.django_db
both = pytest.mark.django_db(databases=["default", "other"])


# Who scheduled it is read from the row only.
FIELDS = [field.attname for field in Message._meta.concrete_fields if field.attname != "created_by"]


class Named(str, Enum):  # noqa: UP042
    """An enum whose members print as their names, not as their values."""

    TOPIC = TOPIC
    QUEUE = "slow"


class Level(IntEnum):
    HIGH = 7


def test_members_of_enums_are_written_as_their_values() -> None:
    terms: Any = {"topic": Named.TOPIC, "queue": Named.QUEUE, "priority": Level.HIGH, "payload": {"level": Level.HIGH}}
    for returned in (schedule_message(**terms), *schedule_messages([terms])):
        for row in (returned, message(returned.pk)):
            assert (type(row.topic), row.topic, row.queue, row.priority) == (str, TOPIC, "slow", 7)
            assert repr(row.payload) == "{'level': 7}"


def test_members_of_enums_in_settings_and_handlers_are_written_as_their_values(settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "DEFAULT_QUEUE": Named.QUEUE}
    handler("record.named", queue=Named.TOPIC, priority=Level.HIGH)(lambda message: None)
    for topic, queue, priority in (("record.named", TOPIC, 7), (TOPIC, "slow", 0)):
        for returned in (schedule_message(topic), *schedule_messages([{"topic": topic}])):
            for row in (returned, message(returned.pk)):
                assert (type(row.queue), row.queue, type(row.priority), row.priority) == (str, queue, int, priority)


@pytest.mark.parametrize("payload", ["x", object()])
def test_the_garbage_collector_runs_again_after_many_were_scheduled(payload: Any) -> None:
    with contextlib.suppress(InvalidMessage):
        schedule_messages([{"topic": TOPIC, "payload": payload}] * 3)
    assert gc.isenabled()


def test_options_of_any_kind_are_written_alone_and_together_as_they_were_given() -> None:
    at = datetime(2050, 1, 1, tzinfo=UTC)
    past = datetime.now(UTC).replace(microsecond=0) - timedelta(seconds=20)
    given: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"due_at": at}, {"due_at": at}),
        ({"delay": "15m", "queue": "slow", "priority": -3}, {"queue": "slow", "priority": -3}),
        ({"payload": {"list": [1, 2.5, None, True, "ü"]}}, {"payload": {"list": [1, 2.5, None, True, "ü"]}}),
        ({"timeout": "5m", "retry": ["4m"]}, {"timeout": 300, "retry": {"fixed": [240]}}),
        ({"timeout": False}, {"timeout": 0}),
        ({"lease": 90}, {"lease": 90}),
        ({"max_attempts": 4}, {"max_attempts": 4}),
        ({"retry": False}, {"retry": {"fixed": []}}),
        ({"headers": {"trace": "abc"}}, {"headers": {"trace": "abc"}}),
        ({"expires": "1h", "due_at": at}, {"expires_at": at + timedelta(hours=1)}),
        ({"expires": "10s", "due_at": past}, {"due_at": past, "expires_at": past + timedelta(seconds=10)}),
        ({"key": "a"}, {"key_deliveries": None, "key_for": None}),
        ({"key": "b", "unique": "scheduled"}, {"key_deliveries": 0, "key_for": None}),
        ({"key": "c", "unique": "1h", "expires": "1h"}, {"key_deliveries": None, "key_for": 3600}),
    ]
    for options, values in given:
        one_of_many: Any = {"topic": f"{TOPIC}.many", **options}
        for returned in (schedule_message(TOPIC, **options), *schedule_messages([one_of_many])):
            written = message(returned.pk)
            assert {name: getattr(written, name) for name in values} == values
            differing = [name for name in FIELDS if getattr(returned, name) != getattr(written, name)]
            assert (differing, returned.existed) == ([], False)
            (row,) = log(returned.pk)
            assert (row.number, row.from_state, row.to_state, row.delivery) == (1, None, State.SCHEDULED, 0)
            assert (row.at, row.due_at) == (written.created_at, written.due_at)


def test_the_defaults_are_now_the_default_queue_and_no_key() -> None:
    before = reads.now("default")
    nothing: Any = dict.fromkeys({*get_type_hints(MessageOptions)} - {"on_conflict", "unique"})
    for row in (schedule_message(TOPIC), schedule_message(TOPIC, **nothing)):
        assert (row.queue, row.priority, row.key, row.payload, row.headers) == ("default", 0, None, None, {})
        assert timedelta(0) <= row.due_at - before < timedelta(seconds=60)


def test_a_due_time_is_rounded_up_to_a_tenth_of_a_millisecond() -> None:
    moment = datetime(2050, 1, 1, 0, 0, 0, 1, tzinfo=UTC)
    expected = datetime(2050, 1, 1, 0, 0, 0, 100, tzinfo=UTC)
    many = schedule_messages([{"topic": TOPIC, "due_at": moment}, {"topic": TOPIC, "due_at": expected}])
    for row in (schedule_message(TOPIC, due_at=moment), schedule_message(TOPIC, due_at=expected), *many):
        assert row.due_at == message(row.pk).due_at == expected


def test_a_message_has_its_handlers_queue_and_priority_unless_the_call_names_others() -> None:
    handler("record.queued", queue="slow", priority=7)(lambda message: None)
    own = schedule_message("record.queued")
    assert (own.queue, own.priority) == ("slow", 7)
    terms: Any = {"topic": "record.queued", "queue": "fast", "priority": 0}
    for called in (schedule_message(**terms), *schedule_messages([terms])):
        assert (called.queue, called.priority) == ("fast", 0)


def test_a_policy_is_stored_as_json_and_one_with_code_is_refused() -> None:
    policy = RetryPolicy.exponential("5s", max_attempts=3)
    assert RetryPolicy.from_json(message(later(retry=policy).pk).retry) == policy
    assert message(later(retry=False).pk).retry == {"fixed": []}
    assert message(later(retry=None).pk).retry is None
    with pytest.raises(InvalidMessage, match="function"):
        later(retry=lambda attempt, error: 5)
    with pytest.raises(InvalidMessage, match="names exceptions"):
        later(retry=RetryPolicy.exponential(never=ValueError))
    assert Message.objects.count() == 3


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        *[
            ({"on_conflict": choice}, f"on_conflict='{choice}' needs a key")
            for choice in ("keep", "replace", "debounce", "merge", "merge_debounce")
        ],
        *[({"unique": choice}, "unique needs a key") for choice in ("scheduled", "1h", timedelta(hours=1), 60)],
    ],
    ids=repr,
)
def test_a_choice_about_a_key_without_a_key_is_refused(choice: Any, words: str) -> None:
    with pytest.raises(InvalidMessage, match=f"^{words}"):
        schedule_message(TOPIC, **choice)
    batch: list[Any] = [{"topic": TOPIC, "key": "a", **choice}, {"topic": TOPIC, **choice}]
    with pytest.raises(InvalidMessage, match=f"^message 1: {words}"):
        schedule_messages(batch)
    assert not Message.objects.exists()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("countdown", "delay"),
        ("eta", "due_at"),
        ("at", "due_at"),
        ("run_after", "due_at"),
        ("kwargs", "payload"),
        ("delya", "delay"),
        ("max_age", "expires"),
        ("zzz", None),
        ("ends_at", None),
    ],
)
def test_an_argument_that_does_not_exist_names_the_one_that_is_meant(name: str, meant: str | None) -> None:
    said = f"{name} ({f'write {meant}' if meant else 'what the handler needs is in the payload, a dict'})"
    given: Any = {name: "5m"}
    for call in (schedule_message, async_to_sync(aschedule_message)):
        with pytest.raises(TypeError, match=rf"^schedule_message\(\) has no such argument: {re.escape(said)}$"):
            call(TOPIC, **given)
    batch: Any = [{"topic": TOPIC, **given}]
    with pytest.raises(InvalidMessage, match=rf"^message 0: unknown: {re.escape(said)}$"):
        schedule_messages(batch)
    assert not Message.objects.exists()


def test_every_argument_that_is_guessed_exists() -> None:
    assert {meant for meant in scheduling._MEANT.values() if meant.isidentifier()} <= scheduling._NAMES
    assert not set(scheduling._MEANT) & scheduling._NAMES


def test_the_texts_of_the_calls_name_each_option_that_there_is() -> None:
    options = {*get_type_hints(MessageOptions)}
    for call in (schedule_message, RegisteredHandler.schedule):
        named = {*re.findall(r"``(\w+)``", call.__doc__ or "")}
        assert named >= options, call
    assert {*get_type_hints(MessageDict)} == options | {"topic", "payload"}


@both
def test_a_handler_schedules_messages_of_its_topic_by_itself() -> None:
    @handler("record.own", queue="slow")
    def own(message: Delivered[dict[str, int]]) -> None: ...

    one = own.schedule({"n": 1}, delay="10m", key="k")
    two = async_to_sync(own.aschedule)({"n": 2}, priority=3)
    assert own.schedule({"n": 3}, key="k", on_conflict="keep").pk == one.pk
    assert own.schedule(payload={"n": 3}, using="other")._state.db == "other"
    assert [(row.topic, row.queue, row.payload) for row in (message(one.pk), message(two.pk))] == [
        ("record.own", "slow", {"n": 1}),
        ("record.own", "slow", {"n": 2}),
    ]


AT = datetime(2050, 1, 1, tzinfo=UTC)
# Two messages that differ in little: the second is wrong.
WRONG: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "topic": ({}, {"topic": "two words"}),
    "payload": ({"payload": 1}, {"payload": {1: 2}}),
    "large payload": ({"payload": 1}, {"payload": "x" * 300_000}),
    "both times": ({"delay": 60}, {"delay": 60, "due_at": AT}),
    "delay": ({"delay": 1}, {"delay": -1}),
    "due_at": ({"due_at": AT}, {"due_at": AT.replace(year=2020)}),
    "due_at without zone": ({"due_at": AT}, {"due_at": AT.replace(tzinfo=None)}),
    "queue": ({"queue": "a"}, {"queue": "a b"}),
    "priority": ({"priority": 1}, {"priority": 101}),
    "True for 1": ({"priority": 1}, {"priority": True}),
    "key": ({"key": "a"}, {"key": ""}),
    "on_conflict": ({"key": "a"}, {"key": "b", "on_conflict": "overwrite"}),
    "expires": ({"expires": 1}, {"expires": 0}),
    "max_attempts": ({"max_attempts": 1}, {"max_attempts": 0}),
    "retry": ({"retry": [1]}, {"retry": [-1]}),
    "timeout": ({"timeout": "1d"}, {"timeout": "31d"}),
    "no timeout": ({"timeout": False}, {"timeout": True}),
    "lease": ({"lease": 1}, {"lease": 0.5}),
    "headers": ({"headers": {"a": 1}}, {"headers": {"a": object()}}),
}


@pytest.mark.parametrize(("good", "wrong"), WRONG.values(), ids=list(WRONG))
def test_an_impossible_message_is_refused_before_anything_is_written(good: Any, wrong: Any) -> None:
    batch: list[Any] = [{"topic": TOPIC}, {"topic": TOPIC, **good}, {"topic": TOPIC, **wrong}]
    with pytest.raises(InvalidMessage) as alone:
        schedule_message(**batch[2])
    with pytest.raises(type(alone.value), match=r"^message 2: "):
        schedule_messages(batch)
    assert not Message.objects.exists()
    assert not Transition.objects.exists()


@pytest.mark.parametrize("wrong", ["x", {}, {"payload": 1}, None, {"topic": TOPIC, "using": "other"}], ids=repr)
def test_anything_but_a_dict_of_arguments_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidMessage, match=r"^message 0: "):
        schedule_messages([wrong])


def test_messages_that_are_like_each_other_keep_what_is_their_own() -> None:
    wanted: list[MessageDict] = [
        {"topic": TOPIC, "payload": [n], "due_at": AT + timedelta(days=n), "priority": 3} for n in range(3)
    ]
    returned = schedule_messages([*wanted, {"topic": TOPIC, "priority": 3}])
    for row, n in zip(returned[:3], range(3), strict=True):
        for each in (row, message(row.pk)):
            assert (each.payload, each.due_at, each.priority) == ([n], AT + timedelta(days=n), 3)
    last = message(returned[3].pk)
    assert (last.payload, last.priority) == (None, 3)
    assert last.due_at < AT


@pytest.mark.parametrize("payload", [{"n": 0}, {"n": 0, "all": [0]}])
def test_a_payload_that_the_caller_changes_later_stays_in_the_message_as_it_was(payload: dict[str, Any]) -> None:
    given = {**payload}
    messages = [*schedule_messages([{"topic": TOPIC, "payload": payload}] * 3), schedule_message(TOPIC, payload)]
    payload["n"] = 9
    assert [message.payload for message in messages] == [given] * 4
    messages[0].payload = None
    assert [message.payload for message in messages[1:]] == [given] * 3


def test_many_messages_are_written_in_their_order_with_all_they_have() -> None:
    wanted: list[MessageDict] = [
        {"topic": TOPIC, "payload": number, "priority": number % 7, "delay": 60 + number} for number in range(203)
    ]
    wanted[5] |= {"key": "five", "expires": "1h", "retry": ["4m"], "max_attempts": 2, "headers": {"h": 1}}
    wanted[6] |= {"timeout": 0.5, "lease": "2m"}
    wanted[7] |= {"timeout": False}
    returned = scheduling.write_all(None, wanted, scheduling.Bulk(inserted=20, collected=90, kinds=120))
    assert [row.payload for row in returned] == list(range(203))
    assert len({row.pk for row in returned}) == 203
    written = Message.objects.in_bulk([row.pk for row in returned])
    for row in returned:
        for name in FIELDS:
            assert getattr(row, name) == getattr(written[row.pk], name), name
    assert returned[5].key == "five"
    numbers = Transition.objects.values_list("message_id", "number", "to_state")
    assert sorted(numbers) == sorted((row.pk, 1, "scheduled") for row in returned)


def test_a_batch_with_one_bad_message_writes_nothing() -> None:
    later(key="taken")
    assert schedule_messages([]) == schedule_messages(iter([])) == []
    with pytest.raises(KeyConflict):
        schedule_messages([{"topic": TOPIC}, {"topic": TOPIC, "key": "taken"}, {"topic": TOPIC}])
    assert Message.objects.count() == 1
    assert Transition.objects.count() == 1


@both
def test_a_message_of_another_database_is_written_and_changed_there() -> None:
    one = later(using="other", key="k")
    (two,) = schedule_messages([{"topic": TOPIC, "delay": 60}], using="other")
    assert one._state.db == "other"
    assert not Message.objects.exists()
    assert Message.objects.using("other").count() == Transition.objects.using("other").count() == 2
    later(key="k")
    assert reschedule_message(one, delay=5).state == State.SCHEDULED
    assert cancel_message(topic=TOPIC, key="k", using="other").id == one.pk
    assert cancel_message(two.pk, using="other")
    assert set(Message.objects.using("other").values_list("state", flat=True)) == {State.CANCELLED}
    assert set(Message.objects.values_list("state", flat=True)) == {State.SCHEDULED}


@pytest.mark.django_db(transaction=True)
def test_sentinels_that_say_nothing_do_not_delay_a_call(
    redis_server: object, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        settings.CACHES = {
            **settings.CACHES,
            "sentinels": {
                "BACKEND": "django_redis.cache.RedisCache",
                "LOCATION": "redis://mymaster/0",
                "OPTIONS": {
                    "CLIENT_CLASS": "django_redis.client.SentinelClient",
                    "CONNECTION_POOL_CLASS": "redis.sentinel.SentinelConnectionPool",
                    "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
                    "SENTINELS": [mute.getsockname()],
                },
            },
        }
        settings.DELAYQ = {**settings.DELAYQ, "REDIS": "sentinels"}

        def first_call() -> None:
            close_publishers()
            schedule_message("t.ok", delay=5)

        # A client without timeouts of our own waits for 5 s.
        is_quick(first_call, 4.5)
    # Of the Sentinel's own silence, or of the time for the whole of it.
    assert "Redis does not answer" in caplog.text


@pytest.fixture
def _debug(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.DEBUG = True
    settings.DELAYQ = {**settings.DELAYQ, "QUEUES": ["default", "mails"]}
    monkeypatch.setattr(registry, "declared", {})
    handler("orders.close", queue="invoices")(lambda message: None)


@pytest.mark.usefixtures("_debug")
def test_a_name_like_a_known_one_is_asked_for_once_in_development(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        schedule_message("order.close")
        schedule_messages([{"topic": "orders.close", "queue": queue} for queue in ("mails", "mail", "invoice")])
    assert [record.getMessage() for record in caplog.records if "Did you mean" in record.getMessage()] == [
        "A message is scheduled for the topic order.close, which no code here names. Did you mean orders.close?",
        "A message is scheduled for the queue mail, which no code here names. Did you mean mails?",
        "A message is scheduled for the queue invoice, which no code here names. Did you mean invoices?",
    ]


@pytest.mark.usefixtures("_debug")
def test_an_action_by_key_that_finds_no_message_asks_about_the_topic(caplog: pytest.LogCaptureFixture) -> None:
    schedule_message("orders.close", key="5")
    assert not cancel_message(topic="order.close", key="5")
    told = "There is no message to cancel with this key and the topic order.close, which no code here names. Did you"
    assert [record.getMessage() for record in caplog.records] == [f"{told} mean orders.close?"]
    assert cancel_message(topic="orders.close", key="5")
    assert not cancel_message(topic="orders.close", key="6")
    assert len(caplog.records) == 1


@pytest.mark.usefixtures("_debug")
def test_no_name_is_asked_for_in_production_nor_one_that_is_like_none(
    settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    schedule_message("mail.send", queue="elsewhere")
    settings.DEBUG = False
    schedule_message("order.close", queue="mail")
    cancel_message(topic="order.close", key="5")
    assert "Did you mean" not in caplog.text
