"""Every example of every page: its syntax, its imports, its commands."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
import shlex
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, get_commands, load_command_class

from .blocks import DOCS, PAGES, README, ROOT, Block, blocks

BLOCKS = [block for page in PAGES for block in blocks(page)]
PYTHON = [block for block in BLOCKS if block.language in ("python", "pycon")]


def test_every_page_with_examples_in_python_is_run() -> None:
    tests = "".join(path.read_text("utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    run = re.findall(r'(?:run_page\(|follow\(mysite, |DOCS / )"([\w/-]+)', tests)
    pages = {block.page for block in PYTHON if block.is_run}
    assert pages - {DOCS / f"{page}.rst" for page in run} == {README}


def test_no_page_hides_python_in_a_plain_literal_block() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in re.finditer(r"(?<!\.\. )\w.*::\n\n((?:(?:    .*)?\n)+)", text):
            assert not re.search(r"^ +(import|from \S+ import|def|@\w+\()", found[1], re.MULTILINE), found[1]


def needs(block: Block) -> Any:
    """Return the example, marked as one that imports the console if it does."""
    marks = [pytest.mark.console] if "django_delayq.console" in block.source else []
    return pytest.param(block, marks=marks, id=str(block))


@pytest.mark.parametrize("block", [needs(block) for block in PYTHON])
def test_an_example_is_python_and_imports_what_there_is(block: Block) -> None:
    if block.language == "pycon":
        assert doctest.DocTestParser().get_examples(block.text)
    for node in ast.walk(ast.parse(block.source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("django_delayq"):
            assert node.module is not None
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"


def lines_of_commands() -> list[str]:
    """Every call of a command of ours in the pages, as words of a shell."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", "")
        # In examples, in YAML, and in the text. An ellipsis stands for what a reader fills in.
        found += re.findall(r"manage\.py ((?:run_delayq|delayq_\w+)\b[^`\n]*)", text)
        found += re.findall(r"``((?:run_delayq|delayq_\w+) -[^`]*)``", text.replace("\n", " "))
        found += [words.replace('", "', " ") for words in re.findall(r'"manage.py", "(run_delayq[^]]*)"\]', text)]
    return sorted({line.split(" | ")[0].split(" # ")[0].strip().rstrip(".,:") for line in found})


COMMANDS = lines_of_commands()
assert len(COMMANDS) > 15


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_an_example_can_be_called(line: str) -> None:
    name, *words = shlex.split(line.replace("…", "x"))
    parser = parser_of(name)
    try:
        parser.parse_args(words)
    except CommandError as error:
        raise AssertionError(f"{line}: {error}") from error


def parser_of(name: str) -> ArgumentParser:
    command = load_command_class(get_commands()[name], name)
    parser = command.create_parser("manage.py", name)
    parser.called_from_command_line = False
    return parser


def test_every_page_is_in_a_table_of_contents() -> None:
    listed = {"index"}
    for page in sorted(DOCS.rglob("index.rst")):
        folder = page.parent.relative_to(DOCS)
        toctree = page.read_text(encoding="utf-8").partition(".. toctree::")[2]
        listed |= {(folder / name).as_posix() for name in re.findall(r"^   ([\w/-]+)$", toctree, re.MULTILINE)}
    assert listed == {page.relative_to(DOCS).with_suffix("").as_posix() for page in DOCS.rglob("*.rst")}


def test_the_list_of_guides_has_a_line_for_each() -> None:
    listed, _toctree, names = (DOCS / "howto/index.rst").read_text("utf-8").partition(".. toctree::")
    pages = re.findall(r"^   ([\w-]+)$", names, re.MULTILINE)
    assert re.findall(r"^\* :doc:`(?:[^`<]*<)?([\w-]+)>?`: \S", listed, re.MULTILINE) == pages


@pytest.mark.parametrize("word", ["GDPR", "approval", "pydantic", "dataclass", "progress", "trigger"])
def test_a_search_for_what_people_ask_finds_a_section_of_a_guide(word: str) -> None:
    """Sphinx puts a page first that has the word in a heading."""
    texts = [page.read_text("utf-8") for page in PAGES if page.parent.name == "howto"]
    headings = [line for text in texts for line in re.findall(r"^(.+)\n=+$", text, re.MULTILINE)]
    assert [line for line in headings if re.search(rf"\b{word}\b", line, re.IGNORECASE)]


def test_files_that_the_texts_name_exist() -> None:
    for page in PAGES:
        for name in re.findall(r"``((?:docs|tests|testproject|benchmarks)/[\w./-]*\w)/?``", page.read_text("utf-8")):
            assert (ROOT / name).exists(), f"{page.name}: {name}"
