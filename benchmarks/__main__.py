"""``python -m benchmarks``: every system does the same work in one run, on the same Redis and PostgreSQL.

The run starts both servers. Peers take part when they are installed: ``python -m benchmarks.peers install``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import psycopg

from . import page, report
from .driver import PEERS, Bench, Failed
from .measures import Results, figure
from .page import GROWTH, PAGE, PICTURE
from .systems import SYSTEMS, System
from .workloads import SIZES, WORKLOADS, Size, Workload, takes_part

BEGAN = time.monotonic()

# The systems and workloads of --quick, for two minutes: the fastest peers of both kinds, and no workload that mostly
# waits.
QUICK_SYSTEMS = ("delayq", "huey", "django-q2", "procrastinate", "redis", "postgres", "orm")
QUICK_WORKLOADS = ("schedule", "schedule-bulk", "drain", "insert", "late-1000", "memory", "life", "restore", "burst")


def main() -> None:
    # SIGTERM ends in order: the processes that were started are ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    arguments = _arguments()
    size = SIZES[arguments.size]
    if arguments.growth:
        size = dataclasses.replace(size, growth=arguments.growth)
    wanted = {*arguments.only} - {*arguments.without}
    workloads = [w for w in WORKLOADS if w.name in wanted and (size.growth or not w.grows)]
    earlier = [report.read(file) for file in arguments.merge]
    if arguments.rounds:
        run = _measure(arguments, workloads, size)
    else:
        run, *earlier = earlier
    for other in earlier:
        report.merge(run, other)
    print(report.to_terminal(run))
    if arguments.json:
        arguments.json.write_text(json.dumps(report.to_json(run), indent=1))
    if arguments.write_docs:
        pictures = {PICTURE.name: "The rates and latenesses of the tables below as bars"}
        if any(workload.grows for workload in report.measured(run.results)):
            pictures[GROWTH.name] = "Costs, latenesses and rates of the growth tables below as lines"
        report.write_docs(PAGE, report.to_rst(run, pictures))
        page.draw()


def _measure(arguments: argparse.Namespace, workloads: Sequence[Workload], size: Size) -> report.Run:
    systems = _installed([s for s in SYSTEMS if s.name in arguments.systems], arguments.peers)
    results = Results()
    with Bench(arguments.peers) as bench:
        versions = {
            "Python": platform.python_version(),
            "PostgreSQL": bench.sql("SHOW server_version").split()[0],
            "Redis": bench.redis.info("server")["redis_version"],
        }
        for number in range(arguments.rounds):
            # Each round begins with another system, so that no system is always the first on cold servers.
            start = number % max(1, len(systems))
            turn = systems[start:] + systems[:start]
            for workload in workloads:
                if not (workload.once and number):
                    who = [s for s in turn if s.kind != "peer"] if workload.peers_once and number else turn
                    _interleaved(bench, workload, who, size, results)
    return report.Run(
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        machine=arguments.machine,
        size=arguments.size,
        rounds=arguments.rounds,
        versions=versions,
        results=results,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two minutes: the smallest size, once, fewer systems")
    parser.add_argument("--only", type=_names([w.name for w in WORKLOADS]), metavar="WORKLOADS")
    parser.add_argument("--without", type=_names([w.name for w in WORKLOADS]), default=[], metavar="NAMES")
    parser.add_argument("--systems", type=_names([s.name for s in SYSTEMS]), metavar="NAMES")
    parser.add_argument("--size", choices=SIZES, help="default small")
    parser.add_argument("--growth", type=_numbers, metavar="ROWS", help="waiting or finished rows: 10000,10000000")
    parser.add_argument(
        "--rounds", type=int, help="rounds of workloads that are repeated (default 3); 0: only merge earlier runs"
    )
    parser.add_argument(
        "--peers", type=Path, default=PEERS, metavar="DIR", help=f"the folder of the peers (default {PEERS})"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measure to a file")
    parser.add_argument(
        "--merge",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a --json of an earlier run (repeatable): add the workloads that were not measured now, with their date",
    )
    parser.add_argument("--write-docs", action="store_true", help=f"put the results into {PAGE.name}")
    cores = f"{len(os.sched_getaffinity(0))} shared cores" if hasattr(os, "sched_getaffinity") else platform.machine()
    parser.add_argument("--machine", default=cores, help="the machine that the results name")
    arguments = parser.parse_args()
    if arguments.rounds == 0 and not arguments.merge:
        parser.error("--rounds 0 needs --merge")
    return _with_defaults(arguments)


def _with_defaults(arguments: argparse.Namespace) -> argparse.Namespace:
    """Fill in options that were not given: those of --quick, or else all systems and workloads."""
    usual = {
        "only": QUICK_WORKLOADS if arguments.quick else [w.name for w in WORKLOADS],
        "systems": QUICK_SYSTEMS if arguments.quick else [s.name for s in SYSTEMS],
        "size": "quick" if arguments.quick else "small",
        "rounds": 1 if arguments.quick else 3,
    }
    for name, value in usual.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments


def _names(known: Sequence[str]) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        if text == "all":
            return list(known)
        given = text.split(",")
        if unknown := set(given) - set(known):
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        return given

    return names


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _installed(systems: Sequence[System], peers: Path) -> list[System]:
    for system in systems:
        if not system.installed(peers):
            print(f"{system.title} is not installed; python -m benchmarks.peers install {system.name}", file=sys.stderr)
    return [system for system in systems if system.installed(peers)]


def _interleaved(bench: Bench, workload: Workload, systems: Sequence[System], size: Size, results: Results) -> None:
    """Run one round of a workload, system after system."""
    for system in systems:
        if not takes_part(workload, system):
            continue
        rate = results.first("drain", system.name, "rate")
        if rate is not None and rate < workload.needs:
            results.fail(workload.name, system.name, f"it drains {figure(rate)} messages/s")
            continue
        print(f"{time.monotonic() - BEGAN:5.0f} s  {workload.name}: {system.title}", file=sys.stderr, flush=True)
        try:
            with bench.adapter(system, workload.environment) as adapter:
                results.add(workload.name, system.name, workload.run(adapter, size))
        except (Failed, psycopg.Error) as error:
            print(error, file=sys.stderr)
            results.fail(workload.name, system.name, str(error).strip().splitlines()[-1])


if __name__ == "__main__":
    main()
