"""What people type first who come from another queue, and the words that answer them.

Each row has what is typed, and words that the answer has: what to write instead. Whoever finds a mistake that is not
answered adds a row.
"""

from __future__ import annotations

import copy
import pickle
import sys
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from django.core import checks
from django.test import override_settings

import django_delayq
from django_delayq import handler, schedule_message
from django_delayq.models import Message
from django_delayq.project import registry
from django_delayq.recurring import declarations
from django_delayq.testing import Delayq
from tests.support.commands import run

PREPARED = """
import datetime, dataclasses, enum, pathlib
from datetime import timedelta
from django.contrib.auth.models import User
from django.http import HttpRequest
from django.test import SimpleTestCase
from django.utils import timezone
from django_delayq import *
from django_delayq.models import Message
from django_delayq.recurring import create_schedule
from django_delayq.testing import Delayq, DelayqMixin
"""

FOUR = "retry=RetryPolicy.exponential(max_attempts=4)"
NEXT = "write the next schedule_message() at the end of the handler"
RECURRING = "from django_delayq.recurring import recurring"

IMPORTS = [
    ("from django_delayq import recurring\n@recurring('0 3 * * *')\ndef f(message): ...", RECURRING),
    ("from django_delayq import shared_task", "write @handler("),
    ("from django_delayq import task", "write @handler("),
    ("from django_delayq import job", "write @handler("),
    ("from django_delayq import actor", "write @handler("),
    ("from django_delayq import periodic_task", RECURRING),
    ("from django_delayq import crontab", RECURRING),
    ("from django_delayq import async_task", "write schedule_message"),
    ("from django_delayq import chain", "write schedule_message at the end of the handler"),
    ("from django_delayq import Retry", "write RetryLater"),
    ("from django_delayq import Message", "write from django_delayq.models import Message"),
    ("from django_delayq import create_schedule", "write from django_delayq.recurring import create_schedule"),
    ("from django_delayq import Middleware", "write from django_delayq.middleware import Middleware"),
    ("from django_delayq import Delayq", "write from django_delayq.testing import Delayq"),
]

DECORATORS = [
    ("@handler\ndef f(message): ...", 'write @handler("orders.close")'),
    ("@handler('m.new', bind=True)\ndef f(self, message): ...", "bind (leave it out)"),
    ("handler('m.new', max_retries=3)", FOUR),
    ("handler('m.new', retries=3, retry_delay=10)", FOUR),
    ("handler('m.new', max_attempts=4)", FOUR),
    ("handler('m.new', autoretry_for=(ValueError,))", "retry=RetryPolicy.exponential(on="),
    ("handler('m.new', retry_backoff=True)", "retry=RetryPolicy.exponential("),
    ("handler('m.new', serializer='json')", "serializer (leave it out)"),
    ("handler('m.new', soft_time_limit=30)", "write timeout"),
    ("handler(name='m.new')", "name (write topic)"),
    ("handler('m.new', actor_name='x')", "actor_name (write topic)"),
    ("handler('m.new', max_age=1000)", "max_age (write expires)"),
    ("handler('m.new', queueing_lock='x')", "write key= and unique= where the message is scheduled"),
    ("handler('m.new', unique=True)", "write key= and unique= where the message is scheduled"),
    ("handler('m.new', countdown=5)", "write delay= or due_at= where the message is scheduled"),
    ("handler('m.new', takes_context=True)", "takes_context (leave it out)"),
    ("handler('m.new', cron='0 3 * * *')", 'write @recurring("0 3 * * *") above @handler'),
    ("handler('m.new', rate_limit='100/m')", "rate_limit (write rate)"),
    ("handler('m.new', rate='100 per minute')", "such as '100/m'"),
    ("handler('m.new', retry=3)", "RetryPolicy.exponential(max_attempts=4)"),
    ("handler('m.new', retry=RetryPolicy)", "write RetryPolicy.exponential(max_attempts=4)"),
    ("handler('m.new', retry=RetryPolicy.exponential)", "write RetryPolicy.exponential(max_attempts=4)"),
    ("handler('m.new', retry=RetryPolicy.never)", "write RetryPolicy.exponential(max_attempts=4)"),
    ("@handler('m.new')\ndef f(order, amount): ...", "takes the message as its only argument"),
    ("handler('m.new', limit_key=str)", "limit_key needs a limit or a rate"),
]

