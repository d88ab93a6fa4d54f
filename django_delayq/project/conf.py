"""The settings: typed defaults under one ``DELAYQ`` dict."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Set
from functools import lru_cache
from types import MappingProxyType
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed

from ..core import in_tests, names, retention, retry, values
from ..core.bounds import LENGTHS
from ..core.durations import seconds
from ..core.limits import Limit, declare
from ..core.pull_queues import PREFIX, PullQueue, matching
from ..core.retry import RetryPolicy


class Problem(NamedTuple):
    """A problem in ``settings.DELAYQ``."""

    id: str
    message: str
    hint: str


Parser = Callable[..., Any]
S = TypeVar("S")


def _or_none(parse: Parser) -> Parser:
    return lambda value: None if value is None else parse(value)


def _or_never(parse: Parser) -> Parser:
    def parse_or_never(value: Any, **bounds: float) -> Any:
        if value is None:
            raise ValueError("must not be None: write False for never, or leave the setting out for its default")
        if value is False:
            return False
        # For other settings 0 means never. As a time to keep messages, 0 would delete all of them at once.
        if _is_zero(value):
            raise ValueError("must not be 0: write False for never, or a time such as '30d'")
        return parse(value, **bounds)

    return parse_or_never


def _kept(value: Any, rest: float) -> retention.Retention:
    if isinstance(value, Mapping):
        return retention.by_names(value, _or_never(values.span), rest)
    found: retention.Span = _or_never(values.span)(value)
    return found


def _is_zero(value: Any) -> bool:
    try:
        return not seconds(value)
    except ValueError:
        # ``parse`` says what the value must be.
        return False


def _list(value: Any, what: str) -> list[Any]:
    if isinstance(value, list | tuple):
        return [*value]
    raise ValueError(f"must be a list of {what}")


def _queues(value: Any) -> tuple[str, ...]:
    names = tuple(values.word(name, LENGTHS.queue) for name in _list(value, "queue names"))
    if len(set(names)) != len(names):
        raise ValueError("names a queue twice")
    return names


def _dotted_paths(value: Any) -> tuple[str, ...]:
    for path in _list(value, "dotted paths"):
        if not isinstance(path, str) or "." not in path or not all(part.isidentifier() for part in path.split(".")):
            raise ValueError("must hold dotted paths of classes, such as 'mysite.middleware.Tenants'")
    return tuple(value)


def _redis(value: Any) -> str | None:
    if value is None or (isinstance(value, str) and value):
        return value
    raise ValueError("must be a cache alias, a Redis URL, or None")


def _addresses(value: Any) -> dict[str, str]:
    if isinstance(value, Mapping) and all(_is_address(each) for pair in value.items() for each in pair):
        return dict(value)
    raise ValueError("must be a dict of addresses, such as {'10.0.0.5:6379': 'redis.example.com:7001'}")


def _is_address(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"\S+:[0-9]{1,5}", value) is not None


def _limits(value: Any) -> dict[str, Limit]:
    if not isinstance(value, Mapping):
        raise ValueError("must be a dict of queue names and their limits")
    limits = {}
    for name, options in value.items():
        values.word(name, LENGTHS.queue)
        if not isinstance(options, Mapping) or not options or not options.keys() <= {"limit", "rate", "burst"}:
            raise ValueError(f"of queue {name!r} must be a dict with limit, rate or burst")
        limit = declare(**options)
        if limit is None:
            raise ValueError(f"of queue {name!r} must have a limit or a rate")
        limits[name] = limit
    return limits


def _pull_queues(value: Any) -> dict[str, PullQueue]:
    given = value if isinstance(value, Mapping) else {name: {} for name in _list(value, "queue names, or a dict")}
    found = {}
    for name, options in given.items():
        is_prefix = isinstance(name, str) and name[1:].endswith(PREFIX)
        values.word(name[:-1] if is_prefix else name, LENGTHS.queue)
        if not isinstance(options, Mapping) or not options.keys() <= set(PullQueue._fields):
            raise ValueError(f"of queue {name!r} must be a dict with {' or '.join(PullQueue._fields)}")
        found[name] = PullQueue(**{option: _PULL_CHECKS[option](given) for option, given in options.items()})
    return found


_PULL_CHECKS = values.checks_of(PullQueue)


def _policy(value: Any) -> RetryPolicy:
    policy = retry.as_policy(value)
    try:
        policy.delay(1)
    except Exception as error:
        raise ValueError(f"the policy gives no first delay: {type(error).__name__}: {error}") from error
    return policy


class Settings(NamedTuple):
    """The settings in ``settings.DELAYQ``. Times are seconds, or text such as ``"10m"``.

    The comments are the table of ``docs/reference/settings.rst``: run ``python -m docs.tables`` after a change.
    """

    # A ``redis://``, ``rediss://`` or ``unix://`` URL, or ``redis+cluster://host:port,host:port`` with nodes of a Redis
    # Cluster (with TLS ``rediss+cluster://``), or the alias of a django-redis cache. None: workers deliver by querying
    # the database alone.
    REDIS: Annotated[str | None, _redis] = None
    # Where the nodes of a Redis Cluster are reached, if not at the addresses that they tell (NAT), such as
    # ``{"10.0.0.5:6379": "redis.example.com:7001"}``. None: they are reached at the addresses that they tell.
    REDIS_ADDRESS_MAP: Annotated[Mapping[str, str] | None, _or_none(_addresses)] = None
    # The first part of every Redis key. Two deployments that share a Redis need two prefixes; a worker refuses keys
    # that belong to another database.
    PREFIX: Annotated[str, values.word, {"limit": 40}] = "delayq"
    # The queue of a message when neither the call nor the handler names one.
    DEFAULT_QUEUE: Annotated[str, values.word, {"limit": LENGTHS.queue}] = "default"
    # The queues that a worker without ``--queue`` serves, in strict order of priority. Empty: all queues that it finds.
    QUEUES: Annotated[tuple[str, ...], _queues] = ()
    # How far ahead of now Redis is filled. What is due later costs Redis nothing. Restart web processes before workers
    # to raise it, and after them to lower it: while they differ, messages that are due in between may be late by twice
    # ``GRACE``.
    HORIZON: Annotated[float, values.span, {"lowest": 5, "highest": values.YEAR}] = 600.0
    # How often a sweep runs. It puts messages into Redis again that are nowhere there, and overdue by more than half of
    # this. No single loss makes a message later than twice this.
    GRACE: Annotated[float, values.span, {"lowest": 0.1, "highest": 3600}] = 2.5
    # How often a worker queries due rows when it delivers by query.
    POLL_INTERVAL: Annotated[float, values.span, {"lowest": 0.05, "highest": 60}] = 1.0
    # How long a delivery belongs to a worker that gives no sign of life. A living worker extends it.
    LEASE: Annotated[float, values.span, {"lowest": 1, "highest": values.DAY}] = 60.0
    # A handler that runs longer is ended. False: never.
    TIMEOUT: Annotated[float | Literal[False], _or_never(values.span), {"lowest": 0.01, "highest": 30 * values.DAY}] = (
        600.0
    )
    # When a failed message is delivered again, if neither it nor its handler says: 10 s, 20 s, 40 s … up to an hour,
    # ten attempts. Anything that ``retry=`` of a handler accepts; False: never.
    RETRY: Annotated[RetryPolicy, _policy] = retry.DEFAULT
    # Larger payloads are refused at the call. Bytes of JSON.
    PAYLOAD_MAX_BYTES: Annotated[int, values.whole, {"lowest": 1, "highest": 64 * 1024 * 1024}] = 262_144
    # Consumed, cancelled and expired messages are deleted with their log this long after they finished. False: never.
    # 0 is refused, and less than an hour is warned of. Or a dict of times by names, ``{"mail.*": "1d", "": "30d"}``.
    RETENTION: Annotated[retention.Retention, _kept, {"rest": 30 * values.DAY}] = 30 * values.DAY
    # The same for dead messages. False: never.
    DEAD_RETENTION: Annotated[retention.Retention, _kept, {"rest": 90 * values.DAY}] = 90 * values.DAY
    # Dotted paths of the middleware around handlers and around calls that schedule, the outermost first.
    MIDDLEWARE: Annotated[tuple[str, ...], _dotted_paths] = ()
    # The limits of queues, by their names: ``{"emails": {"limit": 5, "rate": "100/m", "burst": 10}}``, a limit, a rate
    # or both.
    LIMITS: Annotated[Mapping[str, Limit] | None, _or_none(_limits)] = None
    # The queues from which programs take messages (``django_delayq.pull``), and no worker does: names, and beginnings
    # of names with a ``*`` behind. A list, or a dict, here with the defaults:
    # ``{"exports": {"max_attempts": 3, "lease": "1m"}}``.
    PULL_QUEUES: Annotated[Mapping[str, PullQueue] | None, _or_none(_pull_queues)] = None
    # True: a worker logs the exceptions of handlers with text and traceback. False: only their class and a digest, for
    # the text may hold secrets. None: True where Django's ``DEBUG`` is. With ``run_delayq -v 2`` a worker logs them
    # whole in any case.
    LOG_ERRORS: Annotated[bool | None, _or_none(values.flag)] = None


PARSERS = values.checks_of(Settings)

# Parts of the dict that others read and check: the console, the HTTP door and ``django_delayq.testing``.
ELSEWHERE = frozenset({"CONSOLE", "HTTP", "TESTING"})


# The names of the settings in other queues, without their prefixes.
_PREFIXES = ("CELERY_", "DELAYQ_", "DRAMATIQ_", "HUEY_", "RQ_", "TASK_", "WORKER_")
_OPTION = "an option of run_delayq: --processes, --threads, --max-tasks-per-child …"
_MEANT = {
    **dict.fromkeys(("BROKER", "BROKER_URL", "CONNECTION", "HOST", "REDIS_HOST", "REDIS_URL", "URL"), "REDIS"),
    **dict.fromkeys(("QUEUE", "QUEUE_NAME"), "DEFAULT_QUEUE"),
    **dict.fromkeys(("RETRY_POLICY", "RETRY_DELAY", "RETRY_DELAYS"), "RETRY"),
    **dict.fromkeys(("MAX_RETRIES", "RETRIES"), "RETRY, as RetryPolicy.exponential(max_attempts={more})"),
    **dict.fromkeys(("ATTEMPTS", "MAX_ATTEMPTS"), "RETRY, as RetryPolicy.exponential(max_attempts={value})"),
    **dict.fromkeys(("TIME_LIMIT", "SOFT_TIME_LIMIT", "JOB_TIMEOUT", "DEFAULT_TIMEOUT"), "TIMEOUT"),
    "VISIBILITY_TIMEOUT": "LEASE",
    **dict.fromkeys(("RESULT_EXPIRES", "RESULT_TTL", "SAVE_LIMIT"), "RETENTION"),
    "FAILURE_TTL": "DEAD_RETENTION",
    **dict.fromkeys(("ALWAYS_EAGER", "ASYNC", "EAGER", "IMMEDIATE", "SYNC"), 'TESTING, as "immediate", in the tests'),
    **dict.fromkeys(("ANNOTATIONS", "RATE_LIMIT", "DEFAULT_RATE_LIMIT"), "LIMITS, or rate= at @handler"),
    **dict.fromkeys(("ROUTES", "DEFAULT_PRIORITY"), "queue= and priority= at @handler"),
    "RESULT_BACKEND": "keep_result=True at @handler",
    **dict.fromkeys(("BEAT_SCHEDULE", "CRON", "SCHEDULE", "SCHEDULES"), '@recurring("0 3 * * *") above @handler'),
    "TIMEZONE": "TIME_ZONE in the settings of Django, or tz= at @recurring",
    **dict.fromkeys(("CONCURRENCY", "MAX_TASKS_PER_CHILD", "PROCESSES", "THREADS", "WORKERS"), _OPTION),
    "Q_CLUSTER": "REDIS, QUEUES, TIMEOUT and RETRY instead of it",
    **dict.fromkeys(("ACCEPT_CONTENT", "ACKS_LATE", "RESULT_SERIALIZER", "SERIALIZER", "TRACK_STARTED"), names.NOTHING),
}


def _plain(name: str) -> str:
    """Return the name of a setting without what another queue puts before it."""
    name = name.upper()
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def hint_beside(name: str) -> str | None:
    """Return what to write instead of a setting beside ``DELAYQ``; None when it is not meant for this package."""
    plain = _plain(name)
    if not name.startswith("DELAYQ_") or plain not in PARSERS.keys() | ELSEWHERE | _MEANT.keys():
        return None
    return _hint(plain, None, PARSERS.keys() | ELSEWHERE, _MEANT)


def _hint(plain: str, value: Any, known: Set[str], meant: Mapping[str, str]) -> str:
    instead = plain if plain in known else names.instead(plain, known, meant, value)
    if instead is None:
        return f"It has: {', '.join(sorted(known))}."
    return f"Write {instead}." if instead else "Leave it out."


def read(
    given: Any,
    parsers: Mapping[str, Parser],
    place: str = "DELAYQ",
    elsewhere: Set[str] = frozenset(),
    meant: Mapping[str, str] = MappingProxyType({}),
) -> tuple[dict[str, Any], list[Problem]]:
    """Read a dict of settings, but for those that are read ``elsewhere``.

    Return the values, and every problem of the dict, which is called ``place``. ``meant`` has what other queues call
    its settings.
    """
    if not isinstance(given, Mapping):
        return {}, [Problem("E001", f"{place} is not a dict.", f"Write {place} = {{{next(iter(parsers))!r}: ...}}.")]
    found: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, value in given.items():
        if name in elsewhere:
            continue
        parser = parsers.get(name)
        if parser is None:
            hint = _hint(_plain(str(name)), value, parsers.keys() | elsewhere, meant)
            problems.append(Problem("E002", f"{place} has no setting {name!r}.", hint))
            continue
        try:
            found[name] = parser(value)
        except (ValueError, TypeError) as error:
            problems.append(Problem("E003", f"{place}[{name!r}] is impossible.", f"{error}."))
    return found, problems


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


class Section(Generic[S]):
    """The settings of a part of the dict that a class of its own has."""

    def __init__(self, name: str, kind: Callable[..., S]) -> None:
        self.name = name
        self.kind = kind
        self.parsers = values.checks_of(kind)
        self.get = lru_cache(maxsize=1)(self._get)
        forget_on_change(self.get, "DELAYQ")

    def parse(self, given: Any) -> tuple[S, list[Problem]]:
        """Read the part, None for nothing. Return the settings and every problem."""
        found, problems = read({} if given is None else given, self.parsers, f"DELAYQ['{self.name}']")
        return self.kind(**found), problems

    def _get(self) -> S:
        """Return the settings of the project. Raises ``ImproperlyConfigured`` with every problem that was found."""
        settings, problems = self.parse(section(self.name))
        insist(problems)
        return settings


def parse(given: Any) -> tuple[Settings, list[Problem]]:
    """Read a ``DELAYQ`` dict. Return the settings and every problem, but for those of ``ELSEWHERE``."""
    found, problems = read(given, PARSERS, elsewhere=ELSEWHERE, meant=_MEANT)
    if not django_settings.USE_TZ:
        problems.append(Problem("E005", "USE_TZ is off.", "Due times need time zones: set USE_TZ = True."))
    settings = Settings(**found)
    if settings.QUEUES and settings.DEFAULT_QUEUE not in settings.QUEUES:
        hint = "No worker would serve it unless it is named with --queue."
        problems.append(Problem("E004", "DELAYQ['DEFAULT_QUEUE'] is not one of DELAYQ['QUEUES'].", hint))
    for queue in settings.QUEUES:
        if matching(settings.PULL_QUEUES or {}, queue) is not None:
            told = f"DELAYQ['QUEUES'] names the queue {queue!r}, which DELAYQ['PULL_QUEUES'] has too."
            problems.append(Problem("E016", told, "No worker serves a queue that programs pull: leave it out of one."))
    return settings, problems


@lru_cache(maxsize=1)
def get() -> Settings:
    """Return the project's settings. Raises ``ImproperlyConfigured`` with every problem that was found.

    In tests, those with ``DELAYQ["TESTING"]`` included, there is no Redis.
    """
    settings, problems = parse(given())
    insist(problems)
    if in_tests.without_redis or section("TESTING") is not None:
        return settings._replace(REDIS=None)
    return settings


def forget_on_change(cached: Any, *settings: str) -> None:
    """Have a function with ``lru_cache`` forget what it returned when one of these settings changes, as in tests."""

    def forget(*, setting: str, **kwargs: Any) -> None:
        if setting in settings:
            cached.cache_clear()

    setting_changed.connect(forget, weak=False)


forget_on_change(get, "DELAYQ", "CACHES", "USE_TZ")
