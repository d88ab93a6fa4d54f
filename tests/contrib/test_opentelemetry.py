"""OpenTelemetry gets spans and metrics of calls and deliveries: its in-memory exporters see what a worker does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("opentelemetry.instrumentation")

from opentelemetry import baggage, context, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, SpanKind, StatusCode

from django_delayq import (
    KeyConflict,
    RetryLater,
    RetryPolicy,
    acancel_message,
    handler,
    middleware,
    schedule_message,
)
from django_delayq import schedule_messages as schedule_many
from django_delayq.contrib import opentelemetry
from django_delayq.contrib.opentelemetry import DelayqInstrumentor
from django_delayq.models import Message
from django_delayq.project import registry
from tests.support.assembled import deliver
from tests.support.rows import unguarded

pytestmark = pytest.mark.django_db(transaction=True)

TOPIC = "integration.otel"


class Telemetry:
    """What was exported: spans by their names, and the points of metrics."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracers = TracerProvider(shutdown_on_exit=False)
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider([self.reader], shutdown_on_exit=False)

    def spans(self, name: str = f"process {TOPIC}") -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def points(self, name: str) -> list[Any]:
        data = self.reader.get_metrics_data()
        assert data is not None
        return [
            point
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        ]


Instrument = Callable[..., Telemetry]


@pytest.fixture
def instrument(own_additions: None) -> Iterator[Instrument]:
    """Instrument the queue until the end of the test."""
    telemetry = Telemetry()

    def instrument_with(**options: Any) -> Telemetry:
        given = {"tracer_provider": telemetry.tracers, "meter_provider": telemetry.meters, **options}
        DelayqInstrumentor().instrument(**given)
        return telemetry

    yield instrument_with
    DelayqInstrumentor().uninstrument()
    telemetry.tracers.shutdown()
    telemetry.meters.shutdown()
    assert not any(isinstance(one, opentelemetry._TracingMiddleware) for one in middleware.chain())


def run(function: Callable[[Any], Any], **terms: Any) -> Message:
    """Schedule one message, and deliver it as a worker does."""
    handler(TOPIC, **terms)(function)
    message = schedule_message(TOPIC)
    deliver()
    return message


def fail(message: Any) -> None:
    raise ValueError("no such order")


def context_of(span: ReadableSpan) -> SpanContext:
    found: SpanContext | None = span.context
    assert found is not None
    return found


