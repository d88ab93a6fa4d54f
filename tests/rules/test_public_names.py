"""The public names of the package: each exists, is documented, and is loaded at its first use."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys

import pytest

import django_delayq

from .sources import PACKAGE, SOURCES, name_of


def test_every_public_name_is_there_and_has_a_docstring_of_its_own() -> None:
    assert sorted(django_delayq._HOME) == sorted(set(django_delayq.__all__)) == sorted(django_delayq.__all__)
    assert set(django_delayq.__all__) <= set(dir(django_delayq))
    for name in django_delayq.__all__:
        thing = getattr(django_delayq, name)
        assert thing.__name__ == name
        inherited = {inspect.getdoc(base) for base in inspect.getmro(thing)[1:]} if inspect.isclass(thing) else set()
        assert inspect.getdoc(thing) not in {None, "", *inherited}, name


@pytest.mark.parametrize("package", ["embedded", "extensions", "models", "pull", "recurring", "testing"])
def test_every_name_that_a_package_lists_is_there(package: str) -> None:
    module = importlib.import_module(f"django_delayq.{package}")
    assert [name for name in module.__all__ if getattr(module, name, None) is None] == []


def test_a_wrong_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'schedule'"):
        django_delayq.schedule  # type: ignore[attr-defined]  # noqa: B018


def test_importing_the_package_loads_neither_models_nor_redis_nor_django() -> None:
    program = (
        "import sys, django_delayq; "
        "loaded = [m for m in sys.modules if m.split('.')[0] in ('django', 'redis', 'psycopg')"
        " or (m.startswith('django_delayq.') and m not in ('django_delayq.core', 'django_delayq.core.lazy'))]; "
        "sys.exit(repr(loaded) if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_module_has_a_docstring() -> None:
    silent = [name_of(path) for path, module in SOURCES.items() if module.body and not ast.get_docstring(module)]
    assert silent == []


API = (
    "api.actions api.scheduling broker.publisher core.actors core.clock core.durations core.outcomes core.retry"
    " core.states project.conf project.registry project.validation record.purge record.transitions restore.engine"
    " restore.filling restore.horizon restore.reading signals"
)


def test_every_function_that_other_modules_call_has_a_docstring() -> None:
    for name in API.split():
        path = PACKAGE / f"{name.replace('.', '/')}.py"
        # The last of several with one name is no overload for type checkers.
        functions = {node.name: node for node in SOURCES[path].body if isinstance(node, ast.FunctionDef)}
        public = {name: ast.get_docstring(node) for name, node in functions.items() if not name.startswith("_")}
        assert [name for name, text in public.items() if not text] == [], path
