"""``python -m tests.faults`` runs every failpoint with each fault that can happen there, and prints a table.

Arguments: ``--only TEXT`` (cases whose name holds it), ``--delay SECONDS`` (5), ``--at-once N`` (8).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path


def main() -> int:
    options = _options()
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
    import django

    django.setup()
    from django.core.management import call_command

    call_command("migrate", run_syncdb=True, verbosity=0)
    from .matrix import ACTIONS, Case, every_case, run
    from .oracle import Verdict

    cases = [case for case in every_case() if options.only in case.queue]
    # A batch has one reaper, which works for all of its cases.
    batches: list[list[Case]] = []
    for action in ACTIONS:
        chosen = [case for case in cases if case.action == action]
        batches += [chosen[start : start + options.at_once] for start in range(0, len(chosen), options.at_once)]
    verdicts: dict[Case, Verdict] = {}
    began = time.monotonic()
    for batch in batches:
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                verdicts |= run(batch, Path(folder), delay=options.delay)
            except AssertionError:
                traceback.print_exc()
                verdicts |= {case: Verdict(wrong=["did not come to an end"]) for case in batch}
        print(f"{len(batch)} × {batch[0].action}: {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
    places = list(dict.fromkeys((case.who, case.point) for case in cases))
    _print("who", "failpoint", *ACTIONS)
    for place in places:
        _print(*place, *(str(verdicts.get(Case(*place, action), "-")).partition(":")[0] for action in ACTIONS))
    messages, w1, w2 = (sum(getattr(v, what) for v in verdicts.values()) for what in ("messages", "w1", "w2"))
    print(f"\n{len(cases)} cases, {messages} messages, W1 {w1}, W2 {w2}, {time.monotonic() - began:.0f} s")
    wrong = [(case, what) for case, verdict in verdicts.items() for what in verdict.wrong]
    for case, what in wrong:
        print(f"{case.queue}: {what}")
    return 1 if wrong else 0


def _print(*cells: str) -> None:
    print("".join(f"{cell:<16}" for cell in cells).rstrip())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--delay", type=float, default=5.0)
    parser.add_argument("--at-once", type=int, default=8)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