def facts(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_a_call_is_a_producer_span_whose_context_travels_in_the_headers(instrument: Instrument) -> None:
    telemetry = instrument()
    message = schedule_message(TOPIC, queue="mail", delay=60, headers={"a": 1})
    (span,) = telemetry.spans(f"schedule {TOPIC}")
    assert span.kind == SpanKind.PRODUCER
    assert facts(span) == {
        "messaging.system": "django_delayq",
        "messaging.operation.name": "schedule",
        "messaging.operation.type": "send",
        "messaging.destination.name": TOPIC,
        "messaging.message.id": str(message.pk),
        "delayq.queue": "mail",
    }
    assert message.headers["a"] == 1
    assert trace.format_trace_id(context_of(span).trace_id) in message.headers["traceparent"]
    assert trace.format_span_id(context_of(span).span_id) in message.headers["traceparent"]


def test_a_batch_is_one_span_that_names_the_topic_that_all_have(instrument: Instrument) -> None:
    telemetry = instrument()
    schedule_many([{"topic": TOPIC, "delay": 60}] * 2)
    schedule_many([{"topic": TOPIC, "delay": 60}, {"topic": "integration.otel.other", "delay": 60}])
    schedule_many([])
    (same,) = telemetry.spans(f"schedule {TOPIC}")
    (mixed,) = telemetry.spans("schedule")
    assert facts(same)["messaging.batch.message_count"] == facts(mixed)["messaging.batch.message_count"] == 2
    assert "messaging.destination.name" not in facts(mixed)
    assert sum(point.value for point in telemetry.points("messaging.client.sent.messages")) == 4


def test_a_call_that_is_refused_is_a_span_with_the_error(instrument: Instrument) -> None:
    telemetry = instrument()
    schedule_message(TOPIC, delay=60, key="k")
    with pytest.raises(KeyConflict):
        schedule_message(TOPIC, delay=60, key="k")
    _fine, refused = telemetry.spans(f"schedule {TOPIC}")
    assert refused.status.status_code == StatusCode.ERROR
    assert facts(refused)["error.type"] == "django_delayq.core.exceptions.KeyConflict"


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_delivery_is_a_consumer_span_with_a_link_to_the_call(instrument: Instrument, kind: str) -> None:
    seen = []

    def look(message: Any) -> None:
        seen.append(trace.get_current_span().get_span_context())

    async def alook(message: Any) -> None:
        look(message)

    telemetry = instrument()
    message = run(look if kind == "sync" else alook)
    (call,), (span,) = telemetry.spans(f"schedule {TOPIC}"), telemetry.spans()
    assert span.kind == SpanKind.CONSUMER
    assert span.parent is None
    assert span.context == seen[0]
    assert [link.context.span_id for link in span.links] == [context_of(call).span_id]
    found = facts(span)
    assert 0 <= found.pop("delayq.lateness") < 60
    assert found == {
        "messaging.system": "django_delayq",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": TOPIC,
        "messaging.message.id": str(message.pk),
        "delayq.queue": "default",
        "delayq.attempt": 1,
        "delayq.delivery": 1,
        "delayq.outcome": "consumed",
    }


def test_a_delivery_goes_on_with_the_trace_of_the_call_when_asked(instrument: Instrument) -> None:
    telemetry = instrument(continue_trace=True)
    run(lambda message: None)
    (call,), (span,) = telemetry.spans(f"schedule {TOPIC}"), telemetry.spans()
    assert span.parent is not None
    assert span.parent.span_id == context_of(call).span_id
    assert len(span.links) == 1


@pytest.mark.parametrize(("retry", "outcome"), [(["1h"], "retried"), (False, "dead")], ids=["retried", "dead"])
def test_a_failure_is_in_the_span_with_its_outcome(instrument: Instrument, retry: Any, outcome: str) -> None:
    telemetry = instrument()
    run(fail, retry=retry)
    (span,) = telemetry.spans()
    assert span.status.status_code == StatusCode.ERROR
    assert facts(span)["error.type"] == "ValueError"
    assert facts(span)["delayq.outcome"] == outcome
    (event,) = span.events
    assert "in fail" in str((event.attributes or {})["exception.stacktrace"])


@pytest.mark.parametrize(
    ("attempts", "outcome", "status"), [(2, "retried", StatusCode.UNSET), (1, "dead", StatusCode.ERROR)]
)
def test_a_handler_that_asks_for_later_has_an_error_only_when_no_attempt_is_left(
    instrument: Instrument, attempts: int, outcome: str, status: StatusCode
) -> None:
    def later(message: Any) -> None:
        raise RetryLater(3600)

    telemetry = instrument()
    run(later, retry=RetryPolicy.exponential(max_attempts=attempts))
    (span,) = telemetry.spans()
    assert span.status.status_code == status
    assert facts(span)["delayq.outcome"] == outcome


def test_an_async_handler_that_is_cancelled_on_request_has_no_error(instrument: Instrument) -> None:
    async def outlast(message: Any) -> None:
        await acancel_message(message.id)
        await asyncio.Event().wait()

    telemetry = instrument()
    run(outlast)
    (span,) = telemetry.spans()
    assert span.status.status_code == StatusCode.UNSET
    assert facts(span)["delayq.outcome"] == "cancelled"


def test_baggage_of_the_call_reaches_the_handler(instrument: Instrument) -> None:
    seen = []
    instrument()
    handler(TOPIC)(lambda message: seen.append(baggage.get_baggage("tenant")))
    token = context.attach(baggage.set_baggage("tenant", "acme"))
    try:
        schedule_message(TOPIC)
    finally:
        context.detach(token)
    deliver()
    assert seen == ["acme"]


def test_baggage_that_a_handler_clears_does_not_come_back_with_the_headers_that_it_passes_on(
    instrument: Instrument,
) -> None:
    @handler(TOPIC)
    def pass_on(message: Any) -> None:
        token = context.attach(baggage.clear())
        schedule_message("t.ok", headers=message.headers)
        context.detach(token)

    instrument()
    token = context.attach(baggage.set_baggage("tenant", "acme"))
    schedule_message(TOPIC, headers={"own": 1})
    context.detach(token)
    deliver()
    headers = Message.objects.get(topic="t.ok").headers
    assert "baggage" not in headers
    assert headers["own"] == 1


def test_headers_that_are_no_trace_do_no_harm(instrument: Instrument) -> None:
    telemetry = instrument()
    handler(TOPIC)(lambda message: None)
    for strange in (5, "nonsense", ["a"]):
        message = schedule_message(TOPIC)
        unguarded(Message).filter(pk=message.pk).update(headers={"traceparent": strange, "baggage": strange})
        deliver()
        assert Message.objects.get(pk=message.pk).state == "consumed"
    assert [len(span.links) for span in telemetry.spans()] == [0] * 3


def test_metrics_follow_the_conventions(instrument: Instrument) -> None:
    telemetry = instrument()
    run(lambda message: None)
    registry.unregister(TOPIC)
    run(fail, retry=False)
    common = {"messaging.system": "django_delayq", "messaging.destination.name": TOPIC, "delayq.queue": "default"}
    process = {**common, "messaging.operation.name": "process"}
    kinds = [process, {**process, "error.type": "ValueError"}]
    for name in ("messaging.client.consumed.messages", "messaging.process.duration", "delayq.lateness"):
        assert [dict(point.attributes) for point in telemetry.points(name)] == kinds, name
    for name in ("messaging.client.sent.messages", "messaging.client.operation.duration"):
        (point,) = telemetry.points(name)
        assert dict(point.attributes) == {**common, "messaging.operation.name": "schedule"}
    assert [point.value for point in telemetry.points("messaging.client.consumed.messages")] == [1, 1]
    (duration,) = {point.explicit_bounds for point in telemetry.points("messaging.process.duration")}
    assert duration[:2] == (0.005, 0.01)
