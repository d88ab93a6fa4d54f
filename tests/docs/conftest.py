"""What the tests of the documentation share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from django_delayq import registry


@pytest.fixture
def free_topics() -> Iterator[None]:
    """Examples may register handlers for topics that the test's apps have; theirs come back after the test."""
    former = dict(registry._handlers)
    registry._handlers.clear()
    yield
    registry._handlers.clear()
    registry._handlers.update(former)