POLICIES = [
    ("RetryPolicy.exponential(max_retries=5)", "max_retries (write max_attempts=6)"),
    ("RetryPolicy.exponential(min_backoff=5, max_backoff=60)", "max_backoff (write cap), min_backoff (write base)"),
    ("RetryPolicy.exponential(autoretry_for=ValueError)", "autoretry_for (write on)"),
    ("RetryPolicy.exponential('10s', 3)", "name the others (cap=, factor="),
    ("RetryPolicy.fixed(delay='5m')", 'write delays, a list such as ["10s", "1m"]'),
    ("RetryPolicy.fixed(['5m'], max_retries=3)", "write one delay for each retry into the list"),
    ("RetryPolicy.linear('5m')", "write RetryPolicy.fixed(["),
]

CALLS = [
    *[
        (f"close.{call}", "schedule its message with close.schedule(payload, delay=…)")
        for call in (
            *("delay(17)", "apply_async((17,), countdown=60)", "s(17)", "si(17)", "signature()", "delay_on_commit(17)"),
            *("send(17)", "send_with_options(args=(17,), delay=1000)", "configure(lock='a').defer(order=17)"),
            *("enqueue(17)", "using(priority=5).enqueue(17)", "perform_async(17)"),
        )
    ],
    ("close.schedule(order=17)", "order (what the handler needs is in the payload, a dict)"),
    ("close.schedule({}, countdown=60)", "countdown (write delay)"),
    ("close.schedule({}, eta=timezone.now())", "eta (write due_at)"),
    ("close.schedule({}, link=close)", f"link ({NEXT})"),
    ("close.schedule({}, depends_on=5)", f"depends_on ({NEXT})"),
    ("close.schedule({}, hook='a.b')", f"hook ({NEXT})"),
    ("close.schedule({}, link_error=close)", "write on_dead"),
    ("close.schedule({}, serializer='json')", "serializer (leave it out)"),
    ("close.schedule({}, max_retries=3)", "max_retries (write max_attempts=4)"),
    ("close.schedule({}, max_retries='3')", "max_retries (write max_attempts=…)"),
    ("close.schedule({}, retry=3)", "RetryPolicy.exponential(max_attempts=4)"),
    ("close.schedule({}, at_front=True)", "at_front (write priority)"),
    ("close.schedule({}, job_timeout=5)", "job_timeout (write timeout)"),
    ("close.schedule({}, lock='x')", "write limit_key, and limit=1 at @handler"),
    ("close.schedule({}, group='x')", "write it into headers or into the payload"),
    ("close.schedule({}, every='5m')", "write @recurring, or create_schedule()"),
    ("schedule_message(close, {})", "topic must be text, not a function; write 'm.close'"),
    ("schedule_message(print, {})", "topic must be text, not a function"),
    ("schedule_message('m.close', {}, delay='5 minutes')", "text such as '90s', '15m'"),
    ("schedule_message('m.close', {}, delay=timezone.now())", "a datetime is given as due_at"),
    ("schedule_message('m.close', {}, due_at=60)", "a time from now is given as delay"),
    ("schedule_message('m.close', {}, due_at=datetime.datetime(2050, 1, 1))", "e.g. django.utils.timezone.now()"),
    ("schedule_message('m.close', {}, expires=timezone.now())", "it counts from the due time"),
    ("schedule_message('m.close', {}, key=17)", "key must be text, such as str(order.pk)"),
    ("schedule_message('m.close', {}, key='17', unique=True)", 'unique must be "live", "scheduled", or a duration'),
    ("schedule_message('m.close', {}, key='17', on_conflict='ignore')", "is one of error, keep, replace, debounce"),
    ("schedule_message('m.close', {}, unique='1h')", "unique needs a key"),
    ("schedule_message('m.close', {}, limit_key='x')", "has no limit and no rate"),
    ("schedule_messages([('m.close', {})])", "takes a list of dicts with a 'topic' each"),
    ("schedule_messages({'topic': 'm.close'})", "takes a list of dicts with a 'topic' each"),
    (
        "schedule_messages([{'topic': 'm.close', 'args': [1], 'countdown': 5}])",
        "args (write payload), countdown (write",
    ),
    ("schedule_messages([{'topic': 'm.close', 'max_retries': 3}])", "max_retries (write max_attempts=4)"),
    ("limited.schedule({})", "'customer' limit_key of @handler('m.limited')"),
    ("limited.schedule({'customer': ['a']})", "not list limit_key of @handler('m.limited')"),
]

