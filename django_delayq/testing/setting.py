"""``DELAYQ["TESTING"]``: "manual", "immediate" or None, for the settings of tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.core import checks

from ..checks import TAG, errors
from ..project import conf

MODES = ("manual", "immediate")


def mode() -> str | None:
    """Return the setting. Raises ``ImproperlyConfigured`` for a word that it does not know."""
    conf.insist(problems())
    word = conf.section("TESTING")
    return None if word is None else str(word)


def problems() -> list[conf.Problem]:
    """Return what is wrong with the setting."""
    if conf.section("TESTING") in (None, *MODES):
        return []
    return [conf.Problem("E003", "DELAYQ['TESTING'] is impossible.", f"must be one of {', '.join(MODES)}, or None.")]


def check_setting(app_configs: Sequence[Any] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Check the setting: ``delayq.E003``."""
    return errors(problems())


def check_deployment(app_configs: Sequence[Any] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Check what must not be in production: ``delayq.W001``. Only ``check --deploy`` asks."""
    if conf.section("TESTING") is None:
        return []
    hint = "Leave it to the settings of tests: it takes Redis away, and may run handlers where messages are scheduled."
    return [checks.Warning("DELAYQ['TESTING'] is set.", hint=hint, id="delayq.W001")]


def register() -> None:
    """Register the checks with Django. This may be done again."""
    checks.register(check_setting, TAG)
    checks.register(check_deployment, TAG, deploy=True)
