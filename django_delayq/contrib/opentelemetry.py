"""OpenTelemetry: spans for calls and deliveries with the conventions for messaging, and metrics of both.

The instrumentor is switched on like any other, or by ``opentelemetry-instrument``::

    DelayqInstrumentor().instrument()
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from .. import __version__, extensions, middleware
from ..middleware import Draft, Handled
from ..project.answers import RetryLater

try:
    from opentelemetry import context, metrics, propagate, trace
    from opentelemetry.context import Context
    from opentelemetry.instrumentation.instrumentor import BaseInstrumentor
    from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode
except ImportError as error:
    raise ImproperlyConfigured(
        "django_delayq.contrib.opentelemetry needs the API of OpenTelemetry: pip install 'django-delayq[opentelemetry]'"
    ) from error

SYSTEM = "django_delayq"
# Milliseconds for which a worker waits at its end for spans and metrics that are on their way.
FLUSH_TIMEOUT = 2000
# Upper bounds of histograms, in seconds, as the conventions name them.
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
# Upper bounds for the lateness, which needs smaller and greater ones.
LATENESS = (0.001, 0.0025, *SECONDS, 30.0, 60.0, 300.0)

Attributes = dict[str, str | int | float]


class DelayqInstrumentor(BaseInstrumentor):  # type: ignore[misc]
    """Traces messages from the call that schedules them to their handlers, and measures both.

    ``instrument`` takes ``tracer_provider`` and ``meter_provider`` (default: the global ones), and ``continue_trace``.
    A delivery has a trace of its own with a link to the span of the call; with ``continue_trace=True`` it goes on with
    the trace of the call.
    """

    def instrumentation_dependencies(self) -> Collection[str]:
        return ()

    def _instrument(self, **kwargs: Any) -> None:
        self._providers = (
            kwargs.get("tracer_provider") or trace.get_tracer_provider(),
            kwargs.get("meter_provider") or metrics.get_meter_provider(),
        )
        self._middleware = _TracingMiddleware(*self._providers, continue_trace=bool(kwargs.get("continue_trace")))
        middleware.install(self._middleware)
        extensions.add_to_workers(_FlushSpans)

    def _uninstrument(self, **kwargs: Any) -> None:
        middleware.remove(self._middleware)

    def flush(self) -> None:
        """Send what is on its way. A worker process calls this before it ends."""
        for provider in self._providers if self.is_instrumented_by_opentelemetry else ():
            if hasattr(provider, "force_flush"):
                provider.force_flush(FLUSH_TIMEOUT)


class _FlushSpans(extensions.WorkerExtension):
    def stop(self) -> None:
        DelayqInstrumentor().flush()


class _TracingMiddleware(middleware.Middleware):
    def __init__(self, tracers: Any, meters: Any, *, continue_trace: bool) -> None:
        self._continue_trace = continue_trace
        self._tracer = trace.get_tracer(__name__, __version__, tracers)
        meter = metrics.get_meter(__name__, __version__, meters)

        def histogram(name: str, about: str, bounds: Sequence[float] = SECONDS) -> Any:
            return meter.create_histogram(name, "s", about, explicit_bucket_boundaries_advisory=bounds)

        about = "Number of messages that calls were to schedule."
        self._sent = meter.create_counter("messaging.client.sent.messages", "{message}", about)
        self._sent_in = histogram("messaging.client.operation.duration", "Duration of calls that schedule messages.")
        about = "Number of deliveries."
        self._consumed = meter.create_counter("messaging.client.consumed.messages", "{message}", about)
        self._processed_in = histogram("messaging.process.duration", "Duration of handlers.")
        self._lateness = histogram("delayq.lateness", "Time from the due time of a message to its claim.", LATENESS)

    @contextmanager
    def scheduling(self, drafts: Sequence[Draft]) -> Iterator[None]:
        if not drafts:
            yield
            return
        attributes = _attributes(
            "schedule", "send", {draft.topic for draft in drafts}, {draft.queue for draft in drafts}
        )
        measured = _measured(attributes)
        if len(drafts) > 1:
            attributes["messaging.batch.message_count"] = len(drafts)
        span = self._tracer.start_span(_name(attributes), kind=SpanKind.PRODUCER, attributes=attributes)
        started = time.perf_counter()
        try:
            carrier: dict[str, str] = {}
            propagate.inject(carrier, trace.set_span_in_context(span))
            # A handler may pass on the headers of its message: their context is not that of the new call.
            fields = propagate.get_global_textmap().fields
            for draft in drafts:
                draft.headers = {name: value for name, value in draft.headers.items() if name not in fields} | carrier
            with trace.use_span(span, record_exception=False, set_status_on_exception=False):
                yield
            if len(drafts) == 1:
                span.set_attribute("messaging.message.id", str(drafts[0].id))
        except BaseException as error:
            measured |= _note(span, error)
            raise
        finally:
            span.end()
            self._sent.add(len(drafts), measured)
            self._sent_in.record(time.perf_counter() - started, measured)

    @contextmanager
    def handling(self, message: Handled) -> Iterator[None]:
        attributes = _attributes("process", "process", {message.topic}, {message.queue})
        measured = _measured(attributes)
        attributes |= {
            "messaging.message.id": str(message.id),
            "delayq.attempt": message.attempt,
            "delayq.delivery": message.deliveries,
            "delayq.lateness": message.lateness,
        }
        around, links = self._origin(message)
        span = self._tracer.start_span(
            _name(attributes), around, kind=SpanKind.CONSUMER, attributes=attributes, links=links
        )
        token = context.attach(trace.set_span_in_context(span, around))
        started = time.perf_counter()
        try:
            yield
        except BaseException as error:
            is_wish = isinstance(error, RetryLater) and message.outcome != "dead"
            if not is_wish and message.outcome not in ("cancelled", "released"):
                measured |= _note(span, error)
            raise
        finally:
            context.detach(token)
            if message.outcome is not None:
                span.set_attribute("delayq.outcome", message.outcome)
            span.end()
            self._consumed.add(1, measured)
            self._processed_in.record(time.perf_counter() - started, measured)
            self._lateness.record(message.lateness, measured)

    def _origin(self, message: Handled) -> tuple[Context, list[Link]]:
        """Return the context of a delivery, with the baggage of the call, and the links of its span."""
        # A header of the project may have any type.
        carrier = {name: value for name, value in message.headers.items() if isinstance(value, str)}
        around = propagate.extract(carrier, Context())
        caller = trace.get_current_span(around).get_span_context()
        if not self._continue_trace:
            around = trace.set_span_in_context(trace.INVALID_SPAN, around)
        return around, [Link(caller)] if caller.is_valid else []


def _attributes(name: str, kind: str, topics: set[str], queues: set[str]) -> Attributes:
    """Return the attributes of an operation. A destination is named when all messages have the same."""
    attributes: Attributes = {
        "messaging.system": SYSTEM,
        "messaging.operation.name": name,
        "messaging.operation.type": kind,
    }
    if len(topics) == 1:
        attributes["messaging.destination.name"] = next(iter(topics))
    if len(queues) == 1:
        attributes["delayq.queue"] = next(iter(queues))
    return attributes


def _measured(attributes: Attributes) -> Attributes:
    """Return the attributes that metrics have, too."""
    return {name: value for name, value in attributes.items() if name != "messaging.operation.type"}


def _name(attributes: Attributes) -> str:
    return f"{attributes['messaging.operation.name']} {attributes.get('messaging.destination.name', '')}".strip()


def _note(span: Span, error: BaseException) -> Attributes:
    """Note an error in a span. Return the attribute that metrics get."""
    kind = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, type(error).__qualname__))
    span.record_exception(error)
    return {"error.type": kind}
