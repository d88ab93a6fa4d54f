"""``python -m benchmarks``: every system does the same work in one run, on one Redis and one PostgreSQL of its own.

Peers take part when they are installed: ``python -m benchmarks.peers install``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import psycopg

from . import picture, report
from .driver import PEERS, ROOT, Bench, Failed
from .measures import Results
from .systems import SYSTEMS, System
from .workloads import SIZES, WORKLOADS, Size, Workload, takes_part

PAGE = ROOT / "docs" / "performance.rst"
PICTURE = ROOT / "docs" / "performance.svg"


def main() -> None:
    arguments = _arguments()
    systems = _installed([s for s in SYSTEMS if s.name in arguments.systems], arguments.peers)
    size = SIZES[arguments.size]
    if arguments.growth:
        size = dataclasses.replace(size, growth=arguments.growth)
    workloads = [w for w in WORKLOADS if w.name in arguments.only and (size.growth or not w.full_only)]
    results = Results()
    with Bench(arguments.peers) as bench:
        versions = {
            "Python": platform.python_version(),
            "PostgreSQL": bench.sql("SHOW server_version").split()[0],
            "Redis": bench.redis.info("server")["redis_version"],
        }
        for number in range(arguments.rounds):
            # Another one begins in each round: nobody is always the first on cold servers.
            start = number % max(1, len(systems))
            turn = systems[start:] + systems[:start]
            for workload in workloads:
                if not (workload.once and number):
                    _interleaved(bench, workload, turn, size, results)
    run = report.Run(
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        machine=arguments.machine,
        size=arguments.size,
        rounds=arguments.rounds,
        versions=versions,
        results=results,
    )
    print(report.to_terminal(run))
    if arguments.json:
        arguments.json.write_text(json.dumps(report.to_json(run), indent=1))
    if arguments.write_docs:
        PICTURE.write_text(picture.draw(results))
        report.write_docs(PAGE, report.to_rst(run, [PICTURE.name]))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", type=_names([w.name for w in WORKLOADS]), default="all", metavar="WORKLOADS")
    parser.add_argument("--systems", type=_names([s.name for s in SYSTEMS]), default="all", metavar="NAMES")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--growth", type=_numbers, metavar="ROWS", help="waiting or finished rows: 10000,10000000")
    parser.add_argument("--rounds", type=int, default=3, help="of those workloads that are repeated (default 3)")
    parser.add_argument("--peers", type=Path, default=PEERS, metavar="DIR", help=f"where they are (default {PEERS})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measure there")
    parser.add_argument("--write-docs", action="store_true", help=f"put the results into {PAGE.name}")
    cores = f"{len(os.sched_getaffinity(0))} shared cores" if hasattr(os, "sched_getaffinity") else platform.machine()
    parser.add_argument("--machine", default=cores, help="what the results say they were measured on")
    return parser.parse_args()


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
    """One round of a workload, system after system."""
    for system in systems:
        if not takes_part(workload, system):
            continue
        print(f"{workload.name}: {system.title}", file=sys.stderr, flush=True)
        try:
            with bench.adapter(system) as adapter:
                results.add(workload.name, system.name, workload.run(adapter, size))
        except (Failed, psycopg.Error) as error:
            print(error, file=sys.stderr)
            results.fail(workload.name, system.name, str(error).strip().splitlines()[-1])


if __name__ == "__main__":
    main()
