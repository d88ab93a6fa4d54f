"""A program that pulls, as a process: ``python -m tests.pull.puller QUEUE LEASE HOW FILE``.

It prints the id of each message that it has taken. ``late``: it waits for the file before it acknowledges. ``work``: it
takes and acknowledges until it is ended.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import django

if __name__ == "__main__":
    django.setup()

    from django_delayq.pull import ack, take

    queue, lease, how, go = sys.argv[1:]
    while True:
        for message in take(queue, max=1 if how != "work" else 10, wait=5, lease=lease):
            print(f"took {message.id}", flush=True)
            while how == "late" and not Path(go).exists():
                time.sleep(0.01)
            answer = ack(message.receipt)
            print(f"{'acknowledged' if answer else f'refused: {answer}'} {message.id}", flush=True)
