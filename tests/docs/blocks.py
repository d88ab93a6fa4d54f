"""Finds the examples in the pages of the documentation.

An example is a ``.. code-block::``. One that needs another package or another machine has the comment ``.. not run: the
reason`` before it: then only its syntax is checked. The first line of an example that is a file of a project is a
comment with the file's path.
"""

from __future__ import annotations

import doctest
import linecache
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.rst"
PAGES = [README, ROOT / "CONTRIBUTING.rst", ROOT / "ARCHITECTURE.rst", *sorted(DOCS.rglob("*.rst"))]

_BLOCK = re.compile(r"(?P<indent>^ *)\.\. code-block:: (?P<language>\w+)\n(?: +:\w+:.*\n)*\n", re.MULTILINE)
_NOT_RUN = re.compile(r"\.\. not run: .+\n\n\Z")
_FILE = re.compile(r"# ([\w./-]+\.py)\n")
_PROMPT = re.compile(r"^\$ ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """One example."""

    page: Path
    line: int
    language: str
    text: str
    is_run: bool

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def path(self) -> str | None:
        """The file of the project that the example is; None when it is not a file."""
        found = _FILE.match(self.text)
        return found[1] if found else None

    @property
    def commands(self) -> list[tuple[str, str]]:
        """The commands of a console example, each with the output that it is said to have."""
        parts = _PROMPT.split(self.text.replace("\\\n", ""))[1:]
        return [(command.strip(), output) for command, _newline, output in (part.partition("\n") for part in parts)]

    @property
    def source(self) -> str:
        """The Python code of a Python or pycon example."""
        if self.language != "pycon":
            return self.text
        return "".join(example.source for example in doctest.DocTestParser().get_examples(self.text))


def text_of(name: str) -> str:
    """The text of a page under docs/."""
    return (DOCS / f"{name}.rst").read_text(encoding="utf-8")


@cache
def blocks(page: Path) -> list[Block]:
    """The examples of a page, in order."""
    return list(_blocks(page))


def _blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        body = []
        deeper = found["indent"] + " "
        for line in text[found.end() :].splitlines():
            if line.strip() and not line.startswith(deeper):
                break
            body.append(line)
        code = textwrap.dedent("\n".join(body)).strip("\n") + "\n"
        first = text.count("\n", 0, found.end()) + 1
        yield Block(page, first, found["language"], code, _NOT_RUN.search(text[: found.start()]) is None)


def run_python(page: Path, names: dict[str, Any]) -> dict[str, Any]:
    """Run the Python examples of a page one after the other in one namespace, and return it."""
    for block in blocks(page):
        if block.language == "python" and block.is_run:
            file = f"<{block}>"
            linecache.cache[file] = (len(block.text), None, block.text.splitlines(keepends=True), file)
            exec(compile(block.text, file, "exec", dont_inherit=True), names)
            if block.path is not None and "__package__" in names:
                # The examples that follow may import from it.
                module = ModuleType(f"{names['__package__']}.{Path(block.path).stem}")
                vars(module).update(names, __name__=module.__name__)
                there = sys.modules.setdefault(module.__name__, module)
                # A page may have several parts of one file.
                vars(there).update({name: value for name, value in vars(module).items() if name not in vars(there)})
        elif block.language == "pycon" and block.is_run:
            examine(block, names)
    return names


def examine(block: Block, names: dict[str, Any]) -> None:
    """Run a pycon example, and compare what it prints with what it is said to print."""
    test = doctest.DocTestParser().get_doctest(block.text, names, str(block), str(block.page), block.line - 1)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    said: list[str] = []
    outcome = doctest.DocTestRunner(optionflags=flags, verbose=False).run(test, out=said.append, clear_globs=False)
    names.update(test.globs)
    assert not outcome.failed, "".join(said)
