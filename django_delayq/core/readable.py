"""Waits until a pipe or a socket can be read, also in a process that has many files open."""

from __future__ import annotations

import select
import selectors
from collections.abc import Sequence
from typing import Any


def wait_readable(files: Sequence[Any], timeout: float) -> list[Any]:
    """Wait up to ``timeout`` seconds until one of these files can be read. Return those that can."""
    try:
        # epoll and poll know whole milliseconds only, and round up.
        return select.select(files, [], [], timeout)[0]
    except ValueError:
        # select knows no descriptor of 1024 or more. And epoll would need one more of them for each wait.
        with selectors.PollSelector() as selector:
            for file in files:
                selector.register(file, selectors.EVENT_READ)
            return [key.fileobj for key, _events in selector.select(timeout)]