PAYLOADS = [
    (
        "class Order:\n    def __iter__(self): yield 'id', 1\n    def model_dump(self): ...\nclose.schedule([Order()])",
        'payload[0] is of type Order, which is not JSON; pass value.model_dump(mode="json")',
    ),
    ("@dataclasses.dataclass\nclass Order:\n    id: int\nclose.schedule(Order(1))", "pass dataclasses.asdict(value)"),
    ("class Order:\n    __attrs_attrs__ = ()\nclose.schedule(Order())", "pass attrs.asdict(value)"),
    ("class Color(enum.Enum):\n    RED = 1\nclose.schedule({'color': Color.RED})", "pass its .value"),
    ("close.schedule({'file': b'abc'})", "pass text, such as value.decode() or base64"),
    ("close.schedule({'ids': {1, 2}})", "pass a list"),
    ("close.schedule({'ids': (number for number in (1, 2))})", "pass a list"),
    ("close.schedule({'ids': {1: 2}.keys()})", "pass a list"),
    ("close.schedule(User(pk=5))", "pass its pk"),
    ("close.schedule(User.objects.all())", 'list(queryset.values_list("pk", flat=True))'),
    ("close.schedule(HttpRequest())", "pass a dict of what is needed of the HttpRequest"),
    ("close.schedule({'path': pathlib.Path('/tmp')})", "pass str(value)"),
    ("close.schedule({'call': close})", "pass data; it was perhaps to be called"),
    ("close.schedule({'kind': User})", "pass data; it was perhaps to be called"),
    ("close.schedule({1: 'a'})", "has a key that is not a string"),
]

MESSAGES = [
    ("close.schedule({}).cancel()", "write cancel_message(message)"),
    ("close.schedule({}).revoke()", "write cancel_message(message)"),
    ("close.schedule({}).reschedule(delay='5m')", "write reschedule_message(message, delay="),
    ("close.schedule({}).requeue()", "write requeue_message(message)"),
    ("close.schedule({}).run()", "write run_message(message)"),
    ("close.schedule({}).get(timeout=5)", "then message.result, with keep_result=True at @handler"),
    ("close.schedule({}).get_status()", "write message.refresh_from_db(), then message.state"),
    ("close.schedule({}).task_id", "write message.id"),
    ("Message.objects.create(topic='m.close')", "schedule_message() makes a message"),
    ("Message.objects.all().delete()", "cancel_message() keeps it from running"),
    ("cancel_message([1, 2])", "write a queryset: Message.objects.filter(pk__in=ids)"),
    ("cancel_message({1, 2})", "write a queryset: Message.objects.filter(pk__in=ids)"),
    ("cancel_message('order-17')", "write topic= and key="),
    ("cancel_message(key='order-17')", "by topic and key"),
    ("cancel_message(close)", "write a message or its id, or topic= and key="),
    ("cancel_message(task_id=5, terminate=True)", "task_id (write target), terminate (leave it out)"),
    ("cancel_message(5, countdown=5)", "countdown (write reschedule_message())"),
    ("run_message(5, eta=timezone.now())", "eta (write reschedule_message())"),
    ("reschedule_message(5, '15m')", "name the others (delay=, due_at="),
    ("reschedule_message(5, countdown=60)", "countdown (write delay)"),
    ("requeue_message(5, due_at=timezone.now())", "due_at (write delay)"),
]

