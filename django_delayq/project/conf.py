"""The settings: one frozen dataclass of typed defaults under one ``DELAYQ`` dict."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed

from ..core import retry
from ..core.durations import seconds
from ..core.limits import Limit, declare
from ..core.retry import RetryPolicy


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings in ``settings.DELAYQ``. Times are seconds, or text such as ``"10m"``."""

    # A django-redis cache alias, a redis://, rediss:// or unix:// URL, or None: workers find due messages by query.
    REDIS: str | None = None
    # The first part of every Redis key. Two deployments that share a Redis need two prefixes.
    PREFIX: str = "delayq"
    # The queue of a message that names none.
    DEFAULT_QUEUE: str = "default"
    # The queues that a worker without --queue serves, in strict order of priority. Empty: all queues that it finds.
    QUEUES: tuple[str, ...] = ()
    # How far ahead of now Redis is filled. Messages that are due later cost Redis nothing.
    HORIZON: float = 600.0
    # A message that Redis lost is put there again when it is overdue by this much. Sweeps look for such messages at
    # this interval.
    GRACE: float = 2.5
    # The time between two queries for due messages of a worker that delivers without Redis.
    POLL_INTERVAL: float = 1.0
    # How long a delivery belongs to its worker. A worker extends the lease of a longer handler each third of it.
    LEASE: float = 60.0
    # A handler that runs longer than this is ended. False: never.
    TIMEOUT: float | Literal[False] = 600.0
    # The retry policy of messages that have none of their own and whose handler has none.
    RETRY: RetryPolicy = retry.DEFAULT
    # Payloads with more bytes of JSON are refused at the call.
    PAYLOAD_MAX_BYTES: int = 262_144
    # Finished messages and their log are deleted after this time (dead ones: DEAD_RETENTION). False: never.
    RETENTION: float | Literal[False] = 30 * 86_400.0
    DEAD_RETENTION: float | Literal[False] = 90 * 86_400.0
    # Dotted paths of the middleware around handlers and calls that schedule, the outermost first.
    MIDDLEWARE: tuple[str, ...] = ()
    # The limits of queues: queue → {"limit": 5, "rate": "100/m", "burst": 10}, a limit, a rate or both. None: none.
    LIMITS: Mapping[str, Limit] | None = None
    # True: workers log the whole exception of a handler. False: its class and a digest. None: as DEBUG says.
    LOG_ERRORS: bool | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem in ``settings.DELAYQ``."""

    id: str
    message: str
    hint: str


WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]*")

Parser = Callable[[Any], Any]


def _span(lowest: float, highest: float) -> Parser:
    def parse(value: Any) -> float:
        span = seconds(value)
        if not lowest <= span <= highest or math.isnan(span):
            raise ValueError(f"must be between {lowest:g} and {highest:g} seconds")
        return span

    return parse


def _whole(lowest: int, highest: int) -> Parser:
    def parse(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
            raise ValueError(f"must be a whole number between {lowest} and {highest}")
        return value

    return parse


def _or_none(parse: Parser) -> Parser:
    return lambda value: None if value is None else parse(value)


def _or_never(parse: Parser) -> Parser:
    def parse_or_never(value: Any) -> Any:
        if value is None:
            raise ValueError("must not be None: write False for never, or leave the setting out for its default")
        return False if value is False else parse(value)

    return parse_or_never


def plain(value: str) -> str:
    """Return a plain str: a subclass, such as a member of an enum, may print as something else."""
    return value if type(value) is str else str.__str__(value)


def _word(limit: int) -> Parser:
    def parse(value: Any) -> str:
        if not isinstance(value, str) or len(value) > limit or not WORD.fullmatch(value):
            raise ValueError(
                f"must be 1 to {limit} of the characters A-Z a-z 0-9 _ . - and begin with a letter or digit"
            )
        return plain(value)

    return parse


def _queues(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, list | tuple):
        raise ValueError("must be a list of queue names")
    names = tuple(_word(64)(name) for name in value)
    if len(set(names)) != len(names):
        raise ValueError("names a queue twice")
    return names


def _dotted_paths(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, list | tuple):
        raise ValueError("must be a list of dotted paths")
    for path in value:
        if not isinstance(path, str) or "." not in path or not all(part.isidentifier() for part in path.split(".")):
            raise ValueError("must hold dotted paths of classes, such as 'mysite.middleware.Tenants'")
    return tuple(value)


def flag(value: Any) -> bool:
    """Check a switch: True or False. Raises ``ValueError``."""
    if not isinstance(value, bool):
        raise ValueError("must be True or False")
    return value


def _redis(value: Any) -> str | None:
    if value is None or (isinstance(value, str) and value):
        return value
    raise ValueError("must be a cache alias, a Redis URL, or None")


def _limits(value: Any) -> dict[str, Limit]:
    if not isinstance(value, Mapping):
        raise ValueError("must be a dict of queue names and their limits")
    limits = {}
    for name, options in value.items():
        _word(64)(name)
        if not isinstance(options, Mapping) or not options or not options.keys() <= {"limit", "rate", "burst"}:
            raise ValueError(f"of queue {name!r} must be a dict with limit, rate or burst")
        limit = declare(**options)
        if limit is None:
            raise ValueError(f"of queue {name!r} must have a limit or a rate")
        limits[name] = limit
    return limits


def _policy(value: Any) -> RetryPolicy:
    policy = retry.as_policy(value)
    try:
        policy.delay(1)
    except Exception as error:
        raise ValueError(f"the policy gives no first delay: {type(error).__name__}: {error}") from error
    return policy


_YEAR = 366 * 86_400.0

PARSERS: dict[str, Parser] = {
    "REDIS": _redis,
    "PREFIX": _word(40),
    "DEFAULT_QUEUE": _word(64),
    "QUEUES": _queues,
    "HORIZON": _span(5, _YEAR),
    "GRACE": _span(0.1, 3600),
    "POLL_INTERVAL": _span(0.05, 60),
    "LEASE": _span(1, 86_400),
    "TIMEOUT": _or_never(_span(0.01, 30 * 86_400)),
    "RETRY": _policy,
    "PAYLOAD_MAX_BYTES": _whole(1, 64 * 1024 * 1024),
    "RETENTION": _or_never(_span(0, 100 * _YEAR)),
    "DEAD_RETENTION": _or_never(_span(0, 100 * _YEAR)),
    "MIDDLEWARE": _dotted_paths,
    "LIMITS": _or_none(_limits),
    "LOG_ERRORS": _or_none(flag),
}


# Parts of the dict that others read and check: the console and ``django_delayq.testing``.
ELSEWHERE = frozenset({"CONSOLE", "TESTING"})

# What to do instead of a setting that there was once.
FORMER = {
    "ADMIN_READ_ONLY": "Write DELAYQ = {'CONSOLE': {'READ_ONLY': True}}",
    "ENVIRONMENT": "Write DELAYQ = {'CONSOLE': {'ENVIRONMENT': 'production'}}",
    "SWEEP_INTERVAL": "Remove it: sweeps follow each other by GRACE",
    "GRACEFUL_TIMEOUT": "Remove it, and start workers with run_delayq --graceful-timeout",
    "HANDLERS_MODULE": "Remove it, and import other modules with handlers in the module handlers of an app",
    "CLAIM_AHEAD": "Remove it: a worker claims messages up to 50 ms before their due times",
    "MAX_CRASHES": "Remove it: a message is dead after 3 crashes",
    "OVERDUE_AFTER": "Remove it: a message that has not started 5 s after its due time is overdue",
    "PAYLOAD_MAX_DEPTH": "Remove it: a payload may be nested 64 deep",
    "REDIS_TIMEOUT": "Remove it: a call waits 250 ms for Redis at most",
}


def read(
    given: Any, parsers: Mapping[str, Parser], place: str = "DELAYQ", former: Mapping[str, str] = FORMER
) -> tuple[dict[str, Any], list[Problem]]:
    """Read a dict of settings. Return the values, and every problem of the dict, which is called ``place``."""
    if not isinstance(given, Mapping):
        return {}, [Problem("E001", f"{place} is not a dict.", "Write DELAYQ = {'REDIS': ...}.")]
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, value in given.items():
        parser = parsers.get(name)
        if parser is None:
            hint = former.get(name) or f"It has: {', '.join(sorted(parsers))}"
            problems.append(Problem("E002", f"{place} has no setting {name!r}.", f"{hint}."))
            continue
        try:
            values[name] = parser(value)
        except (ValueError, TypeError) as error:
            problems.append(Problem("E003", f"{place}[{name!r}] is impossible.", f"{error}."))
    return values, problems


def insist(problems: list[Problem]) -> None:
    """Raise ``ImproperlyConfigured`` with every problem, if there is any."""
    if problems:
        raise ImproperlyConfigured(" ".join(f"{problem.message} {problem.hint}" for problem in problems))


def given() -> Any:
    """Return ``settings.DELAYQ``, as the project wrote it."""
    return getattr(django_settings, "DELAYQ", {})


def section(name: str) -> Any:
    """Return a part of the dict that is read elsewhere; None when the project wrote none."""
    everything = given()
    return everything.get(name) if isinstance(everything, Mapping) else None


def parse(given: Any) -> tuple[Settings, list[Problem]]:
    """Read a ``DELAYQ`` dict. Return the settings and every problem of the dict, but for those of ``ELSEWHERE``."""
    if isinstance(given, Mapping):
        given = {name: value for name, value in given.items() if name not in ELSEWHERE}
    values, problems = read(given, PARSERS)
    settings = Settings(**values)
    if settings.QUEUES and settings.DEFAULT_QUEUE not in settings.QUEUES:
        problems.append(
            Problem(
                "E004",
                "DELAYQ['DEFAULT_QUEUE'] is not one of DELAYQ['QUEUES'].",
                "No worker would serve it unless it is named with --queue.",
            )
        )
    return settings, problems


# True while ``django_delayq.testing`` is in use, whatever the project wrote: there is no Redis.
in_tests = False


@lru_cache(maxsize=1)
def get() -> Settings:
    """Return the project's settings. Raises ``ImproperlyConfigured`` with every problem that was found.

    In tests, those with ``DELAYQ["TESTING"]`` included, there is no Redis.
    """
    settings, problems = parse(given())
    insist(problems)
    if in_tests or section("TESTING") is not None:
        return dataclasses.replace(settings, REDIS=None)
    return settings


def names() -> list[str]:
    """Return the names of all settings."""
    return [field.name for field in dataclasses.fields(Settings)]


def _forget(*, setting: str, **kwargs: Any) -> None:
    if setting in ("DELAYQ", "CACHES"):
        get.cache_clear()


setting_changed.connect(_forget, dispatch_uid="django_delayq.project.conf")
