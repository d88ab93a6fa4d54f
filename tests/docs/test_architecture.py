"""What the pages for developers name exists: files, functions, Redis keys, threads, and the parts of a decision."""

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
THREADS = ROOT / "docs/explanation/threads.rst"
KEYS = ROOT / "docs/reference/redis-keys.rst"
DECISIONS = sorted(path for path in (ROOT / "docs/explanation/decisions").glob("*.rst") if path.stem != "index")
PAGES = [ROOT / "ARCHITECTURE.rst", THREADS, *DECISIONS]
LITERALS = [text for page in PAGES for text in re.findall(r"``([^`]+)``", page.read_text(encoding="utf-8"))]
# ``worker/run/pool.py:Pool.submit`` and ``worker/run/pool.py``
PLACES = sorted({text for text in LITERALS if re.fullmatch(r"[\w/]+\.py:[\w.]+", text)})
FILES = sorted({text for text in LITERALS if re.fullmatch(r"[\w/-]+\.(py|lua|rst|toml)", text)})
HOMES = (PACKAGE, ROOT, PACKAGE / "broker/scripts")
assert min(len(PLACES), len(FILES)) > 20


def names_in(path: Path) -> set[str]:
    """The functions, classes, methods, fields and constants of a module, methods and fields with their class."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
            names |= {f"{node.name}.{ast.unparse(one.target)}" for one in node.body if isinstance(one, ast.AnnAssign)}
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
    text = KEYS.read_text(encoding="utf-8")
    named = set(re.findall(r"``(\{delayq\}:[\w:]+)``", text))
    assert named == set(astuple(keys("delayq", "mail")))
    assert {field for field in META_FIELDS if f"``{field}``" not in text} == set()


def test_every_thread_that_is_named_exists_and_none_is_missing() -> None:
    sources = [path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")]
    made = {f"delayq-{name}" for source in sources for name in re.findall(r"^    thread = \"([\w-]+)\"", source, re.M)}
    made |= {
        name.rstrip("-") for source in sources for name in re.findall(r"name(?:_prefix)?=f?\"(delayq-[\w-]+)", source)
    }
    text = THREADS.read_text(encoding="utf-8")
    named = {name.removesuffix("-N") for name in re.findall(r"^``(delayq-[\w-]+)``", text, re.M)}
    assert made == named


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_decision_has_a_date_and_says_what_was_dropped(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.search(r"^:Date: 20\d\d-\d\d-\d\d$", text, re.M)
    assert re.findall(r"^\*\*(\w+)\.\*\*", text, re.M) == ["Context", "Choice", "Dropped"]


def test_decisions_are_listed_once_each_with_the_newest_first() -> None:
    listed = re.findall(r"^   ([\w-]+)$", (DECISIONS[0].parent / "index.rst").read_text(encoding="utf-8"), re.M)
    assert sorted(listed) == [page.stem for page in DECISIONS]
    dates = {page.stem: re.findall(r"^:Date: (.+)$", page.read_text(encoding="utf-8"), re.M)[0] for page in DECISIONS}
    assert [dates[name] for name in listed] == sorted(dates.values(), reverse=True)