IN_HANDLERS = [
    ("raise RetryLater(countdown=60)", "countdown (write delay)"),
    ("raise RetryLater(eta=timezone.now())", "eta (write delay)"),
    ("raise RetryLater(timezone.now())", "write the time until then: due - timezone.now()"),
    ("raise RetryLater('1m', exc=ValueError())", "write raise RetryLater(…) from error"),
    ("raise RetryLater('1m', max_retries=3)", "at @handler"),
    ("message.retry(countdown=60)", 'write raise RetryLater("60s")'),
    ("message.request.retries", "write message.id, and message.attempt"),
    ("message.retries", "write message.attempt"),
    ("message.data['order']", "write message.payload"),
    ("message.get('order')", "write message.payload"),
    ("message['order']", "write message.payload"),
    ("message.cancel()", 'write raise Reject("why")'),
    ("message.save()", "return, which ends the message"),
    ("message.is_aborted()", "write message.cancel_requested"),
    ("cancel_message(message)", "write message.id"),
]

SCHEDULES = [
    ("@recurring\n@handler('m.new')\ndef f(message): ...", 'write @recurring("0 3 * * *") or @recurring(every="10m")'),
    ("recurring(hour=3, minute=0)", 'hour (write cron, such as "0 3 * * *")'),
    ("recurring(minutes=5)", 'minutes (write every, such as "10m")'),
    ("create_schedule('a', 'm.close', cron='5m')", "an interval is every='5m'"),
    ("create_schedule('a', 'm.close', cron=timedelta(minutes=5))", "an interval is every"),
    ("create_schedule('a', 'm.close', cron='every day')", 'write one such as "0 3 * * *"'),
    ("create_schedule('a', 'm.close', schedule_type='D', repeats=5)", 'write cron, such as "0 3 * * *", or every'),
    ("create_schedule('a', 'm.close', trigger='interval', minutes=5)", 'minutes (write every, such as "10m")'),
    ("create_schedule('a', 'm.close', every='5m', next_run=timezone.now())", "next_run (write starts_at)"),
    ("create_schedule('a', 'm.close', every='5m', replace_existing=True)", 'write on_conflict="replace"'),
    ("create_schedule('a', close, every='5m')", "write 'm.close'"),
    ("declare('0 3 * * *')", "put @handler beside @recurring"),
    ("declare('0 3 * * *', topic='m.close', args=[30])", "give a handler a payload"),
]

TESTS = [
    ("delayq.run()", "write drain()"),
    ("delayq.flush()", "write drain()"),
    ("delayq.advance('5m')", 'write travel("15m")'),
    ("delayq.messages", "write scheduled()"),
    ("delayq.assert_enqueued('m.close')", 'write assert_scheduled("orders.close")'),
    ("delayq.assert_scheduled('m.close', delay='5m')", "delay (write due)"),
    ("delayq.assert_scheduled('m.close', args=[5])", "args (write payload)"),
    ("delayq.assert_scheduled('m.cloze')", "did you mean 'm.close'"),
    ("delayq.assert_scheduled(close)", "write 'm.close'"),
    ("delayq.perform(close, {})", "write 'm.close'"),
    (
        "class Wrong(SimpleTestCase, DelayqMixin):\n    def test(self): self.delayq\nWrong('test').debug()",
        "write DelayqMixin before TestCase",
    ),
]

SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"REDIS_URL": "redis://x"}, "Write REDIS."),
    ({"BROKER_URL": "redis://x"}, "Write REDIS."),
    ({"CELERY_BROKER_URL": "redis://x"}, "Write REDIS."),
    ({"CELERY_TASK_TIME_LIMIT": 5}, "Write TIMEOUT."),
    ({"CELERY_TASK_ALWAYS_EAGER": True}, 'Write TESTING, as "immediate", in the tests.'),
    ({"CELERY_BEAT_SCHEDULE": {}}, 'Write @recurring("0 3 * * *") above @handler.'),
    ({"TASK_SERIALIZER": "json"}, "Leave it out."),
    ({"RQ_QUEUES": {}}, "Write QUEUES."),
    ({"Q_CLUSTER": {}}, "Write REDIS, QUEUES, TIMEOUT and RETRY instead of it."),
    ({"WORKERS": 4}, "Write an option of run_delayq: --processes, --threads"),
    ({"MAX_RETRIES": 4}, "Write RETRY, as RetryPolicy.exponential(max_attempts=5)."),
    ({"redis": "redis://x"}, "Write REDIS."),
    ({"HORIZONT": 5}, "Write HORIZON."),
    ({"REDIS": "localhost:6379"}, "or write a Redis URL, such as 'redis://localhost:6379/0'"),
    ({"RETRY": 3}, "RetryPolicy.exponential(max_attempts=4)"),
    ({"QUEUES": "default"}, "must be a list of queue names"),
    ({"TESTING": True}, "must be one of manual, immediate"),
    ({"RETENTION": None}, "write False for never"),
]

COMMANDS = [
    ("run_delayq -A mysite worker", "leave out -A; leave out worker"),
    ("run_delayq worker -B -l info", "leave out worker; leave out -B; instead of -l write -v 2"),
    (
        "run_delayq -Q mails,default -c 8",
        "instead of -Q write --queue, once for each queue; instead of -c write --threads",
    ),
    ("run_delayq --queue mails,default", "write --queue mails --queue default"),
    ("run_delayq -E --without-gossip", "leave out -E; leave out --without-gossip"),
    ("run_delayq default", "instead of default write --queue"),
    ("run_delayq --with-scheduler", "leave out --with-scheduler"),
    ("run_delayq -w 8 -k thread", "instead of -w write --processes and --threads; leave out -k"),
    ("run_delayq --watch .", "instead of --watch write --reload"),
    ("run_delayq --run-once", "instead of --run-once write --once"),
    ("run_delayq --queue-name mails --batch", "instead of --batch write --once"),
    ("run_delayq --max-memory-per-child 200000", "write it as 200M"),
    ("delayq_act revoke 5", "instead of revoke write cancel"),
    ("delayq_act retry 5", "instead of retry write requeue"),
    ("delayq_act purge --all", "instead of --all write a selector"),
    ("delayq_act cancel orders.close", "to name messages otherwise write --topic, --queue or --key"),
]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch, own_schedules: None) -> Iterator[dict[str, Any]]:
    """The names that a module of a project has: two handlers, and what it imports."""
    found: dict[str, Any] = {"__name__": "mysite.handlers", "declare": declare, "recurring": declarations.recurring}
    # A dataclass looks its module up.
    monkeypatch.setitem(sys.modules, "mysite.handlers", ModuleType("mysite.handlers"))
    exec(PREPARED, found)
    exec("@handler('m.close')\ndef close(message): ...", found)
    exec(
        "@handler('m.limited', limit=1, limit_key=lambda message: message.payload['customer'])\n"
        "def limited(message): ...",
        found,
    )
    yield found
    for topic in ("m.close", "m.limited", "m.new"):
        registry.unregister(topic)


def declare(cron: str, **options: Any) -> None:
    """Declare a schedule, and raise what the system check says of it."""

    def function(message: object) -> None: ...

    declarations.recurring(cron, **options)(function)
    _found, mistakes = declarations.collect()
    raise ValueError([mistake.reason for mistake in mistakes])


def answer(typed: str, names: dict[str, Any]) -> str:
    """Return what a line of Python raises, with its notes."""
    with pytest.raises(BaseException) as raised:
        exec(typed, names)
    return " ".join([str(raised.value), *getattr(raised.value, "__notes__", ())])


