"""The base class of what operations do, and the table of all kinds of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from ...broker import RedisBroker, index
from ...project import conf
from ..models import Operation

# Messages of one step at most.
MESSAGES_PER_STEP = 1000
# The statement timeout for counting what an operation has to do.
COUNT_TIMEOUT_MS = 5000


@dataclass(frozen=True, slots=True)
class Step:
    """One batch that was done: how many messages, their outcomes, where to go on, and whether it was the last."""

    done: int = 0
    outcomes: Mapping[str, int] = field(default_factory=dict)
    position: str = ""
    finished: bool = False


class OperationWork(ABC):
    """Base class of the work of one operation on the messages of its scope.

    A step begins at ``operation.position`` (empty: at the beginning), and does at most ``MESSAGES_PER_STEP`` messages,
    or about a second's worth. A step may be done again after a worker was killed before it could write the position.
    """

    # The name of this kind of work, as in ``Operation.action``.
    name: ClassVar[str]
    # The verbs that take the permissions to start, stop and resume it, whatever its arguments are.
    verbs: ClassVar[tuple[str, ...]]
    # True when a step writes to the record only: then its changes and its bookkeeping are one transaction.
    atomic: ClassVar[bool] = True

    def __init__(self, scope: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
        self.scope = scope
        self.arguments = arguments

    @classmethod
    def needed(cls, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the verbs that take the permissions for an operation with these arguments."""
        return cls.verbs

    def count(self, using: str) -> int | None:
        """Return how many messages there are to do now; None when that is not known, or they are too many to count."""
        return None

    def queued(self, using: str, operation: Operation) -> None:  # noqa: B027
        """Prepare the operation, in the transaction that has just queued it, for the first time or again."""

    @classmethod  # noqa: B027
    def ended(cls, using: str, operation: Operation) -> None:
        """Clean up: the operation is done, stopped or failed. It may be called more than once."""

    @abstractmethod
    def step(self, using: str, operation: Operation) -> Step:
        """Do one batch."""


class RedisWork(OperationWork):
    """Base class of work on what Redis holds, which needs one."""

    verbs = ("restore",)
    atomic = False

    def __init__(self, scope: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
        super().__init__(scope, arguments)
        if conf.get().REDIS is None:
            raise ValueError(f"DELAYQ['REDIS'] is None: a {self.name} has nothing to do")

    @staticmethod
    def redis(using: str) -> AbstractContextManager[RedisBroker]:
        """Connect to Redis for the time of a context."""
        broker = index(using)
        assert broker is not None
        return closing(broker)


def holder(operation: Operation) -> str:
    """Return the name in which an operation pauses queues."""
    return f"{operation.action} #{operation.pk}"


WORKS: dict[str, type[OperationWork]] = {}

AWork = TypeVar("AWork", bound=OperationWork)


def register(work: type[AWork]) -> type[AWork]:
    """Add a kind of work to ``WORKS``, as a decorator of its class."""
    WORKS[work.name] = work
    return work
