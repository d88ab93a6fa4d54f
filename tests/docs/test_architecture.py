"""The files, functions, Redis keys and threads that ARCHITECTURE.rst names exist."""

from __future__ import annotations

import ast
import re
from dataclasses import astuple
from pathlib import Path

import pytest

import django_delayq
from django_delayq.broker.keys import keys
from django_delayq.broker.redis import META_FIELDS

PACKAGE = Path(django_delayq.__file__).parent
ROOT = PACKAGE.parent
TEXT = (ROOT / "ARCHITECTURE.rst").read_text(encoding="utf-8")
LITERALS = re.findall(r"``([^`]+)``", TEXT)
# ``worker/run/pool.py:Pool.submit`` and ``worker/run/pool.py``
PLACES = sorted({text for text in LITERALS if re.fullmatch(r"[\w/]+\.py:[\w.]+", text)})
FILES = sorted({text for text in LITERALS if re.fullmatch(r"[\w/-]+\.(py|lua|rst|toml)", text)})
HOMES = (PACKAGE, ROOT, PACKAGE / "broker/scripts")
assert min(len(PLACES), len(FILES)) > 20


def names_in(path: Path) -> set[str]:
    """The functions, classes, methods and constants of a module, methods with their class."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


@pytest.mark.parametrize("place", PLACES)
def test_every_function_that_is_named_exists(place: str) -> None:
    file, name = place.split(":")
    assert name in names_in(PACKAGE / file)


@pytest.mark.parametrize("file", FILES)
def test_every_file_that_is_named_exists(file: str) -> None:
    assert any((home / file).exists() for home in HOMES)


def test_every_redis_key_is_named_with_all_its_fields() -> None:
    named = set(re.findall(r"``(\{N\}:[\w:]+)``", TEXT))
    assert named == set(astuple(keys("N", "Q")))
    assert {field for field in META_FIELDS if f"``{field}``" not in TEXT} == set()


def test_every_thread_that_is_named_exists_and_none_is_missing() -> None:
    sources = [path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")]
    made = {f"delayq-{name}" for source in sources for name in re.findall(r"^    thread = \"([\w-]+)\"", source, re.M)}
    made |= {
        name.rstrip("-") for source in sources for name in re.findall(r"name(?:_prefix)?=f?\"(delayq-[\w-]+)", source)
    }
    named = {name.removesuffix("-N") for name in re.findall(r"^``(delayq-[\w-]+)``", TEXT, re.M)}
    assert made == named
