"""Middleware surrounds handlers and calls that schedule; a failure is told before the context of its handler ends."""

from __future__ import annotations

import contextvars
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import pytest
from asgiref.sync import async_to_sync
from django.core.exceptions import ImproperlyConfigured
from django.db import connection

from django_delayq import (
    InvalidMessage,
    KeyConflict,
    Reject,
    RetryLater,
    aschedule_message,
    cancel_message,
    handler,
    middleware,
    schedule_message,
    signals,
)
from django_delayq import schedule_messages as schedule_many
from django_delayq.core.worker_options import Options
from django_delayq.middleware import Draft, Handled, Middleware
from django_delayq.models import Message, Transition
from django_delayq.project import registry
from tests.app.handlers import leave
from tests.app.models import Effect
from tests.support.assembled import deliver, drain
from tests.support.forks import forked
from tests.support.receivers import receiving

pytestmark = pytest.mark.django_db(transaction=True)

TOPIC = "integration.middleware"
SECRET = "the secret of order 4711"

tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="")
M = TypeVar("M", bound=Middleware)
# What the test has installed.
installed: list[Middleware] = []


@pytest.fixture(autouse=True)
def _removed() -> Iterator[None]:
    yield
    for one in installed:
        middleware.remove(one)
    installed.clear()
    middleware.forget()


def install(one: M) -> M:
    middleware.install(one)
    installed.append(one)
    return one


def run(function: Callable[[Any], Any], payload: Any = None, **terms: Any) -> Message:
    """Schedule one message, deliver it as a worker does, and return it with its new state."""
    handler(TOPIC, **terms)(function)
    message = schedule_message(TOPIC, payload)
    deliver()
    message.refresh_from_db()
    return message


def fail(message: Any) -> None:
    raise ValueError(SECRET)


class Tenants(Middleware):
    """Carries the tenant of the call to the handler."""

    @contextmanager
    def scheduling(self, drafts: Sequence[Draft]) -> Iterator[None]:
        for draft in drafts:
            draft.headers["tenant"] = tenant.get()
        yield

    @contextmanager
    def handling(self, message: Handled) -> Iterator[None]:
        token = tenant.set(message.headers["tenant"])
        try:
            yield
        finally:
            tenant.reset(token)


class Watcher(Middleware):
    """Notes what it sees, and raises what it is told to."""

    def __init__(self, enter: Exception | None = None, leave: Exception | None = None) -> None:
        self.enter, self.leave = enter, leave
        self.steps: list[tuple[str, str | None]] = []
        self.threads: set[str] = set()

    def _see(self, step: str, message: Handled) -> None:
        self.steps.append((step, message.outcome))
        self.threads.add(threading.current_thread().name)

    @contextmanager
    def handling(self, message: Handled) -> Iterator[None]:
        self._see("enter", message)
        if self.enter is not None:
            raise self.enter
        try:
            yield
        except BaseException as error:
            self._see(type(error).__name__, message)
            raise
        finally:
            self._see("leave", message)
            if self.leave is not None:
                raise self.leave


class Swallower(Middleware):
    """Swallows every exception."""

    @contextmanager
    def handling(self, message: Handled) -> Iterator[None]:
        try:
            yield
        except BaseException:  # noqa: BLE001
            pass

    scheduling = handling  # type: ignore[assignment]


# --- around the handler -----------------------------------------------------------------------------------------------


BOTH = pytest.mark.parametrize("transactional", [False, True], ids=["plain", "transactional"])


@BOTH
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_the_context_of_a_call_reaches_the_handler(kind: str, transactional: bool) -> None:
    install(Tenants())
    seen = []

    def look(message: Any) -> None:
        seen.append((tenant.get(), message.headers))

    async def alook(message: Any) -> None:
        look(message)

    tenant_before = tenant.set("acme")
    try:
        handler(TOPIC)(look)
        schedule_message(TOPIC, headers={"a": 1})
    finally:
        tenant.reset(tenant_before)
    registry.unregister(TOPIC)
    handler(TOPIC, transactional=transactional)(alook if kind == "async" else look)
    deliver()
    assert seen == [("acme", {"a": 1, "tenant": "acme"})]


