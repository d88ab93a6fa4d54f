"""What a verb has to offer to be done step by step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from ..models import Operation

# Messages of one step at most.
BATCH = 1000


@dataclass(frozen=True, slots=True)
class Step:
    """One batch that was done: how many messages, what came of them, where to go on, and whether that was all."""

    done: int = 0
    outcomes: Mapping[str, int] = field(default_factory=dict)
    position: str = ""
    finished: bool = False


class Work(ABC):
    """A verb on the messages of a scope.

    A step begins where ``operation.position`` says (empty: at the beginning), and does at most ``BATCH`` messages, or
    about a second's worth. It may be done again after a worker was killed before it could write the position down.
    """

    # The name under which operations name it.
    verb: ClassVar[str]
    # The codename of the permission to start, stop and resume it.
    permission: ClassVar[str]
    # Whether a step only writes to the record: then its result and its bookkeeping are one transaction.
    atomic: ClassVar[bool] = True

    def __init__(self, scope: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
        self.scope = scope
        self.arguments = arguments

    @abstractmethod
    def count(self, using: str) -> int | None:
        """How many messages there are to do now; None when they are too many to count."""

    @abstractmethod
    def step(self, using: str, operation: Operation) -> Step:
        """Do one batch."""


WORKS: dict[str, type[Work]] = {}

AWork = TypeVar("AWork", bound=Work)


def register(work: type[AWork]) -> type[AWork]:
    """Make a verb known, as a decorator of its class."""
    WORKS[work.verb] = work
    return work
