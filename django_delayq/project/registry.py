"""The registry of handlers: which function receives which topic, and with which options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, Protocol, TypeVar, overload

from asgiref.sync import iscoroutinefunction
from django.conf import settings
from django.core.exceptions import AppRegistryNotReady
from django.utils.module_loading import autodiscover_modules, import_string

from ..core import limits, names, retry, values
from ..core.durations import Duration
from ..core.exceptions import HandlerConflict, InvalidMessage
from ..core.retry import as_policy
from ..core.states import State
from . import conf, payloads, pulled, validation
from .answers import KEPT, REJECTED

if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault
    from typing_extensions import Unpack

    from ..models import Message
    from .message_options import MessageOptions

    # ``Delivered`` without brackets is ``Delivered[Any]``.
    Payload = TypeVarWithDefault("Payload", default=Any)
    Payload_co = TypeVarWithDefault("Payload_co", covariant=True, default=Any)
    Payload_contra = TypeVarWithDefault("Payload_contra", contravariant=True, default=Any)
    Result_co = TypeVarWithDefault("Result_co", covariant=True, default=Any)
else:
    Payload = TypeVar("Payload")
    Payload_co = TypeVar("Payload_co", covariant=True)
    Payload_contra = TypeVar("Payload_contra", contravariant=True)
    Result_co = TypeVar("Result_co", covariant=True)

Result = TypeVar("Result")


class Delivered(Protocol[Payload_co]):
    """One delivery of a message, as its handler receives it. ``Delivered[X]`` has a payload of the type X.

    ``attempt`` counts from 1 the deliveries that the retry policy counts. ``deliveries`` counts every claim; together
    with ``id`` it makes a fence that is never used twice. The timeout ends the handler at ``deadline`` (None: never).
    """

    id: int
    topic: str
    queue: str
    key: str | None
    priority: int
    headers: dict[str, Any]
    due_at: datetime
    expires_at: datetime | None
    attempt: int
    deliveries: int

    @property
    def payload(self) -> Payload_co: ...

    @property
    def attempts_left(self) -> int | None:
        """The number of attempts that the retry policy allows after this one: 0 in the last one.

        None when the policy names no number. An exception that the policy does not retry ends the message earlier.
        """

    @property
    def deadline(self) -> datetime | None: ...

    @property
    def cancel_requested(self) -> bool:
        """True when a cancel was requested while the handler runs. Known within about a second.

        A handler that returns has succeeded all the same. If it raises anything, the message is cancelled: no retry
        follows, and it is not dead.
        """

    def raise_if_cancelled(self) -> None:
        """Raise ``MessageCancelled`` when ``cancel_requested`` is true. Let it out, and the message is cancelled.

        It costs nothing, and may be called often. An async handler is cancelled at its next ``await`` anyway.
        """

    def extend(self, more: Duration) -> datetime | None:
        """Move the deadline and the lease to ``more`` seconds from now; return the new deadline.

        The deadline moves at once. The worker extends the lease, on a connection of its own, and this waits for that
        for a second at most; what the database has not answered by then, the worker tries until it answers.

        Raises ``LeaseLost`` when the delivery is not the current one any more, as far as the database has answered.
        Async handlers await ``aextend``.
        """

    async def aextend(self, more: Duration) -> datetime | None: ...

    # --- in a batch handler only --------------------------------------------------------------------------------------

    def retry_later(self, delay: Duration, reason: str = "", *, counts: bool = True, payload: Any = KEPT) -> None:
        """Have this message of a batch delivered again after ``delay``, as ``raise RetryLater(…)`` does elsewhere."""

    def reject(self, reason: str = REJECTED) -> None:
        """Give this message of a batch up, as ``raise Reject(…)`` does elsewhere: it is dead, with this reason."""

    def fail(self, error: BaseException) -> None:
        """Have this message of a batch fail with this error, which its retry policy answers."""


class HandlerFunction(Protocol[Payload_contra, Result_co]):
    """A function, sync or async, that ``handler`` accepts: it takes a delivered message as its only argument."""

    def __call__(self, message: Delivered[Payload_contra], /) -> Result_co: ...


class BatchFunction(Protocol[Payload, Result_co]):
    """A function, sync or async, that ``handler`` accepts with ``batch``: it takes a list of delivered messages."""

    def __call__(self, messages: list[Delivered[Payload]], /) -> Result_co: ...


class Schedulable(Protocol[Payload_contra]):
    """What ``handler`` gives the function that it registers: its ``topic``, and two methods that schedule messages."""

    topic: str

    def schedule(
        self, payload: Payload_contra | None = None, *, using: str | None = None, **options: Unpack[MessageOptions]
    ) -> Message:
        """Schedule a message of this handler's topic.

        The options are those of ``schedule_message``: ``delay`` or ``due_at``, ``key`` with ``unique`` and
        ``on_conflict``, ``queue``, ``priority``, ``expires``, ``retry``, ``max_attempts``, ``timeout``, ``lease``,
        ``headers``, ``limit_key``, ``on_dead`` and ``on_expired``.
        """
        message: Message = calls().schedule_message(_topic(self), payload, using=using, **options)
        return message

    async def aschedule(
        self, payload: Payload_contra | None = None, *, using: str | None = None, **options: Unpack[MessageOptions]
    ) -> Message:
        """Schedule from async code what ``schedule`` schedules."""
        message: Message = await calls().aschedule_message(_topic(self), payload, using=using, **options)
        return message


class RegisteredHandler(HandlerFunction[Payload_contra, Result_co], Schedulable[Payload_contra], Protocol):
    """A function that ``handler`` has registered: itself, with its ``topic`` and two methods that schedule messages."""


class RegisteredBatchHandler(BatchFunction[Payload, Result_co], Schedulable[Payload], Protocol):
    """A function that ``handler`` has registered with ``batch``."""


class Handler(NamedTuple):
    """A function and the options with which it receives messages. Times are in seconds."""

    topic: str
    function: Callable[[Any], Any]
    # The function that a worker calls: the project's own, or one around it that converts payloads.
    called: Callable[[Any], Any]
    # None: the setting counts. A timeout of 0: none.
    own_retry: retry.RetryPolicy | None
    own_lease: float | None
    own_timeout: float | None
    transactional: bool
    queue: str | None
    priority: int
    keep_result: bool
    is_async: bool
    # The limit that its topic declares, and the function that finds the limit key of a message.
    limit: limits.Limit | None = None
    limit_key: LimitKey | None = None
    # The most messages of one call, and how long the first of them waits for others (seconds).
    batch: int = 1
    linger: float = 0.0
    # How long after its due time a message may start when its call does not say.
    expires: timedelta | None = None
    # False: a message is dead when a delivery of it crashed.
    redeliver: bool = True
    # The topics of the messages that follow when one ends dead or expired.
    on_dead: str | None = None
    on_expired: str | None = None
    # The type of the payloads, if the handler names one.
    payload: payloads.PayloadType | None = None

    @property
    def name(self) -> str:
        return _name(self.function)

    @property
    def retry(self) -> retry.RetryPolicy:
        return conf.get().RETRY if self.own_retry is None else self.own_retry

    @property
    def lease(self) -> float:
        return conf.get().LEASE if self.own_lease is None else self.own_lease

    def stored(self, payload: Any) -> tuple[Any, Any]:
        """Return the payload of a call as JSON has it, and as this handler gets it.

        Where the handler does not say what payloads are, both are the payload as it is. Raises ``InvalidMessage`` for
        one that does not fit.
        """
        return (payload, payload) if self.payload is None else self.payload.stored(payload)

    @property
    def runs_on_loop(self) -> bool:
        """True when the handler runs on the event loop of a process, and not in a thread.

        A transaction needs a thread, and deliveries become a batch where they wait for one.
        """
        return self.is_async and not self.transactional and self.batch == 1

    @property
    def timeout(self) -> float | None:
        return (conf.get().TIMEOUT if self.own_timeout is None else self.own_timeout) or None


# Finds the limit key of a message; None: it has none.
LimitKey = Callable[[Any], str | int | None]

# The handlers by topic. Others call ``handlers``, which copies them.
declared: dict[str, Handler] = {}


def no_calls() -> Any:
    """Refuse a call before Django is set up: there are no models yet."""
    raise AppRegistryNotReady("messages are scheduled when Django is set up: call django.setup() first")


# Returns the module with the calls that schedule messages. It needs models, and handlers may be registered before there
# are any: the app hands it in.
calls: Callable[[], Any] = no_calls


# What other queues call the arguments of ``handler``.
_BACKOFF = 'retry=RetryPolicy.exponential("10s", factor=2, cap="1h", jitter=0.1)'
_RECURRING = '@recurring("0 3 * * *") above @handler'
MEANT = {
    **dict.fromkeys(("dead_letter", "dead_letter_queue", "dlq", "link_error", "on_failure"), "on_dead"),
    **dict.fromkeys(("max_retries", "retries"), "retry=RetryPolicy.exponential(max_attempts={more})"),
    **dict.fromkeys(("max_attempts", "attempts"), "retry=RetryPolicy.exponential(max_attempts={value})"),
    **dict.fromkeys(("retry_delay", "default_retry_delay", "retry_kwargs"), 'retry=["10s", "1m", "10m"]'),
    **dict.fromkeys(("backoff", "retry_backoff", "retry_backoff_max", "retry_jitter"), _BACKOFF),
    **dict.fromkeys(("min_backoff", "max_backoff"), _BACKOFF),
    "autoretry_for": "retry=RetryPolicy.exponential(on=(…))",
    **dict.fromkeys(("dont_autoretry_for", "retry_when", "throws"), "retry=RetryPolicy.exponential(never=(…))"),
    **dict.fromkeys(("time_limit", "soft_time_limit", "job_timeout"), "timeout"),
    **dict.fromkeys(("concurrency", "max_concurrency", "max_instances"), "limit"),
    **dict.fromkeys(("name", "task", "actor_name"), "topic"),
    **dict.fromkeys(("lock", "lock_task"), "limit=1, with a limit_key"),
    "rate_limit": "rate",
    "queue_name": "queue",
    **dict.fromkeys(("batch_size", "flush_every", "max_batch_size"), "batch"),
    **dict.fromkeys(("flush_interval", "batch_timeout", "max_wait"), "linger"),
    **dict.fromkeys(("ignore_result", "result_ttl", "store_results", "track_started"), "keep_result"),
    # Options that belong to the call that schedules, or to it as well.
    **dict.fromkeys(("key", "unique", "queueing_lock"), "key= and unique= where the message is scheduled"),
    **dict.fromkeys(("delay", "countdown", "eta"), "delay= or due_at= where the message is scheduled"),
    **dict.fromkeys(("expires_in", "max_age", "ttl"), "expires"),
    **dict.fromkeys(("cron", "crontab", "every", "schedule", "interval", "run_every"), _RECURRING),
    # Nothing is needed: the function gets the message as its only argument, and the message is consumed when it has
    # returned.
    **dict.fromkeys(("bind", "context", "pass_context", "takes_context", "base"), names.NOTHING),
    **dict.fromkeys(("acks_late", "reject_on_worker_lost", "serializer"), names.NOTHING),
}


class Registering(Protocol):
    """What ``handler`` returns: it registers a function, which takes one message or, with ``batch``, a list of them."""

    @overload
    def __call__(self, function: Callable[[Delivered[Payload]], Result], /) -> RegisteredHandler[Payload, Result]: ...

    @overload
    def __call__(
        self, function: Callable[[list[Delivered[Payload]]], Result], /
    ) -> RegisteredBatchHandler[Payload, Result]: ...


@names.with_hints(MEANT, "@handler")
def handler(
    topic: str,
    *,
    retry: retry.RetryLike | None = None,
    lease: Duration | None = None,
    timeout: Duration | Literal[False] | None = None,
    transactional: bool = False,
    queue: str | None = None,
    priority: int = 0,
    keep_result: bool = False,
    limit: int | None = None,
    rate: str | None = None,
    burst: int | None = None,
    limit_key: LimitKey | None = None,
    batch: int | None = None,
    linger: Duration = 0,
    expires: Duration | None = None,
    redeliver: bool = True,
    on_dead: str | None = None,
    on_expired: str | None = None,
    payload: payloads.PayloadLike | None = None,
) -> Registering:
    """Register the decorated function, sync or async, as the receiver of ``topic``.

    Returning is success; raising is failure. Times are seconds, timedeltas, or text such as ``"90s"``; None is the
    default of each option.

    ``retry``
        Answers a failure: a ``RetryPolicy``, a list of delays, a function, or False for never. By default
        ``DELAYQ["RETRY"]``.
    ``timeout``
        The handler is ended after this time. By default ``DELAYQ["TIMEOUT"]``; False: never.
    ``lease``
        How long a delivery belongs to its worker before another worker may claim the message. By default
        ``DELAYQ["LEASE"]``. The worker extends it while the handler runs.
    ``transactional``
        Run it in a transaction on the message's database whose last statement records the success, so that its effects
        in that database happen exactly once.
    ``queue``, ``priority``
        Those of messages of this topic when ``schedule_message`` names no others.
    ``keep_result``
        Keep what the handler returns in ``message.result``. A value that is not JSON, or larger than a payload may be,
        is a failure.
    ``limit``
        The most messages of the topic that run at once, over all workers.
    ``rate``, ``burst``
        The most messages that begin in a second, minute, hour or day (``"100/m"``), evenly spaced. Up to ``burst`` may
        begin together after a quiet time; by default 1.
    ``limit_key``
        A function of the message, which is called where the message is scheduled, and returns a text. The limit and the
        rate count the messages with each text by themselves.
    ``batch``
        The function takes a list of up to this many delivered messages (2 to 1000), and is called with those that are
        due together. Returning consumes all but those that it answered by ``message.retry_later()``,
        ``message.reject()`` or ``message.fail()``; raising fails all. A message that has failed comes alone from then
        on, so a bad one costs its neighbours one attempt at most.
    ``linger``
        How long the first message of a batch waits for others, up to 10 seconds. By default none waits.
    ``redeliver``
        False: a message whose worker died or lost its lease meanwhile is dead, and is not delivered again. A failure is
        answered by ``retry`` all the same.
    ``expires``
        The time after its due time after which a message of this topic does not start any more, when
        ``schedule_message`` names no other. By default they never expire.

    ``on_dead``, ``on_expired``
        A topic. When a message of this one ends dead, or expired, a message of that topic follows, exactly one for each
        such end: the transaction that records the end writes it. Its payload says what ended and why.
    ``payload``
        The type of the payloads: a dataclass, a TypedDict, a model or any other that pydantic knows (with the extra
        ``pydantic``); or a pair of functions, one that makes it of JSON values and one that makes JSON values of it.
        Calls that schedule take it or such JSON values, and raise ``InvalidMessage`` for what does not fit; the handler
        gets it as ``message.payload``. A message whose payload does not fit any more is dead at once.

    The function stays what it is, and gets its ``topic`` and two methods, ``schedule`` and ``aschedule``: they schedule
    a message of the topic.

    ::

        @handler("orders.close", retry=["1m", "10m"])
        def close(message): ...

        close.schedule({"order": 5}, delay="15m", key="5")

    Raises ``HandlerConflict`` when the topic has a handler already, ``TypeError`` for what is no function
    (a method, a partial, a function in C, an object with ``__call__``, a class) or cannot handle a message (a generator
    function, a function that does not take one argument), and ``ValueError`` for impossible options.
    """
    if callable(topic):
        raise InvalidMessage('@handler needs the topic of its messages: write @handler("orders.close")')
    topic = validation.topic(topic)
    own_retry = None if retry is None else as_policy(retry)
    own_lease = validation.lease(lease)
    own_timeout = validation.timeout(timeout)
    own_queue = None if queue is None else validation.queue(queue)
    own_priority = validation.priority(priority)
    transactional = validation.checked("transactional", values.flag, transactional)
    keep_result = validation.checked("keep_result", values.flag, keep_result)
    own_limit = limits.declare(limit, rate, burst)
    if limit_key is not None and own_limit is None:
        raise ValueError("limit_key needs a limit or a rate, which counts the messages with each key by themselves")
    if limit_key is not None and not callable(limit_key):
        raise ValueError(f"limit_key is a function of the message, not {type(limit_key).__name__}")
    size, own_linger = _batch(batch, linger, keep_result=keep_result)
    own_expires = validation.expires(expires)
    redeliver = validation.checked("redeliver", values.flag, redeliver)
    own_on_dead, own_on_expired = (None if one is None else validation.topic(one) for one in (on_dead, on_expired))
    if topic in (own_on_dead, own_on_expired):
        raise ValueError(f"on_dead and on_expired lead on to another topic: {topic!r} would follow itself without end")
    own_payload = payloads.of(payload)

    def register(function: Callable[[Any], Any], /) -> Any:
        _check(function)
        own = (own_retry, own_lease, own_timeout, transactional, own_queue, own_priority, keep_result)
        counted = (own_limit, limit_key, size, own_linger)
        ends = (own_expires, redeliver, own_on_dead, own_on_expired)
        called = function if own_payload is None else own_payload.before(function, batch=size > 1)
        return _add(Handler(topic, function, called, *own, iscoroutinefunction(function), *counted, *ends, own_payload))

    return register


def _add(new: Handler) -> Any:
    """Register a handler. Raises ``HandlerConflict`` when its topic has another one."""
    present = declared.get(new.topic)
    if present is not None and not _same(present.function, new.function):
        raise HandlerConflict(f"topic {new.topic!r} has two handlers: {present.name} and {new.name}")
    declared[new.topic] = new
    return _schedulable(new.topic, new.function)


# The most messages of one call of a batch handler, and the longest time for which one waits for others (seconds).
LARGEST_BATCH = 1000
LONGEST_LINGER = 10.0


def _batch(batch: int | None, linger: Duration, *, keep_result: bool) -> tuple[int, float]:
    """Check the options of a batch handler. Return the size of a batch, and for how many seconds it lingers."""
    wait = validation.checked("linger", values.span, linger, 0.0, LONGEST_LINGER)
    if batch is None:
        if wait:
            raise ValueError("linger needs batch: without it no message waits for others")
        return 1, 0.0
    if keep_result:
        raise ValueError("keep_result and batch exclude each other: one call has one result, and many messages")
    return validation.checked("batch", values.whole, batch, 2, LARGEST_BATCH), wait


def _schedulable(topic: str, function: Any) -> Any:
    """Give the function its topic and the methods of ``RegisteredHandler``, which are its own.

    They replace those that ``functools.wraps`` copied from another handler.
    """
    has_others = any(known.function is function for name, known in declared.items() if name != topic)
    function.topic = _SEVERAL if has_others else topic
    function.schedule = MethodType(RegisteredHandler.schedule, function)
    function.aschedule = MethodType(RegisteredHandler.aschedule, function)
    for name in _METHODS_OF_TASKS - vars(function).keys():
        setattr(function, name, MethodType(_refuse_to_enqueue, function))
    return function


# The methods by which other queues enqueue a decorated function, or describe its call.
_METHODS_OF_TASKS = {
    *("delay", "apply_async", "delay_on_commit", "apply_async_on_commit", "s", "si", "signature", "subtask", "chunks"),
    *("send", "send_with_options", "defer", "defer_async", "configure", "perform_async"),
    *("enqueue", "aenqueue", "using"),
}


def _refuse_to_enqueue(function: Any, *args: Any, **kwargs: Any) -> NoReturn:
    name = function.__name__
    raise AttributeError(f"{name} is a handler: schedule its message with {name}.schedule(payload, delay=…)")


# The topic of a function that handles several: none of them is its own.
_SEVERAL = ""


def _topic(function: Any) -> str:
    if function.topic == _SEVERAL:
        raise InvalidMessage(f"{_name(function)} handles several topics: name one of them in schedule_message()")
    topic: str = function.topic
    return topic


def _check(function: Any) -> None:
    """Refuse an object that is no function, and a function that would never run or never with one message."""
    if not inspect.isfunction(function):
        raise TypeError(
            f"a handler is a function, not {_described(function)}: write a function that calls it, and decorate that:"
            ' @handler("orders.close") above def close(message): ...'
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(
            f"{_name(function)} is a generator function: a call of it runs none of its code; "
            "a handler returns when its work is done, and does not yield"
        )
    # The signature of the wrapper itself is the one that is called.
    signature = inspect.signature(function, follow_wrapped=False)
    try:
        signature.bind(None)
    except TypeError as error:
        raise TypeError(
            f"{_name(function)}{signature} cannot be called with one message: {error}; "
            "a handler takes the message as its only argument"
        ) from None


def _described(value: Any) -> str:
    return f"the class {value.__qualname__}" if inspect.isclass(value) else f"a {type(value).__name__} object"


def _name(function: Any) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _same(one: Any, other: Any) -> bool:
    """Tell whether two handlers are the same one: a module that is imported again registers its functions again."""
    return one is other or (_name(one) == _name(other) and "<locals>" not in one.__qualname__)


def find(topic: str) -> Handler | None:
    """Return the handler of a topic; None when it has none."""
    return declared.get(topic)


def follows(after: State, topic: str, own: Any) -> str | None:
    """Return the topic of the message that follows when one of ``topic`` ends in this way; None: none follows.

    ``own`` is the header of the message, which wins over its handler. It may hold anything: SQL writes headers too.
    """
    if after not in (State.DEAD, State.EXPIRED):
        return None
    chosen = own.get(f"on_{after}") if isinstance(own, dict) else None
    if chosen is None:
        handler = declared.get(topic)
        return None if handler is None else handler.on_dead if after == State.DEAD else handler.on_expired
    with suppress(InvalidMessage):
        return validation.topic(chosen)
    return None


def handlers() -> dict[str, Handler]:
    """Return all handlers by topic."""
    return dict(declared)


def largest_batch() -> int:
    """Return the size of the largest batch that a handler takes; 1: none takes batches."""
    return max((handler.batch for handler in declared.values()), default=1)


def unregister(topic: str) -> None:
    """Forget the handler of a topic (for tests)."""
    declared.pop(topic, None)


def default_queue(topic: str) -> str:
    """Return the queue of a message when the call names none."""
    found = declared.get(topic)
    return found.queue if found is not None and found.queue is not None else conf.get().DEFAULT_QUEUE


def queues() -> set[str]:
    """Return the queues that the settings and the handlers name."""
    given = conf.get()
    named = {handler.queue for handler in declared.values() if handler.queue is not None}
    return {given.DEFAULT_QUEUE, *given.QUEUES, *(given.LIMITS or ()), *pulled.names(), *named}


def autodiscover() -> None:
    """Import ``handlers`` of each app, and the modules in which the project's task backends look for tasks."""
    autodiscover_modules("handlers", *_modules_of_tasks())


def _modules_of_tasks() -> set[str]:
    """Return the modules of apps in which task backends of the project that run here look for tasks."""
    found = set()
    for backend in getattr(settings, "TASKS", {}).values():
        path = backend.get("BACKEND", "")
        # Django's own backends run nothing here, and one of them is the default. A path that cannot be imported is for
        # Django to complain of.
        if not path.startswith("django.tasks."):
            with suppress(ImportError):
                found.add(getattr(import_string(path), "handlers_module", None))
    return {name for name in found if name is not None}
