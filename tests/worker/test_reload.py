"""``run_delayq --reload`` takes changes of the code, and goes on after code that could not be loaded."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from django_delayq import schedule_message
from django_delayq.core.states import State
from tests.support.processes import Start
from tests.support.record_of import wait_until

pytestmark = pytest.mark.usefixtures("transactional_db")

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
