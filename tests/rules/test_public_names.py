"""The public names of the package: each exists, is documented, and is loaded at its first use."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from types import ModuleType

import pytest

import django_delayq

from .sources import SOURCES, name_of


@pytest.mark.parametrize("name", django_delayq.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(django_delayq, name).__name__ == name
    assert name in dir(django_delayq)


@pytest.mark.parametrize("package", ["extensions", "models", "recurring", "testing"])
def test_every_name_that_a_package_lists_is_there(package: str) -> None:
    module = importlib.import_module(f"django_delayq.{package}")
    assert [name for name in module.__all__ if getattr(module, name, None) is None] == []


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


def test_every_module_has_a_docstring() -> None:
    silent = [name_of(path) for path, module in SOURCES.items() if module.body and not ast.get_docstring(module)]
    assert silent == []


def public_functions(module: ModuleType) -> list[str]:
    return [
        name
        for name, thing in inspect.getmembers(module, inspect.isfunction)
        if thing.__module__ == module.__name__ and not name.startswith("_") and not inspect.getdoc(thing)
    ]


API = (
    "api.actions api.scheduling broker.publisher core.actors core.clock core.durations core.outcomes core.retry"
    " core.states project.conf project.registry project.validation record.purge record.transitions restore.engine"
    " restore.filling restore.horizon restore.reading signals"
)


@pytest.mark.parametrize("name", API.split())
def test_every_function_that_other_modules_call_has_a_docstring(name: str) -> None:
    assert public_functions(importlib.import_module(f"django_delayq.{name}")) == []
