"""How the processes of a worker start: functions of the project, and changed code."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from django_delayq import schedule_message, worker_started
from django_delayq.core.states import State
from tests.app.models import Effect
from tests.support.processes import Start
from tests.support.record_of import log_of, wait_until
from tests.support.workers import eventually

pytestmark = pytest.mark.usefixtures("transactional_db")


LOST = "do not run in the worker processes: early-bird"


def lines(folder: Path) -> list[list[str]]:
    """Return the lines that the listener of each process has written."""
    return [path.read_text().splitlines() for path in folder.glob("log-*")]


@pytest.mark.parametrize(
    "arguments",
    [["--max-messages", "2"], ["--once"], ["--max-messages", "2", "--reload"]],
    ids=["worker", "once", "reload"],
)
def test_functions_begin_before_the_first_message_and_end_after_the_last(
    start: Start, tmp_path: Path, arguments: list[str]
) -> None:
    message, on_loop = schedule_message("t.started", 1), schedule_message("t.started_async")
    worker = start(*arguments, prefix=f"env DELAYQ_TEST_STARTED={tmp_path}")
    wait_until(message, State.CONSUMED)
    wait_until(on_loop, State.CONSUMED)
    if "--reload" in arguments:
        eventually(lambda: "has listened" in str(lines(tmp_path)), "the functions have ended")
    else:
        assert worker.wait() == 0
    assert lines(tmp_path) == [["listens", "has counted", "message 1", "has disconnected", "has listened"]]
    assert Effect.objects.get(message_id=on_loop.pk).note == "of delayq-event-loop"


def test_each_process_has_functions_of_its_own(start: Start, tmp_path: Path) -> None:
    worker = start("--processes", "2", prefix=f"env DELAYQ_TEST_STARTED={tmp_path}")
    eventually(lambda: [log[:2] for log in lines(tmp_path)] == [["listens", "has counted"]] * 2, "both begin")
    worker.stop()
    assert [log[-1] for log in lines(tmp_path)] == ["has listened"] * 2


@pytest.mark.parametrize(
    ("fails", "words"), [("sync", "the project cannot start"), ("async", "the project cannot connect")]
)
@pytest.mark.parametrize("arguments", [[], ["--once"]], ids=["worker", "once"])
def test_a_function_that_fails_ends_its_process_and_costs_no_message_an_attempt(
    start: Start, tmp_path: Path, fails: str, words: str, arguments: list[str]
) -> None:
    message = schedule_message("t.started_async")
    given = f"env DELAYQ_TEST_STARTED={tmp_path} DELAYQ_TEST_STARTED_FAILS={fails}"
    worker = start(*arguments, prefix=given)
    worker.wait_for(f"RuntimeError: {words}")
    if arguments:
        assert worker.wait() == 1
    else:
        worker.wait_for(r"died \(exit code 1\)")
        worker.stop()
    assert [move.to_state for move in log_of(message)] == [State.SCHEDULED]
    start(prefix=f"env DELAYQ_TEST_STARTED={tmp_path}")
    wait_until(message, State.CONSUMED)


@pytest.mark.parametrize("is_early", [True, False], ids=["early", "none"])
def test_threads_that_the_processes_will_lack_are_told_before_the_first_fork(
    start: Start, tmp_path: Path, is_early: bool
) -> None:
    worker = start("--max-messages", "1", prefix=f"env DELAYQ_TEST_STARTED={tmp_path}" if is_early else "")
    schedule_message("t.ok")
    assert worker.wait() == 0
    assert worker.count(re.escape(LOST)) == is_early
    assert worker.count("do not run in the worker processes") == is_early


@pytest.mark.parametrize("function", [print, lambda message: None, type], ids=["built-in", "argument", "class"])
def test_what_cannot_be_called_without_arguments_is_refused(function: object) -> None:
    with pytest.raises(TypeError, match=r"@worker_started decorates a function|cannot be called without arguments"):
        worker_started(function)  # type: ignore[type-var]


# --- --reload ---------------------------------------------------------------------------------------------------------


SETTINGS = """
from tests.support.worker_settings import *

INSTALLED_APPS = [*INSTALLED_APPS, "edited"]
LOGGING["loggers"]["django.utils.autoreload"] = {"handlers": ["console"], "level": "DEBUG"}
"""
# Django's reloader compares with what it saw first: it overlooks what is saved between the import and this line.
WATCHED = r"File \S+/edited/handlers\.py first seen"
HANDLERS = """
from django_delayq import handler

print("loaded {version}", flush=True)

@handler("t.edited{version}")
def edited(message):
    pass
"""


class Project:
    """A project that a developer edits."""

    def __init__(self, folder: Path) -> None:
        self.app = folder / "edited"
        self.app.mkdir()
        (self.app / "__init__.py").touch()
        (folder / "edited_settings.py").write_text(SETTINGS)

    def save(self, text: str) -> None:
        """Write the handlers as an editor does: at once, and with a time of their own."""
        draft = self.app / "draft"
        draft.write_text(text)
        draft.replace(self.app / "handlers.py")


def test_code_that_cannot_be_loaded_ends_nothing(start: Start, tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.save(HANDLERS.format(version=1))
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    worker = start(
        "--reload", prefix=f"env PYTHONPATH={paths} PYTHONDONTWRITEBYTECODE=1 DJANGO_SETTINGS_MODULE=edited_settings"
    )
    wait_until(schedule_message("t.edited1"), State.CONSUMED)
    worker.wait_for(WATCHED)
    project.save("this is no Python")
    worker.wait_for("SyntaxError")
    worker.wait_for("starts again when code changes")
    project.save(HANDLERS.format(version=2))
    wait_until(schedule_message("t.edited2"), State.CONSUMED)
    assert worker.process.poll() is None
    worker.send(signal.SIGTERM)
    worker.wait()
