"""Freezes the migrations of a release: ``python -m tools.migrations`` writes their digests beside this file.

A released migration has run on the databases of others, and never again there. So the list only grows: the command
refuses when a migration that is in the list was edited, renamed or deleted.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from .pythons import ROOT

# Lines as "sha256sum" writes and checks them. The first release makes the file.
RELEASED = Path("tools/migrations.sha256")


def digests(root: Path) -> dict[str, str]:
    """Return the SHA-256 of each migration of the package, by its path."""
    found = sorted((root / "django_delayq").glob("**/migrations/0*.py"))
    return {path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def released(root: Path) -> dict[str, str]:
    """Return the digests in the list, by path. Before the first release there is no list."""
    if not (root / RELEASED).exists():
        return {}
    lines = (root / RELEASED).read_text("utf-8").splitlines()
    return {path: digest for digest, path in (line.split("  ") for line in lines)}


def changed(root: Path) -> list[str]:
    """Return the paths of released migrations that are no longer there as they were released."""
    there = digests(root)
    return [path for path, digest in released(root).items() if there.get(path) != digest]


def freeze(root: Path) -> None:
    """Write all migrations into the list. A released one that has changed ends the program."""
    if paths := changed(root):
        sys.exit(f"Released migrations have changed: {', '.join(paths)}. Restore them, and add new ones instead.")
    lines = [f"{digest}  {path}\n" for path, digest in digests(root).items()]
    (root / RELEASED).write_text("".join(lines), "utf-8")


if __name__ == "__main__":
    freeze(ROOT)
