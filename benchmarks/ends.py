"""Measures how late messages are whose process ends right after it scheduled them: ``python -m benchmarks.ends``.

A process schedules 1, 2, 5 or 30 messages and then ends by ``os._exit``, as a child of ``multiprocessing``, by a bare
SIGTERM, or by itself. ``--tries 20 --delay 0.9``: so often, and due in so many seconds. Prints the latest start of each
kind (ms), and exits with 1 if one was more than 50 ms late.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable

CALLS = (1, 2, 5, 30)
LATEST_MS = 50.0


def kill() -> None:
    """End this process by a signal for which Python has no handler."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


ENDS: dict[str, Callable[[], object]] = {
    "os._exit": lambda: os._exit(0),
    "multiprocessing": lambda: None,
    "SIGTERM": kill,
    "a normal end": sys.exit,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--delay", type=float, default=0.9, help="seconds until the messages are due")
    parser.add_argument("--children", metavar="TOPIC", help="only start such processes, on servers that run already")
    arguments = parser.parse_args()
    if arguments.children:
        import django

        django.setup()
        start_children(arguments.children, arguments.delay)
    else:
        measure(arguments.tries, arguments.delay)


def start_children(topic: str, delay: float) -> None:
    """Have a process of each kind schedule and end, one after another. Nothing is connected in this process."""
    for end, leave in ENDS.items():
        for calls in CALLS:
            if end == "multiprocessing":
                child = multiprocessing.get_context("fork").Process(target=schedule, args=(topic, delay, end, calls))
                child.start()
                child.join()
            elif pid := os.fork():
                os.waitpid(pid, 0)
            else:
                schedule(topic, delay, end, calls)
                leave()


def schedule(topic: str, delay: float, end: str, calls: int) -> None:
    from django_delayq import schedule_message

    for _number in range(calls):
        schedule_message(topic, {"end": end, "calls": calls}, delay=delay)


def measure(tries: int, delay: float) -> None:
    from .own_servers import own_servers

    with own_servers():
        from .recovery import messages, starts, until, worker

        with worker("--processes", "1"):
            for _number in range(tries):
                command = [sys.executable, "-m", "benchmarks.ends", "--children", "bench.noop", "--delay", str(delay)]
                subprocess.run(command, check=True)
            scheduled = tries * len(ENDS) * sum(CALLS)
            until(lambda: messages().filter(state="consumed").count() == scheduled)
        worst = 0.0
        for end in ENDS:
            for calls in CALLS:
                found = messages().filter(payload__end=end, payload__calls=calls)
                late = starts(list(found.values_list("pk", flat=True)))
                latest = max(max(each) for each in late.values()) * 1000
                print(f"{calls:3} calls, then {end:<16} latest of {len(late):4}: {latest:7.1f} ms", flush=True)
                worst = max(worst, latest)
    sys.exit(worst > LATEST_MS)


if __name__ == "__main__":
    main()
