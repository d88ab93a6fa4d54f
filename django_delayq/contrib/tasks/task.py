"""The class of this backend's tasks: ``@task`` and ``task.using()`` take the options of the queue too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Self, cast

from . import known
from .compat import AnyTask, InvalidTask, Task

if TYPE_CHECKING:
    from datetime import datetime

    from typing_extensions import Unpack

_OF_FRAMEWORK = frozenset(one.name for one in fields(Task))


@dataclass(frozen=True, kw_only=True, init=False)
class DelayqTask(AnyTask):
    """A task of Django's with options of the queue: those of ``@options``, and those of one message by ``using``."""

    # What ``@task`` was given, and what ``using`` was given for the next messages.
    delayq_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    delayq_message: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __init__(
        self,
        *,
        delayq_options: Mapping[str, Any] | None = None,
        delayq_message: Mapping[str, Any] | None = None,
        **given: Any,
    ) -> None:
        terms = {name: value for name, value in given.items() if name not in _OF_FRAMEWORK}
        try:
            own = {**(delayq_options or {}), **known.checked(terms)}
        except ValueError as error:
            raise InvalidTask(f"{getattr(given.get('func'), '__qualname__', 'a task')}: {error}") from error
        object.__setattr__(self, "delayq_options", own)
        object.__setattr__(self, "delayq_message", dict(delayq_message or {}))
        super().__init__(**{name: value for name, value in given.items() if name in _OF_FRAMEWORK})

    def using(
        self,
        *,
        priority: int | None = None,
        queue_name: str | None = None,
        run_after: datetime | None = None,
        backend: str | None = None,
        **terms: Unpack[known.MessageTerms],
    ) -> Self:
        """Return a task like this one, whose next messages have other options.

        Besides those of the framework: ``key``, ``unique``, ``on_conflict``, ``expires``, ``limit_key``, ``retry``,
        ``timeout`` and ``lease``. Raises ``TypeError`` and ``ValueError`` for options that cannot be.
        """
        of_framework: Any = {"priority": priority, "queue_name": queue_name, "run_after": run_after, "backend": backend}
        changed = cast("Self", super().using(**of_framework))
        own = known.checked_for_message(terms)
        return replace(changed, delayq_message={**self.delayq_message, **own}) if own else changed
