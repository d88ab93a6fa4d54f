"""The options of tasks: at ``@task``, below it, and by ``using`` for the next messages."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import django
import pytest
from django.utils import timezone

from django_delayq import KeyConflict, RetryPolicy, handler, run_message, schedule_message
from django_delayq.contrib.tasks import known, options
from django_delayq.contrib.tasks.compat import (
    InvalidTask,
    TaskResultStatus,
    task_backends,
    task_enqueued,
    task_finished,
    task_started,
)
from django_delayq.core.states import State
from django_delayq.models import Message
from django_delayq.project import registry
from tests.app import tasks
from tests.app.models import Effect
from tests.support.assembled import deliver
from tests.support.receivers import heard

pytestmark = pytest.mark.django_db(transaction=True)

Declare = Callable[..., Any]
# The framework's types know no options of a backend.
add: Any = tasks.add
any_task: Any = vars(tasks)["task"]


def close(order: int, *, kind: str = "plain") -> str:
    return f"{order} {kind}"


def close_in_context(context: Any, order: int) -> int:
    return order


def take_two(order: int, shipping: int) -> None: ...


def take_any(*orders: int, **more: str) -> None: ...


def gather_in_context(context: Any, ids: list[int]) -> list[int]:
    return ids


def gather(shop: int, ids: list[int], *more: int, by: dict[str, int] | None = None, **named: str) -> list[Any]:
    return [shop, ids, list(more), by, named]


@pytest.fixture(params=["at the decorator", "below it"])
def declare(request: pytest.FixtureRequest) -> Iterator[Declare]:
    """Declare functions as tasks, with options in each of the two places; forget them after the test."""

    def give(function: Callable[..., Any], takes_context: bool = False, **terms: Any) -> Any:
        task_class = task_backends["default"].task_class
        if request.param == "below it":
            return task_class(func=options(**terms)(function), takes_context=takes_context)
        # As @task does from Django 6.1 on.
        return task_class(func=function, takes_context=takes_context, **terms)

    yield give
    for function in (close, close_in_context, take_two, take_any, gather, gather_in_context):
        vars(function).pop("delayq_options", None)
        known._known.pop(f"{__name__}.{function.__name__}", None)


def handler_of(task: Any) -> registry.Handler:
    found = registry.find(task.module_path)
    assert found is not None
    return found


# --- what they do -----------------------------------------------------------------------------------------------------


def test_a_task_has_the_options_of_a_handler(declare: Declare) -> None:
    task = declare(close, retry=["1m"], lease="2m", timeout="30s", transactional=True, limit=3, rate="5/s", burst=2)
    found = handler_of(task)
    assert (found.retry, found.lease, found.timeout) == (RetryPolicy.fixed(["1m"]), 120, 30)
    assert found.transactional
    assert found.limit is not None
    assert (found.limit.count, found.limit.burst) == (3, 2)


@pytest.mark.parametrize(
    "key", ["order-{order}-{kind}", lambda order, kind="plain": f"order-{order}-{kind}"], ids=["text", "function"]
)
def test_a_key_and_a_limit_key_are_made_of_the_arguments(declare: Declare, key: Any) -> None:
    task = declare(close, key=key, limit=1, limit_key=key, expires="1h")
    for result in (task.enqueue(1), task.enqueue(order=2, kind="x")):
        message = Message.objects.get(pk=result.id)
        order, kind = (1, "plain") if result.args else (2, "x")
        assert (message.key, message.limit_key) == (f"order-{order}-{kind}",) * 2
        assert message.expires_at is not None
        assert message.expires_at - message.created_at > timedelta(minutes=59)
    deliver()
    assert task.get_result(result.id).return_value == "2 x"


def test_the_context_is_no_argument_of_a_key(declare: Declare) -> None:
    result = declare(close_in_context, True, key="order-{order}").enqueue(5)
    assert Message.objects.get(pk=result.id).key == "order-5"
    deliver()
    assert Message.objects.get().state == State.CONSUMED


def test_a_text_may_name_any_argument_of_a_task_that_takes_any(declare: Declare) -> None:
    task = declare(take_any, key="{orders[0]}-{kind}")
    assert Message.objects.get(pk=task.enqueue(7, 8, kind="x").id).key == "7-x"


def test_a_message_of_schedule_message_has_the_limit_key_too(declare: Declare) -> None:
    declare(close, limit=1, limit_key="order-{order}")
    message = schedule_message(f"{__name__}.close", {"args": [5], "kwargs": {}})
    assert message.limit_key == "order-5"


def test_the_second_task_of_a_key_is_an_error_or_the_first_one(declare: Declare) -> None:
    task = declare(close, key="order-{order}", unique="1h")
    first = task.enqueue(5)
    with pytest.raises(KeyConflict):
        task.enqueue(5)
    with heard(task_enqueued) as enqueued:
        again = task.using(on_conflict="keep").enqueue(5, kind="x")
    assert again == first
    assert enqueued == []
    replaced = task.using(on_conflict="replace", key="order-{order}").enqueue(5, kind="x")
    assert (replaced.id, replaced.kwargs) == (first.id, {"kind": "x"})
    deliver()
    assert task.using(on_conflict="keep").enqueue(5).return_value == "5 x"


@pytest.mark.parametrize(
    ("first", "second", "returned"),
    [
        (((5, [1]), {}), ((5, [2]), {}), [5, [1, 2], [], None, {}]),
        (((5, [1]), {}), ((), {"shop": 5, "ids": [2]}), [5, [1, 2], [], None, {}]),
        (((5, [1], 7), {}), ((5, [2], 8, 9), {}), [5, [1, 2], [7, 8, 9], None, {}]),
        (
            ((5, [1]), {"by": {"a": 1}, "x": "1"}),
            ((5, []), {"by": {"b": 2}, "x": "2"}),
            [5, [1], [], {"a": 1, "b": 2}, {"x": "2"}],
        ),
    ],
)
def test_the_arguments_of_tasks_are_merged_by_their_names(
    declare: Declare, first: Any, second: Any, returned: list[Any]
) -> None:
    task = declare(gather, key="shop-{shop}", on_conflict="merge").using(run_after=timezone.now() + timedelta(hours=1))
    with heard(task_enqueued) as enqueued:
        one, two = (task.enqueue(*args, **kwargs) for args, kwargs in (first, second))
    assert (two.id, len(enqueued)) == (one.id, 1)
    run_message(int(one.id))
    deliver()
    assert task.get_result(one.id).return_value == returned


def test_a_task_with_the_context_is_merged_too(declare: Declare) -> None:
    task = declare(gather_in_context, True, key="k", on_conflict="merge_debounce")
    assert [task.enqueue([number]).id for number in range(2)] == [str(Message.objects.get().pk)] * 2
    deliver()
    assert task.get_result(str(Message.objects.get().pk)).return_value == [0, 1]


def test_using_changes_the_next_messages_only(declare: Declare) -> None:
    task = declare(close, key="order-{order}", limit=1, limit_key="all")
    changed = task.using(key=lambda order: f"mine-{order}", retry=["5s"], timeout="9s", lease="8s", expires="1m")
    changed = changed.using(priority=7).using(limit_key="order-{order}")
    message = Message.objects.get(pk=changed.enqueue(5).id)
    assert (message.key, message.limit_key, message.priority) == ("mine-5", "order-5", 7)
    assert (message.timeout, message.lease) == (9, 8)
    plain = Message.objects.get(pk=task.enqueue(5).id)
    assert (plain.key, plain.limit_key, plain.priority, plain.timeout) == ("order-5", "all", 0, None)
    without = Message.objects.get(pk=task.using(key=None).enqueue(5).id)
    assert without.key is None


def test_what_the_decorator_has_wins_over_what_stands_below(declare: Declare) -> None:
    task_class: Any = task_backends["default"].task_class
    task = task_class(func=options(retry=["1m"], lease="2m")(close), retry=["2m"])
    assert (handler_of(task).retry, handler_of(task).lease) == (RetryPolicy.fixed(["2m"]), 120)
    declare(take_any)


def test_the_same_code_runs_with_a_backend_that_has_no_options() -> None:
    task = task_backends["here"].task_class(func=options(key="order-{order}", retry=["1m"])(close), backend="here")
    try:
        assert task.enqueue(5).return_value == "5 plain"
        # A task of this backend may be sent there too.
        assert tasks.add.using(backend="here").enqueue(1).return_value == 1
    finally:
        vars(close).pop("delayq_options")


@pytest.mark.skipif(django.VERSION[:2] == (6, 0), reason="@task takes no options of a backend in Django 6.0")
def test_the_decorator_takes_them() -> None:
    try:
        task = any_task(queue_name="mails", retry=["1m"], key="order-{order}")(close)
        assert Message.objects.get(pk=task.enqueue(5).id).key == "order-5"
        assert handler_of(task).retry == RetryPolicy.fixed(["1m"])
    finally:
        known._known.pop(f"{__name__}.close")


def test_two_tasks_differ_by_their_options() -> None:
    assert add.using(key="a") != add
    assert add.using(key="a") == add.using(key="a")
    assert len({add, add.using(key="a")}) == 2


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda task: pickle.loads(pickle.dumps(task))])
def test_a_task_whose_key_is_a_function_can_be_copied_and_pickled(copied: Callable[[Any], Any]) -> None:
    changed: Any = tasks.close_once
    changed = changed.using(priority=7, expires="1h")
    again = copied(changed)
    assert (again, again.priority) == (changed, 7)
    assert Message.objects.get(pk=again.enqueue(5).id).key == "order-5"
    result = copied(changed.enqueue(6))
    deliver()
    assert result.wait(10).return_value == 6


# --- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [tasks.index, tasks.index_async], ids=["sync", "async and transactional"])
def test_the_lists_of_a_batch_are_joined_to_one(task: Any) -> None:
    results = [task.enqueue([1, 2]), task.enqueue(pages=[3])]
    with heard(task_started) as started, heard(task_finished) as finished:
        deliver()
    assert Effect.objects.get().note == "[1, 2, 3]"
    assert len(started) == len(finished) == 2
    for result in results:
        result.refresh()
        assert (result.status, result.return_value) == (TaskResultStatus.SUCCESSFUL, None)


def test_a_batch_that_fails_is_tried_again_one_by_one() -> None:
    results = [tasks.index.enqueue(pages) for pages in ([1], [13])]
    deliver()
    notes = [*Effect.objects.order_by("id").values_list("note", flat=True)]
    assert (notes[0], sorted(notes[1:])) == ("[1, 13]", ["[13]", "[1]"])
    ends = [tasks.index.get_result(result.id).status for result in results]
    assert ends == ["SUCCESSFUL", "FAILED"]


@pytest.mark.parametrize("refused", [{"args": [5], "kwargs": {}}, {"args": []}])
def test_a_message_without_a_list_is_dead_and_harms_no_other_one_of_its_batch(refused: Any) -> None:
    bad = schedule_message("tests.app.tasks.index", refused)
    good = tasks.index.enqueue([1])
    deliver()
    assert Effect.objects.get().note == "[1]"
    assert tasks.index.get_result(good.id).is_finished
    assert Message.objects.get(pk=bad.pk).state == State.DEAD


@pytest.mark.parametrize("arguments", [[5], [], [[1], [2]], ["text"]])
def test_a_task_with_batch_is_enqueued_with_one_list(arguments: list[Any]) -> None:
    with pytest.raises(TypeError, match="index has batch=: each call has one list"):
        tasks.index.enqueue(*arguments)
    assert not Message.objects.exists()


def test_a_task_with_batch_takes_one_list_and_no_context(declare: Declare) -> None:
    with pytest.raises(InvalidTask, match=r"takes one list, as in .*: there is no context"):
        declare(close_in_context, True, batch=10)
    with pytest.raises(InvalidTask, match=r"takes one list, as in .*: missing a required argument: 'shipping'"):
        declare(take_two, batch=10)


def test_the_same_code_runs_one_list_at_a_time_elsewhere() -> None:
    here: Any = tasks.index
    assert here.using(backend="here").enqueue([1]).status == TaskResultStatus.SUCCESSFUL
    assert Effect.objects.get().note == "[1]"


def test_a_task_that_is_not_to_be_repeated_says_so() -> None:
    assert not handler_of(tasks.tell_at_most_once).redeliver
    assert handler_of(tasks.add).redeliver


# --- what is wrong ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        ({"max_attempts": 3}, r"max_attempts \(write retry=RetryPolicy.exponential\(max_attempts=3\)\)"),
        ({"backoff": 2}, r"backoff \(write retry=RetryPolicy.exponential"),
        ({"unique_for": "1h"}, r"unique_for \(write unique"),
        ({"idempotency_key": "x"}, r"idempotency_key \(write key"),
        ({"max_concurrency": 2}, r"max_concurrency \(write limit"),
        ({"rate_limit": "1/s"}, r"rate_limit \(write rate"),
        ({"ttl": "1h"}, r"ttl \(write expires"),
        ({"key": "{ordr}"}, "names no argument of the task: 'ordr'"),
        ({"key": "{}"}, "names no argument of the task: ''"),
        ({"key": "{order"}, "expected '}'"),
        ({"key": 5}, "key is a text with names of arguments, or a function of these, not 5"),
        ({"limit_key": "{order}"}, "limit_key needs a limit or a rate"),
        ({"unique": "1h"}, "unique: for messages with a key, and there is no key="),
        ({"key": "a", "unique": True}, 'unique must be "live", "scheduled", or a duration'),
        ({"key": "a", "on_conflict": "drop"}, "on_conflict is one of"),
        ({"expires": "never"}, "expires is"),
        ({"limit": 0}, "limit must be"),
        ({"batch": 1}, "batch must be"),
        ({"batch_size": 9}, r"batch_size \(write batch"),
        ({"linger": "1s"}, "linger needs batch"),
        ({"redeliver": "no"}, "redeliver must be"),
    ],
)
def test_an_option_that_cannot_be_is_refused_when_the_task_is_declared(
    declare: Declare, terms: dict[str, Any], words: str
) -> None:
    with pytest.raises((TypeError, ValueError, InvalidTask), match=words):
        declare(close, **terms)


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        (
            {"transactional": True},
            "using.. has no transactional: give it to all messages of the task, by @task",
        ),
        ({"max_attempts": 3}, r"max_attempts \(write retry"),
        ({"delay": "5m"}, "delay"),
        ({"expires": "never"}, "expires is"),
        ({"key": 5}, "key is a text"),
    ],
)
def test_using_refuses_what_single_messages_cannot_have(terms: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        add.using(**terms)


@pytest.mark.parametrize(("key", "words"), [("{ordr}", "names no argument"), (lambda order: "\n", "key")])
def test_a_key_that_cannot_be_is_refused_and_nothing_is_written(declare: Declare, key: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        declare(close).using(key=key).enqueue(5)
    assert not Message.objects.exists()


def test_arguments_that_the_task_does_not_take_make_no_key(declare: Declare) -> None:
    with pytest.raises(TypeError, match="missing a required argument: 'order'"):
        declare(close, key="{order}").enqueue()


def test_the_end_of_a_task_leads_on_to_a_handler(declare: Declare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "declared", dict(registry.declared))
    told: list[Any] = []
    handler("t.task_gave_up")(lambda message: told.append(message.payload))
    # It takes an argument, and gets none.
    result = declare(close, on_dead="t.task_gave_up", on_expired="t.task_gave_up").enqueue()
    deliver()
    assert [(ended["id"], ended["state"], ended["payload"]["args"]) for ended in told] == [(int(result.id), "dead", [])]
