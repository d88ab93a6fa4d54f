"""Reports moves of messages: to the log, to signals, and to Redis those that are scheduled again."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from queue import Queue
from typing import Any

from django.conf import settings as django_settings
from django.dispatch import Signal

from ... import signals
from ...broker import publisher
from ...broker.base import Entry
from ...core.callables import nothing
from ...core.durations import brief
from ...core.outcomes import Raised, error_digest
from ...core.states import State
from ...extensions import Service, WorkerExtensions
from ...models import Message
from ...project import conf
from ...record.sql.rows import Failure, Moved
from ..shared import connections
from ..shared.log_writer import log_writer, try_to
from .delivery import Delivery
from .run_tuning import USUAL, RunTuning

logger = logging.getLogger("django_delayq")


# Makes a call that sends a signal, with the arguments behind it, now or later.
Send = Callable[..., object]

# True: this worker logs whole errors whatever the settings say, and a line for each message that is consumed.
_is_verbose = False


def be_verbose(*, on: bool = True) -> None:
    """Log whole errors and each consumed message from now on, in this process and its children, or no more."""
    global _is_verbose  # noqa: PLW0603
    _is_verbose = on


def logs_whole_errors() -> bool:
    """Return whether the exceptions of handlers are logged with their texts and tracebacks."""
    chosen = conf.get().LOG_ERRORS
    return _is_verbose or (django_settings.DEBUG if chosen is None else chosen)


def success_level() -> int:
    """Return the level of the line for a message that is consumed."""
    return logging.INFO if _is_verbose else logging.DEBUG


def publish_scheduled(using: str, moves: Sequence[Moved], send: Send) -> None:
    """Publish the messages that are scheduled again to Redis, and those that follow ends. ``send`` sends signals."""
    follow_ups = [m.follow_up for m in moves if m.follow_up is not None]
    waiting = [*(m for m in moves if m.after == State.SCHEDULED), *follow_ups]
    publisher.announce(using, [(m.queue, Entry.at(m.id, m.due_at, m.priority)) for m in waiting])
    for new in follow_ups:
        arguments = signals.message_arguments(new, using)
        send(signals.emit, signals.message_scheduled, Message, **arguments, due_at=new.due_at)
        publisher.run_at_once(using, [new.id])


def _remove_expired(using: str, moves: Sequence[Moved]) -> None:
    """Have Redis forget expired messages: a blocked id may be taken by nobody."""
    for queue, ids in publisher.by_queue((m.queue, m.id) for m in moves if m.after == State.EXPIRED).items():
        publisher.remove_on_commit(using, queue, ids)


def report_moves(using: str, moves: Sequence[Moved], extensions: WorkerExtensions, send: Send | None = None) -> None:
    """Tell everybody of messages that were taken back from a delivery, or expired, without an outcome.

    ``send`` sends the signals (None: at once).
    """
    extensions.ended(moves)
    publish_scheduled(using, moves, send or try_to)
    _remove_expired(using, moves)
    for m in moves:
        level = logging.ERROR if m.after == State.DEAD else logging.WARNING
        word = "released" if m.after == State.SCHEDULED else m.after.value
        log_event(level, word, m, reason=m.reason)
        _send_end(send or try_to, m, using)


def _send_end(send: Send, moved: Moved, using: str, error: str = "") -> None:
    if any(signal.receivers for signal in (signals.message_dead, signals.message_cancelled, signals.message_expired)):
        send(signals.emit_end, Message, moved, using, error)


def report_delivered(delivery: Delivery) -> None:
    """Log and signal that the handler of a delivery is about to run."""
    if logger.isEnabledFor(logging.DEBUG):
        log_event(logging.DEBUG, "delivered", delivery, lateness_ms=delivery.lateness * 1000)
    if signals.message_delivered.receivers:
        emit(signals.message_delivered, delivery, lateness=delivery.lateness)


def log_success(pk: int, topic: str, delivery: int, late: float, ran: float) -> None:
    """Log a message that is consumed, with its lateness and its run time in milliseconds."""
    # As ``log_event`` would, in a third of the time. A topic has no blanks.
    line = f"message consumed id={pk} topic={topic} delivery={delivery} lateness_ms={late:.1f} runtime_ms={ran:.1f}"
    facts = {"id": pk, "topic": topic, "delivery": delivery, "lateness_ms": late, "runtime_ms": ran}
    logger.log(success_level(), line, extra={"delayq_event": "consumed", "delayq": facts})


def emit(signal: Signal, delivery: Delivery, send: Send | None = None, **facts: Any) -> None:
    """Send a signal about a delivery, by ``send`` or at once. A waiting signal keeps no delivery: it may be large."""
    facts |= {"delivery": delivery.deliveries, **signals.message_arguments(delivery, delivery.using)}
    if send is None:
        signals.emit(signal, Message, **facts)
    else:
        send(signals.emit, signal, Message, **facts)


def report_failure(delivery: Delivery, failure: Failure, moved: Moved | None, cause: Raised | None) -> None:
    """Log and signal a failure and the move it led to; ``moved`` None: another delivery is the current one.

    The failure of a handler is logged in the handler's context, so that the line has what the handler's own lines have.
    """
    if moved is None:
        logger.warning("Outcome refused, another delivery is the current one: %s", delivery)
        return
    _send_end(try_to, moved, delivery.using, failure.error)
    # The first word of an error is its class; the rest may hold secrets.
    error = failure.error.split(":")[0][:80]
    reason = {"reason": failure.reason} if failure.reason else {}
    if moved.after == State.DEAD:
        digest = error_digest(failure.error)
        _log_failure(logging.ERROR, "dead", delivery, cause, error=error, digest=digest, **reason)
    elif moved.after == State.CANCELLED:
        log_event(logging.INFO, "cancelled", delivery)
    elif failure.counts:
        digest = error_digest(failure.error)
        facts = {"due_at": moved.due_at, "error": error, "digest": digest, **reason}
        _log_failure(logging.WARNING, "retried", delivery, cause, **facts)
        if signals.message_retried.receivers:
            emit(signals.message_retried, delivery, due_at=moved.due_at, error=failure.error)
    else:
        log_event(logging.INFO, "released", delivery, reason=failure.reason or error)


def report_after_commit(delivery: Delivery, error: BaseException) -> None:
    """Log an error that came when a transactional handler had committed: in a function on commit, or in a middleware.

    The message is consumed, and the record keeps no error of it. So the log says in any case where it was raised.
    """
    whole = logs_whole_errors()
    where = "" if whole else "\n" + "".join(traceback.format_tb(error.__traceback__)).rstrip()
    logger.error(
        "After the commit of its handler, a function on commit or a middleware failed; the message stays consumed, and "
        "is not delivered again: id=%d topic=%s delivery=%d error=%s%s",
        delivery.id,
        delivery.topic,
        delivery.deliveries,
        type(error).__name__,
        where,
        exc_info=error if whole else None,
        extra={"delayq_event": "after_commit", "delayq": {"id": delivery.id, "topic": delivery.topic}},
    )


def _log_failure(level: int, event: str, delivery: Delivery, cause: Raised | None, **facts: Any) -> None:
    if cause is None:
        log_event(level, event, delivery, **facts)
    else:
        cause.context.run(log_event, level, event, delivery, cause.error, **facts)


def log_event(
    level: int, event: str, delivery: Delivery | Moved, shown: BaseException | None = None, **facts: Any
) -> None:
    """Log one line about a delivery, with the facts as ``extra`` too, and the exception that may be shown.

    The facts never hold the payload, a key or the text of an error: those may be secret. The record has them.
    """
    facts = {"id": delivery.id, "topic": delivery.topic, "delivery": delivery.deliveries, **facts}
    line = " ".join(f"{name}={_formatted(value)}" for name, value in facts.items())
    logger.log(level, "message %s %s", event, line, exc_info=shown, extra={"delayq_event": event, "delayq": facts})


def _formatted(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1f}"
    text = str(value)
    # Error texts are data: they must not be able to forge a line of the log.
    return repr(text) if " " in text or not text.isprintable() else text


class OutcomeLog(Service):
    """Counts outcomes by queue, and logs the counts once a minute. The recorder's thread calls all methods.

    The lines of single messages are formatted in the thread that writes them.
    """

    name = "log of outcomes"

    def __init__(self, interval: float = USUAL.counts_interval) -> None:
        """``interval`` (seconds) lies between two lines of a queue."""
        self.interval = interval
        self._counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._since = time.monotonic()

    def consumed(self, successes: Sequence[Delivery]) -> None:
        """Count messages that are consumed, and have a line written for each where the log takes these."""
        for queue, number in Counter([delivery.queue for delivery in successes]).items():
            self.count(queue, "consumed", number)
        if logger.isEnabledFor(success_level()):
            for d in successes:
                # The line keeps no delivery: thousands of payloads may be large.
                late, ran = d.lateness * 1000, d.runtime * 1000
                log_writer.submit(log_success, d.id, d.topic, d.deliveries, late, ran)

    def count(self, queue: str, outcome: str, number: int = 1) -> None:
        """Count an outcome of deliveries of a queue: "consumed", "retried", "dead", "cancelled" or "released"."""
        self._counts[queue][outcome] += number

    def tick(self) -> float:
        """Log the counts since the last tick."""
        lasted, self._since = time.monotonic() - self._since, time.monotonic()
        for queue, counts in sorted(self._counts.items()):
            said = ", ".join(f"{number:,} {outcome}" for outcome, number in sorted(counts.items()))
            facts = {"queue": queue, "seconds": lasted, **counts}
            logger.info(
                "queue %s: %s in %s", queue, said, brief(lasted), extra={"delayq_event": "counted", "delayq": facts}
            )
        self._counts.clear()
        return self.interval


class SignalSender(threading.Thread):
    """Sends the signals of outcomes and moves, and logs failures, one after another, in the order in which they come.

    Receivers may be slow, and other threads have leases to renew and messages to load. Any thread may send. Where the
    thread was not started, as in tests of a project, each call is made at once.

    The queue is safe from any thread; ``on_room`` is set before the thread starts.
    """

    def __init__(self, tuning: RunTuning) -> None:
        super().__init__(name="delayq-signals", daemon=True)
        self.tuning = tuning
        self._waiting: Queue[tuple[Callable[..., object], Sequence[Any], dict[str, Any]] | None] = Queue()
        # Called when the process may take messages again.
        self.on_room: Callable[[], None] = nothing

    def send(self, tell: Callable[..., object], *given: Any, **facts: Any) -> None:
        """Have a call made that sends a signal or logs a failure."""
        if not self.is_alive():
            try_to(tell, *given, **facts)
            return
        self._waiting.put((tell, given, facts))
        if self.waiting == self.tuning.most_untold:
            logger.warning(
                "%d signals and failures wait for slow receivers; this process takes no messages now",
                self.tuning.most_untold,
            )

    @property
    def waiting(self) -> int:
        """The number of signals and failures that are not reported yet."""
        return self._waiting.unfinished_tasks

    @property
    def is_behind(self) -> bool:
        """True when too many signals wait: the process is to take no messages."""
        return self.waiting >= self.tuning.most_untold

    def finish(self, timeout: float) -> None:
        """End the thread when all is told. Give up, and log it, after ``timeout`` seconds."""
        self._waiting.put(None)
        if self.is_alive():
            self.join(timeout)
        # The thread may be about to end.
        if self.is_alive() and (untold := self.waiting - 1):
            logger.error("Receivers did not end in time; signals and failures not reported: %d", untold)

    def run(self) -> None:
        """Tell what is given until the end."""
        while (call := connections.wait_for(self._waiting, self.tuning.idle_closed_after)) is not None:
            connections.before_task()
            tell, given, facts = call
            try_to(tell, *given, **facts)
            connections.after_task()
            self._waiting.task_done()
            if self.waiting == self.tuning.most_untold // 2:
                self.on_room()
        connections.close_all()
