"""Fixtures that start workers as processes, on the database of the tests and with short intervals."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import pytest

from django_delayq import schedule_message
from django_delayq.models import Message
from tests.support.workers import Worker, eventually

HASTY: dict[str, Any] = {"GRACE": 0.3, "POLL_INTERVAL": 0.1}
# For tests in which leases of a second run out again and again. A lease that is late is still confirmed for longer than
# a busy machine delays its renewal.
QUICK_TAKE_OVER: dict[str, float] = {
    "process.Parts.upkeep.reap_interval": 0.3,
    "process.Parts.upkeep.confirm_after": 1.5,
    "process.Parts.upkeep.leader_lease": 1.5,
    "process.Parts.upkeep.standby_interval": 0.3,
    # A frozen worker may have swallowed the wake-up that was meant for another one, which then sleeps on.
    "process.Parts.tuning.idle_wait": 1.0,
}


Configure = Callable[..., None]


class Start(Protocol):
    def __call__(
        self, *arguments: str, unknown: tuple[str, ...] = ..., delayq: dict[str, object] | None = ..., prefix: str = ...
    ) -> Worker: ...


@pytest.fixture
def configure(settings: Any) -> Configure:
    """Change DELAYQ, for this process and for the workers started from now on."""

    def change(**values: Any) -> None:
        settings.DELAYQ = {**settings.DELAYQ, **values}

    change(**HASTY)
    return change


@pytest.fixture(params=["redis", "no-redis"])
def timed_by(request: pytest.FixtureRequest, configure: Configure) -> str:
    """Run the test with Redis, and again without."""
    if request.param == "no-redis":
        configure(REDIS=None)
    return str(request.param)


@pytest.fixture
def start(transactional_db: None, configure: Configure) -> Iterator[Start]:
    """Start workers, which are killed after the test."""
    workers: list[Worker] = []
    with ExitStack() as stack:

        def begin(*arguments: str, **options: Any) -> Worker:
            given = list(arguments)
            if "--processes" not in given:
                given += ["--processes", "1"]
            workers.append(stack.enter_context(Worker(*given, **options)))
            return workers[-1]

        yield begin
    for number, worker in enumerate(workers, 1):
        # pytest shows this when the test fails.
        print(f"--- log of worker {number} ---\n{worker.log}")


@pytest.fixture
def set_pace(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, float]], None]:
    """Set constants in the modules of the workers started from now on."""
    return lambda pace: monkeypatch.setenv("DELAYQ_TEST_PACE", json.dumps(pace))


@pytest.fixture
def quick_take_over(set_pace: Callable[[dict[str, float]], None]) -> None:
    """Have workers take over from dead or frozen ones sooner: their messages, and to lead."""
    set_pace(QUICK_TAKE_OVER)


def with_settings(folder: Path, text: str) -> str:
    """Return the prefix of a worker's command that has these lines added to its settings."""
    (folder / "own_settings.py").write_text(f"from tests.support.worker_settings import *\n\n{text}\n")
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "."), str(Path.cwd())])
    return f"env DJANGO_SETTINGS_MODULE=own_settings PYTHONPATH={path}"


class Gate:
    """The folder through which a test and its t.gate handlers talk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.payload: dict[str, Any] = {"folder": str(folder)}

    def begun(self, *names: int) -> bool:
        """Tell whether a handler has begun: that of this message, of this delivery of it, or any."""
        return any(self.folder.glob("-".join(["begun", *map(str, names), *["*"][len(names) // 2 :]])))

    def running(self, topic: str = "t.gate", **options: Any) -> Message:
        """Schedule a message, and wait until its handler has begun."""
        message = schedule_message(topic, self.payload, **options)
        eventually(lambda: self.begun(message.pk), "the handler begins")
        return message

    def how_many_began(self) -> int:
        return len(list(self.folder.glob("begun-*")))

    def open(self, name: str = "go") -> None:
        """Let pass: "go" everybody, "go-1" first deliveries, "go-7-1" that of message 7."""
        (self.folder / name).touch()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    there = Gate(tmp_path)
    yield there
    there.open()
