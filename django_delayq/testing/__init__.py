"""For the tests of a project: runs due messages in the test itself, moves the queue's clock, asserts what is scheduled.

The names are loaded at first use: pytest imports its plugins before Django is set up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.lazy import at_first_use

if TYPE_CHECKING:
    from .deliverer import Ran, UnknownTopic
    from .helper import Delayq, DelayqMixin

_HOME = {"Delayq": "helper", "DelayqMixin": "helper", "Ran": "deliverer", "UnknownTopic": "deliverer"}

__all__ = ["Delayq", "DelayqMixin", "Ran", "UnknownTopic"]


# A type checker would take any name for one that there is.
if not TYPE_CHECKING:
    __getattr__ = at_first_use(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
