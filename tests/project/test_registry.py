"""The registry finds the handler of a topic."""

from __future__ import annotations

import inspect
import pickle
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from asgiref.sync import async_to_sync, markcoroutinefunction, sync_to_async
from django.apps import apps
from django.test import override_settings

from django_delayq import Delivered, HandlerConflict, RetryPolicy, handler
from django_delayq.core.exceptions import InvalidMessage
from django_delayq.project import registry

if TYPE_CHECKING:
    from pytest_django import Settings

TOPIC = "unit.registry"


def _name(value: Any) -> str:
    """Return a name without an address in memory: every process of the tests must find the same names."""
    return str(value) if isinstance(value, str) else getattr(value, "__qualname__", type(value).__name__)


def found(topic: str = TOPIC) -> registry.Handler:
    handler = registry.find(topic)
    assert handler is not None
    return handler


def at_module_level(message: Any) -> None: ...


def test_two_handlers_for_one_topic_conflict_and_both_are_named() -> None:
    handler(TOPIC)(at_module_level)

    def another(message: Any) -> None: ...

    with pytest.raises(HandlerConflict, match=r"at_module_level.*another"):
        handler(TOPIC)(another)
    assert found().function is at_module_level


def test_a_module_that_is_imported_anew_does_not_conflict_with_itself() -> None:
    handler(TOPIC)(at_module_level)
    again = handler(TOPIC, lease=5)(at_module_level)
    assert (found().lease, again.topic) == (5, TOPIC)


def test_two_local_functions_of_one_name_conflict() -> None:
    def make() -> Any:
        def local(message: Any) -> None: ...

        return local

    handler(TOPIC)(make())
    with pytest.raises(HandlerConflict):
        handler(TOPIC)(make())


def test_options_that_are_given_win_over_the_settings(settings: Settings) -> None:
    settings.DELAYQ = {"LEASE": 33, "TIMEOUT": 44, "RETRY": ["5s"], "DEFAULT_QUEUE": "lane"}
    handler(TOPIC)(at_module_level)
    assert (found().lease, found().timeout, found().retry) == (33, 44, RetryPolicy.fixed([5]))
    assert registry.default_queue(TOPIC) == registry.default_queue("nobody") == "lane"
    assert not found().transactional
    terms = handler(TOPIC, retry=["4m"], lease="2m", timeout="90s", transactional=True, queue="slow")
    terms(at_module_level)
    assert (found().lease, found().timeout, found().retry) == (120, 90, RetryPolicy.fixed([240]))
    assert found().transactional
    assert registry.default_queue(TOPIC) == "slow"


def test_false_means_never_and_none_means_the_default(settings: Settings) -> None:
    settings.DELAYQ = {"TIMEOUT": 44, "RETRY": ["5s"]}
    handler(TOPIC, retry=False, timeout=False)(at_module_level)
    assert found().retry.delay(1) is None
    assert found().timeout is None
    handler(TOPIC, retry=None, timeout=None, lease=None, queue=None)(at_module_level)
    assert (found().timeout, found().retry) == (44, RetryPolicy.fixed([5]))


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("lease", "2d", "must be between 1 second and 1 day"),
        ("timeout", 0, "(False: none) must be between 10 ms and 30 days"),
        ("timeout", "soon", "(False: none) is not a duration"),
        ("retry", 5, "is a RetryPolicy, a list of delays, a function, or False for never"),
        ("retry", RetryPolicy.exponential, "is a RetryPolicy"),
        ("transactional", "no", "must be True or False"),
        ("keep_result", 1, "must be True or False"),
        ("queue", "two words", "must be 1 to 64"),
        ("priority", None, "must be a whole number"),
        ("batch", 1, "must be a whole number from 2 to 1000"),
        ("batch", "100", "must be a whole number from 2 to 1000"),
        ("linger", "11s", "must be between 0 and 10 seconds"),
        ("linger", "1s", "needs batch"),
    ],
)
def test_an_impossible_option_is_refused_at_the_decorator_by_its_name(option: str, value: Any, words: str) -> None:
    terms: Any = {option: value}
    with pytest.raises(ValueError, match=f"^{re.escape(f'{option} {words}')}"):
        handler(TOPIC, **terms)(at_module_level)
    assert registry.find(TOPIC) is None


def test_handlers_are_found_in_the_module_of_that_name_in_each_app(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "discovered_app"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "handlers.py").write_text(
        f"from django_delayq import handler\n@handler({TOPIC!r})\ndef receive(message): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    installed = [config.name for config in apps.get_app_configs()]
    with override_settings(INSTALLED_APPS=[*installed, "discovered_app"]):
        registry.autodiscover()
    assert found().name == "discovered_app.handlers.receive"
    for name in ("discovered_app", "discovered_app.handlers"):
        sys.modules.pop(name, None)


# --- what cannot handle a message -------------------------------------------------------------------------------------


def generator(message: Any) -> Iterator[None]:
    yield


async def async_generator(message: Any) -> AsyncIterator[None]:
    yield


def of_two(one: Any, other: Any) -> None: ...


def of_two_by_keyword(one: Any, *, other: Any) -> None: ...


class Class:
    def __call__(self, message: Any) -> None: ...

    def method(self, message: Any) -> None: ...

    @staticmethod
    async def static(message: Any) -> None: ...


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (generator, "generator is a generator function"),
        (async_generator, "async_generator is a generator function"),
        (partial(at_module_level), "a handler is a function, not a partial object: write a function that calls it"),
        (Class().method, "not a method object: write a function"),
        (Class(), "not a Class object: write a function"),
        (vars(Class)["static"], "not a staticmethod object: write a function"),
        (sync_to_async(at_module_level), "not a SyncToAsync object: write a function"),
        (print, "not a builtin_function_or_method object: write a function"),
        (lambda: None, r"<lambda>\(\) cannot be called with one message: too many positional arguments"),
        (of_two, "of_two.*missing a required argument: 'other'"),
        (Class.method, "Class.method.*takes the message as its only argument"),
        (of_two_by_keyword, "of_two_by_keyword.*other"),
        (Class, "not the class Class: write a function"),
        (None, "not a NoneType object"),
        ("tests.project", "not a str object"),
    ],
    ids=_name,
)
def test_a_function_that_could_not_handle_a_message_is_refused_at_the_decorator(function: Any, why: str) -> None:
    with pytest.raises(TypeError, match=why):
        handler(TOPIC)(function)
    assert registry.find(TOPIC) is None


