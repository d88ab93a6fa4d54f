"""Runs threads with database connections of their own that begin at the same moment."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.db import connections

Together = Callable[..., list[Any]]


@pytest.fixture
def together(transactional_db: None, settings: Any) -> Iterator[Together]:
    """Run the functions at the same moment, each in a thread; return their answers, or the exceptions they raised."""
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": None}
    with ThreadPoolExecutor(8) as threads:
        used: set[threading.Barrier] = set()

        def run(*functions: Callable[[], Any]) -> list[Any]:
            barrier = threading.Barrier(len(functions))

            def begin(function: Callable[[], Any]) -> Any:
                barrier.wait(60)
                try:
                    return function()
                except Exception as error:  # noqa: BLE001
                    return error

            return [future.result(30) for future in [threads.submit(begin, function) for function in functions]]

        yield run
        # Each thread closes its own connections.
        used.clear()
        run(*[connections.close_all] * 8)
