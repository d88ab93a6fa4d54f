"""Retry policies decide whether a failed message is delivered again, and when. They are pure values without a clock."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Literal, Protocol

from . import names
from .durations import Duration, seconds

# A longer delay is a mistake in a policy, and would overflow a timestamp.
LONGEST = timedelta(days=366)
# What is stored of an exponential policy.
_STORED = ("base", "factor", "cap", "jitter")

Chooser = Callable[[int, BaseException | None], "Duration | None"]


class Delays(Protocol):
    """A list or a tuple of delays. A text does not match: its ``__contains__`` takes texts only, not any object."""

    def __iter__(self) -> Iterator[Duration]: ...
    def __getitem__(self, index: int, /) -> Duration: ...
    def __contains__(self, value: object, /) -> bool: ...


# What other queues call the arguments of a policy.
_ERRORS = {
    **dict.fromkeys(("autoretry_for", "exceptions", "retry_exceptions", "retry_for"), "on"),
    **dict.fromkeys(("dont_autoretry_for", "throws"), "never"),
}
_MEANT = {
    **dict.fromkeys(("max_retries", "retries"), "max_attempts={more}"),
    **dict.fromkeys(("attempts", "max"), "max_attempts"),
    **dict.fromkeys(("delay", "min_backoff", "min_delay", "retry_delay", "wait"), "base"),
    **dict.fromkeys(("max_backoff", "max_delay", "max_interval", "retry_backoff_max"), "cap"),
    **dict.fromkeys(("backoff", "multiplier", "exponential_wait"), "factor"),
    **_ERRORS,
}

# One class of exceptions, or several: what ``except`` takes.
Errors = type[BaseException] | tuple[type[BaseException], ...]


@names.refuse_attributes("RetryPolicy", {"linear": 'RetryPolicy.fixed(["1m", "2m", "3m"])'})
@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """A rule for retrying failures of a handler. Make one with ``fixed``, ``exponential`` or ``custom``.

    ``delay(attempt, error)`` returns the delay after the ``attempt``-th failure (the first is 1), or None to give up.

    ``fixed`` and ``exponential`` retry every exception, or only those that ``on`` names, and in any case none of those
    that ``never`` names: classes of exceptions, whose subclasses count too. A timeout is a ``HandlerTimeout``.

    >>> policy = RetryPolicy.fixed(["4m", "10m"])
    >>> [policy.delay(n) for n in (1, 2, 3)]
    [datetime.timedelta(seconds=240), datetime.timedelta(seconds=600), None]
    """

    kind: str
    delays: tuple[float, ...] = ()
    base: float = 0.0
    factor: float = 2.0
    cap: float = 0.0
    jitter: float = 0.0
    max_attempts: int | None = None
    chooser: Chooser | None = field(default=None, compare=False)
    # The exceptions that are retried, except for those that are refused.
    retried: tuple[type[BaseException], ...] = (BaseException,)
    refused: tuple[type[BaseException], ...] = ()

    @classmethod
    @names.with_hints(
        {
            **dict.fromkeys(("delay", "interval", "intervals", "wait"), 'delays, a list such as ["10s", "1m"]'),
            **dict.fromkeys(
                ("max_attempts", "max_retries", "max", "retries"), "one delay for each retry into the list"
            ),
            **_ERRORS,
        },
        "RetryPolicy.fixed()",
    )
    def fixed(cls, delays: Delays, *, on: Errors = BaseException, never: Errors = ()) -> RetryPolicy:
        """Retry after the given delays, one after the other, then give up: ``n`` delays are ``n + 1`` attempts.

        A usual schedule for payment callbacks is ``["4m", "10m", "10m", "1h", "2h", "6h", "15h"]``.
        """
        # The order of a set is no order of delays, and a mapping or a text would be read piece by piece.
        given: object = delays
        if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping | Set):
            raise ValueError(f"a list of delays is wanted, such as ['10s', '1m'], not {type(given).__name__}")
        retried, refused = _chosen(on, never)
        return cls("fixed", delays=tuple(_sane(delay) for delay in delays), retried=retried, refused=refused)

    @classmethod
    @names.with_hints(_MEANT, "RetryPolicy.exponential()")
    def exponential(
        cls,
        base: Duration = 10,
        *,
        factor: float = 2.0,
        cap: Duration = "1h",
        jitter: float = 0.1,
        max_attempts: int | None = 10,
        on: Errors = BaseException,
        never: Errors = (),
    ) -> RetryPolicy:
        """Retry after ``base``, ``base * factor``, ``base * factor²`` … with ``cap`` as the longest delay.

        ``jitter`` is a share: 0.1 lengthens each delay by a random 0–10 %, so that messages which failed together do
        not come back together. It never shortens a delay. ``max_attempts`` counts the first delivery; None sets no
        limit.
        """
        if not (_is_number(factor) and math.isfinite(factor) and factor >= 1):
            raise ValueError(f"factor must be a number, 1 or more, not {factor!r:.40}")
        if not (_is_number(jitter) and 0 <= jitter <= 1):
            raise ValueError(f"jitter must be a number between 0 and 1, not {jitter!r:.40}")
        if max_attempts is not None and not (type(max_attempts) is int and max_attempts >= 1):
            raise ValueError(f"max_attempts must be a whole number, 1 or more, or None, not {max_attempts!r:.40}")
        retried, refused = _chosen(on, never)
        return cls(
            "exponential",
            base=_sane(base),
            factor=float(factor),
            cap=_sane(cap),
            jitter=float(jitter),
            max_attempts=max_attempts,
            retried=retried,
            refused=refused,
        )

    @classmethod
    def custom(cls, chooser: Chooser) -> RetryPolicy:
        """Ask ``chooser(attempt, error)`` for the delay (as in ``fixed``); it returns None to give up.

        For async handlers it is called on the event loop, where it cannot ask the database.
        """
        if inspect.iscoroutinefunction(chooser):
            raise ValueError("a function of (attempt, error) is wanted, not an async one, which nobody awaits")
        try:
            inspect.signature(chooser, follow_wrapped=False).bind(1, None)
        except TypeError as error:
            name = getattr(chooser, "__qualname__", type(chooser).__name__)
            raise ValueError(f"a function of (attempt, error) is wanted, not {name}: {error}") from None
        except ValueError:
            # A function in C does not say what it takes.
            pass
        return cls("custom", chooser=chooser)

    @classmethod
    def never(cls) -> RetryPolicy:
        """Give up after the first failure."""
        return cls("fixed")

    def delay(self, attempt: int, error: BaseException | None = None) -> timedelta | None:
        """Return the delay after failure number ``attempt``, or None when the message is to be given up."""
        if attempt < 1:
            raise ValueError("attempts are counted from 1")
        if self.max_attempts is not None and attempt >= self.max_attempts:
            return None
        if error is not None and (not isinstance(error, self.retried) or isinstance(error, self.refused)):
            return None
        if self.kind == "fixed":
            wait = self.delays[attempt - 1] if attempt <= len(self.delays) else None
        elif self.kind == "exponential":
            wait = self._exponential(attempt)
        else:
            assert self.chooser is not None
            chosen = self.chooser(attempt, error)
            wait = None if chosen is None else _sane(chosen)
        return None if wait is None else timedelta(seconds=wait)

    def _exponential(self, attempt: int) -> float:
        """Return the wait after a failed attempt, in seconds, with its random part."""
        try:
            wait = min(self.cap, self.base * self.factor ** (attempt - 1))
        except OverflowError:
            wait = self.cap if self.base else 0.0
        # S311: spreading load needs no secret randomness.
        return wait * (1 + random.random() * self.jitter)

    @property
    def attempts(self) -> int | None:
        """The number of attempts that the policy allows; None when it names no number."""
        if self.kind != "fixed":
            return self.max_attempts
        attempts = len(self.delays) + 1
        return attempts if self.max_attempts is None else min(attempts, self.max_attempts)

    def limited(self, max_attempts: int | None) -> RetryPolicy:
        """Return the same policy, which gives up after ``max_attempts`` attempts at the latest."""
        if max_attempts is None:
            return self
        if self.max_attempts is not None:
            max_attempts = min(max_attempts, self.max_attempts)
        return replace(self, max_attempts=max_attempts)

    def for_errors_of(self, other: RetryPolicy) -> RetryPolicy:
        """Return the same policy, which retries the exceptions that ``other`` retries."""
        return replace(self, retried=other.retried, refused=other.refused)

    def to_json(self) -> dict[str, Any]:
        """Return the policy as it is stored with a message.

        Raises ``ValueError`` for a policy that is a function or names exceptions: a row holds no code.
        """
        if (self.retried, self.refused) != ((BaseException,), ()):
            raise ValueError(
                "a retry policy that names exceptions (on, never) belongs to the handler; it cannot be stored. "
                "The handler's on and never hold for a message with a policy of its own too"
            )
        if self.kind == "fixed":
            stored: dict[str, Any] = {"fixed": list(self.delays)}
        elif self.kind == "exponential":
            stored = {name: getattr(self, name) for name in _STORED}
        else:
            raise ValueError("a retry policy that is a function belongs to the handler; it cannot be stored")
        if self.max_attempts is not None:
            stored["max_attempts"] = self.max_attempts
        return stored

    @classmethod
    def from_json(cls, stored: Any) -> RetryPolicy:
        """Read a policy that ``to_json`` wrote. Raises ``ValueError`` for anything else."""
        try:
            limit = stored.get("max_attempts")
            if "fixed" in stored:
                return cls.fixed(stored["fixed"]).limited(limit)
            return cls.exponential(**{name: stored[name] for name in _STORED}, max_attempts=limit)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"not a stored retry policy: {error}") from error


# The values of ``retry=`` at a call, where the policy is stored with the message, and those at a handler.
StorableRetry = RetryPolicy | Delays | Literal[False]
RetryLike = StorableRetry | Chooser


def as_policy(value: RetryLike) -> RetryPolicy:
    """Return the policy for a value of ``retry=``: a policy, a list of delays, a function, or False for "never"."""
    if isinstance(value, RetryPolicy):
        return value
    if value is False:
        return RetryPolicy.never()
    given: Any = value
    try:
        if given is RetryPolicy or getattr(given, "__self__", None) is RetryPolicy:
            raise ValueError("a policy is what a call returns: write RetryPolicy.exponential(max_attempts=4)")
        if isinstance(given, int) and not isinstance(given, bool):
            raise ValueError(f"for {given} retries write RetryPolicy.exponential(max_attempts={given + 1})")
        return RetryPolicy.custom(value) if callable(value) else RetryPolicy.fixed(value)
    except ValueError as error:
        raise ValueError(f"retry is a RetryPolicy, a list of delays, a function, or False for never: {error}") from None


def _chosen(on: Errors, never: Errors) -> tuple[tuple[type[BaseException], ...], tuple[type[BaseException], ...]]:
    """Check which exceptions are retried and which are not."""
    retried, refused = _classes("on", on), _classes("never", never)
    if not retried:
        raise ValueError("on names no exception: nothing would be retried; write retry=False for that")
    for error in retried:
        if issubclass(error, refused):
            raise ValueError(f"on and never contradict each other: {error.__name__} would never be retried")
    return retried, refused


def _classes(option: str, errors: Errors) -> tuple[type[BaseException], ...]:
    """Return the classes of an option as a tuple."""
    classes = errors if isinstance(errors, tuple) else (errors,)
    for error in classes:
        given: object = error
        if not (isinstance(given, type) and issubclass(given, BaseException)):
            shown = given.__name__ if isinstance(given, type) else type(given).__name__
            raise ValueError(f"{option} is a class of exceptions, or a tuple of such classes, not {shown}")
    return classes


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _sane(delay: Duration) -> float:
    """Return a delay in seconds. Raises ``ValueError`` for one below 0 or above ``LONGEST``."""
    wait = seconds(delay)
    if not 0 <= wait <= LONGEST.total_seconds():
        raise ValueError(f"a retry delay must be between 0 and {LONGEST.days} days, not {delay!r}")
    return wait


# 10 s, 20 s, 40 s … capped at an hour: ten attempts over roughly 1 h 25 m.
DEFAULT = RetryPolicy.exponential()
