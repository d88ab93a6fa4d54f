"""The plugin of pytest, in a project of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SETTINGS = """
SECRET_KEY = "only-for-tests"
INSTALLED_APPS = ["django_delayq", "shop"]
DATABASES = {{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}}}
DELAYQ = {{"REDIS": "redis://127.0.0.1:{port}/0"}}
"""

HANDLERS = """
from django_delayq import handler

closed = []

@handler("orders.close")
def close(message):
    closed.append(message.payload["order"])
"""

TESTS = """
import pytest
from django_delayq import schedule_message
from shop.handlers import closed

@pytest.mark.django_db
@pytest.mark.parametrize("number", range(3))
def test_an_order_is_closed(delayq, number):
    schedule_message("orders.close", {"order": number}, delay="15m")
    delayq.assert_scheduled("orders.close", due="15m", count=1)
    delayq.drain("15m")
    assert closed.pop() == number

@pytest.mark.django_db(transaction=True)
def test_a_message_is_only_scheduled():
    schedule_message("orders.close", {"order": 1})
"""


def run_pytest(folder: Path, *arguments: str, settings: str | None = "settings") -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DELAYQ_", "DJANGO_"))}
    if settings is not None:
        environment["DJANGO_SETTINGS_MODULE"] = settings
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT)])
    # The plugins of the machine take seconds to be imported.
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    plugin = ["-p", "django_delayq.testing.plugin", "-p", "no:cacheprovider"]
    # Runs that share a folder for their files delete old ones at the same moment, which is a warning.
    plugin += ["--basetemp", str(folder / "files")]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *plugin, "-W", "error", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(("uses_redis", "options", "connections"), [(False, "-p xdist -n 2", 0), (True, "", 1)])
def test_a_project_is_tested_in_parallel_and_without_a_byte_to_redis(
    redis_server: object, tmp_path: Path, uses_redis: bool, options: str, connections: int
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as redis:
        redis.setblocking(False)
        (tmp_path / "settings.py").write_text(SETTINGS.format(port=redis.getsockname()[1]))
        (tmp_path / "pytest.ini").write_text(f"[pytest]\ndelayq_redis = {uses_redis}\n")
        (tmp_path / "shop").mkdir()
        for name, text in {"__init__.py": "", "handlers.py": HANDLERS, "test_shop.py": TESTS}.items():
            (tmp_path / "shop" / name).write_text(text)
        ran = run_pytest(tmp_path, "-p", "django", *options.split())
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert "4 passed" in ran.stdout
        accepted = 0
        try:
            while True:
                redis.accept()[0].close()
                accepted += 1
        except BlockingIOError:
            pass
        assert min(accepted, 1) == connections


def test_a_project_without_django_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "test_plain.py").write_text(
        "import sys\ndef test_plain():\n    assert 'django_delayq.testing.helper' not in sys.modules\n"
    )
    ran = run_pytest(tmp_path, settings=None)
    assert ran.returncode == 0, ran.stdout + ran.stderr
