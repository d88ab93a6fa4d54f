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
# The library that each integration needs, and the extra.
LIBRARIES = {
    "healthcheck": ("health_check", "health"),
    "opentelemetry": ("opentelemetry", "opentelemetry"),
    "sentry": ("sentry_sdk", "sentry"),
}


def test_every_integration_has_its_extra() -> None:
    assert {extra for _library, extra in LIBRARIES.values()} <= PROJECT["optional-dependencies"].keys()


@pytest.mark.parametrize("integration", LIBRARIES)
def test_a_missing_library_is_an_error_that_names_the_extra(integration: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library, extra = LIBRARIES[integration]
    for module in [library, *(name for name in sys.modules if name.startswith(f"{library}."))]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"django_delayq.contrib.{integration}", raising=False)
    with pytest.raises(ImproperlyConfigured, match=rf"pip install 'django-delayq\[{extra}\]'"):
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
