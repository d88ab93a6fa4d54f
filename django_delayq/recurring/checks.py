"""The system check of the schedules that the code declares. It needs no database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.core import checks

from ..checks import TAG
from . import declarations


def register() -> None:
    """Register the check with Django when the apps are ready."""
    checks.register(check_declarations, TAG)


def check_declarations(app_configs: Sequence[Any] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Check the schedules that the code declares: ``delayq_recurring.E001``."""
    _found, mistakes = declarations.collect()
    return [
        checks.Error(
            f"The schedule of {mistake.place} is wrong: {mistake.reason}.",
            hint="Correct the arguments of its @recurring.",
            id="delayq_recurring.E001",
        )
        for mistake in mistakes
    ]