@pytest.mark.parametrize(
    ("error", "terms", "outcome", "state"),
    [
        (None, {}, "consumed", "consumed"),
        (ValueError("no"), {"retry": ["1h"]}, "retried", "scheduled"),
        (ValueError("no"), {"retry": False}, "dead", "dead"),
        (Reject("no"), {}, "dead", "dead"),
        (Reject("a cancel is requested"), {}, "cancelled", "cancelled"),
        (RetryLater(3600), {}, "retried", "scheduled"),
        (RetryLater(3600, counts=False), {}, "released", "scheduled"),
        (SystemExit(3), {"retry": False}, "dead", "dead"),
        (StopIteration(), {"retry": False}, "dead", "dead"),
    ],
)
def test_middleware_sees_the_exception_and_what_follows_in_the_thread_of_the_handler(
    error: BaseException | None, terms: dict[str, Any], outcome: str, state: str
) -> None:
    threads = set()

    def end(message: Any) -> None:
        threads.add(threading.current_thread().name)
        if outcome == "cancelled":
            assert cancel_message(message.id)
            assert message.extend("1m")
        if error is not None:
            raise error

    watcher = install(Watcher())
    assert run(end, **terms).state == state
    raised = [] if error is None else [(type(error).__name__, outcome)]
    assert watcher.steps == [("enter", None), *raised, ("leave", outcome)]
    assert watcher.threads == threads


def test_an_error_on_entry_keeps_the_handler_from_running() -> None:
    inner = Watcher(enter=LookupError("no such tenant"))
    assert steps_outside(inner, function=leave, state="dead") == [("LookupError", "dead"), ("leave", "dead")]
    assert inner.steps == [("enter", None)]
    assert not Effect.objects.exists()


class Replacer(Middleware):
    """Leaves with another error than the handler's, and then with that one again."""

    @contextmanager
    def handling(self, message: Handled) -> Iterator[None]:
        try:
            yield
        except RetryLater as error:
            raise (error.__cause__ or error) from None
        except ValueError as error:
            raise RetryLater(3600) from error


def steps_outside(
    *inner: Middleware, function: Callable[[Any], Any], state: str, **terms: Any
) -> list[tuple[str, str | None]]:
    """Deliver a message within these, the first outermost. Return what a middleware around them has seen of its end."""
    outer = install(Watcher())
    for one in inner:
        install(one)
    assert run(function, retry=False, **terms).state == state
    assert outer.steps[0] == ("enter", None)
    return outer.steps[1:]


@pytest.mark.parametrize("around", [[], [Swallower()]], ids=["raised", "swallowed"])
def test_the_last_exception_is_the_failure(around: list[Middleware]) -> None:
    seen = steps_outside(*around, Watcher(leave=RetryLater(3600)), function=fail, state="scheduled")
    assert seen == [*([] if around else [("RetryLater", "retried")]), ("leave", "retried")]


def test_an_exception_that_comes_back_after_another_one_is_the_failure() -> None:
    assert steps_outside(Replacer(), Replacer(), function=fail, state="dead")[-1] == ("leave", "dead")


@BOTH
def test_a_swallowed_exception_stays_a_failure(transactional: bool) -> None:
    assert steps_outside(Swallower(), function=fail, state="dead", transactional=transactional) == [("leave", "dead")]
    assert Transition.objects.get(to_state="dead").error == f"ValueError: {SECRET}"


def test_lost_effects_stay_a_failure_when_another_middleware_swallows_the_error() -> None:
    lost = Watcher(leave=RuntimeError("the effects could not be committed"))
    assert steps_outside(Swallower(), lost, function=leave, state="dead") == [("leave", "dead")]


def test_middleware_that_fails_after_the_commit_of_a_success_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    late = Watcher(leave=RuntimeError("too late"))
    seen = steps_outside(late, function=leave, state="consumed", transactional=True)
    assert seen == [("RuntimeError", "consumed"), ("leave", "consumed")]
    assert Effect.objects.count() == 1
    assert "After the commit of its handler, a function on commit or a middleware failed" in caplog.text


def test_middleware_surrounds_the_transaction_and_its_commit() -> None:
    class Look(Middleware):
        seen: list[Any] = []

        @contextmanager
        def handling(self, message: Handled) -> Iterator[None]:
            self.seen.append(connection.in_atomic_block)
            yield
            self.seen.append((connection.in_atomic_block, Message.objects.get(pk=message.id).state))

    install(Look())
    run(leave, transactional=True)
    assert Look.seen == [False, (False, "consumed")]


def test_middleware_that_hangs_ends_at_the_timeout_of_the_handler() -> None:
    class Hang(Middleware):
        @contextmanager
        def handling(self, message: Handled) -> Iterator[None]:
            while message.outcome is None:
                threading.Event().wait(0.01)
            yield

    seen = steps_outside(Hang(), function=leave, state="dead", timeout="1s")
    assert seen == [("HandlerTimeout", "dead"), ("leave", "dead")]


# --- around calls -----------------------------------------------------------------------------------------------------


