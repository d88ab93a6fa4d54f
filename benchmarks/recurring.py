"""Measures how late recurring messages start: ``python -m benchmarks.recurring [--schedules 200] [--seconds 30]``.

So many schedules with a time each second, and one worker process that makes and runs their occurrences, on servers of
its own. Prints how many of all times have their message and how late it was handled, and of each second in which one
was more than 100 ms late: when its messages were written, claimed and handled.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from datetime import UTC, datetime
from statistics import median

from .measures import quantile
from .own_servers import own_servers
from .recovery import say, worker

SETTLE_SECONDS = 4.0
LATE = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--schedules", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--missed", default="once", help="what becomes of times that were missed: once, all or skip")
    arguments = parser.parse_args()
    os.environ |= {"BENCH_RECURRING": "1", "BENCH_MARKS": os.devnull}
    with own_servers():
        from django_delayq.recurring import create_schedule

        for n in range(arguments.schedules):
            create_schedule(f"bench.{n}", "bench.recurring", n, every="1s", missed=arguments.missed)
        with worker("--processes", "1"):
            time.sleep(SETTLE_SECONDS)
            begin = time.time()
            time.sleep(arguments.seconds)
            end = time.time()
            time.sleep(SETTLE_SECONDS)
        show(begin, end, arguments.schedules)


def show(begin: float, end: float, schedules: int) -> None:
    from django_delayq.models import Message

    since, until = datetime.fromtimestamp(begin, UTC), datetime.fromtimestamp(end, UTC)
    found = Message.objects.filter(due_at__gte=since, due_at__lt=until).order_by("due_at")
    rows = list(found.values_list("due_at", "created_at", "claimed_at", "finished_at"))
    # A message may be claimed a moment before its time, and waits in the worker for it.
    late = sorted((finished - due).total_seconds() * 1000 for due, _created, _claimed, finished in rows if finished)
    if not late:
        raise RuntimeError("no occurrence was handled")
    say("times that have their message", f"{len(rows)} of {schedules * (int(end) - int(begin))}")
    say(f"{len(rows) - len(late)} never handled; handled late by, ms: p50", f"{median(late):.1f}")
    say("p99", f"{quantile(late, 0.99):.1f}")
    say("at most", f"{late[-1]:.1f}")
    seconds = defaultdict(list)
    for due, *moments in rows:
        seconds[due].append([(moment - due).total_seconds() * 1000 if moment else float("inf") for moment in moments])
    for due, each in seconds.items():
        created, claimed, finished = (sorted(column) for column in zip(*each, strict=True))
        if finished[-1] > LATE * 1000:
            ranges = " · ".join(f"{column[0]:.0f} to {column[-1]:.0f}" for column in (created, claimed, finished))
            say(f"  {due:%H:%M:%S}: {len(each)} written · claimed · finished, ms after it", ranges)


if __name__ == "__main__":
    main()
