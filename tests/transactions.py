"""Transactions that stay open as long as a test needs them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from django.db import connections, transaction

from tests.workers import PATIENCE


@contextmanager
def unfinished(act: Callable[[], object]) -> Iterator[threading.Event]:
    """Call a function in another thread's transaction, which stays open until the event is set or the block is left."""
    begun, go = threading.Event(), threading.Event()

    def run() -> None:
        try:
            with transaction.atomic():
                act()
                begun.set()
                go.wait(PATIENCE)
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert begun.wait(PATIENCE)
        yield go
    finally:
        go.set()
        thread.join()
