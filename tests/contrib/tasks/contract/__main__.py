"""``python -m tests.contrib.tasks.contract [FOLDER]`` runs Django's own tests of tasks against the backend.

The tests are in Django's source distribution, which pip downloads into the folder (default: a temporary one), in the
version that is installed. They are subclassed with this backend's settings; nothing in them is changed. The last line
is the score, and the exit code is 1 when a test fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import unittest
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import django

# The tests that assert a property of the backend for which they were written, by their names and with the reason.
NOT_PORTABLE = {
    "Core.test_using_correct_backend": "asserts the class of the backend",
    "Core.test_get_backend": "asserts the class of the backend",
    "Deferred.test_using_correct_backend": "asserts the class of the backend",
    "Deferred.test_refresh_result": "changes a result in the memory of the dummy backend",
    "Deferred.test_refresh_result_async": "changes a result in the memory of the dummy backend",
    "Executed.test_using_correct_backend": "asserts the class of the backend",
    "Executed.test_cannot_get_result": "asserts that the backend has no get_result, which this one has",
    "Executed.test_cannot_refresh_result": "asserts that the backend has no get_result, which this one has",
    "Executed.test_cannot_pass_run_after": "asserts that the backend has no run_after, which this one has",
}

BACKENDS = "tests.contrib.tasks.contract.backends"
IMMEDIATE = "django.tasks.backends.immediate.ImmediateBackend"


def main(folder: Path) -> int:
    sys.path.insert(0, str(fetch(folder)))
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.contrib.tasks.contract.settings"
    # Some of the tests call sync methods in async functions: the backends for which they were written have no database.
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "1"
    django.setup()
    from django.test.runner import DiscoverRunner

    # The database ends with its server. To drop it would fail: threads of async tests have connections to it.
    runner = DiscoverRunner(interactive=False, keepdb=True)
    runner.setup_test_environment()
    databases = runner.setup_databases(aliases={"default": True})
    try:
        every = {
            _name(test): test for case in cases() for test in unittest.defaultTestLoader.loadTestsFromTestCase(case)
        }
        if missing := NOT_PORTABLE.keys() - every.keys():
            raise SystemExit(f"Django has no such tests: {', '.join(sorted(missing))}")
        portable = {name: test for name, test in every.items() if name not in NOT_PORTABLE}
        outcome = runner.run_suite(unittest.TestSuite(portable.values()))
    finally:
        runner.teardown_databases(databases)
        runner.teardown_test_environment()
    failed = {_name(test) for test, _trace in [*outcome.failures, *outcome.errors]}
    passed = len(portable) - len(failed)
    for name, reason in NOT_PORTABLE.items():
        print(f"left out: {name}: {reason}")
    print(f"Django {django.__version__}: {passed} of {len(portable)} portable tests pass, {len(NOT_PORTABLE)} left out")
    return int(not outcome.wasSuccessful())


def _name(test: Any) -> str:
    """Return the name of a test, also for one of its subtests."""
    return ".".join(getattr(test, "test_case", test).id().split(".")[-2:])


def cases() -> Iterator[type[unittest.TestCase]]:
    """Yield Django's test cases with this backend's settings, in transactions that are committed."""
    from django.test import TransactionTestCase, override_settings

    test_tasks, test_dummy_backend, test_immediate_backend = (
        import_module(f"tasks.{name}") for name in ("test_tasks", "test_dummy_backend", "test_immediate_backend")
    )

    def backend(name: str, *queues: str) -> dict[str, object]:
        return {"BACKEND": f"{BACKENDS}.{name}", "QUEUES": list(queues)}

    several = {
        "default": backend("Inspectable", "default", "queue_1"),
        "immediate": {"BACKEND": IMMEDIATE, "QUEUES": []},
        "missing": {"BACKEND": "does.not.exist"},
    }
    for name, case, tasks in (
        ("Core", test_tasks.TaskTestCase, several),
        ("Deferred", test_dummy_backend.DummyBackendTestCase, {"default": backend("Inspectable")}),
        ("Executed", test_immediate_backend.ImmediateBackendTestCase, {"default": backend("Eager")}),
    ):
        made = type(name, (case, TransactionTestCase), {"databases": {"default"}})
        yield override_settings(TASKS=tasks)(made)


def fetch(folder: Path) -> Path:
    """Download the sources of the installed Django unless they are there, and return the folder of its tests."""
    sources = folder / f"django-{django.__version__}"
    if not (sources / "tests" / "tasks").exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*command, "--dest", str(folder), f"django=={django.__version__}"], check=True)
        (archive,) = folder.glob(f"[Dd]jango-{django.__version__}.tar.gz")
        with tarfile.open(archive) as content:
            inside = [member for member in content if "/tests/tasks/" in member.name]
            content.extractall(folder, inside, filter="data")
    return sources / "tests"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
        sys.exit(main(Path(sys.argv[1])))
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(main(Path(temporary)))
