"""The guide from an empty folder to production works, and systemd takes the unit."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis
from psycopg.conninfo import conninfo_to_dict

from testproject.servers import PostgresServer, RedisServer
from tests.support.workers import eventually

from .blocks import DOCS, Block, blocks
from .project import REDIS, Project

NAME = "shop"


class Deployed(Project):
    """A project that has, from some moment, the environment of production."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.production: dict[str, str] = {}

    def _environment(self) -> dict[str, str]:
        return {**super()._environment(), **self.production}


def of(page: str, language: str) -> list[Block]:
    return [block for block in blocks(DOCS / page) if block.language == language and block.is_run]


@pytest.fixture
def empty_database(postgres_server: PostgresServer) -> Iterator[str]:
    with psycopg.connect(postgres_server.url, autocommit=True) as asked:
        asked.execute(f"CREATE DATABASE {NAME}")
        yield postgres_server.url
        asked.execute(f"DROP DATABASE {NAME} WITH (FORCE)")


def test_the_guide_leads_from_sqlite_to_a_worker_on_postgresql(
    tmp_path: Path, empty_database: str, redis_server: RedisServer, redis_client: redis.Redis
) -> None:
    (file,) = of("howto/install.rst", "ini")
    production = dict(line.split("=", 1) for line in file.text.splitlines())
    facts = conninfo_to_dict(empty_database)
    assert production["REDIS_URL"] == REDIS
    production |= {f"DB_{name.upper()}": str(facts[name]) for name in ("host", "port", "user")}
    production["REDIS_URL"] = redis_server.url
    page = [block for block in blocks(DOCS / "howto/install.rst") if block.is_run]
    greeting = next(block for block in page if block.language == "pycon")
    with Deployed(tmp_path, redis_server.url) as project:
        for block in page:
            if block is file:
                project.production = production
            elif block is page[-1]:
                project.run("python manage.py run_delayq")
                project.follow(greeting)
                eventually(lambda: "Hello, Anna" in project.log, "the worker delivers")
                project.follow(block)
            else:
                project.follow(block)
        assert f"database default, Redis: 127.0.0.1:{redis_server.port}" in project.log


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("no systemd-analyze found")
    (block,) = of("howto/deploy.rst", "ini")
    assert "EnvironmentFile=/etc/shop/env\n" in block.text
    unit = tmp_path / "shop-worker.service"
    # It asks whether the program is there.
    unit.write_text(block.text.replace("/srv/shop/.venv/bin/python", sys.executable))
    found = subprocess.run([program, "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False)
    assert (found.returncode, [line for line in found.stderr.splitlines() if unit.name in line]) == (0, [])
