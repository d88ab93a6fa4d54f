"""Tries a wheel as a stranger would: an empty environment, an empty project, one message that is delivered."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SETTINGS = """
INSTALLED_APPS += ["django_delayq", "django_delayq.console", "orders"]
DATABASES["default"] = {database!r}
DELAYQ = {{"REDIS": {redis!r}}}
"""

HANDLERS = """
from django_delayq import handler


@handler("orders.close")
def close(message):
    print("closed order", message.payload["order"], flush=True)
"""

SCHEDULE = """
from django_delayq import schedule_message

schedule_message("orders.close", {"order": 17}, delay=0)
"""

LOOK = """
from django_delayq.models import Message

print("the message is", Message.objects.get(topic="orders.close").state)
"""


class Trial:
    """An environment of one Python with the wheel and what it depends on, and nothing of this checkout."""

    def __init__(self, interpreter: Path, folder: Path) -> None:
        self._folder = folder
        self._python = folder / "env" / "bin" / "python"
        self._call([str(interpreter), "-m", "venv", str(folder / "env")], folder)

    def install(self, wheel: Path) -> str:
        """Install the wheel with psycopg's library, and return the version of Django that came with it."""
        # An old pip says on its error output that there is a newer one.
        self._run("-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"{wheel}[binary]")
        self._run("-m", "pip", "check")
        return self._run("-m", "django", "--version").strip()

    def deliver(self, name: str, database: dict[str, object], redis: str | None) -> None:
        """Make a project, migrate, schedule one message, and see that a worker delivers it."""
        folder = self._folder / name
        (folder / "orders").mkdir(parents=True)
        self._run("-m", "django", "startproject", "mysite", str(folder))
        with (folder / "mysite" / "settings.py").open("a", encoding="utf-8") as settings:
            settings.write(SETTINGS.format(database=database, redis=redis))
        (folder / "orders" / "__init__.py").touch()
        (folder / "orders" / "handlers.py").write_text(HANDLERS, encoding="utf-8")
        for words in (["check"], ["migrate", "--verbosity", "0"], ["makemigrations", "--check"]):
            self._run("manage.py", *words, folder=folder)
        self._run("manage.py", "shell", "-c", SCHEDULE, folder=folder)
        said = self._run("manage.py", "run_delayq", "--once", folder=folder)
        said += self._run("manage.py", "shell", "-c", LOOK, folder=folder)
        for line in ("closed order 17", "the message is consumed"):
            if line not in said:
                raise SystemExit(f"{name}: {line!r} is not in what the worker and the record say:\n{said}")

    def _run(self, *arguments: str, folder: Path | None = None) -> str:
        return self._call([str(self._python), *arguments], folder or self._folder)

    def _call(self, command: list[str], folder: Path) -> str:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("DELAYQ_", "PYTHON"))}
        environment.pop("DJANGO_SETTINGS_MODULE", None)
        environment["PYTHONWARNINGS"] = "error:::django_delayq"
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout + done.stderr
