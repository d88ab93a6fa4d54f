"""Sentry hears of dead messages and of deliveries: by its own transport, from the executor of a worker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

sentry_sdk = pytest.importorskip("sentry_sdk")

from sentry_sdk.envelope import Envelope  # noqa: E402
from sentry_sdk.integrations import _installed_integrations, _processed_integrations  # noqa: E402
from sentry_sdk.transport import Transport  # noqa: E402

from django_delayq import (  # noqa: E402
    Reject,
    RetryLater,
    acancel_message,
    extensions,
    handler,
    middleware,
    run_message,
    schedule_message,
)
from django_delayq import schedule_messages as schedule_many  # noqa: E402
from django_delayq.contrib import sentry  # noqa: E402
from django_delayq.contrib.sentry import DelayqIntegration  # noqa: E402
from django_delayq.core import retry  # noqa: E402
from django_delayq.core.actors import acting_as  # noqa: E402
from django_delayq.models import Message  # noqa: E402
from django_delayq.project import registry  # noqa: E402
from tests.app import tasks  # noqa: E402
from tests.support.assembled import deliver  # noqa: E402
from tests.support.rows import unguarded  # noqa: E402
from tests.support.transactions import lock_table, unfinished  # noqa: E402

pytestmark = pytest.mark.django_db(transaction=True)

TOPIC = "integration.sentry"
OTHER = "integration.sentry.other"
SECRET = "the secret of order 4711"


class Memory(Transport):
    """Keeps what would be sent."""

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.items: list[Any] = []

    def capture_envelope(self, envelope: Envelope) -> None:
        self.items += [(item.type, item.payload.json) for item in envelope.items]

    def of(self, kind: str) -> list[Any]:
        return [payload for type_, payload in self.items if type_ == kind]

    @property
    def events(self) -> list[Any]:
        return self.of("event")

    @property
    def transactions(self) -> list[Any]:
        return self.of("transaction")


Init = Callable[..., Memory]


@pytest.fixture
def init() -> Iterator[Init]:
    """Switch Sentry on with an integration and a transport that keeps everything, until the end of the test."""

    def init_with(integration: DelayqIntegration | None = None, **options: Any) -> Memory:
        transport = Memory()
        sentry_sdk.init(
            dsn="http://public@127.0.0.1:9/1",
            transport=transport,
            integrations=[integration or DelayqIntegration()],
            auto_enabling_integrations=False,
            shutdown_timeout=0,
            **{"traces_sample_rate": 1.0, **options},
        )
        return transport

    yield init_with
    sentry_sdk.get_client().close()
    sentry_sdk.get_global_scope().set_client(None)


@pytest.fixture(autouse=True, scope="module")
def _taken_away() -> Iterator[None]:
    """Leave no trace in the tests that follow: the SDK sets an integration up once in a process."""
    before = [*extensions.additions.workers]
    yield
    for one in middleware.chain():
        if type(one).__module__ == sentry.__name__:
            middleware.remove(one)
    extensions.additions.workers[:] = before
    _processed_integrations.discard("delayq")
    _installed_integrations.discard("delayq")


def run(function: Callable[[Any], Any], topic: str = TOPIC, **terms: Any) -> Message:
    """Schedule one message, and deliver it as a worker does."""
    registry.unregister(topic)
    handler(topic, **terms)(function)
    message = schedule_message(topic, {"card": SECRET}, key=SECRET)
    deliver()
    return message


def fail(message: Any) -> None:
    raise ValueError("no such order")


async def afail(message: Any) -> None:
    fail(message)


@pytest.mark.parametrize("function", [fail, afail])
def test_a_dead_message_is_one_event_with_its_stack_and_its_facts(init: Init, function: Callable[[Any], Any]) -> None:
    sent = init()
    message = run(function, retry=False)
    (event,) = sent.events
    (value,) = event["exception"]["values"]
    assert (value["type"], value["value"]) == ("ValueError", "no such order")
    assert value["stacktrace"]["frames"][-1]["function"] == "fail"
    assert value["mechanism"] == {"type": "delayq", "handled": False}
    assert event["level"] == "error"
    assert event["fingerprint"] == ["{{ default }}", TOPIC]
    assert event["tags"]["delayq.topic"] == TOPIC
    assert event["contexts"]["delayq"] == {
        "id": message.pk,
        "topic": TOPIC,
        "queue": "default",
        "attempt": 1,
        "delivery": 1,
        "due_at": message.due_at.isoformat(),
    }
    assert event["transaction"] == TOPIC
    assert SECRET not in str(sent.items)


def fail_in_turn(message: Any) -> None:
    raise ValueError(f"attempt {message.attempt}")


async def afail_in_turn(message: Any) -> None:
    fail_in_turn(message)


@pytest.mark.parametrize("function", [fail_in_turn, afail_in_turn])
@pytest.mark.parametrize("retries", ["breadcrumb", "event", None])
def test_a_retry_is_what_was_chosen(init: Init, retries: Any, function: Callable[[Any], Any]) -> None:
    sent = init(DelayqIntegration(retries=retries))
    message = run(function, retry=["1h"])
    first = sent.events
    assert [event["level"] for event in first] == (["warning"] if retries == "event" else [])
    assert run_message(message)
    deliver()
    dead = sent.events[len(first)]
    crumbs = [crumb for crumb in dead["breadcrumbs"]["values"] if crumb["category"] == "delayq"]
    assert dead["exception"]["values"][0]["value"] == "attempt 2"
    assert [(crumb["message"], crumb["data"]) for crumb in crumbs] == (
        [("ValueError: attempt 1", {"delivery": 1})] if retries == "breadcrumb" else []
    )


@pytest.mark.postgresql("SQLite has no locks on tables that readers wait for")
def test_an_event_loop_does_not_wait_long_for_earlier_failures(init: Init) -> None:
    with ExitStack() as locked:

        def unlock(event: Any, hint: Any) -> Any:
            if "exception" in event:
                # And not the line of the log that says that the loop is blocked.
                locked.close()
            return event

        async def fail_while_the_log_is_locked(message: Any) -> None:
            if message.attempt == 2:
                locked.enter_context(unfinished(lambda: lock_table("delayq_log")))
            fail_in_turn(message)

        sent = init(before_send=unlock)
        message = run(fail_while_the_log_is_locked, retry=["1h"])
        assert run_message(message)
        deliver()
    (dead,) = [event for event in sent.events if "exception" in event]
    assert dead["exception"]["values"][0]["value"] == "attempt 2"
    assert not [crumb for crumb in dead["breadcrumbs"]["values"] if crumb["category"] == "delayq"]


def test_a_wrong_choice_for_retries_is_refused() -> None:
    with pytest.raises(ValueError, match="'breadcrumb', 'event' or None"):
        DelayqIntegration(retries="always")  # type: ignore[arg-type]


def later(message: Any) -> None:
    raise RetryLater(3600)


def reject(message: Any) -> None:
    raise Reject("not wanted")


@pytest.mark.parametrize(
    ("function", "attempts", "reported", "status"),
    [
        (later, 2, [], "ok"),
        (later, 1, ["RetryLater"], "internal_error"),
        (reject, 2, ["Reject"], "internal_error"),
    ],
    ids=["later", "later, once too often", "reject"],
)
def test_the_answer_of_a_handler_is_reported_only_when_its_message_is_dead(
    init: Init, function: Callable[[Any], Any], attempts: int, reported: list[str], status: str
) -> None:
    sent = init(DelayqIntegration(retries="event"))
    run(function, retry=retry.RetryPolicy.exponential(max_attempts=attempts))
    assert [event["exception"]["values"][0]["type"] for event in sent.events] == reported
    assert [one["contexts"]["trace"]["status"] for one in sent.transactions] == [status]


def test_an_async_handler_that_is_cancelled_on_request_has_no_error(init: Init) -> None:
    async def outlast(message: Any) -> None:
        await acancel_message(message.id)
        await asyncio.Event().wait()

    sent = init()
    assert Message.objects.get(pk=run(outlast).pk).state == "cancelled"
    assert [one["contexts"]["trace"]["status"] for one in sent.transactions] == ["ok"]


def test_a_delivery_is_a_transaction_with_the_attributes_of_messaging(init: Init) -> None:
    sent = init()
    message = run(lambda message: None, queue="mail")
    (transaction,) = sent.transactions
    assert transaction["transaction"] == TOPIC
    assert transaction["transaction_info"] == {"source": "task"}
    trace = transaction["contexts"]["trace"]
    assert (trace["op"], trace["status"], trace["origin"]) == ("queue.process", "ok", "auto.queue.delayq")
    latency = trace["data"].pop("messaging.message.receive.latency")
    assert 0 <= latency < 60_000
    assert {name: value for name, value in trace["data"].items() if name.startswith("messaging.")} == {
        "messaging.system": "django_delayq",
        "messaging.destination.name": "mail",
        "messaging.message.id": str(message.pk),
        "messaging.message.retry.count": 0,
    }


def test_the_trace_of_the_call_goes_on_in_the_handler(init: Init) -> None:
    sent = init()
    handler(TOPIC)(lambda message: None)
    with sentry_sdk.start_transaction(op="http.server", name="/orders/"):
        schedule_message(TOPIC)
        schedule_many([{"topic": TOPIC}] * 2)
    deliver()
    request, *deliveries = sent.transactions
    spans = [span for span in request["spans"] if span["op"] == "queue.publish"]
    assert [span["description"] for span in spans] == [TOPIC] * 2
    assert spans[1]["data"]["messaging.batch.message_count"] == 2
    parents = {one["contexts"]["trace"]["parent_span_id"] for one in deliveries}
    assert parents == {span["span_id"] for span in spans}
    traces = {one["contexts"]["trace"]["trace_id"] for one in sent.transactions}
    assert len(deliveries) == 3
    assert len(traces) == 1


def test_headers_that_are_no_trace_do_no_harm(init: Init) -> None:
    sent = init()
    handler(TOPIC)(lambda message: None)
    message = schedule_message(TOPIC)
    for strange in ("text", {"sentry-trace": "nonsense", "baggage": "=;="}):
        unguarded(Message).filter(pk=message.pk).update(headers={"sentry": strange})
        deliver()
        assert len(sent.transactions) == 1
        assert Message.objects.get(pk=message.pk).state == "consumed"
        sent.items.clear()
        message = schedule_message(TOPIC)


def test_errors_are_reported_without_tracing(init: Init) -> None:
    sent = init(traces_sample_rate=None)
    run(fail, retry=False)
    assert len(sent.events) == 1
    assert not sent.transactions


def test_a_line_about_a_crashed_message_is_an_event_grouped_by_its_topic(init: Init) -> None:
    """The process of its handler died, so no integration in it could report anything."""
    sent = init()
    logging.getLogger("django_delayq").error(
        "message %s id=%d", "dead", 5, extra={"delayq_event": "dead", "delayq": {"id": 5, "topic": TOPIC}}
    )
    (event,) = sent.events
    assert event["fingerprint"] == ["delayq", "dead", TOPIC]
    assert event["tags"]["delayq.topic"] == TOPIC


def test_breadcrumbs_of_one_delivery_are_not_in_the_next(init: Init) -> None:
    def leave_a_crumb(message: Any) -> None:
        sentry_sdk.add_breadcrumb(message="of this delivery")
        fail(message)

    sent = init()
    run(leave_a_crumb, retry=False)
    run(leave_a_crumb, OTHER, retry=False)
    for event in sent.events:
        crumbs = [crumb["message"] for crumb in event["breadcrumbs"]["values"]]
        assert crumbs.count("of this delivery") == 1
    assert len(sent.events) == 2


def test_nothing_is_reported_after_the_client_was_replaced_by_one_without_the_integration(init: Init) -> None:
    init()
    sent = Memory()
    sentry_sdk.init(dsn="http://public@127.0.0.1:9/1", transport=sent, auto_enabling_integrations=False)
    message = run(fail, retry=False)
    assert message.headers == {}
    # The line of the log.
    assert ["exception" in event for event in sent.events] == [False]


def test_the_integration_is_installed_once_and_flushes_when_a_worker_stops(
    init: Init, monkeypatch: pytest.MonkeyPatch
) -> None:
    init()
    init()
    assert [type(one).__module__ for one in middleware.chain()].count(sentry.__name__) == 1
    flushed = []
    monkeypatch.setattr(sentry_sdk, "flush", lambda **options: flushed.append(options))
    workers = extensions.WorkerExtensions("default", "w")
    workers.stop()
    assert flushed == [{"timeout": 2.0}]


def test_what_a_worker_schedules_by_itself_has_traces_of_its_own(init: Init) -> None:
    init()
    with acting_as("worker:host/1"):
        scheduled = [schedule_message(TOPIC, delay=60) for _ in range(2)]
    with sentry_sdk.start_transaction(name="a view"):
        scheduled += [schedule_message(TOPIC, delay=60) for _ in range(2)]
    traces = [message.headers["sentry"]["sentry-trace"].split("-")[0] for message in scheduled]
    assert traces[0] != traces[1]
    assert traces[2] == traces[3]


def test_a_task_of_django_that_fails_is_one_event(init: Init) -> None:
    """The framework logs it once more when middleware was left."""
    memory = init()
    tasks.fail.enqueue()
    deliver()
    (event,) = memory.events
    assert event["exception"]


def test_the_failure_of_a_task_is_reported_once_with_its_topic(init: Init) -> None:
    """The framework logs the exception of a task before the worker can report it."""

    def fail(message: Any) -> None:
        try:
            raise ValueError(SECRET)
        except ValueError as error:
            logging.getLogger("django.tasks").error("Task failed", exc_info=error)
            raise

    memory = init()
    run(fail, retry=False)
    (event,) = memory.events
    assert event["fingerprint"] == ["{{ default }}", TOPIC]
