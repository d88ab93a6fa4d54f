"""The public names of the package: each exists, is documented, and is loaded at its first use."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import django_delayq

PACKAGE = Path(django_delayq.__file__).parent
SOURCES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent.name != "migrations"]


@pytest.mark.parametrize("name", django_delayq.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(django_delayq, name).__name__ == name
    assert name in dir(django_delayq)


def test_a_wrong_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'schedule'"):
        django_delayq.schedule  # noqa: B018


def test_lazy_names_and_public_names_are_the_same() -> None:
    assert sorted(django_delayq._HOME) == sorted(django_delayq.__all__)
    assert len(set(django_delayq.__all__)) == len(django_delayq.__all__)


def test_importing_the_package_loads_neither_models_nor_redis_nor_django() -> None:
    program = (
        "import sys, django_delayq; "
        "loaded = [m for m in sys.modules if m.split('.')[0] in ('django', 'redis', 'psycopg')"
        " or (m.startswith('django_delayq.') and m not in ('django_delayq.core', 'django_delayq.core.lazy'))]; "
        "sys.exit(repr(loaded) if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", django_delayq.__all__)
def test_every_public_name_has_a_docstring(name: str) -> None:
    thing = getattr(django_delayq, name)
    inherited = {inspect.getdoc(base) for base in inspect.getmro(thing)[1:]} if inspect.isclass(thing) else set()
    text = inspect.getdoc(thing)
    assert text
    assert text not in inherited


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_module_has_a_docstring(path: Path) -> None:
    module = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(module) or not module.body


def public_functions(module: ModuleType) -> list[str]:
    return [
        name
        for name, thing in inspect.getmembers(module, inspect.isfunction)
        if thing.__module__ == module.__name__ and not name.startswith("_") and not inspect.getdoc(thing)
    ]


API = (
    "api.actions api.scheduling broker.publisher core.actors core.clock core.durations core.outcomes core.retry"
    " core.states project.conf project.registry record.purge record.transitions restore signals"
)


@pytest.mark.parametrize("name", [*API.split(), "project.validation"])
def test_every_function_that_other_modules_call_has_a_docstring(name: str) -> None:
    assert public_functions(importlib.import_module(f"django_delayq.{name}")) == []
