"""Finds the Pythons of this machine that the package supports."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def supported() -> list[str]:
    """The versions that the classifiers of the package name, such as ``3.11``."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)


def find(version: str) -> Path | None:
    """Return an interpreter of a version, from PATH or from pyenv; None where there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    folders = [Path(folder) for folder in os.environ.get("PATH", os.defpath).split(os.pathsep)]
    folders += sorted(pyenv.glob(f"versions/{version}.*/bin"))
    for folder in folders:
        program = folder / f"python{version}"
        # A virtual environment's is left out: it may see packages of the machine. A shim of pyenv may lead nowhere.
        if not (folder.parent / "pyvenv.cfg").exists() and program.is_file() and _version(program) == version:
            return program
    return None


def _version(program: Path) -> str:
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        return subprocess.run([program, "-c", code], capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
