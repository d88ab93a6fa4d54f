"""Sentry: dead messages as events with their stack, a transaction for each delivery, and traces across the queue.

The integration is switched on like any other of Sentry's SDK::

    sentry_sdk.init(dsn=..., integrations=[DelayqIntegration()])
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

from django.core.exceptions import ImproperlyConfigured, SynchronousOnlyOperation
from django.db import Error as DatabaseError
from django.db import OperationalError, connections

from .. import extensions, middleware
from ..core import actors
from ..middleware import Draft, Handled
from ..project.answers import RetryLater
from ..record.sql.troubles import in_words

try:
    import sentry_sdk
    from sentry_sdk.consts import SPANDATA, SPANSTATUS
    from sentry_sdk.integrations import Integration
    from sentry_sdk.scope import add_global_event_processor
    from sentry_sdk.tracing import BAGGAGE_HEADER_NAME, SENTRY_TRACE_HEADER_NAME, TransactionSource
    from sentry_sdk.utils import event_from_exception
except ImportError as error:
    raise ImproperlyConfigured(
        "django_delayq.contrib.sentry needs sentry-sdk: pip install 'django-delayq[sentry]'"
    ) from error

logger = logging.getLogger("django_delayq")

ORIGIN = "auto.queue.delayq"
SYSTEM = "django_delayq"
# The header of a message under which Sentry's own headers travel.
HEADER = "sentry"
# The loggers that log the failure of each of Django's tasks, with its exception.
TASK_LOGGERS = ("django.tasks", "django_tasks")
# The most earlier failures of a message that its event has as breadcrumbs.
MOST_RECALLED = 20
# Seconds for which a worker waits at its end for events that are on their way.
FLUSH_TIMEOUT = 2.0
# Seconds for which an event loop waits for the earlier failures of a message.
RECALL_TIMEOUT = 1.0

# True in the context of a delivery whose failure the integration reports.
_is_reported: ContextVar[bool] = ContextVar("django_delayq_sentry", default=False)


# The thread that asks for earlier failures for an event loop. Only the loop's thread starts one.
_asking: threading.Thread | None = None


class DelayqIntegration(Integration):
    """Reports what handlers raise, and traces messages from the call to the handler.

    A message that a handler's exception made dead is an event, grouped by topic and exception. ``retries`` chooses what
    becomes of an exception after which the message is tried again: a "breadcrumb" of the event of a message that dies
    later, an "event" of level warning, or nothing (None). ``RetryLater`` is no error, and reported only
    when it leaves no attempt, so that the message is dead.
    """

    identifier = "delayq"

    def __init__(self, retries: Literal["breadcrumb", "event"] | None = "breadcrumb") -> None:
        if retries not in ("breadcrumb", "event", None):
            raise ValueError(f"retries is 'breadcrumb', 'event' or None, not {retries!r}")
        self.retries = retries

    @staticmethod
    def setup_once() -> None:
        """Install the middleware. The SDK calls this once in each process."""
        middleware.install(_SentryMiddleware())
        extensions.add_to_workers(_FlushEvents)
        add_global_event_processor(_improve_log_event)


def _integration() -> DelayqIntegration | None:
    return sentry_sdk.get_client().get_integration(DelayqIntegration)


class _FlushEvents(extensions.WorkerExtension):
    """Sends what is on its way before a worker process ends."""

    def stop(self) -> None:
        sentry_sdk.flush(timeout=FLUSH_TIMEOUT)


class _SentryMiddleware(middleware.Middleware):
    @contextmanager
    def scheduling(self, drafts: Sequence[Draft]) -> Iterator[None]:
        if not drafts or _integration() is None:
            yield
            return
        first = drafts[0]
        with _trace_of_its_own(), sentry_sdk.start_span(op="queue.publish", name=first.topic, origin=ORIGIN) as span:
            span.set_data(SPANDATA.MESSAGING_SYSTEM, SYSTEM)
            span.set_data(SPANDATA.MESSAGING_DESTINATION_NAME, first.queue)
            trace = {
                SENTRY_TRACE_HEADER_NAME: sentry_sdk.get_traceparent(),
                BAGGAGE_HEADER_NAME: sentry_sdk.get_baggage(),
            }
            for draft in drafts:
                draft.headers[HEADER] = {name: value for name, value in trace.items() if value}
            yield
            if len(drafts) == 1:
                span.set_data(SPANDATA.MESSAGING_MESSAGE_ID, str(first.id))
            else:
                span.set_data("messaging.batch.message_count", len(drafts))

    @contextmanager
    def handling(self, message: Handled) -> Iterator[None]:
        integration = _integration()
        if integration is None:
            yield
            return
        raised: BaseException | None = None
        token = _is_reported.set(True)
        try:
            with sentry_sdk.isolation_scope() as scope:
                scope.clear_breadcrumbs()
                scope.set_tag("delayq.topic", message.topic)
                scope.set_tag("delayq.queue", message.queue)
                scope.set_context("delayq", _facts(message))
                with _transaction(message) as transaction:
                    try:
                        yield
                    except BaseException as error:  # noqa: BLE001
                        # The error is raised again when the transaction has the status of the outcome.
                        raised = error
                        _report(integration, message, error)
                    is_wish = isinstance(raised, RetryLater) and message.outcome != "dead"
                    is_wish |= message.outcome in ("cancelled", "released")
                    is_failure = raised is not None and not is_wish
                    transaction.set_status(SPANSTATUS.INTERNAL_ERROR if is_failure else SPANSTATUS.OK)
            if raised is not None:
                raise raised
        finally:
            _is_reported.reset(token)
            # The traceback of the error refers to this frame.
            del raised


@contextmanager
def _trace_of_its_own() -> Iterator[None]:
    """Begin a trace for messages that a worker schedules outside of handlers: a thread has only one by itself."""
    if sentry_sdk.get_current_span() is not None or not actors.current().startswith("worker:"):
        yield
        return
    with sentry_sdk.isolation_scope() as scope:
        scope.set_new_propagation_context()
        yield


def _facts(message: Handled) -> dict[str, Any]:
    """Return what every event of a delivery says about it: neither payload nor key, which may be secret."""
    return {
        "id": message.id,
        "topic": message.topic,
        "queue": message.queue,
        "attempt": message.attempt,
        "delivery": message.deliveries,
        "due_at": message.due_at.isoformat(),
    }


def _transaction(message: Handled) -> Any:
    """Start the transaction of a delivery, in the trace that its message carries."""
    carried = message.headers.get(HEADER)
    transaction = sentry_sdk.start_transaction(
        sentry_sdk.continue_trace(
            carried if isinstance(carried, dict) else {},
            op="queue.process",
            name=message.topic,
            source=TransactionSource.TASK,
            origin=ORIGIN,
        )
    )
    transaction.set_data(SPANDATA.MESSAGING_SYSTEM, SYSTEM)
    transaction.set_data(SPANDATA.MESSAGING_DESTINATION_NAME, message.queue)
    transaction.set_data(SPANDATA.MESSAGING_MESSAGE_ID, str(message.id))
    transaction.set_data(SPANDATA.MESSAGING_MESSAGE_RETRY_COUNT, message.attempt - 1)
    # Milliseconds.
    transaction.set_data(SPANDATA.MESSAGING_MESSAGE_RECEIVE_LATENCY, message.lateness * 1000)
    return transaction


def _report(integration: DelayqIntegration, message: Handled, error: BaseException) -> None:
    """Report the error of a delivery to Sentry, as the options of the integration say."""
    is_dead = message.outcome == "dead"
    if not is_dead and (message.outcome != "retried" or isinstance(error, RetryLater)):
        return
    if is_dead and integration.retries == "breadcrumb":
        _recall_failures(message)
    if is_dead or integration.retries == "event":
        event, hint = event_from_exception(
            error,
            client_options=sentry_sdk.get_client().options,
            mechanism={"type": DelayqIntegration.identifier, "handled": not is_dead},
        )
        event["level"] = "error" if is_dead else "warning"
        event["fingerprint"] = ["{{ default }}", message.topic]
        sentry_sdk.capture_event(event, hint=hint)


def _recall_failures(message: Handled) -> None:
    """Add a breadcrumb for each earlier delivery that failed: the record has them, whatever worker they ran in."""
    if message.deliveries == 1:
        return
    # Imported here: the SDK is often set up in the settings, before there are models.
    from ..models import Transition

    moves = Transition.objects.using(message.using).filter(message_id=message.id, delivery__lt=message.deliveries)
    failures = moves.exclude(error="").order_by("-number").values_list("at", "delivery", "error")[:MOST_RECALLED]
    try:
        try:
            failed = list(failures)
        except SynchronousOnlyOperation:
            # On the event loop of an async handler.
            failed = _answer_to(failures, message.using)
    except DatabaseError as error:
        logger.warning("The earlier failures of message %d are not in its event: %s", message.id, in_words(error))
        return
    for at, delivery, text in reversed(failed):
        sentry_sdk.add_breadcrumb(
            category="delayq", level="warning", timestamp=at, message=text, data={"delivery": delivery}
        )


def _answer_to(query: Iterable[Any], using: str) -> list[Any]:
    """Return what a query returns in a thread of its own, for an event loop, where Django allows none.

    Nothing else runs on the loop meanwhile, so the loop waits for a limited time, and for one query only.
    """
    global _asking  # noqa: PLW0603
    answers: list[list[Any]] = []
    errors: list[DatabaseError] = []

    def run() -> None:
        try:
            answers.append([*query])
        except DatabaseError as error:
            errors.append(error)
        finally:
            connections[using].close()

    if _asking is None or not _asking.is_alive():
        _asking = threading.Thread(target=run, name="delayq-sentry", daemon=True)
        _asking.start()
        _asking.join(RECALL_TIMEOUT)
    if errors:
        raise errors[0]
    if not answers:
        raise OperationalError("no answer in time")
    return answers[0]


def _improve_log_event(event: Any, hint: Any) -> Any:
    """Drop the event that Sentry makes of the log line of a reported failure; group those of crashes by their topic."""
    record = hint.get("log_record")
    word = getattr(record, "delayq_event", None)
    is_worker = actors.current().startswith("worker:")
    if record is not None and record.name in TASK_LOGGERS and is_worker and _integration() is not None:
        # This comes before the integration that drops repeated exceptions, which would drop ours.
        return None
    if word is None or _integration() is None:
        return event
    if _is_reported.get():
        return None
    event["fingerprint"] = ["delayq", word, record.delayq["topic"]]
    event.setdefault("tags", {})["delayq.topic"] = record.delayq["topic"]
    return event
