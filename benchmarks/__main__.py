"""``python -m benchmarks``: every system does the same work in one run, on the same Redis and PostgreSQL.

The run starts both servers as their packages start them. Peers take part when they are installed: ``python -m
benchmarks.peers install``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psycopg

from . import report, tables
from .driver import PEERS, Bench, Failed
from .measures import figure
from .systems import SYSTEMS, System
from .workloads import QUICK, WORKLOADS, Size, Workload, takes_part

BEGAN = time.monotonic()
ALL_SYSTEMS, ALL_WORKLOADS = [system.name for system in SYSTEMS], [workload.name for workload in WORKLOADS]


def main() -> None:
    # SIGTERM ends in order: the processes that were started are ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    arguments = _arguments()
    size = QUICK if arguments.quick else Size()
    given = {"drain": arguments.messages, "late": arguments.seconds}
    size = dataclasses.replace(size, **{name: value for name, value in given.items() if value})
    rounds = arguments.rounds or (1 if arguments.quick else 5)
    systems = _installed([s for s in SYSTEMS if s.name in arguments.systems], arguments.peers)
    workloads = [workload for workload in WORKLOADS if workload.name in arguments.only]
    results = report.Results()
    with Bench(arguments.peers) as bench:
        postgres, redis = bench.sql("SHOW server_version").split()[0], bench.redis.info("server")["redis_version"]
        for number in range(rounds):
            # Each round begins with another system, so that none is always the first.
            start = number % max(1, len(systems))
            for workload in workloads:
                _one_round(bench, workload, systems[start:] + systems[:start], size, results)
    versions = f"Python {platform.python_version()}, PostgreSQL {postgres}, Redis {redis}"
    line = f"{rounds} rounds of {size.drain:,} messages in a drain, {tables.measured_on(arguments.machine)}; {versions}"
    _print(line, results)
    if arguments.json:
        arguments.json.write_text(json.dumps({"run": line, **dataclasses.asdict(results)}, indent=1))
    if arguments.write_docs:
        tables.write_docs("ahead", report.ahead(results))
        parts = [f"{line[0].upper()}{line[1:]}.", *map(tables.as_rst, _tables(results))]
        tables.write_docs("figures", "\n\n".join(parts))


def _tables(results: report.Results) -> list[tables.Table]:
    return [make(results) for make in (report.beside_the_best, report.goals, report.costs, report.all_systems)]


def _print(line: str, results: report.Results) -> None:
    texts = [report.failures(results), *map(tables.as_text, _tables(results)), report.ahead(results), line]
    print("\n\n".join(text for text in texts if text))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round with few messages: whether all works")
    parser.add_argument("--only", type=_names(ALL_WORKLOADS), default=ALL_WORKLOADS, metavar="WORKLOADS")
    parser.add_argument("--systems", type=_names(ALL_SYSTEMS), default=ALL_SYSTEMS, metavar="NAMES")
    parser.add_argument("--rounds", type=int, help="default 5")
    parser.add_argument("--messages", type=int, help="in each drain; default 20000")
    parser.add_argument("--seconds", type=float, help="of each stream whose lateness is measured; default 20")
    parser.add_argument("--peers", type=Path, default=PEERS, metavar="DIR", help=f"their folder (default {PEERS})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measure of every round to a file")
    parser.add_argument("--write-docs", action="store_true", help=f"put the tables into {tables.PAGE.name}")
    parser.add_argument("--machine", default=tables.cores(), help="what the documentation says of it")
    return parser.parse_args()


def _names(known: Sequence[str]) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        given = text.split(",")
        if unknown := set(given) - set(known):
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        return given

    return names


def _installed(systems: Sequence[System], peers: Path) -> list[System]:
    for system in systems:
        if not system.installed(peers):
            print(f"{system.title} is not installed; python -m benchmarks.peers install {system.name}", file=sys.stderr)
    return [system for system in systems if system.installed(peers)]


def _one_round(
    bench: Bench, workload: Workload, systems: Sequence[System], size: Size, results: report.Results
) -> None:
    """Run one round of a workload, system after system."""
    for system in systems:
        if not takes_part(workload, system):
            continue
        rates = results.each("drain", system.name, "rate")
        if rates and rates[0] < workload.needs:
            results.fail(workload.name, system.name, f"it drains {figure(rates[0])} messages/s")
            continue
        print(f"{time.monotonic() - BEGAN:5.0f} s  {workload.title}: {system.title}", file=sys.stderr, flush=True)
        try:
            with bench.adapter(system, workload.environment) as adapter:
                results.add(workload.name, system.name, workload.run(adapter, size))
        except (Failed, psycopg.Error) as error:
            print(error, file=sys.stderr)
            results.fail(workload.name, system.name, str(error).strip().splitlines()[-1])


if __name__ == "__main__":
    main()
