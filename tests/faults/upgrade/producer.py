"""A process that schedules until it is told to stop: ``python -m tests.faults.upgrade.producer VERSION FOLDER``.

It writes the ids that it got into the file ``VERSION.ids``, and when each call began and how long it took into
``VERSION.calls``, in seconds of the monotonic clock. A call that fails ends it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import django

PAUSE = 0.02
NEW_COLUMN: dict[str, Any] = {"origin": "shop"}


def main(version: str, folder: Path) -> None:
    django.setup()
    with (folder / f"{version}.ids").open("a") as ids, (folder / f"{version}.calls").open("a") as calls:
        while not (folder / f"{version}.stop").exists():
            began = time.monotonic()
            done = schedule(version)
            print(began, time.monotonic() - began, file=calls, flush=True)
            print(*done, sep="\n", file=ids, flush=True)
            time.sleep(PAUSE)


def schedule(version: str) -> list[int]:
    """Schedule a message by INSERT and some by COPY, and return their ids. The new version fills its column too."""
    from django_delayq import schedule_message, schedule_messages
    from django_delayq.models import Message

    payload = {"by": version}
    one = schedule_message("upgrade.order", payload, delay="0.2s")
    if version == "new":
        Message._base_manager.filter(pk=one.pk).update(**NEW_COLUMN)
    many = schedule_messages([{"topic": "upgrade.order", "payload": payload, "delay": 0}] * 3)
    return [message.pk for message in (one, *many)]


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