def test_a_decorator_without_a_topic_that_can_be_scheduled_is_refused_with_the_way_to_write_it() -> None:
    with pytest.raises(InvalidMessage):
        handler("two words")
    decorator: Any = handler
    with pytest.raises(InvalidMessage, match=r'write @handler\("orders\.close"\)'):
        decorator(at_module_level)


async def coroutine(message: Any) -> None: ...


def marked(message: Any) -> Any:
    return coroutine(message)


@pytest.mark.parametrize(
    "function",
    [coroutine, Class.static, markcoroutinefunction(marked)],
    ids=_name,
)
def test_an_async_function_is_known_by_what_it_is_or_by_its_mark(function: Any) -> None:
    handler(TOPIC)(function)
    assert found().is_async


@wraps(coroutine)
def runs_it(message: Any) -> None:
    """A wrapper of an async function that is sync, of a function that takes other arguments, and of a generator."""


@wraps(of_two)
def gives_it_more(message: Any) -> None: ...


@wraps(generator)
def consumes_it(message: Any) -> None: ...


@pytest.mark.parametrize("function", [runs_it, gives_it_more, consumes_it], ids=_name)
def test_a_wrapper_is_taken_for_what_it_is_and_not_for_what_it_wraps(function: Any) -> None:
    handler(TOPIC)(function)
    assert not found().is_async


# --- what a handler schedules -----------------------------------------------------------------------------------------


def test_a_registered_function_keeps_its_name_its_kind_and_its_pickle() -> None:
    registered = handler(TOPIC)(coroutine)
    assert registered is coroutine
    assert inspect.iscoroutinefunction(registered)
    assert pickle.loads(pickle.dumps(registered)) is coroutine
    assert (vars(coroutine)["topic"], coroutine.__name__) == (TOPIC, "coroutine")


def local() -> Callable[[Delivered], None]:
    """Return a function without attributes."""

    def close(message: Delivered) -> None: ...

    return close


def test_a_function_of_several_topics_schedules_for_none_of_them() -> None:
    function: Any = local()
    topics = [f"{TOPIC}.{number}" for number in range(3)]
    for topic in topics:
        assert handler(topic)(function) is function
    for schedule in (function.schedule, async_to_sync(function.aschedule)):
        with pytest.raises(InvalidMessage, match="handles several topics"):
            schedule()
    for topic in topics:
        registry.unregister(topic)
    assert handler(TOPIC)(function).topic == TOPIC


def test_a_handler_that_wraps_another_one_has_a_topic_of_its_own() -> None:
    inner = handler(TOPIC)(local())

    @handler(TOPIC + ".outer")
    @wraps(inner)
    def outer(message: Any) -> None: ...

    assert (inner.topic, outer.topic) == (TOPIC, TOPIC + ".outer")
    assert vars(outer)["schedule"].__self__ is outer
    assert vars(inner)["schedule"].__self__ is inner


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_retries", " (write retry=RetryPolicy.exponential(max_attempts=4))"),
        ("bind", " (leave it out)"),
        ("flush_every", " (write batch)"),
        ("timeuot", " (write timeout)"),
        ("zzz", ""),
    ],
)
def test_an_option_that_does_not_exist_names_the_one_that_is_meant(name: str, hint: str) -> None:
    given: Any = {name: 3}
    with pytest.raises(TypeError, match=rf"^@handler has no such argument: {re.escape(name + hint)}$"):
        handler(TOPIC, **given)
    assert registry.find(TOPIC) is None


def test_a_batch_has_no_one_result_to_keep() -> None:
    with pytest.raises(ValueError, match="keep_result and batch exclude each other"):
        handler(TOPIC, batch=10, keep_result=True)


def test_a_handler_that_is_called_as_a_task_says_how_to_schedule_its_message() -> None:
    def close(message: object) -> None: ...

    close.delay = 5  # type: ignore[attr-defined]
    function: Any = handler(TOPIC)(close)
    for name in ("apply_async", "send", "defer", "enqueue"):
        words = "close is a handler: schedule its message with close.schedule(payload, delay=…)"
        with pytest.raises(AttributeError, match=f"^{re.escape(words)}$"):
            getattr(function, name)(5, countdown=3)
    # What a function has of its own it keeps.
    assert function.delay == 5


def test_what_other_queues_call_the_options_is_no_option_and_means_one() -> None:
    names = inspect.signature(handler).parameters.keys()
    assert not registry.MEANT.keys() & names
    assert {meant for meant in registry.MEANT.values() if meant.isidentifier()} <= names
