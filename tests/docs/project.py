"""Makes a Django project in a folder of its own by following a page of the documentation to the letter."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Self

import redis

from tests.support.workers import eventually

from .blocks import ROOT, Block

# Commands that a reader types and a test need not: what they install is there, what they start is not needed, or they
# set up a machine.
NOT_NEEDED = re.compile(
    r"git clone|python3 -m venv|\. \.venv/|pip install|python manage\.py (createsuperuser|runserver|shell$)"
    r"|sudo |journalctl |cd /|set -a"
)
REDIS = "redis://localhost:6379/0"


class Project:
    """Follows the examples of a page: writes its files, runs its commands, and compares what they print.

    ``quicker`` replaces parts of the examples, so that a test does not wait as long as a reader.
    """

    def __init__(self, folder: Path, redis_url: str, quicker: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.redis_url = redis_url
        self.quicker = quicker or {}
        self._redis = redis.Redis.from_url(redis_url)
        self._worker: subprocess.Popen[bytes] | None = None
        self._log = folder / "worker.log"

    @property
    def log(self) -> str:
        """All that the worker has printed."""
        return self._log.read_text(encoding="utf-8") if self._log.exists() else ""

    def follow(self, block: Block) -> None:
        """Do what an example says."""
        if block.language == "python":
            assert block.path is not None, f"{block} is no file of the project"
            self.write(block.path, block.text)
        elif block.language == "console":
            for command, output in block.commands:
                self.run(command, output)
        elif block.language == "pycon":
            self.python(_PYCON.format(text=self._changed(block.text), name=str(block)))
        elif block.language == "text":
            eventually(lambda: block.text.strip() in self.log, f"the worker prints {block.text!r}:\n{self.log}")

    def write(self, path: str, text: str) -> None:
        """Write a file of the project; add to the settings, which are there already."""
        file = self.folder / path
        mode = "a" if file.name == "settings.py" and file.exists() else "w"
        with file.open(mode, encoding="utf-8") as stream:
            stream.write("\n" + self._changed(text).replace(REDIS, self.redis_url))

    def run(self, command: str, output: str = "") -> None:
        """Run a command of a shell; ``output`` is what it prints, sooner or later."""
        if NOT_NEEDED.match(command):
            return
        words = shlex.split(command)
        if words[0] == "cd":
            self.folder /= words[1]
        elif words[0] == "redis-cli":
            eventually(lambda: self._redis_cli(words[1:]) == output.strip(), f"{command} prints {output}")
        elif words[:3] == ["python", "manage.py", "run_delayq"] and "--once" not in words:
            self._start_worker(words[1:])
        elif words[0] == "django-admin":
            self._call(["-m", "django", *words[1:]], output)
        else:
            assert words[0] == "python", command
            self._call(words[1:], output)

    def python(self, code: str) -> str:
        """Run code in the project, with its apps ready."""
        return self._call(["-c", f"import django; django.setup()\n{code}"], "")

    def _changed(self, text: str) -> str:
        for old, new in self.quicker.items():
            text = text.replace(old, new)
        return text

    def _redis_cli(self, words: list[str]) -> str:
        answer = self._redis.execute_command(*words)
        return f"(integer) {answer}" if type(answer) is int else "OK" if answer is True else str(answer)

    def _environment(self) -> dict[str, str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DELAYQ_")}
        settings = next(iter(self.folder.glob("*/settings.py")), None)
        if settings is not None:
            environment["DJANGO_SETTINGS_MODULE"] = f"{settings.parent.name}.settings"
        else:
            environment.pop("DJANGO_SETTINGS_MODULE", None)
        # The package of this checkout, wherever another one may be installed.
        return {**environment, "PYTHONPATH": os.pathsep.join([str(self.folder), str(ROOT)])}

    def _call(self, arguments: list[str], output: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"
        if output.strip():
            pattern = re.escape(output.strip()).replace("…", ".*")
            assert re.search(pattern, done.stdout), f"{arguments} printed\n{done.stdout}\nnot\n{output}"
        return done.stdout

    def _start_worker(self, arguments: list[str]) -> None:
        with self._log.open("wb") as log:
            self._worker = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=self.folder,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._redis.close()
        if self._worker is not None:
            self._worker.send_signal(signal.SIGTERM)
            try:
                assert self._worker.wait(timeout=40) == 0, self.log
            finally:
                self._worker.kill()
                self._worker.wait()
        if exc_info[0] is not None:
            print(self.log)


_PYCON = """
import doctest
test = doctest.DocTestParser().get_doctest({text!r}, {{}}, {name!r}, None, 0)
outcome = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False).run(test)
raise SystemExit(min(outcome.failed, 1))
"""
