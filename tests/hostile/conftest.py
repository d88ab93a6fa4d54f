"""A worker that has the hostile handlers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.workers import Worker

SETTINGS = "env DJANGO_SETTINGS_MODULE=tests.hostile.worker_settings"


@pytest.fixture
def worker(transactional_db: None, settings: Any) -> Iterator[Callable[..., Worker]]:
    """Start a worker, which is killed after the test."""
    settings.DELAYQ = {**settings.DELAYQ, "GRACE": 0.3, "POLL_INTERVAL": 0.1}
    with ExitStack() as stack:

        def start(*arguments: str, **delayq: object) -> Worker:
            return stack.enter_context(Worker("--processes", "1", *arguments, delayq=delayq, prefix=SETTINGS))

        yield start