def first_lines(rows: list[tuple[str, str]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("typed", "words"), rows, ids=[typed.replace("\n", "; ")[:70] for typed, _ in rows])


@first_lines([*IMPORTS, *DECORATORS, *POLICIES])
def test_what_is_typed_in_a_module_is_answered_with_what_to_write(
    typed: str, words: str, names: dict[str, Any]
) -> None:
    assert words in answer(typed, names)


@pytest.mark.django_db
@first_lines([*CALLS, *PAYLOADS, *MESSAGES, *SCHEDULES])
def test_a_call_is_answered_with_what_to_write(typed: str, words: str, names: dict[str, Any]) -> None:
    assert words in answer(typed, names)


@first_lines(IN_HANDLERS)
def test_what_a_handler_does_is_answered_with_what_to_write(typed: str, words: str, names: dict[str, Any]) -> None:
    exec(f"@handler('m.new')\ndef new(message):\n{textwrap.indent(typed, '    ')}", names)
    with Delayq() as delayq:
        assert words in answer("delayq.perform('m.new', {'order': 5})", {**names, "delayq": delayq})


@pytest.mark.django_db
@first_lines(TESTS)
def test_what_a_test_does_is_answered_with_what_to_write(typed: str, words: str, names: dict[str, Any]) -> None:
    with Delayq() as delayq:
        assert words in answer(typed, {**names, "delayq": delayq})


@pytest.mark.parametrize(("given", "words"), SETTINGS, ids=[next(iter(given)) for given, _ in SETTINGS])
def test_a_setting_is_answered_with_what_to_write(given: dict[str, Any], words: str) -> None:
    with override_settings(DELAYQ=given):
        (found,) = [one for one in checks.run_checks(tags=["delayq"]) if one.id != "delayq.W001"]
    assert words in (found.hint or "")


@override_settings(DELAYQ_REDIS_URL="redis://x", DELAYQ_FLAVOUR="sweet", REDIS_URL="redis://x")
def test_a_setting_beside_the_dict_is_named_unless_it_is_the_project_s_own() -> None:
    (found,) = checks.run_checks(tags=["delayq"])
    assert (found.id, found.msg[:16], found.hint) == ("delayq.W007", "DELAYQ_REDIS_URL", "Write REDIS.")


@first_lines(COMMANDS)
def test_a_command_line_is_answered_with_what_to_write(typed: str, words: str) -> None:
    ran = run(*typed.split())
    assert (ran.code != 0, words in ran.err) == (True, True), ran.err


# --- what is right is not touched -------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_who_asks_whether_there_is_a_name_is_answered_no(names: dict[str, Any]) -> None:
    message = schedule_message("m.close", {"order": 5})
    for one in (message, copy.copy(message), copy.deepcopy(message), pickle.loads(pickle.dumps(message))):
        assert not any(hasattr(one, name) for name in ("cancel", "status", "get", "zzz"))
        assert one.payload == {"order": 5}
    assert not hasattr(Message, "cancel")
    assert not any(hasattr(django_delayq, name) for name in ("shared_task", "Message", "zzz"))
    with pytest.raises(AttributeError, match="write @handler"):
        django_delayq.shared_task  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match="'Message' object has no attribute 'zzz'"):
        message.zzz  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.django_db
def test_an_annotation_of_a_query_may_have_a_name_of_another_queue(names: dict[str, Any]) -> None:
    from django.db.models import F

    schedule_message("m.close")
    assert Message.objects.annotate(status=F("state")).get().status == "scheduled"


def test_the_package_of_schedules_is_a_package_still() -> None:
    from django_delayq import recurring

    assert recurring.recurring is declarations.recurring


def test_a_topic_that_is_the_path_of_a_handler_is_asked_about(
    names: dict[str, Any], db: None, caplog: pytest.LogCaptureFixture
) -> None:
    with override_settings(DEBUG=True):
        schedule_message("mysite.handlers.close")
    assert [record.getMessage().partition("names. ")[2] for record in caplog.records] == ["Did you mean m.close?"]


def test_a_handler_keeps_what_its_function_has() -> None:
    def function(message: object) -> None: ...

    function.s = 5  # type: ignore[attr-defined]
    registered: Any = handler("m.new")(function)
    try:
        assert (registered.s, callable(registered.si)) == (5, True)
    finally:
        registry.unregister("m.new")
