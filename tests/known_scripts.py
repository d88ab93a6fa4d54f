"""The Lua scripts on the server, before a test loses a reply: that of one it does not know is lost without any harm."""

from __future__ import annotations

from pathlib import Path

import redis

from django_delayq.broker import scripts

SCRIPTS = sorted(file.stem for file in Path(scripts.__file__).parent.glob("*.lua"))


def teach(client: redis.Redis) -> None:
    """Make all of them known."""
    for script in SCRIPTS:
        client.script_load(scripts.load(script).source)
