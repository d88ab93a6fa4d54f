"""A host name whose name server a test silences. Nothing interrupts a lookup: not a timeout, not a signal."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.workers import PATIENCE, eventually

NAME = "redis.test"


class Names:
    """Stands in for ``socket.getaddrinfo``, and knows one more name, of this host, while a file exists."""

    def __init__(self, answers: Path) -> None:
        self.answers = answers
        # The threads that have looked the name up.
        self.asked: list[threading.Thread] = []
        # True when a lookup got no answer as long as a test waits for anything.
        self.gave_up = False
        self._look_up = socket.getaddrinfo

    def __call__(self, host: Any, *rest: Any, **options: Any) -> Any:
        if host == NAME:
            self.asked.append(threading.current_thread())
            deadline = time.monotonic() + PATIENCE / 3
            while not self.answers.exists():
                if time.monotonic() > deadline:
                    self.gave_up = True
                    raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
                time.sleep(0.01)
            host = "127.0.0.1"
        return self._look_up(host, *rest, **options)

    def speak(self) -> None:
        """Answer from now on, those who wait too."""
        self.answers.touch()

    def be_silent(self) -> None:
        """Answer nobody from now on."""
        self.answers.unlink(missing_ok=True)

    @property
    def waiting(self) -> int:
        """The number of threads that wait for an answer."""
        return sum(thread.is_alive() and thread.name == "delayq-connect" for thread in self.asked)


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    """Return the names of this process and of the workers that the test starts. Nothing is answered at first."""
    made = Names(tmp_path / "answers")
    monkeypatch.setenv("DELAYQ_TEST_NAMES", str(made.answers))
    monkeypatch.setattr(socket, "getaddrinfo", made)
    yield made
    made.speak()
    eventually(lambda: made.waiting == 0, "all lookups have ended")
