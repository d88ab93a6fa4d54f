"""The system checks. None of them touches the database or Redis."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings as django_settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import models, router
from django.utils.connection import ConnectionDoesNotExist

from . import broker, middleware
from .core.durations import brief
from .core.names import near
from .core.pull_queues import matching
from .core.retention import rules
from .project import conf, registry
from .project.conf import Problem
from .record.sql import commits_nothing, keeps_ambiguous_times, unsupported, vendor_name

TAG = "delayq"

# The beginnings of a URL of Redis, in small letters: redis-py knows no others.
_SCHEMES = ("redis://", "rediss://", "unix://", "redis+cluster://", "rediss+cluster://")


def register() -> None:
    """Register the checks with Django when the apps are ready."""
    of_project = (check_project, check_names, check_follow_ups, check_pulled, check_retention)
    for check in (check_settings, check_database, check_foreign_keys, *of_project):
        checks.register(check, TAG)


def check_settings(app_configs: Sequence[Any] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Check what every call and command needs: ``delayq.E001`` to ``E005``, ``E016``, and ``W007``."""
    _settings, problems = conf.parse(conf.given())
    return [*errors(problems), *_check_names()]


def _check_names() -> Iterator[checks.CheckMessage]:
    """Find settings that stand beside ``DELAYQ`` and not in it: ``delayq.W007``."""
    for name in dir(django_settings):
        hint = conf.hint_beside(name)
        if hint is not None:
            yield checks.Warning(
                f"{name} is read by nobody: settings stand in the dict DELAYQ.", hint=hint, id="delayq.W007"
            )


def errors(problems: Iterable[Problem]) -> list[checks.CheckMessage]:
    """Return problems of settings as Django reports them."""
    return [checks.Error(problem.message, hint=problem.hint, id=f"delayq.{problem.id}") for problem in problems]


