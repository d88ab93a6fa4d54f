"""Loads the Lua scripts into the server, so that a script whose reply gets lost was carried out."""

from __future__ import annotations

from pathlib import Path

import redis

from django_delayq.broker import scripts

SCRIPTS = sorted(file.stem for file in Path(scripts.__file__).parent.glob("*.lua"))


def teach(client: redis.Redis) -> None:
    """Load all scripts into the server."""
    for script in SCRIPTS:
        client.script_load(scripts.load(script).source)
