"""Leaves out what needs Redis, where its packages are not installed: ``tox -e bare``. The rest runs without it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_NEEDS_REDIS = re.compile(
    r"^(?:import redis|from (?:redis|django_redis)\b)"
    r"|^from tests\.support\.(?:in_redis|known_scripts|redis_servers|skewed)\b"
    r"|django_delayq\.broker\.(?:connection|listener|puts|redis|scripts)\w* import",
    re.MULTILINE,
)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out the modules that import a client of Redis, or the part of the package that is one."""
    if collection_path.suffix == ".py" and _NEEDS_REDIS.search(collection_path.read_text(encoding="utf-8")):
        return True
    return None


@pytest.fixture
def redis_server() -> None:
    pytest.skip("the packages of Redis are not installed")


@pytest.fixture
def redis_client(redis_server: None) -> None:
    """Not there either."""


@pytest.fixture
def puts_are_flushed(redis_server: None) -> None:
    """Not there either."""
