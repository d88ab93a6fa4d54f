"""The settings in ``DELAYQ["CONSOLE"]``, for the pages of the admin. Nothing that delivers messages reads them."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from ..core import values
from . import conf


class ConsoleSettings(NamedTuple):
    """The settings of the console, and of the pages of schedules."""

    # The pages only show: they refuse every action, whatever the user's permissions.
    READ_ONLY: Annotated[bool, values.flag] = False
    # A word that every page of the console shows, such as "production", so that nobody takes one site for another.
    ENVIRONMENT: Annotated[str, values.text, {"limit": 40}] = ""


_section = conf.Section("CONSOLE", ConsoleSettings)
PARSERS, parse, get = _section.parsers, _section.parse, _section.get
