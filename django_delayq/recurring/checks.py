"""The system check of the schedules that the code declares. It needs no database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.core import checks

from ..checks import TAG
from ..project import conf
from . import declarations


def register() -> None:
    """Register the check with Django when the apps are ready."""
    checks.register(check_declarations, TAG)


def check_declarations(app_configs: Sequence[Any] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Check the schedules that the code declares: ``delayq_recurring.E001``."""
    _settings, problems = conf.parse(conf.given())
    if problems:
        # Nothing is known of a schedule until the settings are right, and their own check says what is wrong.
        return []
    _found, mistakes = declarations.collect()
    places: dict[str, list[str]] = {}
    for mistake in mistakes:
        places.setdefault(mistake.reason, []).append(mistake.place)
    return [
        checks.Error(
            f"The schedule of {' and of '.join(theirs)} is wrong: {reason}.",
            hint="Correct the arguments of its @recurring, or install what is missing.",
            id="delayq_recurring.E001",
        )
        for reason, theirs in places.items()
    ]
