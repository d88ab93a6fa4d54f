"""Recurring messages: schedules that make a message again and again, exactly one for each of their times.

An app of its own: add ``django_delayq.recurring`` to ``INSTALLED_APPS``. Cron expressions need the extra
``django-delayq[recurring]``.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

from ..core.lazy import at_first_use

if TYPE_CHECKING:
    from .declarations import recurring
    from .definition import Missed
    from .models import Schedule
    from .schedules import (
        create_schedule,
        delete_schedule,
        pause_schedule,
        resume_schedule,
        run_schedule,
    )

# The names are loaded at first use: a module of handlers imports them before the models are ready.
_HOME = {
    "recurring": "declarations",
    "Missed": "definition",
    "Schedule": "models",
    "create_schedule": "schedules",
    "delete_schedule": "schedules",
    "pause_schedule": "schedules",
    "resume_schedule": "schedules",
    "run_schedule": "schedules",
}

__all__ = [  # noqa: RUF022  grouped by purpose
    "recurring",
    "create_schedule",
    "delete_schedule",
    "pause_schedule",
    "resume_schedule",
    "run_schedule",
    "Schedule",
    "Missed",
]


# A type checker would take any name for one that there is.
if not TYPE_CHECKING:
    __getattr__ = at_first_use(__name__, _HOME)


class _Package(ModuleType):
    """Refuses calls by those who take the package for the decorator: ``from django_delayq import recurring``."""

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError(f"{__name__} is a package: write from {__name__} import recurring")


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
