"""The classes of this backend's tasks and results: tasks take the options of the queue, results can be waited for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Self, cast

from asgiref.sync import sync_to_async
from django.db import router
from django.utils.module_loading import import_string

from ...core.durations import Duration
from . import known
from .compat import AnyResult, AnyTask, InvalidTask, Task, TaskResultDoesNotExist

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from typing_extensions import Unpack

    from ...models import Message

_OF_FRAMEWORK = frozenset(one.name for one in fields(Task))


@dataclass(frozen=True, kw_only=True, init=False)
class DelayqTask(AnyTask):
    """A task of Django's with options of the queue: those of ``@options``, and those of one message by ``using``."""

    # The options of ``@task``, and those that ``using`` gives to the next messages.
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

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, dict[str, Any]]]:
        """Pickle the task by the path of its function: options may be functions, which no pickle can hold."""
        own = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in ("func", "delayq_options")}
        return _like_declared, (self.module_path, own)

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


def _like_declared(path: str, own: Mapping[str, Any]) -> DelayqTask:
    """Return the task with this path, with the values of another one like it."""
    return cast(DelayqTask, replace(import_string(path), **own))


class DelayqResult(AnyResult):
    """A result of Django's that can be waited for."""

    __slots__ = ()

    def wait(self, timeout: Duration) -> Self:
        """Wait until the task has ended, refresh this result, and return it. Async code awaits ``await_end``.

        It looks and raises as ``message.wait`` does, but ``TaskResultDoesNotExist`` when the message was purged.
        """
        self._message().wait(timeout)
        self.refresh()
        return self

    async def await_end(self, timeout: Duration) -> Self:
        """Wait from async code as ``wait`` does."""
        await (await sync_to_async(self._message)()).await_end(timeout)
        await self.arefresh()
        return self

    def _message(self) -> Message:
        from ...models import Message

        message = Message.objects.using(router.db_for_write(Message)).filter(pk=self.id).first()
        if message is None:
            raise TaskResultDoesNotExist(self.id)
        return message
