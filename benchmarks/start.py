"""Measures what the package adds to the start of a project's processes: ``python -m benchmarks.start [--rounds 9]``.

Bare projects and the same ones with the app or the console start in turns: an import, ``django.setup()``, ``manage.py
check``. Prints the median of the processor time of each, and what is added: on a machine with nothing else to do these
take as long. Then a worker starts with a message that is due: the time from
the start of ``run_delayq`` until the message's handler begins, once with Redis and once without.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

IMPORT = [sys.executable, "-c", "import django_delayq"]
PYTHON = [sys.executable, "-c", ""]
SETUP = [sys.executable, "-c", "import django; django.setup()"]
CHECK = [sys.executable, "-m", "django", "check"]

# What is measured: the command and the project that have the package, and those that do without.
CASES = {
    "import django_delayq": ((IMPORT, ""), (PYTHON, "")),
    "django.setup() with the app": ((SETUP, "app"), (SETUP, "bare")),
    "django.setup() with the console": ((SETUP, "console"), (SETUP, "admin")),
    "manage.py check with the app": ((CHECK, "app"), (CHECK, "bare")),
    "manage.py check with the console": ((CHECK, "console"), (CHECK, "admin")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--without-worker", action="store_true")
    arguments = parser.parse_args()
    rounds = arguments.rounds
    for case, (with_it, without) in CASES.items():
        times: list[tuple[float, float]] = [(took(*with_it), took(*without)) for _round in range(rounds + 1)][1:]
        ours, theirs = (statistics.median(each) for each in zip(*times, strict=True))
        print(f"{case:<36} {ours:6.0f} ms, without {theirs:6.0f} ms: {ours - theirs:+6.0f} ms", flush=True)
    if arguments.without_worker:
        return
    from .own_servers import own_servers

    with own_servers():
        for redis in (True, False):
            first = statistics.median(first_delivery(redis=redis) for _round in range(rounds))
            print(f"first delivery of a worker, {'with' if redis else 'without'} Redis: {first:6.0f} ms", flush=True)


def took(command: list[str], project: str) -> float:
    """Return the processor time of a command in a project of ``benchmarks.start_settings`` (ms)."""
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "benchmarks.start_settings", "BENCH_PROJECT": project}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        _pid, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return (used.ru_utime + used.ru_stime) * 1000


def first_delivery(*, redis: bool) -> float:
    """Return the time from the start of a worker until the handler of a message that is due begins (ms)."""
    from django_delayq import schedule_message
    from django_delayq.models import Transition

    from .recovery import messages

    message = schedule_message("bench.noop")
    environment = {**os.environ, **({} if redis else {"REDIS_URL": ""})}
    began = time.time()
    command = [sys.executable, "-m", "django", "run_delayq", "--processes", "1", "--max-messages", "1"]
    subprocess.run(command, env=environment, check=True, stderr=subprocess.DEVNULL)
    assert messages().get(pk=message.pk).state == "consumed"
    return (Transition.objects.get(message=message, to_state="running").at.timestamp() - began) * 1000


if __name__ == "__main__":
    main()
