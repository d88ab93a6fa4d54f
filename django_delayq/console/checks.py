"""The system check of the console's settings. It touches neither the database nor Redis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.core import checks

from ..checks import TAG, errors
from ..project import conf, console_conf


def check_settings(app_configs: Sequence[Any] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Check ``DELAYQ["CONSOLE"]``: ``delayq.E001`` to ``E003``."""
    _settings, problems = console_conf.parse(conf.section("CONSOLE"))
    return errors(problems)


def register() -> None:
    """Register the check with Django when the apps are ready."""
    checks.register(check_settings, TAG)
