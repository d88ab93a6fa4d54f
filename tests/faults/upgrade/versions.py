"""The two versions of the package: this checkout is the old one, and a changed copy of it the new one."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.workers import ROOT, Worker

HERE = Path(__file__).parent
MODELS = Path("django_delayq/models/messages.py")
# The copy gets one line more after each of these.
COLUMN = '    result = models.JSONField(_("result"), null=True, blank=True)\n'
INDEXES = '        permissions: ClassVar = verbs.permissions("message")\n        indexes: ClassVar = [\n'


# Seconds for a command on a large table.
LONG = 1800


@dataclass(frozen=True, slots=True)
class Version:
    """A version of the package, and the processes that run it on the servers of ``environment``."""

    name: str
    place: Path
    environment: Mapping[str, str]

    def worker(self) -> Worker:
        """Start a worker."""
        return _Process("-m", "django", "run_delayq", version=self)

    def producer(self, folder: Path) -> Worker:
        """Start a process that schedules until it finds a file in the folder."""
        return _Process("-m", "tests.faults.upgrade.producer", self.name, str(folder), version=self)

    def command(self, *arguments: str) -> Worker:
        """Start a command of ``manage.py``."""
        return _Process("-m", "django", *arguments, version=self)

    def call(self, *arguments: str) -> str:
        """Run a command of ``manage.py`` to its end, which must be a good one, and return its output."""
        with self.command(*arguments) as process:
            code = process.wait(LONG)
            assert code == 0, f"{arguments}: exit code {code}\n{process.log}"
            return process.log

    def variables(self) -> dict[str, str]:
        return {
            **self.environment,
            "DJANGO_SETTINGS_MODULE": "tests.faults.upgrade.settings",
            "UPGRADE_VERSION": self.name,
            "PYTHONPATH": os.pathsep.join([str(self.place), str(ROOT)]),
            # The folder in which a process starts comes before PYTHONPATH else.
            "PYTHONSAFEPATH": "1",
        }


class _Process(Worker):
    def __init__(self, *arguments: str, version: Version) -> None:
        self._start([sys.executable, *arguments], version.variables())


def old(environment: Mapping[str, str]) -> Version:
    return Version("old", ROOT, environment)


def released(environment: Mapping[str, str], folder: Path) -> tuple[Version, Version]:
    """Return the released version in a folder, which is the old one, and this checkout, which is the new one."""
    return Version("old", folder.resolve(), environment), Version("new", ROOT, environment)


def new(environment: Mapping[str, str], folder: Path) -> Version:
    """Make the new version in a folder: it has a column, an index and two migrations more."""
    shutil.copytree(ROOT / "django_delayq", folder / "django_delayq", ignore=shutil.ignore_patterns("__pycache__"))
    models = folder / MODELS
    text = models.read_text("utf-8")
    text = _after(
        COLUMN, '    origin = models.CharField(max_length=100, null=True, db_default=models.Value("unknown"))\n', text
    )
    text = _after(INDEXES, '            models.Index(fields=["origin", "id"], name="delayq_origin"),\n', text)
    models.write_text(text, "utf-8")
    for migration in HERE.glob("next_migrations/0*.py"):
        shutil.copy(migration, folder / "django_delayq/migrations")
    return Version("new", folder, environment)


def _after(line: str, more: str, text: str) -> str:
    assert line in text, f"the model of messages has no such line any more: {line}"
    return text.replace(line, line + more, 1)