def test_one_call_is_surrounded_once_and_its_drafts_give_headers_and_learn_their_ids() -> None:
    class Look(Middleware):
        calls: list[Sequence[Draft]] = []

        @contextmanager
        def scheduling(self, drafts: Sequence[Draft]) -> Iterator[None]:
            assert all(draft.id is None for draft in drafts)
            yield
            self.calls.append(drafts)

    for surrounding in (Swallower(), Look(), Tenants()):
        install(surrounding)
    headers = {"a": 1, "tenant": ""}
    one = schedule_message(TOPIC, queue="slow", key="k", headers={"a": 1}, delay=60)
    keyed, plain = schedule_many([{"topic": TOPIC, "delay": 60, "key": "m"}, {"topic": TOPIC, "delay": 60}])
    assert Look.calls == [
        [Draft(TOPIC, "slow", "k", headers, one.pk)],
        [
            Draft(TOPIC, "default", "m", {"tenant": ""}, keyed.pk),
            Draft(TOPIC, "default", None, {"tenant": ""}, plain.pk),
        ],
    ]
    stored = dict(Message.objects.values_list("pk", "headers"))
    assert stored == {one.pk: headers, keyed.pk: {"tenant": ""}, plain.pk: {"tenant": ""}}
    # No middleware swallows the error of a call.
    with pytest.raises(KeyConflict):
        schedule_message(TOPIC, delay=60, key="k", queue="slow")


def test_the_context_of_async_code_reaches_the_headers() -> None:
    async def schedule() -> Message:
        tenant.set("acme")
        return await aschedule_message(TOPIC, delay=60)

    install(Tenants())
    # async_to_sync carries what the coroutine sets back to its caller.
    scheduled = contextvars.copy_context().run(async_to_sync(schedule))
    assert scheduled.headers == {"tenant": "acme"}


class Headers(Middleware):
    def __init__(self, headers: dict[str, Any]) -> None:
        self.headers = headers

    @contextmanager
    def scheduling(self, drafts: Sequence[Draft]) -> Iterator[None]:
        drafts[-1].headers.update(self.headers)
        yield


@pytest.mark.parametrize("headers", [{"big": "x" * 20_000}, {"no json": object()}], ids=["large", "no JSON"])
def test_impossible_headers_of_middleware_refuse_the_call(headers: dict[str, Any]) -> None:
    install(Headers(headers))
    with pytest.raises(InvalidMessage, match="headers"):
        schedule_many([{"topic": TOPIC}] * 2)
    with pytest.raises(InvalidMessage, match="headers"):
        schedule_message(TOPIC)
    assert not Message.objects.exists()


def test_middleware_of_the_settings_is_made_once_inside_of_what_is_installed(settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "MIDDLEWARE": [f"{__name__}.Tenants"]}
    install(Swallower())
    chain = middleware.chain()
    assert [type(one) for one in chain] == [Swallower, Tenants]
    assert middleware.chain() is chain
    settings.DELAYQ = {**settings.DELAYQ, "MIDDLEWARE": []}
    assert len(middleware.chain()) == 1


class Slow(Middleware):
    """Takes a moment to be made, and knows where that was."""

    made: ClassVar[list[int]] = []

    def __init__(self) -> None:
        self.made.append(os.getpid())
        time.sleep(0.2)


def test_middleware_is_made_once_in_each_process_however_many_threads_ask_first(settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "MIDDLEWARE": [f"{__name__}.Slow"]}
    Slow.made.clear()
    with ThreadPoolExecutor(4) as threads:
        assert len({id(chain) for chain in threads.map(lambda _number: middleware.chain(), range(4))}) == 1
    assert Slow.made == [os.getpid()]
    with forked(lambda: bool(middleware.chain()) and Slow.made == [os.getppid(), os.getpid()]):
        pass


@pytest.mark.parametrize("path", ["tests.nowhere.Tenants", f"{__name__}.run"])
def test_a_wrong_path_of_middleware_refuses_the_call_and_the_worker(settings: Any, path: str) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "MIDDLEWARE": [path]}
    for call in (lambda: schedule_message(TOPIC), lambda: drain(Options("default"))):
        with pytest.raises(ImproperlyConfigured, match=f"names {path}, which "):
            call()
    assert not Message.objects.exists()


# --- the signal and the log of a failure ------------------------------------------------------------------------------


@pytest.fixture
def failures() -> Iterator[list[dict[str, Any]]]:
    told: list[dict[str, Any]] = []

    def note(sender: Any, **facts: Any) -> None:
        told.append({**facts, "thread": threading.current_thread().name, "tenant": tenant.get()})

    with receiving(note, signals.message_failed):
        yield told