def check_project(app_configs: Sequence[Any] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Check the rest of the project's settings: ``delayq.E006`` to ``E008``, ``E010``, ``E012`` and ``E014``."""
    settings, _problems = conf.parse(conf.given())
    return errors([*_check_times(), *_check_middleware(settings), *_check_redis(settings), *_check_tenants()])


def _check_times() -> Iterator[Problem]:
    # Imported here: the models are not ready when the app registers its checks.
    from .models import Message

    # The driver or the alias may be missing, as below.
    with suppress(ImproperlyConfigured, ConnectionDoesNotExist):
        using = router.db_for_write(Message)
        if keeps_ambiguous_times(using):
            yield Problem(
                "E010",
                f"DATABASES[{using!r}]['TIME_ZONE'] makes {vendor_name(using)} keep times without an offset from UTC.",
                "Remove TIME_ZONE before the first message is scheduled: then all times are kept in UTC.",
            )


def _check_redis(settings: conf.Settings) -> Iterator[Problem]:
    if settings.REDIS is None:
        return
    if "://" in settings.REDIS and not _is_redis_url(settings.REDIS):
        hint = f"It begins with {', '.join(_SCHEMES[:-1])} or {_SCHEMES[-1]}."
        yield Problem("E006", "DELAYQ['REDIS'] is not a Redis URL.", hint)
    elif "://" not in settings.REDIS and not _is_django_redis(settings.REDIS):
        hint = (
            "Add it to CACHES with BACKEND 'django_redis.cache.RedisCache', or write a Redis URL, such as"
            " 'redis://localhost:6379/0'."
        )
        yield Problem("E007", f"DELAYQ['REDIS'] names {settings.REDIS!r}, which is not a django-redis cache.", hint)
    elif why := broker.problem(settings):
        yield Problem("E008", "DELAYQ['REDIS'] is impossible.", why)


def check_database(app_configs: Sequence[Any] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Check that the database of the messages can keep them, and that workers commit: ``delayq.E011`` and ``W003``."""
    from .models import Message

    try:
        using = router.db_for_write(Message)
        reasons = (
            (checks.Error, unsupported(using), "delayq.E011"),
            (checks.Warning, commits_nothing(using), "delayq.W003"),
        )
    except (ImproperlyConfigured, ConnectionDoesNotExist):
        # The driver or the alias is missing: Django says so by itself.
        return []
    found: list[checks.CheckMessage] = []
    for kind, reason, number in reasons:
        if reason is not None:
            problem, _colon, hint = reason.rpartition(": ")
            found.append(kind(f"{problem}.", hint=f"{hint[0].upper()}{hint[1:]}", id=number))
    return found


# Foreign keys whose rows the database itself deletes or changes (Django 6.1): they keep no message.
FOLLOWED = [getattr(models, name, None) for name in ("DB_CASCADE", "DB_SET_NULL", "DB_SET_DEFAULT")]


def check_foreign_keys(app_configs: Sequence[Any] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Find the foreign keys because of which the database would not delete old messages: ``delayq.W004``."""
    from .models import Message

    keys = [getattr(relation, "field", None) for relation in Message._meta.get_fields(include_hidden=True)]
    return [
        checks.Warning(
            f"{key.model._meta.label}.{key.name} is a foreign key to messages.",
            hint="Keep the id in a BigIntegerField: a message that a row refers to is never deleted.",
            obj=key,
            id="delayq.W004",
        )
        for key in keys
        if isinstance(key, models.ForeignKey) and _keeps_messages(key)
    ]


def _keeps_messages(key: Any) -> bool:
    return key.db_constraint and key.model._meta.managed and key.remote_field.on_delete not in FOLLOWED


def check_names(app_configs: Sequence[Any] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Find queues that settings and handlers do not spell alike: ``delayq.W005``."""
    settings, _problems = conf.parse(conf.given())
    handled = {handler.queue for handler in registry.handlers().values() if handler.queue is not None}
    served = {*settings.QUEUES, settings.DEFAULT_QUEUE}
    limit = "DELAYQ['LIMITS'] has a limit for the queue {!r}, which nothing else in the settings and no handler names."
    likes = {limit.format(queue): near(queue, served | handled) for queue in settings.LIMITS or ()}
    if settings.QUEUES:
        queue_of = "A handler has the queue {!r}, and DELAYQ['QUEUES'] does not."
        likes |= {queue_of.format(queue): near(queue, served) for queue in sorted(handled)}
    hint = "Did you mean {!r}? If there are two such queues, silence this check."
    return [checks.Warning(told, hint=hint.format(like), id="delayq.W005") for told, like in likes.items() if like]


def check_follow_ups(app_configs: Sequence[Any] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Refuse handlers whose messages would follow each other's ends in a circle: ``delayq.E015``."""
    leads = {topic: {one.on_dead, one.on_expired} - {None} for topic, one in registry.handlers().items()}

    def follows_itself(topic: str) -> bool:
        ahead, seen = [*leads[topic]], set[str | None]()
        while ahead:
            if (found := ahead.pop()) not in seen:
                seen.add(found)
                ahead += leads.get(found or "", ())
        return topic in seen

    if not (circle := sorted(filter(follows_itself, leads))):
        return []
    hint = "Let the handler of one of them choose no on_dead, or no on_expired."
    told = f"Messages of {', '.join(circle)} would follow each other's ends without end."
    return [checks.Error(told, hint=hint, id="delayq.E015")]


def check_pulled(app_configs: Sequence[Any] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Find handlers and limits of pulled queues, which have no effect there: ``delayq.W008``."""
    settings, _problems = conf.parse(conf.given())
    handled = [(handler.queue, topic) for topic, handler in registry.handlers().items() if handler.queue is not None]
    told = [(queue, f"The handler of {topic!r} has the queue {queue!r}") for queue, topic in handled]
    told += [(queue, f"DELAYQ['LIMITS'] has a limit for the queue {queue!r}") for queue in settings.LIMITS or ()]
    hint = "Programs take its messages: no worker delivers them, and no limit holds there."
    return [
        checks.Warning(f"{text}, which DELAYQ['PULL_QUEUES'] has.", hint=hint, id="delayq.W008")
        for queue, text in told
        if matching(settings.PULL_QUEUES or {}, queue) is not None
    ]


# Somebody who keeps messages for less than this probably means a longer time. Seconds.
SHORT_RETENTION = 3600.0


def check_retention(app_configs: Sequence[Any] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Warn of messages that are deleted soon after they finished: ``delayq.W006``."""
    settings, _problems = conf.parse(conf.given())
    return [
        checks.Warning(
            f"DELAYQ[{name!r}]{pattern and f'[{pattern!r}]'} is {brief(kept)}: "
            "messages are deleted with their history that soon after their end.",
            hint="A number is seconds: write '30d' for days, or False for never. If it is meant, silence this check.",
            id="delayq.W006",
        )
        for name, retention in (("RETENTION", settings.RETENTION), ("DEAD_RETENTION", settings.DEAD_RETENTION))
        for pattern, kept in rules(retention)
        if kept is not False and kept < SHORT_RETENTION
    ]


def _check_middleware(settings: conf.Settings) -> Iterator[Problem]:
    for path in settings.MIDDLEWARE:
        try:
            middleware.load(path)
        except ImproperlyConfigured as error:
            hint = "Write the dotted path of a subclass of django_delayq.middleware.Middleware."
            yield Problem("E012", f"{error}.", hint)


def _check_tenants() -> Iterator[Problem]:
    """Refuse tables in the schema of each tenant: a process knows one identity, and one Redis, for a database."""
    types = getattr(django_settings, "TENANT_TYPES", {})
    several = [app for name, kind in types.items() if name != "public" for app in kind.get("APPS", ())]
    for app in dict.fromkeys([*getattr(django_settings, "TENANT_APPS", ()), *several]):
        if app.partition(".")[0] == "django_delayq":
            yield Problem(
                "E014",
                f"{app} is among the apps of tenants: each would have its own messages, and workers serve one schema.",
                "Move it to SHARED_APPS, and give the schema of the tenant to the handler by a Middleware.",
            )


def _is_redis_url(url: str) -> bool:
    try:
        return url.startswith(_SCHEMES) and bool(urlsplit(url))
    except ValueError:
        return False


def _is_django_redis(alias: str) -> bool:
    backend = django_settings.CACHES.get(alias, {}).get("BACKEND", "")
    if not backend:
        return False
    if str(backend).startswith("django_redis."):
        return True
    from django.core.cache import caches

    # A cache of the project's own class may give out clients as django-redis does.
    return hasattr(getattr(caches[alias], "client", None), "get_client")
