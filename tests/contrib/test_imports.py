"""Integrations are imported only when asked for, and name the extra that they need."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# The library that each integration needs. The extra has the name of the integration.
LIBRARIES = {"opentelemetry": "opentelemetry", "sentry": "sentry_sdk"}


def test_every_integration_has_its_extra() -> None:
    assert LIBRARIES.keys() <= PROJECT["optional-dependencies"].keys()


@pytest.mark.parametrize(("integration", "library"), LIBRARIES.items())
def test_a_missing_library_is_an_error_that_names_the_extra(
    integration: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"django_delayq.contrib.{integration}", raising=False)
    with pytest.raises(ImproperlyConfigured, match=rf"pip install 'django-delayq\[{integration}\]'"):
        importlib.import_module(f"django_delayq.contrib.{integration}")


def test_a_worker_imports_no_integration_by_itself() -> None:
    code = (
        "import sys, django; django.setup()\n"
        "import django_delayq.api.scheduling, django_delayq.worker.processes.process\n"
        "print([name for name in sys.modules if name.startswith("
        f"{('sentry_sdk', 'prometheus_client', *(f'django_delayq.contrib.{name}' for name in LIBRARIES))})])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"


def test_opentelemetry_finds_the_instrumentor_by_its_entry_point() -> None:
    instrumentation = pytest.importorskip("opentelemetry.instrumentation.instrumentor")
    path = PROJECT["entry-points"]["opentelemetry_instrumentor"]["delayq"]
    assert issubclass(import_string(path.replace(":", ".")), instrumentation.BaseInstrumentor)
