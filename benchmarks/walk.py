"""The way of a message through the code: ``python -m benchmarks.walk``.

Prints the modules of the package that the threads of a worker enter from the due time of a message to *consumed*, and
the functions that one call of ``schedule_message()`` enters. The services of the worker, which work at their own
times, are left out. Each figure is of the second message: what happens only once does not count.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from .own_servers import own_servers

PACKAGE = str(Path(__file__).resolve().parents[1] / "django_delayq")
TOPIC = "bench.noop"
# The threads of a worker that no message passes.
OTHERS = ("delayq-upkeep", "delayq-timeout", "delayq-log", "delayq-baton-watch", "delayq-connect", "MainThread")


class Trace:
    """The functions of the package that were entered while it is on, in their order, by thread."""

    def __init__(self) -> None:
        self.is_on = False
        self._entered: dict[tuple[str, CodeType], None] = {}

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        if self.is_on and event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self._entered.setdefault((threading.current_thread().name, frame.f_code))

    def codes(self, *, without: tuple[str, ...] = ()) -> list[CodeType]:
        """Return the functions that threads have entered, but for threads whose names begin like one of these."""
        codes = {code: None for name, code in self._entered if not name.startswith(without or ("\0",))}
        # The body of a comprehension or a lambda belongs to its function.
        return [code for code in codes if not code.co_name.startswith("<")]


def main() -> None:
    with own_servers():
        from django_delayq import schedule_message
        from django_delayq.core.worker_options import Options
        from django_delayq.models import Message
        from django_delayq.worker.processes.process import WorkerProcess

        delivered, scheduled = Trace(), Trace()
        threading.setprofile(delivered)
        worker = WorkerProcess(Options(using="default"))
        threading.Thread(target=_deliver_two, args=(schedule_message, Message, delivered, scheduled, worker)).start()
        worker.run()
        _print(delivered, scheduled)


def _deliver_two(schedule: Any, message: Any, delivered: Trace, scheduled: Trace, worker: Any) -> None:
    try:
        for is_second in (False, True):
            # In this thread the calls are traced, and nothing else.
            sys.setprofile(scheduled)
            scheduled.is_on = is_second
            made = schedule(TOPIC, {"order": 1}, delay=1)
            scheduled.is_on = False
            sys.setprofile(None)
            time.sleep(0.8)
            delivered.is_on = is_second
            while message.objects.get(pk=made.pk).state != "consumed":
                time.sleep(0.01)
            time.sleep(0.05)
            delivered.is_on = False
    finally:
        worker.stop()


def _print(delivered: Trace, scheduled: Trace) -> None:
    files = dict.fromkeys(code.co_filename for code in delivered.codes(without=OTHERS))
    print(f"{len(files)} modules from the due time to consumed:")
    for name in files:
        print(f"    {Path(name).relative_to(PACKAGE)}")
    functions = scheduled.codes()
    print(f"{len(functions)} functions in schedule_message():")
    for code in functions:
        print(f"    {Path(code.co_filename).relative_to(PACKAGE)}:{code.co_qualname}")


if __name__ == "__main__":
    main()
