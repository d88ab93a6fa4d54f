"""Works until it is told to stop: ``python -m tests.faults.upgrade.producer VERSION FOLDER``.

It schedules, moves, cancels and counts messages. It writes the ids that it got into the file ``VERSION.ids``, and when
each round began and how long it took into ``VERSION.calls``, in seconds of the monotonic clock. A call that fails ends
it.
"""

from __future__ import annotations

import sys
import time
from io import StringIO
from pathlib import Path
from typing import Any

import django
from django.core.management import call_command

PAUSE = 0.02
NEW_COLUMN: dict[str, Any] = {"origin": "shop"}


def main(version: str, folder: Path) -> None:
    django.setup()
    with (folder / f"{version}.ids").open("a") as ids, (folder / f"{version}.calls").open("a") as calls:
        while not (folder / f"{version}.stop").exists():
            began = time.monotonic()
            done = schedule(version)
            change_a_mind(version)
            print(began, time.monotonic() - began, file=calls, flush=True)
            print(*done, sep="\n", file=ids, flush=True)
            if not done[0] % 10:
                call_command("delayq_stats", json=True, stdout=StringIO())
            time.sleep(PAUSE)


def schedule(version: str) -> list[int]:
    """Schedule a message by INSERT and some by COPY, and return their ids. The new version fills its column too."""
    from django_delayq import schedule_message, schedule_messages
    from django_delayq.models import Message

    payload = {"by": version}
    one = schedule_message("upgrade.order", payload, delay="0.2s")
    if hasattr(Message, "origin"):
        Message._base_manager.filter(pk=one.pk).update(**NEW_COLUMN)
    many = schedule_messages([{"topic": "upgrade.order", "payload": payload, "delay": 0}] * 3)
    return [message.pk for message in (one, *many)]


def change_a_mind(version: str) -> None:
    """Move a message and cancel it: by statements that are prepared after a while, too."""
    from django_delayq import cancel_message, reschedule_message, schedule_message

    message = schedule_message("upgrade.cancelled", {"by": version}, delay="1h", key=f"{version}-{time.monotonic()}")
    assert reschedule_message(message, delay="2h"), "a message that waits was not rescheduled"
    assert cancel_message(message), "a message that waits was not cancelled"


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
