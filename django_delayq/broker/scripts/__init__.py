"""Loads the Lua scripts beside this file, and calls them by the names of their parameters.

The ``local a, b = KEYS[1], KEYS[2]`` and ``… = ARGV[1], …`` lines at the beginning of a script are its signature. A
number instead of an ARGV is the index at which a list begins. ``include/name.lua`` replaces ``-- @include name``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import redis

from ..connection import ScriptConnections
from ..keys import Keys

_HERE = Path(__file__).parent
_INCLUDE = re.compile(r"^-- @include (\w+)$", re.MULTILINE)
_SIGNATURE = re.compile(r"^local ([\w, ]+) = ((?:tonumber\()?(?:KEYS|ARGV)\[\d+\].*)$", re.MULTILINE)
_ITEM = re.compile(r"(KEYS|ARGV)\[(\d+)\]")


class Script:
    """One script. When the server does not know its digest, after SCRIPT FLUSH or a restart, it is sent in full."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.source = _INCLUDE.sub(
            lambda found: (_HERE / "include" / f"{found[1]}.lua").read_text().rstrip(),
            (_HERE / f"{name}.lua").read_text(),
        )
        self.digest = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()
        self.keys, self.arguments, self.rest = _signature(self.source)

    def __call__(
        self, client: redis.Redis | ScriptConnections, keys: Keys, rest: Sequence[Any] = (), **arguments: Any
    ) -> Any:
        """Run the script; the arguments are those of ``command``."""
        try:
            return client.execute_command(*self.command(keys, rest, **arguments))
        except redis.exceptions.NoScriptError:
            return client.execute_command(*self.command(keys, rest, in_full=True, **arguments))

    def command(self, keys: Keys, rest: Sequence[Any] = (), *, in_full: bool = False, **arguments: Any) -> list[Any]:
        """Return the command that runs the script; ``in_full`` for a server that does not know the script yet.

        The script gets those of the keys that it names, and the name of their queue if it asks for it. Every other
        argument is given by name; ``rest`` is the list at the end.
        """
        if "queue" in self.arguments:
            arguments["queue"] = keys.queue
        if arguments.keys() != set(self.arguments) or (rest and not self.rest):
            raise TypeError(f"script {self.name} takes {self.arguments}, not {sorted(arguments)}")
        head = ["EVAL", self.source] if in_full else ["EVALSHA", self.digest]
        named = [getattr(keys, name) for name in self.keys] + [arguments[name] for name in self.arguments]
        return [*head, len(self.keys), *named, *rest]


def _signature(source: str) -> tuple[list[str], list[str], bool]:
    """Return the names of a script's keys, those of its arguments, and whether a list stands at the end."""
    names: dict[str, list[str]] = {"KEYS": [], "ARGV": []}
    has_rest = False
    for line in _SIGNATURE.finditer(source):
        for name, value in zip(line[1].split(", "), line[2].split(", "), strict=True):
            found = _ITEM.search(value)
            # The number of the list at the end stands alone.
            kind, number = (found[1], found[2]) if found else ("ARGV", value)
            if int(number) != len(names[kind]) + 1:
                raise ValueError(f"the {kind} of a script are not named one by one")
            if found:
                names[kind].append(name)
            has_rest = found is None
    return names["KEYS"], names["ARGV"], has_rest


@cache
def load(name: str) -> Script:
    """Return the script of that name, which is read once."""
    return Script(name)
