"""Each command has a publisher of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from django_delayq.broker import publisher


@pytest.fixture(autouse=True)
def _new_publisher() -> Iterator[None]:
    """Make a new publisher for each test: after a failure, such as a stopped Redis, a publisher pauses."""
    publisher.get.cache_clear()
    yield
    publisher.get.cache_clear()