@pytest.mark.parametrize(("retry", "outcome"), [(["1h"], "retried"), (False, "dead")])
def test_the_signal_of_a_failure_has_the_exception_and_is_sent_in_the_context_of_the_handler(
    failures: list[dict[str, Any]], retry: Any, outcome: str
) -> None:
    install(Tenants())
    threads = []

    def note_and_fail(message: Any) -> None:
        threads.append(threading.current_thread().name)
        tenant.set("of the handler")
        fail(message)

    message = run(note_and_fail, retry=retry)
    (facts,) = failures
    error = facts.pop("exception")
    assert isinstance(error, ValueError)
    assert error.__traceback__ is not None
    facts.pop("signal")
    assert facts == {
        "message_id": message.pk,
        "topic": TOPIC,
        "queue": "default",
        "delivery": 1,
        "attempt": 1,
        "outcome": outcome,
        "using": "default",
        "thread": threads[0],
        "tenant": "of the handler",
    }


def test_a_success_and_an_uncounted_delivery_are_no_failures(failures: list[dict[str, Any]]) -> None:
    def later(message: Any) -> None:
        raise RetryLater(3600, counts=False)

    run(later)
    registry.unregister(TOPIC)
    run(leave)
    assert failures == []


def line_of(caplog: pytest.LogCaptureFixture, event: str) -> logging.LogRecord:
    (record,) = [record for record in caplog.records if getattr(record, "delayq_event", None) == event]
    return record


@pytest.mark.parametrize(("retry", "event", "level"), [(["1h"], "retried", "WARNING"), (False, "dead", "ERROR")])
@pytest.mark.parametrize(
    ("given", "debug", "is_whole"),
    [(None, False, False), (None, True, True), (True, False, True), (False, True, False)],
    ids=["production", "debug", "chosen", "refused"],
)
def test_the_exception_of_a_handler_is_logged_as_the_settings_say(
    settings: Any,
    caplog: pytest.LogCaptureFixture,
    retry: Any,
    event: str,
    level: str,
    given: bool | None,
    debug: bool,
    is_whole: bool,
) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "LOG_ERRORS": given}
    settings.DEBUG = debug
    run(fail, {"card": SECRET}, retry=retry)
    record = line_of(caplog, event)
    assert record.levelname == level
    assert "error=ValueError" in record.getMessage()
    assert SECRET not in record.getMessage()
    assert (SECRET in caplog.text) is is_whole
    if is_whole:
        assert record.exc_info is not None
        assert record.exc_info[1] is not None
        assert "raise ValueError(SECRET)" in caplog.text


@pytest.mark.parametrize("place", ["receiver", "policy"])
def test_an_error_about_a_failure_is_logged_without_the_text_of_the_failure(
    place: str, caplog: pytest.LogCaptureFixture
) -> None:
    def break_down(*args: Any, **facts: Any) -> None:
        try:
            raise LookupError("a cause of its own")
        except LookupError as error:
            raise RuntimeError("trouble of its own") from error

    with receiving(break_down, *([signals.message_failed] if place == "receiver" else [])):
        run(fail, retry=break_down if place == "policy" else False)
    assert "RuntimeError: trouble of its own" in caplog.text
    assert "LookupError: a cause of its own" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_failure_that_its_policy_raises_again_is_logged_as_the_settings_say(
    settings: Any, caplog: pytest.LogCaptureFixture, is_whole: bool
) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "LOG_ERRORS": is_whole}

    def refuse(attempt: int, error: BaseException) -> None:
        raise error

    run(fail, retry=refuse)
    assert "the default policy decides" in caplog.text
    assert (SECRET in caplog.text) is is_whole


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("no answer in 30 s", "no answer in 2.5 s"),
        ("'order-7'", "'order-8'"),
        ("3f2504e0-4f89-11d3-9a0c-0305e82c3301", "00000000-0000-0000-0000-000000000000"),
        ("<object at 0x7f966d122a10>", "<object at 0x7f966d046110>"),
        ("taken\nDETAIL: Key (a)=(b)", "taken\nDETAIL: Key (a)=(c)"),
        ("x " * 999, "x " * 1000),
    ],
    ids=lambda text: text[:20],
)
def test_like_failures_have_one_kind_and_one_digest(one: str, other: str, caplog: pytest.LogCaptureFixture) -> None:
    found = []
    for text in (one, other, "no order"):

        def fail_so(message: Any, text: str = text) -> None:
            raise ValueError(text)

        message = run(fail_so, retry=False)
        digest = line_of(caplog, "dead").delayq["digest"]  # type: ignore[attr-defined]
        found.append((message.error, digest))
        registry.unregister(TOPIC)
        caplog.clear()
    assert found[0] == found[1]
    assert not {*found[0]} & {*found[2]}
    assert len(found[0][1]) == 8
