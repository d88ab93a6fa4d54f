"""The plugin of pytest: the fixture ``delayq``, and no Redis in tests. It imports nothing before a test needs it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .helper import Delayq


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that leaves tests their Redis."""
    parser.addini("delayq_redis", "true: tests without the fixture delayq use the Redis of DELAYQ", "bool", False)


@pytest.fixture(autouse=True, scope="session")
def _delayq_uses_no_redis(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep all tests of a Django project away from Redis, and notice which functions on commit other fixtures call."""
    if _is_installed():
        from .transactions import notice_calls

        notice_calls()
    if request.config.getini("delayq_redis") or not _is_installed():
        yield
        return
    from .without_redis import use_no_redis

    use_no_redis(True)
    yield
    use_no_redis(False)


@pytest.fixture
def delayq() -> Iterator[Delayq]:
    """The queue in this test: drain it, travel in time, look what is scheduled."""
    from .helper import Delayq

    with Delayq() as helper:
        yield helper


def _is_installed() -> bool:
    """Return whether this is a Django project, set up, with django_delayq among its apps."""
    from django.apps import apps
    from django.conf import settings

    return settings.configured and apps.ready and apps.is_installed("django_delayq")
