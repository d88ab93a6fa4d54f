"""The settings in ``DELAYQ["CONSOLE"]``, for the pages of the admin. Nothing that delivers messages reads them."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, NamedTuple

from ..core import values
from . import conf


class ConsoleSettings(NamedTuple):
    """The settings of the console, and of the pages of schedules."""

    # The pages only show: they refuse every action, whatever the user's permissions.
    READ_ONLY: Annotated[bool, values.flag] = False
    # A word that every page of the console shows, such as "production", so that nobody takes one site for another.
    ENVIRONMENT: Annotated[str, values.text, {"limit": 40}] = ""


PARSERS = values.checks_of(ConsoleSettings)


def parse(given: Any) -> tuple[ConsoleSettings, list[conf.Problem]]:
    """Read ``DELAYQ["CONSOLE"]``, None for nothing. Return the settings and every problem."""
    found, problems = conf.read({} if given is None else given, PARSERS, "DELAYQ['CONSOLE']")
    return ConsoleSettings(**found), problems


@lru_cache(maxsize=1)
def get() -> ConsoleSettings:
    """Return the console's settings. Raises ``ImproperlyConfigured`` with every problem that was found."""
    settings, problems = parse(conf.section("CONSOLE"))
    conf.insist(problems)
    return settings


conf.forget_on_change(get, "DELAYQ")
