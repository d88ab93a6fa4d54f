"""``@recurring``: schedules that the code declares. Their mistakes are collected, for the system check to report."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, Unpack

from django.apps import apps
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.core.serializers.json import DjangoJSONEncoder
from django.db import router

from ..checks import TAG
from ..core import names
from ..core.exceptions import InvalidMessage
from ..core.text import shown
from ..project import registry
from . import definition
from .definition import Definition, ScheduleOptions


class TaskLike(Protocol):
    """A task of Django's task framework: an object that holds a function."""

    @property
    def func(self) -> Callable[..., Any]: ...


F = TypeVar("F", bound=Callable[..., Any] | TaskLike)


@dataclass(frozen=True, slots=True)
class Declaration:
    """One use of ``@recurring``, as it was written: above a handler, or above a task with its arguments."""

    decorated: Callable[..., Any] | TaskLike
    name: str | None
    topic: str | None
    options: dict[str, Any]
    args: Sequence[Any] | None = None
    kwargs: Mapping[str, Any] | None = None

    @property
    def function(self) -> Callable[..., Any]:
        """The function that runs; for a task, the one that the task holds."""
        decorated: Any = self.decorated
        function: Callable[..., Any] = getattr(decorated, "func", decorated)
        return function

    @property
    def place(self) -> str:
        """The function, in words."""
        return f"{self.function.__module__}.{getattr(self.function, '__qualname__', repr(self.function))}"

    def given(self) -> dict[str, Any]:
        """Return the options of the schedule. Raises ``InvalidMessage`` for arguments that the task cannot have."""
        has_arguments = self.args is not None or self.kwargs is not None
        if self.decorated is self.function:
            if has_arguments:
                raise InvalidMessage("args and kwargs are those of a task: give a handler a payload")
            return self.options
        if self.options["payload"] is not None:
            if has_arguments:
                raise InvalidMessage("give a task args and kwargs, or a payload that has them, not both")
            return self.options
        args, kwargs = self._arguments()
        context = [None] * bool(getattr(self.decorated, "takes_context", False))
        try:
            inspect.signature(self.function).bind(*context, *args, **kwargs)
        except TypeError as error:
            raise InvalidMessage(f"the task cannot be called with these args and kwargs: {error}") from None
        return {**self.options, "payload": {"args": args, "kwargs": kwargs}}

    def _arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of the task, checked."""
        args: Any = () if self.args is None else self.args
        kwargs: Any = {} if self.kwargs is None else self.kwargs
        if not isinstance(args, Sequence) or isinstance(args, str | bytes | bytearray):
            raise InvalidMessage(f"args must be a list or a tuple, such as [30], not {shown(args)}")
        if not isinstance(kwargs, Mapping):
            raise InvalidMessage(f'kwargs must be a dict, such as {{"days": 30}}, not {shown(kwargs)}')
        return [*args], {**kwargs}


@dataclass(frozen=True, slots=True)
class Mistake:
    """A declaration that cannot become a schedule, and the reason."""

    place: str
    reason: str


# Each use of ``@recurring`` in this process, in order.
declared: list[Declaration] = []


@names.with_hints(definition.MEANT, "@recurring", ScheduleOptions)
def recurring(
    cron: str | None = None,
    *,
    name: str | None = None,
    topic: str | None = None,
    payload: Any = None,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    **options: Unpack[ScheduleOptions],
) -> Callable[[F], F]:
    """Declare a schedule for the topic of the decorated handler: workers make a message for each of its times.

    Above a ``@task`` of Django's task framework it enqueues the task, with ``args`` and ``kwargs``.

    ``cron``: an expression of five fields, or six with seconds first, read in the time zone ``tz`` (default
    ``TIME_ZONE``). Or ``every``: an interval such as ``"10m"``, counted from ``starts_at`` or else from 1970. The first
    time is at ``starts_at`` or later, the last one at ``ends_at`` or earlier. ``missed``: "once", "all" or "skip", for
    the times at which no worker ran; ``expires``: do not start an occurrence any more this long after its time.
    ``name``: default the topic; a topic with several schedules needs several names. The rest is as in
    ``schedule_message``.

    Mistakes are reported by ``manage.py check``, and in the log of workers: a wrong expression stops nothing else.

    ::

        @recurring("0 3 * * *", tz="Europe/Berlin")
        @handler("reports.nightly")
        def nightly(message): ...
    """
    if callable(cron):
        raise InvalidMessage('@recurring needs its times: write @recurring("0 3 * * *") or @recurring(every="10m")')
    given = {"payload": payload, "cron": cron, **options}

    def declare(decorated: F) -> F:
        declared.append(Declaration(decorated, name, topic, given, args, kwargs))
        # The check is registered here: of an app that is not installed, nothing else runs.
        checks.register(check_installed, TAG)
        return decorated

    return declare


def check_installed(app_configs: Sequence[Any] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Check that workers make the messages of the declared schedules: ``delayq_recurring.E002``."""
    if apps.is_installed("django_delayq.recurring") or not declared:
        return []
    first, *others = sorted({declaration.place for declaration in declared})
    more = f" and {len(others)} more" if others else ""
    return [
        checks.Error(
            f"@recurring has no effect, and {first}{more} will never run by it: its app is not installed.",
            hint="Add 'django_delayq.recurring' to INSTALLED_APPS, and migrate.",
            id="delayq_recurring.E002",
        )
    ]


def collect() -> tuple[dict[str, Definition], list[Mistake]]:
    """Return the declared schedules by name, and the declarations that cannot become one."""
    found: dict[str, Definition] = {}
    places: dict[str, str] = {}
    mistakes = []
    for declaration in declared:
        place = declaration.place
        try:
            topic = declaration.topic or _topic_of(declaration)
            name = definition.name(declaration.name or topic)
            made = definition.checked(topic, **declaration.given())
            # A module that is imported again declares its schedules again.
            if places.setdefault(name, place) != place:
                raise InvalidMessage(f"{places[name]} has a schedule {name!r} too: give one of them another name")
            if found.setdefault(name, made) != made:
                raise InvalidMessage(f"two schedules have the name {name!r}: give one of them another name")
        except (InvalidMessage, ImproperlyConfigured) as error:
            mistakes.append(Mistake(place, str(error)))
    return found, mistakes


def collect_for(using: str) -> tuple[dict[str, Definition], list[Mistake]]:
    """Collect for a database: the declared schedules live in the one in which messages are written by default."""
    from ..models import Message

    found, mistakes = collect()
    return (found if using == router.db_for_write(Message) else {}), mistakes


def fingerprint(declared: dict[str, Definition]) -> str:
    """Return a hash of a set of declarations: two versions of the code with the same schedules have the same hash."""
    facts = {name: dataclasses.asdict(made) for name, made in declared.items()}
    return hashlib.sha256(json.dumps(facts, sort_keys=True, cls=DjangoJSONEncoder).encode()).hexdigest()


def _topic_of(declaration: Declaration) -> str:
    """Return the topic of the handler that a declaration stands beside. Raises ``InvalidMessage``."""
    # The two decorators may stand in any order, so the handler is looked up when all are registered.
    handlers = registry.handlers().values()
    topics = [found.topic for found in handlers if found.function is declaration.function]
    # A module that was imported again has registered a newer function of the same name.
    topics = topics or [found.topic for found in handlers if found.name == declaration.place]
    if len(topics) != 1:
        handles = f"handles {len(topics)} topics" if topics else "is no handler"
        beside = "put @handler beside @recurring, or @task below it, or give a topic"
        raise InvalidMessage(f"the function {handles}: {beside}")
    return topics[0]
